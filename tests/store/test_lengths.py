"""Which fields vary in length, how long their rows are, and what fills them up."""

import math

import numpy as np
import pytest
import torch

import memfeed
from memfeed.errors import FieldError
from memfeed.schema.fields import Field, Node, Schema
from memfeed.store import lengths
from memfeed.store.lengths import fill_values, is_jagged, jagged_field, row_lengths, same_lengths
from support import Made


def field(name, kind="jagged", dtype="int64", shape=(None,), **options):
    path = tuple(name.split("."))
    return Field(path=path, name=name, stem=name, kind=kind, dtype=dtype, shape=shape, **options)


def schema(*fields):
    keys = tuple(one.name for one in fields)
    return Schema(
        fields=fields, structure=Node(kind="dict", keys=keys, children=tuple(Node(kind="leaf") for _ in fields))
    )


ALL = schema(
    field("ids"),
    field("label", "fixed", shape=()),
    field("xy", dtype="float32", shape=(None, 2)),
    field("flags", dtype="bool"),
    field("maybe", optional=True),
    field("pictures", "list", "uint8", (None, None)),
)


def test_jagged_fields_have_one_dim_that_varies_and_no_none():
    assert [one.name for one in ALL if is_jagged(one)] == ["ids", "xy", "flags"]


# --- fill_values


def test_none_fills_up_nothing():
    assert fill_values(None, ALL, [0, 2], "pad") == {}
    assert fill_values(None, ALL, [], "pad") == {}


def test_a_number_is_that_of_the_given_fields_only():
    assert fill_values(0, ALL, [0, 2], "pad") == {0: 0, 2: 0}
    assert fill_values(-1, ALL, [0], "pad") == {0: -1}


def test_a_mapping_fills_up_what_it_names_in_the_order_of_the_schema():
    found = fill_values({("xy",): 0.5, "ids": 3}, ALL, [0, 2, 3], "pad")
    assert list(found.items()) == [(0, 3), (2, 0.5)]


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("int64", (1 << 63) - 1, True),
        ("int64", 1 << 63, False),
        ("int64", 2.0, True),
        ("int64", 0.5, False),
        ("int64", math.nan, False),
        ("int64", math.inf, False),
        ("int64", True, False),
        ("uint8", 255, True),
        ("uint8", 256, False),
        ("uint8", -1, False),
        ("bool", True, True),
        ("bool", 0, True),
        ("bool", 2, False),
        ("float32", 0.5, True),
        ("float32", 0.1, False),
        ("float32", math.nan, True),
        ("float32", -math.inf, True),
        ("float32", False, False),
        ("float32", None, False),
        ("float32", "0", False),
        ("float32", 1j, False),
        ("bfloat16", 1.5, True),
        ("bfloat16", 257, False),
    ],
)
def test_the_dtype_must_hold_the_number_exactly(dtype, value, fits):
    one = schema(field("a", dtype=dtype))
    if fits:
        assert fill_values({"a": value}, one, [0], "pad")[0] is value
    else:
        with pytest.raises(FieldError, match=rf"found eos=.* for field a, .*; expected a number that {dtype} holds"):
            fill_values({"a": value}, one, [0], "eos")


def test_a_number_must_fit_into_every_field():
    with pytest.raises(FieldError, match=r"found pad=-1 for field flags"):
        fill_values(-1, ALL, [0, 2, 3], "pad")


A_NUMBER = 'expected a number for all fields of varying length ({}), or one for each field: pad={{"{}": 0}}'
ONE_OF = "expected one of the fields of varying length that are filled up ({}): leave {} out of pad="


@pytest.mark.parametrize(
    ("given", "indices", "expected"),
    [
        (0, [], "found pad=0; expected a field of varying length: leave pad= out"),
        ("x", [], "found pad='x'; " + A_NUMBER.format("none", "input_ids")),
        ({}, [2, 3], "found pad={}; " + A_NUMBER.format("xy, flags", "xy")),
        ({"label": 0}, [0, 2], "found pad= for field label, which is int64 []; " + ONE_OF.format("ids, xy", "label")),
        ({"ids": 0}, [2], "found pad= for field ids, which is jagged int64 [*]; " + ONE_OF.format("xy", "ids")),
        ({"label": 0}, [], "found pad= for field label, which is int64 []; " + ONE_OF.format("none", "label")),
        ({"id": 0}, [0], "found no field 'id'; expected one of: ids, label, xy, flags, maybe, pictures: write 'ids'"),
        ({("ids",): 0, "ids": 0}, [0], "found two values for field ids in pad={('ids',): 0, 'ids': 0}; expected one: "
         "leave one out"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(given, indices, expected):
    with pytest.raises(FieldError) as caught:
        fill_values(given, ALL, indices, "pad")
    assert str(caught.value) == expected


# --- jagged_field


def test_the_only_jagged_field_needs_no_name():
    one = schema(field("label", "fixed", shape=()), field("ids"))
    assert jagged_field(one, None, "by") == 1
    assert jagged_field(one, "ids", "by") == jagged_field(one, ("ids",), "by") == 1


def test_fields_of_the_same_lengths_count_as_one():
    alike = schema(field("ids", lengths_of=0), field("labels", lengths_of=0))
    assert jagged_field(alike, None, "by") == 0
    with pytest.raises(FieldError, match=r'found 2 fields of varying length \(a, b\); expected one: .*: by="a"'):
        jagged_field(schema(field("a"), field("b")), None, "by")
    with pytest.raises(FieldError, match=r"found 0 fields of varying length \(none\)"):
        jagged_field(schema(field("a", "fixed", shape=())), None, "by")
    with pytest.raises(FieldError, match=r"found by='label', which is int64 \[\]; .*this store has: ids, xy, flags"):
        jagged_field(ALL, "label", "by")


# --- row_lengths and same_lengths


@pytest.fixture
def columns(tmp_path):
    samples = [
        {"a": torch.zeros(n), "b": torch.zeros(2, n), "c": torch.zeros(n + (n == 4)), "d": n} for n in (3, 0, 4, 1)
    ]
    return memfeed.cache(Made(samples), tmp_path / "a.mf", progress=False)._view.columns


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_lengths_are_along_the_dim_that_varies(columns, monkeypatch, at_once):
    monkeypatch.setattr(lengths, "ROWS_AT_ONCE", at_once)
    rows = np.array([2, 0, 0, 1, 3])
    assert row_lengths(columns[0], rows).tolist() == row_lengths(columns[1], rows).tolist() == [4, 3, 3, 0, 1]
    assert row_lengths(columns[0], rows[:0]).tolist() == []
    with pytest.raises(FieldError, match=r"found field d, which is int64 \[\]; expected one whose rows are tensors"):
        row_lengths(columns[3], rows)


def test_lengths_of_several_columns_must_be_the_same(columns):
    assert same_lengths(columns[:2], np.arange(4)).tolist() == [3, 0, 4, 1]
    assert same_lengths([columns[0], columns[2]], np.array([0, 1])).tolist() == [3, 0]
    with pytest.raises(FieldError, match=r"found row 2 of 4 elements in field a, and of 5 in c; expected the same"):
        same_lengths([columns[0], columns[2]], np.arange(4))
    with pytest.raises(FieldError, match="found row 1 of 4"):  # of the view that has these rows
        same_lengths([columns[0], columns[2]], np.array([0, 2]))
