"""Sections of ``report.py`` on the rates of batches: warm and cold epochs, first epochs, windows, documents."""

from __future__ import annotations

from report_tables import TIMES, Result, milliseconds, table, targets


def tutorial(result: Result) -> str:
    sections = []
    for name, part in result["parts"].items():
        printed = part["tutorial_printed"]
        sections.append(
            f"**{name}**: {part['images']} images, {part['file_bytes'] / 1e6:,.1f} MB of JPEG, stored as "
            f"{', '.join(part['row'])} in {part['store_bytes'] / 1e6:,.1f} MB. The tutorial printed "
            f"{printed[0]:,.0f} and {printed[1]:,.0f} images/s, {printed[1] / printed[0]:.1f} times.\n"
        )
        for size in result["input"]["batch_sizes"]:
            found = part[f"batch_{size}"]
            first, cold = found["first_epoch_images_per_second"], found["cold_images_per_second"]
            rows = [
                [who, f"{rate:,.0f}", f"{first[who]:,.0f}", f"{cold[who]:,.0f}" if who in cold else ""]
                for who, rate in found["images_per_second"].items()
            ]
            ratios = [f"{found[key]:,.1f}x" for key in ("ratio", "first_epoch_ratio", "cold_ratio")]
            rows.append(["memfeed / best DataLoader", *(f"**{ratio}**" for ratio in ratios)])
            columns = [f"batches of {size}, images/s", "warm", "first epoch", "cold"]
            sections.append(table(columns, rows))
    return f"""## The tensorclass tutorial

The four measurements of tensordict's ImageNet tutorial, on its own photographs. The DataLoader decodes and
transforms each photograph (train: RandomResizedCrop, flip, normalise). memfeed reads the store and, for train,
crops, flips and normalises each batch. Both shuffle train. The tutorial stores its normalised val floats in a
uint8 memmap, which changes their values; here they are stored as float32, unchanged, in four times the bytes.
Whole epochs are timed. *Warm* is the median of the epochs after the first. *First* is the first epoch of a new
loader, with the start of its workers. *Cold* is an epoch after the photographs or the store were removed from
the page cache (the disk belongs to a virtual machine and may have its own cache).

![Images per second](tutorial.png)

{chr(10).join(sections)}
{targets(result)}"""


def first_epoch(result: Result) -> str:
    about, parts = result["input"], []
    for what, found in result["seconds"].items():
        rows = [[name, *(f"{found[part][name]:.2f} s" for part in found)] for name in found["first"]]
        parts.append(f"{what}\n\n" + table(["", "first epoch", "second epoch", "three epochs"], rows))
    return f"""## The first epochs

Three shuffled epochs of {about["length"]:,} samples with {about["workers"]} worker processes: of a DataLoader, of a
store that is filled while it is read, and of a store that is written first. The time of the first epoch includes
the work before it, and the time of the three epochs includes the work after them, up to the finished store. There is
no training between the batches.

{chr(10).join(parts)}
{targets(result)}"""


def loader(result: Result) -> str:
    parts = []
    for name, found in result["works"].items():
        volume = found["rows"] * found["row_bytes"] / 1e9
        rows = [
            [
                who,
                milliseconds(t),
                f"{found['rows'] / t:,.0f}",
                f"{volume / t:.2f}",
                f"{found['ratios'][who]:,.2f}" if who != "memfeed.Loader" else "",
            ]
            for who, t in found["median_seconds"].items()
        ]
        parts.append(f"**{name}**: {found['about']}\n\n{table(['', 'epoch', 'rows/s', 'GB/s', TIMES], rows)}")
    return f"""## Warm epochs

Shuffled epochs, page cache warm. The bare loops with "one buffer" only copy rows: they fill one buffer again and again,
so the caller cannot keep a batch. A loop that holds a batch while the next one is made needs two buffers; "two buffers"
shows how much time that alone takes, because less data stays in the processor's caches.

![Rows per second](loader.png)

{chr(10).join(parts)}
{targets(result)}"""


def cold(result: Result) -> str:
    parts = []
    for name, found in result["works"].items():
        rows = [
            [who, f"{t:.3f} s", f"{found['bytes'] / t / 1e9:.2f}", f"{found['ratios'][who]:.2f}"]
            for who, t in found["median_seconds"].items()
        ]
        parts.append(f"**{name}**, {found['bytes'] / 1e6:,.0f} MB\n\n{table(['', 'epoch', 'GB/s', TIMES], rows)}")
    bounded = result["bounded"]
    orders = bounded["orders"]
    rows = [
        [
            name,
            f"{one['bytes_per_second'] / 1e9:.2f}",
            f"{one['bytes_per_second'] / orders['read']['bytes_per_second']:.2f}",
            f"{one['most_resident_bytes'] / 1e6:,.0f} MB",
        ]
        for name, one in orders.items()
    ]
    how = "a control group" if bounded["cgroup"] else "a limit that only memfeed knows: no control group could be made"
    return f"""## Cold epochs

Shuffled epochs of a store just opened. Its files were removed from the page cache before each epoch. The disk
belongs to a virtual machine, and its speed changes from minute to minute. All loops read the same files.

{chr(10).join(parts)}
A store of {orders["read"]["bytes"] / 1e6:,.0f} MB with {bounded["limit_bytes"] / 1e6:,.0f} MB of memory, page cache
included (limited by {how}). "read" reads the file in order. Resident memory includes mapped pages:

{table(["", "GB/s", "of reading in order", "most resident"], rows)}
{targets(result)}"""


def windows(result: Result) -> str:
    about, median = result["input"], result["median_seconds"]
    rows = [
        [name, milliseconds(t), f"{about['windows'] / t:,.0f}", f"{about['bytes'] / t / 1e9:.2f}"]
        for name, t in median.items()
    ]
    steps = ", ".join(f"{len(offsets)} of {name}" for name, offsets in about["offsets"].items())
    disk = about["bytes_on_disk"]
    return f"""## Windows

A made robot data set: each sample has windows of steps ({steps}), frames are uint8 {about["frame"]}, batches have
{about["batch_size"]} samples. `store.windows` keeps each row once ({disk["windows"] / 1e6:,.0f} MB); the stored windows
have each row as often as windows hold it ({disk["stored"] / 1e6:,.0f} MB). The DataLoader reads a Dataset that stacks
the rows of each window. All epochs are shuffled, the page cache is warm.

{table(["", "epoch", "windows/s", "GB/s"], rows)}
{targets(result)}"""


def sequences(result: Result) -> str:
    about = result["input"]
    works = result["works"]
    contenders = list(next(iter(works.values()))["median_seconds"])
    timed = [name for name in contenders if name != "fixed rows"]
    rows = [
        [
            name,
            "{} to {}".format(*found["documents"]),
            *(f"{found['tokens_per_second'][who] / 1e6:,.0f}" for who in contenders),
            *(f"{found['ratio'][who]:.2f}" for who in timed),
        ]
        for name, found in works.items()
    ]
    return f"""## Packed documents

Blocks of {about["block"]:,} tokens, {about["batch_size"]} in a batch, in one thread: documents that a packed store puts
together in a new order in every epoch, with and without numba, and rows of a fixed column that hold the same bytes
(tokens int32, document ids int32, position ids int64). Millions of tokens a second, whole epochs; the last columns are
the time of packed blocks divided by the time of fixed rows.

{table(["", "tokens of a document", *contenders, *(f"time of {name}" for name in timed)], rows)}
{targets(result)}"""
