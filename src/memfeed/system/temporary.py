"""Temporary directories that are removed with the object that holds them."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path


class TemporaryDirectory:
    """A directory that is removed with this object, or at the end of the process that made it.

    Call ``remove`` to remove it at once: a process that is ended by a signal runs no finalizers.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="memfeed-"))
        self.remove = weakref.finalize(self, _remove, str(self.path), os.getpid())


def _remove(path: str, pid: int) -> None:
    if pid == os.getpid():  # a forked worker must not remove its parent's files
        shutil.rmtree(path, ignore_errors=True)
