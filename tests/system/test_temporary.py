"""A temporary directory lives as long as its object, in the process that made it."""

import gc
import os

import pytest

from memfeed.system.temporary import TemporaryDirectory


def test_it_is_removed_with_its_object():
    directory = TemporaryDirectory()
    path = directory.path
    (path / "file").write_text("x")
    del directory
    gc.collect()
    assert not path.exists()


def test_it_is_removed_at_once():
    directory = TemporaryDirectory()
    directory.remove()
    directory.remove()
    assert not directory.path.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_does_not_remove_it():
    directory = TemporaryDirectory()
    pid = os.fork()
    if not pid:
        directory.remove()
        os._exit(0)
    os.waitpid(pid, 0)
    assert directory.path.exists()
