"""Blocks of packed documents, against rows of a fixed column that hold the same bytes.

Both are epochs of a Loader with ``shuffle=True``. The packed store has documents of varying length, which it puts
together into blocks of tokens, document ids and position ids; the fixed one has such blocks on disk. The files are in
the page cache. The packed store is read with NumPy alone, and with the loops that numba compiles.

    python benchmarks/sequences.py
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import memfeed
from measure import Check, in_turns, medians, parser, ratio, seconds_of, show, table, write
from memfeed.store.copied_ranges import LOOPS

BATCH_SIZE = 32
# shortest and longest document in tokens; at most so many times the time of fixed rows
CORPORA = {"long documents": (1000, 4000, 1.1), "documents": (100, 1500, 1.1), "short documents": (10, 90, 1.1)}


def corpus(path: Path, shortest: int, longest: int, tokens: int) -> memfeed.Store:
    """Write documents of random tokens, int32, of ``shortest`` to ``longest`` tokens."""
    generator = torch.Generator().manual_seed(0)
    documents = []
    while tokens > 0:
        length = int(torch.randint(shortest, longest, (1,), generator=generator))
        documents.append({"input_ids": torch.randint(0, 50_000, (length,), generator=generator, dtype=torch.int32)})
        tokens -= length
    return memfeed.cache(documents, path, progress=False, fields={"input_ids": "jagged"})


def loader(store: memfeed.Store) -> memfeed.Loader:
    return memfeed.Loader(store, BATCH_SIZE, shuffle=True, seed=0)


@contextlib.contextmanager
def copies_by(loops: Any) -> Iterator[None]:
    """Let documents be copied by compiled loops, or with None by NumPy alone."""
    kept = LOOPS.get
    setattr(LOOPS, "get", lambda work=0: loops)  # noqa: B010
    try:
        yield
    finally:
        setattr(LOOPS, "get", kept)  # noqa: B010


def check_equal(packed: memfeed.Store, fixed: memfeed.Store) -> None:
    """Check that both stores have the same blocks, and that a shuffled epoch has the same tokens."""
    for one, other in zip(memfeed.Loader(packed, BATCH_SIZE), memfeed.Loader(fixed, BATCH_SIZE), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    sums = [sum(int(batch["input_ids"].numel()) for batch in loader(store)) for store in (packed, fixed)]
    assert sums[0] == sums[1]


def main() -> None:
    options = parser("sequences", __doc__).parse_args()
    if not options.quick:
        torch.set_num_threads(1)  # on a busy machine the threads of the fixed rows would wait for each other
    tokens, size, rounds = (200_000, 256, 3) if options.quick else (8_000_000, 2048, 15)
    works, checks, rows = {}, [], []
    compiled = LOOPS.wait()
    with tempfile.TemporaryDirectory() as directory:
        for name, (shortest, longest, limit) in CORPORA.items():
            path = Path(directory) / name.replace(" ", "-")
            packed = corpus(path, shortest, longest, tokens).packed("input_ids", size)
            fixed = memfeed.cache(packed, path.with_suffix(".fixed"), progress=False, allow="copy")
            for loops in (None, compiled):
                with copies_by(loops):
                    check_equal(packed, fixed)
            reader, fixed_reader = loader(packed), loader(fixed)

            def epoch(loops: Any, batches: memfeed.Loader) -> float:
                with copies_by(loops):
                    return seconds_of(lambda: sum(1 for _ in batches))

            runs = {
                "packed, numba": lambda reader=reader: epoch(compiled, reader),
                "packed": lambda reader=reader: epoch(None, reader),
                "fixed rows": lambda reader=fixed_reader: epoch(None, reader),
            }
            if compiled is None:
                del runs["packed, numba"]
            seconds = in_turns(runs, rounds)
            times = {which: ratio(seconds, which, "fixed rows") for which in runs if which != "fixed rows"}
            median = medians(seconds)
            works[name] = {
                "documents": [shortest, longest],
                "blocks": len(packed),
                "median_seconds": median,
                "ratio": times,
            } | {"tokens_per_second": {which: len(packed) * size / took for which, took in median.items()}}
            each = [f"{len(packed) * size / took / 1e6:,.0f} million tokens/s" for took in median.values()]
            found = [f"{one:.2f}" for one in times.values()]
            rows.append([f"{name} ({shortest} to {longest} tokens)", *each, *found])
            checks += [
                Check(f"{name}: {which} takes at most so many times as long", one, limit, at_least=False)
                for which, one in times.items()
            ]
    table(f"blocks of {size} tokens", ["", *runs, *(f"ratio, {which}" for which in times)], rows)
    show("packed blocks and fixed rows", checks)
    write(
        options, {"tokens": tokens, "block": size, "batch_size": BATCH_SIZE, "rounds": rounds}, {"works": works}, checks
    )


if __name__ == "__main__":
    main()
