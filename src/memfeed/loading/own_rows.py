"""The rows that a rank reads alone: all of a store of its own, or a piece of one, with ``placement="sharded"``.

Before the first epoch the ranks compare their stores, and what each is to read.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch.distributed

from memfeed.errors import LoaderError
from memfeed.loading.gather_tasks import rows_of_run
from memfeed.loading.ranks import GRACE_SECONDS, WAIT_SECONDS, LoaderName, is_joined, verdict_of_ranks
from memfeed.loading.settings import Settings
from memfeed.order.orders import Order
from memfeed.order.pieces import RankCut, RankPieces, RankShards
from memfeed.schema import codec
from memfeed.schema.codec import Int64Array
from memfeed.schema.tree import Flattener
from memfeed.store.store import Store
from memfeed.system import machine
from memfeed.system.messages import format_bytes

Kind = Literal["same", "own", "unknown"]
ANSWER_SECONDS = 20.0  # that rank 0 waits for the other ranks; it may be the only one that reads, to evaluate
BEGIN_SECONDS = 600.0  # that a rank waits for the others to begin their first epoch
RUN_STEPS = 64  # steps of a rank whose rows are found together

_same: set[str] = set()  # digests of stores that all ranks were found to have
_told: set[Kind] = set()
_asked = itertools.count()  # how often the ranks were asked: the same on each
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
    from memfeed.convert.fingerprint import hash_samples  # loaders of stores need no conversion
    from memfeed.convert.probe import probe_indices

    rows = probe_indices(len(store))
    take_apart = Flattener(store.schema.structure)
    packed = [codec.pack_sample(store.schema, take_apart(store[row]), frozenset(), row) for row in rows]
    return f"{len(store)} rows {hash_samples(store.schema, rows, packed)}"


class RankRows(NamedTuple):
    """The rows that a rank keeps: those it reads in an epoch from ``row`` on."""

    epoch: int
    seed: int
    shards: RankShards
    cut: RankCut
    row: int

    @property
    def is_own(self) -> bool:
        """Return True if the epoch is cut for these ranks: then this rank reads one of its pieces."""
        own = self.cut.pieces == self.shards.world_size and self.cut.batch_size == self.shards.batch_size
        return own and not self.row % self.shards.stride

    def whole(self) -> RankRows:
        """Return the piece from the beginning of the epoch, if it is one of the epoch's; else as it is."""
        return self._replace(row=0) if self.is_own else self

    def covers(self, other: RankRows) -> bool:
        """Return True if all rows of ``other`` are kept with this one."""
        is_later = other.row >= self.row and not (other.row - self.row) % self.shards.stride
        return is_later and other._replace(row=self.row) == self


def rows_of_rank(order: Order, piece: RankRows, store: Store) -> Int64Array:
    """Return the rows of the base store that a rank reads, ascending, each once."""
    shards, rows = piece.shards, []
    begin = piece.row
    if piece.is_own and isinstance(order, RankPieces):
        rows.append(order.rows_of(shards.rank))
        begin = shards.rows - shards.rows % shards.stride  # the rows that make no whole step may be of other pieces
    for run in shards.runs(begin, RUN_STEPS):
        starts = run.start + run.stride * np.arange(run.steps)
        rows.append(rows_of_run(order, run, (starts[:, None] + np.arange(run.size)).ravel()))
    found = np.concatenate([np.empty(0, np.int64), *rows])
    if len(rows) != 1 or not piece.is_own or not store._view.has_all_rows:
        found = np.unique(found if store._view.has_all_rows else store._view.base_rows(found))
    return found


def agree(
    store: Store,
    settings: Settings,
    shards: RankShards,
    reads: Mapping[str, Any],
    failure: LoaderError | None,
    ram: int,
) -> None:
    """Raise LoaderError on every rank if one of them failed, if they read different things, or if one is missing.

    ``reads`` says what this rank reads, ``ram`` the bytes of memory that it will keep. Ranks that were given as
    ``ranks=``, or by the launcher alone, are not asked.
    """
    if settings.rank is None and is_joined() and shards.world_size > 1:
        fields = ", ".join(f"{field.name} {field.describe()}" for field in store.schema)
        own = {"store": store.digest, "rows": len(store), "fields": fields, "batch_size": shards.batch_size, **reads}
        answer = {
            "reads": {**own, "last rows": shards.last},
            "failure": "" if failure is None else str(failure),
            "host": machine.host_name(),
            "ram": ram,
            "free": machine.memory_limit(),
        }
        prefix, longest = f"memfeed/sharded/{next(_asked)}", BEGIN_SECONDS + GRACE_SECONDS
        try:
            verdict = verdict_of_ranks(prefix, answer, _verdict, BEGIN_SECONDS, longest)
        except RuntimeError as error:  # the store of the group is gone, with its rank
            raise LoaderError(f"{_missing([0])} ({str(error)[:100]})") from error
        if verdict is None:
            verdict = _missing([0])
        if verdict and failure is None:
            raise LoaderError(verdict)
    if failure is not None:
        raise failure


def _verdict(answers: Sequence[Any]) -> str:
    """Return why the ranks cannot begin; empty if they can."""
    if missing := [rank for rank, answer in enumerate(answers) if answer is None]:
        return _missing(missing)
    for rank, answer in enumerate(answers):
        if answer["failure"]:
            return f"rank {rank} cannot begin: {answer['failure']}"
    for rank, answer in enumerate(answers):
        for name, wanted in answers[0]["reads"].items():
            if (found := answer["reads"].get(name)) != wanted:
                return (
                    f"found {name} {str(found)[:80]} on rank {rank}, and {str(wanted)[:80]} on rank 0; expected the "
                    'same on every rank: placement="sharded" gives each a piece of one store'
                )
    needed: dict[str, int] = defaultdict(int)
    for answer in answers:
        host = answer["host"]
        needed[host] += answer["ram"]
        if needed[host] > answer["free"]:
            return (
                f"found {format_bytes(answer['free'])} of free memory on {host}, whose ranks keep "
                f"{format_bytes(needed[host])} or more; expected their pieces to fit: use more machines, or "
                'placement="mapped"'
            )
    return ""


def _missing(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return (
        f'found no epoch with placement="sharded" begun on rank {named} within {BEGIN_SECONDS:g} s; expected it on '
        "every rank of the process group: look for the first error in their logs, or pass ranks=(rank, world_size)"
    )
