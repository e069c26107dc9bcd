import contextlib
import errno
import os
import shutil
import threading

import numpy as np
import pytest
import torch

import memfeed
from memfeed.errors import BuildError, SpaceError
from memfeed.system import file_copies, files


@pytest.mark.parametrize("sizes", [[5], [0], [3, 0, 4], [1] * 3000, [4096, 1, 70_000]])
def test_buffers_land_one_behind_the_other(tmp_path, sizes):
    buffers = [np.random.default_rng(i).integers(0, 256, size, dtype=np.uint8) for i, size in enumerate(sizes)]
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    assert files.write_all_at(fd, buffers, 7) == sum(sizes)
    os.close(fd)
    assert (tmp_path / "f").read_bytes()[7:] == b"".join(b.tobytes() for b in buffers)


def test_short_writes_are_finished(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, group, at: real(fd, bytes(group[0])[:3], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data)[:5], at))
    buffers = [np.arange(10, dtype=np.uint8), np.arange(20, dtype=np.uint8), np.arange(2, dtype=np.uint8)]
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    files.write_all_at(fd, buffers, 0)
    os.close(fd)
    assert (tmp_path / "f").read_bytes() == b"".join(b.tobytes() for b in buffers)


def test_preallocation_takes_room_and_grows(tmp_path):
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    files.preallocate(fd, 100_000, 50_000)
    assert os.fstat(fd).st_size == 150_000
    with pytest.raises(OSError, match="while reserving") as caught:
        files.preallocate(fd, 1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    os.close(fd)


def test_atomic_writing_leaves_no_temporary(tmp_path):
    files.write_atomically(tmp_path / "f", b"one")
    files.write_atomically(tmp_path / "f", b"two")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"two"


def test_exchange_swaps_directories(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not files.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange")
    assert (tmp_path / "a" / "b").exists()


def test_too_little_room_says_how_much(tmp_path):
    with pytest.raises(
        SpaceError, match=r"found [\d,]+ bytes free; expected at least 1,152,921,504,606,846,976 for it"
    ):
        files.check_room(tmp_path / "not" / "yet", 1 << 60, "it")


def test_a_tree_is_removed_while_others_look_for_a_lock_in_it(tmp_path):
    def look():
        while not done.is_set():
            with contextlib.suppress(OSError):
                os.close(os.open(tmp_path / "a" / "lock", os.O_CREAT | os.O_RDWR))

    done = threading.Event()
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(300):
            (tmp_path / "a").mkdir()
            for number in range(5):
                (tmp_path / "a" / str(number)).write_bytes(b"")
            files.remove_tree(tmp_path / "a")
            assert not (tmp_path / "a").exists()
    finally:
        done.set()
        thread.join()


def test_a_size_of_nothing_is_no_lack_of_room(tmp_path, monkeypatch):
    """ramfs and some FUSE file systems report no blocks at all."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))
    assert files.free_bytes(tmp_path) is None
    files.check_room(tmp_path, 1 << 60, "it")
    error = files.refused(OSError(errno.ENOSPC, "No space left"), tmp_path / "f", "writing 3 bytes", 3)
    assert "(No space left); expected room for 3 bytes more" in str(error)
    error = files.refused(OSError(errno.ENOSPC, "No space left"), tmp_path / "f", "renaming it")
    assert "(No space left); expected room for a few bytes more: free" in str(error)
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    assert files.free_bytes(tmp_path) == 0


def test_a_link_is_never_written(tmp_path):
    (tmp_path / "f").write_bytes(b"precious")
    (tmp_path / "f").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "f")
    for write in (
        lambda path: files.open_write(path, os.O_CREAT | os.O_TRUNC),
        lambda path: files.truncate(path, 0),
        lambda path: files.chmod(path, 0o644),
        lambda path: file_copies.copy(tmp_path / "f", path),
    ):
        with pytest.raises(BuildError, match="symbolic link"):
            write(tmp_path / "link")
    assert (tmp_path / "f").read_bytes() == b"precious"
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_a_file_system_may_keep_no_permissions(tmp_path, monkeypatch):
    """FAT and exFAT answer EPERM."""
    (tmp_path / "f").touch()

    def refuse_with(number):
        def refuse(fd, mode):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fchmod", refuse)

    for number in (errno.EOPNOTSUPP, errno.EPERM):
        refuse_with(number)
        files.chmod(tmp_path / "f", 0o444)
    store = memfeed.cache((torch.arange(9), torch.arange(9)), tmp_path / "a.mf", progress=False)
    grown = memfeed.append(store, (torch.arange(2), torch.arange(2)), progress=False)
    assert grown.column(0).tolist() == [*range(9), 0, 1]
    refuse_with(errno.EROFS)
    with pytest.raises(BuildError, match="while setting its permissions"):
        files.chmod(tmp_path / "f", 0o444)
    refuse_with(errno.EPERM)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(BuildError, match="while setting its permissions"):
        files.chmod(tmp_path / "f", 0o444)


def test_a_quota_is_told_from_a_full_disk(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(
        SpaceError, match=r"f: found your disk quota used up while writing 3 bytes .*quota -s"
    ) as raised:
        files.write_file(tmp_path / "f", b"one")
    assert raised.value.errno == errno.EDQUOT
    assert "bytes free" not in str(raised.value)


def test_an_error_at_the_close_of_a_file_names_it(tmp_path, monkeypatch):
    close = os.close

    def refuse(fd):
        close(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", refuse)
    with pytest.raises(SpaceError, match=r"f: found your disk quota used up while closing it"):
        files.write_file(tmp_path / "f", b"one")
