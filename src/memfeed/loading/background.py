"""An iterator that runs ahead in a thread: bounded, stoppable at any moment, its exceptions raised in the reader."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

from memfeed.errors import LoaderError
from memfeed.system import openmp
from memfeed.system.threads import end_at_exit

PAUSED = (
    "found next() within paused(), and no batch that is ready; expected the loop to go on after the block, in which "
    "the loader's thread makes no batches"
)
T = TypeVar("T")


class PausedError(LoaderError):
    """A batch was asked for while no thread may make one. It comes after the pause."""


PATIENCE_SECONDS = 0.5  # how often a waiting side checks that the other is alive
EXIT_SECONDS = 5.0  # that the end of the interpreter waits for a thread


class Pause:
    """Threads do each piece of work within ``working``; ``paused`` waits for these, and keeps new ones waiting."""

    def __init__(self) -> None:
        self._begin_anew()
        _pauses.add(self)

    def _begin_anew(self) -> None:
        self._changed = threading.Condition()
        self._working = 0
        self._paused_by: list[int] = []

    @property
    def is_paused_by_me(self) -> bool:
        """Return True within a ``paused`` block of the calling thread."""
        return threading.get_ident() in self._paused_by

    @contextmanager
    def working(self) -> Iterator[None]:
        """Wait until nobody pauses; then count as working."""
        changed = self._changed
        with changed:
            changed.wait_for(lambda: not self._paused_by)
            self._working += 1
        try:
            yield
        finally:
            with changed:
                self._working -= 1
                changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait until nobody works; nobody begins to work before the end of the block."""
        changed = self._changed
        with changed:
            self._paused_by.append(threading.get_ident())
            changed.wait_for(lambda: not self._working)
        try:
            yield
        finally:
            with changed:
                self._paused_by.remove(threading.get_ident())
                changed.notify_all()


_pauses: weakref.WeakSet[Pause] = weakref.WeakSet()


def _after_fork() -> None:
    # a child has none of the threads that were working, and perhaps a lock that one of them held
    for pause in list(_pauses):
        pause._begin_anew()


os.register_at_fork(after_in_child=_after_fork)


class _Link:
    """The state that reader and thread share. The thread holds only this, so that dropping the reader ends it.

    It is a `ThreadedWork`: the thread ends before the interpreter does.
    """

    thread: threading.Thread

    def __init__(self, limit: float) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # what the thread waits for while it is ahead
        self.is_waiting = False
        self.items: deque[tuple[Any, float]] = deque()
        self.held, self.limit = 0.0, limit
        self.stopped = self.ended = False
        self.error: BaseException | None = None

    def stop(self) -> None:
        # no lock: the garbage collector may call this from within a locked section of the same thread
        self.stopped = True
        self.wake.put(None)

    def release(self, *, at_exit: bool = False) -> None:
        """See `ThreadedWork`."""
        self.stop()

    def join(self) -> None:
        """See `ThreadedWork`."""
        self.thread.join(EXIT_SECONDS)

    def make_room(self) -> None:
        """Let the thread see that there may be room. The caller holds the lock."""
        if self.is_waiting:
            self.is_waiting = False
            self.wake.put(None)

    def wait_for_room(self) -> None:
        """Wait until there is room for one more item, or none is wanted. For the thread."""
        while True:
            with self.changed:
                if self.stopped or not self.items or self.held < self.limit:
                    return
                self.is_waiting = True
            self.wake.get()


class Background(Generic[T]):
    """Iterate ``source`` in a thread of its own, up to ``limit`` ahead.

    Each item counts its ``weight`` against the limit; one item is always allowed. An exception in the source is raised
    by the ``next`` that would have returned the item, with its original traceback. The thread ends with the source, on
    ``stop``, when this object is dropped, and before the interpreter exits. In a forked child it does not exist;
    `memfeed.loading.epoch` starts new ones there. Within ``pause.paused()`` the thread makes no item.
    """

    def __init__(
        self,
        source: Iterator[T],
        limit: float,
        weight: Callable[[T], float] = lambda item: 1,
        pause: Pause | None = None,
    ) -> None:
        self._link, self._pause = _Link(limit), pause
        working = nullcontext if pause is None else pause.working
        arguments = (self._link, source, weight, working)
        self._thread = threading.Thread(target=_produce, args=arguments, name="memfeed", daemon=True)
        self._link.thread = self._thread
        weakref.finalize(self, self._link.stop).atexit = False
        self._thread.start()
        end_at_exit(self._link)

    @property
    def limit(self) -> float:
        """The weight of the items that may wait to be read; may be changed at any time."""
        return self._link.limit

    @limit.setter
    def limit(self, limit: float) -> None:
        with self._link.changed:
            self._link.limit = limit
            self._link.make_room()

    @property
    def ready(self) -> int:
        """The number of items that ``next`` can return without waiting."""
        return len(self._link.items)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        link = self._link
        with link.changed:
            while True:
                if link.items:
                    item, weight = link.items.popleft()
                    link.held -= weight
                    link.make_room()
                    return item  # type: ignore[no-any-return]
                if not link.ended and self._pause is not None and self._pause.is_paused_by_me:
                    raise PausedError(PAUSED)
                # do not wait for a thread that is gone, as in a forked child
                if link.ended or (not link.changed.wait(PATIENCE_SECONDS) and not self._thread.is_alive()):
                    break
            error, link.error = link.error, None
        self._thread.join()
        if error is not None:
            raise error
        raise StopIteration

    def stop(self) -> None:
        """Take no more from the source. Items that were made already are still returned; then the iterator ends.

        After that the caller may continue to read the source, which is where the last item left it.
        """
        self._link.stop()

    def close(self) -> None:
        """Stop, and wait until the thread has ended: at most for the item that it is making."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _produce(
    link: _Link,
    source: Iterator[Any],
    weight: Callable[[Any], float],
    working: Callable[[], AbstractContextManager[None]],
) -> None:
    openmp.use_one_thread()  # what is worth several is shared out: see memfeed.system.share
    try:
        while True:
            link.wait_for_room()
            if link.stopped:
                break
            with working():
                item = next(source)
            with link.changed:
                size = weight(item)
                link.items.append((item, size))
                link.held += size
                link.changed.notify_all()
            del item  # an idle thread must hold no batch
    except StopIteration:
        pass
    except BaseException as error:
        link.error = error
    finally:
        with link.changed:
            link.ended = True
            link.changed.notify_all()


def made_ahead(items: Iterator[T], count: int) -> Iterator[T]:
    """Yield ``items``, ``count`` of them made ahead in the caller's thread."""
    held: deque[T] = deque()
    for item in items:
        held.append(item)
        if len(held) > count:
            yield held.popleft()
    while held:
        yield held.popleft()
