"""Casts and normalisation as one description: a dtype, and a scale and a shift per channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
