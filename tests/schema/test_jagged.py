"""Jagged nested tensors over flat values: equal to those of torch, sharing memory and offsets."""

import inspect
import math
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nested._internal.nested_tensor import NestedTensor

from memfeed.schema import jagged
from memfeed.schema.fields import Field
from memfeed.schema.jagged import batch_shape, jagged_batches, jagged_rows, jagged_tensor, ragged_dim_of


def field(shape=(None,), group=None):
    return Field(path=("r",), name="r", stem="r", kind="jagged", dtype="int64", shape=shape, lengths_of=group)


@pytest.fixture(params=["private", "public"])
def constructor(request, monkeypatch):
    if request.param == "public":
        monkeypatch.setattr(jagged, "_extremes", lambda low, high: 1 / 0)  # the probe fails
        jagged._constructor.cache_clear()
        jagged._constructor()
        monkeypatch.undo()
    yield
    jagged._constructor.cache_clear()


SHAPES = [(None,), (None, 2), (2, None), (3, None, 2), (None, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("constructor")
def test_rows_are_those_of_the_flat_values(shape):
    sizes = [[length if dim is None else dim for dim in shape] for length in (2, 0, 3, 1)]
    rows = [torch.arange(math.prod(size)).view(size) for size in sizes]
    one = field(shape)
    axis = one.ragged_dim
    flat = torch.cat([torch.cat(rows[i : i + 2], axis).reshape(-1) for i in (0, 2)])
    batches = jagged_batches(flat, np.array([2, 0, 3, 1]), 2, one, {})
    assert [[row.tolist() for row in jagged_rows(batch)] for batch in batches] == [
        [row.tolist() for row in rows[:2]],
        [row.tolist() for row in rows[2:]],
    ]
    for batch in batches:
        assert ragged_dim_of(batch) == axis
        assert batch.values().untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert all(row.is_contiguous() for row in jagged_rows(batch))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_padding_is_to_the_longest_row(lengths):
    flat = torch.arange(sum(lengths))
    (batch,) = jagged_batches(flat, np.array(lengths), len(lengths), field(), {})
    padded = batch.to_padded_tensor(-1)
    assert padded.shape == (len(lengths), max(lengths))
    assert [[x for x in row if x >= 0] for row in padded.tolist()] == [row.tolist() for row in flat.split(lengths)]


def test_fields_of_equal_lengths_share_offsets():
    lengths, shared = np.array([1, 2]), {}
    one, other, third, alone = (
        jagged_batches(torch.arange(3), of, 2, field(group=group), shared)[0]
        for of, group in ((lengths, 0), (lengths.copy(), 0), (np.array([2, 1]), 0), (lengths, None))
    )
    assert one.offsets() is other.offsets()
    assert third.offsets() is not one.offsets()
    assert alone.offsets() is not one.offsets()
    assert (one + other).values().tolist() == [0, 2, 4]


def test_no_rows():
    (batch,) = jagged_batches(torch.empty(0, dtype=torch.int64), np.array([], np.int64), 0, field(), {})
    assert len(batch.offsets()) == 1
    assert jagged_rows(batch) == []


def test_other_values_over_the_same_lengths():
    (like,) = jagged_batches(torch.arange(6), np.array([1, 2]), 2, field((2, None)), {})
    values = torch.arange(6.0).view(2, 3)
    made = jagged_tensor(values, like.offsets(), like)
    assert ragged_dim_of(made) == 1
    assert [row.tolist() for row in jagged_rows(made)] == [[[0.0], [3.0]], [[1.0, 2.0], [4.0, 5.0]]]
    plain = jagged_tensor(torch.arange(3), torch.tensor([0, 1, 3]))
    assert [row.tolist() for row in jagged_rows(plain)] == [[0], [1, 2]]


def test_shape_of_a_batch():
    assert batch_shape(field((2, None, 3)), 7) == [2, 7, 3]
    assert batch_shape(field(), 0) == [0]


def test_a_compiler_that_another_thread_imports_is_not_waited_for(monkeypatch):
    if "torch._dynamo.maybe_mark_dynamic(" in inspect.getsource(NestedTensor.__init__):
        pytest.skip("this torch imports its compiler for any nested tensor")
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))  # it is not finished yet
    monkeypatch.delattr(torch, "_dynamo", raising=False)
    (batch,) = jagged_batches(torch.arange(3), np.array([1, 2]), 2, field(), {})
    assert [row.tolist() for row in jagged_rows(batch)] == [[0], [1, 2]]
