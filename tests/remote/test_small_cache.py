"""A cache that is smaller than its store: what is fetched, what the disk takes, and that every row is right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memfeed
from memfeed.building.partial import ABSENT
from memfeed.errors import CorruptStoreError
from memfeed.order import choice, orders
from memfeed.remote.caches import Remote, open_directory
from memfeed.remote.layout import RANGES, is_range_file, read_manifest
from memfeed.remote.opening import LazyRemote
from memfeed.remote.ranges import ByteRange, ChunkTable, aligned_step
from memfeed.remote.row_hashes import RowHashes
from memfeed.store import format
from memfeed.store.manifest import CHUNK_BYTES
from memfeed.testing import equal
from origin import disk_bytes

pytest.importorskip("obstore")
ROWS, ROW_SHAPE, ROW_BYTES = 1000, (3, 64, 112), 21_504  # no whole number of rows is 4 MiB
SIZE = 0.4


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    images = torch.randint(0, 256, (ROWS, *ROW_SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    columns = {"image": images, "label": torch.arange(ROWS)}
    return memfeed.cache(columns, tmp_path_factory.mktemp("small") / "a.mf", allow="copy", progress=False)


@pytest.fixture
def origin(local, tmp_path):
    address = f"file://{tmp_path}/remote/a.mf"
    memfeed.push(local, address)
    return address


@pytest.fixture
def fetched(monkeypatch):
    """Return the requests for columns: the file, the first byte and how many."""
    read, found = LazyRemote.read, list[tuple[str, int, int]]()

    def counted(self, name, first, size, accept=None):
        found.append((name, first, size))
        return read(self, name, first, size, accept)

    monkeypatch.setattr(LazyRemote, "read", counted)
    return found


def open_small(origin, local, cache):
    size = int(SIZE * local.nbytes)
    return memfeed.open(origin, cache_dir=cache, size=size), size


@given(st.integers(1, 40 << 20))
def test_chunks_hold_whole_rows_and_blocks_of_the_disk(row_bytes):
    step = aligned_step(row_bytes)
    assert step % 4096 == 0
    assert step <= 2 * CHUNK_BYTES
    assert step % row_bytes == 0 or (step == CHUNK_BYTES and np.lcm(row_bytes, 4096) > 2 * CHUNK_BYTES)


def test_a_push_has_checksums_of_chunks_of_whole_rows(local, origin):
    remote = read_manifest(origin)
    content = remote.read_range_file()
    assert is_range_file(content)
    assert not is_range_file(content[:-1] + bytes([content[-1] ^ 1]))
    path = Path(origin.removeprefix("file://")) / remote.files[RANGES].name
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptStoreError, match=r"ranges\.bin"):
        read_manifest(origin).read_range_file()


def test_by_blocks_each_chunk_comes_once_an_epoch(local, origin, tmp_path, fetched, monkeypatch):
    monkeypatch.setattr(orders, "WINDOW_BLOCKS", 2)
    monkeypatch.setattr(choice, "WINDOW_BLOCKS", 2)
    store, size = open_small(origin, local, tmp_path / "cache")
    loaders = [
        memfeed.Loader(one, 16, shuffle=memfeed.Blocks(store._backing.chunk_rows), seed=1) for one in (store, local)
    ]
    step = store._view.supply.directory.table.steps["image.memmap"]
    assert step == store._backing.chunk_rows * ROW_BYTES
    for _ in range(2):
        fetched.clear()
        for mine, theirs in zip(*loaders, strict=True):
            assert equal(mine, theirs)
            assert disk_bytes(tmp_path / "cache") <= size * 1.05
        chunks = Counter(
            at // step
            for name, first, count in fetched
            if name == "image.memmap"
            for at in range(first, first + count, step)
        )
        assert set(chunks.values()) <= {1}


@pytest.mark.parametrize("in_blocks", [False, True])
def test_rows_that_have_no_room_are_fetched_alone(local, origin, tmp_path, fetched, capfd, in_blocks):
    """A window of 128 blocks has no room here: it is as an order of all rows."""
    store, size = open_small(origin, local, tmp_path / "cache")
    shuffle = memfeed.Blocks(store._backing.chunk_rows) if in_blocks else True
    loaders = [memfeed.Loader(one, 16, shuffle=shuffle, seed=1) for one in (store, local)]
    for epoch in range(3):
        fetched.clear()
        for mine, theirs in zip(*loaders, strict=True):
            assert equal(mine, theirs)
            assert disk_bytes(tmp_path / "cache") <= size * 1.05
        bytes_fetched = sum(count for _, _, count in fetched)
        if epoch:
            assert bytes_fetched <= 1.15 * (local.nbytes - 3 * CHUNK_BYTES // 2)
            singles = sum(count <= 4 * ROW_BYTES for _, _, count in fetched)  # neighbours come together
            assert singles >= 0.95 * len(fetched)
    assert store.progress().present < ROWS
    assert "rows are fetched again one by one, 12.9 MB in each epoch" in capfd.readouterr().err


def test_a_row_with_other_bytes_is_an_error(local, origin, tmp_path):
    store, _ = open_small(origin, local, tmp_path / "cache")
    loader = memfeed.Loader(store, 16, shuffle=True, seed=1)
    list(loader)
    image = Path(origin.removeprefix("file://")) / read_manifest(origin).files["image.memmap"].name
    stat = image.stat()
    image.chmod(0o644)
    data = bytearray(image.read_bytes())
    data[::1000] = bytes(one ^ 1 for one in data[::1000])
    with open(image, "r+b") as file:
        file.write(data)
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the etag of a file is that of its time
    with pytest.raises(CorruptStoreError, match="file://"):
        list(loader)


def test_an_epoch_goes_on_from_where_it_was(local, origin, tmp_path):
    store, size = open_small(origin, local, tmp_path / "cache")
    loader, expected = (memfeed.Loader(one, 16, shuffle=True, seed=5) for one in (store, local))
    want = list(expected)
    batches = iter(loader)
    got = [next(batches) for _ in range(9)]
    state = loader.state_dict()
    del batches, loader, store
    again = memfeed.Loader(memfeed.open(origin, cache_dir=tmp_path / "cache", size=size), 16, shuffle=True, seed=5)
    again.load_state_dict(state)
    got += list(again)
    assert all(equal(a, b) for a, b in zip(got, want, strict=True))


RANK = """
import os, signal, sys, memfeed
from memfeed.testing import equal
origin, cache, size, local, rank, dies = sys.argv[1:]
stores = memfeed.open(origin, cache_dir=cache, size=int(size)), memfeed.open(local)
loaders = [memfeed.Loader(one, 16, shuffle=True, seed=1, ranks=(int(rank), 2)) for one in stores]
for _ in range(2):
    for at, (mine, theirs) in enumerate(zip(*loaders, strict=True)):
        assert equal(mine, theirs)
        if dies == "yes" and at == 9:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_two_ranks_share_it_also_when_one_is_killed(local, origin, tmp_path):
    size = int(SIZE * local.nbytes)

    def run(rank, dies):
        command = [sys.executable, "-c", RANK, origin, tmp_path / "cache", size, local.path, rank, dies]
        paths = os.pathsep.join(sys.path)
        return subprocess.Popen([str(one) for one in command], env={**os.environ, "PYTHONPATH": paths})

    ranks = [run(0, "no"), run(1, "yes")]
    assert [rank.wait(300) for rank in ranks] == [0, -signal.SIGKILL]
    assert run(1, "no").wait(300) == 0
    assert disk_bytes(tmp_path / "cache") <= size * 1.05


@given(st.integers(1, 3), st.integers(1, 50), st.data())
def test_pieces_are_compared(tmp_path_factory, chunks, piece, data):
    """Of any bytes of a chunk, the pieces around them are right, and are not with one bit changed."""
    table = ChunkTable({"a": chunks * 100 - 7, "b": 0}, {"a": 100, "b": 100})
    found = RowHashes(tmp_path_factory.mktemp("pieces"), table, {"a": piece, "b": piece})
    content = np.random.default_rng(0).integers(0, 256, chunks * 100 - 7, np.uint8).tobytes()
    place: ByteRange = table.at(data.draw(st.integers(0, chunks - 1)))
    assert not found.are_known(place.chunk)
    found.learn(place, memoryview(content)[place.start : place.stop])
    assert found.are_known(place.chunk)
    start = data.draw(st.integers(place.start, place.stop - 1))
    stop = data.draw(st.integers(start + 1, place.stop))
    first, last = found.around(place, start, stop)
    assert place.start <= first <= start < stop <= last <= place.stop
    read = bytearray(content[first:last])
    assert found.are_right(place, first, memoryview(read))
    read[data.draw(st.integers(0, len(read) - 1))] ^= 4
    assert not found.are_right(place, first, memoryview(read))


def test_chunks_to_remove_are_looked_for_once_for_many(tmp_path):
    """In the order of need: what is needed last goes first, and what is needed sooner than the new chunk stays."""
    chunks, room = 4000, 1000
    size = chunks * CHUNK_BYTES
    local = memfeed.cache(torch.zeros(1, 1, dtype=torch.uint8), tmp_path / "one.mf", allow="copy", progress=False)
    field = msgspec.structs.replace(local.schema.fields[0], shape=(CHUNK_BYTES,))
    hashes = np.zeros(chunks, "<u8").tobytes()
    manifest = msgspec.structs.replace(
        local._view.manifest,
        rows=chunks,
        schema=msgspec.structs.replace(local.schema, fields=(field,)),
        files=dict.fromkeys(local._view.manifest.files, size),
        checksums=format.digest(hashes),
    )
    remote = Remote(msgspec.json.encode(manifest), hashes)
    directory = open_directory(tmp_path / "cache", "s3://made/up", room * CHUNK_BYTES, remote)
    place, looks = np.random.default_rng(0).permutation(chunks), []

    def need(asked):
        looks.append(len(asked))
        return place[asked].astype(np.float64)

    for chunk in range(chunks):
        if directory.units.take(chunk):
            directory.reserve(chunk, need, urgent=False, may_remove=True)
            directory.units.release(chunk)
    kept = np.flatnonzero(directory.units.states)
    assert room - 1 <= len(kept) <= room
    assert set(place[kept].tolist()) == set(range(len(kept)))
    looks.clear()
    for chunk in np.flatnonzero(directory.units.states == ABSENT)[: room // 2].tolist():  # somebody waits for each
        assert directory.units.take(chunk)
        assert directory.reserve(chunk, need, urgent=True, may_remove=True)
        directory.units.release(chunk)
    assert len([asked for asked in looks if asked > 1]) <= 3
