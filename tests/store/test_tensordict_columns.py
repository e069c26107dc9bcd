"""Fields and columns of the entries of a TensorDict, as data."""

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
    contents_of,
)


def top(batch=(2,), **children):
    return Group("tensordict", "", batch, children)


def tensor(*shape):
    return Tensor(torch.arange(int(np.prod(shape))).view(shape), "int64", shape)


def nested(*dims):
    return Nested(torch.arange(int(sum(np.prod(one) for one in dims))), "int64", np.array(dims, np.int64))


def stack(*shapes):
    return TensorStack([tensor(*shape) for shape in shapes])


@pytest.mark.parametrize(
    ("entry", "kind", "shape"),
    [
        (tensor(2, 3), "fixed", (3,)),
        (PerRow(["a", "b"]), "str", ()),
        (PerRow(["a", 1]), "json", ()),
        (nested([2], [3]), "jagged", (None,)),
        (nested([2], [2]), "jagged", (None,)),
        (nested([2, 3], [2, 4]), "jagged", (2, None)),
        (nested([2, 3], [1, 4]), "list", (None, None)),
        (stack((2, 3), (2, 3)), "fixed", (2, 3)),
        (stack((2, 3), (1, 3)), "jagged", (None, 3)),
        (stack((2, 3), (1, 4)), "list", (None, None)),
        (stack((), ()), "fixed", ()),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_kinds(entry, kind, shape):
    contents = contents_of(top(a=entry))
    (field,) = contents.schema.fields
    assert (field.kind, field.shape, contents.row_count) == (kind, shape, 2)
    assert contents.columns[0].row_count == 2


def test_rows():
    contents = contents_of(top(a=stack((2,), (1,)), b=nested([2], [1]), c=tensor(2, 3)))
    a, b, c = contents.columns
    assert [a.read_row(i).tolist() for i in (0, 1)] == [[0, 1], [0]]
    assert [b.read_row(i).tolist() for i in (0, 1)] == [[0, 1], [2]]
    assert c.read_row(1).tolist() == [3, 4, 5]
    assert a.field.lengths_of == b.field.lengths_of == 0  # equal lengths: they share their offsets


def test_values_without_a_batch():
    contents = contents_of(top((), a=tensor(2, 3)))
    assert contents.row_count is None
    assert contents.schema.fields[0].shape == (2, 3)
    assert contents.schema.structure.batch_dims == -1


def test_what_is_shared_or_left_out_has_no_column():
    contents = contents_of(
        top(a=tensor(2), s=Shared(1), u=Unbatched(2), g=top((2, 1), x=LeftOut("a pickle"), y=tensor(2, 1)))
    )
    assert [field.path for field in contents.schema] == [("a",), ("g", "y")]
    assert contents.left_out == ("g.x: a pickle",)
    assert contents.schema.structure.keys == ("a", "s", "u", "g")


def test_nothing_to_read():
    with pytest.raises(StoreError, match=r"found no tensor in it besides what cannot be read \(x: a pickle\)"):
        contents_of(top(x=LeftOut("a pickle"), s=Shared(1)))
    with pytest.raises(StoreError, match="found no tensor in it; expected at least one field"):
        contents_of(top())
