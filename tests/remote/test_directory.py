"""The cache directory: claims, room and which chunks go."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

import memfeed
from memfeed.building.partial import ABSENT, DURABLE, HELD, WRITTEN
from memfeed.remote.caches import Remote, open_directory
from memfeed.store import format
from memfeed.store.manifest import CHUNK_BYTES


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a cache with room for so many of the chunks of a store, of one file."""
    made = []

    def cache(chunks, room=None):
        local = memfeed.cache(torch.zeros(1, 1, dtype=torch.uint8), tmp_path / "one.mf", allow="copy", progress=False)
        field = msgspec.structs.replace(local.schema.fields[0], shape=(CHUNK_BYTES,))
        hashes = np.zeros(chunks, "<u8").tobytes()
        manifest = msgspec.structs.replace(
            local._view.manifest,
            rows=chunks,
            schema=msgspec.structs.replace(local.schema, fields=(field,)),
            files=dict.fromkeys(local._view.manifest.files, chunks * CHUNK_BYTES),
            checksums=format.digest(hashes),
        )
        remote = Remote(msgspec.json.encode(manifest), hashes)
        size = None if room is None else room * CHUNK_BYTES
        made.append(open_directory(tmp_path / "cache", "s3://made/up", size, remote))
        return made[-1]

    yield cache
    for one in made:
        one.units.close()
        one.leave()


def soon(chunks):
    """Return that all chunks are needed alike."""
    return np.zeros(len(chunks))


def put(directory, chunk, need=soon, *, urgent=True):
    """Write a chunk as fetching does. Return False if there is no room."""
    assert directory.units.take(chunk)
    has_room = directory.reserve(chunk, need, urgent=urgent)
    if has_room:
        directory.units.mark(chunk, 1, WRITTEN)
    directory.units.release(chunk)
    return has_room


def test_a_chunk_that_is_kept_is_not_removed(make):
    directory = make(5, room=2)
    assert not directory.units.keep(0)  # it is not there
    assert put(directory, 0)
    assert put(directory, 1)
    assert directory.units.keep(0)
    assert directory.units.keep(0)
    assert not directory.units.take(0)
    assert put(directory, 2)
    assert directory.units.states.tolist() == [WRITTEN, ABSENT, WRITTEN, ABSENT, ABSENT]
    directory.units.let_go(0)
    assert not directory.units.take(0)  # it was kept twice
    assert directory.units.keep(2)
    assert not put(directory, 3)
    directory.units.let_go(0)
    assert put(directory, 3)
    assert directory.units.states.tolist() == [ABSENT, ABSENT, WRITTEN, WRITTEN, ABSENT]
    directory.units.let_go(2)


def test_a_chunk_that_is_written_or_removed_is_not_kept(make):
    directory = make(2, room=2 - 1)
    assert put(directory, 0)
    assert directory.units.take(0)
    assert not directory.units.keep(0)
    directory.units.release(0)
    assert directory.units.keep(0)
    directory.units.let_go(0)


def test_a_chunk_that_another_process_keeps_is_not_removed(make, tmp_path):
    """Another open file of the locks stands for it: the locks belong to open files."""
    directory = make(3, room=1)
    other = make(3, room=1)
    assert put(directory, 0)
    assert other.units.keep(0)
    assert not directory.units.take(0)
    assert not put(directory, 1)
    other.units.let_go(0)
    assert put(directory, 1)
    assert not other.units.keep(0)


def test_room_that_was_reserved_for_nothing_is_given_back(make):
    directory = make(2, room=1)
    assert directory.units.take(0)
    assert directory.reserve(0, soon, urgent=False)
    assert directory.units.states[0] == HELD
    directory.drop(0)
    assert directory.units.states[0] == ABSENT
    assert put(directory, 1, urgent=False)


def test_a_durable_chunk_that_is_removed_is_absent(make):
    directory = make(2, room=1)
    assert put(directory, 0)
    directory.sync()
    assert directory.units.states[0] == DURABLE
    assert put(directory, 1)
    assert directory.units.states.tolist() == [ABSENT, WRITTEN]


def test_chunks_to_remove_are_looked_for_once_for_many(make):
    """In the order of need: what is needed last goes first, and what is needed sooner than the new chunk stays."""
    chunks, room = 4000, 1000
    directory = make(chunks, room)
    place, looks = np.random.default_rng(0).permutation(chunks), []

    def need(asked):
        looks.append(len(asked))
        return place[asked].astype(np.float64)

    for chunk in range(chunks):
        if directory.units.take(chunk):
            directory.reserve(chunk, need, urgent=False)
            directory.units.release(chunk)
    kept = np.flatnonzero(directory.units.states)
    assert room - 1 <= len(kept) <= room
    assert set(place[kept].tolist()) == set(range(len(kept)))
    looks.clear()
    for chunk in np.flatnonzero(directory.units.states == ABSENT)[: room // 2].tolist():  # somebody waits for each
        assert directory.units.take(chunk)
        assert directory.reserve(chunk, need, urgent=True)
        directory.units.release(chunk)
    assert len([asked for asked in looks if asked > 1]) <= 3
