"""One epoch as it runs: the caller or a thread makes the batches, and the progress is counted.

It is measured, then settled, who makes batches: a thread ahead of the caller, or the caller when it asks.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from memfeed.errors import LoaderError
from memfeed.loading.background import Background, Pause, PausedError
from memfeed.loading.gather_tasks import BatchGroup
from memfeed.loading.position import Position, SamplerPosition
from memfeed.system import openmp
from memfeed.system.messages import say_once
from memfeed.system.signals import is_of_handler
from memfeed.system.threads import has_no_thread

MEASURED_BATCHES = 12
LEAST_SECONDS = 0.03  # of a measurement: shorter ones are noise
LEAST_GAIN = 0.1  # a thread is tried if it could save at least this share of the time
KEPT_EPOCHS = 8  # that begin before it is measured again, because the loop around a loader may change
MOST_TIME = 0.95  # a thread is kept if a batch takes at most this share of the time without one


class PrefetchPolicy:
    """Measures how long the caller waited for each batch, and how long it was busy before it asked for the next.

    A thread can hide the shorter of the two times in the longer. If that would save enough, a thread is tried, and kept
    if batches then come faster. They do not where the caller needs all cores itself. ``always`` uses a thread without
    measuring: with a GPU, the caller does not wait for the CPU.
    """

    def __init__(self, allowed: bool, always: bool = False) -> None:
        self.threaded, self.settled, self._measured = allowed and always, always or not allowed, False
        self._batches, self._wait, self._busy = 0, 0.0, 0.0
        self._alone, self._kept = 0.0, 0

    def __str__(self) -> str:
        if not self.settled:
            return "measuring"
        return "made ahead in a thread" if self.threaded else "made when asked for"

    def begin(self) -> None:
        """Keep what was found for some epochs, then measure again.

        A measurement that an epoch was too short for continues in the next.
        """
        self._kept += self._measured
        if self._kept < KEPT_EPOCHS:
            return
        self.threaded, self.settled, self._measured, self._kept = False, False, False, 0
        self._batches, self._wait, self._busy = 0, 0.0, 0.0

    def note(self, wait: float, busy: float) -> bool:
        """Count one batch: seconds waited for it, seconds busy before it. Return True if ``threaded`` has changed."""
        self._batches += 1
        if self._batches <= 2:  # the first ones page in buffers and start the thread
            return False
        self._wait, self._busy = self._wait + wait, self._busy + busy
        total = self._wait + self._busy
        if self._batches < MEASURED_BATCHES + 2 or total < LEAST_SECONDS:
            return False
        a_batch = total / (self._batches - 2)
        hidden = min(self._wait, self._busy) / total
        self._batches, self._wait, self._busy = 0, 0.0, 0.0
        if self.threaded:
            self.settled, self._measured, self.threaded = True, True, a_batch < MOST_TIME * self._alone
            return not self.threaded
        if hidden < LEAST_GAIN:
            self.settled = self._measured = True
            return False
        self._alone, self.threaded = a_batch, True
        return True


@dataclass(eq=False)
class EpochProgress:
    """How far an epoch has come, and what it cost so far. Outlives the iterator.

    Args:
        epoch: its number.
        begin: the position it began at; None is the beginning.
        position: the position reached after the last batch that ``next`` returned.
        iterator: the iterator that gives it, as a weak reference.
        finished: whether the end was reached.
        moved: ``position`` was changed from outside, and the iterator continues from there.
        failed: batches after ``position`` that raised an exception in place of being given.
        has_workers: what a handler of signals raises (``signal.alarm``) is no error of a batch: DataLoader's workers
            make it meanwhile.
        batches, samples: given so far by this iterator.
        seconds: from the first batch to the last.
        wait_seconds: the part of that which ``next`` took.
    """

    epoch: int = -1
    begin: Position | None = None
    position: Position | None = None
    iterator: weakref.ref[Iterator[Any]] | None = None
    finished: bool = False
    moved: bool = False
    failed: int = 0
    has_workers: bool = False
    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def is_running(self) -> bool:
        """Return True while the iterator is held by somebody."""
        return self.iterator is not None and self.iterator() is not None


class IteratorPickledError(LoaderError, NotImplementedError):
    """An iterator was to be pickled or copied; DataLoader's raises NotImplementedError."""


class EpochIterator(itertools.chain[Any], _BaseDataLoaderIter):
    """The batches of an epoch, with the length of a whole one. A chain adds no Python to each batch.

    Trainers know an iterator of DataLoader by its class: Lightning leaves it out where it pickles its loaders.
    """

    length: Callable[[], int]

    def __init__(self, batches: Iterator[Any]) -> None:
        pass  # a chain takes its parts when it is made; what DataLoader's iterator holds is not here

    def __len__(self) -> int:
        return self.length()

    def __reduce__(self) -> NoReturn:
        raise IteratorPickledError(
            "found a pickle or a copy of an iterator of a Loader, which cannot be pickled; expected one of the loader "
            "itself, which continues after the last batch: pickle.dumps(loader), or keep loader.state_dict()"
        )


_running: weakref.WeakSet[EpochProgress] = weakref.WeakSet()


def _after_fork() -> None:
    # threads do not exist in a child: its epochs are continued by new ones
    for progress in _running:
        progress.moved = True


os.register_at_fork(after_in_child=_after_fork)


Start = Callable[[Position | None, int], Iterator[BatchGroup]]
"""Returns what makes the batches of an epoch after a position, without some that failed."""


def runs_of_epoch(progress: EpochProgress, run: Callable[[], Iterator[Any]]) -> Iterator[Iterator[Any]]:
    """Iterate over what ``run`` gives of the batches of an epoch: once, and again whenever an exception ended it.

    So an iterator goes on after one, as DataLoader's does: after the batch that failed, or with the batch that an
    interrupt, or a time limit of the caller, kept from the caller. No line of Python runs here: a signal that comes in
    one would end a generator, and with it the epoch.
    """
    unfinished = iter(partial(getattr, progress, "finished"), True)
    return map(itemgetter(1), zip(unfinished, iter(run, None), strict=False))


def run_epoch(
    progress: EpochProgress,
    begin: Callable[[EpochProgress], Start],
    policy_now: Callable[[], PrefetchPolicy],
    prefetch: int,
    pause: Pause,
) -> Iterator[Any]:
    """Yield the batches of an epoch from ``progress.position`` on, and keep ``progress`` up to date.

    ``begin`` is called when the first batch is asked for. It sets the epoch and its position; in later runs it returns
    what it did in the first. That is called again after a move, after an exception, and in a forked child. A thread
    makes up to ``prefetch`` groups ahead if the policy finds one worth it, except while ``pause`` is paused.
    """
    start = begin(progress)
    policy = policy_now()
    _running.add(progress)
    policy.begin()
    asked = 0.0
    source: Iterator[BatchGroup] | None = None
    try:
        while not progress.finished:
            progress.moved = False
            groups = start(progress.position, progress.failed)
            if openmp.is_child():
                groups = _on_one_thread(groups)
            source = _ahead(groups, prefetch, pause) if policy.threaded else groups
            while True:
                entered = perf_counter()
                for group in iter(partial(_next_group, source), None):
                    got, changed = perf_counter(), False
                    if asked:  # the clock of an epoch begins with its first batch
                        progress.seconds += got - asked
                        progress.wait_seconds += got - entered
                        changed = not policy.settled and policy.note(got - entered, entered - asked)
                    asked = got
                    for batch, position in zip(group.batches, group.positions, strict=True):
                        progress.position, progress.failed = position, 0
                        progress.batches += 1
                        progress.samples += group.row_count
                        yield batch
                        if progress.moved:
                            break
                    del group, batch  # the caller may have dropped them
                    if changed and isinstance(source, Background):
                        source.stop()  # what it made already is still given
                        changed = False
                    if progress.moved or changed:
                        break
                    entered = perf_counter()
                else:
                    progress.finished = source is groups
                    if not progress.finished:
                        source = groups  # what comes after the thread's batches
                        continue
                    _tell_of_nothing_left(progress)
                if progress.moved or progress.finished:
                    break
                source = _ahead(groups, prefetch, pause)
    except GeneratorExit:
        raise
    except BaseException as error:
        if isinstance(source, Background):
            source.stop()  # a traceback that is kept would keep its thread
        is_of_batch = isinstance(error, Exception) and not isinstance(error, PausedError)
        progress.failed += is_of_batch and not (progress.has_workers and is_of_handler(error))
        raise


def _tell_of_nothing_left(progress: EpochProgress) -> None:
    """Say that a pass over a user's sampler began at the end of its epoch. A trainer may take it for a new epoch."""
    if isinstance(progress.begin, SamplerPosition) and not progress.batches:
        say_once(
            "memfeed: a pass had no batch, because the state that was loaded is that of the last batch of epoch "
            f"{progress.epoch}. Lightning takes it for the epoch after that: save the state after another batch, or "
            "pass shuffle= in place of a sampler"
        )


def _next_group(source: Iterator[BatchGroup]) -> BatchGroup | None:
    """Return the next group; None at the end.

    It may hold several batches, of which the caller takes the last ones after it has left its inference mode.
    """
    if not torch.is_inference_mode_enabled():
        return next(source, None)
    with torch.inference_mode(False), torch.no_grad():
        return next(source, None)


def _ahead(groups: Iterator[BatchGroup], prefetch: int, pause: Pause) -> Iterator[BatchGroup]:
    """Iterate in a thread of its own; in the caller's if the system gives no more threads."""
    try:
        return Background(groups, prefetch, pause=pause)
    except RuntimeError as error:
        if not has_no_thread(error):
            raise
        return groups


def _on_one_thread(groups: Iterator[BatchGroup]) -> Iterator[BatchGroup]:
    while True:
        with openmp.on_one_thread():
            group = next(groups, None)
            if group is None:
                return
            batches = list(group.batches)
        yield group._replace(batches=batches)
