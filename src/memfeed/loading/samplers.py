"""The random generators that a user's sampler may draw from, saved so that it can draw the same rows again."""

from __future__ import annotations

import base64
import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from memfeed.errors import LoaderError


class Generators:
    """The global generators of torch (CPU), numpy and Python, and the sampler's own ``generator`` if it has one."""

    def __init__(self, sampler: Any) -> None:
        found = (getattr(part, "generator", None) for part in (sampler, getattr(sampler, "sampler", None)))
        self._own = next((generator for generator in found if isinstance(generator, torch.Generator)), None)

    def states(self) -> str:
        """Return the states as JSON."""
        kind, keys, *rest = np.random.get_state()
        return json.dumps(
            {
                "torch": _text(torch.get_rng_state().numpy()),
                "numpy": [kind, _text(np.asarray(keys)), *rest],
                "python": random.getstate(),
                "own": None if self._own is None else _text(self._own.get_state().numpy()),
            }
        )

    def _set(self, states: str) -> None:
        try:
            found = json.loads(states)
            kind, keys, *rest = found["numpy"]
            version, numbers, gauss = found["python"]
            torch.set_rng_state(_tensor(found["torch"]))
            np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), np.uint32), *rest))
            random.setstate((version, tuple(numbers), gauss))
            if self._own is not None and found["own"] is not None:
                self._own.set_state(_tensor(found["own"]))
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise LoaderError(
                f"found a state whose random generators cannot be read ({error}); expected what state_dict() gave"
            ) from error

    @contextlib.contextmanager
    def in_states(self, states: str) -> Iterator[None]:
        """Put the generators into these states for a with-block. After it the global ones are as they were before.

        The sampler's own generator keeps the state it has at the end of the block.
        """
        now = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            self._set(states)
            yield
        finally:
            torch.set_rng_state(now[0])
            np.random.set_state(now[1])
            random.setstate(now[2])


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
