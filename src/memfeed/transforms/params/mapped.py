"""A function of single values as the parameter of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from memfeed.transforms.params.geometry import Imagewise


@dataclass(frozen=True, eq=False)
class Mapped(Imagewise):
    """A function applied to each value of n images.

    Args:
        fn: takes images and returns a tensor of the same shape.
        dtype: of the tensors that `fn` returns.
    """

    fn: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that `fn` returns."""
        return self.dtype

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Call the function with one image [c, h, w]."""
        return self.fn(image)

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """Call the function with all images [n, c, h, w], on any device."""
        return self.fn(image)
