import errno
import os
import resource

import pytest

from memfeed.system import files
from memfeed.system.descriptors import FileHandles, open_read, with_descriptors


def test_handles_are_bounded(tmp_path):
    handles = FileHandles(write=True, most=3)
    for i in range(5):
        (tmp_path / str(i)).touch()
    for i in range(10):
        files.write_at(handles(tmp_path / str(i % 5)), b"x", i)
    assert len(handles._open) == 3
    handles.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2", "3", "4"]


def test_files_are_closed_with_the_handles(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    handles = FileHandles(write=False)
    fd = handles(tmp_path / "f")
    assert os.pread(fd, 3, 0) == b"abc"
    del handles
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_links_are_not_followed_and_pipes_not_waited_for(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    with pytest.raises(OSError, match="symbolic link") as caught:
        open_read(tmp_path / "link")
    assert caught.value.errno == errno.ELOOP
    os.mkfifo(tmp_path / "pipe")
    os.close(open_read(tmp_path / "pipe"))


def test_the_limit_is_raised_once(monkeypatch):
    limits, calls = [(10, 100)], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))

    def action():
        calls.append(limits[-1])
        if limits[-1][0] < 100 or len(calls) > 2:
            raise OSError(errno.EMFILE, "too many")
        return "done"

    assert with_descriptors(action) == "done"
    assert calls == [(10, 100), (100, 100)]
    with pytest.raises(OSError, match="found all 100 file descriptors in use; raise the limit"):
        with_descriptors(action)
