"""The heap space of builds: granted sparingly, given back, and never taken from a writer that may still live."""

import errno
import os

import numpy as np
import pytest
import torch
from small_build import SCHEMA, is_right, packed

import memfeed
from disk import Faults
from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.building.space import Extents
from memfeed.errors import SpaceError
from memfeed.schema import codec
from memfeed.schema.infer import infer
from memfeed.store import ragged
from memfeed.system import libc

BIG = infer([{"r": torch.zeros(2)}, {"r": torch.zeros(1)}]).schema


def rows_of(*sizes):
    """Rows of ``sizes`` float32, each full of its size."""
    return [codec.pack(BIG.fields[0], [torch.full((size,), float(size)) for size in sizes])]


def heap_of(root):
    return ragged.ragged_files(root, BIG.fields[0]).heap


def blocks(path):
    """The bytes that a file takes on the disk."""
    return path.stat().st_blocks * 512


@pytest.fixture
def root(path):
    with claim(path) as root:
        yield root


def test_an_extent_is_a_small_part_of_its_heap(root):
    Build.begin(root, BIG, 10, None)
    extents, heap = Extents(root), heap_of(root)
    for _ in range(3000):
        extents.place(0, 60_000, heap)
    assert blocks(heap) <= 3000 * 60_000 * 1.02 + (1 << 20)


def test_space_that_one_writer_is_granted_in_turn_has_no_gaps(root):
    Build.begin(root, BIG, 10, None)
    extents, heap = Extents(root), heap_of(root)
    places = [extents.place(0, 40_000, heap) for _ in range(50)]
    assert places == [40_000 * i for i in range(50)]


def test_writers_give_back_what_is_left_of_an_extent_that_is_too_small(root):
    Build.begin(root, BIG, 10, None)
    heap = heap_of(root)
    one, other = Extents(root), Extents(root)
    for _ in range(20):
        for extents in (one, other):
            with open(heap, "r+b") as file:
                file.seek(extents.place(0, 40_000, heap))
                file.write(b"x" * 40_000)
    assert heap.stat().st_size >= 40 * 65_536, "each lies in an extent of its own"
    assert blocks(heap) <= 40 * 45_056 + 4 * 65_536


def test_on_a_full_disk_just_what_is_needed_is_taken(root):
    build = Build.begin(root, BIG, 10, None)
    writer = build.writer()
    with Faults(lambda one: one.kind == "reserve", errno.ENOSPC) as faults:  # no extent fits any more
        writer.write(0, 1, rows_of(1000))
    assert [one.size for one in faults.operations if one.kind == "reserve"] == [65_536, 4000]
    writer.write(1, 1, rows_of(500))
    assert heap_of(root).read_bytes()[:6000] == b"".join(
        torch.full((n,), float(n)).numpy().tobytes() for n in (1000, 500)
    ).ljust(6000, b"\0"), "what follows is granted after it"


def test_a_disk_without_the_space_needed_is_an_error(root):
    writer = Build.begin(root, BIG, 10, None).writer()

    with Faults(lambda one: one.kind == "reserve", errno.ENOSPC, lasting=True), pytest.raises(SpaceError):
        writer.write(0, 1, rows_of(1000))
    writer.write(0, 1, rows_of(1000))


def test_who_resumes_gives_back_all_that_no_row_needs(root):
    build = Build.begin(root, BIG, 40, None)
    writers = [build.writer() for _ in range(3)]
    for i in range(30):
        writers[i % 3].write(i, 1, rows_of(10_000 + i))
    build.units.drop(np.arange(3, 27))  # most rows were not there when the builder died
    before = blocks(heap_of(root))
    resumed = Build.resume(root)
    assert blocks(heap_of(root)) <= 6 * 40_200 + 13 * 4096 < before / 3
    writer = resumed.writer()
    for i in range(3, 27):
        writer.write(i, 1, rows_of(10_000 + i))
    for i in range(30, 40):
        writer.write(i, 1, rows_of(10_000 + i))
    path = root.with_suffix("")
    resumed.commit(path)
    store = memfeed.open(path)
    assert all(torch.equal(store[i]["r"], torch.full((10_000 + i,), 10_000.0 + i)) for i in range(40))


@pytest.mark.parametrize("times", [1, 6])
def test_a_store_has_no_gaps_on_the_disk_however_often_its_builder_died(root, times):
    build = Build.begin(root, BIG, 400, None)
    row = 0
    for _ in range(times):
        writers = [build.writer() for _ in range(4)]
        for _ in range(400 // times):
            if row < 400:
                writers[row % 4].write(row, 1, rows_of(9_000 + row))
            row += 1
        lost = np.arange(row - 8, row - 4)
        build.units.drop(lost)
        build = Build.resume(root)
        for i in lost.tolist():
            build.writer().write(i, 1, rows_of(9_000 + i))
    for i in build.absent().tolist():
        build.writer().write(i, 1, rows_of(9_000 + i))
    path = root.with_suffix("")
    build.commit(path)
    data = sum(4 * (9_000 + i) + 16 for i in range(400))
    used = sum(os.stat(os.path.join(top, name)).st_blocks * 512 for top, _, names in os.walk(path) for name in names)
    assert used <= 1.02 * data + (1 << 20)
    memfeed.open(path).verify()


def test_rows_written_again_leave_no_space_behind(path):
    with memfeed.Writer(path, like={"r": "x"}, length=4) as writer:
        for size in range(100_000, 100_040):
            writer[0:4] = {"r": ["x" * size] * 4}
    heap = path / "r" / "heap.bin"
    assert blocks(heap) <= 4 * 100_039 + 65_536


def test_nothing_is_taken_from_a_writer_that_may_still_write(root):
    """It was stopped between its heap and its presence, and goes on after the next builder began."""
    build = Build.begin(root, SCHEMA, 10, None)
    old = build.writer()
    old.write(0, 2, packed(0, 2))
    mark, resumed = old.mark, []

    def late(*arguments):
        assert not build.units.is_quiet()
        resumed.append(Build.resume(root))
        resumed[0].writer().write(4, 4, packed(4, 4))
        mark(*arguments)

    old.mark = late
    old.write(2, 2, packed(2, 2))
    new = resumed[0]
    assert build.units.is_quiet()
    new.writer().write(8, 2, packed(8, 2))
    assert not len(new.absent())
    path = root.with_suffix("")
    new.commit(path)
    assert is_right(memfeed.open(path), range(10))


def test_rows_that_a_writer_of_the_dead_builder_wrote_last_keep_their_space(root, monkeypatch):
    """It wrote them after the next builder had begun, and before it was kept out."""
    old = Build.begin(root, SCHEMA, 10, None).writer()
    old.write(0, 2, packed(0, 2))
    save = Build._save

    def write_before(build):
        old.write(4, 3, packed(4, 3))
        save(build)

    monkeypatch.setattr(Build, "_save", write_before)
    new = Build.resume(root)
    monkeypatch.undo()
    assert new.presence()[4:7].all(), "they were written"
    new.writer().write(2, 2, packed(2, 2))
    new.writer().write(7, 3, packed(7, 3))
    path = root.with_suffix("")
    new.commit(path)
    assert is_right(memfeed.open(path), range(10))


def test_a_file_system_without_holes_keeps_the_gaps_and_is_right(root, monkeypatch):
    def no_holes(*_):
        raise OSError(errno.EOPNOTSUPP, "no holes here")

    monkeypatch.setattr(libc, "punch_hole", no_holes)
    build = Build.begin(root, BIG, 12, None)
    writers = [build.writer() for _ in range(2)]
    for i in range(12):
        writers[i % 2].write(i, 1, rows_of(10_000 + i))
    path = root.with_suffix("")
    Build.resume(root).commit(path)
    store = memfeed.open(path)
    assert all(torch.equal(store[i]["r"], torch.full((10_000 + i,), 10_000.0 + i)) for i in range(12))
