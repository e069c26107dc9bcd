"""Write docs/benchmarks.md, its details and its charts from benchmarks/results/ and the reasons in missed.py.

python benchmarks/report.py
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import charts
from measure import RESULTS, listed
from missed import reasons
from summary import DETAILS, TOPICS, first_page

DOCS = Path(__file__).parents[1] / "docs"
Result = dict[str, Any]

PREFACE = """# Benchmarks: the details

The tables behind [benchmarks.md](benchmarks.md), by topic, written by `benchmarks/report.py`. Times are medians; ratios
are medians of the ratios of each round. The machine is named under each title. Below a table of targets is the reason
for each missed target, if it was measured; a line says so where it is an inference.
"""


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def targets(result: Result) -> str:
    """Return the table of targets, and below it the reason for each missed one."""
    rows = []
    for check in result["checks"]:
        sign = "≥" if check["at_least"] else "≤"
        verdict = "reached" if check["passed"] else "**missed**"
        found = f"{check['found']:,.2f} {check['unit']}"
        rows.append([check["what"], found, f"{sign} {check['limit']:.3g} {check['unit']}", verdict])
    why = [
        f"- **{names}**: {reason or 'the cause has not been measured'}.\n"
        for names, reason in reasons(result["benchmark"], result["checks"])
    ]
    return table(["", "found", "target", ""], rows) + ("\nMissed, because:\n\n" + "".join(why) if why else "")


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

{about["images"]:,} {what} decoded and resized to uint8 [3, {about["side"]}, {about["side"]}]. `memfeed.cache`
writes a store, with checksums and commit. The DataLoader reads the same dataset for one epoch and writes nothing.

{table(["", "time without fsync", "CPU time", "images/s", "fsync"], rows)}
{targets(result)}"""


def columnar(result: Result) -> str:
    about, median, synced = result["input"], result["median_seconds"], result["median_sync_seconds"]
    rows = [[name, milliseconds(t), milliseconds(synced[name])] for name, t in median.items()]
    return f"""## Columns in memory to a store

A TensorDict of {about["tensors"]} tensors, {about["dtype"]} {about["shape"]}, {about["bytes"] / 1e6:,.0f} MB in all.
memfeed's time includes the checksums of every byte and the commit. fsync is timed apart for all programs: it
did nothing while they ran, and was called afterwards for every file they wrote.

{table(["", "time without fsync", "fsync"], rows)}
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


def verify(result: Result) -> str:
    rows = [[name, f"{rate:.2f}"] for name, rate in result["gigabytes_per_second"].items()]
    return f"""## Verifying a store

`verify` compares every byte ({result["input"]["bytes"] / 1e6:,.0f} MB) with its checksum;
`read` reads the same files in order into one buffer. Cold: the files were removed from the page cache before each run.

{table(["", "GB/s"], rows)}
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

The long runs of `make torture`: how often each scenario disturbed stores and builds, and how many rows or stores were
lost ([reliability.md](reliability.md)).

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

Shuffled epochs, page cache warm. The bare loops with "one buffer" only copy rows: they fill one buffer again and again,
so the caller cannot keep a batch. A loop that holds a batch while the next one is made needs two buffers; "two buffers"
shows how much time that alone takes, because less data stays in the processor's caches.

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
    how = "a control group" if bounded["cgroup"] else "a limit that only memfeed knows: no control group could be made"
    return f"""## Cold epochs

Shuffled epochs of a store just opened. Its files were removed from the page cache before each epoch. The disk
belongs to a virtual machine, and its speed changes from minute to minute. All loops read the same files.

{chr(10).join(parts)}
A store of {orders["read"]["bytes"] / 1e6:,.0f} MB with {bounded["limit_bytes"] / 1e6:,.0f} MB of memory, page cache
included (limited by {how}). "read" reads the file in order. Resident memory includes mapped pages:

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
Anonymous and shared memory of a new process during an epoch, without the pages of mapped files:

{table(["store", "its size", "after the imports", "largest", "two batches", "beyond both"], memory)}
Two processes that each read the rows of one rank (page cache warm) are together {two["read"]:.2f} times as fast as one.
Two processes that only copy rows in order are {two["copy"]:.2f} times as fast.

{targets(result)}"""


def fleet(result: Result) -> str:
    about, worlds = result["input"], result["input"]["worlds"]
    memory = [
        [
            f"{one['deal']}, {one['rows']:.0e} rows, shuffle={'Blocks()' if one['shuffle'] == 'blocks' else True}",
            f"{one['ranks']:,}",
            f"{one['resident_bytes'] / 1e6:,.1f} MB",
            f"{one['traced_bytes'] / 1e6:,.1f} MB",
            milliseconds(one["first_seconds"]),
            f"{one['batch_seconds'] * 1e3:.3f} ms",
        ]
        for one in result["ranks"]
        if one["rows"] == about["sizes"][-1] or one["shuffle"] is True
    ]
    fetched = [
        [f"{one['ranks']:,}"]
        + [f"{result['requests'][deal][at][key]:,.{1 if key != 'gets_per_second' else 0}f}" for deal, key in columns]
        for columns in [
            [(deal, key) for deal in result["requests"] for key in ("gets_per_second", "bytes_per_row_byte")]
        ]
        for at, one in enumerate(result["requests"]["steps"])
    ]
    hits = [[deal, *(f"{found:.2f}" for found in result["hit_rates"][deal])] for deal in result["hit_rates"]]
    stalls = [
        [f"{ahead} batches", *(f"{one:.3f}" for one in times)] for ahead, times in result["epoch_time"]["times"].items()
    ]
    shapes = [
        [one["deal"], f"{one['row_bytes']:,}", str(one["block_chunks"])]
        + [f"{one['gets_per_second']:,.0f}", f"{one['bytes_per_row_byte']:.2f}"]
        for one in result["shapes"]
    ]
    firsts = ", ".join(f"{one:.1f} s" for one in result["epoch_time"]["first_seconds"][str(about["aheads"][-1])])
    latency = about["latency"]
    return f"""## Many ranks, simulated

The order, the deal, the read-ahead and the plan of the requests run for {worlds[0]:,} to {worlds[-1]:,} ranks, without
a byte of data: batches of {about["batch_size"]}, rows of {about["row_bytes"]:,} bytes, blocks of
{about["block_rows"]:,} rows (a chunk of 4 MiB). "steps" deals each global batch to the ranks, as every loader does;
"pieces" gives each rank blocks of its own, as `placement="sharded"` does.

![Many ranks](fleet.png)

The memory of a rank in a separate process, without the memory that the process had after the imports; the time to the
first batches, and of one batch after them:

{table(["", "ranks", "resident", "traced", "first", "a batch"], memory)}
The requests of all ranks, {about["fetched_rows"]:.0e} rows, {about["node_ranks"]} ranks sharing a cache,
{about["rows_per_second"]:,.0f} rows/s trained by each: GET requests a second, and bytes fetched for
each byte of a row that is read. An S3 prefix serves at least
{about["limit"]:,} GET requests a second ([Amazon's guide]({about["limit_source"]})). With "steps"
each node needs nearly all blocks of every window, so the same bytes are fetched by every node:

{table(["ranks", "steps, GET/s", "steps, bytes", "pieces, GET/s", "pieces, bytes"], fetched)}
With {worlds[-1]:,} ranks, by the bytes of a row (4,096 divide a chunk, 12,288 do not: a block then begins and ends
inside of chunks) and the chunks of a block (`shuffle=Blocks(rows)`):

{table(["", "bytes of a row", "chunks of a block", "GET/s", "bytes"], shapes)}
The part of a node's chunks in a second epoch that its cache still has, by the size of the cache relative to the store
({about["cached_ranks"]} ranks, {about["cached_rows"]:.0e} rows, the chunks fetched last are kept):

{table(["", *[f"{part:g}" for part in about["parts"]]], hits)}
The time of 1,024 steps with "pieces", divided by the time of training alone. The plan of a rank is replayed for all
ranks, each request with its own time; a step begins when the slowest rank has its batch. The loader looks
{about["aheads"][-1]} batches ahead, 32 requests at once. A latency is log-normal (median
{latency["median"] * 1e3:.0f} ms, sigma {latency["sigma"]}), and the bytes come at
{about["connection_bytes_per_second"] / 1e6:.0f} MB/s a request;
{latency["slow"]:.1%} of the requests take {latency["slow_factor"]:.0f} times as long, and {latency["lost"]:.3%} are
lost and sent again after {latency["lost_seconds"]:.0f} s. The first batch of the slowest rank comes after {firsts}:

{table(["read ahead", *[f"{one:,} ranks" for one in worlds]], stalls)}
{distance(result["distance"])}
{targets(result)}"""


def distance(found: Result) -> str:
    """Return the table of how far orders are from a uniform shuffle."""
    rows = [
        [name, str(one["block_rows"]), f"{one['neighbours']:,.1f}", f"{one['strangers']:.2f}"]
        + [f"{left:.3f}" for left in one["unseen"].values()]
        + [str(one["seen_half"] or "more"), f"{one['classes']:.0f}", f"{one['class_std']:.1f}"]
        for name, one in found["orders"].items()
    ]
    after = [f"unseen after {epochs}" for epochs in next(iter(found["orders"].values()))["unseen"]]
    columns = ["", "rows of a block", "neighbours", "strangers", *after, "half seen after", "classes", "spread"]
    return f"""How far "pieces" are from a uniform shuffle ({found["rows"]:,} rows, batches of {found["batch_size"]},
{found["epochs"]} epochs). "neighbours" and "strangers": how often two rows that are stored side by side, and two random
rows, are in one batch of a rank, relative to a uniform shuffle. "unseen": the part of the rows that a rank has not
read after so many epochs; then the epochs until it has read half. "classes": of {found["classes"]:,} classes stored one
after another, how many are in a batch of a rank; "spread": the standard deviation of the rows of a class in a rank's
epoch, relative to a uniform shuffle. A piece has at least 128 blocks, so blocks are smaller here than requested:

{table(columns, rows)}"""


def ray_conversion(result: Result) -> str:
    about, killed = result["input"], result["nodes_killed"]
    parts = []
    for what, found in result["scaling"].items():
        length = about["rows"] // 2
        rows = [
            [name, f"{t:.2f} s", f"{length / t:,.0f}", f"{found['times_as_fast'].get(name, 1.0):.2f}"]
            for name, t in found["median_seconds"].items()
        ]
        title = f"Samples that {what} for {about['sample_seconds'] * 1e3:.0f} ms, {length:,} of them"
        parts.append(f"{title}:\n\n{table(['', 'time', 'rows/s', 'times one task'], rows)}")
    return f"""## Conversion on Ray

A Ray cluster of {about["nodes"]} nodes with one CPU each, all on one machine with its cores and its disk. The processes
of the nodes run before the clock starts. More tasks than the machine has cores cannot make samples faster that compute.

{chr(10).join(parts)}
{about["killed"]} of the {about["nodes"]} nodes were killed when {killed["read_at_kill"]:,} of {killed["rows"]:,}
samples had been read. {killed["computed_twice"]:,} rows were computed twice, those that were in flight there
({killed["processes_that_lost_rows"]} processes); {killed["computed_more_often"]} more often. The conversion took
{killed["seconds"]:.1f} s. The fixed columns have the bytes of
those that `cache()` writes: {"yes" if killed["fixed_bytes_equal"] else "no"}; ragged rows are equal:
{"yes" if killed["ragged_rows_equal"] else "no"}; `verify` finds nothing: {"yes" if killed["verified"] else "no"}.

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


def transforms(result: Result) -> str:
    about = result["input"]
    rows = [
        [name, milliseconds(t), f"{result['images_per_second'][name]:,.0f}"]
        for name, t in result["median_seconds"].items()
    ]
    count = about["shape"][0]
    resized = [[name, milliseconds(t), f"{count / t:,.0f}"] for name, t in result["resized_median_seconds"].items()]
    way = "memfeed runs loops that numba compiled, but where a row says otherwise." if about.get("compiled") else ""
    return f"""## Transforms

Crop to {about["crop"]}, flip and normalise of {about["dtype"]} {about["shape"]} on the CPU, one batch. "Slice and cast"
does less: it neither flips nor normalises. {way}

{table(["", "time", "images/s"], rows)}
RandomResizedCrop (antialiased), flip and normalise. torchvision gets the boxes and does not draw them:

{table(["", "time", "images/s"], resized)}
{_alone_and_epochs(result)}
{targets(result)}"""


def _alone_and_epochs(result: Result) -> str:
    """Return the tables of resized crops alone and of epochs; nothing for results from before they were measured."""
    if "alone_median_seconds" not in result:
        return ""
    counts = {"alone_median_seconds": result["input"]["shape"][0], "epoch_median_seconds": result["epoch_images"]}
    alone, epochs = (
        [[name, milliseconds(t), f"{count / t:,.0f}"] for name, t in result[key].items()]
        for key, count in counts.items()
    )
    return f"""RandomResizedCrop of bytes alone, all with the same values. The bare loop calls torch's
kernel with crops whose channels lie together already:

{table(["", "time", "images/s"], alone)}
Warm shuffled epochs of {result["epoch_images"]:,} such images, batches of {result["input"]["shape"][0]}:

{table(["", "time", "images/s"], epochs)}"""


def curves(result: Result) -> str:
    points = result["curves"]
    loop, ours, once = "index_select loop", "memfeed.Loader", "memfeed, converted and read once"
    parts = []
    for axis, found in points.items():
        rows = []
        for one in found:
            rates = {
                load: {who: one["rows"] / t for who, t in one[load]["median_seconds"].items()}
                for load in ("quiet", "busy")
            }
            cells = [f"{rates[load][who]:,.0f}" for load in ("quiet", "busy") for who in (ours, loop)]
            again = f"{rates['quiet'][once] / rates['quiet'][loop]:.2f}" if once in rates["quiet"] else ""
            name = f"{one['at']:,} B" if axis in ("row size", "store size") else f"{one['at']:,}"
            rows.append([name, *cells, f"{one['quiet']['ratio']:.2f}", f"{one['busy']['ratio']:.2f}", again])
        columns = [axis, "memfeed, rows/s", "loop", "memfeed, busy", "loop, busy", "x", "x, busy", "read once"]
        if axis != "row size":
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        parts.append(table(columns, rows))
    return f"""## Rates against sizes and cores

Shuffled epochs, page cache warm, of `memfeed.Loader` and of a loop that copies the same rows with `torch.index_select`
into one buffer. Busy: a process spins on every core. "x": memfeed is x times as fast as the loop. "Read once": the rate
of converting a tensor in memory and reading the store for one epoch, as a share of the loop's rate over that store.
Rows have two columns (rows of 8 B: one). In the second table a column has 8 B a row, in the third a row has 4 KB, in
the fourth 196 KB.

![Rates](curves.png)

{chr(10).join(parts)}
"""


def imports(result: Result) -> str:
    rows = [
        [name, milliseconds(cpu), milliseconds(wall), f"{size / 2**20:.1f} MiB"]
        for name, (cpu, wall, size) in result["medians"].items()
    ]
    failed = "".join(f"\n{name} failed: {why}.\n" for name, why in result["failed"].items())
    return f"""## Imports

Each statement in a fresh process that has imported torch, page cache warm, bytecode written. The times of the other
sections do not hold any import.

{table(["", "CPU time", "time", "memory"], rows)}{failed}
{targets(result)}"""


def busy(result: Result) -> str:
    works, parts = result["works"], []
    for load in ("quiet", "busy"):
        large = works["large images"]
        times, cpu = large["median_seconds"][load], large["cpu_seconds"][load]
        rows = [[name, milliseconds(times[name]), milliseconds(cpu[name])] for name in times]
        parts.append(table([load, "epoch", "CPU time"], rows))
    gains, training = works["two processes"]["gains"], works["training"]["median_seconds"]
    steps = [[name, milliseconds(seconds / works["training"]["steps"])] for name, seconds in training.items()]
    return f"""## A busy machine

An epoch of {result["input"]["images"]:,} images [3, 256, 256]; busy: one more process a core spins all the time.

{chr(10).join(parts)}
Two processes that read at the same time are together {gains["loader"]:.2f} times as fast as one; bare copies by one
thread a process {gains["copies"]:.2f} times. A training step of a ResNet-18 on the CPU:

{table(["", "a step"], steps)}
{targets(result)}"""


def remote_faults(result: Result) -> str:
    rows = [
        [what, kind, f"{found['faults']:,}", ", ".join(f"{n:,} {came}" for came, n in found["came"].items()) or "right"]
        for what in ("reading", "pushing and pulling")
        for kind, found in result[what].items()
    ]
    return f"""## Faults of a network

`make remote-faults`: a proxy before an S3 server makes faults while 8 threads read chunks of a store, and while stores
are pushed and pulled. Each chunk and each store was compared: none was wrong, and no call had no end. Credentials that
have expired are an error at once; all other faults were overcome by retries. "latency" delays each answer.

{table(["while", "fault", "how many", "came"], rows)}"""


def remote(result: Result) -> str:
    about, parts = result["input"], []
    ours = list(result.get("memfeed", {}).items())
    small = result.get("small cache", {}).items()
    ours += [(f"a cache smaller than the store: {name}", found) for name, found in small]
    for name, found in ours:
        parts.append(table([name, ""], [[what, f"{value:,.2f}"] for what, value in found.items()]))
    peers = [
        [
            name,
            found["shuffles"],
            f"{found['first batch seconds']:.1f} s",
            f"{found['first epoch seconds']:.1f} s",
            f"{found['second epoch seconds']:.1f} s",
            f"{found['first epoch requests']:,}",
        ]
        for name, found in result.get("peers", {}).items()
    ]
    if peers:
        columns = ["one server, the same rows", "shuffles", "first batch", "first epoch", "second epoch", "requests"]
        parts.append(table(columns, peers))
    failed = "".join(f"\n{name} has no figures: {why[:200]}\n" for name, why in result["failed"].items())
    for name, machine in result.get("elsewhere", {}).items():
        parts.append(f"\n{name}: measured on {charts.machine_line({'machine': machine})}.\n")
    return f"""## Stores at an address

A server that speaks S3, with {about["bytes_per_second"] / 1e6:.0f} MB/s for all requests together and
{1000 * about["latency_seconds"]:.0f} ms before each answer. Rows of {about["row_bytes"]:,} bytes in batches of
{about["batch_size"]}. Each library trains from its own format of the same rows.

{chr(10).join(parts)}{failed}
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
        "There was no GPU: the tree is in CPU memory and stays there. **These are times of the walk through the tree "
        "only**, without copies (torch.save and torch.load always copy)."
        if about["walk_only"]
        else f"From pageable memory to {about['device']}. A time ends when all data has arrived."
    )
    return f"""## To a device

Trees of dicts, lists and tuples. {how}
TensorDict.from_dict(...).to does not look into lists: of {result["tensors_in_a_list"]} tensors in a list in a dict it
does not move {result["tensordict_leaves_behind"]}. It does less work in its time.

{chr(10).join(parts)}
{targets(result)}"""


def device(result: Result) -> str:
    about, median = result["input"], result["median_seconds"]
    cuda, tables = about["device"] != "cpu", []
    for name, rates in result["gigabytes_per_second"].items():
        tables.append(f"**{name}**\n\n{table(['', 'GB/s'], [[who, f'{rate:,.2f}'] for who, rate in rates.items()])}")
    times = []
    for what, found in median.items():
        count = about["images"] if what == "augmentation" else counted(what)
        for who, t in found.items():
            shown = microseconds(t) if t < 1e-3 else milliseconds(t)
            times.append([f"{what}: {who}", shown, f"{count / t:,.0f}" if count else ""])
    found = table(["", "found"], [[what, f"{value:,.2f}"] for what, value in result.get("without_targets", {}).items()])
    left_out = [f"{name} ({why})" for part in ("skipped", "failed") for name, why in result.get(part, {}).items()]
    net = "ResNet-50 at 224" if cuda else "a small ResNet at 32"
    without = f" Left out: {', '.join(left_out)}." if left_out else ""
    where = (
        f"To {about['device']}."
        if cuda
        else "**There was no GPU**: the same programs on the CPU, where nothing is transferred and no target applies. "
        "The figures show how much time the loader takes beside a model."
    )
    return f"""## From each placement{", on a GPU" if cuda else ""}

{where} Shuffled batches from page-locked memory, from the mapped store and from the device's memory, compared with
copies and a gather of as many bytes, and with other libraries. {about["images"]} images of uint8 [3, 256, 256],
cropped, flipped and normalised to bfloat16, channels last. Epochs of {net}, with batches of the loader, and with one
batch used again and again.{without}

{chr(10).join(tables)}
{table(["", "time", "images/s"], times)}
{_shares(result)}{targets(result) if cuda else found}"""


def counted(what: str) -> int:
    """Return how many images the name of a measurement says that it has; 0 if it says nothing."""
    number = re.search(r"(\d+) (?:images|photographs)", what)
    return int(number[1]) if number else 0


def _shares(result: Result) -> str:
    """Return a paragraph on the pixels of nvJPEG and on the waits of a training, if they were measured on a GPU."""
    lines = []
    if levels := result.get("nvjpeg_levels_mean_and_largest"):
        lines.append(
            f"The pixels of nvJPEG differ from those of libjpeg-turbo by {levels[0]:.2f} grey levels on average, and "
            f"by {levels[1]:.0f} at most."
        )
    if result.get("gap_shares"):
        waits, gaps = (statistics.median(result[share]) for share in ("wait_shares", "gap_shares"))
        lines.append(
            f"While the ResNet-50 was trained, the caller waited for batches for {waits:.3%} of the time, and "
            f"{gaps:.3%} of the device's time passed between two steps."
        )
    return " ".join(lines) + "\n\n" if lines else ""


def device_photographs(result: Result) -> str:
    about, parts = result["input"], []
    for what, found in result["median_seconds"].items():
        rows = [[who, f"{t:.2f} s", f"{counted(what) / t:,.0f}"] for who, t in found.items()]
        parts.append(table([what, "time", "images/s"], rows))
    return f"""## Photographs in training, on a GPU

A ResNet-18 is trained on {about["device"]} in bfloat16, in batches of 64: photographs from JPEG files (each file
{about["sizes"]["copies"]} times), a random resized crop to 224, a random flip, normalised. A first epoch has the work
before its first batch, as the start of {about["sizes"]["workers"]} worker processes and the proof of the cut; the
commit of the store, after its last batch, is not in it. Later epochs are warm. "One batch reused" reads nothing: no
loader can be faster. **The rates of jpeg:90 that the CPU decodes are from before two improvements**
([threads](notes/threads.md#decoding-on-16-cores)): an epoch of 2,048 photographs without training took 439 ms on such a
machine then (by hand), and takes the time in [the section above](#from-each-placement-on-a-gpu) since.

{chr(10).join(parts)}"""


def kernels(result: Result) -> str:
    rows = [
        [name, f"{one['instructions_a_value_before']}", f"{one['instructions_a_value']}", ", ".join(one["stores"])]
        for name, one in result["code"].items()
    ]
    return f"""## The compiled kernel

uint8 images to bfloat16, cropped, flipped and normalised: the instructions of the compiled code, per value, of the
kernel before its threads stored 16 bytes at once, and now. Counted in the machine code, without a GPU: this is not a
time. The tiles of now are the fastest of those that were timed on an H200, and not those with the fewest instructions
([transforms](notes/transforms.md#tiles-of-the-kernels)).

{table(["", "before", "now", "stores"], rows)}
{targets(result)}"""


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

Shuffled epochs, page cache warm, each library in its own process. Before it is timed, each must give every row
once, with its label. Then they run in turns.

![Rows per second](others.png)

{chr(10).join(parts)}{left_out}
Every library has the rows in its own format, uncompressed, on the local disk. tf.data, which reads files only
in order, and the plain DataLoader have them in memory. Each is set up as its documentation says. Where the
documentation leaves a choice, the fastest of the settings that were tried on two cores is used; see
`benchmarks/peers`. SPDL, Grain and tf.data have no format for rows: they pass row numbers, and NumPy or
TensorFlow gathers the rows of a batch. Most libraries are made for more than this, for example decoding, remote
storage or many nodes; none of that is measured here. LitData and WebDataset do not shuffle over all rows, which
is less work and does not replace a permutation. memfeed reads mapped files; these figures are for rows in the
page cache. The index_select loop reads the same mapped columns. The caller cannot keep its batches, nor those
of FFCV: both fill a few buffers again and again.

{targets(result) if result["checks"] else ""}"""


def augment(result: Result) -> str:
    about, versions, times = result["input"], result["machine"]["versions"], result["times_ours"]
    rates = sorted(result["images_per_second"].items(), key=lambda item: -item[1])
    rows = [
        [
            f"**{who}**" if who == "memfeed.Loader" else who,
            versions[who],
            f"{rate:,.0f}",
            "" if who == "memfeed.Loader" else f"{times[who]:.2f}",
        ]
        for who, rate in rates
    ]
    what = "Photographs" if about["photographs"] else "Made images"
    left_out = "".join(
        f"\n{title}: {', '.join(names)}.\n"
        for title, names in (("Not installed", result["missing"]), ("Failed", list(result["failed"])))
        if names
    )
    return f"""## Augmentation beside other libraries

{what}, uint8 [3, 256, 256] without compression: {about["rows"]:,} of them, shuffled, a random resized crop to 224, a
random flip, normalised to float32, batches of {about["batch_size"]}. Each library has its own process and draws its own
crops. memfeed, torchvision and DALI interpolate with antialiasing, memfeed and torchvision with equal values. FFCV
uses OpenCV's INTER_AREA, the loop by hand INTER_LINEAR, which skips pixels of large crops.

{table(["", "version", "images/s", "memfeed is x times as fast"], rows)}{left_out}
{targets(result)}"""


def memoize(result: Result) -> str:
    parts, shown = [], ", ".join(f"{name} {version}" for name, version in result["input"]["versions"].items())
    for what, found in result["works"].items():
        ours, rows = "memfeed.memoize", []
        for name in [*found["median_seconds"], *found["median_seconds_read"]]:
            if name not in [row[0] for row in rows]:
                rows.append([name])
                for part in ("", "_read"):
                    seconds, times = found[f"median_seconds{part}"].get(name), found[f"ratios{part}"].get(name)
                    rows[-1].append("" if seconds is None else microseconds(seconds))
                    rows[-1].append("" if times is None or name == ours else f"{times:,.2f}")
        mean = found["bytes"] / found["files"]
        size = f"{mean / 1e6:,.2f} MB" if mean > 1e4 else f"{mean:,.0f} bytes"
        columns = ["", "to have it", "memoize is x times as fast", "and to read it", "memoize is x times as fast"]
        parts.append(f"**{what}**, {found['files']} files, {size} each as an array\n\n{table(columns, rows)}")
    left_out = f"Not installed: {', '.join(result['missing'])}. " if result["missing"] else ""
    return f"""## Kept results of a function

A function from a path to an array, in one process, in a plain loop over the same files in shuffled order, page cache
warm; the times are of one file. "To read it": all bytes of the array are summed too, because a map is read only then.
"decode" is what a DataLoader's worker does in every epoch. ".npy" is what Ultralytics does with `cache="disk"`:
`np.load` of a file beside the image, if there is one. joblib keeps arrays in pickles, without `mmap_mode`; MONAI
returns tensors. {left_out}{shown}. [memoize.md](memoize.md) compares what else they do.

{chr(10).join(parts)}
{targets(result)}"""


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.1f} ms"


def coded_rows(result: Result) -> str:
    about, parts = result["input"]["rows"], []
    for name, forms in result["codecs"].items():
        rows = [
            [
                form,
                f"{found['ratio']:.2f}",
                f"{found['decode_rows_per_second']:,.0f}",
                f"{found['decode_bytes_per_second'] / 1e9:.2f} GB/s",
                f"{found['two_threads']:.2f}",
                f"{found['encode_rows_per_second']:,.0f}",
                "{mean:.2f}, {largest}, {psnr:.1f} dB".format(**found["error"]) if "error" in found else "none",
            ]
            for form, found in forms.items()
        ]
        columns = ["", "raw bytes / coded bytes", "rows decoded/s", "of raw bytes", "two threads", "rows encoded/s"]
        what = f"**{name}**: {about[name]['count']} rows, {about[name]['dtype']} {about[name]['shape']}"
        parts.append(f"{what}\n\n{table([*columns, 'error: mean, largest, PSNR'], rows)}")
    rows = [
        [f"{name}, {form}", code, f"{one['ratio']:.2f}", f"{one['decode_bytes_per_second'] / 1e9:.2f} GB/s",
         f"{one['taken']:.0%}"]
        for name, forms in result["filters"].items()
        for form, found in forms.items()
        for code, one in found.items()
    ]  # fmt: skip
    by_filter = table(["", "filter", "raw bytes / coded bytes", "decoded", "rows that have it"], rows)
    rows = [
        [f"{form}, {name}", f"{one['rows_per_second']:,.0f}", f"{one['two_threads']:.2f}",
         "same" if one["same_pixels"] else "**others**"]
        for form, libraries in result["libraries"].items()
        for name, one in libraries.items()
    ]  # fmt: skip
    by_library = table(["", "images/s", "two threads", "pixels"], rows)
    return f"""## Coded rows

Rates of one core by CPU time, and the rate of two threads as a multiple of one's, by the clock. Errors are in grey
levels, over all images. The time of a row has everything: the checks of its blob, and the write into the batch.

{chr(10).join(parts)}
**Filters**: all rows with one filter, after integers are narrowed. Rates are those of narrowed bytes.

{by_filter}
**Libraries that decode JPEG**, each to its own order of dims: the photographs as each form writes them.

{by_library}
{targets(result)}"""


def forms(result: Result) -> str:
    about, versions = result["input"], result["machine"]["versions"]
    rates, ratios = result["images_per_second"], result["ratios"]
    ours = "memfeed, jpeg:90"
    rows = [
        [
            f"**{who}**" if who.startswith("memfeed") else who,
            versions[who],
            f"{rate:,.0f}",
            f"{result['bytes'][who] / 1e6:,.1f} MB",
            f"{result['cpu_seconds_a_thousand'][who]:.2f} s",
            "" if who == ours else f"{ratios[who]:.2f}",
        ]
        for who, rate in sorted(rates.items(), key=lambda item: -item[1])
    ]
    columns = ["", "version", "images/s", "bytes", "CPU for 1,000 images", "jpeg:90 is x times as fast"]
    raced = table(columns, rows)
    left_out = "".join(
        f"\n{title}: {', '.join(names)}.\n"
        for title, names in (("Not installed", result["missing"]), ("Failed", list(result["failed"])))
        if names
    )
    proofs = result.get("proof_seconds", {})
    filled = table(
        ["first epoch", "", "of which the proof of the cut, for any number of photographs"],
        [
            [who, f"{t:.2f} s", f"{proofs[who]:.2f} s" if who in proofs else ""]
            for who, t in result["first_epoch_seconds"].items()
        ],
    )
    what = "Photographs of several sizes" if about["photographs"] else "Made images of one size"
    trained = result["training"]
    accuracies = table(
        ["trained on", "accuracy by seed"],
        [[form, ", ".join(f"{one:.3f}" for one in found)] for form, found in trained["accuracies"].items()],
    )
    return f"""## Forms of a store beside other libraries

{what}, {about["rows"]:,} of them, shuffled, a random resized crop to 224, a random flip, normalised to float32, batches
of {about["batch_size"]}, page cache warm, {about["workers"]} cores. Each library has its own process and draws its own
crops. The stored images have a short side of 256, except those of "encoded", DALI and DataLoader, which read the
original files. FFCV encodes the same pixels with the same quality; its subsampling of colors is 4:2:0 for both, as of
jpeg:90, where jpeg:95 has 4:4:4. FFCV resizes by OpenCV's INTER_AREA. DALI decodes the crop alone.

{raced}{left_out}
While a store is filled by the training ({about["workers"]} worker processes):

{filled}
{_forms_disk(result)}A small convolutional network on scikit-learn's digits, enlarged to 32 x 32, with noise:
{trained["rows"]:,} rows, {trained["epochs"]} epochs, tested on raw images. The means differ by
{trained["difference"]:.4f}; the seeds of raw are {trained["spread"]:.4f} apart.

{accuracies}
{targets(result)}"""


def _forms_disk(result: Result) -> str:
    found, crossings = result["disk_rows_per_second"], result["crossing_bytes_per_second"]
    if found is None:
        return "The disk was not limited: there are no control groups of blkio.\n\n"
    rates = list(next(iter(found.values())))
    rows = [
        [form, f"{result['bytes_a_row'][form] / 1e3:,.0f} kB", *(f"{of_form[rate]:,.0f}" for rate in rates)]
        for form, of_form in found.items()
    ]
    shown = table(["rows/s", "a row", *(f"{int(rate) / 1e6:,.0f} MB/s" for rate in rates)], rows)
    above = [f"{form} is faster than raw 256 below {rate / 1e6:,.0f} MB/s" for form, rate in crossings.items() if rate]
    return f"""From a disk that reads so many bytes a second (a control group limits it), page cache emptied before each
epoch:

{shown}
![Rows per second by the disk](forms.png)

By the rates from memory and the bytes of a row, {" and ".join(above) or "no coded form is faster at any rate"}.
Each figure from the disk is one epoch, the first that its loader has.

"""


SECTIONS: dict[str, Callable[[Result], str]] = {
    "tutorial": tutorial,
    "loader": loader,
    "others": others,
    "augment": augment,
    "cold": cold,
    "scale": scale,
    "fleet": fleet,
    "busy": busy,
    "curves": curves,
    "remote": remote,
    "remote-faults": remote_faults,
    "imports": imports,
    "convert": convert,
    "columnar": columnar,
    "ray": ray_conversion,
    "windows": windows,
    "verify": verify,
    "first_epoch": first_epoch,
    "memoize": memoize,
    "transforms": transforms,
    "weight": weight,
    "coded_rows": coded_rows,
    "forms": forms,
    "device-cuda": device,
    "device-cuda-photographs": device_photographs,
    "kernels": kernels,
    "sequences": sequences,
    "device-cpu": device,
    "to_device-cuda": to_device,
    "to_device": to_device,
    "torture": torture,
}
CHARTS = {
    "tutorial": charts.tutorial,
    "loader": charts.loader,
    "others": charts.others,
    "curves": charts.curves,
    "fleet": charts.fleet,
    "forms": charts.forms,
}


def report(results: Path, docs: Path) -> None:
    """Write the pages and the charts of all results in ``results`` to the directory ``docs``."""
    page, titles, found = [PREFACE], {}, {}
    docs.mkdir(parents=True, exist_ok=True)
    for topic, names in TOPICS.items():
        sources = {name: results / f"{name}.json" for name in names if (results / f"{name}.json").exists()}
        if sources:
            page.append(f"## {topic}\n")
        for name, source in sources.items():
            result = found[name] = charts.read(source)
            title, _, rest = SECTIONS[name](result).partition("\n\n")
            titles[name] = title.removeprefix("## ")
            if result["quick"]:
                rest = "*From a quick run, which only shows that the benchmark works. Ignore its figures.*\n\n" + rest
            page.append(f"#{title}\n\n*{charts.machine_line(result)}*\n\n{rest}")
            if name in CHARTS:
                CHARTS[name](source, docs / f"{name}.png")
    (docs / DETAILS).write_text("\n".join(page).rstrip() + "\n")
    (docs / "benchmarks.md").write_text(first_page(found, titles))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args()
    report(options.results, options.docs)


if __name__ == "__main__":
    main()
