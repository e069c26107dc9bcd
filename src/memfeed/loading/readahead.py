"""Tell the kernel which rows will be read next, so that the disk works while batches are made.

A page fault reads one place and waits for it. The order of an epoch is known, so the places of the next batches can be
announced (`posix_fadvise(POSIX_FADV_WILLNEED)`), and the disk reads many of them at once.

Rows of a store that is being filled are waited for: the one thing that a loader adds for such a store.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from memfeed.loading.background import Background, made_ahead
from memfeed.loading.gather_tasks import GatherTask
from memfeed.schema.codec import Int64Array
from memfeed.store.columns import Column, FileRows
from memfeed.store.row_supply import ReadRequest, RowSupply
from memfeed.store.store import Store
from memfeed.system import machine
from memfeed.system.descriptors import FileHandles
from memfeed.system.mapped_memory import in_page_cache, page_out

SUPPORTED = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")
PROBES = 24  # rows that are looked for in the page cache: if a tenth is missing, this finds it 92 times of 100
ASK_SECONDS = 1.0
GAP = mmap.PAGESIZE  # ranges that are closer than this are announced as one
DROP_ROWS_ABOVE = 32 * 1024  # bytes a row: such rows fill pages of their own
SWEEP_BELOW = 32 * 1024  # bytes a row: smaller ones are read faster file by file than row by row
SWEEP_BYTES = 16 << 20  # of a file, announced at once
FIRST_SWEEP, NEXT_SWEEP = 16, 4  # how often before the first batch, and before each of the others
SAMPLER_AHEAD = 16  # batches of a user's sampler that are drawn ahead where rows are read from the disk
LEAST_AHEAD, MOST_AHEAD = 128 << 20, 512 << 20  # bytes announced and not yet read


class ReadAhead:
    """Announces rows of columns to the disk. Columns in memory, or in many small files, are not announced.

    ``order_covers`` says that the order visits most rows of the columns: then columns of small rows are read whole,
    from front to back, if they fit into memory. ``warm_at`` is the time at which rows of the same files were last found
    in the page cache, if they were: by another reader of them.
    """

    def __init__(self, columns: Sequence[Column], order_covers: bool, warm_at: float = -math.inf) -> None:
        self._open = FileHandles(write=False)
        self._columns = [part for column in columns for part in column.files()] if SUPPORTED else []
        self._order_covers = order_covers
        self._by_row = self._columns
        self._sweep: Iterator[tuple[Path, int, int]] = iter(())
        self._sweeps = FIRST_SWEEP
        self.beyond_memory, self.most_ahead = False, MOST_AHEAD
        self.warm_at = warm_at

    @property
    def nbytes(self) -> int:
        """The bytes of the columns that can be read ahead."""
        return sum(part.column.nbytes for part in self._columns)

    def begin(self, ids: Int64Array) -> bool:
        """Start an epoch. Return True if some of these rows are not in the page cache, so that reading ahead pays.

        Only a few rows are checked, and the check may start to read them. If all of them were there, the answer holds
        for a second.
        """
        if not self._columns or not len(ids) or time.monotonic() < self.warm_at + ASK_SECONDS:
            return False
        chosen = random.Random(0)
        for _ in range(PROBES):
            part, row = chosen.choice(self._columns), int(ids[chosen.randrange(len(ids))])
            if not self._is_cached(part, part.within(np.array([row]))):
                self._plan()
                return True
        self.warm_at = time.monotonic()
        return False

    def has_arrived(self, ids: Int64Array) -> bool:
        """Return True if the last of these rows is in the page cache. Checks the largest column only."""
        largest = max(self._columns, key=lambda part: part.column.nbytes)
        return self._is_cached(largest, largest.within(ids[-1:]))

    def _is_cached(self, part: FileRows, rows: Int64Array) -> bool:
        """Return True if the first of these rows is in the page cache. Two checks, because neither is always right.

        mincore says yes for files that we may not write. A read that does not wait starts a real read, and a fast disk
        may have finished it before the second byte is checked.
        """
        if not len(rows):
            return True
        start, length = (int(found[0]) if len(found) else 0 for found in part.places(rows[:1]))
        if length <= 0:  # the row is empty, or None
            return True
        byte, address = bytearray(1), part.column.address
        try:
            fd = self._open(part.column.path)
            for at in (start, start + length - 1):
                if not in_page_cache(address + at) or os.preadv(fd, [byte], at, os.RWF_NOWAIT) != 1:
                    return False
        except BlockingIOError:
            return False
        except OSError:  # a file system in memory, or one without this call; a file that was removed, whose map stays
            return True
        return True

    def announce(self, ids: Int64Array) -> int:
        """Ask the kernel to read these rows of all columns. Return their bytes."""
        total = 0
        for path, start, size in itertools.islice(self._sweep, self._sweeps):
            self._advise(path, [(start, start + size)])
        self._sweeps = NEXT_SWEEP
        for part in self._by_row:
            starts, lengths = part.places(part.within(ids))
            total += int(np.maximum(lengths, 0).sum())
            self._advise(part.column.path, merged(starts, lengths))
        return total

    def _advise(self, path: Path, places: Iterable[tuple[int, int]]) -> None:
        """Ask the kernel to read the bytes [start, stop) of a file; not of one that was removed, whose map stays."""
        with contextlib.suppress(FileNotFoundError):
            fd = self._open(path)
            for start, stop in places:
                os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_WILLNEED)

    def _plan(self) -> None:
        """Decide which columns are read whole and which row by row, and how far ahead."""
        limit = machine.memory_limit()
        self.beyond_memory = self.nbytes > limit
        self.most_ahead = min(MOST_AHEAD, limit // 8)
        room, swept = limit // 2, []
        for part in self._columns:
            if self._order_covers and part.column.nbytes <= room and part.row_bytes < SWEEP_BELOW:
                room -= part.column.nbytes
                swept.append(part)
        self._by_row = [part for part in self._columns if part not in swept]
        self._sweeps = FIRST_SWEEP
        self._sweep = (
            (part.column.path, start, min(SWEEP_BYTES, part.column.nbytes - start))
            for part in swept
            for start in range(0, part.column.nbytes, SWEEP_BYTES)
        )

    def drop(self, ids: Int64Array, runs: Sequence[tuple[int, int]]) -> None:
        """Give back the page cache of rows that will not be read again in this epoch.

        ``ids`` were just read; ``runs`` of rows [a, b) hold no row that is still to come. Pages that another process
        maps stay, and so do pages that this process has changed through ``Store.column``.
        """
        for part in self._columns:
            if part.shares_pages:
                continue
            if part.row_bytes >= DROP_ROWS_ABOVE:
                starts, lengths = part.places(part.within(ids))
                places = merged(starts, lengths)
            elif part.column.layout == "dense" and runs:
                size = part.column.field.row_bytes
                places = ((start * size, stop * size) for start, stop in runs)
            else:
                continue
            base = part.column.address
            for start, stop in places:
                page_out(base + start, stop - start)


def merged(starts: Int64Array, lengths: Int64Array) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole pages that hold these bytes, in order. Ranges that touch, or almost, become one."""
    there = lengths > 0
    first = starts[there] // mmap.PAGESIZE * mmap.PAGESIZE
    order = np.argsort(first, kind="stable")
    first = first[order]
    last = np.maximum.accumulate((starts[there] + lengths[there])[order])
    if not len(first):
        return
    breaks = np.flatnonzero(first[1:] > last[:-1] + GAP) + 1
    begins = first[np.concatenate([[0], breaks])]
    ends = last[np.concatenate([breaks - 1, [len(last) - 1]])]
    yield from zip(begins.tolist(), ends.tolist(), strict=True)


Passed = Callable[[int, int], Sequence[tuple[int, int]]]


def announce_in_thread(tasks: Iterator[GatherTask], reader: ReadAhead) -> Iterator[GatherTask]:
    """Yield ``tasks``. A thread announces their rows to the kernel, as far ahead as the disk needs."""

    def announced() -> Iterator[tuple[GatherTask, int]]:
        for task in tasks:
            yield task, reader.announce(task.ids)

    thread = Background(announced(), min(LEAST_AHEAD, reader.most_ahead), weight=lambda item: item[1])
    try:
        for task, _ in thread:
            if thread.limit < reader.most_ahead and not reader.has_arrived(task.ids):
                thread.limit = min(2 * thread.limit, reader.most_ahead)
            yield task
    finally:
        thread.stop()


def announce_in_caller(tasks: Iterator[GatherTask], reader: ReadAhead) -> Iterator[GatherTask]:
    """Yield ``tasks``, their rows announced from the caller's thread, where a user's sampler must run."""

    def announced() -> Iterator[GatherTask]:
        for task in tasks:
            reader.announce(task.ids)
            yield task

    return made_ahead(announced(), SAMPLER_AHEAD)


def drop_after_use(
    tasks: Iterator[GatherTask], reader: ReadAhead, begin: int, passed: Passed | None
) -> Iterator[GatherTask]:
    """Yield ``tasks``. After each, rows that the epoch will not visit again leave the page cache.

    ``passed`` returns the runs of rows that have no visit left between two positions; None where that is not known.
    """
    for task in tasks:
        yield task
        end = task.positions[-1]
        runs = passed(begin, end) if passed is not None and isinstance(end, int) else ()
        reader.drop(task.ids, runs)
        begin = end if isinstance(end, int) else 0


ROWS_AHEAD = 1 << 16  # rows of the order that the filling processes are told ahead of the loader
ROWS_AT_ONCE = 1 << 13  # that they are told at once, far ahead: neighbours among them are fetched by one request
SAMPLER_BATCHES_AHEAD = 16  # of a user's sampler, which draws them in the caller's thread


def present_tasks(tasks: Iterator[GatherTask], store: Store, *, has_own_order: bool) -> Iterator[GatherTask]:
    """Yield ``tasks`` once their rows are there. Those of the next ones are asked for ahead, if processes read them.

    If the store masks rows, one that was skipped is replaced by another, and ``valid`` is False for it.
    """
    supply, reader, held = store._view.supply, store._view.reader(), deque[GatherTask]()
    if supply is None:
        yield from map(_all_valid, tasks)
        return
    if supply.in_caller:  # nobody is told: a user's sampler is drawn as DataLoader without workers draws it
        for task in tasks:
            yield _present(task, supply, reader, masks=store._backing.masks_rows)
        return
    rows_held, untold = 0, list[GatherTask]()
    is_finalizing = sys.is_finalizing  # an iterator that lives on ends after the modules have lost their names
    try:
        for task in tasks:
            held.append(task)
            untold.append(task)
            rows_held += len(task.ids)
            is_soon = rows_held <= ROWS_AHEAD or not has_own_order
            if is_soon or sum(len(one.ids) for one in untold) >= ROWS_AT_ONCE:
                _tell(untold, supply, reader)
            while held and (rows_held > ROWS_AHEAD or (not has_own_order and len(held) > SAMPLER_BATCHES_AHEAD)):
                rows_held -= len(held[0].ids)
                yield _present(held.popleft(), supply, reader, masks=store._backing.masks_rows)
        _tell(untold, supply, reader)
        while held:
            yield _present(held.popleft(), supply, reader, masks=store._backing.masks_rows)
    finally:
        if not is_finalizing():
            supply.forget(reader)


def _tell(untold: list[GatherTask], supply: RowSupply, reader: ReadRequest) -> None:
    for task in untold:
        supply.want(reader, task.ids)
    untold.clear()


def _present(task: GatherTask, supply: RowSupply, reader: ReadRequest, *, masks: bool) -> GatherTask:
    """Return a task whose rows are all there."""
    present = supply.wait(reader, task.ids)
    if present is not None:
        task = task._replace(ids=np.where(present, task.ids, supply.substitute_row()))
    if not masks:
        return task
    task = _all_valid(task)
    return task if present is None else task._replace(valid=task.valid & torch.from_numpy(present))  # type: ignore[operator]


def _all_valid(task: GatherTask) -> GatherTask:
    """Return a task that says which rows count."""
    if task.valid is not None:
        return task
    return task._replace(valid=torch.ones(len(task.ids), dtype=torch.bool, device="cpu"))
