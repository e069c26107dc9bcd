"""Crops and flips as one description: a window on each image, perhaps mirrored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.transforms.params.geometry import Fill, Geometry, filled


@dataclass(frozen=True, eq=False)
class Window(Geometry):
    """A window of one size on each of n images, then flips. Pixels are moved, never computed.

    Args:
        top: first row of each window, int64 [n], in pixels; negative where it begins above the image.
        left: first column, likewise.
        height: rows of every window.
        width: columns of every window.
        hflip: mirror left and right, bool [n].
        vflip: mirror top and bottom, bool [n].
        fill: what lies outside the images, one number or one per channel.
    """

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    height: int
    width: int
    hflip: NDArray[np.bool_]
    vflip: NDArray[np.bool_]
    fill: Fill = 0

    @classmethod
    def whole(cls, shape: torch.Size, **changes: Any) -> Window:
        """The whole of images [n, c, h, w], not flipped, but for what `changes` says."""
        n, _, height, width = shape
        origin, unflipped = np.zeros(n, np.int64), np.zeros(n, np.bool_)
        plain = {
            "top": origin,
            "left": origin,
            "height": height,
            "width": width,
            "hflip": unflipped,
            "vflip": unflipped,
        }
        return cls(**{**plain, **changes})

    def then(self, after: Window) -> Window | None:
        """The one window that gives what `after` makes of the output of this one.

        None where `after` reaches beyond that output: what lies there is its fill, and not the image.
        """
        if not after.lies_within(self.height, self.width):
            return None
        # A window on a mirrored image lies, in the image itself, at the same distance from the other side.
        top = np.where(self.vflip, self.height - after.height - after.top, after.top)
        left = np.where(self.hflip, self.width - after.width - after.left, after.left)
        return Window(
            top=self.top + top,
            left=self.left + left,
            height=after.height,
            width=after.width,
            hflip=self.hflip ^ after.hflip,
            vflip=self.vflip ^ after.vflip,
            fill=self.fill,
        )

    def lies_within(self, height: int, width: int) -> bool:
        """Whether no window reaches beyond images of this size."""
        low, high = (f([self.top, self.left], axis=1, initial=0) for f in (np.min, np.max))
        return bool((low >= 0).all() and (high <= (height - self.height, width - self.width)).all())

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """What images of `shape` [n, c, h, w] become: [n, c, height, width]."""
        return torch.Size((*shape[:2], self.height, self.width))

    @cached_property
    def _places(self) -> list[tuple[int, int, list[int]]]:
        """Top, left and the dims to mirror of each sample, as Python's ints, which slice faster."""
        mirrored = zip(self.hflip.tolist(), self.vflip.tolist(), strict=True)
        dims = [[-1] * hflip + [-2] * vflip for hflip, vflip in mirrored]
        return list(zip(self.top.tolist(), self.left.tolist(), dims, strict=True))

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """The window on one image [c, h, w]; a view of it where it is neither padded nor mirrored."""
        top, left, dims = self._places[sample]
        _, h, w = image.shape
        bottom, right = top + self.height, left + self.width
        if top < 0 or left < 0 or bottom > h or right > w:
            padded = filled(self.fill, (len(image), self.height, self.width), image)
            piece = image[:, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
            down, across = max(-top, 0), max(-left, 0)
            padded[:, down : down + piece.shape[1], across : across + piece.shape[2]] = piece
            piece = padded
        else:
            piece = image[:, top:bottom, left:right]
        return piece.flip(dims) if dims else piece  # torch has no negative strides

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """The windows on images [n, c, h, w], on any device: rows are picked, then columns."""
        n, c, h, w = image.shape
        rows = _picked(self.top, self.height, self.vflip)
        columns = _picked(self.left, self.width, self.hflip)
        inside = ((rows >= 0) & (rows < h))[:, :, None] & ((columns >= 0) & (columns < w))[:, None, :]
        rows, columns = (a.clip(0, most - 1) for a, most in ((rows, h), (columns, w)))
        index = [torch.from_numpy(a).to(image.device) for a in (rows, columns)]
        image = image.gather(2, index[0][:, None, :, None].expand(n, c, self.height, w))
        image = image.gather(3, index[1][:, None, None, :].expand(n, c, self.height, self.width))
        if inside.all():
            return image
        within = torch.from_numpy(inside)[:, None].to(image.device)
        return torch.where(within, image, filled(self.fill, (c, 1, 1), image))

    def nearest(self) -> Window:
        """The same for masks: filled with 0."""
        return replace(self, fill=0)

    def points(self, xy: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Where points [m, 2] (x, y; float64, the corner of an image at 0, 0) of samples [m] go."""
        left, top, hflip, vflip = (
            torch.from_numpy(a)[sample] for a in (self.left, self.top, self.hflip, self.vflip)
        )  # fmt: skip
        x, y = xy[:, 0] - left, xy[:, 1] - top
        return torch.stack([torch.where(hflip, self.width - x, x), torch.where(vflip, self.height - y, y)], 1)


def _picked(first: NDArray[np.int64], size: int, mirrored: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The rows, or columns, of every window, int64 [n, size]."""
    steps = np.arange(size)
    picked: NDArray[np.int64] = first[:, None] + np.where(mirrored[:, None], steps[::-1], steps)
    return picked
