"""The first batches of the next epoch, made in the loader's thread while the caller takes the last ones of this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from memfeed.loading.background import Background
from memfeed.loading.batch_groups import BatchGroup

KEPT_SECONDS = 10.0  # that batches wait for an epoch which may never begin, as that of a loader for validation


@dataclass(frozen=True, eq=False)
class NextEpoch:
    """Stands between the groups of two epochs that one thread makes.

    Args:
        key: what the batches follow from: all that says which ones they are.
        groups: those of the epoch, from its beginning.
        gathered_before: bytes that were gathered before it.
        after: returns the epoch after it; None where there is to be none.
    """

    key: tuple[Any, ...]
    groups: Iterator[BatchGroup]
    gathered_before: int
    after: Callable[[], NextEpoch | None]


class Identity:
    """Equal to another one of the same object, whatever that says itself."""

    def __init__(self, value: object) -> None:
        self._value = value  # kept, so that no other object gets its id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


Made = BatchGroup | NextEpoch


def joined(groups: Iterator[BatchGroup], after: Callable[[], NextEpoch | None]) -> Iterator[Made]:
    """Yield the groups of an epoch, then those of the epochs after it, each after its `NextEpoch`."""
    yield from groups
    while (coming := after()) is not None:
        yield coming
        yield from coming.groups
        after = coming.after


class BegunEarly(NamedTuple):
    """An epoch of which a thread makes the batches already.

    Args:
        coming: the epoch.
        thread: its next items are the groups of the epoch.
        groups: what the thread reads; they continue where the thread is stopped.
    """

    coming: NextEpoch
    thread: Background[Made]
    groups: Iterator[Made]


class PrefetchSlot:
    """Keeps the thread that has begun the next epoch, until that begins or its batches are given up."""

    def __init__(self) -> None:
        self._held: tuple[BegunEarly, int] | None = None

    def give(self, begun: BegunEarly) -> None:
        """Keep a thread that has begun an epoch; after some seconds its batches are dropped."""
        begun.thread.expire_after(KEPT_SECONDS)
        self._held = begun, os.getpid()

    def take(self, key: tuple[Any, ...]) -> BegunEarly | None:
        """Return what has begun the epoch of this key; None, and stop the thread, if it has begun another one."""
        held, self._held = self._held, None
        if held is None:
            return None
        begun, pid = held
        if begun.coming.key == key and pid == os.getpid() and begun.thread.claim():
            return begun
        begun.thread.stop()
        return None
