"""A loader's state: plain ints and strings, which JSON and `torch.distributed.checkpoint` keep."""

from __future__ import annotations

import json
from typing import Any

from memfeed.errors import LoaderError
from memfeed.loading.tasks import Drawn, Mark

VERSION = 1


def to_dict(epoch: int, mark: Mark | None, fixed: dict[str, Any]) -> dict[str, Any]:
    """The place in an epoch, and what must be the same where it is loaded."""
    drawn = mark if isinstance(mark, Drawn) else None
    row = mark.row if isinstance(mark, Drawn) else mark or 0
    sampler = "" if drawn is None else json.dumps({"start": drawn.start, "hash": drawn.hash})
    return {"version": VERSION, "epoch": epoch, "row": row, "sampler": sampler, **fixed}


def from_dict(state: Any, fixed: dict[str, Any], most: int | None) -> tuple[int, Mark | None]:
    """Epoch and mark of a state. Raises LoaderError for one that is of something else, and says what differs."""
    wanted = {"version", "epoch", "row", "sampler", *fixed}
    if not isinstance(state, dict) or not wanted <= set(state):
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise LoaderError(f"found a state of {found}; expected the dict that state_dict() gave, with {sorted(wanted)}")
    if state["version"] != VERSION:
        raise LoaderError(f"found a state of version {state['version']!r}; expected {VERSION}")
    for name, value in fixed.items():
        if state[name] != value:
            raise LoaderError(
                f"found a state with {name} {state[name]!r}; this loader has {name} {value!r}; expected a state of the "
                "same store, view, order and seed: make the loader as it was made then"
            )
    epoch, row = state["epoch"], state["row"]
    if not _is_count(epoch) or not _is_count(row) or (most is not None and row > most):
        raise LoaderError(f"found a state at epoch {epoch!r}, row {row!r}; expected whole numbers within the epoch")
    if not state["sampler"]:
        return epoch, row or None
    try:
        kept = json.loads(state["sampler"])
        return epoch, Drawn(row, str(kept["start"]), str(kept["hash"])) if row else None
    except (ValueError, KeyError, TypeError) as error:
        raise LoaderError(f"found a state whose sampler cannot be read ({error}); expected state_dict()'s") from error


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
