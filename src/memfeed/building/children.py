"""Units for forked children of the process that brings them: neither threads nor connections survive a fork.

A child writes the numbers of units into a pipe; its parent brings them into the partial store, which both see.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import struct
import weakref

import numpy as np

from memfeed import errors
from memfeed.schema.codec import Int64Array

_HEAD = struct.Struct("<qi?")  # how many errors there were, the bytes of the last one's text, whether it is the last
_LARGEST = 4000
_NO_UNIT = struct.pack("q", -1)
_NUMBERS_AT_ONCE = 256  # a write of so many is one piece to the pipe (PIPE_BUF)


class ChildRequests:
    """A pipe from children to this process, and a page of memory that both share, for an error."""

    def __init__(self) -> None:
        self._receiver, self._sender = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._shared = mmap.mmap(-1, 4096)
        self._pid = os.getpid()
        weakref.finalize(self, _close, self._receiver, self._sender)

    # --- in the process that brings units

    def receive(self, seconds: float) -> Int64Array:
        """Return the units that children want, int64 [k], after at most so many seconds."""
        try:
            if not select.select([self._receiver], [], [], seconds)[0]:
                return np.empty(0, np.int64)
            found = np.unique(np.frombuffer(os.read(self._receiver, 1 << 16), np.int64))
            return found[found >= 0]
        except (OSError, ValueError):  # it is closed
            return np.empty(0, np.int64)

    def wake(self) -> None:
        """Let `receive` return now."""
        with contextlib.suppress(OSError):  # it is full, or closed
            os.write(self._sender, _NO_UNIT)

    def end(self, error: BaseException) -> None:
        """Let children raise an error that wait for anything from now on: nothing is brought any more."""
        self.report(error, is_last=True)

    def report(self, error: BaseException, *, is_last: bool = False) -> None:
        """Let children raise an error that wait now, too."""
        text = f"{type(error).__name__} {error}".encode()[:_LARGEST]
        self._shared[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._shared, 0, self.error_count() + 1, len(text), is_last)

    # --- in a child

    def ask(self, units: Int64Array) -> None:
        """Ask the process that brings units for some. Raises an error if it has ended, or brings nothing any more."""
        if _HEAD.unpack_from(self._shared, 0)[2]:
            self.raise_new(0)
        if not _is_alive(self._pid):
            raise errors.StoreError(
                f"found that process {self._pid} has ended, which brought the rows that its children read; expected it "
                "to live as long as they do: open the store in each process"
            )
        for first in range(0, len(units), _NUMBERS_AT_ONCE):
            try:
                os.write(self._sender, units[first : first + _NUMBERS_AT_ONCE].astype(np.int64).tobytes())
            except BlockingIOError:
                return  # it is full: asked again soon

    def error_count(self) -> int:
        """Return how many errors there were so far."""
        count: int = _HEAD.unpack_from(self._shared, 0)[0]
        return count

    def raise_new(self, count: int) -> None:
        """Raise the last error, if there were not just ``count`` of them."""
        found, size, _ = _HEAD.unpack_from(self._shared, 0)
        if found != count:
            name, _, text = self._shared[_HEAD.size : _HEAD.size + size].decode(errors="replace").partition(" ")
            raise getattr(errors, name, errors.BuildError)(text)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


def _close(*descriptors: int) -> None:
    for fd in descriptors:
        os.close(fd)
