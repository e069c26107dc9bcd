from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memfeed.building.unit_queue import RowUnits, UnitQueue
from memfeed.remote.ranges import ChunkTable, aligned_step
from memfeed.store.manifest import CHUNK_BYTES
from memfeed.store.row_supply import ReadRequest

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
    units_of = lambda reader, rows: RowUnits(rows, True)  # noqa: E731
    queue = UnitQueue(table.count, lambda chunks: wanted[chunks], units_of=units_of, span_of=table.span)
    queue.want(ReadRequest(), np.array([chunk, *range(table.count)]))
    chunks = queue.next_units(0.0, most)
    found = table.range_of(int(chunks[0]), int(chunks[-1]) + 1)
    assert chunks.tolist() == list(range(found.chunk, found.chunk + found.size))
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


@given(st.integers(1, 40 << 20))
def test_chunks_hold_whole_rows_and_blocks_of_the_disk(row_bytes):
    step = aligned_step(row_bytes)
    assert step % 4096 == 0
    assert step <= 2 * CHUNK_BYTES
    assert step % row_bytes == 0 or (step == CHUNK_BYTES and np.lcm(row_bytes, 4096) > 2 * CHUNK_BYTES)
