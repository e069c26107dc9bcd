"""Count hits and misses of all processes of a run: each writes into a small file of its own, which is mapped."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

from memfeed.errors import MemfeedError
from memfeed.store.format import WORK_DIRECTORY
from memfeed.system import files

_RUN = "MEMFEED_RUN"
_RECORD = struct.Struct("<QQd")


class Totals(NamedTuple):
    """Calls that were answered from the disk, calls that were computed, seconds saved, and processes that called."""

    hits: int = 0
    misses: int = 0
    seconds: float = 0.0
    processes: int = 0


def begin_run() -> bool:
    """Give this run an id, which its child processes inherit. Return False if it has one: this is a child."""
    if _RUN in os.environ:
        return False
    os.environ[_RUN] = f"{os.getpid():x}-{time.time_ns():x}"
    return True


def remove_counts_of_others(directory: Path) -> None:
    """Remove the counts of other runs, which did not end by themselves. Only while none of them is there."""
    for path in directory.glob("counts-*"):
        if f"-{os.environ.get(_RUN, '')}-" not in path.name:
            files.remove(path)


class Counts:
    """The counts of one function in this run."""

    def __init__(self, path: Path, function: str) -> None:
        self._directory, self._function = path / WORK_DIRECTORY, function
        self._pid = -1
        self._map: mmap.mmap | None = None
        self._values = (0, 0, 0.0)

    def add(self, hits: int, misses: int, seconds: float) -> None:
        """Count calls of this process."""
        if self._pid != os.getpid():
            self._begin_process()
        old = self._values
        self._values = old[0] + hits, old[1] + misses, old[2] + seconds
        if self._map is not None:
            _RECORD.pack_into(self._map, 0, *self._values)

    def _begin_process(self) -> None:
        self._pid, self._values, self._map = os.getpid(), (0, 0, 0.0), None
        path = self._directory / f"{self._prefix}{self._pid}"
        with contextlib.suppress(MemfeedError, OSError):  # only numbers for people: no room for them is no error
            files.write_file(path, bytes(_RECORD.size))
            with files.opened(path) as fd:
                self._map = mmap.mmap(fd, _RECORD.size)

    @property
    def _prefix(self) -> str:
        return f"counts-{self._function}-{os.environ.get(_RUN, '')}-"

    def totals(self) -> Totals:
        """Return the sums over the processes of this run."""
        hits, misses, seconds, processes = 0, 0, 0.0, 0
        for path in self._directory.glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError, struct.error):
                found = _RECORD.unpack(path.read_bytes())
                hits, misses, seconds, processes = hits + found[0], misses + found[1], seconds + found[2], processes + 1
        if self._map is None and self._pid == os.getpid():
            hits, misses, seconds = hits + self._values[0], misses + self._values[1], seconds + self._values[2]
            processes += 1
        return Totals(hits, misses, seconds, processes)

    def remove(self) -> None:
        """Remove the files of this run."""
        for path in self._directory.glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError, MemfeedError):
                files.remove(path)
