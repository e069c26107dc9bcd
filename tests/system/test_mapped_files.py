"""Which file memory is mapped from."""

import mmap
import sys

import numpy as np
import pytest

from memfeed.system.mapped_memory import file_lookup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


def test_every_byte_of_a_map_leads_to_its_file(tmp_path):
    path = tmp_path / "a file.bin"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    mapped = np.memmap(path, np.uint8, "r")
    lookup, address = file_lookup(), mapped.ctypes.data
    assert {lookup(address), lookup(address + len(mapped) - 1)} == {str(path)}
    assert lookup(0) is None


def test_memory_without_a_file_of_the_users_has_none(tmp_path):
    shared, private = mmap.mmap(-1, mmap.PAGESIZE), np.ones(1 << 24, np.uint8)
    gone = tmp_path / "gone.bin"
    gone.write_bytes(bytes(mmap.PAGESIZE))
    removed = np.memmap(gone, np.uint8, "r")
    gone.unlink()
    lookup = file_lookup()
    for memory in (np.frombuffer(shared, np.uint8), private, removed):
        assert lookup(memory.ctypes.data) is None
