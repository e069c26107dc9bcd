"""Crops and flips as one description: a window on each image, perhaps mirrored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Window:
    """A window of one size on each of n images, then flips.

    Args:
        top: first row of each window, int64 [n], in pixels.
        left: first column, likewise.
        height: rows of every window.
        width: columns of every window.
        hflip: mirror left and right, bool [n].
        vflip: mirror top and bottom, bool [n].
    """

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    height: int
    width: int
    hflip: NDArray[np.bool_]
    vflip: NDArray[np.bool_]

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

    def then(self, after: Window) -> Window:
        """The one window that gives what `after` makes of the output of this one."""
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
        )

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """What images of `shape` [n, c, h, w] become: [n, c, height, width]."""
        return torch.Size((*shape[:2], self.height, self.width))
