"""The space of rows in a heap, as a log that several writers read alike."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.building import space
from memfeed.building.space import Extents, Wanted, _Heap
from memfeed.errors import SpaceError
from memfeed.store.format import WORK_DIRECTORY
from memfeed.system import files


@pytest.fixture
def root(tmp_path):
    (tmp_path / WORK_DIRECTORY).mkdir()
    return tmp_path


def wanted(root, first, last, size, field=0):
    return Wanted(field, root / f"heap{field}", first, last, size)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), max_size=12))
def test_no_byte_is_given_twice(runs):
    heap, taken = _Heap(), set()
    for first, size in runs:
        at = heap.find(first, size)
        own = set(range(at, at + size))
        assert not own & taken
        taken |= own
        heap.note(at, size, first + 1)
        assert heap.end >= at + size


def test_rows_in_order_lie_side_by_side():
    heap = _Heap()
    for row in range(5):
        at = heap.find(row, 10)
        assert at == 10 * row
        heap.note(at, 10, row + 1)


def test_a_hole_is_filled_by_the_rows_that_belong_there():
    heap = _Heap()
    heap.note(0, 10, 1)  # row 0
    heap.note(30, 10, 4)  # row 3: the 20 bytes before it are free
    assert heap.find(1, 20) == 10
    assert heap.find(1, 21) == 40
    assert heap.find(4, 5) == 40
    heap.note(10, 20, 3)
    assert heap.holes == []


def test_ends_of_rows_are_limited(monkeypatch):
    monkeypatch.setattr(space, "MOST_PARTS", 2)
    heap = _Heap()
    for row in (30, 20, 10, 0):
        heap.note(heap.find(row, 5), 5, row + 1)
    assert len(heap._rows) == 2
    assert heap.end == 20


def test_writers_see_the_space_of_each_other(root):
    one, other = Extents(root), Extents(root)
    assert one.place([wanted(root, 0, 1, 10)]) == [0]
    assert other.place([wanted(root, 1, 2, 7)]) == [10]
    assert one.place([wanted(root, 2, 3, 5), wanted(root, 0, 1, 3, field=1)]) == [17, 0]
    third = Extents(root)
    third.take_all(0, 100, 3)
    assert one.place([wanted(root, 3, 4, 1)]) == [100]


def test_space_is_reserved_with_room_for_more(root):
    Extents(root).place([wanted(root, 0, 1, 10)])
    assert (root / "heap0").stat().st_size == space.FIRST_EXTENT
    assert Extents(root).place([wanted(root, 1, 2, 0)]) == [10]


def test_a_full_disk_gives_just_what_is_needed(root, monkeypatch):
    real = files.preallocate

    def full(fd, size, at):
        if size > 20:
            raise SpaceError("full")
        real(fd, size, at)

    monkeypatch.setattr(files, "preallocate", full)
    one = Extents(root)
    assert one.place([wanted(root, 0, 1, 10)]) == [0]
    with pytest.raises(SpaceError):
        one.place([wanted(root, 1, 2, 30)])
    assert one.place([wanted(root, 1, 2, 10)]) == [10]  # nothing was granted


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_lists_lie_in_their_order_whoever_asks_first(root, order):
    first = Extents(root).begin_lists()
    writers = [Extents(root) for _ in range(3)]
    for i in order:
        writers[i].ask(first + i, [wanted(root, 10 * i, 10 * i + 10, 5)], is_last=False)
        is_first = all(j in order[: order.index(i) + 1] for j in range(i))
        assert writers[i].is_placed(first + i) == is_first
    assert [writers[i].take(first + i) for i in range(3)] == [[0], [5], [10]]


def test_no_list_is_placed_after_the_last(root):
    first = Extents(root).begin_lists()
    one, other = Extents(root), Extents(root)
    one.ask(first, [wanted(root, 0, 1, 5)], is_last=True)
    other.ask(first + 1, [wanted(root, 1, 2, 5)], is_last=False)
    assert one.is_placed(first)
    assert not other.is_placed(first + 1)
    assert other.is_left_out(first + 1)
    assert not one.is_left_out(first)


def test_a_list_that_cannot_wait_gets_other_space(root):
    first = Extents(root).begin_lists()
    one, other = Extents(root), Extents(root)
    other.ask(first + 1, [wanted(root, 1, 2, 5)], is_last=False)
    assert other.take(first + 1) == [0]
    one.ask(first, [wanted(root, 0, 1, 7)], is_last=False)
    assert one.is_placed(first)
    assert one.take(first) == [5]
    third = Extents(root)
    third.ask(first + 2, [wanted(root, 2, 3, 1)], is_last=False)
    assert third.is_placed(first + 2)  # the one before it was withdrawn


def test_lists_of_an_older_builder_are_forgotten(root):
    one = Extents(root)
    old = one.begin_lists()
    one.ask(old + 1, [wanted(root, 1, 2, 5)], is_last=False)
    new = Extents(root).begin_lists()
    assert new != old
    one.ask(old, [wanted(root, 0, 1, 5)], is_last=False)
    assert not one.is_placed(old)


def test_half_a_record_at_the_end_is_written_over(root):
    Extents(root).place([wanted(root, 0, 1, 10)])
    log = root / WORK_DIRECTORY / "extents"
    with open(log, "ab") as file:
        file.write(b"half")
    assert Extents(root).place([wanted(root, 1, 2, 10)]) == [10]
    assert np.fromfile(log, space.RECORD)["start"].tolist() == [0, 10]
