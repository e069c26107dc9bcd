"""Chunks of a store at an address that are compared with their checksums."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import memfeed
from memfeed.errors import CorruptStoreError
from memfeed.remote.layout import expected_chunks, in_threads, read_chunk, read_manifest, verify

pytest.importorskip("obstore")


@pytest.fixture
def address(tmp_path):
    store = memfeed.cache({"x": torch.arange(2_000_000)}, tmp_path / "a.mf", allow="copy", progress=False)
    memfeed.push(store, f"file://{tmp_path}/remote/a.mf")
    return f"file://{tmp_path}/remote/a.mf"


def test_every_byte_is_verified_and_damage_is_named(address):
    done = []
    store = verify(address, lambda *parts: done.append(parts))
    assert done[-1] == (16_000_000, 16_000_000)
    chunk, expected = expected_chunks(store)[1]
    assert len(read_chunk(store, chunk, expected)) == chunk.size
    column = Path(address.removeprefix("file://"), store.directory, "x.memmap")
    with open(column, "r+b") as file:
        file.seek(5 << 20)
        file.write(b"\xff")
    with pytest.raises(CorruptStoreError, match=r"x\.memmap: found other bytes than were pushed, in .*field x"):
        read_chunk(read_manifest(address), chunk, expected)
    with pytest.raises(CorruptStoreError, match="push the store again"):
        verify(address)


def test_after_an_error_no_other_item_is_begun():
    begun, may_end = [], threading.Event()

    def work(item):
        begun.append(item)
        if item == 0:
            raise ValueError("the first one")
        may_end.wait(20)

    thread = threading.Timer(0.2, may_end.set)
    thread.start()
    with pytest.raises(ValueError, match="the first one"):
        in_threads(work, range(100), 2)
    thread.join()
    assert len(begun) < 10
