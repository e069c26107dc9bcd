"""Round the floats of a dataset to 16 bits before they are stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memfeed.errors import SchemaError
from memfeed.schema import values
from memfeed.schema.containers import map_leaves

DTYPES = (torch.float16, torch.bfloat16)


class Rounded:
    """A map-style dataset whose float32 and float64 tensors and arrays are rounded to a 16-bit dtype.

    Args:
        dataset: with ``len`` and ``[]``.
        dtype: float16, which has 11 significant bits and values up to 65,504, or bfloat16, which has 8 and the range of
            float32.
    """

    def __init__(self, dataset: Any, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"found forms={{float: {dtype!r}}}; expected torch.float16 or torch.bfloat16")
        self.dataset, self.dtype = dataset, dtype

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        return map_leaves(lambda leaf: self._rounded(leaf, index), sample)

    def _rounded(self, leaf: Any, index: int) -> Any:
        if not isinstance(leaf, torch.Tensor | np.ndarray) or values.holds_more(leaf):
            return leaf
        tensor = values.as_tensor(leaf)
        if tensor is None or tensor.dtype not in (torch.float32, torch.float64):
            return leaf
        rounded = (leaf if isinstance(leaf, torch.Tensor) else tensor).to(self.dtype)  # a tv_tensor keeps its class
        if bool((too_large := rounded.isinf() & ~tensor.isinf()).any()):
            value = tensor[too_large].abs().max()
            holds_more = not value.to(torch.bfloat16).isinf()
            raise SchemaError(
                f"found the value {value.item():g} in sample {index}, beyond what {self.dtype} holds; expected at most "
                f"{torch.finfo(self.dtype).max:,.5g}: "
                + ("choose forms={float: torch.bfloat16}" if holds_more else "leave forms={float: ...} out")
            )
        return rounded
