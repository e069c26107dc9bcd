"""The arguments of windows, the episodes of a store, and the schema of its view, as data."""

import itertools

import numpy as np
import pytest
import torch

import memfeed
from memfeed.errors import FieldError, RowError
from memfeed.schema.infer import infer
from memfeed.store.columns import InMemoryColumn
from memfeed.store.window_view import MOST_STEPS, complete_rows, describe, find_episodes, parse, with_windows

SCHEMA = infer(
    [{"a": {"x": torch.ones(2), "y": 1}, "b": 3, "text": "t", "ids": torch.arange(i)} for i in (1, 2)]
).schema


def column_of(values, dtype=torch.int64):
    values = torch.as_tensor(values, dtype=dtype)
    return InMemoryColumn(infer([{"e": values[0]} if len(values) else {"e": torch.tensor(0)}]).schema.fields[0], values)


def offsets_of(given, rows=100):
    return {one.name: one.offsets.tolist() for one in parse(given, SCHEMA, rows)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"b": [-1, 0]}, {"b": [-1, 0]}),
        ({"b": range(3)}, {"b": [0, 1, 2]}),
        ({"b": (i for i in (2, 2))}, {"b": [2, 2]}),
        ({"b": np.array([-2, 0])}, {"b": [-2, 0]}),
        ({"b": torch.tensor([1])}, {"b": [1]}),
        ({("a", "x"): [0], "b": [1]}, {"a.x": [0], "b": [1]}),
        ({"a": [0, 1]}, {"a": [0, 1]}),
        ({"b": [-(10**9), 10**9]}, {"b": [-100, 100]}),
        ({"b": range(MOST_STEPS)}, {"b": [min(i, 100) for i in range(MOST_STEPS)]}),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_offsets(given, expected):
    assert offsets_of(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        [], [True, False], torch.tensor([True]), [0.5], ["1"], "01", 3, None, [1 << 62], [-(1 << 62)],
        range(MOST_STEPS + 1),
        range(1 << 60), itertools.count(), [[1]], [None], np.array([0.0]), torch.tensor([0.0]), np.array([True]),
    ],
    ids=lambda value: f"{value!r:.40}",
)  # fmt: skip
def test_what_is_no_offsets(given):
    with pytest.raises(
        RowError, match=r"found the offsets .* for 'b'; expected a list or range of ints.* at most 1,048,576"
    ):
        parse({"b": given}, SCHEMA, 100)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "found dict {}; expected the offsets of one or more fields"),
        ([0], "found list"),
        (None, "found NoneType"),
        ({"no": [0]}, "no"),
        ({"text": [0]}, "found windows of field text, which is"),
        ({"ids": [0]}, "found windows of field ids, which is"),
        ({"a": [0], ("a", "y"): [1]}, "found two windows of field a.y"),
    ],
)
def test_what_is_no_windows(given, message):
    with pytest.raises(FieldError, match=message):
        parse(given, SCHEMA, 100)


@pytest.mark.parametrize(
    ("ids", "starts"),
    [([5], [0]), ([5, 5, 5], [0]), ([5, 5, 2, 9, 9], [0, 2, 3]), ([1, 2, 3], [0, 1, 2]), ([-1, -1, 0], [0, 2])],
)
def test_episodes_begin_where_the_number_changes(ids, starts):
    found = find_episodes(column_of(ids), len(ids), None)
    assert found.starts.tolist() == starts


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_one_sequence_of_all_rows(rows):
    assert find_episodes(None, rows, None).starts.tolist() == [0] * min(rows, 1)


def test_rows_of_an_episode_that_are_apart():
    with pytest.raises(RowError, match=r"found row 3 of e 1 after rows of others \(it began at row 0\)"):
        find_episodes(column_of([1, 1, 2, 1]), 4, None)
    kept = find_episodes(column_of([1, 1, 2, 1]), 3, np.array([0, 1, 2]))  # of a view, its own rows count
    assert kept.starts.tolist() == [0, 2]


def test_a_row_twice():
    with pytest.raises(RowError, match="found row 4 of the base store twice in this subset"):
        find_episodes(None, 3, np.array([4, 2, 4]))


@pytest.mark.parametrize(
    "values", [torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.ones(3, 2, dtype=torch.int64)]
)
def test_what_tells_no_episode(values):
    with pytest.raises(FieldError, match=r"found within='e', which is .*; expected a field with one int for each row"):
        find_episodes(column_of(values, values.dtype), 3, None)


def test_description():
    asked = parse({"b": range(20), ("a", "x"): [0]}, SCHEMA, 100)
    assert describe(asked, "e", complete=True) == "windows: b [0, 1, 2, ..., 19], a.x [0], within e, complete"
    assert describe(asked[1:], None, complete=False) == "windows: a.x [0], within the whole store"
    assert describe(asked[1:] * 7, ("a", "y"), complete=False).endswith(", 2 more, within a.y")


def store_of(sample, tmp_path, n=5):
    return memfeed.cache([sample(i) for i in range(n)], tmp_path / "s.mf", workers=0, progress=False)


def test_masks_are_beside_their_fields(tmp_path):
    store = store_of(lambda i: {"a": {"x": torch.full((2,), i)}, "b": i}, tmp_path)
    view = store.windows({("a", "x"): [-1, 0]}, within=None)
    assert view.schema.names() == "a.x, a.x_mask, b"
    assert view[0]["a"]["x_mask"].tolist() == [False, True]
    assert view[2]["a"]["x"].tolist() == [[1, 1], [2, 2]]
    assert store.windows({"a": [0, 1]}, within=None)[0].keys() == {"a", "b", "a_mask"}


def test_no_place_for_a_mask(tmp_path):
    single = store_of(lambda i: torch.full((2,), i), tmp_path / "1")
    pair = store_of(lambda i: (i, i), tmp_path / "2")
    named = memfeed.cache([(i, i) for i in range(5)], tmp_path / "3.mf", fields=("x", "y"), workers=0, progress=False)
    taken = store_of(lambda i: {"x": i, "x_mask": i}, tmp_path / "4")
    key = single.schema.names()
    with pytest.raises(FieldError, match="found samples of one value, which have no place for a mask"):
        single.windows({key: [0]}, within=None)
    with pytest.raises(FieldError, match="in a tuple without names, which has no place for a mask"):
        pair.windows({0: [0]}, within=None)
    with pytest.raises(FieldError, match="found a field 'x_mask' beside 'x'"):
        taken.windows({"x": [0]}, within=None)
    assert named.windows({"x": [0]}, within=None)[0].keys() == {"x", "x_mask", "y"}
    assert taken.windows({"x": [0]}, within=None, complete=True)[0]["x"].tolist() == [0]
    assert single.windows({key: [0, 1]}, within=None, complete=True)[0].shape == (2, 2)


def test_complete_rows():
    columns = [column_of([0] * 6)]
    schema = infer([{"e": torch.tensor(0)}]).schema
    asked = parse({"e": [-1, 2]}, schema, 6)
    episodes = find_episodes(column_of([0, 0, 0, 0, 1, 1]), 6, None)
    made_schema, made = with_windows(schema, columns, 6, asked, episodes, masks=False)
    assert made_schema.fields[0].shape == (2,)
    assert complete_rows(made).tolist() == [1]
