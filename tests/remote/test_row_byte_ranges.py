"""In which chunks rows lie, beside the bytes that each row has in the files of a store."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import memfeed
from memfeed.remote.ranges import ChunkTable
from memfeed.remote.remote_supply import RowByteRanges
from memfeed.store.row_supply import ReadRequest

ROWS, STEP = 60, 256


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rows = [{"x": torch.full((10,), i), "text": "a" * (i % 7), "label": i} for i in range(ROWS)]
    return memfeed.cache(rows, tmp_path_factory.mktemp("places") / "a.mf", workers=0, progress=False)


def places_of(store, absent=()):
    """Return the places of a store, in chunks of 256 bytes, and its chunks."""
    manifest = store._view.manifest
    table = ChunkTable(manifest.files, dict.fromkeys(manifest.files, STEP))
    are_absent = lambda chunks: np.isin(chunks, list(absent))  # noqa: E731
    return RowByteRanges(manifest.schema, manifest.rows, table, store._view.columns.__getitem__, are_absent), table


@pytest.mark.parametrize("rows", [[0], [59], [3, 40, 41], [5, 5], list(range(ROWS))])
def test_the_chunks_of_rows_hold_all_their_bytes(store, rows):
    """A copy of the store with nothing but these chunks gives the same rows."""
    places, table = places_of(store)
    found = places.chunks(ReadRequest(), np.array(rows, np.int32))
    assert found.is_known
    copied = {name: bytearray(size) for name, size in table.sizes.items()}
    for place in map(table.at, found.units.tolist()):
        copied[place.name][place.start : place.stop] = (store.path / place.name).read_bytes()[place.start : place.stop]
    for name, starts, lengths in (
        *places.fixed(ReadRequest(), np.array(rows)),
        *places.elements(ReadRequest(), np.array(rows)),
    ):
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            assert copied[name][start : start + length] == (store.path / name).read_bytes()[start : start + length]
    if len(rows) == 1:
        assert len(found.units) < table.count


def test_only_the_fields_of_a_reader_are_read(store):
    places, table = places_of(store)
    names = [field.name for field in store.schema]
    request = ReadRequest([names.index("label")])
    assert {table.at(chunk).name for chunk in places.chunks(request, np.arange(ROWS)).units} == {"label.memmap"}


def test_where_elements_lie_is_not_known_before_start_and_dims_are_there(store):
    places, table = places_of(store)
    start = table.of_file("text/start.memmap")[0]
    unknown, _ = places_of(store, absent=[start])
    found = unknown.chunks(ReadRequest(), np.arange(3))
    assert not found.is_known
    assert start in found.units
    heap = range(*table.of_file(next(name for name in table.sizes if name.startswith("text/heap"))))
    assert not set(heap) & set(found.units.tolist())
    assert set(heap) & set(places.chunks(ReadRequest(), np.arange(3)).units.tolist())
