from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfeed.remote.demand import Demand, RowChunks
from memfeed.remote.fetching import LEAST_IN_FLIGHT, MOST_IN_FLIGHT, InFlight
from memfeed.remote.ranges import ChunkTable, first_uses
from memfeed.store.row_supply import ReadRequest
from memfeed.system.units import parse_bytes

CHUNK = 4 << 20
SIZES = st.dictionaries(
    st.sampled_from("abcd"), st.one_of(st.integers(0, 3), st.integers(0, 9 * CHUNK), st.just(2 * CHUNK)), min_size=1
)


def places(sizes: dict[str, int]) -> list[tuple[str, int, int]]:
    """Return the file, first and last byte + 1 of every chunk, in order: the slow, obviously right way."""
    return [(name, first, min(first + CHUNK, size)) for name, size in sizes.items() for first in range(0, size, CHUNK)]


@given(SIZES, st.data())
def test_chunks_of_places_are_those_that_overlap(sizes, data):
    table, expected = ChunkTable(sizes), places(sizes)
    assert [tuple(table.at(chunk)[:3]) for chunk in range(table.count)] == expected
    assert table.bytes_of(np.arange(table.count)).tolist() == [last - first for _, first, last in expected]
    name = data.draw(st.sampled_from(sorted(sizes)))
    rows = data.draw(st.lists(st.tuples(st.integers(0, sizes[name]), st.integers(-1, 3 * CHUNK)), max_size=8))
    rows = [(start, min(length, sizes[name] - start)) for start, length in rows]
    want: list[int] = []
    for start, length in rows:
        for chunk, (of, first, last) in enumerate(expected):
            if of == name and length > 0 and first < start + length and start < last and chunk not in want:
                want.append(chunk)
    starts, lengths = np.array(rows, np.int64).reshape(-1, 2).T
    assert table.of_places(name, starts, lengths).tolist() == want


@given(SIZES.filter(lambda sizes: sum(sizes.values()) > 0), st.data())
def test_a_range_has_wanted_chunks_of_one_file_only(sizes, data):
    table = ChunkTable(sizes)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=table.count, max_size=table.count)))
    chunk = data.draw(st.integers(0, table.count - 1))
    wanted[chunk] = True
    most = data.draw(st.integers(1, 4))
    found = table.joined(chunk, wanted.__getitem__, most)
    every = range(found.chunk, found.chunk + found.size)
    assert chunk in every
    assert len(every) <= most
    assert wanted[list(every)].all()
    assert {table.at(one).name for one in every} == {found.name}
    assert (found.start, found.stop) == (table.at(every[0]).start, table.at(every[-1]).stop)
    if len(every) < most:  # nothing beside it could have been joined
        begin, end = table.of_file(found.name)
        assert every[-1] + 1 == end or not wanted[every[-1] + 1]
        assert every[0] == begin or not wanted[every[0] - 1]


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


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200GB", 200 * 10**9),
        ("1.5 TB", 15 * 10**11),
        ("64MiB", 64 << 20),
        ("7", 7),
        (12, 12),
        ("3kb", 3000),
        (None, None),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes("size", text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "0.4", "many", "1iB", True, 1.5e300])
def test_what_is_no_size_is_refused(text):
    with pytest.raises((ValueError, OverflowError), match="size="):
        parse_bytes("size", text)


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
