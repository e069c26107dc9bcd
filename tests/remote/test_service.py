"""What the thread of a cache does for forked children, for the disk, and at the end: without a network."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from memfeed.errors import BuildError, RemoteError
from memfeed.remote import service
from memfeed.remote.service import CacheService


class Directory:
    """A cache that notes what is done with it; ``complete`` says whether all chunks are there."""

    def __init__(self, root, errors=()):
        self.root, self.settings, self.complete = root, SimpleNamespace(size=None), False
        self.errors, self.done, self.left = list(errors), [], threading.Event()

    def _do(self, what):
        self.done.append(what)
        if self.errors:
            raise self.errors.pop()

    def sync(self):
        self._do("sync")

    def commit(self):
        self._do("commit")

    def is_complete(self):
        return self.complete

    def are_absent(self, chunks):
        return chunks != 2

    def leave(self):
        self.left.set()


class Fetching:
    def __init__(self):
        self.changed, self.queue, self.asked = threading.Condition(), SimpleNamespace(failed={}), []

    def start(self):
        pass

    stop = join = start

    def ask(self, chunks):
        with self.changed:
            self.asked.append(chunks.tolist())
            self.changed.notify_all()


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts the service of a cache; it ends with the test."""
    monkeypatch.setattr(service, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(service, "SYNC_SECONDS", 0.02)
    started = []

    def serve(errors=(), *, complete=False):
        directory, fetching = Directory(tmp_path, errors), Fetching()
        directory.complete = complete
        started.append(CacheService(directory, fetching))
        started[-1].start()
        return started[-1], directory, fetching

    yield serve
    for one in started:
        one.release()
        assert one.directory.left.wait(20)


def test_a_complete_cache_is_committed_and_its_readers_need_no_supply(start):
    before, after = (type("Backing", (), {"supply": 1, "remake": 1})() for _ in range(2))
    found, directory, _ = start()
    found.follow(before)
    assert before.supply == 1
    directory.complete = True
    assert found.is_done.wait(20)
    found.join()
    found.follow(after)
    assert (before.supply, after.supply, after.remake) == (None, None, None)
    assert "commit" in directory.done


def test_a_commit_that_fails_is_said_once_and_tried_again(start, capfd):
    errors = [BuildError("found no room"), BuildError("found no room")]
    found, directory, _ = start(errors, complete=True)
    assert found.is_done.wait(20)
    assert not directory.errors
    assert capfd.readouterr().err.count("found no room. The cache is used as it is") == 1


def test_chunks_of_children_are_fetched_and_errors_go_to_them(start):
    found, _, fetching = start()
    with fetching.changed:
        found.children.ask(np.array([1, 2]))
        assert fetching.changed.wait_for(lambda: fetching.asked, 20)
        assert fetching.asked == [[1]]  # the other one is there
        assert not found.children.error_count()
        fetching.queue.failed[1] = RemoteError("found no connection")
        found.children.ask(np.array([1]))
        assert fetching.changed.wait_for(lambda: len(fetching.asked) == 2, 20)
    assert str(found.children.last_error()) == "found no connection"


def test_a_cache_is_synced_at_the_end_and_left(start):
    found, directory, _ = start()
    found.release()
    assert directory.left.wait(20)
    assert directory.done[-1] == "sync"
