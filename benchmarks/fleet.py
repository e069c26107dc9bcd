"""Simulate a training on 1 to 4,096 ranks that reads 10^8 to 10^11 rows from object storage, without the bytes.

Order and deal are the real ones (`memfeed.order`, `memfeed.loading.gather_tasks`). "steps" deals each global batch to
the ranks, as every loader does; "pieces" gives each rank blocks of its own, as placement="sharded" does.

Memory and time: a rank in a process of its own, forked after the imports, from the middle of an epoch on; tracemalloc
and the peak of resident memory, less what it was. Requests: the chunks of 4 MiB that the rows of whole nodes (8 ranks
share a cache) lie in, neighbours joined up to 16 MiB; counted here, not by the planner of `memfeed.remote`. Cache: a
node keeps the chunks that it fetched last, two epochs. Stalls: all ranks wait for the slowest at each window of 128
chunks; the latency of a request is drawn.

    python benchmarks/fleet.py
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import time
import tracemalloc
from collections import OrderedDict
from typing import Any

import numpy as np

from measure import Check, parser, show, table, write
from memfeed.loading.gather_tasks import tasks_of_order
from memfeed.order.choice import orders_of, piece_orders
from memfeed.order.pieces import Cut
from memfeed.order.shards import RankShards
from memfeed.store.manifest import CHUNK_BYTES

BATCH, STEPS = 256, 64
NODE_RANKS = 8
ROW_BYTES = 4096
MOST_JOINED = 4
BLOCK_ROWS = CHUNK_BYTES // ROW_BYTES  # 1,024, the most that a block has: one chunk
ROWS_PER_SECOND = 1000.0  # that a rank trains
S3_GETS_PER_SECOND = 5500
S3_SOURCE = "https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html"
MOST_BYTES = 50e6
# a latency is log-normal; one request in a thousand takes 20 times as long, and one in 100,000 is lost and sent again
# after 10 seconds
LATENCY = {"median": 0.03, "sigma": 0.6, "slow": 1e-3, "slow_factor": 20.0, "lost": 1e-5, "lost_seconds": 10.0}
IN_FLIGHT, WINDOW_CHUNKS = 32, 128
DEALS = ("steps", "pieces")


def order_of(deal: str, rows: int, ranks: int, shuffle: Any = "blocks", epoch: int = 0) -> Any:
    if deal == "pieces":
        return piece_orders(rows, shuffle, 0, BLOCK_ROWS, Cut(ranks, BATCH))(epoch)
    return orders_of(rows, shuffle, 0, BLOCK_ROWS)(epoch)


def tasks_of(order: Any, ranks: int, rank: int, at_once: int = 8) -> Any:
    """Return the gathers of a rank from the middle of an epoch on."""
    shards = RankShards(order.n, BATCH, rank, ranks, "drop")
    middle = order.n // 2 // shards.stride * shards.stride
    return tasks_of_order(order, shards, middle, None, at_once, repeats=False)


def one_rank(deal: str, rows: int, ranks: int, shuffle: Any) -> dict[str, float]:
    """Return what a rank takes; called in a process of its own."""

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def run(count: int) -> int:
        tasks = tasks_of(order_of(deal, rows, ranks, shuffle), ranks, ranks // 3)
        return sum(len(task.positions) for task in itertools.islice(tasks, count // 8))

    before = peak()
    began = time.perf_counter()
    run(8)
    first = time.perf_counter() - began
    tasks = tasks_of(order_of(deal, rows, ranks, shuffle), ranks, ranks // 3)
    next(tasks)
    began = time.perf_counter()
    steps = sum(len(task.positions) for task in itertools.islice(tasks, STEPS // 8))
    each = (time.perf_counter() - began) / max(steps, 1)
    resident = peak() - before
    tracemalloc.start()
    run(STEPS)
    return {
        "resident_bytes": resident,
        "traced_bytes": tracemalloc.get_traced_memory()[1],
        "first_seconds": first,
        "batch_seconds": each,
    }


def memory(sizes: list[int], worlds: list[int]) -> list[dict[str, Any]]:
    wanted = [(deal, rows, ranks, "blocks") for deal in DEALS for rows in sizes for ranks in worlds]
    wanted += [("steps", 10**6, ranks, True) for ranks in (worlds[0], worlds[-1])]
    found = []
    for deal, rows, ranks, shuffle in wanted:
        if rows < 4 * BATCH * ranks:
            continue
        found.append({"deal": deal, "rows": rows, "ranks": ranks, "shuffle": shuffle})
        read, written = os.pipe()
        if not (pid := os.fork()):
            os.write(written, json.dumps(one_rank(deal, rows, ranks, shuffle)).encode())
            os._exit(0)
        os.close(written)
        with open(read) as answer:
            found[-1] |= json.loads(answer.read())
        os.waitpid(pid, 0)
    return found


def requests(rows: int, ranks: int, deal: str) -> dict[str, float]:
    """Return what all ranks fetch, from some nodes of them over as many steps as a node needs for new windows."""
    local = min(ranks, NODE_RANKS)
    nodes, order = ranks // local, order_of(deal, rows, ranks)
    gets = fetched = read = 0
    sample = sorted({0, nodes // 2})
    # enough steps that a rank, or all ranks together, read some windows of 128 blocks
    steps = 2 * WINDOW_CHUNKS * BLOCK_ROWS // BATCH
    steps = min(steps if deal == "pieces" else max(8, 4 * steps // ranks), rows // (BATCH * ranks))
    for node in sample:
        absent = np.ones(-(-rows // BLOCK_ROWS), bool)
        tasks = [tasks_of(order, ranks, node * local + rank) for rank in range(local)]
        for _ in range(max(1, steps // 8)):
            now = [next(one, None) for one in tasks]
            if any(one is None for one in now):
                break
            ids = np.concatenate([one.ids for one in now])
            needed = np.unique(ids // BLOCK_ROWS)
            needed = needed[absent[needed]]
            absent[needed] = False
            read, fetched = read + len(ids), fetched + len(needed)
            runs = np.split(needed, np.flatnonzero(np.diff(needed) != 1) + 1) if len(needed) else []
            gets += sum(-(-len(run) // MOST_JOINED) for run in runs)
    return {
        "ranks": ranks,
        "gets_per_second": gets / read * ranks * ROWS_PER_SECOND,
        "bytes_per_row_byte": fetched * CHUNK_BYTES / (read * ROW_BYTES),
    }


def hit_rates(rows: int, ranks: int, parts: list[float]) -> dict[str, list[float]]:
    """Return the part of a second epoch's chunks that a node still has, for each part of the store that it keeps."""
    found: dict[str, list[float]] = {}
    local = min(ranks, NODE_RANKS)
    for deal in DEALS:
        visits = []  # the chunks of a node in each epoch, in the order of their first use
        for epoch in range(2):
            order = order_of(deal, rows, ranks, epoch=epoch)
            if deal == "pieces":
                chunks = np.concatenate([np.unique(order.rows_of(rank) // BLOCK_ROWS) for rank in range(local)])
                chunks = np.random.default_rng(epoch).permutation(np.unique(chunks))
            else:
                step = 8 * BLOCK_ROWS  # each node has rows of every block, if a window is more than a global batch
                ids = np.concatenate([order(at, at + 512) for at in range(0, rows, step)])
                _, first = np.unique(ids // BLOCK_ROWS, return_index=True)
                chunks = (ids // BLOCK_ROWS)[np.sort(first)]
            visits.append(chunks.tolist())
        found[deal] = []
        for part in parts:
            kept: OrderedDict[int, None] = OrderedDict()
            hits = 0
            for epoch, chunks in enumerate(visits):
                for chunk in chunks:
                    hits += epoch == 1 and chunk in kept
                    kept[chunk] = None
                    kept.move_to_end(chunk)
                    if len(kept) > part * rows // BLOCK_ROWS:
                        kept.popitem(last=False)
            found[deal].append(hits / len(visits[1]))
    return found


def latencies(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    drawn = LATENCY["median"] * np.exp(LATENCY["sigma"] * generator.standard_normal(shape))
    drawn *= np.where(generator.random(shape) < LATENCY["slow"], LATENCY["slow_factor"], 1.0)
    return drawn + np.where(generator.random(shape) < LATENCY["lost"], LATENCY["lost_seconds"], 0.0)


def epoch_time(ranks: int, ahead_steps: int, windows: int) -> float:
    """Return the time of an epoch over that of its steps alone, where each rank fetches a window of 128 chunks."""
    generator = np.random.default_rng(ranks)
    step = BATCH / ROWS_PER_SECOND
    window = WINDOW_CHUNKS * BLOCK_ROWS / ROWS_PER_SECOND
    stalls = 0.0
    for _ in range(windows):
        drawn = latencies(generator, (ranks, WINDOW_CHUNKS))
        busy = np.zeros((ranks, IN_FLIGHT))
        for chunk in range(WINDOW_CHUNKS):  # each request begins where one of those in flight has ended
            free = busy.argmin(1)
            busy[np.arange(ranks), free] += drawn[:, chunk]
        stalls += max(0.0, float(busy.max()) - ahead_steps * step)  # all wait for the slowest
    return 1 + stalls / (windows * window)


def main() -> None:
    made = parser("fleet", __doc__)
    options = made.parse_args()
    quick = options.quick
    sizes = [10**7] if quick else [10**8, 10**9, 10**10, 10**11]
    worlds = [1, 64] if quick else [1, 8, 64, 512, 4096]
    found = memory(sizes, worlds)
    largest = [one for one in found if one["rows"] == sizes[-1] and one["shuffle"] == "blocks"]
    fetching = {deal: [requests(sizes[0] if quick else 10**10, ranks, deal) for ranks in worlds] for deal in DEALS}
    parts = [0.1, 0.5] if quick else [0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0]
    hits = hit_rates(sizes[0], 64, parts)
    aheads = [0, 1, 8]
    times = {str(ahead): [epoch_time(ranks, ahead, 2 if quick else 20) for ranks in worlds] for ahead in aheads}
    flat = {
        deal: max(one["resident_bytes"] for one in largest if one["deal"] == deal)
        / min(one["resident_bytes"] for one in largest if one["deal"] == deal)
        for deal in DEALS
    }
    most = {deal: max(one["resident_bytes"] for one in largest if one["deal"] == deal) for deal in DEALS}
    at_most = next(one for one in fetching["pieces"] if one["ranks"] == worlds[-1])
    checks = [
        *(Check(f"memory per rank, {deal}, {sizes[-1]:.0e} rows", most[deal] / 1e6, 50, False, "MB") for deal in DEALS),
        *(Check(f"memory per rank, {deal}, most over least ranks", flat[deal], 2, False) for deal in DEALS),
        Check(
            f"GET requests, pieces, {worlds[-1]} ranks",
            at_most["gets_per_second"],
            S3_GETS_PER_SECOND,
            False,
            "a second",
        ),
    ]
    rows = [
        [f"{one['deal']}, {one['rows']:.0e} rows, {one['shuffle']}", f"{one['ranks']:,}"]
        + [f"{one[key] / 1e6:,.1f} MB" for key in ("resident_bytes", "traced_bytes")]
        + [f"{one['batch_seconds'] * 1e3:.2f} ms"]
        for one in found
    ]
    table("a rank", ["order", "ranks", "resident", "traced", "a batch"], rows)
    show("fleet", checks)
    about = {
        "batch_size": BATCH, "row_bytes": ROW_BYTES, "block_rows": BLOCK_ROWS, "worlds": worlds, "sizes": sizes,
        "node_ranks": NODE_RANKS, "rows_per_second": ROWS_PER_SECOND, "latency": LATENCY, "in_flight": IN_FLIGHT,
        "limit_source": S3_SOURCE, "limit": S3_GETS_PER_SECOND, "parts": parts, "aheads": aheads,
        "fetched_rows": sizes[0] if quick else 10**10, "cached_rows": sizes[0], "cached_ranks": 64,
    }  # fmt: skip
    figures = {"ranks": found, "requests": fetching, "hit_rates": hits, "epoch_time": times}
    write(options, about, figures, checks)


if __name__ == "__main__":
    main()
