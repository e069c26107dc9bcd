import os

import pytest
import torch

import memfeed
from memfeed.errors import CorruptStoreError
from memfeed.store.mapping import map_checked, map_file


def test_a_store_larger_than_memory_and_swap_can_be_mapped(path):
    with memfeed.Writer(path, like=torch.zeros(1 << 20, dtype=torch.uint8), length=2) as writer:
        writer[0:2] = torch.ones(2, 1 << 20, dtype=torch.uint8)
    big = path / "value.memmap"
    big.chmod(0o644)
    size = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.truncate(big, size)  # sparse
    mapped = map_file(big, size)
    assert (int(mapped[0]), int(mapped[-1])) == (1, 0)


def test_edits_stay_in_the_process(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    mapped = map_file(tmp_path / "f", 3)
    mapped[1] = 0
    assert mapped.tolist() == [97, 0, 99]
    assert (tmp_path / "f").read_bytes() == b"abc"
    assert map_file(tmp_path / "f", 0).shape == (0,)


def test_a_file_that_was_cut_is_refused_after_the_check(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    checks = []
    with pytest.raises(CorruptStoreError, match="found 3 bytes; expected 4: the file was cut"):
        map_checked(tmp_path / "f", 4, lambda: checks.append(1))
    assert checks == [1]
