"""Sections of ``report.py`` on many ranks, conversion on a Ray cluster, and stores at an address."""

from __future__ import annotations

import charts
from report_tables import Result, milliseconds, table, targets


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
