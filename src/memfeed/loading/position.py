"""Positions in an epoch: where a batch ends, where a saved state resumes, where ``skip`` and ``rewind`` lead."""

from __future__ import annotations

from typing import NamedTuple

from memfeed.errors import LoaderError
from memfeed.order.shards import RankShards


class SamplerPosition(NamedTuple):
    """A position in the epoch of a user's sampler.

    Args:
        row: rows drawn before it (of a batch sampler: batches).
        generators: the states of the random generators before the epoch, as JSON.
        drawn_hash: the hash of the rows that were drawn; empty where they are not known yet.
    """

    row: int
    generators: str
    drawn_hash: str


Position = int | SamplerPosition
"""A position in an epoch. In our own orders: how many rows all ranks together have read before it."""


def rows_before(position: Position | None) -> int:
    """Return how many rows (of a batch sampler: batches) come before ``position``; None is the beginning."""
    return position.row if isinstance(position, SamplerPosition) else position or 0


def step_of(row: int, begin: int, stride: int) -> int:
    """Return how many steps of ``stride`` rows lead from ``begin`` to ``row``, a partial last step included."""
    return -((begin - row) // stride)


def target_row(epoch: int, row: int, begin: int, stride: int, steps: int) -> int:
    """Return the row that lies ``steps`` steps after ``row`` in an epoch whose steps are counted from ``begin``.

    Raises LoaderError for a target before the beginning of the epoch.
    """
    target = begin + (step_of(row, begin, stride) + steps) * stride
    if target < 0:
        raise LoaderError(
            f"found rewind({-steps}) at batch {row // stride} of epoch {epoch}; expected at most as many as "
            "there were: call set_epoch to return to an earlier epoch"
        )
    return target


def moved(
    epoch: int, current: Position | None, begin: int, batches: int, *, shards: RankShards | None, stride: int
) -> Position:
    """Return the position ``batches`` batches after ``current``; the steps of the epoch are counted from row ``begin``.

    ``shards`` is None for a user's sampler; a step is then ``stride`` rows (of a batch sampler: one batch). Raises
    LoaderError for a position outside of the epoch.
    """
    row = rows_before(current)
    target = target_row(epoch, row, begin, stride if shards is None else shards.stride, batches)
    if shards is None:
        return SamplerPosition(target, current.generators if isinstance(current, SamplerPosition) else "", "")
    left = step_of(shards.end(begin), row, shards.stride)
    if batches > left:
        raise LoaderError(f"found skip({batches}) with {left} batches left in epoch {epoch}; expected at most {left}")
    return min(target, shards.rows)
