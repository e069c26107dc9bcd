"""How far decoded images are from the original ones, in grey levels."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from memfeed.codecs.contract import Array

PEAK = 255  # of uint8


class ImageError(NamedTuple):
    """The mean and largest absolute difference, in grey levels, and the PSNR in dB: infinite if there is no difference.

    PSNR is 10 log10(255**2 / MSE), with the mean over all images, channels and pixels that were compared.
    """

    mean: float
    largest: int
    psnr: float


class ErrorSum:
    """The differences of images that are compared one after another."""

    def __init__(self) -> None:
        self._count, self._sum, self._squares, self._largest = 0, 0, 0, 0

    def add(self, original: Array, decoded: Array) -> None:
        """Compare two arrays of uint8, of one shape."""
        if original.dtype != np.uint8 or decoded.dtype != np.uint8 or original.shape != decoded.shape:
            raise ValueError(
                f"found {original.dtype} {list(original.shape)} and {decoded.dtype} {list(decoded.shape)}; expected "
                "uint8 of one shape"
            )
        # counts of each difference: exact, and without memory for squares
        differences = np.maximum(original, decoded) - np.minimum(original, decoded)
        counts = np.bincount(differences.reshape(-1), minlength=PEAK + 1)
        levels = np.arange(PEAK + 1)
        self._count += differences.size
        self._sum += int(counts @ levels)
        self._squares += int(counts @ levels**2)
        self._largest = max(self._largest, int(differences.max(initial=0)))

    def error(self) -> ImageError:
        """Return the error of all that was added; of nothing, 0."""
        if not self._squares:
            return ImageError(0.0, 0, math.inf)
        psnr = 10 * math.log10(PEAK**2 * self._count / self._squares)
        return ImageError(self._sum / self._count, self._largest, psnr)
