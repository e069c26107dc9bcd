"""How many requests are made at once, and what a fault of one does: without a network."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from memfeed.building.unit_queue import UnitQueue
from memfeed.errors import RemoteError, StoreError
from memfeed.remote import fetching
from memfeed.remote.fetching import LEAST_IN_FLIGHT, MOST_IN_FLIGHT, Fetching, InFlight
from memfeed.remote.ranges import ChunkTable

CHUNK = 4 << 20


@pytest.mark.parametrize(
    ("megabytes_per_second", "latency", "least"), [(12, 0.001, 4), (1000, 0.05, 16), (5000, 0.1, 32)]
)
def test_requests_in_flight_suit_the_link(megabytes_per_second, latency, least):
    """A link that is full gets no more requests; a long, fat one gets as many as fill it."""
    chosen = InFlight()
    for _ in range(400):
        rate = megabytes_per_second * 1e6 / chosen.count  # each has its share, and at most 100 MB/s by itself
        chosen.note(CHUNK, latency + CHUNK / min(rate, 100e6), chosen.count)
    assert chosen.count >= least
    assert LEAST_IN_FLIGHT <= chosen.count <= MOST_IN_FLIGHT
    if megabytes_per_second == 12:
        assert chosen.count <= 8


def test_more_requests_than_usual_do_not_make_a_full_link_look_faster():
    """32 requests share 12 MB/s for what readers wait for: each takes 8 times as long as one of 4."""
    chosen = InFlight()
    for working in (4, 32) * 200:
        chosen.note(CHUNK, CHUNK * working / 12e6, working)
    assert chosen.count <= 8


class Directory:
    """A cache of ten chunks of 100 bytes in memory, of which ``room`` have room."""

    def __init__(self, room=10):
        self.content = np.random.default_rng(0).integers(0, 256, 1000, np.uint8).tobytes()
        self.table = ChunkTable({"a": 1000}, {"a": 100})
        self.hashes = [xxhash.xxh3_64_intdigest(self.content[at : at + 100]) for at in range(0, 1000, 100)]
        self.settings, self.root = SimpleNamespace(address="s3://b/a.mf", size=100 * room), "cache"
        self.room, self.there, self.claimed = room, {}, set()
        self.units = SimpleNamespace(take=self.take, release=self.drop, is_present=self.is_written)

    def are_absent(self, chunks):
        return np.array([chunk not in self.there for chunk in chunks.tolist()], bool)

    def is_written(self, chunk):
        return chunk in self.there

    def take(self, chunk):
        is_free = chunk not in self.claimed
        self.claimed.add(chunk)
        return is_free

    def drop(self, chunk):
        self.claimed.discard(chunk)

    def reserve(self, chunk, need, *, urgent):
        return len(self.there) < self.room

    def write(self, chunk, data):
        self.there[chunk] = bytes(data)


class Server:
    def __init__(self, directory, fails=0):
        self.content, self.fails, self.asked = directory.content, fails, []

    def read(self, name, first, size, accept=None):
        self.asked.append((first, size))
        if self.fails:
            self.fails -= 1
            raise RemoteError("found no connection")
        data = memoryview(self.content)[first : first + size]
        assert accept(data)
        return data


@pytest.fixture
def start():
    """Return a function that starts the threads for a directory and a server; they end with the test."""
    started = []

    def fetch(directory, server):
        queue = UnitQueue(10, directory.are_absent, span_of=directory.table.span)
        started.append(Fetching(directory, server, queue))
        return started[-1]

    yield fetch
    for one in started:
        one.stop()
        one.join()


def bring(started, chunks):
    """Wait until chunks are there, or one of them has failed; return the errors."""
    chunks = np.array(chunks)
    with started.changed:
        started.queue.retry(chunks)
        started.queue.prioritise(chunks)
        started.start()
        started.changed.notify_all()
        is_done = lambda: started.queue.failed or not started.directory.are_absent(chunks).any()  # noqa: E731
        assert started.changed.wait_for(is_done, 20)
        return list(started.queue.failed.values())


def test_chunks_that_are_brought_have_their_bytes(start):
    directory = Directory()
    assert not bring(start(directory, Server(directory)), [2, 3, 9])
    assert directory.there == {at: directory.content[100 * at : 100 * at + 100] for at in (2, 3, 9)}
    assert not directory.claimed


def test_a_chunk_that_failed_is_fetched_again_once_it_is_asked_for(start):
    directory = Directory()
    started = start(directory, Server(directory, fails=1))
    (error,) = bring(started, [5])
    assert "no connection" in str(error)
    assert not directory.claimed
    assert not bring(started, [5])
    assert 5 in directory.there


def test_a_chunk_without_room_is_an_error_after_a_while(start, monkeypatch):
    monkeypatch.setattr(fetching, "ROOM_SECONDS", 0.05)
    directory = Directory(room=1)
    started = start(directory, Server(directory))
    assert not bring(started, [0])
    (error,) = bring(started, [1])
    assert isinstance(error, StoreError)
    assert "found a cache of 100 B that is all in use by readers" in str(error)
    directory.there.clear()
    assert not bring(started, [1])
    assert list(directory.there) == [1]


def test_a_chunk_that_another_process_has_is_waited_for(start):
    directory = Directory()
    started = start(directory, Server(directory))
    assert directory.take(4)
    with started.changed:
        started.queue.prioritise(np.array([4]))
        started.start()
    while not started.queue.returned:
        pass
    directory.drop(4)  # the other process has died
    assert not bring(started, [4])
    assert 4 in directory.there
