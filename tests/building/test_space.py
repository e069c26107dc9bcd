"""The heap space of builds: granted sparingly, given back, and never taken from a writer that may still live."""

import errno
import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_build import SCHEMA, is_right, packed

import memfeed
from disk import Faults
from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.building.partial import runs
from memfeed.building.space import Extents, Wanted
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
    for row in range(3000):
        extents.place([Wanted(0, heap, row, row + 1, 60_000)])
    assert blocks(heap) <= 3000 * 60_000 * 1.02 + (1 << 20)


@pytest.mark.parametrize("writers", [1, 3])
def test_space_that_is_granted_in_turn_has_no_gaps(root, writers):
    Build.begin(root, BIG, 50, None)
    extents, heap = [Extents(root) for _ in range(writers)], heap_of(root)
    places = [extents[row % writers].place([Wanted(0, heap, row, row + 1, 40_000)]) for row in range(50)]
    assert places == [[40_000 * row] for row in range(50)]
    assert heap.stat().st_size <= 50 * 40_000 + (1 << 16), "an extent is shared"


def test_rows_go_after_the_row_before_them_where_nothing_is(root):
    """Rows 2 and 3 are written first, then what is before them, as when rows were lost."""
    build = Build.begin(root, BIG, 8, None)
    writer = build.writer()
    writer.write(0, 8, rows_of(10, 11, 12, 13, 0, 15, 16, 17))
    build.units.drop(np.array([1, 2, 4, 5, 7]))
    build = Build.resume(root)
    writer = build.writer()
    writer.write_runs([(1, 1), (2, 1)], rows_of(11, 12))
    writer.write(4, 2, rows_of(0, 15))
    writer.write(7, 1, rows_of(17))
    start = np.fromfile(heap_of(root).with_name("start.memmap"), np.int64)
    assert start.tolist() == [0, 10, 21, 33, 0, 46, 61, 77]


@pytest.mark.parametrize("size", [11, 13])
def test_rows_of_another_size_than_those_lost_get_no_space_of_others(root, size):
    build = Build.begin(root, BIG, 3, None)
    build.writer().write(0, 3, rows_of(10, 12, 10))
    build.units.drop(np.array([1]))
    build = Build.resume(root)
    build.writer().write(1, 1, rows_of(size))
    start = np.fromfile(heap_of(root).with_name("start.memmap"), np.int64)
    assert start.tolist() == [0, 10 if size < 12 else 32, 22]
    path = root.with_suffix("")
    build.commit(path)
    assert [row["r"].tolist() for row in memfeed.open(path)] == [[n] * n for n in (10, size, 10)]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_rows_that_are_lost_and_written_again_in_order_have_the_places_of_the_first_time(tmp_path, data):
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=4, max_size=30))
    count = len(sizes)
    shutil.rmtree(tmp_path / "a.mf.build", ignore_errors=True)
    with claim(tmp_path / "a.mf") as root:
        build = Build.begin(root, BIG, count, None)
        build.writer().write(0, count, rows_of(*sizes))
        expected = heap_of(root).read_bytes()[: 4 * sum(sizes)]
        starts = heap_of(root).with_name("start.memmap").read_bytes()
        for _ in range(data.draw(st.integers(1, 3))):
            build.units.drop(np.array(sorted(data.draw(st.sets(st.integers(0, count - 1)))), np.int64))
            build = Build.resume(root)
            writers = [build.writer() for _ in range(data.draw(st.integers(1, 3)))]
            absent = build.absent()[: data.draw(st.integers(0, count))]
            while len(absent):
                part, absent = np.split(absent, [data.draw(st.integers(1, len(absent)))])
                writer = data.draw(st.sampled_from(writers))
                writer.write_runs(runs(part), rows_of(*(sizes[row] for row in part)))
        for row in build.absent().tolist():
            build.writer().write(row, 1, rows_of(sizes[row]))
        assert heap_of(root).read_bytes()[: 4 * sum(sizes)] == expected
        assert heap_of(root).with_name("start.memmap").read_bytes() == starts


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


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_lists_that_ask_in_any_order_lie_in_the_order_of_their_numbers(tmp_path, data):
    sizes = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=12))
    shutil.rmtree(tmp_path / "a.mf.build", ignore_errors=True)
    with claim(tmp_path / "a.mf") as root:
        Build.begin(root, BIG, len(sizes), None)
        processes, heap = [Extents(root) for _ in range(3)], heap_of(root)
        first = processes[0].begin_lists()
        owner = [data.draw(st.sampled_from(processes)) for _ in sizes]
        last = data.draw(st.integers(0, len(sizes)))
        asked = set()
        for row in data.draw(st.permutations(range(len(sizes)))):
            owner[row].ask(first + row, [Wanted(0, heap, row, row + 1, 4 * sizes[row])], is_last=row == last)
            asked.add(row)
            for other in asked:
                are_there = set(range(other + 1)) <= asked
                assert owner[other].is_placed(first + other) == (are_there and other <= last)
                if last in asked:
                    assert owner[other].is_left_out(first + other) == (other > last)
        for row in data.draw(st.permutations(range(min(last + 1, len(sizes))))):
            assert owner[row].take(first + row) == [4 * sum(sizes[:row])]
        assert heap.stat().st_size >= 4 * sum(sizes[: last + 1])
