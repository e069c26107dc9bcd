"""Tensors of derived classes: a store never makes plain ones of them in silence."""

import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import TensorDataset
from torchvision import tv_tensors

import memfeed
from memfeed import Loader
from memfeed.errors import SchemaError
from support import Made, cache

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of what torch has deprecated
    pytest.importorskip("torch_geometric")
    from torch_geometric import EdgeIndex
    from torch_geometric.data import Data

N = 40


class MetaTensor(torch.Tensor):
    """A tensor with an affine and other things beside its numbers, as MONAI has it."""

    @staticmethod
    def __new__(cls, data, meta):
        return torch.as_tensor(data).as_subclass(cls)

    def __init__(self, data, meta):
        self._meta = meta

    @property
    def affine(self):
        return self._meta["affine"]

    def as_tensor(self):
        return self.as_subclass(torch.Tensor)


class Mask(tv_tensors.Mask):
    """Derived from a class of torchvision: not that class."""


def scan(i=0):
    return MetaTensor(torch.full((2, 3), float(i)), {"affine": torch.eye(4) * i, "name": "a.nii"})


def edges(i=1):
    return EdgeIndex([[0, i], [i, 0]], sparse_size=(i + 1, i + 1))


REFUSED = (
    r"field {}: found MetaTensor \(of test_tensor_classes\), of which a store would lose the class, meta; expected a "
    r"plain tensor or array: return x\.as_tensor\(\) in the dataset"
)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("sample", "field"),
    [
        (lambda i: (scan(i), i), "0"),
        (lambda i: {"a": {"image": scan(i)}}, "a.image"),
        (scan, "value"),
        (lambda i: Data(x=scan(i), num_nodes=2), "x"),
        (lambda i: TensorDict({"image": scan(i)}), "image"),
    ],
)
def test_the_field_and_what_would_be_lost_are_named(path, sample, field, workers):
    with pytest.raises(SchemaError, match=REFUSED.format(field.replace(".", r"\."))):
        cache(Made(sample, N), path, workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("late", [scan, lambda: EdgeIndex(torch.zeros(2, 3, dtype=torch.int64))])
def test_one_that_the_probe_did_not_see(path, late, workers):
    plain = late().as_tensor() * 1
    with pytest.raises(SchemaError, match=r"sample 77, field 0: found \w+ .*of which a store would lose"):
        cache(Made(lambda i: (late() if i == 77 else plain, i), 300), path, workers=workers)


@pytest.mark.parametrize(
    "data",
    [
        scan(),
        {"x": scan(), "y": torch.zeros(2)},
        TensorDataset(torch.zeros(2), scan()),
        {"edges": edges()},
        TensorDict({"x": scan()}, [2]),
    ],
    ids=["tensor", "dict", "TensorDataset", "EdgeIndex", "TensorDict"],
)
def test_columns(path, data):
    with pytest.raises(SchemaError, match=r"column \w+: found \w+ .*of which a store would lose the class"):
        cache(data, path)
    with pytest.raises(SchemaError, match=r"(column|field) \w+: found \w+ .*of which a store would lose the class"):
        Loader(data)


def test_other_ways_in(path):
    refused = pytest.raises(SchemaError, match="found MetaTensor .*would lose the class, meta")
    with refused:
        Loader(Made(lambda i: (scan(i), i), N), cache=path, require="samples")
    with refused:
        cache(map(scan, range(N)), path)
    with refused:
        cache(Made(scan, N), path, forms={float: torch.float16})
    with refused, memfeed.Writer(path) as writer:
        writer.append({"x": scan()})
    with pytest.raises(SchemaError, match="found MetaTensor"), memfeed.Writer(path.with_name("b.mf")) as writer:
        writer.extend({"x": scan()})
    with pytest.raises(SchemaError, match="field x: found EdgeIndex"):
        cache((TensorDict({"x": edges()}) for _ in range(N)), path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Mask(torch.ones(2, 2)), r"found Mask .*would lose the class; .*return x\.as_subclass\(torch\.Tensor\) in"),
        (np.ma.masked_array([1, 2], [0, 1]), r"found MaskedArray .*would lose the mask; .*return x\.filled\(0\) in"),
    ],
)
def test_other_classes(path, value, message):
    for data in ([value] * N, value):
        with pytest.raises(SchemaError, match=message):
            cache(data, path)


def test_what_is_no_more_than_numbers(path):
    values = [torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(2))]
    assert all(type(one) is torch.Tensor for one in cache(values * N, path))


def test_rounding_keeps_the_classes_of_torchvision(path):
    def sample(i):
        boxes = tv_tensors.BoundingBoxes(torch.ones(1, 4), format="XYXY", canvas_size=(i, 9))
        return tv_tensors.Image(torch.rand(3, 4, 4)), boxes

    image, boxes = cache(Made([sample(i) for i in range(N)]), path, forms={float: torch.float16})[5]
    assert (type(image), type(boxes), boxes.canvas_size) == (tv_tensors.Image, tv_tensors.BoundingBoxes, (5, 9))
    assert image.dtype is boxes.dtype is torch.float16
