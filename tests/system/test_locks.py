"""Locks of files end with the process that took them."""

import contextlib
import os
import signal
import threading

import pytest

from memfeed.errors import BuildError
from memfeed.system import locks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture
def path(tmp_path):
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


def is_free(path):
    fd = locks.open_lock(path)
    try:
        locks.lock(fd, path)
        return True
    except BlockingIOError:
        return False
    finally:
        locks.close_lock(fd)


def test_a_lock_is_held_for_the_block_and_by_one(path):
    with locks.locked(path) as fd:
        assert os.fstat(fd).st_ino == path.stat().st_ino
        assert not is_free(path)
    assert is_free(path)


def test_a_lock_is_waited_for(path):
    inside, order = threading.Event(), []

    def wait():
        inside.set()
        with locks.locked(path):
            order.append("second")

    with locks.locked(path):
        thread = threading.Thread(target=wait)
        thread.start()
        assert inside.wait(30)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_shared_locks_keep_out_one_that_is_not(path):
    fds = [locks.open_lock(path) for _ in range(2)]
    for fd in fds:
        locks.lock(fd, path, is_shared=True)
    assert not is_free(path)
    for fd in fds:
        locks.close_lock(fd)
    assert is_free(path)


@pytest.mark.parametrize("is_block", [True, False])
def test_a_child_that_outlives_the_process_keeps_no_lock(path, is_block):
    """The process forks while it has the lock, and is killed."""
    read, write = os.pipe()
    holder = os.fork()
    if not holder:
        try:
            stack = contextlib.ExitStack()
            if is_block:
                stack.enter_context(locks.locked(path))
            else:
                locks.lock(locks.open_lock(path), path)
            child = os.fork()
            if not child:
                signal.pause()
            os.write(write, child.to_bytes(8, "little"))
            signal.pause()
        finally:
            os._exit(1)
    child = int.from_bytes(os.read(read, 8), "little")
    try:
        was_free = is_free(path)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        assert not was_free
        assert is_free(path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_a_child_leaves_the_block_of_its_parent(path):
    """The parent keeps the lock, and the child closes nothing of its own."""
    with locks.locked(path) as fd:
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert not is_free(path)
        else:
            os.dup2(os.open(os.devnull, os.O_RDONLY), fd)  # the child opens another file, which gets this number
    if not child:
        try:
            os.fstat(fd)
            os._exit(0)
        finally:
            os._exit(1)
    assert is_free(path)


def test_a_lock_of_a_file_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(BuildError, match="none"), locks.locked(tmp_path / "none"):
        pass
    with locks.locked(tmp_path / "none", os.O_CREAT):
        assert (tmp_path / "none").exists()
