"""Rows of different sizes in the forms that batches have them: the rows read one by one are the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.schema.fields import DTYPES, Field
from memfeed.schema.jagged import jagged_rows
from memfeed.store.ragged_columns import NestedColumn
from memfeed.store.ragged_gather import gather_jagged, gather_list, gather_padded, pad_rows, raw, view_rows
from memfeed.system.buffers import Fresh


def column_of(shape, lengths, dtype="int64"):
    """Return a jagged column with rows of these lengths along the None of ``shape``, and its rows."""
    sizes = [[length if dim is None else dim for dim in shape] for length in lengths]
    rows = [(torch.arange(int(np.prod(size))) % 100 + i).to(DTYPES[dtype]).view(size) for i, size in enumerate(sizes)]
    field = Field(path=("r",), name="r", stem="r", kind="jagged", dtype=dtype, shape=shape)
    flat = torch.cat([row.reshape(-1) for row in rows])
    return NestedColumn(field, flat, np.array(sizes, np.int64).reshape(len(sizes), len(shape))), rows


@pytest.mark.parametrize("shape", [(None,), (None, 2), (2, None), (1, None), (3, None, 2), (0, None)], ids=str)
@pytest.mark.parametrize("dtype", ["int64", "bfloat16", "bool", "complex128", "uint8", "float8_e5m2"])
def test_jagged_and_padded_batches(shape, dtype):
    column, rows = column_of(shape, [2, 0, 3, 1], dtype)
    picked = np.array([3, 0, 1, 1, 2, 2])
    located = column.locate(picked)
    batches = gather_jagged(column, located, 2, Fresh(), {})
    found = [
        row.double().tolist() if dtype != "complex128" else row.tolist() for b in batches for row in jagged_rows(b)
    ]
    wide = [rows[i].double() if dtype != "complex128" else rows[i] for i in picked]
    assert found == [row.tolist() for row in wide]
    padded, masks = gather_padded(column, located, 2, 1, Fresh(), Fresh())
    axis = shape.index(None)
    for at, (batch, mask) in enumerate(zip(padded, masks, strict=True)):
        for row, real, expected in zip(batch, mask, [rows[i] for i in picked[2 * at : 2 * at + 2]], strict=True):
            length = expected.shape[axis]
            assert real.tolist() == [i < length for i in range(len(real))]
            assert torch.equal(raw_bits(row.narrow(axis, 0, length)), raw_bits(expected))
            rest = row.narrow(axis, length, row.shape[axis] - length)
            assert torch.equal(raw_bits(rest), raw_bits(torch.ones_like(rest)))


def raw_bits(tensor):
    return (
        torch.from_numpy(raw(tensor.contiguous()).copy().view(np.uint8).reshape(-1))
        if tensor.numel()
        else torch.empty(0)
    )


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(0, 4), max_size=5), dim=st.sampled_from([0, 1]), value=st.sampled_from([0, -1, 7]))
def test_padding(lengths, dim, value):
    flat = torch.arange(2 * sum(lengths)).view((sum(lengths), 2) if dim == 0 else (2, sum(lengths)))
    padded, mask = pad_rows(flat, np.array(lengths, np.int64), value, Fresh(), Fresh(), dim)
    longest = max(lengths, default=0)
    assert padded.shape == ((len(lengths), longest, 2) if dim == 0 else (len(lengths), 2, longest))
    assert mask.sum(1).tolist() == lengths
    for row, part, length in zip(padded, flat.split(lengths, dim) if lengths else [], lengths, strict=True):
        assert torch.equal(row.narrow(dim, 0, length), part)
        assert (row.narrow(dim, length, longest - length) == value).all()


def test_lists_are_rows_of_their_own_memory():
    field = Field(path=("r",), name="r", stem="r", kind="list", dtype="int64", shape=(None, None))
    dims = np.array([[2, 3], [0, 4], [1, 1]], np.int64)
    flat = torch.arange(7)
    column = NestedColumn(field, flat, dims)
    picked = np.array([2, 0, 1])
    (listed,) = [gather_list(column, column.locate(picked), Fresh())]
    assert [row.tolist() for row in listed] == [[[6]], [[0, 1, 2], [3, 4, 5]], []]
    assert [tuple(row.shape) for row in listed] == [(1, 1), (2, 3), (0, 4)]
    listed[1].zero_()
    assert flat.tolist() == list(range(7))
    views = view_rows(column, column.locate(picked), lambda: [row.clone() for row in views])
    assert views[0].data_ptr() == flat[6:].data_ptr()
    owned = views.owned()
    owned[0].zero_()
    assert flat.tolist() == list(range(7))


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (0, 3), ()])
def test_raw_shares_memory(shape):
    tensor = torch.zeros(shape, dtype=torch.bfloat16)
    array = raw(tensor)
    assert array.shape == shape
    array[...] = 1
    assert tensor.view(torch.int16).reshape(-1).tolist() == [1] * tensor.numel()
