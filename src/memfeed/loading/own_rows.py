"""Whether each rank has rows of its own, which are not divided among the ranks: the ranks compare their stores."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch.distributed

from memfeed.convert.fingerprint import hash_samples
from memfeed.convert.probe import probe_indices
from memfeed.errors import LoaderError
from memfeed.loading.drawn_seed import WAIT_SECONDS, LoaderName
from memfeed.loading.exchange import verdict_of_ranks
from memfeed.schema import codec
from memfeed.schema.tree import Flattener
from memfeed.store.store import Store

Kind = Literal["same", "own", "unknown"]
ANSWER_SECONDS = 20.0  # that rank 0 waits for the other ranks; it may be the only one that reads, to evaluate

_same: set[str] = set()  # digests of stores that all ranks were found to have
_told: set[Kind] = set()
_compared: Counter[str] = Counter()  # loaders, by their settings


def has_own_rows(name: LoaderName, store: Store, batches: int, *, may_differ: bool) -> bool:
    """Return True if the ranks of torch.distributed have different stores for a loader: each reads all rows of its own.

    Call it once for each loader, when its first epoch begins. A store that all ranks were found to have is not compared
    again: then no rank waits for another one.

    Args:
        name: of the loader: its settings, and how many with the same were made before.
        store: of the loader on this rank.
        batches: of an epoch of all its rows.
        may_differ: ranks may have different numbers of batches.

    Raises:
        LoaderError: on each rank, if each has its own rows and the numbers of batches differ; on one rank, if it has
            another store than rank 0, which did not wait for it, or if rank 0 does not read a loader like this one.
    """
    digest = _digest(store)
    if digest in _same:
        return False
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own = {"store": digest, "number": name.number, "batches": batches, "may differ": may_differ}
    _compared[name.reads] += 1
    prefix = f"memfeed/rows/{name.reads}/{_compared[name.reads]}"
    verdict = verdict_of_ranks(prefix, own, _judge, ANSWER_SECONDS, WAIT_SECONDS)
    if verdict is None:
        raise LoaderError(
            f"found that rank 0 reads no loader with {name.reads}, within {WAIT_SECONDS:g} s; expected one on every "
            f"rank, because rank {rank} would read one of {world_size} parts of the rows: for all of them pass "
            "ranks=(0, 1)"
        )
    if verdict["error"]:
        raise LoaderError(verdict["error"])
    kind: Kind = verdict["kind"]
    # a rank that was late: rank 0 has begun as if there were one store
    if kind == "unknown" and _kind([verdict["rank 0"], own], [0, rank]) == "own":
        raise LoaderError(
            f"found another store on rank {rank} than on rank 0, which did not wait longer than {ANSWER_SECONDS:g} s "
            "to compare them, and reads a part of its rows; expected ranks=(0, 1) for loaders of which each "
            "rank reads all rows"
        )
    if verdict["missing"] and rank == 0:
        print(
            f"memfeed: rank {verdict['missing'][0]} has not begun a loader with {name.reads} within "
            f"{ANSWER_SECONDS:g} s; rank 0 begins to read one of {world_size} parts of the rows: for all of them pass "
            "ranks=(0, 1)",
            file=sys.stderr,
        )
    if kind == "same":
        _same.add(digest)
    if kind == "own" and rank == 0 and kind not in _told:
        print(
            f"memfeed: each of the {world_size} ranks has a store of its own for a loader with {name.reads}, so each "
            f"reads all its rows: {batches:,} batches on rank 0. Until now len(loader) was that of a part: pass "
            "ranks=(0, 1) to have it right before the first epoch",
            file=sys.stderr,
        )
    _told.add(kind)
    return kind == "own"


def _judge(answers: Sequence[Any]) -> dict[str, Any]:
    """Return the kind of reading of the ranks, an error for all, the missing ranks, and the answer of rank 0."""
    missing = [rank for rank, answer in enumerate(answers) if answer is None]
    kind = "unknown" if missing else _kind(answers, range(len(answers)))
    error = ""
    if kind == "own" and not all(answer["may differ"] for answer in answers):
        counts = [answer["batches"] for answer in answers]
        most, least = counts.index(max(counts)), counts.index(min(counts))
        if counts[most] != counts[least]:
            error = (
                f"found a store of its own on each rank, with {counts[most]:,} batches on rank {most} and "
                f"{counts[least]:,} on rank {least}; expected the same number on all, because ranks that step together "
                "would wait for one that has no batch left: divide the rows evenly, or pass last='uneven' if your loop "
                "allows it"
            )
    return {"kind": kind, "error": error, "missing": missing, "rank 0": answers[0]}


def _kind(answers: Sequence[Any], ranks: Sequence[int]) -> Kind:
    """Return the kind of reading of some ranks: one store, or a store for each.

    It is unknown if they are other loaders of a program: not made in one order on all ranks, and not as a list of which
    each rank takes its own, `loaders[rank]`.
    """
    if len({answer["store"] for answer in answers}) == 1:
        return "same"
    numbers = [answer["number"] for answer in answers]
    is_one_place = len(set(numbers)) == 1 or len({n - r for n, r in zip(numbers, ranks, strict=True)}) == 1
    return "own" if is_one_place else "unknown"


def _digest(store: Store) -> str:
    """Return a digest of the rows; without a manifest, for which somebody hashed samples, of some of them."""
    if store._view.manifest is not None:
        return store._view.source_digest().partition("-")[0]  # without the skipped samples, which are not all known yet
    rows = probe_indices(len(store))
    take_apart = Flattener(store.schema.structure)
    packed = [codec.pack_sample(store.schema, take_apart(store[row]), frozenset(), row) for row in rows]
    return f"{len(store)} rows {hash_samples(store.schema, rows, packed)}"
