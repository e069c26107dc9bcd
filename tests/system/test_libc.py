"""System calls beyond those of ``os``: what they do, and an OSError where they cannot."""

import errno
import os
import sys

import pytest

from memfeed.system import libc

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="calls of Linux")


@pytest.fixture
def file(tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        yield file


def call_or_skip(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.EXDEV):
            raise
        pytest.skip(f"this file system cannot do it: {error}")


def test_reserved_bytes_are_zeros_and_belong_to_the_file(file):
    call_or_skip(libc.fallocate, file.fileno(), 10, 5000)
    assert file.read() == bytes(5010)


def test_a_hole_keeps_the_size_and_reads_as_zeros(file):
    file.write(b"x" * 12288)
    file.flush()
    call_or_skip(libc.punch_hole, file.fileno(), 4096, 4096)
    file.seek(0)
    assert file.read() == b"x" * 4096 + bytes(4096) + b"x" * 4096


def test_two_paths_are_exchanged(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("one")
    other.mkdir()
    call_or_skip(libc.exchange, one, other)
    assert one.is_dir()
    assert other.read_text() == "one"


def test_a_cloned_range_has_the_bytes(file, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"y" * 8192)
    fd = os.open(source, os.O_RDONLY)
    try:
        call_or_skip(libc.clone_range, fd, file.fileno(), 0)
    finally:
        os.close(fd)
    assert file.read() == b"y" * 8192


def test_a_call_that_fails_says_why(tmp_path):
    with pytest.raises(FileNotFoundError):
        libc.exchange(tmp_path / "none", tmp_path / "nor this")


def test_a_call_that_the_system_lacks_is_an_error(monkeypatch, file):
    monkeypatch.setattr(libc, "LIBC", object())
    with pytest.raises(OSError, match="not implemented") as caught:
        libc.fallocate(file.fileno(), 0, 10)
    assert caught.value.errno == errno.ENOSYS
