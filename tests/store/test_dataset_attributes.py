"""What a store keeps beside its columns is checked, and found again."""

import numpy as np
import pytest
import torch

from memfeed.schema.fields import DEEPEST, Field
from memfeed.schema.recipe import RecipeStep
from memfeed.store.dataset_attributes import (
    LARGEST_METADATA,
    TARGETS_FILE,
    Attributes,
    Targets,
    attributes_problem,
    equal_field,
    in_form,
    may_be_targets,
    metadata_problem,
    targets_column,
)


def field(name, dtype="int64", kind="fixed", shape=()):
    return Field(path=(name,), name=name, stem=name, kind=kind, dtype=dtype, shape=shape)


FIELDS = (field("y"), field("x", "float32"), field("v", shape=(2,)), field("s", "uint8", "str"))


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({}, ""),
        ({"a": [1, None, "x", True, 1.5, {"b": []}]}, ""),
        ({"a": object()}, "metadata that is no JSON"),
        ({"a": "\ud800"}, "metadata that is no JSON"),
        ({"a": "x" * LARGEST_METADATA}, f"metadata of {LARGEST_METADATA + 8:,} bytes, above"),
        ({"a": "x" * (LARGEST_METADATA - 8)}, ""),
        (nested(DEEPEST), ""),
        (nested(DEEPEST + 1), f"metadata nested more than {DEEPEST} deep"),
    ],
    ids=lambda value: f"{value!r:.5}",
)
def test_metadata(metadata, problem):
    found = metadata_problem(metadata)
    assert found.startswith(problem) if problem else found == ""


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        ({}, ""),
        ({"class_to_idx": {"a": (1 << 63) - 1, "b": -(1 << 63)}}, ""),
        ({"class_to_idx": {"a": 1 << 63}}, "a class number beyond 64 bits"),
        ({"targets": Targets(form="list")}, ""),
        ({"targets": Targets(form="list", field=0)}, ""),
        ({"targets": Targets(form="list", field=1)}, "targets in field 'x', which holds no class numbers"),
        ({"targets": Targets(form="list", field=4)}, "targets in field 4, which is not there"),
        ({"targets": Targets(form="list", field=-1)}, "targets in field -1, which is not there"),
        ({"transform": (RecipeStep(name="Nothing", arguments={}, on=None),)}, "Nothing"),
    ],
)
def test_attributes(attributes, problem):
    found = attributes_problem(Attributes(**attributes), FIELDS)
    assert problem in found if problem else found == ""


def test_class_numbers_are_single_integers():
    assert [may_be_targets(one) for one in FIELDS] == [True, False, False, False]
    assert not may_be_targets(field("b", "bool"))
    assert not may_be_targets(field("u", "uint64"))
    assert may_be_targets(field("u", "uint8"))


def test_targets_are_in_their_field_or_in_a_file(tmp_path):
    assert targets_column(FIELDS, Targets(form="list", field=0), tmp_path)[0] is FIELDS[0]
    found, file = targets_column(FIELDS, Targets(form="tensor"), tmp_path)
    assert (found.dtype, file) == ("int64", tmp_path / TARGETS_FILE)


def test_a_column_with_the_numbers_is_found(tmp_path):
    numbers = np.arange(4)
    _, file = targets_column(FIELDS, Targets(form="list", field=0), tmp_path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(numbers.tobytes())
    assert equal_field(tmp_path, FIELDS[:1], numbers) == 0
    assert equal_field(tmp_path, FIELDS[1:], numbers) is None
    assert equal_field(tmp_path, FIELDS[:1], numbers + 1) is None
    assert equal_field(tmp_path, FIELDS[:1], numbers[:0]) is None


def test_forms():
    numbers = torch.tensor([1, 2], dtype=torch.uint8)
    assert in_form(numbers, "list") == [1, 2]
    made = in_form(torch.tensor([1, 2]), "tensor")
    assert made.dtype is torch.int64
    kept = torch.tensor([1, 2])
    in_form(kept, "tensor").zero_()
    assert kept.tolist() == [1, 2]
