"""Positions in an epoch: where a batch ends, where ``skip`` and ``rewind`` lead, where a saved state resumes.

A state is a dict of plain ints and strings, which JSON and `torch.distributed.checkpoint` keep.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from memfeed.errors import LoaderError
from memfeed.order.shards import RankShards

VERSION = 1
FINISHED = "_iterator_finished"
"""torchdata's name for a state whose epoch is over. Accelerate sets it in a state that it saves."""


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


def to_state(epoch: int, position: Position | None, seed: int | None, identity: dict[str, Any]) -> dict[str, Any]:
    """Return a position in an epoch as a state. ``identity`` is what must be the same where the state is loaded.

    A seed that is not drawn yet is an empty string.
    """
    sampler = ""
    if isinstance(position, SamplerPosition):
        sampler = json.dumps({"start": position.generators, "hash": position.drawn_hash})
    row = rows_before(position)
    known = "" if seed is None else seed
    return {
        "version": VERSION,
        "epoch": epoch,
        "row": row,
        "sampler": sampler,
        "seed": known,
        FINISHED: False,
        **identity,
    }


def from_state(state: Any, identity: dict[str, Any], last_row: int | None) -> tuple[int, Position | None]:
    """Return the epoch and the position of a state.

    Raises LoaderError for a state of something else, and says what differs. ``last_row`` is the end of an epoch where
    that is known.
    """
    wanted = {"version", "epoch", "row", "sampler", "seed", *identity}
    if not isinstance(state, dict) or not wanted <= set(state):
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise LoaderError(f"found a state of {found}; expected the dict that state_dict() gave, with {sorted(wanted)}")
    if state["version"] != VERSION:
        raise LoaderError(f"found a state of version {state['version']!r}; expected {VERSION}")
    for name, value in identity.items():
        if state[name] != value:
            raise LoaderError(
                f"found a state with {name} {state[name]!r}; this loader has {name} {value!r}; expected a state of the "
                "same store, view, order and seed: make the loader as it was made then"
            )
    epoch, row = state["epoch"], state["row"]
    if not _is_count(epoch) or not _is_count(row) or (last_row is not None and row > last_row):
        raise LoaderError(f"found a state at epoch {epoch!r}, row {row!r}; expected whole numbers within the epoch")
    if state.get(FINISHED):
        return epoch + 1, None
    if not state["sampler"]:
        return epoch, row or None
    try:
        kept = json.loads(state["sampler"])
        return epoch, SamplerPosition(row, str(kept["start"]), str(kept["hash"])) if row else None
    except (ValueError, KeyError, TypeError) as error:
        raise LoaderError(f"found a state whose sampler cannot be read ({error}); expected state_dict()'s") from error


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
