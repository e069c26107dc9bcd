"""The codec of a coded field, and its rows as arrays that a codec takes."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memfeed.codecs.codec import Codec, codec_of
from memfeed.schema.fields import Field

_AS_INTEGERS: dict[str, Any] = {"bfloat16": np.uint16}
"""The dtypes of arrays for those of torch that NumPy does not have; the bytes are the same. float8 is uint8."""

ROW_BYTES = 1 << 32  # a decoded row has fewer


@lru_cache(64)
def _codec(name: str, parameters: str) -> Codec:
    return codec_of(name, json.loads(parameters))


def codec_of_field(field: Field) -> Codec:
    """Return the codec of a coded field.

    Raises StoreError for a codec or parameters that are not known, ModuleNotFoundError without its library.
    """
    assert field.coding is not None
    return _codec(field.coding.codec, json.dumps(field.coding.parameters, sort_keys=True))


def array_dtype(field: Field) -> np.dtype[Any]:
    """Return the dtype of the arrays that a codec gets for rows of this decoded field."""
    if field.dtype.startswith("float8"):
        return np.dtype(np.uint8)
    found: np.dtype[Any] = np.dtype(_AS_INTEGERS.get(field.dtype, field.dtype))
    return found


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a contiguous tensor of the CPU as an array of the dtype that codecs get; they share memory."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16":
        tensor = tensor.view(torch.uint16)
    elif name.startswith("float8"):
        tensor = tensor.view(torch.uint8)
    array: npt.NDArray[Any] = tensor.numpy()
    return array
