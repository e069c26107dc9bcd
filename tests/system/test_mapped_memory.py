import mmap
import os
import sys

import numpy as np
import pytest

from measure import drop_pages
from memfeed.system import mapped_memory
from memfeed.system.mapped_memory import map_file
from support import skip_without_disk, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs mincore and MADV_PAGEOUT")


@pytest.fixture
def file(tmp_path):
    skip_without_disk(tmp_path)
    path = tmp_path / "f"
    with open(path, "wb") as opened:
        opened.write(os.urandom(64 * mmap.PAGESIZE))
        os.fsync(opened.fileno())
    return path


def test_a_page_is_in_the_cache_once_it_was_read(file):
    drop_pages(file.parent)
    mapped = map_file(file, file.stat().st_size)
    assert not mapped_memory.in_page_cache(mapped.data_ptr()), "to ask reads nothing"
    assert not mapped_memory.in_page_cache(mapped.data_ptr())
    assert int(mapped[0]) >= 0
    assert mapped_memory.in_page_cache(mapped.data_ptr())


def test_pages_that_the_process_changed_are_kept(file):
    mapped = map_file(file, file.stat().st_size)
    mapped[5] = 7
    mapped.sum()
    mapped_memory.page_out(mapped.data_ptr(), mapped.nbytes)
    assert int(mapped[5]) == 7
    assert mapped[mmap.PAGESIZE :].numpy().tobytes() == file.read_bytes()[mmap.PAGESIZE :]


def test_parts_of_a_page_are_left_alone(file):
    mapped = map_file(file, file.stat().st_size)
    before = mapped.clone()
    mapped_memory.page_out(mapped.data_ptr() + 10, mmap.PAGESIZE - 20)
    assert (mapped == before).all()


def test_files_leave_the_page_cache_though_they_are_mapped(file):
    mapped, content = np.memmap(file, np.uint8, "r"), file.read_bytes()
    assert mapped.tobytes() == content
    assert mapped_memory.in_page_cache(mapped.ctypes.data)
    names = [str(file), str(file.with_name("gone"))]
    # the kernel keeps a page for a moment that another core has just used
    wait_until(lambda: mapped_memory.evict(names) or not mapped_memory.in_page_cache(mapped.ctypes.data), 20)
    assert mapped.tobytes() == content
