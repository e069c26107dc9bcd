"""What one service does for the readers of a partial store, for forked children, and at the end: in memory."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from memfeed.building import service
from memfeed.building.service import Service
from memfeed.building.unit_queue import UnitQueue
from memfeed.errors import BuildError, MemfeedError, StoreError
from memfeed.store.row_supply import ReadRequest

COUNT = 8


class Memory(Service):
    """Eight units that the thread of the service brings; ``hurts`` has what is raised for some of them."""

    finish_units, retries = 3, False

    def __init__(self, root, hurts=None, *, retries=False, is_slow=False):
        self.there, self.brought = np.zeros(COUNT, bool), []
        self.hurts, self.retries, self.may_work = hurts or {}, retries, threading.Event()
        if not is_slow:
            self.may_work.set()
        self.events, self.ended = [], threading.Event()
        queue = UnitQueue(COUNT, lambda units: ~self.there[units])
        super().__init__(root, queue, threading.Condition(), lambda backing: setattr(backing, "supply", None))

    def _feed(self):
        self.changed.notify_all()

    def _stop_supplier(self):
        self.events.append("stop")

    def _serve(self):
        while not self._is_over():
            self.serve_children(0.001)
            if not self.may_work.wait(0.001):
                continue
            with self.changed:
                units = self.queue.next_units(time.monotonic(), 2)
            for unit in units.tolist():
                error = self.hurts.get(unit)
                if isinstance(error, KeyError):
                    raise error
                self.brought.append(unit)
                self.there[unit] = error is None
                with self.changed:
                    self.queue.give_back(np.array([unit]), 0.0, {} if error is None else {unit: error})
                    self.changed.notify_all()

    def _end(self):
        return [lambda: 1 / 0, self.ended.set]

    def _will_commit(self):
        return False

    def _await_commit(self):
        if "lose" in self.events:  # a unit was lost before the commit
            self.events.remove("lose")
            self.there[4] = False
            return False
        self.events.append("commit")
        self._switch_backings()
        return True


@pytest.fixture
def start(tmp_path):
    """Return a function that makes a service, which ends with the test."""
    made = []

    def make(*args, **options):
        made.append(Memory(tmp_path, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.join()
        assert one._thread is None or one.ended.wait(20), "also after an error of what ended before it"


class Backing:
    supply = 1


def test_units_are_brought_in_the_order_of_readers(start):
    found, reader, rows = start(is_slow=True), ReadRequest(), np.array([7, 2])
    found.want(reader, rows)
    found.want(reader, np.array([5]))
    found.ask(np.array([3]))
    found.may_work.set()
    found.note_wait(reader, rows)
    found.bring(rows)
    found.bring(np.array([3, 5]))
    assert sorted(found.brought) == [2, 3, 5, 7]
    assert found.brought[0] == 3


def test_what_a_reader_forgot_is_not_brought(start):
    found, reader = start(is_slow=True), ReadRequest()
    found.want(reader, np.array([7]))
    found.forget(reader)
    found.may_work.set()
    found.bring(np.array([1]))
    assert found.brought == [1]


@pytest.mark.parametrize("retries", [False, True])
def test_a_unit_that_fails_is_an_error_for_whoever_waits_for_it(start, retries):
    found = start({3: BuildError("found a bad sample")}, retries=retries)
    for _ in range(2):
        with pytest.raises(BuildError, match="bad sample"):
            found.bring(np.array([3]))
    found.bring(np.array([1, 2]))
    assert found.brought.count(3) == 1 + retries
    found.hurts.clear()
    if retries:
        found.bring(np.array([3]))


def test_an_error_that_is_cleared_while_it_is_looked_for_is_no_key_error(start):
    class Clearing(dict):
        def __contains__(self, unit):
            return self.pop(unit, None) is not None  # another reader lets the unit be tried again now

    found = start(retries=True)
    found.queue.failed = Clearing({3: BuildError("found a bad sample")})
    with pytest.raises(BuildError, match="bad sample"):
        found._raise_for(np.array([3]))


def test_an_error_of_the_thread_ends_every_wait(start):
    found = start({3: KeyError("surprise")})
    with pytest.raises(BuildError, match=r"cannot be filled any more \(KeyError\('surprise'\)\)"):
        found.bring(np.array([3]))
    with pytest.raises(BuildError, match="cannot be filled any more"):
        found.bring(np.array([5]))


def test_a_wait_ends_when_the_service_is_stopped(start):
    found, errors = start(is_slow=True), []

    def wait():
        try:
            found.bring(np.array([3]))
        except MemfeedError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not len(found.queue.urgent):
        pass
    found.stop()
    waiting.join(20)
    assert isinstance(errors[0], StoreError)
    assert "come no more" in str(errors[0])


def test_finish_brings_all_and_again_what_was_lost_before_the_commit(start):
    found, before, after = start(), Backing(), Backing()
    found.follow(before)
    found.events.append("lose")
    found.finish()
    assert sorted(found.brought) == sorted([*range(COUNT), 4])
    assert found.events == ["commit", "stop"]
    found.follow(after)
    assert (before.supply, after.supply) == (None, None)


def test_a_service_ends_with_its_last_backing(start):
    found = start()
    one, other = Backing(), Backing()
    found.follow(one)
    found.follow(other)
    found.bring(np.array([1]))
    del one
    found.bring(np.array([2]))
    del other
    assert found.ended.wait(20)
    assert found._stopping.is_set()


def test_the_end_of_a_process_waits_for_a_commit_under_way(start, monkeypatch, capfd):
    monkeypatch.setattr(service, "QUIET_SECONDS", 0.01)
    found = start()
    found.bring(np.array([1]))
    found._will_commit = lambda: True
    committing = threading.Timer(0.1, found._switch_backings)
    committing.start()
    found.join()
    assert found._done.is_set()
    assert "all rows are there" in capfd.readouterr().err


def in_child(action):
    """Return the exit status of a forked child that runs ``action``, and the process."""
    pid = os.fork()
    if pid:
        return SimpleNamespace(wait=lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    try:
        os._exit(action() or 0)
    finally:
        os._exit(99)


def raised(action, text):
    try:
        action()
    except BuildError as error:
        return 0 if text in str(error) else 1
    return 2


def test_a_forked_child_is_served_by_its_parent_and_gets_its_errors(start):
    found = start({3: BuildError("found a bad sample"), 6: KeyError("surprise")})
    found.there = np.memmap(found.root / "there", bool, "w+", shape=COUNT)  # that both see
    found.bring(np.array([1]))
    reader = ReadRequest()

    def read():
        found.want(reader, np.array([5]))
        found.note_wait(reader, np.array([5]))
        found.bring(np.array([1, 5]))
        found.forget(reader)
        found.stop()  # only its parent can stop it
        return raised(lambda: found.bring(np.array([3])), "bad sample")

    assert in_child(read).wait() == 0
    assert found.brought == [1, 5, 3]
    waits = in_child(lambda: raised(lambda: found.bring(np.array([6])), "surprise"))
    assert waits.wait() == 0
    late = in_child(lambda: raised(lambda: found.bring(np.array([7])), "surprise"))
    assert late.wait() == 0, "nothing is brought any more"
