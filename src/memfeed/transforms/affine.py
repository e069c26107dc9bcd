"""Casts and normalisation as one description: a dtype, and a scale and a shift per channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memfeed.transforms.geometry import Imagewise


@dataclass(frozen=True)
class Affine:
    """Cast to `dtype`, then multiply each channel by its `scale` and add its `shift`.

    Args:
        dtype: of the output.
        scale: one float per channel; None where there is only the cast.
        shift: one float per channel; None exactly where `scale` is.
    """

    dtype: torch.dtype
    scale: tuple[float, ...] | None = None
    shift: tuple[float, ...] | None = None

    def then(self, after: Affine) -> Affine:
        """This one and `after` in one; both have the same dtype."""
        if self.scale is None or self.shift is None:
            return after
        if after.scale is None or after.shift is None:
            return self
        return Affine(
            dtype=self.dtype,
            scale=tuple(a * b for a, b in zip(self.scale, after.scale, strict=True)),
            shift=tuple(a * b + c for a, b, c in zip(self.shift, after.scale, after.shift, strict=True)),
        )


@dataclass(frozen=True, eq=False)
class Scaled(Imagewise):
    """An Affine done to each image by itself, where something comes after it that computes with its values."""

    affine: Affine

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """What images of `shape` become: of the same shape."""
        return shape

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The Affine's."""
        return self.affine.dtype

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """One image [c, h, w]."""
        cast = image.to(self.affine.dtype)
        if self.affine.scale is None or self.affine.shift is None:
            return cast
        output = torch.empty_like(cast) if cast is image else cast
        scale_and_shift(cast[None], self.affine.scale, self.affine.shift, output[None])
        return output

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """All images [n, c, h, w], on any device."""
        image = image.to(self.affine.dtype)
        if self.affine.scale is None or self.affine.shift is None:
            return image
        values = (self.affine.scale, self.affine.shift)
        scale, shift = (torch.tensor(v, dtype=image.dtype, device=image.device)[:, None, None] for v in values)
        return image * scale + shift


def scale_and_shift(
    source: torch.Tensor, scale: tuple[float, ...], shift: tuple[float, ...], output: torch.Tensor
) -> None:
    """Write source * scale + shift per channel, in one pass.

    A scalar add with alpha took 0.6 ms for [64, 3, 224, 224], mul_ then add_ 1.4 ms, a broadcast addcmul 2.6 ms.
    """
    for channel in range(output.shape[1]):
        offset = torch.tensor(shift[channel], dtype=output.dtype)
        torch.add(offset, source[:, channel], alpha=scale[channel], out=output[:, channel])
