"""`memfeed.memoize`: keep the results of a function on disk, for all processes of this machine."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import numpy as np
import torch

from memfeed.errors import MemfeedError, RandomDataError, StoreError
from memfeed.memoizing import results
from memfeed.memoizing.code import hash_function
from memfeed.memoizing.counts import Counts, begin_run
from memfeed.memoizing.keys import Key, Keys
from memfeed.memoizing.memo import Found, Memo
from memfeed.store.memo_format import MARKER, Bytes, make_blob, read_footer
from memfeed.system import files, random_state
from memfeed.system.messages import say_once, warn
from memfeed.system.units import format_seconds, parse_bytes

P = ParamSpec("P")
R = TypeVar("R")

_PROVEN = 16  # keys of a function whose results are computed twice
_FIRST_WAIT, _LONGEST_WAIT = 0.0005, 0.05  # seconds, while another process computes the same key
_REPORT_SECONDS = 60.0
_SEED = 0x6D656D6F


class Report(NamedTuple):
    """What the calls of one function came to in this run: this process and its children.

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


class Memoized(Generic[P, R]):
    """A function whose results are kept; `memfeed.memoize` makes it. ``__wrapped__`` is the function itself."""

    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R], path: Path, size: int | None, mapped: bool, version: object) -> None:
        functools.update_wrapper(self, function)
        self._function, self._path, self._size = function, path, size
        self._mapped, self._version = mapped, version
        self._name: str = getattr(function, "__qualname__", type(function).__qualname__)
        _every.add(self)

    def __repr__(self) -> str:
        return f"<memoized {self._name} in {self._path}>"

    def __reduce__(self) -> Any:
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for part in self._name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return self._name  # as a function is pickled: by its name
        return Memoized, (self._function, self._path, self._size, self._mapped, self._version)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @functools.cached_property
    def _digest(self) -> str:
        return hash_function(self._function, self._version)

    @functools.cached_property
    def _keys(self) -> Keys:
        return Keys(self._function, self._name, self._digest)

    @functools.cached_property
    def _memo(self) -> Memo:
        return _memo_at(self._path, self._size)

    @functools.cached_property
    def _counts(self) -> Counts:
        _ = self._memo  # its directory
        return _counts.setdefault((self._path, self._digest), Counts(self._path, self._digest))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of a call, from the disk if it is there. It belongs to the caller."""
        began = time.perf_counter()
        key = self._keys.of(args, kwargs)
        digest = hashlib.blake2b(key.text, digest_size=16).digest()
        row = self._memo.find(digest)
        found = None if row is None else self._memo.read(row, digest, mapped=self._mapped)
        if found is None:
            return self._computed(key, digest, lambda: self._function(*args, **kwargs), began)
        return self._hit(found, began)

    def report(self) -> Report:
        """Return how many calls of this run were answered from the disk; see `Report`."""
        totals = self._counts.totals()
        return Report(self._name, self._path, totals.hits, totals.misses, totals.seconds, totals.processes)

    def _is_used(self) -> bool:
        """Return True if this process or a child may have called it."""
        return "_digest" in vars(self) or (self._path / MARKER).exists()

    def _hit(self, found: Found, began: float) -> R:
        result: R = results.decode(found.blob.layout, found.data, writable=not self._mapped)
        self._counts.add(1, 0, max(0.0, found.blob.seconds - (time.perf_counter() - began)))
        return result

    def _computed(self, key: Key, digest: bytes, compute: Callable[[], R], began: float) -> R:
        """Compute a result, or wait for the process that computes it."""
        memo, wait, report_at = self._memo, _FIRST_WAIT, time.monotonic() + _REPORT_SECONDS
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    row = stack.enter_context(memo.taken(digest))
                except (MemfeedError, OSError) as error:
                    self._warn(error)
                    return self._own(compute(), digest, 0.0)[0]
                known = memo.find(digest)
                found = None if known is None else memo.read(known, digest, mapped=self._mapped)
                if found is not None:
                    return self._hit(found, began)
                if row is not None:
                    break
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
                if time.monotonic() > report_at:
                    say_once(f"memfeed: waiting for another process that computes {self._name} ({self._path})")
            return self._fill(row, key, digest, compute)

    def _fill(self, row: int, key: Key, digest: bytes, compute: Callable[[], R]) -> R:
        """Compute the result of a row that this process has taken, and write it."""
        started = time.perf_counter()
        is_proven = self._memo.proven(self._digest) >= _PROVEN
        result = compute() if is_proven else self._compute_twice(compute)
        seconds = (time.perf_counter() - started) / (1 if is_proven else 2)
        self._counts.add(0, 1, 0.0)
        own, blob = self._own(result, digest, seconds)
        if not _are_unchanged(key.files):  # the result may be of what the file was before, or is now
            return own
        try:
            self._memo.write(row, key.text, blob)
            if not is_proven:
                self._memo.add_proof(self._digest)
        except (MemfeedError, OSError) as error:
            self._warn(error)
            return own
        if self._mapped and (found := self._memo.read(row, digest, mapped=True)) is not None:
            return results.decode(found.blob.layout, found.data, writable=False)  # type: ignore[no-any-return]
        return own

    def _own(self, result: R, digest: bytes, seconds: float) -> tuple[R, Bytes]:
        """Return a result in memory of its own, as it would be read, and the blob that it lies in."""
        blob = np.concatenate(make_blob(digest, seconds, *results.encode(result)))
        layout = read_footer(blob, len(blob), self._path).layout
        return results.decode(layout, torch.from_numpy(blob)), blob

    def _compute_twice(self, compute: Callable[[], R]) -> R:
        """Return a result that is the same when it is computed again, with all random generators moved.

        Raises RandomDataError if it differs, or if the function draws random numbers.
        """
        before = random_state.save()
        first = compute()
        after = random_state.save()
        one = results.encode(first)
        with random_state.seeded(_SEED):
            other = results.encode(compute())
        difference = _difference(one, other)
        if difference is None and before == after:
            return first
        what = "that it draws random numbers" if difference is None else f"two results that differ in {difference}"
        raise RandomDataError(
            f"{self._name}: called twice with the same arguments, found {what}; expected a result that depends on the "
            "arguments alone: draw outside of the function, and pass it what was drawn"
        )

    def _warn(self, error: Exception) -> None:
        if not _warned.setdefault(self._path, False):
            _warned[self._path] = True
            warn(f"{self._path}: results of {self._name} are computed and not kept: {error}")


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
_every: weakref.WeakSet[Memoized[..., Any]] = weakref.WeakSet()


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


class _Memoize:
    """See `memfeed.memoize`."""

    @overload
    def __call__(
        self,
        function: str | os.PathLike[str],
        *,
        size: int | str | None = None,
        mapped: bool = False,
        version: object = None,
    ) -> Callable[[Callable[P, R]], Memoized[P, R]]: ...

    @overload
    def __call__(
        self,
        function: Callable[P, R],
        path: str | os.PathLike[str],
        *,
        size: int | str | None = None,
        mapped: bool = False,
        version: object = None,
    ) -> Memoized[P, R]: ...

    def __call__(
        self,
        function: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        size: int | str | None = None,
        mapped: bool = False,
        version: object = None,
    ) -> Any:
        """Keep the results of a function on disk: each is computed once, for all processes and later runs.

        With the path alone this is a decorator. The key of a result is the arguments of the call, and the function's
        source with the values that it reads (defaults, globals, variables of an enclosing function). A str or path that
        names a file counts with the size of the file and the time of its last change.

        Args:
            function: any function whose result depends on its arguments alone. The arguments are str, bytes, numbers,
                None, paths, and tuples, lists and dicts of them. The result is tensors, arrays, images of Pillow,
                numbers, str, bytes, None, and tuples, lists and dicts of them, of any shape in each call.
            path: a directory for the results; it is made at the first call. Several functions may share it.
            size: the most bytes of results that are kept, about, as an int or ``"20GB"``; the ones that were used last
                stay. None keeps all.
            mapped: return arrays that cannot be written and tensors, both in a private map of the file, without a copy.
                What is written into such a tensor reaches neither the file nor another result.
            version: takes the place of the source in the key: change it when the results change.

        Returns:
            A function with the same arguments. What it returns belongs to the caller.

        Raises (when it is called):
            RandomDataError: a result differs when it is computed again, or the function draws random numbers. That is
                tried for the first 16 keys.
            SchemaError: an argument or a result of another class, or the function reads a value that cannot be hashed.
            StoreError: something else is at the path, or other users may write there.
            CorruptStoreError: a result on the disk is damaged.

        If the disk is full, results are computed, and one warning is given.

        Example::

            @memfeed.memoize("photos.mf")
            def load(path):
                return np.asarray(Image.open(path).convert("RGB").resize((256, 256)))
        """
        most = parse_bytes("size", size)
        if isinstance(function, str | os.PathLike):
            if path is not None:
                raise TypeError(
                    f"found memoize({os.fspath(function)!r}, {path!r}); expected a function, then a path; or a path "
                    "alone, as a decorator"
                )
            return lambda wrapped: self(wrapped, function, size=size, mapped=mapped, version=version)
        if not callable(function) or path is None:
            raise TypeError(
                f"found memoize({function!r:.60}, {path!r}); expected a function and a path: "
                'memfeed.memoize(load, "photos.mf")'
            )
        if begin_run():
            atexit.register(_report_at_exit, os.getpid())
        return Memoized(function, files.local_path(path).absolute(), most, bool(mapped), version)

    def report(self) -> list[Report]:
        """Return the `Report` of each memoized function that this process knows. Each prints as one line."""
        return sorted({one.report() for one in _every if one._is_used()}, key=lambda one: (str(one.path), one.function))


def _report_at_exit(pid: int) -> None:
    if pid != os.getpid():  # a forked child
        return
    for one in list(_every):
        with contextlib.suppress(Exception):  # the directory may be gone
            if not one._is_used():
                continue
            report = one.report()
            if report.hits or report.misses:
                print(report, file=sys.stderr)
            one._counts.remove()


memoize = _Memoize()
