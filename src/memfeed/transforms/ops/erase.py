"""The transform RandomErasing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.transforms.batch_fields import On
from memfeed.transforms.operation import DrawUniform
from memfeed.transforms.ops.resize import TRIES
from memfeed.transforms.params.geometry import Fill
from memfeed.transforms.params.value_changes import Erased
from memfeed.transforms.transform import ImageTransform, check_probability


class RandomErasing(ImageTransform):
    """Paint over a random box with probability `p`, drawn per sample (Zhong et al., arXiv:1708.04896).

    Args:
        p: from 0 (never) to 1 (always).
        scale: least and largest share of the area of the image.
        ratio: least and largest height / width.
        value: to paint: one number, one per channel, or "random" for normal noise, drawn for each pixel, which needs
            float images. In units of the images at that step: after Normalize, 0 is the mean.
        on: the field, see `Transform`.

    Raises:
        TransformError: p is not a probability; scales or ratios that are not in order; later, integer images with
            value="random".
    """

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: Fill | str = 0,
        *,
        on: On = None,
    ) -> None:
        super().__init__(on=on)
        self.p = check_probability(p)
        self.scale, self.ratio = (float(scale[0]), float(scale[1])), (float(ratio[0]), float(ratio[1]))
        self.value = value
        if not 0 <= self.scale[0] <= self.scale[1] <= 1:
            raise TransformError(f"scale={scale!r}; expected two shares from 0 to 1, the smaller one first")
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise TransformError(f"ratio={ratio!r}; expected two positive numbers, the smaller one first")
        if isinstance(value, str) and value != "random":
            raise TransformError(f'value={value!r}; expected a number, one per channel, or "random"')

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Erased:
        """Draw the samples to change, then area, ratio and position. Draw a too large box again, up to ten times."""
        _, _, h, w = shape
        is_noise = isinstance(self.value, str)
        if is_noise and not dtype.is_floating_point:
            raise TransformError(f'images are {dtype}; expected floats for value="random"; put ToDtype before it')
        drawn = uniform(6)
        seeds = (drawn[:, 3] * 2**53).astype(np.int64)
        chosen = drawn[:, 0] < self.p
        box, fits = self._boxes(h, w, drawn[:, 4:])
        (again,) = np.nonzero(chosen & ~fits)
        box[~chosen] = 0
        if len(again):
            boxes, fits = self._boxes(h, w, uniform(4 + 2 * TRIES, again)[:, 6:].reshape(-1, TRIES - 1, 2))
            box[again] = np.where(np.any(fits, axis=1)[:, None], boxes[np.arange(len(again)), fits.argmax(1)], 0)
        corner = (drawn[:, 1:3] * ((h, w) - box + 1)).astype(np.int64)
        return Erased(
            corner[:, 0], corner[:, 1], box[:, 0], box[:, 1], None if is_noise else self.value, seeds  # type: ignore[arg-type]
        )  # fmt: skip

    def _boxes(self, h: int, w: int, drawn: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return height and width for a drawn area and ratio, int64 [..., 2], and True for each box that fits."""
        area = (h * w) * (self.scale[0] + drawn[..., 0] * (self.scale[1] - self.scale[0]))
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        ratio = np.exp(low + drawn[..., 1] * (high - low))
        boxes = np.rint(np.sqrt(np.stack([area * ratio, area / ratio], -1))).astype(np.int64)
        return boxes, np.all(boxes < (h, w), axis=-1)

    def extra_repr(self) -> str:
        """Return the parameters, for repr."""
        return f"p={self.p}, scale={self.scale}, ratio={self.ratio}, value={self.value!r}"
