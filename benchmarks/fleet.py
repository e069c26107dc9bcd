"""Simulate a training on 1 to 4,096 ranks that reads 10^8 to 10^11 rows from object storage, without the bytes.

The order, the deal, the read-ahead and the plan of the requests are the real ones (fleet_plan.py). "steps" deals each
global batch to the ranks, as every loader does; "pieces" gives each rank blocks of its own, as placement="sharded"
does.

Memory and time: a rank in a process of its own, forked after the imports, from the middle of an epoch on; tracemalloc
and the peak of resident memory, less what it was. Requests: of the ranks of a node (8, which share a cache), over whole
windows of blocks. Cache: a node keeps the chunks that it used last, two epochs. Epoch time: the plan of a rank
("pieces"), replayed for all ranks with latencies of their own; all begin a step together. Distance: how far the order
of "pieces" is from a uniform shuffle (fleet_distance.py).

    python benchmarks/fleet.py
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import time
import traceback
import tracemalloc
from collections import OrderedDict
from typing import Any

import numpy as np

from fleet_distance import distances
from fleet_plan import Data, Node, order_of, replay
from measure import Check, parser, show, table, write
from memfeed.loading import readahead

NODE_RANKS = 8
ROWS_PER_SECOND = 1000.0  # that a rank trains
S3_GETS_PER_SECOND = 5500
S3_SOURCE = "https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html"
MOST_BYTES = 50e6
# a latency is log-normal; one request in a thousand takes 20 times as long, and one in 100,000 is lost and sent again
# after 10 seconds
LATENCY = {"median": 0.03, "sigma": 0.6, "slow": 1e-3, "slow_factor": 20.0, "lost": 1e-5, "lost_seconds": 10.0}
CONNECTION_BYTES_PER_SECOND = 85e6  # the same guide: one request at a time for each 85 to 90 MB/s
DEALS = ("steps", "pieces")
STEPS = 64
WINDOW_BLOCKS = 128
# how the requests of 4,096 ranks can be fewer: the deal, the bytes of a row (that divide a chunk or do not), the chunks
# of a block
SHAPES = [("steps", 4096, 1), ("pieces", 4096, 1), ("pieces", 4096, 4), ("pieces", 12288, 1), ("pieces", 12288, 4)]


def one_rank(deal: str, data: Data, ranks: int, shuffle: Any) -> dict[str, float]:
    """Return what a rank takes; called in a process of its own."""

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def run(count: int) -> None:
        rank = Node(data, deal, ranks, ranks // 3, 1, shuffle).ranks[0]
        for _ in range(count):
            rank.step()

    before = peak()
    began = time.perf_counter()
    run(1)
    first = time.perf_counter() - began
    rank = Node(data, deal, ranks, ranks // 3, 1, shuffle).ranks[0]
    rank.step()
    began = time.perf_counter()
    steps = sum(rank.step() is not None for _ in range(STEPS))
    each = (time.perf_counter() - began) / max(steps, 1)
    resident = peak() - before
    tracemalloc.start()
    run(STEPS // 8)
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
        data = Data(rows)
        if rows < 4 * data.batch_size * ranks:
            continue
        found.append({"deal": deal, "rows": rows, "ranks": ranks, "shuffle": shuffle})
        read, written = os.pipe()
        if not (pid := os.fork()):
            try:
                os.write(written, json.dumps(one_rank(deal, data, ranks, shuffle)).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)  # never back into the caller's code
        os.close(written)
        with open(read) as answer:
            found[-1] |= json.loads(answer.read())
        os.waitpid(pid, 0)
    return found


def requests(data: Data, ranks: int, deal: str, quick: bool) -> dict[str, float]:
    """Return what all ranks request, from the plan of some of them over whole windows of blocks.

    With "pieces" ranks of a node have no chunk in common: one is enough.
    """
    local = 1 if deal == "pieces" else min(ranks, NODE_RANKS)
    window = WINDOW_BLOCKS * data.block_rows // data.batch_size  # steps in which a rank reads as many rows
    own = window if deal == "pieces" else -(-window // ranks)
    told = readahead.ROWS_AT_ONCE // data.batch_size  # batches that are asked for together
    count = 2 * told if quick else -(-2 * max(own, told) // told) * told
    steps = Node(data, deal, ranks, ranks // local // 2 * local, local).steps()
    next(steps)  # what is read ahead at the beginning
    gets = fetched = done = 0
    for ranks_of_step in itertools.islice(steps, count):
        done += 1
        for step in ranks_of_step:
            gets += len(step.asked)
            fetched += sum(one.stop - one.start for _, one in step.asked)
    read = max(done, 1) * local * data.batch_size
    return {
        "ranks": ranks,
        "steps": done,
        "gets_per_second": gets / read * ranks * ROWS_PER_SECOND,
        "bytes_per_row_byte": fetched / (read * data.row_bytes),
    }


def hit_rates(data: Data, ranks: int, parts: list[float]) -> dict[str, list[float]]:
    """Return the part of a second epoch's chunks that a node still has, for each part of the store that it keeps."""
    found: dict[str, list[float]] = {}
    rows, block_rows = data.rows, data.block_rows
    local = min(ranks, NODE_RANKS)
    for deal in DEALS:
        visits = []  # the chunks of a node in each epoch, in the order of their first use
        for epoch in range(2):
            order = order_of(data, deal, ranks, epoch=epoch)
            if deal == "pieces":
                chunks = np.concatenate([np.unique(order.rows_of(rank) // block_rows) for rank in range(local)])
                chunks = np.random.default_rng(epoch).permutation(np.unique(chunks))
            else:
                step = 8 * block_rows  # each node has rows of every block, if a window is more than a global batch
                ids = np.concatenate([order(at, at + 512) for at in range(0, rows, step)])
                _, first = np.unique(ids // block_rows, return_index=True)
                chunks = (ids // block_rows)[np.sort(first)]
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
                    if len(kept) > part * rows // block_rows:
                        kept.popitem(last=False)
            found[deal].append(hits / len(visits[1]))
    return found


def seconds_of_requests(seed: int) -> Any:
    """Return a function that draws the seconds of requests for so many bytes, float [k]."""
    generator = np.random.default_rng(seed)

    def draw(size: int, count: int) -> Any:
        drawn = LATENCY["median"] * np.exp(LATENCY["sigma"] * generator.standard_normal(count))
        drawn *= np.where(generator.random(count) < LATENCY["slow"], LATENCY["slow_factor"], 1.0)
        drawn += np.where(generator.random(count) < LATENCY["lost"], LATENCY["lost_seconds"], 0.0)
        return drawn + size / CONNECTION_BYTES_PER_SECOND

    return draw


def epoch_times(data: Data, worlds: list[int], aheads: list[int], steps: int) -> dict[str, Any]:
    """Return the time of steps over that of training alone, and the seconds to the first batch, by batches ahead."""
    found: dict[str, Any] = {"times": {}, "first_seconds": {}}
    kept = readahead.ROWS_AHEAD, readahead.ROWS_AT_ONCE
    for ahead in aheads:
        readahead.ROWS_AHEAD = ahead * data.batch_size
        readahead.ROWS_AT_ONCE = min(kept[1], readahead.ROWS_AHEAD // 2)
        plan = list(itertools.islice(Node(data, "pieces", worlds[-1], 0, 1).steps(), steps))
        step = data.batch_size / ROWS_PER_SECOND
        rows = [replay(plan, ranks, step, seconds_of_requests(ranks)) for ranks in worlds]
        found["first_seconds"][str(ahead)], found["times"][str(ahead)] = (list(one) for one in zip(*rows, strict=True))
    readahead.ROWS_AHEAD, readahead.ROWS_AT_ONCE = kept
    return found


def main() -> None:
    made = parser("fleet", __doc__)
    options = made.parse_args()
    quick = options.quick
    sizes = [10**7] if quick else [10**8, 10**9, 10**10, 10**11]
    worlds = [1, 64] if quick else [1, 8, 64, 512, 4096]
    found = memory(sizes, worlds)
    fetched = Data(sizes[-1])
    fetching = {deal: [requests(fetched, ranks, deal, quick) for ranks in worlds] for deal in DEALS}
    shapes = [
        {"deal": deal, "row_bytes": row_bytes, "block_chunks": chunks}
        | requests(fetched._replace(row_bytes=row_bytes, block_chunks=chunks), worlds[-1], deal, quick)
        for deal, row_bytes, chunks in SHAPES
    ]
    parts = [0.1, 0.5] if quick else [0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0]
    hits = hit_rates(Data(sizes[0]), 64, parts)
    aheads = [1, 8, readahead.ROWS_AHEAD // fetched.batch_size]
    times = epoch_times(fetched, worlds, aheads, 4 if quick else 1024)
    distance = distances(quick)
    checks = checks_of(found, sizes[-1], shapes, worlds[-1], times["times"][str(aheads[-1])][-1])
    rows = [
        [f"{one['deal']}, {one['rows']:.0e} rows, {one['shuffle']}", f"{one['ranks']:,}"]
        + [f"{one[key] / 1e6:,.1f} MB" for key in ("resident_bytes", "traced_bytes")]
        + [f"{one['batch_seconds'] * 1e3:.2f} ms"]
        for one in found
    ]
    table("a rank", ["order", "ranks", "resident", "traced", "a batch"], rows)
    show("fleet", checks)
    about = {
        "batch_size": fetched.batch_size, "row_bytes": fetched.row_bytes, "block_rows": fetched.block_rows,
        "worlds": worlds, "sizes": sizes, "node_ranks": NODE_RANKS, "rows_per_second": ROWS_PER_SECOND,
        "latency": LATENCY, "connection_bytes_per_second": CONNECTION_BYTES_PER_SECOND, "limit_source": S3_SOURCE,
        "limit": S3_GETS_PER_SECOND, "parts": parts, "aheads": aheads, "fetched_rows": fetched.rows,
        "cached_rows": sizes[0], "cached_ranks": 64,
    }  # fmt: skip
    figures = {
        "ranks": found, "requests": fetching, "shapes": shapes, "hit_rates": hits, "epoch_time": times,
        "distance": distance,
    }  # fmt: skip
    write(options, about, figures, checks)


def checks_of(
    found: list[dict[str, Any]], most_rows: int, shapes: list[dict[str, Any]], ranks: int, epoch: float
) -> list[Check]:
    """Return the figures that have a target."""
    checks = []
    for deal in DEALS:
        resident = [
            one["resident_bytes"]
            for one in found
            if (one["deal"], one["rows"], one["shuffle"]) == (deal, most_rows, "blocks")
        ]
        checks += [
            Check(f"memory per rank, {deal}, {most_rows:.0e} rows", max(resident) / 1e6, MOST_BYTES / 1e6, False, "MB"),
            Check(f"memory per rank, {deal}, most over least ranks", max(resident) / min(resident), 2, False),
        ]
    checks += [
        Check(
            f"GET requests, {one['deal']}, rows of {one['row_bytes']:,} bytes, blocks of {one['block_chunks']} chunks, "
            f"{ranks} ranks",
            one["gets_per_second"],
            S3_GETS_PER_SECOND,
            False,
            "a second",
        )
        for one in shapes
    ]
    return [*checks, Check(f"epoch / its steps alone, pieces, {ranks} ranks", epoch, 1.05, False)]


if __name__ == "__main__":
    main()
