"""TensorDicts of every kind that tensordict saves, for the tests of directories and of TensorDicts in memory."""

from __future__ import annotations

import inspect
from typing import Any

import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

# older versions of tensordict name files as the keys, and some take this to encode the names, as the newest do
ENCODED = {"robust_key": True} if "robust_key" in inspect.signature(TensorDict.memmap).parameters else {}


@tensorclass
class Inner:
    points: torch.Tensor


@tensorclass
class Sample:
    image: torch.Tensor
    inner: Inner
    note: str
    missing: torch.Tensor | None = None


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def _plain() -> TensorDict:
    return TensorDict(
        {
            "image": numbers(6, 3, 2, dtype=torch.uint8),
            "flag": torch.tensor([True, False] * 3),
            "half": numbers(6, dtype=torch.bfloat16),
            "wave": numbers(6, 2, dtype=torch.complex64),
            "none": torch.empty(6, 0),
            "deep": TensorDict({"er": TensorDict({"x": numbers(6, 2, 4)}, [6, 2]), "pair": numbers(6, 2)}, [6]),
            "empty": TensorDict({}, [6]),
        },
        [6],
        names=["row"],
    )


def _deep_with_own_batch() -> TensorDict:
    inner = TensorDict({"x": numbers(2, 5, 3), "y": TensorDict({"z": numbers(2, 5, 7)}, [2, 5, 7])}, [2, 5])
    return TensorDict({"inner": inner, "z": numbers(2, 5)}, [2])


def _two_batch_dims() -> TensorDict:
    words = NonTensorStack(NonTensorStack("a", "b", "c"), NonTensorStack("d", "e", "f"))
    return TensorDict({"x": numbers(2, 3, 4), "words": words}, [2, 3])


def _odd_names() -> TensorDict:
    names = ["a/b", "a b", "a.b", "50%", "é", "0", "..", "", "a\\b", "x:y", "meta", "start", "c0", "A", "a%20b"]
    if not ENCODED:
        names = [name for name in names if name not in ("a/b", "a\\b")]  # they would be paths
    return TensorDict({name: numbers(2) + i for i, name in enumerate(names)}, [2])


def _non_tensors() -> TensorDict:
    values = {
        "x": numbers(3, 2),
        "text": NonTensorData("shared", batch_size=[3]),
        "number": NonTensorData(3, batch_size=[3]),
        "nothing": NonTensorData(None, batch_size=[3]),
        "tree": NonTensorData({"k": [1, 2.5, None], "l": {}}, batch_size=[3]),
        "as_long_as_the_batch": NonTensorData([1, 2, 3], batch_size=[3]),
        "words": NonTensorStack("a", "b\u20ac", ""),
        "ints": NonTensorStack(1, 2, 3),
        "mixed": NonTensorStack({"a": 1}, None, "c"),
        "lists": NonTensorStack([1, 2], [3], []),
        "deep": TensorDict({"only": NonTensorData("here", batch_size=[3])}, [3]),
    }
    return TensorDict(values, [3])


def _sample(n: int) -> Sample:
    inner = Inner(points=numbers(n, 5, 2), batch_size=[n, 5])
    return Sample(image=numbers(n, 3), inner=inner, note="same", batch_size=[n])


def _classes() -> Sample:
    return _sample(4)


def _piece(i: int) -> TensorDict:
    return TensorDict(
        {
            "same": torch.full((2, 2), i),
            "scalar": torch.tensor(i),
            "ids": numbers(i, dtype=torch.int64) + 100 * i,
            "mask": torch.ones(i, dtype=torch.bool),
            "image": numbers(3, i, 2) + i,
            "empty": torch.empty(0, 3),
            "sometimes": numbers(i % 2),
            "text": f"row {i}",
            "tree": NonTensorData({"i": i}),
            "deep": TensorDict({"er": TensorDict({"x": numbers(i, 2)}, [])}, []),
        },
        [],
    )


def _lazy() -> LazyStackedTensorDict:
    return lazy_stack([_piece(i) for i in range(1, 13)])


def _lazy_with_batch() -> LazyStackedTensorDict:
    def piece(i: int) -> TensorDict:
        words = NonTensorStack(f"a{i}", "b", "c")
        return TensorDict({"y": numbers(3, 2), "w": words, "s": NonTensorData(i, batch_size=[3])}, [3])

    return lazy_stack([piece(i) for i in range(1, 4)])


def _lazy_with_batch_ragged_behind_it() -> LazyStackedTensorDict:
    def piece(i: int) -> TensorDict:
        return TensorDict({"x": numbers(3, i), "y": numbers(3, 2), "w": NonTensorStack(f"a{i}", "b", "c")}, [3])

    return lazy_stack([piece(i) for i in range(1, 4)])


def _lazy_with_batches_that_differ() -> LazyStackedTensorDict:
    return lazy_stack([TensorDict({"x": numbers(i, 2), "y": numbers(i)}, [i]) for i in (3, 1, 2)])


def _lazy_classes() -> Any:
    return lazy_stack(
        [
            Sample(image=numbers(3, i), inner=Inner(points=numbers(i), batch_size=[]), note=f"n{i}", batch_size=[])
            for i in range(1, 4)
        ]
    )


def _lazy_nested() -> TensorDict:
    return TensorDict({"l": lazy_stack([_piece(i) for i in range(1, 5)]), "z": numbers(4)}, [4])


KINDS = {
    make.__name__.strip("_"): make
    for make in (
        _plain,
        _deep_with_own_batch,
        _two_batch_dims,
        _odd_names,
        _non_tensors,
        _classes,
        _lazy,
        _lazy_with_batch,
        _lazy_with_batch_ragged_behind_it,
        _lazy_with_batches_that_differ,
        _lazy_classes,
        _lazy_nested,
    )
}


def plain(value):
    """A batch as lists, dicts and texts, with the batch sizes of its containers."""
    if isinstance(value, tensordict.TensorDictBase) or tensordict.is_tensorclass(value):
        if tensordict.is_non_tensor(value):
            return plain(value.tolist())
        value = value if isinstance(value, tensordict.TensorDictBase) else value._tensordict  # a value as it is kept
        keys = [key for key in value.keys() if value.get(key) is not None]  # noqa: SIM118
        return tuple(value.batch_size), {key: plain(value.get(key)) for key in sorted(keys)}
    if isinstance(value, torch.Tensor):
        rows = value.unbind() if value.is_nested else [value]
        return str(value.dtype), value.is_nested, [(tuple(row.shape), row.tolist()) for row in rows]
    return [plain(part) for part in value] if isinstance(value, list) else value
