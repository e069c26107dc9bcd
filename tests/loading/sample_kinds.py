"""Samples as datasets return them: a function from a row number to a sample, for each kind."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import operator
import pathlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
from tensordict import TensorDict, tensorclass
from torch.utils.data import Dataset
from torchvision import tv_tensors

ROWS = 7
"""The number of samples of a dataset: the last batch of 3 has one row."""


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: int


@tensorclass
class Photo:
    pixels: torch.Tensor
    label: torch.Tensor


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Affine(torch.Tensor):
    """A tensor of a derived class, as MONAI's MetaTensor."""


class Point:
    """An object of a class that no library knows."""

    def __init__(self, x: int) -> None:
        self.x = x


def grid(i: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(6).reshape(2, 3) + i).to(dtype)


def image(i: int) -> torch.Tensor:
    return torch.full((3, 4, 5), i, dtype=torch.uint8)


KINDS: dict[str, Callable[[int], Any]] = {
    # tensors
    "tensor": grid,
    "tensor, 0-d": lambda i: torch.tensor(i * 0.5),
    "tensor, empty": lambda i: torch.zeros(0, 3),
    "tensor, bool": lambda i: torch.tensor([i % 2 == 0, True]),
    "tensor, uint16": lambda i: torch.tensor([i, 65535], dtype=torch.uint16),
    "tensor, float16": lambda i: grid(i, torch.float16),
    "tensor, bfloat16": lambda i: grid(i, torch.bfloat16),
    "tensor, complex64": lambda i: grid(i, torch.complex64),
    "tensor, float8": lambda i: grid(i).to(torch.float8_e4m3fn),
    "tensor, not contiguous": lambda i: grid(i).T,
    "tensor, channels last": lambda i: (image(i)[None].repeat(2, 1, 1, 1)).to(memory_format=torch.channels_last),
    "tensor, requires grad": lambda i: grid(i).requires_grad_(),
    "tensor, sparse": lambda i: grid(i).to_sparse(),
    "tensor, nested": lambda i: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "tensor, quantized": lambda i: torch.quantize_per_tensor(grid(i), 0.5, 0, torch.qint8),
    "tensor, derived class": lambda i: grid(i).as_subclass(Affine),
    "tensors of varying length": lambda i: torch.arange(i % 3 + 1),
    "tensors of varying shape": lambda i: torch.ones(2, i % 3 + 1, i % 2 + 1) * i,
    "tv_tensors": lambda i: {
        "image": tv_tensors.Image(image(i)),
        "mask": tv_tensors.Mask(image(i)[0]),
        "boxes": tv_tensors.BoundingBoxes([[i, 0, 3, 4]], format="XYXY", canvas_size=(4, 5)),
    },
    # arrays
    "array, float64": lambda i: np.arange(6.0).reshape(2, 3) + i,
    "array, int32": lambda i: np.arange(6, dtype=np.int32) + i,
    "array, uint32": lambda i: np.arange(6, dtype=np.uint32) + i,
    "array, uint64": lambda i: np.arange(6, dtype=np.uint64) + i,
    "array, float16": lambda i: np.arange(6, dtype=np.float16) + i,
    "array, complex128": lambda i: np.arange(6, dtype=np.complex128) + 1j * i,
    "array, bool": lambda i: np.array([True, i % 2 == 0]),
    "array, 0-d": lambda i: np.array(i),
    "array, big-endian": lambda i: np.arange(3, dtype=">i4") + i,
    "array, read only": lambda i: np.broadcast_to(np.float32(i), (2, 3)),
    "array, negative strides": lambda i: (np.arange(6.0) + i)[::-1],
    "array of text": lambda i: np.array(["a", "bc"]),
    "array of bytes": lambda i: np.array([b"a", b"bc"]),
    "array of objects": lambda i: np.array([i, "a"], dtype=object),
    "array, structured": lambda i: np.array([(i, 0.5)], dtype=[("x", "i8"), ("y", "f4")]),
    "array, masked": lambda i: np.ma.array([1.0, 2.0], mask=[i % 2 == 0, False]),
    "arrays of varying length": lambda i: np.arange(i % 3 + 1),
    "np.datetime64": lambda i: np.datetime64("2020-01-01") + i,
    # scalars
    "np.float32": lambda i: np.float32(i / 2),
    "np.int64": lambda i: np.int64(i),
    "np.int8": lambda i: np.int8(i),
    "np.bool_": lambda i: np.bool_(i % 2),
    "np.str_": lambda i: np.str_(f"row {i}"),
    "np.bytes_": lambda i: np.bytes_(b"row"),
    "int": lambda i: i,
    "int, large": lambda i: 2**60 + i,
    "int, beyond int64": lambda i: 2**70 + i,
    "float": lambda i: i / 3,
    "float, nan": lambda i: float("nan") if i == 1 else float(i),
    "bool": lambda i: i % 2 == 0,
    "complex": lambda i: complex(i, 1),
    "int or float": lambda i: i if i % 2 else i / 2,
    "int, then float": lambda i: i if i < 4 else i / 2,
    "str": lambda i: f"row {i}",
    "str, empty and Unicode": lambda i: "" if i % 2 else "žluťoučký \U0001f40e\0",
    "bytes": lambda i: bytes([i, 0]),
    "bytearray": lambda i: bytearray([i, 0]),
    "None": lambda i: None,
    "number or None": lambda i: None if i == 2 else i,
    "str or None": lambda i: None if i == 2 else "a",
    "PIL image": lambda i: PIL.Image.new("RGB", (4, 5), (i, 0, 0)),
    "Decimal": lambda i: decimal.Decimal(i),
    "Fraction": lambda i: fractions.Fraction(i, 3),
    "datetime": lambda i: datetime.datetime(2020, 1, 1 + i),
    "enum": lambda i: Color.RED,
    "IntEnum": lambda i: Level.HIGH,
    "Path": lambda i: pathlib.PurePosixPath(f"images/{i}.jpg"),
    "slice": lambda i: slice(0, i),
    "function": lambda i: grid,
    "object": lambda i: Point(i),
    # containers
    "tuple": lambda i: (grid(i), i),
    "tuple of one": lambda i: (grid(i),),
    "tuple, empty": lambda i: (),
    "tuple of str": lambda i: (f"row {i}", "a"),
    "tuple with None": lambda i: (grid(i), None),
    "tuple of ints": lambda i: (i, i + 1),
    "tuples of varying length": lambda i: tuple(range(i % 3 + 1)),
    "list of tensors": lambda i: [grid(i), grid(i + 1)],
    "list of ints": lambda i: [i, i + 1, i + 2],
    "list of floats": lambda i: [i / 2, 0.5],
    "list of bools": lambda i: [True, i % 2 == 0],
    "list of str": lambda i: [f"row {i}", "a"],
    "list of lists": lambda i: [[i, 1], [2, 3]],
    "list of mixed": lambda i: [i, "a", 0.5],
    "list, empty": lambda i: [],
    "lists of varying length": lambda i: list(range(i % 3 + 1)),
    "lists of tensors of varying length": lambda i: [torch.ones(2) * i] * (i % 3 + 1),
    "lists of str of varying length": lambda i: ["a"] * (i % 3 + 1),
    "dict": lambda i: {"x": grid(i), "y": i},
    "dict, empty": lambda i: {},
    "dict with int keys": lambda i: {0: grid(i), 1: i},
    "dict with tuple keys": lambda i: {(0, 1): grid(i)},
    "dict with str": lambda i: {"x": grid(i), "name": f"row {i}"},
    "dict with a list": lambda i: {"ids": [i, 1, 2], "name": "a"},
    "dict with a tuple": lambda i: {"size": (i, 4), "name": ("a", "b")},
    "dicts with other orders": lambda i: {"x": i, "y": 0} if i % 2 else {"y": 0, "x": i},
    "dicts with more keys": lambda i: {"x": i} if i % 2 else {"x": i, "y": 0},
    "OrderedDict": lambda i: collections.OrderedDict(x=grid(i), y=i),
    "defaultdict": lambda i: collections.defaultdict(list, x=grid(i)),
    "UserDict": lambda i: collections.UserDict(x=i),
    "mapping proxy": lambda i: types.MappingProxyType({"x": i}),
    "namedtuple": lambda i: Pair(grid(i), i),
    "dataclass": lambda i: Record(grid(i), i),
    "SimpleNamespace": lambda i: types.SimpleNamespace(x=i),
    "set": lambda i: {i, 1},
    "range": lambda i: range(i, i + 2),
    "deque": lambda i: collections.deque([i, 1]),
    "tensorclass": lambda i: Photo(pixels=image(i), label=torch.tensor(i), batch_size=[]),
    "TensorDict": lambda i: TensorDict({"x": grid(i), "y": torch.tensor(i)}, []),
    "nested": lambda i: {"a": (grid(i), {"b": [image(i), Pair(grid(i), i)], "c": "text"}), "d": [(i, 1), (2, 3)]},
    "detection target": lambda i: (
        image(i),
        {"boxes": torch.ones(i % 3, 4), "labels": torch.ones(i % 3, dtype=torch.int64), "image_id": i},
    ),
}


class Rows(Dataset):
    """A map-style dataset of a kind of samples."""

    def __init__(self, kind: str, length: int = ROWS) -> None:
        self.kind, self.length = kind, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.length:
            raise IndexError(i)
        return KINDS[self.kind](operator.index(i))
