"""Writes docs/benchmarks.md and its charts from the JSON files in benchmarks/results/; nothing there is typed by hand.

python benchmarks/report.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import charts
from measure import RESULTS, listed

DOCS = Path(__file__).parents[1] / "docs"
Result = dict[str, Any]

PREFACE = """# Benchmarks

Written by `benchmarks/report.py` from the JSON files in `benchmarks/results/`; `make bench` measures anew and writes
both. Within a benchmark the contenders ran in turns, in one run, after being shown to give
equal results; times are medians, ratios are medians of the rounds' ratios. Compare the ratios: absolute times are those
of one machine, named under each title.
"""


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def targets(result: Result) -> str:
    rows = []
    for check in result["checks"]:
        sign = "≥" if check["at_least"] else "≤"
        verdict = "reached" if check["passed"] else "**missed**"
        found = f"{check['found']:,.2f} {check['unit']}"
        rows.append([check["what"], found, f"{sign} {check['limit']:.3g} {check['unit']}", verdict])
    return table(["target", "found", "asked", ""], rows)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.{0 if seconds > 0.1 else 1 if seconds > 0.001 else 2}f} ms"


def convert(result: Result) -> str:
    about, median, synced = result["input"], result["median_seconds"], result["median_sync_seconds"]
    busy, sync = result["median_cpu_seconds"], {name: f"{t:.2f} s" for name, t in synced.items()}
    what = "photographs" if about["real"] else "made-up photographs"
    rows = [
        [
            name,
            f"{t:.2f} s",
            f"{busy[name]:.2f} s",
            f"{about['images'] / t:,.0f}",
            sync.get(name, ""),
        ]
        for name, t in median.items()
    ]
    return f"""## Conversion

{about["images"]:,} {what} decoded and resized to uint8 [3, {about["side"]}, {about["side"]}]: writing a store,
checksums and commit included, against one epoch of the plain DataLoader over the same dataset, which writes nothing.

{table(["", "time without fsync", "CPU time", "images/s", "fsync"], rows)}
{targets(result)}"""


def columnar(result: Result) -> str:
    about, median, synced = result["input"], result["median_seconds"], result["median_sync_seconds"]
    rows = [[name, milliseconds(t), milliseconds(synced[name])] for name, t in median.items()]
    return f"""## Columns in memory to a store

A TensorDict of {about["tensors"]} tensors, {about["dtype"]} {about["shape"]}, {about["bytes"] / 1e6:,.0f} MB in all.
memfeed's time includes the checksums of every byte and the commit. fsync is counted apart, for
all of them alike: it returned at once while they ran, and was called for all that was written afterwards.

{table(["", "time without fsync", "fsync"], rows)}
{targets(result)}"""


def verify(result: Result) -> str:
    rows = [[name, f"{rate:.2f}"] for name, rate in result["gigabytes_per_second"].items()]
    return f"""## Verifying a store

Every byte against its checksum ({result["input"]["bytes"] / 1e6:,.0f} MB), and a plain read of the same files from
front to back into one buffer. Cold: the files were dropped from the page cache before each run.

{table(["", "GB/s"], rows)}
{targets(result)}"""


def torture(result: Result) -> str:
    rows = [
        [
            name,
            f"{found['seconds'] / 60:.0f}",
            str(found["seed"]),
            listed(found["counts"]),
            listed(found["losses"]) or "none",
        ]
        for name, found in result["scenarios"].items()
    ]
    return f"""## Torture

What the long runs of `make torture` did to stores and builds, and what was lost ([reliability.md](reliability.md)).

{table(["scenario", "minutes", "seed", "counts", "losses"], rows)}"""


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

Shuffled epochs, page cache warm. "One buffer" marks the bare loops that any loader comes down to: they fill one buffer
over and over, and give nothing to keep. A loop that holds a batch while the next is made needs two buffers, and "two
buffers" is what that alone costs in the processor's caches. The slides are "The fast train loops".

![Rows per second](loader.png)

{chr(10).join(parts)}
{targets(result)}"""


TIMES = "memfeed is x times as fast"


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
    how = "a control group" if bounded["cgroup"] else "memfeed's own belief only: no control group could be made"
    return f"""## Cold epochs

Shuffled epochs of a store just opened, the page cache emptied before each; the disk is a virtual machine's, and its
speed changes from minute to minute. Every loop reads the same files.

{chr(10).join(parts)}
A store of {orders["read"]["bytes"] / 1e6:,.0f} MB with {bounded["limit_bytes"] / 1e6:,.0f} MB of memory, page cache
included (by {how}); "read" is reading the file from front to back; resident memory counts mapped pages too:

{table(["", "GB/s", "of reading in order", "most resident"], rows)}
{targets(result)}"""


def scale(result: Result) -> str:
    sizes = [f"{n:.0e}" for n in result["input"]["sizes"]]
    first, later = (
        [
            [order, *(milliseconds(figures[n]) if n in figures else "" for n in sizes)]
            for order, figures in result[key].items()
        ]
        for key in ("first_batch_seconds", "batch_seconds")
    )
    memory = [
        [name, *(f"{m[key] / 1e6:,.1f} MB" for key in ("store", "imports", "most", "buffers", "beyond_buffers"))]
        for name, m in result["memory_bytes"].items()
    ]
    two = result["two_processes"]
    return f"""## What grows with the store

From `Loader(...)` to the first batch of a store just opened, int64 rows in sparse files, batches of
{result["input"]["batch_size"]}:

{table(["order", *[f"{n} rows" for n in sizes]], first)}
A batch after that:

{table(["order", *[f"{n} rows" for n in sizes]], later)}
Anonymous and shared memory of a fresh process over an epoch, pages of mapped files apart:

{table(["store", "its size", "after the imports", "most", "two batches", "beyond both"], memory)}
Two processes that read a rank's part each, warm, together {two["read"]:.2f} times the rate of one; two that only copy
the rows in order, {two["copy"]:.2f} times.

{targets(result)}"""


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

The four measurements of tensordict's ImageNet tutorial on its own photographs. The DataLoader decodes and transforms
each photograph (train: RandomResizedCrop, flip, normalise); memfeed reads the store and, for train, crops, flips and
normalises each batch. Train is shuffled on both sides. The tutorial keeps its normalised val floats in a uint8 memmap,
which destroys them; here they are float32, value for value, at four times the bytes. Whole epochs are timed: *warm* is
the median of the epochs after the first; *first* is the first epoch of a new loader, the start of workers included;
*cold* comes after the page cache was emptied of the photographs or the store (the disk below it is a virtual machine's
and may have a cache of its own).

![Images per second](tutorial.png)

{chr(10).join(sections)}
{targets(result)}"""


def transforms(result: Result) -> str:
    about = result["input"]
    rows = [
        [name, milliseconds(t), f"{result['images_per_second'][name]:,.0f}"]
        for name, t in result["median_seconds"].items()
    ]
    count = about["shape"][0]
    resized = [[name, milliseconds(t), f"{count / t:,.0f}"] for name, t in result["resized_median_seconds"].items()]
    return f"""## Transforms

Crop to {about["crop"]}, flip and normalise of {about["dtype"]} {about["shape"]} on the CPU, one batch. "Slice and cast"
neither flips nor normalises: it is the floor.

{table(["", "time", "images/s"], rows)}
RandomResizedCrop (antialiased), flip and normalise; torchvision is given the boxes, and does not draw them:

{table(["", "time", "images/s"], resized)}
{targets(result)}"""


def weight(result: Result) -> str:
    rows = []
    for name, found in result["works"].items():
        (ours, time), *others = found["median_cpu_seconds"].items()
        rows.append([name, ours, milliseconds(time), ""])
        for other, taken in others:
            low, high = found["ranges_of_ratios"][other]
            times = f"{found['ratios_to_ours'][other]:.2f} ({low:.2f} to {high:.2f})"
            rows.append(["", other, milliseconds(taken), times])
    about = result["input"]
    return f"""## The weight of transforms

{about["dtype"]} {about["shape"]} on the CPU with given parameters, in CPU time of one thread: memfeed, and torchvision
v2 and kornia {about["kornia"]} called per sample. The last column compares a time with the first one of its part: the
median of all rounds, and their range. kornia's time includes the casts from uint8 and back.

{table(["", "", "time", "times the first"], rows)}"""


def to_device(result: Result) -> str:
    about, parts = result["input"], []
    for name, found in result["works"].items():
        rows = [
            [who, f"{t * 1e6:,.0f} us", "" if who == "memfeed.to_device" else f"{found['ratios'][who]:,.2f}"]
            for who, t in found["median_seconds"].items()
        ]
        what = f"{found['leaves']} tensors, {found['bytes'] / 1e6:,.1f} MB"
        parts.append(f"**{name}**: {what}\n\n{table(['', 'time', TIMES], rows)}")
    how = (
        "No GPU was there: the tree is in CPU memory and stays there, so that **these are times of the walk through it "
        "alone**, and say nothing of copies (torch.save and torch.load copy in any case)."
        if about["walk_only"]
        else f"From pageable memory to {about['device']}; a time ends when everything has arrived."
    )
    return f"""## To a device

Trees of dicts, lists and tuples. {how}
TensorDict.from_dict(...).to takes a list for a value that is no tensor: of {result["tensors_in_a_list"]} tensors in
a list in a dict it leaves {result["tensordict_leaves_behind"]} where they were. Its time is for less work.

{chr(10).join(parts)}
{targets(result)}"""


def device(result: Result) -> str:
    about, median = result["input"], result["median_seconds"]
    cuda, tables = about["device"] != "cpu", []
    for name, rates in result["gigabytes_per_second"].items():
        tables.append(f"**{name}**\n\n{table(['', 'GB/s'], [[who, f'{rate:,.2f}'] for who, rate in rates.items()])}")
    times = [[f"{what}: {who}", milliseconds(t)] for what, found in median.items() for who, t in found.items()]
    found = table(["", "found"], [[what, f"{value:,.2f}"] for what, value in result.get("without_targets", {}).items()])
    where = (
        f"To {about['device']}."
        if cuda
        else "**No GPU was there**: the same contenders on the CPU, where nothing crosses and no target applies. It "
        "shows what the loader costs beside a model."
    )
    return f"""## From each placement{", on a GPU" if cuda else ""}

{where} Shuffled batches from page-locked memory, from the mapped store and from the device's memory, against bare
copies and a bare gather of as many bytes; {about["images"]} images of uint8 [3, 256, 256] cropped, flipped and
normalised to bfloat16, channels last; epochs of a small ResNet on 32 x 32 images, fed by the loader, and by one batch
again and again.

{chr(10).join(tables)}
{table(["", "time"], times)}
{targets(result) if cuda else found}"""


def others(result: Result) -> str:
    versions, exact = result["machine"]["versions"], result["exact_shuffle"]
    parts = []
    for name, part in result["works"].items():
        what = f"{part['rows']:,} uint8 {part['shape']} and an int64 label, batches of {part['batch_size']}"
        rows = [
            [
                f"**{who}**" if who == "memfeed.Loader" else who,
                versions[who],
                f"{rate:,.0f}",
                "" if who == "memfeed.Loader" else f"{part['ratios'][who]:,.2f}",
                "all rows" if exact[who] else "**within a buffer or block**",
            ]
            for who, rate in sorted(part["rows_per_second"].items(), key=lambda item: -item[1])
        ]
        columns = ["", "version", "rows/s", "memfeed is x times as fast", "shuffles"]
        parts.append(f"**{name}**: {what}\n\n{table(columns, rows)}")
    left_out = "".join(
        f"\n{title}: {', '.join(names)}.\n"
        for title, names in (("Not installed", result["missing"]), ("Failed", list(result["failed"])))
        if names
    )
    return f"""## Other loading libraries

Shuffled epochs, page cache warm, each contender in a process of its own. Before it is timed each has to give every
row once, with its label; then they run in turns.

![Rows per second](others.png)

{chr(10).join(parts)}{left_out}
Every peer has the rows in its own format, raw and on the local disk (tf.data, which reads files only in order, and the
plain DataLoader hold them in memory), and is set up as its documentation says for that; where its documentation leaves
a choice, the fastest of what was tried on two cores, as the files of `benchmarks/peers` tell. SPDL, Grain and tf.data
have no format for rows: they move row numbers, and rows are gathered by NumPy or TensorFlow, a batch at a time. Most of
the peers are made for more than this, as decoding, streaming from remote storage or many nodes, none of which is looked
at here. LitData and WebDataset do not shuffle over all rows, which is less work for them, and no substitute for a
permutation. memfeed reads mapped files: these figures are for rows that are in the page cache. The index_select loop
reads the same mapped columns; like FFCV, which has a few buffers that it fills again, it gives no batch to keep.

{targets(result) if result["checks"] else ""}"""


SECTIONS: dict[str, Callable[[Result], str]] = {
    "tutorial": tutorial,
    "loader": loader,
    "others": others,
    "cold": cold,
    "scale": scale,
    "convert": convert,
    "columnar": columnar,
    "verify": verify,
    "transforms": transforms,
    "weight": weight,
    "device-cuda": device,
    "device-cpu": device,
    "to_device-cuda": to_device,
    "to_device": to_device,
    "torture": torture,
}
CHARTS = {"tutorial": charts.tutorial, "loader": charts.loader, "others": charts.others}


def report(results: Path, docs: Path) -> None:
    """Every result that is there, as one page with its charts."""
    page = [PREFACE]
    for name, section in SECTIONS.items():
        source = results / f"{name}.json"
        if not source.exists():
            continue
        result = charts.read(source)
        title, _, rest = section(result).partition("\n\n")
        if result["quick"]:
            rest = "*From a quick run, which shows that the benchmark works: the figures mean nothing.*\n\n" + rest
        page.append(f"{title}\n\n*{charts.machine_line(result)}*\n\n{rest}")
        if name in CHARTS:
            CHARTS[name](source, docs / f"{name}.png")
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "benchmarks.md").write_text("\n".join(page).rstrip() + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args()
    report(options.results, options.docs)


if __name__ == "__main__":
    main()
