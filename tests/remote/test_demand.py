"""Which chunk is fetched next: data, without threads."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memfeed.remote.demand import Demand, RowChunks
from memfeed.remote.ranges import ChunkTable, first_uses
from memfeed.store.row_supply import ReadRequest

CHUNK = 4 << 20
ROW_CHUNKS = st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=6), max_size=8)


@given(ROW_CHUNKS, st.sets(st.integers(0, 19)), st.lists(st.integers(0, 19), max_size=3), st.integers(1, 40))
def test_chunks_come_in_the_order_of_their_first_use(asked, present, urgent, ahead):
    """All that is asked for comes once, the urgent first, then within the look-ahead in order, then the rest."""
    table = ChunkTable({str(chunk): 5 for chunk in range(20)})  # files of one chunk: nothing is joined
    there = np.zeros(20, bool)
    there[list(present)] = True
    demand = Demand(table, lambda reader, rows: RowChunks(rows, True), lambda chunks: ~there[chunks], ahead)
    reader, rows = ReadRequest(), [np.array(one) for one in asked]
    for one in rows:
        demand.add(reader, one)
    demand.prioritise(np.array([chunk for chunk in urgent if not there[chunk]], np.int64))
    order = list(dict.fromkeys(chunk for one in asked for chunk in one))
    first = [chunk for chunk in dict.fromkeys(urgent) if not there[chunk]]
    want = first + [chunk for chunk in order[:ahead] if not there[chunk] and chunk not in first]
    got = []
    while (found := demand.take(4)) is not None:
        got.append(found.chunk)
        there[found.chunk] = True
        demand.calm(found.chunk)
        demand.put_back(found)
    assert got == want
    ranks = demand.ranks(np.arange(20))
    assert np.argsort(ranks, kind="stable")[: len(order[:ahead])].tolist() == order[:ahead]
    for one in rows:  # the rows pass
        demand.waits(reader, one)
    assert np.isinf(demand.ranks(np.array(order, np.int64))).all() or demand.take(4) is None
    demand.forget(reader)
    assert demand.take(4) is None


def test_a_chunk_that_is_taken_is_not_taken_again_and_one_put_back_is():
    table = ChunkTable({"a": 6 * CHUNK})
    demand = Demand(table, lambda reader, rows: RowChunks(rows, True), lambda chunks: np.ones(len(chunks), bool), None)
    demand.add(ReadRequest(), np.arange(6))
    first, second = demand.take(1), demand.take(1)
    assert (first.chunk, first.size, second.chunk, second.size) == (0, 4, 4, 2)
    assert demand.take(1) is None
    demand.put_back(second)
    assert demand.take(1) == second


def test_chunks_without_room_wait_until_a_reader_goes_on():
    """Each was taken again at once, and put off again, for ever, while no other thread got the lock."""
    table, reader, rows = ChunkTable({"a": 40 * CHUNK}), ReadRequest(), np.arange(0, 40, 2)
    demand = Demand(table, lambda reader, rows: RowChunks(rows, True), lambda chunks: np.ones(len(chunks), bool), None)
    demand.add(reader, rows)
    taken = []
    while (found := demand.take(1)) is not None:
        taken.append(found.chunk)
        demand.put_off(found)
        assert len(taken) <= len(rows)
    assert taken == rows.tolist()
    assert demand.is_full
    demand.waits(reader, rows[:4])
    assert not demand.is_full
    assert demand.take(1) is not None


def test_few_chunks_are_spread_over_requests():
    table = ChunkTable({"a": 8 * CHUNK})
    demand = Demand(table, lambda reader, rows: RowChunks(rows, True), lambda chunks: np.ones(len(chunks), bool), None)
    demand.add(ReadRequest(), np.arange(8))
    assert [demand.take(8).size for _ in range(8)] == [1] * 8


def test_chunks_that_are_needed_later_are_joined_also_if_they_are_few():
    table = ChunkTable({"a": 200 * CHUNK})
    absent = np.arange(200) >= 192
    demand = Demand(table, lambda reader, rows: RowChunks(rows, True), lambda chunks: absent[chunks], None)
    demand.add(ReadRequest(), np.arange(200))
    assert [demand.take(8).size for _ in range(2)] == [4, 4]
    assert demand.take(8) is None


def test_the_rows_of_the_reader_that_waited_last_come_first():
    table, one, other = ChunkTable({"a": 40 * CHUNK}), ReadRequest(), ReadRequest()
    demand = Demand(table, lambda reader, rows: RowChunks(rows, True), lambda chunks: np.ones(len(chunks), bool), None)
    rows = np.array([0])
    demand.add(one, rows)
    demand.add(one, np.array([2, 4]))
    demand.add(other, np.array([20, 22]))
    demand.waits(one, rows)
    assert [demand.take(1).chunk for _ in range(4)] == [2, 4, 20, 22]


def test_rows_whose_place_is_not_known_yet_are_looked_for_again():
    """The chunk that says where they lie comes first."""
    table, there = ChunkTable({"a": 40 * CHUNK}), np.zeros(40, bool)

    def chunks_of(reader, rows):
        return RowChunks(np.concatenate([np.array([0]), rows]) if there[0] else np.array([0]), bool(there[0]))

    demand = Demand(table, chunks_of, lambda chunks: ~there[chunks], None)
    demand.add(ReadRequest(), np.array([10, 20]))
    first = demand.take(1)
    assert first.chunk == 0
    assert demand.take(1) is None
    there[0] = True
    demand.put_back(first)
    assert [demand.take(1).chunk for _ in range(2)] == [10, 20]


def test_what_is_planned_does_not_grow_with_the_store():
    """The store has 10^11 rows of 4 KiB, in 10^8 chunks; what is asked for, and how often, is the same as of a small
    one."""
    tracemalloc.start()
    try:
        table = ChunkTable({"a": 10**11 * 4096})
        present: set[int] = set()
        chunks_of = lambda reader, rows: RowChunks(first_uses(rows // 1024), True)  # noqa: E731
        absent = lambda chunks: np.array([chunk not in present for chunk in chunks.tolist()], bool)  # noqa: E731
        demand, reader = Demand(table, chunks_of, absent, None), ReadRequest()
        for first in range(0, 10**11, 10**10):
            demand.add(reader, np.arange(first, first + 4096))
        ranges = []
        while (found := demand.take(4)) is not None:
            present.update(range(found.chunk, found.chunk + found.size))
            demand.put_back(found)
            ranges.append(found.size)
        assert sum(ranges) == sum(len(first_uses(np.arange(at, at + 4096) // 1024)) for at in range(0, 10**11, 10**10))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
