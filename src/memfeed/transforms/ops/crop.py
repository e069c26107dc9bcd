"""Transforms that take a window of each image: RandomCrop and CenterCrop, and the flips, which mirror the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from memfeed.errors import TransformError
from memfeed.transforms.batch_fields import On
from memfeed.transforms.operation import DrawUniform
from memfeed.transforms.params.geometry import Fill
from memfeed.transforms.params.window import Window
from memfeed.transforms.transform import ImageTransform, check_probability


class RandomCrop(ImageTransform):
    """Cut a window of `size` at a random position, drawn per sample. Images of exactly that size stay whole.

    Args:
        size: (height, width) in pixels, or one int for both.
        padding: pixels to add to the images first: one int for all sides, (left and right, top and bottom), or (left,
            top, right, bottom). None for none.
        pad_if_needed: pad images smaller than `size` by the missing pixels, on both sides.
        fill: value of the padding, one number or one per channel, in units of the images.
        on: the field, see `Transform`.

    Raises:
        TransformError: a size that is not positive, negative padding; later, a size larger than the padded images.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: Fill = 0,
        *,
        on: On = None,
    ) -> None:
        super().__init__(on=on)
        self.size, self.padding = check_size(size), _padding(padding)
        self.pad_if_needed, self.fill = pad_if_needed, fill

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Window:
        """Draw the corner: each of the (h - height + 1) x (w - width + 1) windows is equally likely."""
        (height, width), (h, w) = self.size, shape[2:]
        left, top, right, bottom = self.padding
        if self.pad_if_needed:
            down, across = max(0, height - h - top - bottom), max(0, width - w - left - right)
            left, top, right, bottom = left + across, top + down, right + across, bottom + down
        room = _room(self.size, (h + top + bottom, w + left + right))
        # Numbers are at most 1 - 2**-53, so the product rounds to less than room + 1.
        corners = (uniform(2) * (room[0] + 1, room[1] + 1)).astype(np.int64) - (top, left)
        return Window.whole(shape, top=corners[:, 0], left=corners[:, 1], height=height, width=width, fill=self.fill)

    def extra_repr(self) -> str:
        """Return the parameters, for repr."""
        padding = f", padding={self.padding}" if any(self.padding) else ""
        return f"size={self.size}{padding}" + ", pad_if_needed=True" * self.pad_if_needed


class CenterCrop(ImageTransform):
    """Cut a window of `size` from the middle, at the position that torchvision takes.

    Args:
        size: (height, width) in pixels, or one int for both.
        on: the field, see `Transform`.

    Raises:
        TransformError: a size that is not positive; later, a size larger than the images (torchvision would pad).
    """

    _shown = ("size",)

    def __init__(self, size: int | Sequence[int], *, on: On = None) -> None:
        super().__init__(on=on)
        self.size = check_size(size)

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Window:
        """Center the window. Half pixels are rounded to the even number, as in torchvision."""
        down, right = _room(self.size, (shape[2], shape[3]))
        top, left = np.full(shape[0], round(down / 2)), np.full(shape[0], round(right / 2))
        return Window.whole(shape, top=top, left=left, height=self.size[0], width=self.size[1])


class _RandomFlip(ImageTransform):
    """A flip with probability p, drawn per sample."""

    _shown = ("p",)
    _window_field: ClassVar[str]

    def __init__(self, p: float = 0.5, *, on: On = None) -> None:
        super().__init__(on=on)
        self.p = check_probability(p)

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Window:
        """Draw the samples to mirror."""
        return Window.whole(shape, **{self._window_field: uniform(1)[:, 0] < self.p})


class RandomHorizontalFlip(_RandomFlip):
    """Mirror left and right with probability `p`, drawn per sample.

    Args:
        p: from 0 (never) to 1 (always).
        on: the field, see `Transform`.

    Raises:
        TransformError: p is not a probability.
    """

    _window_field = "hflip"


class RandomVerticalFlip(_RandomFlip):
    """Mirror top and bottom with probability `p`, drawn per sample. Arguments: see `RandomHorizontalFlip`."""

    _window_field = "vflip"


def _room(size: tuple[int, int], image: tuple[int, int]) -> tuple[int, int]:
    """Return how many pixels a window can move, down and to the right. Raise TransformError if it is too large."""
    (height, width), (h, w) = size, image
    if height > h or width > w:
        raise TransformError(
            f"images are {h} x {w} pixels (height x width), the crop is {height} x {width}; "
            "expected a crop no larger than the image; "
            "resize the images when caching them, pad them, or ask for a smaller crop"
        )
    return h - height, w - width


def check_size(size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) in pixels from a user's `size`. Raise TransformError."""
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    if len(sizes) == 1:  # torchvision takes (224,) for (224, 224)
        sizes = sizes * 2
    if len(sizes) != 2 or not all(isinstance(side, int) and side > 0 for side in sizes):
        raise TransformError(f"size={size!r}; expected a positive int, or (height, width) of them; e.g. 224")
    return sizes[0], sizes[1]


def _padding(padding: int | Sequence[int] | None) -> tuple[int, int, int, int]:
    """Return the padding at left, top, right and bottom, in pixels."""
    sides = (0,) if padding is None else (padding,) if isinstance(padding, int) else tuple(padding)
    if len(sides) not in (1, 2, 4) or not all(isinstance(side, int) and side >= 0 for side in sides):
        raise TransformError(
            f"padding={padding!r}; expected an int that is not negative, or two or four of them; e.g. 4"
        )
    left, top = sides[0], sides[1 % len(sides)]
    return left, top, *(sides[2:] if len(sides) == 4 else (left, top))
