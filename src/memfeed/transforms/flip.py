"""Random flips."""

from __future__ import annotations

import torch

from memfeed.errors import TransformError
from memfeed.transforms.fields import On
from memfeed.transforms.steps import Uniform
from memfeed.transforms.transform import Transform
from memfeed.transforms.window import Window


class _RandomFlip(Transform):
    """A flip with probability p, drawn per sample."""

    def __init__(self, p: float = 0.5, *, on: On = None) -> None:
        super().__init__(on=on)
        if not 0.0 <= p <= 1.0:  # false for NaN, too
            raise TransformError(f"p={p!r}; expected a probability from 0 to 1; e.g. 0.5 for every other image")
        self.p = float(p)

    def extra_repr(self) -> str:
        """The probability, for repr."""
        return f"p={self.p}"


class RandomHorizontalFlip(_RandomFlip):
    """Mirror left and right with probability `p`, drawn per sample.

    Args:
        p: from 0 (never) to 1 (always).
        on: the field, see `Transform`.

    Raises:
        TransformError: p is no probability.
    """

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: Uniform) -> Window:
        """Draw which samples to mirror."""
        return Window.whole(shape, hflip=uniform(1)[:, 0] < self.p)

    def transform(self, image: torch.Tensor, params: Window) -> torch.Tensor:
        """Choose between the images and their mirror images."""
        chosen = torch.from_numpy(params.hflip).to(image.device)
        return torch.where(chosen[:, None, None, None], image.flip(-1), image)


class RandomVerticalFlip(_RandomFlip):
    """Mirror top and bottom with probability `p`, drawn per sample.

    Args:
        p: from 0 (never) to 1 (always).
        on: the field, see `Transform`.

    Raises:
        TransformError: p is no probability.
    """

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: Uniform) -> Window:
        """Draw which samples to mirror."""
        return Window.whole(shape, vflip=uniform(1)[:, 0] < self.p)

    def transform(self, image: torch.Tensor, params: Window) -> torch.Tensor:
        """Choose between the images and their mirror images."""
        chosen = torch.from_numpy(params.vflip).to(image.device)
        return torch.where(chosen[:, None, None, None], image.flip(-2), image)
