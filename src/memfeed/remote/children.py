"""Chunks for forked children of the process that fetches: the connections of obstore do not survive a fork.

A child writes the numbers of chunks into a pipe; its parent fetches them into the cache directory, which both see.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import struct
import time
import weakref

import numpy as np

from memfeed.errors import RemoteError
from memfeed.schema.codec import Int64Array

POLL_SECONDS = 0.001
ASK_SECONDS = 0.05  # after which a child asks again for what it waits for
_HEAD = struct.Struct("<qi")  # how many errors there were, and the bytes of the last one's text
_LARGEST = 4000
_NUMBERS_AT_ONCE = 256  # a write of so many is one piece to the pipe (PIPE_BUF)


class ChildRequests:
    """A pipe from children to this process, and a page of memory that both share, for the text of an error."""

    def __init__(self) -> None:
        self._receiver, self._sender = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._shared = mmap.mmap(-1, 4096)
        self._pid = os.getpid()
        weakref.finalize(self, _close, self._receiver, self._sender)

    # --- in the process that fetches

    def receive(self, seconds: float) -> Int64Array:
        """Return the chunks that children want, int64 [k], after at most so many seconds."""
        try:
            if not select.select([self._receiver], [], [], seconds)[0]:
                return np.empty(0, np.int64)
            return np.unique(np.frombuffer(os.read(self._receiver, 1 << 16), np.int64))
        except (OSError, ValueError):  # it is closed
            return np.empty(0, np.int64)

    def report(self, error: BaseException) -> None:
        """Let children raise an error, too."""
        text = str(error).encode()[:_LARGEST]
        self._shared[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._shared, 0, self.error_count() + 1, len(text))

    # --- in a child

    def ask(self, chunks: Int64Array) -> None:
        """Ask the process that fetches for chunks. Raises RemoteError if it has ended."""
        if not _is_alive(self._pid):
            raise RemoteError(
                f"found that process {self._pid} has ended, which fetched the rows that its children read; expected it "
                "to live as long as they do: open the store in each process"
            )
        for first in range(0, len(chunks), _NUMBERS_AT_ONCE):
            try:
                os.write(self._sender, chunks[first : first + _NUMBERS_AT_ONCE].astype(np.int64).tobytes())
            except BlockingIOError:
                return  # it is full: asked again soon

    def error_count(self) -> int:
        """Return how many errors there were so far."""
        count: int = _HEAD.unpack_from(self._shared, 0)[0]
        return count

    def last_error(self) -> RemoteError:
        """Return the last error."""
        size = _HEAD.unpack_from(self._shared, 0)[1]
        return RemoteError(self._shared[_HEAD.size : _HEAD.size + size].decode(errors="replace"))


class ChildWait:
    """How a forked child waits for chunks that its parent fetches."""

    def __init__(self, children: ChildRequests) -> None:
        self._children, self._errors, self._due = children, children.error_count(), 0.0

    def __call__(self, absent: Int64Array) -> None:
        """Wait a moment for chunks. Raises what keeps the parent from fetching one."""
        if self._children.error_count() != self._errors:
            raise self._children.last_error()
        if time.monotonic() >= self._due:
            self._children.ask(absent)
            self._due = time.monotonic() + ASK_SECONDS
        time.sleep(POLL_SECONDS)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


def _close(*descriptors: int) -> None:
    for fd in descriptors:
        os.close(fd)
