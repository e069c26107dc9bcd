"""Filters: changes of a row that can be undone exactly, after which it compresses better.

| code | filter | rows | what is compressed |
|---|---|---|---|
| 0 | none | any | the elements in C order |
| 1 | channels | uint8 `[3, h, w]` | channel 0 minus channel 1, channel 1, channel 2 minus channel 1, modulo 256 |
| 2 | bytes | elements of 2 bytes and more | the lowest byte of all elements, then the second one, up to the highest |

The parts of a complex number are two elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memfeed.codecs.contract import Array

NONE, CHANNELS, BYTES = 0, 1, 2


def filters_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> list[int]:
    """Return the codes of the filters that rows of this dtype and shape can have, `NONE` first."""
    if dtype == np.uint8 and len(shape) == 3 and shape[0] == 3:
        return [NONE, CHANNELS]
    return [NONE, BYTES] if dtype.itemsize > 1 else [NONE]


def apply(code: int, row: Array) -> Array:
    """Return the bytes to compress, a contiguous array of uint8, of a C-contiguous row that has this filter."""
    if code == CHANNELS:
        differences = row.copy()
        differences[0] -= row[1]
        differences[2] -= row[1]
        data: Array = differences.reshape(-1)
    elif code == BYTES:
        data = np.ascontiguousarray(_elements(row).view(np.uint8).reshape(-1, _width(row.dtype)).T).reshape(-1)
    else:
        data = row.reshape(-1).view(np.uint8)
    return data


def undo(code: int, data: Array, out: Array) -> None:
    """Write the row whose filtered bytes are `data` to `out`, an array of its dtype and shape, of any strides."""
    if code == CHANNELS:
        first, second, third = data.reshape(out.shape)
        np.copyto(out[1], second)
        np.add(first, second, out=out[0])
        np.add(third, second, out=out[2])
    elif code == BYTES:
        # shifts of whole elements: twice as fast as writing each byte to its place
        planes = data.reshape(_width(out.dtype), -1)
        elements = planes[-1].astype(f"u{len(planes)}")
        for plane in planes[-2::-1]:
            elements <<= elements.dtype.type(8)
            elements |= plane
        np.copyto(out, elements.view(out.dtype).reshape(out.shape))
    else:
        np.copyto(out, data.view(out.dtype).reshape(out.shape))


def _width(dtype: np.dtype[Any]) -> int:
    """Return the bytes of an element, half of them for a complex number."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


def _elements(row: Array) -> Array:
    elements: Array = row.reshape(-1).view(f"u{_width(row.dtype)}")
    return elements
