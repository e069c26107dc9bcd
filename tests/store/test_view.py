"""Views: their rows, digests and bytes, and what goes to another process."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import memfeed
from memfeed.errors import RowError, StoreError
from memfeed.store.row_supply import FillProgress
from memfeed.store.view import View
from support import Made, cache


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return cache(
        Made(lambda i: {"x": torch.full((2,), i), "y": i}, 6), tmp_path_factory.mktemp("view") / "s.mf", workers=0
    )


def test_rows_of_the_base(store):
    view = View(store._backing, rows=np.array([4, 0]))
    assert (len(view), view.base_length, view.has_all_rows) == (2, 6, False)
    assert view.base_rows(np.array([1, 0, 1])).tolist() == [0, 4, 0]
    assert view.all_rows().tolist() == [4, 0]
    assert store._view.base_rows(np.array([5])).tolist() == [5]
    for row in (2, -3):
        with pytest.raises(RowError):
            view.base_rows(np.array([row]))


def test_each_view_has_a_digest_of_its_own(store):
    rows = [None, np.array([0, 1]), np.array([1, 0]), np.arange(6), np.array([], np.int64)]
    views = [View(store._backing, rows=one) for one in rows]
    assert len({view.digest() for view in views}) == len({view.source_digest() for view in views}) == 5
    assert views[1].digest() == View(store._backing, rows=np.array([0, 1])).digest()
    assert views[0].digest() == store.digest


def test_fields(store):
    view = View(store._backing, fields=[1])
    assert view.schema.names() == "y"
    assert len(view.columns) == 1
    assert view.field_bytes() == [48]
    assert sum(store._view.field_bytes()) == store.nbytes == 144


def test_views_go_to_other_processes(store):
    view = View(store._backing, fields=[1], rows=np.array([4, 0]))
    data = pickle.dumps(view)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert again == view
    assert again != store._view
    assert again.columns[0].read_row(int(again.base_rows(np.array([0]))[0])) == 4
    again.rows[0] = 1  # in memory of its own


def test_a_store_that_was_rebuilt_meanwhile(tmp_path):
    data = pickle.dumps(cache(Made(list(range(4))), tmp_path / "s.mf", workers=0)._view)
    cache(Made(list(range(9))), tmp_path / "s.mf", workers=0, overwrite=True)
    with pytest.raises(StoreError, match="found another store than the one that was sent here"):
        pickle.loads(data)


def test_weights_have_no_rows(tmp_path):
    TensorDict({"w": torch.ones(3)}, []).memmap(tmp_path / "td")
    view = memfeed.open(tmp_path / "td")._view
    with pytest.raises(StoreError, match=r"found a TensorDict with batch_size \[\], which has no rows"):
        len(view)
    assert view.all_rows().tolist() == []
    assert view.recipe == view.skipped == ()


class Supply:
    """Rows 0 and 2 are there; row 1 was skipped."""

    def __init__(self):
        self.calls = []

    def wait(self, reader, rows):
        self.calls.append(("wait", rows.tolist()))
        return None if 1 not in rows else rows != 1

    def ready(self, reader, rows):
        self.calls.append(("ready", rows.tolist()))
        return rows != 1

    def forget(self, reader):
        self.calls.append("forget")

    def progress(self):
        return FillProgress(2, 3, 1)


def test_rows_that_are_not_there_yet(store):
    backing = SimpleNamespace(
        **{**vars(store._backing), "supply": Supply(), "path": store.path, "schema": store.schema}
    )
    view = View(backing)
    with view.present(np.array([0, 2])):
        assert backing.supply.calls == [("wait", [0, 2])]
    assert backing.supply.calls[-1] == "forget"
    with pytest.raises(RowError, match="found row 1, for which the dataset raised"), view.present(np.array([0, 1])):
        pytest.fail("the row is not there")
    assert backing.supply.calls[-1] == "forget"
    with view.present_now(np.array([0, 1, 2])) as there:
        assert there.tolist() == [True, False, True]
        assert backing.supply.calls[-1] == ("ready", [0, 1, 2])
    assert backing.supply.calls[-1] == "forget"
    with store._view.present_now(np.array([0, 5])) as there:
        assert there.tolist() == [True, True]
    assert view.progress() == FillProgress(2, 3, 1)
    with pytest.raises(StoreError, match=r"found targets of a store that is being filled \(2 of 3 rows"):
        view.require_filled("targets")
    assert store._view.progress() == FillProgress(6, 6, 0)
    with store._view.present(np.array([99])):
        pass
    store._view.require_filled("targets")
