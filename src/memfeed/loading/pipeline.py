"""From tasks to batches: read ahead, gather, put together, transform."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from memfeed.loading.background import Background
from memfeed.loading.bind import Bound
from memfeed.loading.placement import Placement
from memfeed.loading.readahead import LEAST_AHEAD, ReadAhead
from memfeed.loading.tasks import GatherTask, Mark
from memfeed.random import Keys
from memfeed.store.gather import Gather, split
from memfeed.transfer.streams import Event
from memfeed.transfer.to_device import to_device
from memfeed.transfer.transfer import Arrive, Transfer

_NOWHERE = object()
SAMPLER_AHEAD = 16  # batches of a user's sampler that are drawn ahead where rows are read from the disk


class Made(NamedTuple):
    """What came of one task: its batches, not yet taken, each with the mark behind it, and the rows of each.

    Where ``Pipeline.finish`` has something to do, a batch is a tuple of its arguments.
    """

    batches: Iterable[Any]
    marks: Sequence[Mark]
    rows: int


Passed = Callable[[int, int], Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Pipeline:
    """How the batches of a loader are made.

    Args:
        gather: rows to leaves.
        at_once: how many batches come from one gather.
        assemble: leaves to a batch.
        keyed: a transform of ours, a pure function of its keys.
        anywhere: whether it may run in a thread.
        plain: a user's callable, which runs in the caller's thread.
        crossing: the way to where batches go before the transforms see them.
        placement: where the columns are.
        seed: of the keys.
        pads: batches get a mask of the rows that are valid.
        tensordicts: batches hold TensorDicts, which say what device they are on.
    """

    gather: Gather
    at_once: int
    assemble: Callable[[Any], Any]
    keyed: Bound | None
    anywhere: bool
    plain: Callable[[Any, None], Any] | None
    crossing: Transfer
    placement: Placement
    seed: int
    pads: bool
    tensordicts: bool

    @cached_property
    def _bare(self) -> bool:
        """Whether a batch is what was gathered, and no more."""
        return self.keyed is None and self.plain is None and not self.pads

    @cached_property
    def finishes(self) -> bool:
        """Whether something is to be done in the caller's thread with each batch."""
        arrives = self.crossing.device is not None and not (self.crossing.slabs and self._bare)
        here = self.keyed is not None and not self.anywhere
        return arrives or self.plain is not None or self.pads or here

    def made(self, tasks: Iterator[GatherTask], epoch: int) -> Iterator[Made]:
        """What can be done in any thread."""
        assemble, plain = self.assemble, self.keyed is None and not self.finishes
        for task in tasks:
            together = self.at_once > 1 and len(task.marks) > 1
            rows = len(task.ids) // len(task.marks)
            if self.crossing.slabs:
                yield from self._crossed(task, len(task.marks) if together else 1, rows, epoch)
                continue
            several = (self.gather.split if together else self.gather.several)(task.ids, task.size)
            if plain and together:
                yield Made(map(assemble, several), task.marks, rows)
                continue
            for n, (leaves, mark) in enumerate(zip(several, task.marks, strict=True)):
                batch = assemble(leaves) if plain else self._transformed(leaves, n, task, epoch)
                yield Made((batch,), (mark,), rows)
                del leaves, batch  # hold nothing that the caller may have let go

    def _crossed(self, task: GatherTask, count: int, rows: int, epoch: int) -> Iterator[Made]:
        """The batches of a task on the device, ``count`` of them in each crossing."""
        for first in range(0, len(task.marks), count):
            marks = task.marks[first : first + count]
            ids = task.ids[first * task.size : (first + count) * task.size]
            with self.crossing.aside():
                self.crossing.begin()
                leaves = self.crossing.send(self.gather(ids), self.placement.index(ids))
                event = self.crossing.mark()
            if self._bare:
                device = self.crossing.device if self.tensordicts else None
                several = split(leaves, task.size, count) if count > 1 else iter([leaves])
                arrive = self.crossing.arrive, self.crossing.current
                yield Made(_received(several, leaves, event, *arrive, self.assemble, device), marks, rows)
                del leaves, several
                continue
            each = split(leaves, task.size, count) if count > 1 else iter([leaves])
            del leaves
            for n, (part, mark) in enumerate(zip(each, marks, strict=True), first):
                batch = self._transformed(part, n, task, epoch)
                del part
                yield Made((batch,), (mark,), rows)
                del batch

    def _transformed(self, leaves: Any, number: int, task: GatherTask, epoch: int) -> Any:
        """A task's n-th batch, after a transform of ours or with the keys for it: what ``finish`` takes."""
        part = slice(number * task.size, (number + 1) * task.size)
        keys, crossing = None, self.crossing
        if self.keyed is not None:
            # a row that comes twice in an epoch must differ: its position tells the visits apart
            visit: Any = 0 if task.positions is None else torch.from_numpy(task.positions[part])
            keys = Keys(self.seed, epoch, torch.from_numpy(task.ids[part].astype(np.int64, copy=False)), visit)
        valid = None if task.valid is None else task.valid[part].clone()
        with crossing.aside():
            batch = self.assemble(leaves)
            if crossing.slabs and crossing.device is not None:  # the mask, and where TensorDicts say that they are
                batch, valid = to_device((batch, valid), crossing.device)
            if keys is not None and self.keyed is not None and self.anywhere and crossing.ahead:
                batch, keys = self.keyed(batch, keys), None
            return (batch, keys, valid, crossing.mark()) if self.finishes else batch

    def finish(self, batch: Any, keys: Keys | None, valid: torch.Tensor | None, event: Event | None) -> Any:
        """What is done in the caller's thread, since it is the user's code, or needs the device's current stream."""
        batch, valid = self.crossing.arrive((batch, valid), event)
        if keys is not None and self.keyed is not None:
            batch = self.keyed(batch, keys)
        if self.plain is not None:
            batch = self.plain(batch, None)
        return batch if valid is None else with_valid(batch, valid)


def _received(
    several: Iterator[Sequence[Any]],
    leaves: Sequence[Any],
    event: Event | None,
    arrive: Arrive,
    current: Callable[[], object],
    assemble: Callable[[Any], Any],
    device: torch.device | None,
) -> Iterator[Any]:
    """The batches of one crossing, whose leaves together are ``leaves``, in the caller's thread.

    Nothing here holds a column: it may have to make room. TensorDicts are told that they are on ``device``.
    """
    ready: object = _NOWHERE
    for part in several:
        now = current()
        if now != ready:  # the first batch, or the caller is on another stream than before
            arrive(leaves, event)
            ready = now
        batch = assemble(part)
        if device is not None:
            batch = to_device(batch, device)
        del part
        yield batch
        del batch


def with_valid(batch: Any, valid: torch.Tensor) -> Any:
    """A dict or TensorDict gets the key "valid", any other batch becomes (batch, valid); bool [k]."""
    if isinstance(batch, dict):
        return {**batch, "valid": valid}
    if isinstance(batch, TensorDictBase):
        return batch.set("valid", valid)
    return batch, valid


def ahead_here(made: Iterator[Made], prefetch: int) -> Iterator[Made]:
    """The same, so many ahead of the caller without a thread: what a GPU was told to do, it does meanwhile."""
    held: deque[Made] = deque()
    for one in made:
        held.append(one)
        if len(held) > prefetch:
            yield held.popleft()
    while held:
        yield held.popleft()


def read_ahead(tasks: Iterator[GatherTask], reader: ReadAhead) -> Iterator[GatherTask]:
    """The tasks, their rows announced to the kernel by a thread, as far ahead as the disk needs."""

    def announced() -> Iterator[tuple[GatherTask, int]]:
        for task in tasks:
            yield task, reader.announce(task.ids)

    thread = Background(announced(), min(LEAST_AHEAD, reader.most_ahead), weight=lambda item: item[1])
    try:
        for task, _ in thread:
            if thread.limit < reader.most_ahead and not reader.ready(task.ids):
                thread.limit = min(2 * thread.limit, reader.most_ahead)
            yield task
    finally:
        thread.stop()


def read_ahead_here(tasks: Iterator[GatherTask], reader: ReadAhead) -> Iterator[GatherTask]:
    """The same without a thread: a user's sampler is called in the caller's."""
    held: deque[GatherTask] = deque()
    for task in tasks:
        reader.announce(task.ids)
        held.append(task)
        if len(held) > SAMPLER_AHEAD:
            yield held.popleft()
    yield from held


def drop_behind(
    tasks: Iterator[GatherTask], reader: ReadAhead, begin: int, passed: Passed | None
) -> Iterator[GatherTask]:
    """The tasks; once a task is done with, rows that the epoch will not visit again leave the page cache."""
    for task in tasks:
        yield task
        end = task.marks[-1]
        runs = passed(begin, end) if passed is not None and isinstance(end, int) else ()
        reader.drop(task.ids, runs)
        begin = end if isinstance(end, int) else 0
