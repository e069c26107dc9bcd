"""Containers of any class: copied, searched for tensors, listed with paths. `test_to_device` has more classes."""

import dataclasses
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.nn.utils.rnn import pack_sequence

from memfeed.schema.containers import flatten, leaves_with_paths, map_leaves, tensors_in
from memfeed.schema.values import copy_value
from support import Labelled, Pair, equal, rich_sample

Two = namedtuple("Two", "a b")
leaves = st.one_of(st.integers(), st.text(max_size=3), st.none())


def containers(children):
    return st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(st.text(max_size=3), children, max_size=3),
        st.tuples(children, children).map(lambda pair: Two(*pair)),
        st.tuples(children, st.integers()).map(lambda pair: Labelled(*pair)),
        st.dictionaries(st.integers(), children, max_size=3).map(UserDict),
    )


@given(st.recursive(leaves, containers, max_leaves=12))
def test_a_tree_is_its_leaves_in_its_structure(tree):
    found, unflatten = flatten(tree)
    assert equal(unflatten(found), tree)
    assert [leaf for _, leaf in leaves_with_paths(tree)] == found
    assert equal(map_leaves(lambda leaf: leaf, tree), tree)


class Attributes(dict):
    """A subclass of dict, which optree does not open."""


@dataclasses.dataclass
class Boxes:
    x: torch.Tensor

    def to(self, device):
        raise AssertionError("a sample is copied, not moved")


@pytest.mark.parametrize("kind", [dict, Attributes, lambda d: [d], lambda d: Boxes(d["x"]), lambda d: Labelled(d, 1)])
def test_a_copied_sample_shares_nothing_that_can_be_written(kind):
    sample = kind({"x": np.zeros(3), "n": 1})
    copied = map_leaves(copy_value, sample)
    assert type(copied) is type(sample)
    for _, leaf in leaves_with_paths(sample):
        if isinstance(leaf, np.ndarray):
            leaf += 1
    assert all(leaf.sum() == 0 for _, leaf in leaves_with_paths(copied) if isinstance(leaf, np.ndarray))


def test_a_dict_of_numbers_is_copied_too():
    sample = Attributes(n=1)
    copied = map_leaves(copy_value, sample)
    sample["n"] = 2
    assert copied["n"] == 1


def test_a_mapping_that_is_no_dict_is_left_alone():
    sample = UserDict(x=torch.ones(1))
    assert map_leaves(copy_value, [sample])[0] is sample


def test_all_tensors_are_found():
    x = list(torch.arange(9.0).unbind())
    tree = [
        x[0],
        {"a": (x[1], "text"), "none": None},
        Labelled(x[2], 3),
        TensorDict({"t": x[3], "deep": {"t": x[4]}}, []),
        TensorDict({"d": NonTensorData({"x": [x[5]]})}, []),
        TensorDict({"s": NonTensorStack([x[6]], [x[7]])}, [2]),
        Pair(images=x[8], targets=x[0], batch_size=[]),
    ]
    assert sorted(int(tensor) for tensor in tensors_in(tree)) == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    packed = pack_sequence([torch.ones(2)])
    assert [tensor.tolist() for tensor in tensors_in(packed)] == [[1.0, 1.0]], "batch_sizes stays on the CPU"


def test_paths_name_keys_positions_and_fields():
    tree = {"b": [1, Labelled(2, {"c": 3})], "a": UserDict(d=(4,)), "two": Two(5, 6)}
    found = dict(leaves_with_paths(tree))
    assert found == {
        ("b", 0): 1,
        ("b", 1, "image"): 2,
        ("b", 1, "label", "c"): 3,
        ("a", "d", 0): 4,
        ("two", 0): 5,
        ("two", 1): 6,
    }
    assert len(list(leaves_with_paths(rich_sample(3)))) == 23
