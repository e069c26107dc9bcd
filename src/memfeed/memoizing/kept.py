"""Keep results by their keys: answer from the disk, or compute once among all processes, and write.

Hits and misses of all processes of a run are counted: each writes into a small file of its own, which is mapped.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memfeed.errors import MemfeedError, RandomDataError, SpaceError, StoreError
from memfeed.memoizing import results
from memfeed.memoizing.keys import Key
from memfeed.memoizing.memo import RUN, Found, Memo
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.memo_format import MARKER, Bytes, make_blob, read_footer
from memfeed.system import files, random_state
from memfeed.system.messages import format_seconds, say_once, warn

_PROVEN = 16  # keys of a function whose results are computed twice
_FIRST_WAIT, _LONGEST_WAIT = 0.0005, 0.05  # seconds, while another process computes the same key
_REPORT_SECONDS = 60.0
_FULL_SECONDS = 10.0  # after which a directory is tried again for which the disk had no room
_SEED = 0x6D656D6F


class Report(NamedTuple):
    """Hits and misses of one function in this run: of this process and its children.

    Args:
        function: its name.
        path: where its results are.
        hits: calls that were answered from the disk.
        misses: calls that were computed.
        seconds_saved: what the hits would have taken to compute, less what they took.
        processes: how many processes called it.
    """

    function: str
    path: Path
    hits: int
    misses: int
    seconds_saved: float
    processes: int

    def __str__(self) -> str:
        more = f", in {self.processes} processes" if self.processes > 1 else ""
        return (
            f"memfeed: {self.function} ({self.path.name}): {self.hits:,} hits, {self.misses:,} misses, "
            f"{format_seconds(self.seconds_saved)} saved{more}"
        )


class Kept:
    """The kept results of one function at ``path``; see `memfeed.memoize`.

    Args:
        path: the directory, which other functions may share. It is made with the first result.
        size: the most bytes of results that are kept there; None keeps all.
        mapped: return results in private maps of the file.
        name: of the function, for people.
        digest: of the function, in hexadecimal: names its proofs and counts.
        prove: compute the results of the first 16 keys twice.
    """

    def __init__(
        self, path: Path, size: int | None, name: str, digest: str, *, mapped: bool = False, prove: bool = True
    ) -> None:
        self.path, self.digest, self.name = path, digest, name
        self._size, self._mapped, self._prove = size, mapped, prove
        self._full_until = 0.0  # when the directory is tried again that a full disk has no room for
        self.seconds = 0.0  # that the calls of this process took to compute, or would have taken

    @cached_property
    def memo(self) -> Memo:
        """The directory; StoreError if it cannot be used."""
        return _memo_at(self.path, self._size)

    @cached_property
    def _counts(self) -> Counts:
        _ = self.memo  # its directory
        return _counts.setdefault((self.path, self.digest), Counts(self.path, self.digest))

    def result(self, key: Key, compute: Callable[[], Any]) -> Any:
        """Return the result of a key, from the disk or from ``compute``. It belongs to the caller.

        Raises what ``compute`` raises, SchemaError for a result that cannot be kept, RandomDataError for one that
        differs when it is computed again, CorruptStoreError for one that is damaged.
        """
        began = time.perf_counter()
        digest = hashlib.blake2b(key.text, digest_size=16).digest()
        if not self._has_room():
            return self._own(compute(), digest, 0.0)[0]
        found = self._stored(digest)
        return self._computed(key, digest, compute, began) if found is None else self._hit(found, began)

    def _has_room(self) -> bool:
        """Return False, with a warning, if the disk is so full that the directory cannot be made."""
        if "memo" in vars(self):
            return True
        if time.monotonic() < self._full_until:
            return False
        try:
            _ = self.memo
        except SpaceError as error:
            self._warn(error)
            self._full_until = time.monotonic() + _FULL_SECONDS
            return False
        return True

    def _stored(self, digest: bytes) -> Found | None:
        """Return the result that is there, or None; also, with a warning, if it cannot be read: it was removed."""
        memo = self.memo
        try:
            row = memo.find(digest)
            return None if row is None else memo.read(row, digest, mapped=self._mapped)
        except OSError as error:
            self._warn(error)
            return None

    def report(self) -> Report:
        """Return how many calls of this run were answered from the disk; see `Report`."""
        if not self._has_room():
            return Report(self.name, self.path, 0, 0, 0.0, 0)
        return Report(self.name, self.path, *self._counts.totals())

    @property
    def is_used(self) -> bool:
        """True if this process or a child may have asked for a result."""
        return "memo" in vars(self) or os.path.exists(self.path / MARKER)

    def _hit(self, found: Found, began: float) -> Any:
        result = results.decode(found.blob.layout, found.data, writable=not self._mapped)
        self.seconds += found.blob.seconds
        self._counts.add(1, 0, max(0.0, found.blob.seconds - (time.perf_counter() - began)))
        return result

    def _computed(self, key: Key, digest: bytes, compute: Callable[[], Any], began: float) -> Any:
        """Compute a result, or wait for the process that computes it."""
        memo, wait, report_at = self.memo, _FIRST_WAIT, time.monotonic() + _REPORT_SECONDS
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    row = stack.enter_context(memo.taken(digest))
                except (MemfeedError, OSError) as error:
                    self._warn(error)
                    return self._own(compute(), digest, 0.0)[0]
                found = self._stored(digest)
                if found is not None:
                    return self._hit(found, began)
                if row is not None:
                    break
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
                if time.monotonic() > report_at:
                    say_once(f"memfeed: waiting for another process that computes {self.name} ({self.path})")
            return self._fill(row, key, digest, compute)

    def _fill(self, row: int, key: Key, digest: bytes, compute: Callable[[], Any]) -> Any:
        """Compute the result of a row that this process has taken, and write it."""
        started = time.perf_counter()
        is_proven = not self._prove or self.memo.proven(self.digest) >= _PROVEN
        result = compute() if is_proven else self._compute_twice(compute)
        seconds = (time.perf_counter() - started) / (1 if is_proven else 2)
        self.seconds += seconds
        self._counts.add(0, 1, 0.0)
        own, blob = self._own(result, digest, seconds)
        if not _are_unchanged(key.files):  # the result may be of what the file was before, or is now
            return own
        try:
            self.memo.write(row, key.text, blob)
            if not is_proven:
                self.memo.add_proof(self.digest)
        except (MemfeedError, OSError) as error:
            self._warn(error)
            return own
        if self._mapped and (found := self.memo.read(row, digest, mapped=True)) is not None:
            return results.decode(found.blob.layout, found.data, writable=False)
        return own

    def _own(self, result: Any, digest: bytes, seconds: float) -> tuple[Any, Bytes]:
        """Return a result in memory of its own, as it would be read, and the blob that it lies in."""
        blob = np.concatenate(make_blob(digest, seconds, *results.encode(result)))
        layout = read_footer(blob, len(blob), self.path).layout
        return results.decode(layout, blob), blob

    def _compute_twice(self, compute: Callable[[], Any]) -> Any:
        """Return a result that is the same when it is computed again, with all random generators moved.

        Raises RandomDataError if it differs, or if the function draws random numbers. The generators are those of all
        threads: only the main thread moves them, and looks at them. Another one compares two results.
        """
        is_main = threading.current_thread() is threading.main_thread()
        before = random_state.save()
        first = compute()
        draws = is_main and random_state.save() != before
        one = results.encode(first)
        with random_state.seeded(_SEED) if is_main else contextlib.nullcontext():
            before = random_state.save()
            other = results.encode(compute())
            draws = draws and random_state.save() != before  # in one call alone it may have been another thread
        difference = _difference(one, other)
        if difference is None and not draws:
            return first
        what = "that it draws random numbers" if difference is None else f"two results that differ in {difference}"
        raise RandomDataError(
            f"{self.name}: called twice with the same arguments, found {what}; expected a result that depends on the "
            "arguments alone: draw outside of the function, and pass it what was drawn"
        )

    def _warn(self, error: Exception) -> None:
        if not _warned.setdefault(self.path, False):
            _warned[self.path] = True
            warn(f"{self.path}: results of {self.name} are computed and not kept: {error}")


def _difference(one: tuple[Any, list[results.LeafData]], other: tuple[Any, list[results.LeafData]]) -> str | None:
    """Return in which part two encoded results differ, or None. All leaves are compared bit by bit."""
    if repr(one[0]) != repr(other[0]):  # NaN is NaN there
        return f"structure or plain values ({one[0]!r:.80} and {other[0]!r:.80})"
    if [leaf[:2] for leaf in one[1]] != [leaf[:2] for leaf in other[1]]:
        return "dtype or shape"
    unequal = [i for i, (a, b) in enumerate(zip(one[1], other[1], strict=True)) if not np.array_equal(a[2], b[2])]
    return f"the values of leaf {unequal[0]} of {len(one[1])}" if unequal else None


def _are_unchanged(noted: dict[str, list[int]]) -> bool:
    for path, (size, time_ns) in noted.items():
        try:
            found = os.stat(path)
        except OSError:
            return False
        if (found.st_size, found.st_mtime_ns) != (size, time_ns):
            return False
    return True


_memos: dict[Path, Memo] = {}
_counts: dict[tuple[Path, str], Counts] = {}
_warned: dict[Path, bool] = {}


def _memo_at(path: Path, size: int | None) -> Memo:
    """Return the results at a path: one object a process, because locks of one process do not exclude each other."""
    found = _memos.get(path)
    if found is None:
        found = _memos[path] = Memo(path, size)
    if found.size != size:
        raise StoreError(
            f"{path}: found size={size} for one function and size={found.size} for another; expected one size for all "
            "functions of a path: pass the same, or another path"
        )
    return found


def report_at_exit(owner: Any) -> None:
    """Print a line for each `Kept` of ``owner.used()`` when this process ends, unless a parent of it does."""
    _owners.add(owner)
    if begin_run():
        atexit.register(_report, os.getpid())


def used() -> list[Kept]:
    """Return all results that this process or a child may have asked for, of each function once."""
    found = {(one.path, one.digest): one for owner in list(_owners) for one in owner.used()}
    return [found[key] for key in sorted(found, key=str)]


_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def _report(pid: int) -> None:
    if pid != os.getpid():  # a forked child
        return
    for one in used():
        with contextlib.suppress(Exception):  # the directory may be gone
            report = one.report()
            if report.hits or report.misses:
                print(report, file=sys.stderr)
            one._counts.remove()


_RECORD = struct.Struct("<QQd")


def begin_run() -> bool:
    """Give this run an id, which its child processes inherit. Return False if it has one: this is a child."""
    if RUN in os.environ:
        return False
    os.environ[RUN] = f"{os.getpid():x}-{time.time_ns():x}"
    return True


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
        return f"counts-{self._function}-{os.environ.get(RUN, '')}-"

    def totals(self) -> tuple[int, int, float, int]:
        """Return the hits, the misses, the seconds saved, and how many processes of this run there are."""
        hits, misses, seconds, processes = 0, 0, 0.0, 0
        for path in self._directory.glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError, struct.error):
                found = _RECORD.unpack(path.read_bytes())
                hits, misses, seconds, processes = hits + found[0], misses + found[1], seconds + found[2], processes + 1
        if self._map is None and self._pid == os.getpid():
            hits, misses, seconds = hits + self._values[0], misses + self._values[1], seconds + self._values[2]
            processes += 1
        return hits, misses, seconds, processes

    def remove(self) -> None:
        """Remove the files of this run."""
        for path in self._directory.glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError, MemfeedError):
                files.remove(path)
