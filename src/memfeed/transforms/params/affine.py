"""Casts and normalisation as one description: a dtype, and a scale and a shift per channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memfeed.transforms.params.geometry import Imagewise


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

    @property
    def halves(self) -> bool:
        """Whether it computes for a dtype of 16 bits, which is done in float32 and rounded once."""
        return self.scale is not None and self.dtype in (torch.float16, torch.bfloat16)

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
        if self.affine.scale is None or self.affine.shift is None:
            return image.to(self.affine.dtype)
        cast = image.to(self._computed)
        output = torch.empty_like(cast) if cast is image else cast
        scale_and_shift(cast[None], self.affine.scale, self.affine.shift, output[None])
        return output.to(self.affine.dtype)

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """All images [n, c, h, w], on any device."""
        if self.affine.scale is None or self.affine.shift is None:
            return image.to(self.affine.dtype)
        values = (self.affine.scale, self.affine.shift)
        scale, shift = (torch.tensor(v, dtype=self._computed, device=image.device)[:, None, None] for v in values)
        return (image.to(self._computed) * scale + shift).to(self.affine.dtype)

    @property
    def _computed(self) -> torch.dtype:
        """What to compute in: bfloat16 would round three times, to a result 0.02 off where 0.005 is meant."""
        return torch.float32 if self.affine.halves else self.affine.dtype


def scale_and_shift(
    source: torch.Tensor, scale: tuple[float, ...], shift: tuple[float, ...], output: torch.Tensor
) -> None:
    """Write source * scale + shift per channel, in one pass.

    A scalar add with alpha took 0.6 ms for [64, 3, 224, 224], mul_ then add_ 1.4 ms, a broadcast addcmul 2.6 ms.
    """
    for channel in range(output.shape[1]):
        offset = torch.tensor(shift[channel], dtype=output.dtype)
        torch.add(offset, source[:, channel], alpha=scale[channel], out=output[:, channel])
