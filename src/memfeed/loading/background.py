"""An iterator that runs ahead in a thread: bounded, stoppable at any moment, its exceptions raised where it is read."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
PATIENCE_SECONDS = 0.5  # how often a wait looks whether the other side is still alive


class _Link:
    """What the two sides share. The thread holds this alone, so that dropping the reader ends the thread."""

    def __init__(self, limit: float) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.items: deque[tuple[Any, float]] = deque()
        self.held, self.limit = 0.0, limit
        self.stopped = self.ended = False
        self.error: BaseException | None = None

    def stop(self) -> None:
        # no lock: the garbage collector may call this from within a locked section of the same thread
        self.stopped = True


class Background(Generic[T]):
    """Iterates ``source`` in a thread of its own, up to ``limit`` ahead.

    What an item counts against the limit is its ``weight``; one item is always allowed. An exception in the source is
    raised by the ``next`` that would have given the item, with the traceback it has there. The thread ends with the
    source, on ``stop``, when this object is dropped, and before the interpreter exits. In a forked child it does not
    exist; `memfeed.loading.epoch` starts others there.
    """

    def __init__(self, source: Iterator[T], limit: float, weight: Callable[[T], float] = lambda item: 1) -> None:
        self._link, self._pid = _Link(limit), os.getpid()
        self._thread = threading.Thread(target=_produce, args=(self._link, source, weight), name="memfeed", daemon=True)
        weakref.finalize(self, self._link.stop).atexit = False
        _running.add(self._thread, self._link)
        self._thread.start()

    @property
    def limit(self) -> float:
        """How far ahead the thread may be; may be changed at any time."""
        return self._link.limit

    @limit.setter
    def limit(self, limit: float) -> None:
        with self._link.changed:
            self._link.limit = limit
            self._link.changed.notify_all()

    @property
    def ready(self) -> int:
        """How many items could be had without waiting."""
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
                    link.changed.notify_all()
                    return item  # type: ignore[no-any-return]
                # a thread that died without a word, as in a forked child, must not be waited for
                if link.ended or (not link.changed.wait(PATIENCE_SECONDS) and not self._thread.is_alive()):
                    break
            error, link.error = link.error, None
        self._thread.join()
        if error is not None:
            raise error
        raise StopIteration

    def stop(self) -> None:
        """Takes no more from the source. What was made already is still given; then comes the end.

        After that the source is where the last item left it, and may be read on by the caller.
        """
        self._link.stop()
        if os.getpid() == self._pid:  # in a forked child the thread is gone, perhaps with the lock
            with self._link.changed:
                self._link.changed.notify_all()

    def close(self) -> None:
        """Stops and waits until the thread has ended, at most for the item in the making."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _produce(link: _Link, source: Iterator[Any], weight: Callable[[Any], float]) -> None:
    try:
        while True:
            with link.changed:
                while link.items and link.held >= link.limit and not link.stopped:
                    link.changed.wait(PATIENCE_SECONDS)
            if link.stopped:
                break
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


class _Running:
    """The threads that run, to be ended before the interpreter exits: a thread within torch's code then would abort
    it."""

    def __init__(self) -> None:
        self._threads: weakref.WeakKeyDictionary[threading.Thread, _Link] = weakref.WeakKeyDictionary()
        self._registered = False

    def add(self, thread: threading.Thread, link: _Link) -> None:
        if not self._registered:
            atexit.register(self._end)
            self._registered = True
        self._threads[thread] = link

    def _end(self) -> None:
        threads = list(self._threads.items())
        for _, link in threads:
            link.stop()
        for thread, _ in threads:
            if thread.is_alive():
                thread.join(5)


_running = _Running()
