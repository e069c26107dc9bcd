"""Ragged columns of a build, whose heap grows while they are read, and is cut by the commit."""

import os
import threading

import numpy as np
import pytest
import torch

import memfeed
from memfeed.errors import CorruptStoreError
from memfeed.store import backing
from memfeed.store.backing import GrowingColumn
from memfeed.store.ragged import ragged_files
from memfeed.store.ragged_columns import RaggedColumn
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


def test_a_commit_maps_a_heap_again_while_a_row_behind_it_is_located(field_and_files, monkeypatch):
    field, files = field_and_files
    size = files.heap.stat().st_size
    os.truncate(files.heap, 32)
    column = GrowingColumn(field, files, len(ROWS))
    os.truncate(files.heap, size)
    true = RaggedColumn.locate

    def locate(self, rows):
        try:
            return true(self, rows)
        except CorruptStoreError:
            self._map_heap()  # as the thread that commits does, at this moment
            raise

    monkeypatch.setattr(RaggedColumn, "locate", locate)
    assert column.locate(np.arange(3)).starts.tolist() == [0, 24, 32]


def test_an_older_map_does_not_take_the_place_of_a_newer_one(field_and_files, monkeypatch):
    field, files = field_and_files
    size = files.heap.stat().st_size
    os.truncate(files.heap, 32)
    column = GrowingColumn(field, files, len(ROWS))
    os.truncate(files.heap, 40)
    true, in_the_middle, mapped = backing.map_descriptor, threading.Event(), threading.Event()

    def slow(fd, path, asked):
        if asked == 40:
            in_the_middle.set()
            mapped.wait(0.1)
        return true(fd, path, asked)

    monkeypatch.setattr(backing, "map_descriptor", slow)
    thread = threading.Thread(target=column._map_heap)
    thread.start()
    in_the_middle.wait()
    os.truncate(files.heap, size)
    column._map_heap()
    mapped.set()
    thread.join()
    assert column.heap_bytes == len(column.heap) == size
