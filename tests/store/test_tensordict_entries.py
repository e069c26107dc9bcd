"""Entries of a TensorDict: their batch_size is checked, and the pieces of a lazy stack are merged or refused."""

import numpy as np
import pytest
import torch

from memfeed.errors import StoreError
from memfeed.store.tensordict_entries import (
    Group,
    LeftOut,
    Nested,
    PerRow,
    Shared,
    Tensor,
    TensorStack,
    Unbatched,
    check_batch,
    merge,
)

DATA = torch.zeros(1)


def tensor(*shape, dtype="float32"):
    return Tensor(DATA, dtype, shape)


def group(batch=(), names=(), **children):
    return Group("tensordict", "", batch, children, names)


def nested(*dims):
    return Nested(DATA, "float32", np.array(dims, np.int64))


@pytest.mark.parametrize(
    ("entry", "batch"),
    [
        (tensor(3, 2), (3,)),
        (tensor(3, 2), (3, 2)),
        (tensor(), ()),
        (group((3, 1)), (3,)),
        (PerRow(["a", "b"]), (2,)),
        (PerRow(["a", "b"]), (2, 5)),
        (nested([4], [5]), (2,)),
        (nested([4, 5], [4, 6]), (2, 4)),
        (Shared("x"), (9,)),
        (Unbatched(1), (9,)),
        (LeftOut("a pickle"), (9,)),
        (PerRow([]), ()),
    ],
    ids=repr,
)
def test_shapes_that_begin_with_the_batch_size(entry, batch):
    check_batch(entry, batch, "here")


@pytest.mark.parametrize(
    ("entry", "batch", "found"),
    [
        (tensor(2, 3), (3,), r"a tensor of shape \[2, 3\]"),
        (tensor(), (3,), r"a tensor of shape \[\]"),
        (group((2,)), (3,), r"a TensorDict or tensorclass of shape \[2\]"),
        (PerRow(["a"]), (2,), r"values that are no tensors \(NonTensorStack\) of shape \[1\]"),
        (nested([4], [5]), (3,), r"a nested tensor of shape \[2\]"),
        (nested([4, 5], [3, 6]), (2, 4), r"a nested tensor of shape \[2\]"),
        (nested([4], [5]), (2, 4, 5), r"a nested tensor of shape \[2\]"),
    ],
)
def test_other_shapes(entry, batch, found):
    with pytest.raises(StoreError, match=f"here: found {found}; expected it to begin with the"):
        check_batch(entry, batch, "here")


def test_merged():
    pieces = [
        group((2,), a=tensor(2, i), s=Shared(i), p=PerRow([i, i]), g=group((2, i), b=tensor(2, i, 1))) for i in (1, 3)
    ]
    merged = merge(pieces, "here")
    assert merged.batch == (2, 2)
    assert isinstance(merged.children["a"], TensorStack)
    assert [one.shape for one in merged.children["a"].tensors] == [(2, 1), (2, 3)]
    assert merged.children["s"] == PerRow([1, 3])
    assert merged.children["p"] == PerRow([[1, 1], [3, 3]])
    assert merged.children["g"].batch == (2, 2, None)
    assert merge([group((), ("x",)), group((), ("x",))], "here").dim_names == (None, "x")


def test_what_cannot_be_read_is_left_out_of_all_pieces():
    assert merge([tensor(1), LeftOut("a pickle")], "here") == LeftOut("a pickle")
    assert merge([group(a=tensor(1)), group(a=LeftOut("a pickle"))], "here").children["a"] == LeftOut("a pickle")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (group(a=tensor(2), c=tensor(1)), "here/1: found the key 'c' more, at its top"),
        (group(), "here/1: found the key 'a' missing, at its top"),
        (group(a=tensor(2, dtype="int64")), r"here/1: found int64 \[2\], not float32 \[2\], at a"),
        (group(a=tensor(2, 1)), r"found float32 \[2, 1\], not float32 \[2\]"),
        (group(a=Shared(1)), r"found a value that is no tensor \(NonTensorData\), not a tensor, at a"),
        (group((3,), a=tensor(2)), r"found a tensordict of batch_size \[3\]"),
        (group(a=tensor(2))._replace(kind="tensorclass", name="Pair"), "found a Pair of batch_size"),
    ],
)
def test_pieces_that_differ(other, message):
    with pytest.raises(StoreError, match=message):
        merge([group(a=tensor(2)), other], "here")


@pytest.mark.parametrize("inner", [nested([1]), TensorStack([tensor(1)]), Unbatched(1)])
def test_what_cannot_be_stacked(inner):
    with pytest.raises(StoreError, match=r"here: found .* at a inside a lazy stack; expected tensors in its pieces"):
        merge([group(a=inner), group(a=inner)], "here")
