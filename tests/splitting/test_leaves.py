"""Leaves: what a store keeps of them and gives back, trees taken apart and built again."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from tensordict import TensorDict
from torch.utils import _pytree as pytree

from memfeed.errors import SplitError
from memfeed.schema.compare import equal
from memfeed.splitting import leaves as lv
from memfeed.splitting.leaves import kind_of, take_apart

Point = namedtuple("Point", "x y")
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
FLOATS, INTS = st.floats(), st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.one_of(*(st.lists(one) for one in (FLOATS, INTS, st.booleans(), st.complex_numbers())))
ROWS = st.tuples(st.sampled_from([tuple, list]), st.integers(1, 3), st.sampled_from([FLOATS, INTS])).flatmap(
    lambda how: st.lists(st.lists(how[2], min_size=how[1], max_size=how[1]).map(how[0]), min_size=1, max_size=4)
)
VALUES = st.one_of(FLOATS, INTS, st.booleans(), st.text(), st.binary(), st.none(), NUMBERS, ROWS)


@dataclass
class Pair:
    left: Any
    right: Any


def there_and_back(leaf):
    kind = kind_of(leaf)
    parts = lv.to_stored(leaf, kind)
    assert len(parts) == lv.stored_count(kind)
    return lv.from_stored(parts, kind)


def assert_kept(leaf):
    assert equal(there_and_back(leaf), leaf)


@settings(max_examples=150)
@given(ARRAYS)
def test_tensors_and_arrays_are_kept(array):
    assert_kept(array)
    assert_kept(torch.from_numpy(array.T))


@settings(max_examples=200)
@given(VALUES)
def test_numbers_text_and_lists_are_kept(value):
    assert_kept(value)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I;16", "I", "F"])
def test_images_are_kept(mode):
    band = {"I;16": np.uint16, "I": np.int32, "F": np.float32}.get(mode, np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 4)).astype(band)
    if mode in ("I;16", "I", "F"):
        image = Image.fromarray(noise[..., 0] * band(200))
    elif mode == "P":
        image = Image.fromarray(noise[..., :3]).quantize(9)
    else:
        image = Image.fromarray(noise[..., :3]).convert("L" if mode == "LA" else "RGB").convert(mode)
    assert image.mode == mode
    assert_kept(image)


def test_boxes_are_kept():
    tv = pytest.importorskip("torchvision.tv_tensors")
    for form in ("XYXY", "XYWH", "CXCYWH"):
        assert_kept(tv.BoundingBoxes(torch.rand(3, 4), format=form, canvas_size=(9, 8)))


def test_trees_are_built_again():
    data = pytest.importorskip("torch_geometric.data").Data(x=torch.ones(2, 3), y=torch.tensor([4]))
    mapping = TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2, 3)}}, [2])
    tokens = [[[1, 2], 0], [[1], None], [(1, 2), 0.5, "x"]]  # a list of numbers, then something else
    for tree in (
        {"b": 1, "a": (2, [None, "x"])},
        *tokens,
        Point(1, {"z": 2}),
        Pair(1, [Pair(2, 3), "x"]),
        mapping,
        data,
    ):
        leaves, form = take_apart({"tree": tree})
        again = form.build(leaves)["tree"]
        assert type(again) is type(tree)
        assert equal(tree, again)
        assert take_apart(again)[1] == take_apart(tree)[1]
        assert form.count == len(leaves) == len(form.paths())


def test_paths_and_the_order_of_keys():
    tree = {"b": [torch.ones(1), [1, 2]], "a": Point(1, Pair(2, {"k": None}))}
    leaves, form = take_apart(tree)
    inside = [("a", "x"), ("a", "y", "left"), ("a", "y", "right", "k")]
    assert form.paths() == [*inside, ("b", 0), ("b", 1)]
    assert [*leaves[:3], leaves[4]] == [1, 2, None, [1, 2]]
    assert list(form.build(leaves)) == ["b", "a"]


@dataclass
class Measured:
    x: torch.Tensor

    def __post_init__(self):
        self.largest = float(self.x.max())


class Named(list):
    pass


class Node:
    def __init__(self, x, key):
        self.x, self.key = x, key


pytree.register_pytree_node(Node, lambda node: ([node.x], node.key), lambda parts, key: Node(parts[0], key))


def named(name):
    value = Named([1, "x"])
    value.name = name
    return value


@pytest.mark.parametrize(
    ("one", "other", "attribute"),
    [
        (Measured(torch.ones(2)), Measured(torch.zeros(2)), "largest"),
        (named("a"), named("b"), "name"),
        (Node(1, "a"), Node(1, "b"), "context"),
        (named(len), named(len), "name"),  # a function may be bound to one sample
    ],
)
def test_what_a_container_has_beside_its_content_must_be_the_same(one, other, attribute):
    with pytest.raises(SplitError, match=attribute):
        assert take_apart(one)[1] == take_apart(other)[1]


def test_what_is_the_same_beside_the_content_of_all_containers_is_kept():
    form = take_apart(named("a"))[1]
    assert form == take_apart(named("a"))[1]
    assert form.build([2, "y"]).name == "a"
    assert take_apart(Node(1, int))[1] == take_apart(Node(2, int))[1]
