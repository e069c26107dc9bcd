"""Take a result apart into a tree, which JSON can hold, and leaves of bytes; and make a result of them again."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from memfeed.errors import CorruptStoreError, SchemaError
from memfeed.schema import values
from memfeed.schema.fields import DEEPEST, DTYPES, dtype_name
from memfeed.store.memo_format import Bytes, Layout, Leaf
from memfeed.system.messages import require

MOST_BITS = 8192  # of an int: Python writes no longer ones as text
LeafData = tuple[str, tuple[int, ...], Bytes]
_EXPECTED = (
    "expected tensors, arrays, images of Pillow, numbers, str, bytes, None, and tuples, lists and dicts of them: "
    "return these"
)


def encode(result: Any) -> tuple[Any, list[LeafData]]:
    """Return the tree of a result, and its leaves: dtype, shape and bytes, which may share the memory of the result.

    Raises SchemaError for a value that cannot be made again from its bytes.
    """
    encoder = _Encoder()
    return encoder.node(result, "the result", 0), encoder.leaves


class _Encoder:
    def __init__(self) -> None:
        self.leaves: list[LeafData] = []

    def node(self, value: Any, where: str, depth: int) -> list[Any]:
        """Return the node of a value; ``where`` names it in errors."""
        if depth > DEEPEST:
            raise SchemaError(f"found containers nested more than {DEEPEST} deep in the result; expected fewer")
        if _is_plain(value, depth):
            return ["value", value]
        kind = type(value)
        if kind in (tuple, list):
            return [kind.__name__, [self.node(one, f"{where}[{i}]", depth + 1) for i, one in enumerate(value)]]
        if kind is dict and all(type(key) in (str, int) for key in value):
            items = value.items()
            return ["dict", [[key, self.node(one, f"{where}[{key!r:.40}]", depth + 1)] for key, one in items]]
        if kind is bytes:
            return ["bytes", self._leaf("uint8", (len(value),), np.frombuffer(value, np.uint8))]
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise SchemaError(f"found a nested tensor in {where}; expected dense ones: return list(x.unbind())")
        if isinstance(value, torch.Tensor):
            order = memory_order(value.stride(), value.shape)
            leaf = self._tensor(value.permute(order) if order else value, where)
            return ["tensor", leaf, order] if order else ["tensor", leaf]
        if kind in (np.ndarray, np.memmap):
            order = memory_order(value.strides, value.shape)
            leaf = self._array(value.transpose(order) if order else value, where)
            return ["array", leaf, order] if order else ["array", leaf]
        if isinstance(value, np.generic):
            return ["scalar", self._array(np.asarray(value), where)]
        if values.is_pil(value):
            return self._image(value, where, depth)
        what = "an int of more than 8,192 bits" if kind is int else f"{kind.__name__} (of {kind.__module__})"
        raise SchemaError(f"found {what} in {where}; {_EXPECTED}")

    def _leaf(self, dtype: str, shape: tuple[int, ...], data: Bytes) -> int:
        self.leaves.append((dtype, shape, data))
        return len(self.leaves) - 1

    def _tensor(self, value: torch.Tensor, where: str) -> int:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            what = type(value).__name__ + f" on {value.device}" + (" with a gradient" if value.requires_grad else "")
            raise SchemaError(
                f"found a {what} in {where}; expected a plain tensor on the CPU: return "
                "x.detach().cpu().as_subclass(torch.Tensor)"
            )
        tensor = values.as_tensor(value)
        assert tensor is not None
        return self._leaf(dtype_name(tensor.dtype), tuple(tensor.shape), values.bytes_of(tensor))

    def _array(self, value: Any, where: str) -> int:
        if value.dtype.name not in values.NUMPY_DTYPES or not value.dtype.isnative:
            raise SchemaError(
                f"found an array of dtype {value.dtype.str} in {where}; expected one of "
                f"{', '.join(values.NUMPY_DTYPES)} in this machine's byte order: convert it with x.astype(...)"
            )
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return self._leaf(value.dtype.name, value.shape, data)

    def _image(self, image: Any, where: str, depth: int) -> list[Any]:
        """Return the node of an image of Pillow: mode, size, pixels, palette and ``info``."""
        if getattr(image, "n_frames", 1) > 1:
            raise SchemaError(
                f"found an image of {image.n_frames} frames in {where}; expected one frame: return image.copy(), which "
                "has the frame that is shown"
            )
        image.load()
        palette = None if image.palette is None else (image.palette.mode, bytes(image.palette.palette))
        data = pixels_of(image)
        pixels = self._leaf("uint8", data.shape, data.reshape(-1))
        parts = [
            self.node(part, f"{where}.{name}", depth + 1) for part, name in ((palette, "palette"), (image.info, "info"))
        ]
        return ["image", image.mode, [image.width, image.height], pixels, *parts]


def pixels_of(image: Any) -> Bytes:
    """Return the pixels of an image of Pillow, uint8 [h, w] or [h, w, bands]; [n] if a value has several bytes."""
    data, bands = np.frombuffer(image.tobytes(), np.uint8), len(image.getbands())
    shape = (image.height, image.width, *((bands,) if bands > 1 else ()))
    return data.reshape(shape) if data.size == math.prod(shape) else data


def memory_order(strides: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return the dims in the order in which they lie in memory; [] if that is their own order, or if they overlap.

    A sum of floats depends on that order, so a result comes back with it.
    """
    if 0 in strides or 0 in shape:
        return []
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim))
    return [] if order == list(range(len(shape))) or min(strides) < 0 else order


def back(order: Sequence[int]) -> list[int]:
    """Return the order that undoes an order of dims. Raises ValueError for anything else."""
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"an order of dims {order!r:.40}")
    return [order.index(dim) for dim in range(len(order))]


def _is_plain(value: Any, depth: int) -> bool:
    """Return True for what JSON gives back as it was, with its exact types, if it is not nested too deep."""
    kind = type(value)
    if kind is int:
        return bool(value.bit_length() <= MOST_BITS)
    if value is None or kind in (bool, float, str):
        return True
    if depth >= DEEPEST:
        return False
    if kind is list:
        return all(_is_plain(one, depth + 1) for one in value)
    return kind is dict and all(type(key) is str and _is_plain(one, depth + 1) for key, one in value.items())


def decode(layout: Layout, data: Bytes, *, writable: bool = True) -> Any:
    """Return the result whose leaves lie in ``data``, uint8 [n], in that memory. Arrays can be written if ``writable``.

    Raises CorruptStoreError for a tree that is not one of `encode`.
    """
    try:
        return _Decoder(layout.leaves, data, writable).value(layout.tree)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise CorruptStoreError(
            f"found a memoized result with a layout that cannot be read ({error!s:.200}); expected one of memfeed's: "
            "the directory is damaged; remove it, and the results are computed again"
        ) from None


class _Decoder:
    def __init__(self, leaves: tuple[Leaf, ...], data: Bytes, writable: bool) -> None:
        self._leaves, self._data, self._writable = leaves, data, writable
        self._memory: torch.Tensor | None = None  # the same, once it is needed

    def value(self, node: Any) -> Any:
        kind, content = node[0], node[1]
        if kind == "value":
            return copy.deepcopy(content) if isinstance(content, list | dict) else content
        if kind == "tensor":
            tensor = self._tensor(content)
            return tensor.permute(back(node[2])) if len(node) > 2 else tensor
        if kind == "array":
            array = self._array(content)
            return array.transpose(back(node[2])) if len(node) > 2 else array
        if kind == "tuple":
            return tuple(map(self.value, content))
        if kind == "list":
            return [self.value(one) for one in content]
        if kind == "dict":
            return {key: self.value(one) for key, one in content}
        if kind == "bytes":
            return self._array(content).tobytes()
        if kind == "scalar":
            return self._array(content)[()]
        if kind == "image":
            return self._image(*node[1:])
        raise ValueError(f"a node {kind!r:.40}")

    def _tensor(self, index: int) -> torch.Tensor:
        leaf = self._leaves[index]
        if self._memory is None:
            self._memory = torch.from_numpy(self._data)
        part = self._memory[leaf.offset : leaf.offset + leaf.nbytes]
        return part.view(DTYPES[leaf.dtype]).view(leaf.shape)

    def _array(self, index: int) -> Any:
        leaf = self._leaves[index]
        array = np.ndarray(leaf.shape, values.NUMPY_DTYPES[leaf.dtype], self._data.data, leaf.offset)
        if not self._writable:
            array.flags.writeable = False
        return array

    def _image(self, mode: str, size: list[int], pixels: int, palette: Any, info: Any) -> Any:
        require("vision", "PIL")
        from PIL import Image

        image = Image.frombytes(mode, (size[0], size[1]), self._array(pixels).tobytes())
        if (colors := self.value(palette)) is not None:
            image.putpalette(colors[1], colors[0])
        image.info = self.value(info)
        return image
