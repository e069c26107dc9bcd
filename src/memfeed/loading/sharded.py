"""The rows that a rank keeps with ``placement="sharded"``, and the agreement of the ranks before the first of them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.distributed

from memfeed.errors import LoaderError
from memfeed.loading.exchange import GRACE_SECONDS, verdict_of_ranks
from memfeed.loading.gather_tasks import rows_of_run
from memfeed.loading.settings import Settings
from memfeed.order.orders import Order
from memfeed.order.pieces import RankCut, RankPieces, RankShards
from memfeed.schema.codec import Int64Array
from memfeed.store.store import Store
from memfeed.system import machine
from memfeed.system.messages import format_bytes

ANSWER_SECONDS = 600.0  # that a rank waits for the others to begin their first epoch
RUN_STEPS = 64  # steps of a rank whose rows are found together

_asked = itertools.count()  # how often the ranks were asked: the same on each


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


def sample_of_piece(store: Store, shards: RankShards) -> Int64Array:
    """Return as many rows as a rank keeps at most, to find their bytes."""
    most = -(-len(store) // shards.world_size) + shards.batch_size
    return store._view.base_rows(np.arange(min(most, len(store))))


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
    joined = settings.rank is None and torch.distributed.is_available() and torch.distributed.is_initialized()
    if joined and shards.world_size > 1:
        fields = ", ".join(f"{field.name} {field.describe()}" for field in store.schema)
        own = {"store": store.digest, "rows": len(store), "fields": fields, "batch_size": shards.batch_size, **reads}
        answer = {
            "reads": {**own, "last rows": shards.last},
            "failure": "" if failure is None else str(failure),
            "host": machine.host_name(),
            "ram": ram,
            "free": machine.memory_limit(),
        }
        prefix, longest = f"memfeed/sharded/{next(_asked)}", ANSWER_SECONDS + GRACE_SECONDS
        try:
            verdict = verdict_of_ranks(prefix, answer, _verdict, ANSWER_SECONDS, longest)
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
        f'found no epoch with placement="sharded" begun on rank {named} within {ANSWER_SECONDS:g} s; expected it on '
        "every rank of the process group: look for the first error in their logs, or pass ranks=(rank, world_size)"
    )
