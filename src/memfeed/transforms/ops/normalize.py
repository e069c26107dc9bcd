"""Transforms of values: ToDtype and Normalize."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from memfeed.errors import TransformError
from memfeed.transfer.packing import upload
from memfeed.transforms.batch_fields import On
from memfeed.transforms.operation import DrawUniform
from memfeed.transforms.params.value_changes import Affine
from memfeed.transforms.transform import Transform


class ToDtype(Transform):
    """Cast the images. They may be volumes [n, c, d, h, w] or vectors [n, d] too.

    Args:
        dtype: to cast to.
        scale: divide integer images by the largest value of their dtype (255 for uint8), which maps them to [0, 1].
            Float images are only cast, as in torchvision.
        on: the field, see `Transform`.

    Raises:
        TransformError: `scale` with a dtype that is not floating point.
    """

    spatial_dims = (0, 2, 3)

    def __init__(self, dtype: torch.dtype, scale: bool = False, *, on: On = None) -> None:
        super().__init__(on=on)
        if not isinstance(dtype, torch.dtype):
            raise TransformError(f"ToDtype({dtype!r:.60}); expected a dtype of torch; e.g. torch.float32")
        if scale and not dtype.is_floating_point:
            raise TransformError(f"ToDtype({dtype}, scale=True); expected a float dtype to scale to; leave scale out")
        self.dtype = dtype
        self.scale = scale

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Affine:
        """Draw nothing."""
        largest = _largest(dtype) if self.scale else 1
        if largest == 1:
            return Affine(self.dtype)
        return Affine(self.dtype, scale=(1 / largest,) * shape[1], shift=(0.0,) * shape[1])

    def transform(self, image: torch.Tensor, params: Affine) -> torch.Tensor:
        """Cast images [n, c, h, w], then divide them."""
        largest = _largest(image.dtype) if self.scale else 1
        image = image.to(self.dtype)
        return image if largest == 1 else image / largest

    def extra_repr(self) -> str:
        """Return the parameters, for repr."""
        return f"{self.dtype}, scale={self.scale}"


class Normalize(Transform):
    """Subtract `mean` and divide by `std`, per channel; both in units of an image in [0, 1].

    Integer images become float32 and are divided by the largest value of their dtype first (255 for uint8), so no
    ToDtype is needed before. Float images are not divided, and keep their dtype. Volumes [n, c, d, h, w] and vectors
    [n, d] are normalised likewise; each entry of a vector is a channel.

    Args:
        mean: one float per channel.
        std: likewise, none of them 0.
        on: the field, see `Transform`.

    Raises:
        TransformError: mean and std differ in length, or are not finite, or a std is 0; later, images with another
            number of channels.
    """

    _shown = ("mean", "std")
    spatial_dims = (0, 2, 3)

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, on: On = None) -> None:
        super().__init__(on=on)
        self.mean = tuple(float(value) for value in mean)
        self.std = tuple(float(value) for value in std)
        if len(self.mean) != len(self.std) or not self.mean:
            raise TransformError(
                f"mean has {len(self.mean)} values and std has {len(self.std)}; "
                "expected one per channel in both; e.g. three each for RGB images"
            )
        if not all(map(math.isfinite, self.mean + self.std)) or 0.0 in self.std:
            raise TransformError(
                f"mean={self.mean}, std={self.std}; expected finite numbers and no std of 0; "
                "use a std of 1 for a channel that is constant"
            )

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Affine:
        """Draw nothing."""
        if shape[1] != len(self.mean):
            raise TransformError(
                f"images have {shape[1]} channels, mean and std {len(self.mean)} values; "
                "expected one value per channel; give as many, and see that channels come before height and width"
            )
        largest = _largest(dtype)
        return Affine(
            dtype if dtype.is_floating_point else torch.float32,
            scale=tuple(1 / (largest * std) for std in self.std),
            shift=tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True)),
        )

    def transform(self, image: torch.Tensor, params: Affine) -> torch.Tensor:
        """Scale images [n, c, ...] to [0, 1], subtract the mean, divide by the std."""
        largest = _largest(image.dtype)
        image = image.to(params.dtype) / largest
        ones = [1] * (image.ndim - 2)
        mean = upload(torch.tensor(self.mean, dtype=image.dtype, device="cpu"), image.device).view(-1, *ones)
        std = upload(torch.tensor(self.std, dtype=image.dtype, device="cpu"), image.device).view(-1, *ones)
        return (image - mean) / std


def _largest(dtype: torch.dtype) -> int:
    """Return the divisor that maps images of `dtype` to [0, 1]; 1 for floats, which are expected there."""
    return 1 if dtype.is_floating_point else torch.iinfo(dtype).max
