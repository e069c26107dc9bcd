"""Transforms that mirror: RandomHorizontalFlip and RandomVerticalFlip."""

from __future__ import annotations

import torch

from memfeed.transforms.batch_fields import On
from memfeed.transforms.operation import DrawUniform
from memfeed.transforms.params.window import Window
from memfeed.transforms.transform import ImageTransform, check_probability


class _RandomFlip(ImageTransform):
    """A flip with probability p, drawn per sample."""

    _shown = ("p",)

    def __init__(self, p: float = 0.5, *, on: On = None) -> None:
        super().__init__(on=on)
        self.p = check_probability(p)


class RandomHorizontalFlip(_RandomFlip):
    """Mirror left and right with probability `p`, drawn per sample.

    Args:
        p: from 0 (never) to 1 (always).
        on: the field, see `Transform`.

    Raises:
        TransformError: p is not a probability.
    """

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Window:
        """Draw the samples to mirror."""
        return Window.whole(shape, hflip=uniform(1)[:, 0] < self.p)


class RandomVerticalFlip(_RandomFlip):
    """Mirror top and bottom with probability `p`, drawn per sample.

    Args:
        p: from 0 (never) to 1 (always).
        on: the field, see `Transform`.

    Raises:
        TransformError: p is not a probability.
    """

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Window:
        """Draw the samples to mirror."""
        return Window.whole(shape, vflip=uniform(1)[:, 0] < self.p)
