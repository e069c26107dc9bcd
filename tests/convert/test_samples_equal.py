"""A store is exactly what the dataset gave: samples of any nesting and kind, by every way into a store."""

import dataclasses
import math
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, tensorclass
from torch.utils.data import IterableDataset, default_collate
from torchvision import tv_tensors

import memfeed
from memfeed import Loader
from memfeed.convert.write_run import columns_of
from memfeed.schema.fields import DTYPES
from memfeed.schema.tree import Flattener
from support import equal

N = 20
Two = namedtuple("Two", "a b")


@dataclasses.dataclass
class Pair:
    a: object
    b: object


@tensorclass
class Item:
    x: torch.Tensor
    text: str


def numbers(index, shape, dtype):
    """Return a tensor that differs for each index."""
    g = torch.Generator().manual_seed(index)
    return torch.randint(0, 120, tuple(shape), generator=g).to(dtype)


# A recipe is a function (sample index) -> value, with a name that a failing example shows.


class Recipe:
    def __init__(self, name, make):
        self.name, self.make = name, make

    def __call__(self, index):
        return self.make(index)

    def __repr__(self):
        return self.name


def strided(index):
    return numbers(index, (4, 6), torch.int32).t()[::2, 1:]


LEAVES = [
    *(Recipe(name, lambda i, d=d: numbers(i, (2, 3), d)) for name, d in DTYPES.items()),
    Recipe("0-d", lambda i: numbers(i, (), torch.float64)),
    Recipe("empty", lambda i: torch.empty(2, 0)),
    Recipe("strided", strided),
    Recipe("expanded", lambda i: numbers(i, (1, 3), torch.int16).expand(4, 3)),
    Recipe("one element with a stride", lambda i: numbers(i, (5, 2), torch.int64)[2:3, 1:]),
    Recipe("conjugate", lambda i: torch.complex(*numbers(i, (2, 3), torch.float32)).conj()),
    Recipe("with a gradient", lambda i: numbers(i, (2,), torch.float32).requires_grad_()),
    Recipe("nan", lambda i: torch.tensor([math.nan, math.inf, -0.0, i])),
    Recipe("array", lambda i: numbers(i, (3, 2), torch.float32).numpy()),
    Recipe("big-endian array", lambda i: np.arange(i, i + 3).astype(">i4")),
    Recipe("array backwards", lambda i: np.arange(i, i + 6).reshape(2, 3)[::-1, ::-2]),
    Recipe("part of a structured array", lambda i: np.full(3, i, np.dtype([("a", "i1"), ("b", "<f4")]))["b"]),
    Recipe("Fortran array", lambda i: np.asfortranarray(numbers(i, (2, 3), torch.uint8).numpy())),
    Recipe("array of varying size", lambda i: np.arange(i % 4, dtype=np.uint16)),
    Recipe("numpy scalar", lambda i: np.float32(i) / 3),
    Recipe("numpy bool", lambda i: np.bool_(i % 2)),
    Recipe("str", lambda i: "é\n" * (i % 3) + str(i)),
    Recipe("bytes", lambda i: bytes(range(i % 5))),
    Recipe("bool", lambda i: i % 3 == 0),
    Recipe("int", lambda i: -(2**63) + i),
    Recipe("float", lambda i: i / 7 if i else math.nan),
    Recipe("complex", lambda i: complex(i, -1)),
    Recipe("None", lambda i: None),
    Recipe("None or tensor", lambda i: None if i % 3 == 1 else numbers(i, (2,), torch.float32)),
    Recipe("None or str", lambda i: None if i % 2 else str(i)),
    Recipe("None or list", lambda i: None if i % 4 == 3 else [i, i]),
    Recipe("json", lambda i: {"k": [i, None, "x"]} if i % 2 else [i, {"deep": [0.5]}]),
    Recipe("list of mixed numbers", lambda i: [i, 0.5, True][: 1 + i % 3]),
    Recipe("record of numbers", lambda i: [i, i / 2]),
    Recipe("empty list", lambda i: []),
    Recipe("list of one", lambda i: [i]),
    Recipe("tokens of one length", lambda i: list(range(i, i + 5))),
    Recipe("floats of one length", lambda i: [i / 2, 0.1, 0.2]),
    Recipe("tokens", lambda i: list(range(i % 6))),
    Recipe("jagged", lambda i: numbers(i, (i % 5, 2), torch.float16)),
    Recipe("audio", lambda i: numbers(i, (1, i % 6), torch.float32)),
    Recipe("stereo", lambda i: numbers(i, (2, i % 6), torch.int16)),
    Recipe("images", lambda i: numbers(i, (3, 1 + i % 3, 2 + i % 2), torch.uint8)),
    Recipe("size", lambda i: torch.Size([i, 2])),
    Recipe("tv image", lambda i: tv_tensors.Image(numbers(i, (3, 4, 5), torch.uint8))),
    Recipe("tv mask", lambda i: tv_tensors.Mask(numbers(i, (1 + i % 3, 4), torch.bool))),
]
BY_NAME = {recipe.name: recipe for recipe in LEAVES}
TENSORS = [*DTYPES, "0-d", "empty", "strided", "jagged", "stereo", "images"]  # what a TensorDict holds as tensors


def container(kind, parts):
    def make(index):
        values = [part(index) for part in parts]
        if kind == "dict":
            keys = ["a", 7, "b.c", "d e"][: len(parts)]
            pairs = list(zip(keys, values, strict=True))
            return dict(pairs if index % 2 else pairs[::-1]) if index else dict(pairs)
        if kind in (list, tuple):
            return kind(values)
        return kind(*(values * 2)[:2])

    name = kind if isinstance(kind, str) else kind.__name__
    return Recipe(f"{name}{parts}", make)


def collection(kind, parts):
    def make(index):
        if kind == "TensorDict":
            tensors = {str(k): part(index) for k, part in enumerate(parts)}
            nested = TensorDict({"deep": numbers(index, (2, 2), torch.int64)}, batch_size=[2])
            return TensorDict({**tensors, "nested": nested, "text": str(index)})
        return Item(x=parts[0](index), text=str(index), batch_size=[])

    return Recipe(f"{kind}{parts}", make)


leaves = st.sampled_from(LEAVES)
collections = st.builds(
    collection,
    st.sampled_from(["TensorDict", "tensorclass"]),
    st.lists(st.sampled_from([BY_NAME[name] for name in TENSORS]), min_size=1, max_size=3),
)
recipes = st.recursive(
    leaves | collections,
    lambda parts: st.builds(
        container, st.sampled_from(["dict", list, tuple, Two, Pair]), st.lists(parts, min_size=1, max_size=4)
    ),
    max_leaves=8,
)


class Refilled:
    """Gives samples in memory that it fills again, where shape and dtype allow it."""

    def __init__(self, make):
        self.make, self.kept = make, {}

    def __call__(self, index):
        return self.refill((), self.make(index))

    def refill(self, path, new):
        if isinstance(new, dict):
            return {key: self.refill((*path, key), part) for key, part in new.items()}
        if isinstance(new, tuple) and hasattr(new, "_fields"):
            return type(new)(*(self.refill((*path, k), part) for k, part in enumerate(new)))
        if type(new) is list and any(isinstance(part, torch.Tensor | np.ndarray) for part in new):
            return [self.refill((*path, k), part) for k, part in enumerate(new)]
        old = self.kept.get(path)
        if type(new) is list and type(old) is list:
            old[:] = new
        elif isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor) and old.shape == new.shape:
            old.detach().copy_(new)
        elif isinstance(new, np.ndarray) and isinstance(old, np.ndarray) and old.shape == new.shape:
            old[...] = new
        else:
            writable = isinstance(new, torch.Tensor) and not isinstance(new, torch.nn.Parameter)
            self.kept[path] = new.detach().clone() if writable else new
        return self.kept[path]


class Samples:
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index >= N:
            raise IndexError
        return self.make(index)


class Together(Samples):
    def __getitems__(self, indices):
        return [self.make(index) for index in indices]


class Stream(IterableDataset):
    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return map(self.make, range(N))


def appended(path, make):
    with memfeed.Writer(path) as writer:
        for index in range(N):
            writer.append(make(index))
    return memfeed.open(path, types=(Two, Pair, Item))


def from_dataset(kind):
    return lambda path, make: memfeed.cache(kind(make), path, workers=0, progress=False)


WAYS = {
    "map": from_dataset(Samples),
    "__getitems__": from_dataset(Together),
    "iterable": from_dataset(Stream),
    "iterator": lambda path, make: memfeed.cache(map(make, range(N)), path, progress=False),
    "Writer": appended,
}


def plain(value):
    """Return a value as a store gives it: arrays as tensors, a bytearray as bytes, a torch.Size as a tuple."""
    return tuple(value) if isinstance(value, torch.Size) else value


def check(store, make):
    """Raise AssertionError unless every sample and every batch of a store is what `make` gives."""
    flatten = Flattener(store.schema.structure)
    samples = [make(index) for index in range(N)]
    for index, sample in enumerate(samples):
        found = store[index]
        pairs = zip(flatten(found), flatten(sample), strict=True)
        for one, other in pairs:
            assert equal(one, detached(plain(other))), index
            assert not isinstance(other, tv_tensors.TVTensor) or type(one) is type(other)
        assert type(found) is type(sample) or not isinstance(sample, tuple | dict | list)
        assert all(tensor.is_contiguous() for tensor in flatten(found) if isinstance(tensor, torch.Tensor))
    store.verify()
    rows = [3, 0, 7, 7]
    batches = [(store[rows], [samples[row] for row in rows])]
    batches += [(batch, samples[4 * k : 4 * k + 4]) for k, batch in enumerate(Loader(store, 4))]
    for batch, expected in batches:
        columns = columns_of(store.schema.structure, batch)
        of_samples = zip(*map(flatten, expected), strict=True)
        for field, column, values in zip(store.schema, columns, of_samples, strict=True):
            check_batch(field, column, [detached(value) for value in values])


def check_batch(field, column, values):
    """Raise AssertionError unless one leaf of a batch is what collating the values of its samples gives."""
    if field.kind == "fixed":
        tensors = [v if isinstance(v, torch.Tensor) else torch.from_numpy(np.array(v)) for v in values]
        assert equal(column, torch.stack([tensor.resolve_conj() for tensor in tensors]))
        return
    if field.kind == "jagged":
        assert column.is_nested
        column = list(column.unbind())
    assert isinstance(column, list)
    for found, value in zip(column, values, strict=True):
        assert equal(found.tolist() if field.form == "list" and found is not None else found, value)


def detached(value):
    if isinstance(value, torch.Tensor):
        return value.detach()
    return value.astype(value.dtype.newbyteorder("=")).copy() if isinstance(value, np.ndarray) else value


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(recipe=recipes, way=st.sampled_from(sorted(WAYS)), refill=st.booleans())
def test_any_sample_by_any_way(tmp_path_factory, recipe, way, refill):
    def make(index):
        return {"index": index, "sample": recipe(index)}

    store = WAYS[way](tmp_path_factory.mktemp("any") / "a.mf", Refilled(make) if refill else make)
    check(store, make)


def everything(index):
    return {recipe.name: recipe(index) for recipe in LEAVES} | {
        "tuple": (index, [torch.tensor(index), Two(index, Pair("x", np.zeros(2) + index))]),
        "td": collection("TensorDict", [BY_NAME["strided"], BY_NAME["images"]])(index),
        "item": collection("tensorclass", [BY_NAME["jagged"]])(index),
    }


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_kind_at_once(tmp_path, way, refill):
    check(WAYS[way](tmp_path / "a.mf", Refilled(everything) if refill else everything), everything)


@pytest.mark.parametrize("kind", [Samples, Together])
def test_every_kind_at_once_with_workers(tmp_path, kind):
    store = memfeed.cache(kind(Refilled(everything)), tmp_path / "a.mf", workers=2, progress=False)
    check(store, everything)
    check(memfeed.cache(kind(everything), tmp_path / "a.mf", progress=False), everything)


COLUMNS = [*DTYPES, "0-d", "empty", "strided", "expanded", "nan", "one element with a stride"]


def column_sample(index):
    return {"td": {name: BY_NAME[name](index) for name in COLUMNS}, "label": torch.tensor(index)}


def test_columns(tmp_path):
    td = torch.stack([TensorDict(column_sample(index)) for index in range(N)])
    for name, data in (("td", td), ("dict", td.to_dict()), ("views", td[:, None].expand(N, 3)[:, 1].to_dict())):
        store = memfeed.cache(data, tmp_path / f"{name}.mf", progress=False)
        for index in range(N):
            found = store[index].to_dict() if name == "td" else store[index]
            assert equal(found, td[index].to_dict())
        store.verify()
        batch = store[[3, 1]]["td"]
        assert all(equal(batch[key], torch.stack([td[i]["td"][key] for i in (3, 1)])) for key in COLUMNS)
    with memfeed.Writer(tmp_path / "extended.mf") as writer:
        writer.extend(td[:7].to_dict())
        writer.extend(td[7:].to_dict())
    assert all(equal(row, td[index].to_dict()) for index, row in enumerate(memfeed.open(tmp_path / "extended.mf")))


def test_assigned_rows(tmp_path):
    samples = [{"x": numbers(index, (2, 3), torch.int32), "n": index} for index in range(N)]
    with memfeed.Writer(tmp_path / "a.mf", like=samples[0], length=N) as writer:
        make = Refilled(samples.__getitem__)
        for index in reversed(range(N)):
            writer[index] = make(index)
    assert all(equal(row, sample) for row, sample in zip(memfeed.open(tmp_path / "a.mf"), samples, strict=True))


PLAIN = ["float32", "bool", "0-d", "empty", "strided", "int", "float", "numpy scalar", "array", "record of numbers"]


def test_batches_of_plain_samples_are_those_of_default_collate(tmp_path):
    def make(index):
        return {"x": tuple(BY_NAME[name](index + 1) for name in PLAIN), "y": Two(index, {"z": torch.tensor(index)})}

    store = WAYS["map"](tmp_path / "a.mf", make)
    rows = [4, 0, 4]
    assert equal(store[rows], default_collate([make(row) for row in rows]))
