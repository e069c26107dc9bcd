"""A pseudo-random permutation of range(n) that computes each entry by itself: no list, no start-up, any n.

A Feistel network over Z_a x Z_b with a * b just above n (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002, https://doi.org/10.1007/3-540-45760-7_9, their generalised Feistel cipher). An entry outside of n is
mapped again until it is inside, which keeps it a permutation. The round functions are `memfeed.random.mix` of a key.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from memfeed.random import derive, mix

Numbers = npt.NDArray[np.int64]
ROUNDS = 8


class Bijection:
    """One permutation of range(n), chosen by a key; memory and time do not depend on n.

    Example::

        Bijection(10**12, "epoch", 3)(np.arange(5))  # the first five of 10^12 numbers in random order
    """

    def __init__(self, n: int, *key: int | str) -> None:
        self.n = n
        self._a = math.isqrt(max(n - 1, 0)) + 1
        self._b = -(-n // self._a)
        self._keys = [np.uint64(derive("bijection", n, round_index, *key)) for round_index in range(ROUNDS)]

    def __call__(self, at: Numbers) -> Numbers:
        """Return the entries at positions ``at``, int64 [k], each in range(n)."""
        return self._walk(at, self._forward)

    def inverse(self, entries: Numbers) -> Numbers:
        """Return the positions of these entries: ``inverse(self(at)) == at``."""
        return self._walk(entries, self._backward)

    def _walk(self, numbers: Numbers, step: Any) -> Numbers:
        found: Numbers = step(np.asarray(numbers, np.int64))
        outside = np.flatnonzero(found >= self.n)
        while len(outside):
            found[outside] = step(found[outside])
            outside = outside[found[outside] >= self.n]
        return found

    def _forward(self, numbers: Numbers) -> Numbers:
        left, right = np.divmod(numbers, self._b)
        for round_index, key in enumerate(self._keys):
            if round_index % 2:
                right = (right + self._round(left, key, self._b)) % self._b
            else:
                left = (left + self._round(right, key, self._a)) % self._a
        return left * self._b + right

    def _backward(self, numbers: Numbers) -> Numbers:
        left, right = np.divmod(numbers, self._b)
        for round_index, key in reversed(list(enumerate(self._keys))):
            if round_index % 2:
                right = (right - self._round(left, key, self._b)) % self._b
            else:
                left = (left - self._round(right, key, self._a)) % self._a
        return left * self._b + right

    def _round(self, half: Numbers, key: np.uint64, size: int) -> Numbers:
        mixed: Numbers = (mix(half.astype(np.uint64) + key) % np.uint64(size)).astype(np.int64)
        return mixed


class InTurn:
    """The permutation that leaves each number where it is."""

    def __call__(self, at: Numbers) -> Numbers:
        """Return the entries at positions ``at``: the positions."""
        return at

    inverse = __call__
