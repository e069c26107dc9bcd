"""What is opened at a path: fields, records, replay buffers that are not full, and what is left out."""

import pytest
import torch
from tensordict import TensorDict

import memfeed
from memfeed.errors import FieldError, StoreError
from memfeed.store import opened
from support import Made, Point, cache


@pytest.fixture
def path(tmp_path):
    cache(Made(lambda i: Point(i, torch.ones(2)), 4), tmp_path / "s.mf", workers=0)
    return tmp_path / "s.mf"


def test_fields(path):
    assert opened.open(path, select="x").schema.names() == "x"
    assert opened.open(str(path), select=["y", "x"]).schema.names() in ("x, y", "y, x")
    with pytest.raises(FieldError, match="z"):
        opened.open(path, select="z")


def test_records(path):
    assert type(opened.open(path, types=Point)[0]) is Point
    assert type(opened.open(path, types=[Point])[0]) is Point
    plain = opened.open(path)[0]
    assert type(plain) is not Point
    assert plain.x == 0


@pytest.mark.parametrize("make", ["nothing", "file", "empty directory"])
def test_what_is_no_store(tmp_path, make):
    path = tmp_path / "a"
    if make == "file":
        path.write_text("x")
    elif make != "nothing":
        path.mkdir()
    with pytest.raises(StoreError):
        opened.open(path)


def test_what_is_not_read_is_told(tmp_path):
    data = TensorDict({"a": torch.arange(3)}, [3])
    data.set_non_tensor("odd", object)
    data.memmap(tmp_path / "td")
    with pytest.warns(UserWarning, match="left out what is not read .*odd"):
        store = memfeed.open(tmp_path / "td")
    assert store.schema.names() == "a"


@pytest.mark.parametrize(("filled", "rows"), [(2, 2), (3, 3), (9, 3), (None, 3)])
def test_a_replay_buffer_gives_the_rows_that_are_filled(tmp_path, monkeypatch, filled, rows):
    TensorDict({"a": torch.arange(3)}, [3]).memmap(tmp_path / "td")
    monkeypatch.setattr("memfeed.store.opened._filled_rows", lambda path, batch: filled)
    store = memfeed.open(tmp_path / "td")
    assert [store[i]["a"].item() for i in range(len(store))] == [0, 1, 2][:rows]
