"""What a supply is told ahead of a loader, and when."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from memfeed.loading import readahead
from memfeed.loading.gather_tasks import GatherTask
from memfeed.store.row_supply import ReadRequest


class Told:
    """A supply that notes what it is told."""

    in_caller = False

    def __init__(self):
        self.events = []

    def want(self, reader, rows):
        self.events.append(("want", int(rows[0])))

    def wait(self, reader, rows):
        assert ("want", int(rows[0])) in self.events
        self.events.append(("wait", int(rows[0])))

    def forget(self, reader):
        self.events.append(("forget", 0))


@pytest.mark.parametrize(("rows", "count"), [(256, 600), (256, 3), (100_000, 3), (1, 10), (3000, 100)])
@pytest.mark.parametrize("has_own_order", [True, False])
def test_each_task_is_told_once_before_it_is_waited_for(rows, count, has_own_order):
    supply = Told()
    view = SimpleNamespace(supply=supply, reader=ReadRequest)
    store = SimpleNamespace(_view=view, _backing=SimpleNamespace(masks_rows=False))
    tasks = [GatherTask(np.full(rows, at), np.full(rows, at), rows, (at,)) for at in range(count)]
    found = [int(task.ids[0]) for task in readahead.present_tasks(iter(tasks), store, has_own_order=has_own_order)]
    assert found == [*range(count)]
    for what in ("want", "wait"):
        assert [at for event, at in supply.events if event == what] == [*range(count)]
    assert supply.events[-1] == ("forget", 0)


def test_rows_far_ahead_are_told_together():
    """So that the chunks of a new window of blocks are known at once, and neighbours are fetched by one request."""
    supply = Told()
    view = SimpleNamespace(supply=supply, reader=ReadRequest)
    store = SimpleNamespace(_view=view, _backing=SimpleNamespace(masks_rows=False))
    tasks = (GatherTask(np.full(256, at), np.full(256, at), 256, (at,)) for at in range(1000))
    batches = readahead.present_tasks(tasks, store, has_own_order=True)
    told, sizes = 0, []
    for _ in range(400):
        next(batches)
        now = sum(event == "want" for event, _ in supply.events)
        sizes.append(now - told)
        told = now
    assert sizes[0] == readahead.ROWS_AHEAD // 256
    assert {*sizes[1:]} == {0, readahead.ROWS_AT_ONCE // 256}
