"""Ragged columns of a build, whose heap grows while they are read, and is cut by the commit."""

import os

import numpy as np
import pytest
import torch

import memfeed
from memfeed.errors import CorruptStoreError
from memfeed.store.backing import GrowingColumn
from memfeed.store.ragged import ragged_files
from memfeed.system import mapped_memory as mapping
from support import Made

ROWS = [torch.arange(n) for n in (3, 1, 5)]  # 72 bytes


@pytest.fixture
def field_and_files(tmp_path):
    store = memfeed.cache(Made([{"x": row} for row in ROWS]), tmp_path / "a.mf", workers=0, progress=False)
    field = store.schema.fields[0]
    files = ragged_files(tmp_path / "a.mf", field)
    os.truncate(files.heap, files.heap.stat().st_size + 4096)  # space that was granted to a writer
    return field, files


def cut_before_the_map(files, monkeypatch, times):
    """Cut the heap by one byte as it is mapped, so many times. Return the sizes that were asked for."""
    true, asked = mapping.mmap.mmap, []

    def cutting(fd, size, **options):
        if len(asked) < times:
            os.truncate(files.heap, files.heap.stat().st_size - 1)
        asked.append(size)
        return true(fd, size, **options)

    monkeypatch.setattr(mapping.mmap, "mmap", cutting)
    return asked


def test_a_heap_that_a_commit_cuts_while_it_is_mapped(field_and_files, monkeypatch):
    field, files = field_and_files
    before = files.heap.stat().st_size
    asked = cut_before_the_map(files, monkeypatch, 2)
    column = GrowingColumn(field, files, len(ROWS))
    assert asked[:3] == [before, before - 1, before - 2]
    assert column.heap_bytes == before - 2
    starts = column.locate(np.arange(3)).starts
    assert starts.tolist() == [0, 24, 32]


def test_a_file_that_is_cut_as_it_is_mapped_is_damaged(field_and_files, monkeypatch):
    _, files = field_and_files
    cut_before_the_map(files, monkeypatch, 1)
    with pytest.raises(CorruptStoreError, match="the file was cut"):
        mapping.map_file(files.heap, files.heap.stat().st_size)


def test_a_heap_is_mapped_again_for_a_row_behind_it(field_and_files):
    field, files = field_and_files
    size = files.heap.stat().st_size
    os.truncate(files.heap, 32)
    column = GrowingColumn(field, files, len(ROWS))
    os.truncate(files.heap, size)
    column.locate(np.arange(3))
    assert column.heap_bytes == size
