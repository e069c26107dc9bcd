"""A loader's state: plain ints and strings, which JSON and `torch.distributed.checkpoint` keep."""

from __future__ import annotations

import json
from typing import Any

from memfeed.errors import LoaderError
from memfeed.loading.position import Position, SamplerPosition, rows_before

VERSION = 1
FINISHED = "_iterator_finished"
"""torchdata's name for a state whose epoch is over. Accelerate sets it in a state that it saves."""


def to_dict(epoch: int, position: Position | None, seed: int | None, identity: dict[str, Any]) -> dict[str, Any]:
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


def from_dict(state: Any, identity: dict[str, Any], last_row: int | None) -> tuple[int, Position | None]:
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
