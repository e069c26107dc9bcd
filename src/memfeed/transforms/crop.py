"""Crops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.transforms.fields import On
from memfeed.transforms.steps import Uniform
from memfeed.transforms.transform import Transform
from memfeed.transforms.window import Window


class _Crop(Transform):
    """A crop of a fixed size; where it lies is the subclass's to say."""

    def __init__(self, size: int | Sequence[int], *, on: On = None) -> None:
        super().__init__(on=on)
        self.size = _size(size)

    def transform(self, image: torch.Tensor, params: Window) -> torch.Tensor:
        """Pick the rows, then the columns, of every sample's window."""
        n, c, _, width = image.shape
        top, left = (torch.from_numpy(offsets).to(image.device) for offsets in (params.top, params.left))
        rows = top[:, None] + torch.arange(params.height, device=image.device)
        columns = left[:, None] + torch.arange(params.width, device=image.device)
        image = image.gather(2, rows[:, None, :, None].expand(n, c, params.height, width))
        return image.gather(3, columns[:, None, None, :].expand(n, c, params.height, params.width))

    def extra_repr(self) -> str:
        """The size, for repr."""
        return f"size={self.size}"

    def _room(self, shape: torch.Size) -> tuple[int, int]:
        """How far a window can move, down and to the right."""
        (height, width), (h, w) = self.size, shape[2:]
        if height > h or width > w:
            raise TransformError(
                f"images are {h} x {w} pixels (height x width), the crop is {height} x {width}; "
                "expected a crop no larger than the image; "
                "resize the images when caching them, or ask for a smaller crop"
            )
        return h - height, w - width


class RandomCrop(_Crop):
    """Cut a window of `size` at a random place, drawn per sample; images of that very size stay whole.

    Args:
        size: (height, width) in pixels, or one int for both.
        on: the field, see `Transform`.

    Raises:
        TransformError: a size that is not positive, or later larger than the images.
    """

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: Uniform) -> Window:
        """Draw the place: each of the (h - height + 1) x (w - width + 1) windows is as likely."""
        down, right = self._room(shape)
        # The product stays below room + 1, see keyed.integers.
        corners = (uniform(2) * (down + 1, right + 1)).astype(np.int64)
        return _window(shape, self.size, corners[:, 0], corners[:, 1])


class CenterCrop(_Crop):
    """Cut a window of `size` from the middle, where torchvision cuts it.

    Args:
        size: (height, width) in pixels, or one int for both.
        on: the field, see `Transform`.

    Raises:
        TransformError: a size that is not positive, or later larger than the images (torchvision would pad).
    """

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: Uniform) -> Window:
        """Halve the room, rounded as torchvision rounds: to the even number."""
        down, right = self._room(shape)
        n = shape[0]
        return _window(shape, self.size, np.full(n, round(down / 2)), np.full(n, round(right / 2)))


def _window(shape: torch.Size, size: tuple[int, int], top: NDArray[Any], left: NDArray[Any]) -> Window:
    return Window.whole(shape, top=top, left=left, height=size[0], width=size[1])


def _size(size: int | Sequence[int]) -> tuple[int, int]:
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    if len(sizes) == 1:  # torchvision takes (224,) for (224, 224)
        sizes = sizes * 2
    if len(sizes) != 2 or not all(isinstance(side, int) and side > 0 for side in sizes):
        raise TransformError(f"size={size!r}; expected a positive int, or (height, width) of them; e.g. 224")
    return sizes[0], sizes[1]
