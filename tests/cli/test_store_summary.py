"""The values of a store in a few characters, and the fields of its table."""

import numpy as np
import pytest
import torch

from memfeed.cli.store_summary import (
    CELL_WIDTH,
    _dtype_and_shape,
    _kept_lines,
    _metadata_lines,
    _row_count,
    summarise,
    summary,
)
from memfeed.schema.fields import Field
from support import Made, cache


def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"), ("a", "'a'"), (None, "None"), (torch.tensor([1, 2]), "[1, 2]"), (torch.tensor(2.5), "2.5"),
        (b"ab", "b'ab' (2 B)"),
        (torch.zeros(0, 5), "[0, 5] empty"), (torch.arange(7), "[7] 0 to 6, mean 3"),
        (np.ones((2, 4)), "[2, 4] 1 to 1, mean 1"),
        (torch.ones(7, dtype=torch.bool), "[7] 7 true"), (torch.ones(7, dtype=torch.complex64), "[7]"),
        ("\x1b[0m", "'\\x1b[0m'"),
        ({"a": [1]}, "{'a': [1]}"),
    ],
    ids=lambda value: f"{value!r:.20}",
)  # fmt: skip
def test_values(value, text):
    assert summary(value) == text


@pytest.mark.parametrize("value", ["x" * 1000, b"x" * 1000, list(range(1000)), torch.rand(6) * 1e30, {"k" * 90: 1}])
def test_values_are_cut(value):
    assert len(summary(value)) <= CELL_WIDTH + len(" (1.0 KB)")


def test_nesting_without_end():
    assert summary(deep()) == "a deeply nested list"


def test_metadata_lines():
    assert _metadata_lines({"a": 1, "b": "x" * 500})[0] == "metadata a: 1"
    assert all(len(line) < 200 for line in _metadata_lines({"b": "x" * 500}))
    assert _metadata_lines({str(i): i for i in range(25)})[-1] == "metadata: 5 more keys"


@pytest.mark.parametrize(
    ("kind", "shape", "found"),
    [
        ("fixed", (2, 3), ("int8", "[2, 3]")),
        ("fixed", (), ("int8", "[]")),
        ("list", (None, 3), ("int8", "[*, 3]")),
        ("str", (), ("", "")),
    ],
)
def test_dtypes_and_shapes(kind, shape, found):
    assert _dtype_and_shape(Field(path=("x",), name="x", stem="x", kind=kind, dtype="int8", shape=shape)) == found


def test_a_store(tmp_path, capsys):
    class Labelled(Made):
        classes, targets = ("a", "b"), (0, 1)

    store = cache(
        Labelled(lambda i: {"[red]x": i, "r": torch.arange(i)}, 2), tmp_path / "s.mf", workers=0, metadata={"m": 1}
    )
    lines = _kept_lines(store)
    assert "metadata m: 1" in lines
    assert _row_count(store) == 2
    summarise(store.path, 5, None, None, 1)
    out = capsys.readouterr().out
    assert "2 rows, 2 fields" in out
    assert "[red]x" in out  # no markup
    assert "row 1" in out
