"""Sections of ``report.py`` on what loading takes: memory and time by size, a busy machine, imports."""

from __future__ import annotations

from report_tables import Result, milliseconds, table, targets


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
