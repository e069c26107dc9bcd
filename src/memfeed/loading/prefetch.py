"""Iterators that run ahead: groups ahead of a GPU, rows announced to the disk, pages given back after use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from memfeed.loading.background import Background
from memfeed.loading.batch_groups import BatchGroup
from memfeed.loading.gather_tasks import GatherTask
from memfeed.loading.readahead import LEAST_AHEAD, ReadAhead

SAMPLER_AHEAD = 16  # batches of a user's sampler that are drawn ahead where rows are read from the disk
Passed = Callable[[int, int], Sequence[tuple[int, int]]]


def groups_ahead_in_caller(groups: Iterator[BatchGroup], prefetch: int) -> Iterator[BatchGroup]:
    """Yield ``groups``, ``prefetch`` of them made ahead in the caller's thread: the GPU works on them meanwhile."""
    held: deque[BatchGroup] = deque()
    for group in groups:
        held.append(group)
        if len(held) > prefetch:
            yield held.popleft()
    while held:
        yield held.popleft()


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
    held: deque[GatherTask] = deque()
    for task in tasks:
        reader.announce(task.ids)
        held.append(task)
        if len(held) > SAMPLER_AHEAD:
            yield held.popleft()
    yield from held


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
