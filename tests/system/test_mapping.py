"""Parts of files as private memory: right bytes, no write to the file, and an error where the file is too short."""

import errno
import os

import numpy as np
import pytest
import torch

from memfeed.errors import CorruptStoreError, StoreError
from memfeed.system import mapped_memory as mapping
from memfeed.system.mapped_memory import map_checked, map_descriptor, map_file, read_file


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(100)))
    return path


@pytest.mark.parametrize("size", [0, 1, 64, 100])
def test_the_first_bytes_are_mapped(file, size):
    assert map_file(file, size).tolist() == list(range(size))
    fd = os.open(file, os.O_RDONLY)
    mapped = map_descriptor(fd, file, size)
    os.close(fd)  # the map stays
    assert mapped.tolist() == list(range(size))


def test_a_write_stays_private(file):
    mapped = map_file(file, 100)
    mapped.zero_()
    assert file.read_bytes() == bytes(range(100))
    assert map_file(file, 3).tolist() == [0, 1, 2]


def test_a_file_that_is_too_short(file):
    message = r"a\.bin: found 100 bytes; expected 101: the file was cut"
    with pytest.raises(CorruptStoreError, match=message):
        map_file(file, 101)
    with pytest.raises(CorruptStoreError, match=message):
        read_file(file, np.empty(2, np.uint8), 99)
    with pytest.raises(CorruptStoreError, match="found 200 bytes; expected 201"):
        read_file(file, np.empty(1, np.uint8), 200)


def test_nothing_is_asked_of_a_file_without_bytes(tmp_path):
    assert len(map_file(tmp_path / "none", 0)) == 0
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "none", 1)


def test_a_file_larger_than_the_address_space(tmp_path):
    path = tmp_path / "sparse"
    path.write_bytes(b"")
    try:
        os.truncate(path, 1 << 62)
    except OSError:
        pytest.skip("this file system has no files larger than the address space")
    with pytest.raises(StoreError, match="more than this process can map"):
        map_file(path, 1 << 62)


@pytest.mark.parametrize(("code", "error"), [(errno.ENOMEM, StoreError), (errno.EIO, OSError)])
def test_errors_of_the_system(file, monkeypatch, code, error):
    def refuse(*_, **__):
        raise OSError(code, "refused")

    monkeypatch.setattr(mapping.mmap, "mmap", refuse)
    with pytest.raises(error):
        map_file(file, 4)


def test_a_file_that_may_not_be_opened(file, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(mapping, "open_read", refuse)
    with pytest.raises(StoreError, match="found a file that cannot be opened"):
        map_file(file, 1)
    with pytest.raises(StoreError, match="found a file that cannot be opened"):
        read_file(file, np.empty(1, np.uint8))


def test_reads_are_repeated_until_all_is_there(file, monkeypatch):
    whole, out = os.preadv, np.empty(50, np.uint8)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:7]], at))
    read_file(file, out, 20)
    assert out.tolist() == list(range(20, 70))


def test_the_check_comes_after_the_map_also_after_an_error(file):
    checks = []
    assert map_checked(file, 2, lambda: checks.append(1)).tolist() == [0, 1]
    with pytest.raises(CorruptStoreError):
        map_checked(file, 101, lambda: checks.append(2))
    assert checks == [1, 2]

    def replaced():
        raise StoreError("replaced")

    with pytest.raises(StoreError, match="replaced"):
        map_checked(file, 101, replaced)


def test_memory_is_ordinary_in_inference_mode(file):
    with torch.inference_mode():
        made = mapping.ORDINARY(lambda: map_file(file, 4))()
    assert not made.is_inference()
