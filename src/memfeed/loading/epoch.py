"""One epoch as it runs: who makes the batches (the caller, or a thread ahead of it), and how far it has come."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from memfeed.loading.background import Background
from memfeed.loading.pipeline import Made
from memfeed.loading.prefetch_policy import PrefetchPolicy
from memfeed.loading.tasks import Mark


@dataclass(eq=False)
class Place:
    """How far an epoch has come, and what it cost so far; outlives the iterator.

    Args:
        epoch: its number.
        begin: where it began; None at the beginning, unless it was resumed.
        mark: the place behind the last batch that ``next`` returned.
        finished: whether the end was reached.
        moved: ``mark`` was changed from outside; the iterator goes on from there.
        batches, samples: given so far by this iterator.
        seconds: from the first batch to the last.
        wait_seconds: the part of that which ``next`` took.
    """

    epoch: int
    begin: Mark | None
    mark: Mark | None
    finished: bool = False
    moved: bool = False
    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0


_places: weakref.WeakSet[Place] = weakref.WeakSet()
_forked = False


def _after_fork() -> None:
    # threads do not live on in a child: its epochs are gone on with by new ones
    global _forked
    _forked = True
    for place in _places:
        place.moved = True


os.register_at_fork(after_in_child=_after_fork)


def run(
    place: Place,
    start: Callable[[Mark | None], Iterator[Made]],
    finish: Callable[..., Any] | None,
    pace: PrefetchPolicy,
    prefetch: int,
) -> Iterator[Any]:
    """The batches of an epoch from ``place.mark`` on; ``place`` moves with them.

    ``start`` makes what is behind a mark; it is called again after a move, and in a forked child. ``finish`` does what
    has to be done in the caller's thread. ``prefetch`` is how far a thread may be ahead if ``pace`` finds one worth
    it.
    """
    _places.add(place)
    pace.begin()
    asked = 0.0
    while not place.finished:
        place.moved = False
        here = start(place.mark)
        if _forked:
            here, finish = _alone(here, finish), None
        source: Iterator[Made] = Background(here, prefetch) if pace.threaded else here
        while True:
            entered = perf_counter()
            for made in source:
                got, changed = perf_counter(), False
                if asked:  # the clock of an epoch begins with its first batch
                    place.seconds += got - asked
                    place.wait_seconds += got - entered
                    changed = not pace.settled and pace.note(got - entered, entered - asked)
                asked = got
                batches = made.batches if finish is None else itertools.starmap(finish, made.batches)
                for batch, mark in zip(batches, made.marks, strict=True):
                    place.mark = mark
                    place.batches += 1
                    place.samples += made.rows
                    yield batch
                    if place.moved:
                        break
                del made, batches, batch  # the caller may have let them go
                if changed and isinstance(source, Background):
                    source.stop()  # what it made already still comes
                    changed = False
                if place.moved or changed:
                    break
                entered = perf_counter()
            else:
                place.finished = source is here
                if not place.finished:
                    source = here  # behind what the thread has made
                    continue
            if place.moved or place.finished:
                break
            source = Background(here, prefetch)


def _alone(source: Iterator[Made], finish: Callable[..., Any] | None) -> Iterator[Made]:
    """The same in a forked child, where OpenMP waits for threads that only its parent has."""
    while True:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            made = next(source, None)
            if made is None:
                return
            done = list(made.batches if finish is None else itertools.starmap(finish, made.batches))
        finally:
            torch.set_num_threads(threads)
        yield made._replace(batches=done)
