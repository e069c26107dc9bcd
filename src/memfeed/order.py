"""In which order an epoch visits rows: a pure function of (n, seed, epoch)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memfeed.keyed import derive

Rows = npt.NDArray[np.int64]


def permutation(n: int, seed: int, epoch: int) -> Rows:
    """An exact uniform permutation of ``range(n)``, int64 [n], drawn from PCG64 keyed by hash(seed, epoch).

    Seed and epoch are hashed together, so that no two pairs alias (42 + 1 is 43 + 0). Owned by the caller. The same
    for every platform that numpy supports.
    """
    return np.random.Generator(np.random.PCG64(derive("order", seed, epoch))).permutation(n)


class Sequential:
    """Rows as they lie."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, start: int, stop: int) -> Rows:
        """The rows at positions ``start`` to ``stop`` of the epoch, int64."""
        return np.arange(start, min(stop, self.n), dtype=np.int64)


class Shuffled:
    """An exact uniform permutation of the rows, one per (seed, epoch)."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n, self._rows = n, permutation(n, seed, epoch)

    def __call__(self, start: int, stop: int) -> Rows:
        """The rows at positions ``start`` to ``stop`` of the epoch, int64."""
        return self._rows[start:stop]
