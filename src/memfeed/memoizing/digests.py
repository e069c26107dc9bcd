"""The rows of keys: a file that only grows, with the first 8 bytes of the digest of each row's key."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np

from memfeed.system import files
from memfeed.system.descriptors import open_read

_BYTES = 8
_MOST_RECENT = 4096  # rows in a dict; all others are in sorted arrays, which take 16 bytes a row


class Digests:
    """Finds the row of a digest. All processes append to one file, while they hold a lock of it.

    Two keys whose digests begin with the same 8 bytes share a row, which then has one of them at a time: each row has
    the whole digest in its blob.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, open_read(path)
        weakref.finalize(self, os.close, self._fd)
        self._count = 0
        self._recent: dict[int, int] = {}
        self._sorted, self._rows = np.empty(0, np.uint64), np.empty(0, np.int64)

    def find(self, digest: bytes) -> int | None:
        """Return the row of a digest, or None if no process has given it one yet."""
        found = self._known(digest)
        if found is None and self._refresh():
            found = self._known(digest)
        return found

    def append(self, digest: bytes) -> int:
        """Return the row of a digest, which is made if there is none. The caller holds the lock."""
        found = self.find(digest)
        if found is not None:
            return found
        row = os.fstat(self._fd).st_size // _BYTES
        with files.opened(self._path) as fd:
            files.write_at(fd, digest[:_BYTES], row * _BYTES)
        return row

    def _known(self, digest: bytes) -> int | None:
        number = int.from_bytes(digest[:_BYTES], "little")
        row = self._recent.get(number)
        if row is None and len(self._sorted):
            at = int(np.searchsorted(self._sorted, np.uint64(number)))
            if at < len(self._sorted) and self._sorted[at] == number:
                return int(self._rows[at])
        return row

    def _refresh(self) -> bool:
        """Read the rows that were added since; return False if there is none."""
        count = os.fstat(self._fd).st_size // _BYTES
        if count <= self._count:
            return False
        data = os.pread(self._fd, (count - self._count) * _BYTES, self._count * _BYTES)
        numbers = np.frombuffer(data, np.uint64)
        rows = np.arange(self._count, self._count + len(numbers))
        self._count += len(numbers)
        self._recent.update(zip(numbers.tolist(), rows.tolist(), strict=True))
        if len(self._recent) > max(_MOST_RECENT, len(self._sorted) // 4):
            recent = np.fromiter(self._recent.keys(), np.uint64, len(self._recent))
            keys = np.concatenate([self._sorted, recent])
            order = np.argsort(keys, kind="stable")
            where = np.concatenate([self._rows, np.fromiter(self._recent.values(), np.int64, len(self._recent))])
            self._rows, self._sorted, self._recent = where[order], keys[order], {}
        return True
