"""The thread of a process that serves a cache directory: it syncs it, fetches for forked children, and commits it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref

from memfeed.errors import MemfeedError
from memfeed.remote.children import ChildRequests
from memfeed.remote.directory import CacheDirectory
from memfeed.remote.fetching import Fetching
from memfeed.schema.codec import Int64Array
from memfeed.store.backing import Backing
from memfeed.system.progress import write_line
from memfeed.system.threads import end_at_exit

TICK_SECONDS = 0.25
SYNC_SECONDS = 30.0
END_SECONDS = 60.0  # that the end of a process waits for a commit; the next process makes up for what is left


class CacheService:
    """Serves the cache ``directory`` of this process. ``is_done`` is set once it is a store like any other.

    Its threads hold this object. It holds nothing of a supply, which can then be freed.
    """

    def __init__(self, directory: CacheDirectory, fetching: Fetching) -> None:
        self.directory, self.fetching, self.children = directory, fetching, ChildRequests()
        self.is_done = threading.Event()
        self._pid, self._directory_pid = os.getpid(), os.getpid()
        self._stopping, self._completing = threading.Event(), threading.Lock()
        self._backings: weakref.WeakSet[Backing] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._has_said = False  # why the cache is not completed

    def is_elsewhere(self) -> bool:
        """Return True in a forked child, which has neither threads nor connections."""
        if (pid := os.getpid()) != self._directory_pid:
            self.directory.reopen()
            self._directory_pid = pid
        return pid != self._pid

    def start(self) -> None:
        """Start the threads, unless they run. The caller has ``changed`` of the fetching."""
        self.fetching.start()
        if self._thread is None:
            end_at_exit(self)
            self._thread = threading.Thread(target=self._run, name="memfeed-cache", daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Let the threads end."""
        if os.getpid() == self._pid:
            self._stopping.set()
            self.fetching.stop()
            if self._thread is None:
                self.directory.leave()

    def join(self) -> None:
        """Wait until the requests that are under way have ended, and a commit."""
        if os.getpid() == self._pid:
            self.fetching.join()
            if self._completing.acquire(timeout=END_SECONDS):
                self._completing.release()

    def follow(self, backing: Backing) -> None:
        """Let ``backing`` read the finished store once there is one."""
        self._backings.add(backing)
        if self.is_done.is_set():
            _switch(backing)

    def complete(self) -> None:
        """Make the cache a store like any other. All of it is there."""
        with self._completing:
            if not self.is_done.is_set() and not self._stopping.is_set():
                self.directory.commit()
                self.is_done.set()
                for backing in list(self._backings):
                    _switch(backing)

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self.fetching.join()
            with contextlib.suppress(MemfeedError, OSError):  # the directory may have been removed
                self.directory.sync()
            self.directory.leave()

    def _serve(self) -> None:
        sync_due, complete_due = time.monotonic() + SYNC_SECONDS, 0.0
        while not self._stopping.is_set() and not self.is_done.is_set():
            chunks = self.children.receive(TICK_SECONDS)
            if len(chunks):
                self._fetch_for_children(chunks)
            now = time.monotonic()
            try:
                if now > sync_due:
                    sync_due = now + SYNC_SECONDS
                    self.directory.sync()
                if now > complete_due and self.directory.settings.size is None and self.directory.is_complete():
                    complete_due = now + SYNC_SECONDS
                    self.complete()
            except (MemfeedError, OSError) as error:  # rows are read all the same, and children need this thread
                self._say_once(error)

    def _fetch_for_children(self, chunks: Int64Array) -> None:
        with self.fetching.changed:
            errors = self.fetching.queue.failed
            failed = [errors[chunk] for chunk in chunks.tolist() if chunk in errors]
        for error in failed:
            self.children.report(error)
        self.fetching.ask(chunks[self.directory.are_absent(chunks)])

    def _say_once(self, error: Exception) -> None:
        """Tell the user why the cache is no store yet, unless its directory was removed."""
        if not self._has_said and self.directory.root.exists():
            self._has_said = True
            write_line(f"memfeed: {error}. The cache is used as it is; this is tried again every {SYNC_SECONDS:.0f} s")


def _switch(backing: Backing) -> None:
    backing.supply = backing.remake = None
