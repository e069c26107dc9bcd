"""The random generators that a user's sampler may draw from, saved so that it can draw the same rows again."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from memfeed.errors import LoaderError
from memfeed.system import random_state


class FollowedSampler:
    """A user's sampler that has ``set_epoch``, and whether somebody else than the loader calls that."""

    def __init__(self, sampler: Any) -> None:
        self._sampler, self._seen, self._is_driven = sampler, _counters(sampler), False
        # a sampler that does not show its epoch is not set to the first one: it may have had another before
        self._least = 1 if self.epoch is None else self.epoch

    @property
    def epoch(self) -> int | None:
        """The epoch of the sampler; None if it does not show it."""
        epoch = getattr(self._sampler, "epoch", None)
        return epoch if isinstance(epoch, int) else None

    def driven_epoch(self) -> int | None:
        """Return the epoch that somebody else has set; None where nobody has, or the sampler does not show it."""
        self._is_driven = self._is_driven or _counters(self._sampler) != self._seen
        return self.epoch if self._is_driven else None

    def set_epoch(self, epoch: int, *, was_set: bool) -> None:
        """Set the epoch of the sampler, if somebody has set that of the loader, or nobody calls the sampler's.

        In the latter case the sampler is never set to an epoch before its own.
        """
        if was_set or (not self._is_driven and epoch >= self._least):
            self._sampler.set_epoch(epoch)
            self._least = epoch
            self.note()

    def note(self) -> None:
        """Remember the sampler as it is, to see whether somebody changes it before the next pass."""
        self._seen = _counters(self._sampler)


def followed(samplers: Iterable[Any]) -> list[FollowedSampler]:
    """Return the samplers that have ``set_epoch``."""
    return [FollowedSampler(sampler) for sampler in samplers if callable(getattr(sampler, "set_epoch", None))]


def _counters(sampler: Any) -> dict[str, int]:
    return {name: value for name, value in getattr(sampler, "__dict__", {}).items() if type(value) is int}


class SamplerGenerators:
    """The global generators of torch (CPU), numpy and Python, and the sampler's own ``generator`` if it has one."""

    def __init__(self, sampler: Any) -> None:
        found = (getattr(part, "generator", None) for part in (sampler, getattr(sampler, "sampler", None)))
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
