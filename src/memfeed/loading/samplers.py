"""A user's samplers: who sets their epoch, and the random generators that they draw from."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import numbers
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from memfeed.errors import LoaderError
from memfeed.system import random_state

MOST_PARTS = 32
SAMPLER_NAMES = ("sampler", "batch_sampler", "_sampler", "_batch_sampler")  # of what a sampler draws from


class FollowedSamplers:
    """The user's samplers that have ``set_epoch``, and whether somebody else than the loader calls that.

    The calls are recorded, because a sampler need not show them: it may get the same epoch again, or keep it where
    nobody sees it. A call of a sampler inside of another one counts too.
    """

    def __init__(self, samplers: Iterable[Any]) -> None:
        self._samplers = [one for one in samplers if _has_epochs(one)]
        self._parts = [part for part in parts_of(*self._samplers) if _has_epochs(part)]
        # in the newest call; at first the highest one that is shown, because none is set back
        self._given = max(self._shown(), default=None)
        self._is_driven = self._is_setting = False
        self.has_news = False  # somebody else has set the epoch since the last pass, and since the loader's was set
        self._is_recorded = [_record_calls(type(part)) for part in self._parts]
        self._seen = self._counters()
        # a sampler that does not show its epoch is not set to the first one: it may have had another before
        self._least = 1 if self.epoch is None else self.epoch
        _FOLLOWED.add(self)

    @property
    def epoch(self) -> int | None:
        """The epoch that was set last, or that a sampler or one inside of it shows; None if neither is known."""
        return next(iter(self._shown()), None) if self._given is None else self._given

    def _shown(self) -> list[int]:
        shown = (_as_epoch(getattr(part, "epoch", None)) for part in self._parts)
        return [epoch for epoch in shown if epoch is not None]

    def note_call(self, sampler: Any, epoch: Any) -> None:
        """Remember that ``set_epoch`` was called, if the sampler is one of these."""
        if any(part is sampler for part in self._parts):
            self._given = _as_epoch(epoch)
            self.note()
            if not self._is_setting:
                self._is_driven = self.has_news = True

    def driven_epoch(self, *, since_last_pass: bool) -> int | None:
        """Return the epoch that somebody else has set; None where nobody has, or it is not known.

        ``since_last_pass``: only if they did so since the last pass, and since the loader's was set.
        """
        self._look()
        return self.epoch if (self.has_news if since_last_pass else self._is_driven) else None

    def forget_news(self) -> None:
        """Let the loader's epoch, which was set now, count more than what the samplers were told before."""
        self._look()
        self.has_news = False

    def begin(self, epoch: int, *, was_named: bool) -> None:
        """Set the epoch of the samplers, if the loader's was set after theirs, or nobody calls theirs.

        In the latter case a sampler is never set to an epoch before its own. Who calls it may count in another way.
        """
        is_due = self.epoch not in (None, epoch) if self._is_driven else epoch >= self._least
        if is_due or (was_named and not self.has_news):
            self._is_setting = True
            try:
                for one in reversed(self._samplers):  # what an outer one makes of the epoch counts
                    if "set_epoch" not in getattr(one, "__dict__", {}):  # who put it into one sampler calls it
                        one.set_epoch(epoch)
            finally:
                self._is_setting = False
            self._given = self._least = epoch
            self.note()
        self.has_news = False

    def note(self) -> None:
        """Remember the samplers as they are, to see whether somebody changes them before the next pass."""
        self._seen = self._counters()

    def _look(self) -> None:
        if self._counters() != self._seen:  # an assignment, or a call that could not be recorded
            self._is_driven, self.has_news, self._given = True, True, None
            self.note()

    def _counters(self) -> list[dict[str, int]]:
        """Return the numbers that a change of the epoch changes: all that a sampler has, if no call is recorded."""
        return [
            {
                name: value
                for name, value in getattr(part, "__dict__", {}).items()
                if type(value) is int and (name == "epoch" or not is_recorded)
            }
            for part, is_recorded in zip(self._parts, self._is_recorded, strict=True)
        ]


_FOLLOWED: weakref.WeakSet[FollowedSamplers] = weakref.WeakSet()


def _record_calls(kind: type) -> bool:
    """Let ``set_epoch`` of a class tell `_FOLLOWED` of its calls. Return False for a class that cannot be changed.

    The method of the class is replaced, and not an attribute of the sampler: that would go into pickles and copies of
    the sampler, and a copy would then set the epoch of the first one.
    """
    owner: Any = next((one for one in kind.__mro__ if "set_epoch" in vars(one)), None)
    method = None if owner is None else vars(owner)["set_epoch"]
    if not isinstance(method, types.FunctionType):
        return False
    if hasattr(method, "is_recorded"):
        return True

    @functools.wraps(method)
    def set_epoch(sampler: Any, *args: Any, **options: Any) -> Any:
        result = method(sampler, *args, **options)
        for one in list(_FOLLOWED):  # after those that it makes itself
            one.note_call(sampler, next(iter((*args, *options.values())), None))
        return result

    set_epoch.is_recorded = True  # type: ignore[attr-defined]
    try:
        owner.set_epoch = set_epoch
    except (AttributeError, TypeError):
        return False
    return True


def _has_epochs(sampler: Any) -> bool:
    return callable(getattr(sampler, "set_epoch", None))


def _as_epoch(value: Any) -> int | None:
    return int(value) if isinstance(value, numbers.Integral) else None


def parts_of(*samplers: Any, depth: int = 4) -> list[Any]:
    """Return samplers, and those inside of them, so many levels deep: each once, the outer ones first.

    Those are what a sampler, or its dataset, names as its sampler, and torch's samplers among its attributes.
    """
    found, level = list[Any](), list(samplers)
    for _ in range(depth + 1):
        if len(found) > MOST_PARTS:  # objects that make an attribute of any name, as mocks do
            break
        level = [one for at, one in enumerate(level) if not any(one is other for other in (*found, *level[:at]))]
        found += level
        level = [inner for one in level for inner in _inner(one)]
    return found


def _inner(sampler: Any) -> list[Any]:
    holders = (sampler, getattr(sampler, "dataset", None))
    named = [getattr(holder, name, None) for holder in holders for name in SAMPLER_NAMES]
    held = [value for value in getattr(sampler, "__dict__", {}).values() if isinstance(value, Sampler)]
    return [value for value in (*named, *held) if value is not None]


class SamplerGenerators:
    """The global generators of torch (CPU), numpy and Python, and the sampler's own ``generator`` if it has one."""

    def __init__(self, sampler: Any) -> None:
        found = (getattr(part, "generator", None) for part in parts_of(sampler))
        self._own = next((generator for generator in found if isinstance(generator, torch.Generator)), None)

    def states(self) -> str:
        """Return the states as JSON."""
        own = None if self._own is None else base64.b64encode(self._own.get_state().numpy().tobytes()).decode()
        return json.dumps({**random_state.encode(random_state.save()), "own": own})

    @contextlib.contextmanager
    def in_states(self, states: str) -> Iterator[None]:
        """Put the generators into these states for a with-block. After it the global ones are as they were before.

        The sampler's own generator keeps the state it has at the end of the block. Raises LoaderError for what
        ``states`` did not return.
        """
        with random_state.preserved():
            try:
                found = json.loads(states)
                random_state.restore(random_state.decode(found))
                if self._own is not None and found["own"] is not None:
                    self._own.set_state(torch.frombuffer(bytearray(base64.b64decode(found["own"])), dtype=torch.uint8))
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                raise LoaderError(
                    f"found a state whose random generators cannot be read ({error}); expected what state_dict() gave"
                ) from error
            yield
