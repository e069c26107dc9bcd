"""The reader of a loader: documents in a new order, groups made ahead, and what its plan is made again for."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

import memfeed
from memfeed.errors import LoaderError
from memfeed.loading import epoch_reader
from memfeed.loading.background import made_ahead
from memfeed.loading.epoch_reader import DocumentOrder, _draw_ahead
from memfeed.loading.gather_tasks import BatchGroup
from memfeed.order.choice import Blocks
from support import Made, cache


@pytest.fixture
def store(tmp_path):
    return cache(Made(lambda i: {"x": torch.full((3,), i), "y": i}, 20), tmp_path / "s.mf", workers=0)


def reader_of(loader):
    return loader._epochs.reader


class Drawn:
    def __init__(self):
        self.epochs = []

    def draw_ahead(self, epoch):
        self.epochs.append(epoch)


def test_the_next_order_is_drawn_once_the_first_batch_is_on_its_way():
    drawn = [Drawn(), Drawn()]
    tasks = _draw_ahead(iter([1, 2, 3]), drawn, 7)
    assert next(tasks) == 1
    assert drawn[0].epochs == []
    assert next(tasks) == 2
    assert [one.epochs for one in drawn] == [[7], [7]]
    assert list(tasks) == [3]
    assert list(_draw_ahead(iter([]), drawn, 8)) == []


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_groups_are_made_ahead(prefetch):
    made = []
    groups = (made.append(i) or BatchGroup([i], (i,), 1) for i in range(5))
    found = []
    for group in made_ahead(groups, prefetch):
        found.append(group.positions[0])
        assert len(made) == min(5, len(found) + prefetch)
    assert found == list(range(5))


def test_documents_change_their_order_where_a_packed_store_is_shuffled_whole(tmp_path):
    packed = cache(Made(lambda i: {"t": torch.arange(i % 4 + 1)}, 20), tmp_path / "d.mf", workers=0).packed("t", 4)
    orders = DocumentOrder(packed, True)
    (drawn,) = orders.orders(3)
    assert orders.orders(3)[0] is drawn
    assert orders.orders(4)[0] is not drawn
    assert sorted(drawn(0)(0, 20).tolist()) == list(range(20))
    columns = orders.columns(packed._view.columns, 0, 3)
    assert columns is not None
    assert [one.row_count for one in columns] == [one.row_count for one in packed._view.columns]
    for shuffle, of in ((False, packed), (Blocks(4), packed), (True, packed.subset([0, 1]))):
        assert DocumentOrder(of, shuffle).orders(3) == []
        assert DocumentOrder(of, shuffle).columns(of._view.columns, 0, 3) is None


def test_a_plan_is_made_once(store):
    loader = memfeed.Loader(store, 4)
    reader = reader_of(loader)
    assert reader.plan is None
    assert reader.describe_placements() == ""
    plan = reader.prepare()
    assert reader.prepare() is plan
    assert reader.describe_placements() == "mapped: x, y"


def test_placements_of_many_fields_are_counted(tmp_path):
    store = cache(Made(lambda i: {str(k): i for k in range(6)}, 4), tmp_path / "s.mf", workers=0)
    reader = reader_of(memfeed.Loader(store, 4))
    reader.prepare()
    assert reader.describe_placements() == "mapped: 6 fields"


def test_new_settings_keep_the_plan_unless_samples_are_collated_otherwise(store):
    reader = reader_of(memfeed.Loader(store, 4))
    plan, settings = reader.prepare(), reader._settings
    assert not reader.use(settings)
    assert reader.use(dataclasses.replace(settings, batch_size=2))
    assert reader.plan is plan
    assert reader.use(dataclasses.replace(settings, collate_fn=list))
    assert reader.plan is None


def test_memory_that_runs_out_makes_columns_fall_back_once(store, monkeypatch):
    loader = memfeed.Loader(
        store, 4, shuffle=True, seed=1, placement={"x": "pinned"} if torch.cuda.is_available() else "auto"
    )
    expected = [batch["y"].tolist() for batch in memfeed.Loader(store, 4, shuffle=True, seed=1)]
    reader, real, fails = reader_of(loader), epoch_reader.EpochReader._groups, iter([2, 1])

    def failing(self, *arguments):
        groups = real(self, *arguments)
        stop = next(fails, None)
        yield from itertools.islice(groups, stop)
        if stop is not None:
            raise MemoryError("no memory")

    monkeypatch.setattr(epoch_reader.EpochReader, "_groups", failing)
    monkeypatch.setattr(epoch_reader, "fallback", list)
    found, batches = [], iter(loader)
    with pytest.warns(UserWarning, match="memory ran out in epoch 0"), pytest.raises(MemoryError):
        while True:
            found.append(next(batches)["y"].tolist())
    assert found == expected[: len(found)]
    assert reader._fell_back


def test_other_errors_are_raised_as_they_are(store, monkeypatch):
    def failing(self, *arguments):
        raise RuntimeError(message)
        yield

    monkeypatch.setattr(epoch_reader.EpochReader, "_groups", failing)
    message = "something else"
    with pytest.raises(RuntimeError, match="something else"):
        next(iter(memfeed.Loader(store, 4)))
    message = "operation not permitted when stream is capturing"
    with pytest.raises(LoaderError, match="found a CUDA graph capture"):
        next(iter(memfeed.Loader(store, 4)))


def test_rows_of_a_view_are_those_of_its_base(store):
    view = store.subset(np.array([5, 3, 9]))
    (batch,) = memfeed.Loader(view, 3)
    assert batch["y"].tolist() == [5, 3, 9]
