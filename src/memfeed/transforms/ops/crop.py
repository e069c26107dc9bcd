"""Transforms that take a window of each image: RandomCrop and CenterCrop, and the flips, which mirror the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.transforms.batch_fields import On
from memfeed.transforms.operation import DrawUniform, StreamDraws
from memfeed.transforms.params.geometry import Fill
from memfeed.transforms.params.window import VolumeWindow, Window
from memfeed.transforms.transform import ImageTransform, check_probability

VOLUME = 3  # dims


class RandomCrop(ImageTransform):
    """Cut a window of `size` at a random position, drawn per sample. Images of exactly that size stay whole.

    Images of several sizes, in a list, become one batch. Volumes [n, c, d, h, w] give boxes.

    Args:
        size: (height, width) in pixels, or one int for both. Of volumes: (depth, height, width), or one int for all.
        padding: pixels to add to the images first: one int for all sides, (left and right, top and bottom), or (left,
            top, right, bottom). None for none. Of volumes: one int.
        pad_if_needed: pad images smaller than `size` by the missing pixels, on both sides.
        fill: value of the padding, one number or one per channel, in units of the images.
        on: the field, see `Transform`.

    Raises:
        TransformError: a size that is not positive, negative padding; later, a size larger than the padded images.
    """

    makes_one_size, spatial_dims = True, (2, 3)

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
        self.size, self.padding = check_size(size, VOLUME), _padding(padding)
        self._is_one_side = _is_one_side(size)
        self.pad_if_needed, self.fill = pad_if_needed, fill

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Window | VolumeWindow:
        """Draw the corner: each of the (h - height + 1) x (w - width + 1) windows is equally likely."""
        sizes = _sizes_for(self.size, shape, is_one_side=self._is_one_side)
        before, after = self._padding_for(len(sizes))
        if self.pad_if_needed:
            given = zip(sizes, shape[2:], before, after, strict=True)
            missing = [max(0, size - side - one - two) for size, side, one, two in given]
            before, after = (np.add(padding, missing).tolist() for padding in (before, after))
        padded = [one + side + two for one, side, two in zip(before, shape[2:], after, strict=True)]
        # Numbers are at most 1 - 2**-53, so the product rounds to less than room + 1.
        begin = (uniform(len(sizes)) * np.add(_room(sizes, padded), 1)).astype(np.int64) - before
        return _window(shape, begin, sizes, self.fill)

    def _padding_for(self, dims: int) -> tuple[list[int], list[int]]:
        """Return the padding before and after each of the spatial dims."""
        left, top, right, bottom = self.padding
        if dims == 2:
            return [top, left], [bottom, right]
        if len({*self.padding}) > 1:
            raise TransformError(f"padding={self.padding} for volumes; expected one int for all sides; e.g. padding=4")
        return [left] * dims, [left] * dims

    def extra_repr(self) -> str:
        """Return the parameters, for repr."""
        padding = f", padding={self.padding}" if any(self.padding) else ""
        return f"size={self.size}{padding}" + ", pad_if_needed=True" * self.pad_if_needed


class CenterCrop(ImageTransform):
    """Cut a window of `size` from the middle, at the position that torchvision takes.

    Images smaller than `size` are padded with zeros around the middle; of an odd number of rows or columns, the last
    side gets one more. Images of several sizes, in a list, become one batch. Volumes [n, c, d, h, w] give boxes.

    Args:
        size: (height, width) in pixels, or one int for both. Of volumes: (depth, height, width), or one int for all.
        on: the field, see `Transform`.

    Raises:
        TransformError: a size that is not positive.
    """

    _shown = ("size",)
    makes_one_size, spatial_dims = True, (2, 3)

    def __init__(self, size: int | Sequence[int], *, on: On = None) -> None:
        super().__init__(on=on)
        self.size, self._is_one_side = check_size(size, VOLUME), _is_one_side(size)

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Window | VolumeWindow:
        """Center the window. As in torchvision, half pixels of a crop are rounded to the even number."""
        sizes = _sizes_for(self.size, shape, is_one_side=self._is_one_side)
        rooms = [side - size for side, size in zip(shape[2:], sizes, strict=True)]
        begin = [round(room / 2) if room > 0 else -(-room // 2) for room in rooms]
        return _window(shape, np.tile(np.array(begin, np.int64), (shape[0], 1)), sizes)


class RandomFlip(ImageTransform):
    """Mirror along each of `axes` with probability `p`, drawn per sample and axis, as TorchIO's RandomFlip.

    Args:
        axes: one spatial axis, or several, counted after the channels. Of volumes [n, c, d, h, w] 0 is the depth, 1 the
            height, 2 the width; of images 0 is the height and 1 the width. -1 is the width of both.
        p: from 0 (never) to 1 (always).
        on: the field, see `Transform`.

    Raises:
        TransformError: p is not a probability; axes that are no ints, or come twice; later, an axis that the field does
            not have.
    """

    _shown: ClassVar[tuple[str, ...]] = ("axes", "p")
    spatial_dims = (2, 3)

    def __init__(self, axes: int | Sequence[int] = 0, p: float = 0.5, *, on: On = None) -> None:
        super().__init__(on=on)
        self.axes, self.p = (axes,) if isinstance(axes, int) else tuple(axes), check_probability(p)
        if not self.axes or not all(isinstance(axis, int) for axis in self.axes):
            raise TransformError(f"axes={axes!r}; expected an int, or several; e.g. (0, 1, 2) for all of a volume")

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Window | VolumeWindow:
        """Draw the samples to mirror, for each axis."""
        dims = len(shape) - 2
        axes = [axis if axis < 0 else axis - dims for axis in self.axes]
        if len({*axes}) < len(axes) or not all(-dims <= axis < 0 for axis in axes):
            raise TransformError(f"axes={self.axes} of {list(shape)}; expected each once, from 0 to {dims - 1}")
        chosen = uniform(len(axes)) < self.p
        return _mirrored(shape, {axis: chosen[:, index] for index, axis in enumerate(axes)})


class RandomHorizontalFlip(RandomFlip):
    """Mirror left and right with probability `p`, drawn per sample.

    Args:
        p: from 0 (never) to 1 (always).
        alternate: draw for epoch 0 only, and then mirror each image in every other epoch. So two epochs show each image
            once as it is and once mirrored, where independent draws show the same one twice half of the time (Keller
            Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, https://arxiv.org/abs/2404.00498). It needs
            the row and the epoch, so it works in a loader and with `apply`. A row that a sampler repeats within an
            epoch is mirrored each time, or not at all.
        on: the field, see `Transform`.

    Raises:
        TransformError: p is not a probability; later, `alternate=True` and a call with a tensor alone.
    """

    _shown = ("p", "alternate")

    def __init__(self, p: float = 0.5, alternate: bool = False, *, on: On = None) -> None:
        super().__init__(-1, p, on=on)
        self.alternate = alternate

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Window | VolumeWindow:
        """Draw the samples to mirror, or with `alternate` tell them by what they were in epoch 0."""
        if not self.alternate:
            return super().make_params(shape, dtype, uniform)
        if not isinstance(uniform, StreamDraws):
            raise TransformError("alternate=True got draws without an epoch; expected those that `apply` makes")
        drawn, epoch = uniform.in_first_epoch()
        return _mirrored(shape, {-1: (drawn[:, 0] < self.p) ^ bool(epoch % 2)})


class RandomVerticalFlip(RandomFlip):
    """Mirror top and bottom with probability `p`, drawn per sample. Arguments: see `RandomHorizontalFlip`."""

    _shown = ("p",)

    def __init__(self, p: float = 0.5, *, on: On = None) -> None:
        super().__init__(-2, p, on=on)


def _mirrored(shape: torch.Size, flips: dict[int, NDArray[np.bool_]]) -> Window | VolumeWindow:
    """Return windows that show all, mirrored along axes counted from the last, for the samples with True."""
    if len(shape) == 4:
        return Window.whole(shape, **{{-1: "hflip", -2: "vflip"}[axis]: chosen for axis, chosen in flips.items()})
    along = np.zeros((shape[0], VOLUME), np.bool_)
    for axis, chosen in flips.items():
        along[:, axis] = chosen
    return VolumeWindow.whole(shape, flips=along)


def _window(shape: torch.Size, begin: NDArray[np.int64], sizes: Sequence[int], fill: Fill = 0) -> Window | VolumeWindow:
    """Return windows of these sizes that begin there, int64 [n, spatial dims]."""
    if len(sizes) == VOLUME:
        return VolumeWindow.whole(shape, begin=begin, size=tuple(sizes), fill=fill)
    return Window.whole(shape, top=begin[:, 0], left=begin[:, 1], height=sizes[0], width=sizes[1], fill=fill)


def _sizes_for(size: tuple[int, ...], shape: torch.Size, *, is_one_side: bool) -> tuple[int, ...]:
    """Return the size of a window for each spatial dim of `shape`. Raise TransformError if it has other dims."""
    dims = len(shape) - 2
    if len(size) != dims and not is_one_side:
        expected = "(height, width) for images" if dims == 2 else "(depth, height, width) for volumes"
        raise TransformError(f"size={size} for {list(shape)}; expected {expected}, or one int")
    return size[:1] * dims if is_one_side else size


def _room(size: Sequence[int], image: Sequence[int]) -> list[int]:
    """Return how many pixels a window can move along each dim. Raise TransformError if it is too large."""
    room = [side - wanted for side, wanted in zip(image, size, strict=True)]
    if min(room) < 0:
        names = " x ".join(("depth", "height", "width")[-len(room) :])
        raise TransformError(
            f"images are {' x '.join(map(str, image))} pixels ({names}), the crop is {' x '.join(map(str, size))}; "
            "expected a crop no larger than the image; "
            "resize the images when caching them, pad them, or ask for a smaller crop"
        )
    return room


def _is_one_side(size: int | Sequence[int]) -> bool:
    return isinstance(size, int) or len(size) == 1


def check_size(size: int | Sequence[int], most: int = 2) -> tuple[int, ...]:
    """Return (height, width) in pixels from a user's `size`, or up to `most` sizes. Raise TransformError."""
    sizes = _numbers(size)
    if len(sizes) == 1:  # torchvision takes (224,) for (224, 224)
        sizes = sizes * 2
    if not 2 <= len(sizes) <= most or not all(_is_int(side) and side > 0 for side in sizes):
        raise TransformError(f"size={size!r}; expected a positive int, or (height, width) of them; e.g. 224")
    return sizes


def _numbers(given: Any) -> tuple[Any, ...]:
    """Return one number, or each of several, as a tuple."""
    return tuple(given) if isinstance(given, Sequence) else (given,)


def _is_int(side: Any) -> bool:
    return isinstance(side, int) and not isinstance(side, bool)


def _padding(padding: int | Sequence[int] | None) -> tuple[int, int, int, int]:
    """Return the padding at left, top, right and bottom, in pixels."""
    sides = (0,) if padding is None else _numbers(padding)
    if len(sides) not in (1, 2, 4) or not all(_is_int(side) and side >= 0 for side in sides):
        raise TransformError(
            f"padding={padding!r}; expected an int that is not negative, or two or four of them; e.g. 4"
        )
    left, top = sides[0], sides[1 % len(sides)]
    return left, top, *(sides[2:] if len(sides) == 4 else (left, top))
