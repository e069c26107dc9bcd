"""Which units are brought next, rows and chunks alike: data, without threads."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfeed.building.unit_queue import RowUnits, UnitQueue, first_uses
from memfeed.store.row_supply import ReadRequest

UNITS = st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=6), max_size=8)


def chunk_queue(count, is_absent=lambda units: np.ones(len(units), bool), ahead=None, units_of=None):
    """Return the queue of a file of so many chunks; units are numbers of rows unless given."""
    units_of = units_of or (lambda reader, rows: RowUnits(rows, True))
    return UnitQueue(count, is_absent, units_of=units_of, ahead=ahead, span_of=lambda unit: (0, count))


def taken(queue, most=4, parts=1):
    """Yield what is brought next, as lists, until there is none."""
    while len(found := queue.next_units(0.0, most, parts)):
        yield found.tolist()


@given(UNITS, st.sets(st.integers(0, 19)), st.lists(st.integers(0, 19), max_size=3), st.integers(1, 40), st.booleans())
def test_units_come_in_the_order_of_their_first_use(asked, present, urgent, ahead, are_rows):
    """Each comes once: what is waited for, what was asked for (chunks: within the look-ahead), then the rest (rows)."""
    there = np.zeros(20, bool)
    there[list(present)] = True
    units_of = None if are_rows else lambda reader, rows: RowUnits(rows, True)
    ahead = None if are_rows else ahead
    queue = UnitQueue(20, lambda units: ~there[units], units_of=units_of, ahead=ahead)
    reader, rows = ReadRequest(), [np.array(one) for one in asked]
    for one in rows:
        queue.want(reader, one)
    queue.prioritise(np.array(list(dict.fromkeys(urgent)), np.int64))
    order = list(dict.fromkeys(unit for one in asked for unit in one))[:ahead]
    rest = range(20) if are_rows else ()
    want = [unit for unit in dict.fromkeys([*urgent, *order, *rest]) if not there[unit]]
    got = []
    while len(found := queue.next_units(0.0, 1, 4, len(rest))):
        got += found.tolist()
        assert queue.ranks(found).tolist() == [-1.0] * len(found) or found[0] not in urgent
        there[found] = True
        queue.give_back(found, 0.0)
    assert got == want
    if are_rows:
        return
    assert np.argsort(queue.ranks(np.arange(20)), kind="stable")[: len(order)].tolist() == order or not order
    for one in rows:  # the rows pass
        queue.wait(reader, one)
    there[:] = False
    assert not len(queue.next_units(0.0, 1))
    assert np.isinf(queue.ranks(np.array(order, np.int64))).all()
    queue.forget(reader)
    assert not len(queue.next_units(0.0, 1))


def test_a_unit_that_is_taken_is_not_taken_again_and_one_that_another_process_has_is_later():
    queue = chunk_queue(6)
    queue.want(ReadRequest(), np.arange(6))
    assert list(taken(queue)) == [[0, 1, 2, 3], [4, 5]]
    queue.give_back(np.array([4, 5]), due=7.0)
    assert not len(queue.next_units(6.9, 4))
    assert queue.returned
    assert queue.next_units(7.0, 4).tolist() == [4, 5]
    assert not queue.returned


def test_units_without_room_wait_until_a_reader_goes_on():
    """Each was taken again at once, and put off again, for ever, while no other thread got the lock."""
    queue, reader, rows = chunk_queue(40), ReadRequest(), np.arange(0, 40, 2)
    queue.want(reader, rows)
    assert queue.next_units(0.0, 4).tolist() == [0]
    queue.put_off(np.array([0]))
    assert not len(queue.next_units(0.0, 4))
    queue.prioritise(np.array([30, 31]))
    assert list(taken(queue)) == [[30], [31]], "without what there is no room for"
    queue.wait(reader, rows[:4])
    assert next(taken(queue)) == [0]


def test_few_chunks_are_spread_over_requests():
    queue = chunk_queue(8)
    queue.want(ReadRequest(), np.arange(8))
    assert list(taken(queue, parts=8)) == [[chunk] for chunk in range(8)]


def test_chunks_that_are_needed_later_are_joined_also_if_they_are_few():
    queue = chunk_queue(200, lambda chunks: chunks >= 192)
    queue.want(ReadRequest(), np.arange(200))
    assert list(taken(queue, parts=8)) == [[192, 193, 194, 195], [196, 197, 198, 199]]


@pytest.mark.parametrize(
    ("wanted", "first"), [([5, 4, 6, 3, 7], [4, 5, 6, 7]), ([5, 4, 3], [3, 4, 5]), ([0, 1], [0, 1]), ([8, 7], [7, 8])]
)
def test_neighbours_are_joined_after_a_chunk_before_those_before_it(wanted, first):
    queue = UnitQueue(
        20, lambda units: np.ones(len(units), bool), units_of=lambda reader, rows: RowUnits(rows, True),
        span_of=lambda unit: (0, 8) if unit < 8 else (8, 20),
    )  # fmt: skip
    queue.want(ReadRequest(), np.array(wanted))
    want = [[8], [7]] if 8 in wanted else [first]
    assert list(taken(queue))[: len(want)] == want


def test_the_rows_of_the_reader_that_waited_last_come_first():
    one, other, rows = ReadRequest(), ReadRequest(), np.array([0])
    queue = chunk_queue(60)
    queue.want(one, rows)
    queue.want(one, np.array([2, 4, 6, 8]))
    queue.want(other, np.array([20, 22, 24, 26]))
    assert queue.next_units(0.0, 4).tolist() == [20], "that of a new reader"
    queue.wait(one, rows)
    assert queue.next_units(0.0, 4).tolist() == [2]
    queue.wait(other, np.array([20]))
    assert queue.next_units(0.0, 4).tolist() == [22]
    queue.forget(other)
    assert list(taken(queue)) == [[4], [6], [8]]


def test_rows_whose_place_is_not_known_yet_are_looked_for_again():
    """The chunk that says where they lie comes first."""
    there = np.zeros(40, bool)

    def units_of(reader, rows):
        return RowUnits(np.concatenate([np.array([0]), rows]) if there[0] else np.array([0]), bool(there[0]))

    queue = chunk_queue(40, lambda chunks: ~there[chunks], units_of=units_of)
    queue.want(ReadRequest(), np.array([10, 20]))
    assert list(taken(queue)) == [[0]]
    there[0] = True
    queue.give_back(np.array([0]), 0.0)
    assert list(taken(queue)) == [[10], [20]]


def test_what_failed_is_brought_again_only_when_it_is_asked_for():
    queue = chunk_queue(4)
    queue.want(ReadRequest(), np.arange(4))
    assert list(taken(queue)) == [[0, 1, 2, 3]]
    queue.prioritise(np.array([1]))
    queue.give_back(np.arange(4), 0.0, {1: "failed"})
    assert list(taken(queue)) == [[0], [2, 3]]
    assert queue.failed == {1: "failed"}
    queue.take_back_all()
    assert 1 not in sum(taken(queue), [])
    queue.prioritise(np.array([1]))
    assert not len(queue.next_units(0.0, 4))
    queue.retry(np.array([0, 1]))
    assert list(taken(queue)) == [[1]]


def test_what_is_planned_does_not_grow_with_the_store():
    """The store has 10^11 rows of 4 KiB, in 10^8 chunks; what is asked for, and how often, is the same as of a small
    one."""
    present: set[int] = set()
    units_of = lambda reader, rows: RowUnits(first_uses(rows // 1024), True)  # noqa: E731
    absent = lambda chunks: np.array([chunk not in present for chunk in chunks.tolist()], bool)  # noqa: E731
    queue, reader = chunk_queue(10**8, absent, units_of=units_of), ReadRequest()
    tracemalloc.start()
    try:
        for first in range(0, 10**11, 10**10):
            queue.want(reader, np.arange(first, first + 4096))
        sizes = []
        while len(found := queue.next_units(0.0, 4)):
            present.update(found.tolist())
            queue.give_back(found, 0.0)
            sizes.append(len(found))
        assert sum(sizes) == sum(len(first_uses(np.arange(at, at + 4096) // 1024)) for at in range(0, 10**11, 10**10))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def row_queue(states, **options):
    return UnitQueue(len(states), lambda rows: states[rows] == 0, **options)


def test_the_last_rows_of_an_epoch_go_into_small_lists():
    queue = row_queue(np.zeros(1000, np.uint8))
    rows = np.random.default_rng(0).permutation(1000)
    reader = ReadRequest()
    for first in range(0, 1000, 100):
        queue.want(reader, rows[first : first + 100])
    lists = list(taken(queue, 30, 4))
    assert sum(lists, []) == rows.tolist()
    sizes = [len(one) for one in lists]
    assert max(sizes[:10]) == 30, "about 30 ms of work while there is much left"
    assert all(size <= max((1000 - sum(sizes[:i])) // 4, 1) for i, size in enumerate(sizes)), "no worker gets the rest"


def test_more_rows_than_are_looked_for_at_once_come_in_order():
    queue, reader = row_queue(np.zeros(30_000, np.uint8)), ReadRequest()
    rows = np.random.default_rng(0).permutation(30_000)[:20_000]
    for part in np.split(rows, 200):
        queue.want(reader, part)
    lists = list(taken(queue, 64, 4))
    assert sum(lists, []) == rows.tolist()
    assert sum(len(one) < 64 for one in lists) < 30, "small lists at the end only"


def test_rows_that_nobody_wants_go_in_order_and_after_those_that_readers_wait_for():
    states = np.zeros(10_000, np.uint8)
    states[5_000] = 2
    queue = row_queue(states)
    take = lambda: queue.next_units(0.0, 64, 1, 4096).tolist()  # noqa: E731
    assert take() == [*range(4096)]
    queue.want(ReadRequest(), np.array([9, 9_999, 6_000]))
    assert take() == [9_999, 6_000], "row 9 was sent"
    assert take() == [*range(4096, 5_000), *range(5_001, 6_000), *range(6_001, 8_194)]
    assert take() == [*range(8_194, 9_999)]
    assert not take()


def test_the_processes_of_a_shared_store_begin_elsewhere(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 7)
    queue = row_queue(np.zeros(99, np.uint8), is_shared=True)
    rows = queue.next_units(0.0, 64, 1, 4096).tolist()
    assert rows != sorted(rows)
    assert sorted(rows) == list(range(99))


def test_rows_that_were_not_written_are_sent_again_but_not_those_that_failed():
    queue = row_queue(np.zeros(4, np.uint8))
    rows = queue.next_units(0.0, 64, 1, 4096)
    queue.give_back(rows, 1.0, {2: "failed"})
    assert not len(queue.next_units(0.9, 64, 1, 4096)), "another process may be writing them"
    queue.take_back_all()
    assert queue.next_units(0.9, 64, 1, 4096).tolist() == [0, 1, 3]
