"""A store written of rows that can be read: every kind of column, a few rows at a time."""

import pytest
import torch

import memfeed
from memfeed.building import copy_rows as module
from memfeed.building.copy_rows import copy_rows
from memfeed.errors import BuildError
from support import Made, cache, equal


@pytest.mark.parametrize("at_once", [1, 100, 64 << 20])
def test_all_kinds_of_rows(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    rows = Made(
        lambda i: {
            "x": torch.full((2,), i), "r": torch.arange(i % 3), "s": "é" * i, "b": bytes(i), "j": {"v": [i, None]},
            "o": None if i % 2 else torch.ones(i % 4), "l": torch.ones(i % 2 + 1, i % 3),
        },
        13,
    )  # fmt: skip
    store = cache(rows, tmp_path / "one.mf", workers=0)
    copy_rows(store._backing, tmp_path / "other.mf")
    other = memfeed.open(tmp_path / "other.mf")
    assert [field.kind for field in other.schema] == [field.kind for field in store.schema]
    assert all(equal(other[i], store[i]) for i in range(13))
    other.verify()


def test_no_rows(tmp_path):
    store = cache(Made(lambda i: {"x": i, "s": "a"}, 2), tmp_path / "one.mf", workers=0)
    store._backing.row_count = 0
    with pytest.raises(BuildError, match="found no row to keep"):
        copy_rows(store._backing, tmp_path / "other.mf")
