"""The values of a store in a few characters, and the fields of its table."""

import pytest
import torch

from memfeed.cli.store_summary import (
    _dtype_and_shape,
    _kept_lines,
    _row_count,
    summarise,
)
from memfeed.schema.fields import Field
from support import Made, cache


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
