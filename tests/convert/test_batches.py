"""Batches divided into columns and samples, and refused where they are none."""

import collections
import dataclasses

import numpy as np
import pytest
import torch

from memfeed.convert.write_run import column_lengths, columns_of, first_samples, pack_columns, rows_of, zeros
from memfeed.errors import SchemaError
from memfeed.schema import codec
from memfeed.schema.infer import infer

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: int
    y: int


def schema_of(*samples):
    return infer(list(samples)).schema


@pytest.mark.parametrize(
    ("sample", "batch", "columns"),
    [
        (1, [1, 2], [[1, 2]]),
        ((1, "a"), ([1, 2], ["a", "b"]), [[1, 2], ["a", "b"]]),
        ((1, "a"), [[1, 2], ["a", "b"]], [[1, 2], ["a", "b"]]),
        ({"b": 1, "a": {"c": 2}}, {"a": {"c": [3]}, "b": [4]}, [[4], [3]]),
        (Pair(1, 2), Pair([1], [2]), [[1], [2]]),
        (Record(1, 2), {"y": [2], "x": [1]}, [[1], [2]]),
        ({"a": 1, "n": None}, {"a": [1], "n": None}, [[1]]),
        ({"a": 1, "n": None}, {"a": [1], "n": 3}, [[1]]),
    ],
)
def test_columns(sample, batch, columns):
    assert columns_of(infer([sample]).structure, batch) == columns


@pytest.mark.parametrize(
    ("sample", "batch", "message"),
    [
        ({"a": 1}, [1], r"found a batch with the parts \[0\]; expected \['a'\]"),
        ({"a": 1}, {"a": [1], "b": [2]}, "found a batch with the parts"),
        ({"a": 1}, torch.ones(2), "found Tensor in a batch; expected a dict of 1 parts"),
        ({"a": (1, 2)}, {"a": "xy"}, "found str in a batch; expected a tuple of 2 parts"),
        ((1, 2), ([1],), "found a batch with the parts"),
        ((1, 2), None, "found NoneType in a batch"),
    ],
)
def test_another_structure(sample, batch, message):
    with pytest.raises(SchemaError, match=message):
        columns_of(infer([sample]).structure, batch)


def test_lengths():
    schema = schema_of({"a": 1, "b": "x"})
    assert column_lengths(schema, [[1, 2], "ab"], None) == 2
    assert column_lengths(schema, [[1, 2], "ab"], 2) == 2
    with pytest.raises(SchemaError, match=r"found a batch with rows a: 2, b: 1; expected the same number"):
        column_lengths(schema, [[1, 2], "a"], None)
    with pytest.raises(SchemaError, match=r"found a batch with rows a: 2, b: 2; expected 3 in every column"):
        column_lengths(schema, [[1, 2], "ab"], 3)
    for leaf in (1, None, torch.tensor(1), np.float32(1)):
        with pytest.raises(SchemaError, match="in a batch; expected a tensor, an array or a list with one value"):
            column_lengths(schema, [leaf, "ab"], None)


def test_whole_columns_are_packed_where_rows_have_the_shape_of_the_field():
    schema = schema_of(torch.zeros(2))
    (packed,) = pack_columns(schema, [torch.arange(6.0).view(3, 2)])
    assert b"".join(map(bytes, packed.buffers)) == torch.arange(6.0).numpy().tobytes()
    assert pack_columns(schema, [torch.zeros(3, 3)]) is None
    assert pack_columns(schema, [torch.zeros(3)]) is None
    assert pack_columns(schema, [[torch.zeros(2)]]) is None
    assert pack_columns(schema_of("a"), [["a"]]) is None
    assert pack_columns(schema, [np.zeros((0, 2), np.float32)]) is not None


def test_a_column_of_another_dtype_names_the_field():
    with pytest.raises(SchemaError, match="field a: "):
        pack_columns(schema_of({"a": torch.zeros(2, dtype=torch.int64)}), [torch.full((3, 2), 0.5)])


def test_rows():
    found = rows_of([torch.arange(4).view(2, 2), ["a", "b"], np.array([1, 2])])
    assert [(row[0].tolist(), *row[1:]) for row in found] == [([0, 1], "a", 1), ([2, 3], "b", 2)]
    assert rows_of([]) == []


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ([1], None),
        (torch.arange(3), [0, 1]),
        (([1, 2, 3], ["a", "b", "c"]), [(1, "a"), (2, "b")]),
        ([[1, 2, 3], ["a", "b", "c"]], [(1, "a"), (2, "b")]),
        ({"n": None, "a": [1, 2, 3]}, [{"n": None, "a": 1}, {"n": None, "a": 2}]),
        (Pair([1, 2], [3, 4]), [Pair(1, 3), Pair(2, 4)]),
        (Record([1, 2], [3, 4]), [Record(1, 3), Record(2, 4)]),
        ({"a": {"b": ([5, 6],)}}, [{"a": {"b": (5,)}}, {"a": {"b": (6,)}}]),
        ("abc", ["a", "b"]),
    ],
    ids=repr,
)
def test_first_samples(batch, samples):
    if samples is None:
        with pytest.raises(SchemaError, match=r"found 1 \(int\) in a batch"):
            first_samples(batch, 2)
    else:
        assert first_samples(batch, 2) == samples


@pytest.mark.parametrize("batch", [(), {}, [], None, {"a": None}, torch.zeros(0), {"a": []}, ({}, ())], ids=repr)
def test_a_batch_without_rows(batch):
    with pytest.raises(SchemaError, match="found a batch without rows; expected at least one"):
        first_samples(batch, 2)


@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(2)],
        ["a", "b"],
        [b"a", b"bc"],
        [{"m": {"v": 1}}, {"m": {"w": [None]}}],
        [torch.ones(2, 3), torch.ones(2, 4)],
        [torch.ones(2), None],
    ],
    ids=repr,
)
def test_zeros_are_the_emptiest_value(samples):
    field = schema_of(*samples).fields[0]
    packed = zeros(field, 2)
    if packed.dims is None:
        assert sum(map(len, packed.buffers)) == 2 * field.row_bytes
        assert not any(map(np.any, packed.buffers))
        return
    assert packed.dims.shape[0] == 2
    if field.optional:
        assert (packed.dims == -1).all()
    elif field.kind == "json":
        assert bytes(packed.buffers[0]) == b"nullnull"
        assert codec.decode_bytes(field, b"null") is None
    else:
        assert packed.dims.prod() == 0
        assert packed.buffers == []
