"""The bytes of a file given to a second one, where the file system can, and refused with the reason where it fails."""

import errno
import os

import pytest

from memfeed.errors import BuildError, SpaceError
from memfeed.system import file_copies, files


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(os.urandom(3 * files.BLOCK_BYTES + 5))
    return path


def failing(code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


def test_a_second_name(source, tmp_path):
    assert file_copies.link(source, tmp_path / "other")
    assert os.stat(source).st_nlink == 2


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP])
def test_a_file_system_without_links(source, tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "link", failing(code))
    assert not file_copies.link(source, tmp_path / "other")


@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, SpaceError), (errno.EIO, BuildError), (errno.EACCES, BuildError)]
)
def test_a_link_that_fails(source, tmp_path, monkeypatch, code, error):
    monkeypatch.setattr(os, "link", failing(code))
    with pytest.raises(error, match="other"):
        file_copies.link(source, tmp_path / "other")


@pytest.mark.parametrize("size", [0, 1, files.BLOCK_BYTES, 3 * files.BLOCK_BYTES + 5])
def test_a_copy(tmp_path, size, monkeypatch):
    monkeypatch.setattr(files, "COPY_BYTES", 4096)
    source, to = tmp_path / "source", tmp_path / "to"
    source.write_bytes(os.urandom(size))
    to.write_bytes(bytes(size + 7))  # what was there is gone
    file_copies.copy(source, to)
    assert to.read_bytes() == source.read_bytes()


def test_a_copy_asks_for_room_first(source, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda path: 10)
    with pytest.raises(SpaceError, match="a copy of"):
        file_copies.copy(source, tmp_path / "to")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    "code", [errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTTY, errno.EBADF, errno.ETXTBSY, errno.EINVAL]
)
def test_a_file_system_without_clones(source, tmp_path, monkeypatch, code):
    monkeypatch.setattr(file_copies.libc, "clone_range", failing(code))
    with files.opened(tmp_path / "to", os.O_CREAT) as fd:
        assert not file_copies.clone(source, fd)
        assert os.fstat(fd).st_size == 0


@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, SpaceError), (errno.EIO, BuildError)])
def test_a_clone_that_fails_closes_the_source(source, tmp_path, monkeypatch, code, error):
    monkeypatch.setattr(file_copies.libc, "clone_range", failing(code))
    before = len(os.listdir("/proc/self/fd"))
    with files.opened(tmp_path / "to", os.O_CREAT) as fd, pytest.raises(error):
        file_copies.clone(source, fd)
    assert len(os.listdir("/proc/self/fd")) == before
