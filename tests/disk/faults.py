"""A disk that refuses: the k-th operation fails, or takes only part of what it is given."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from disk.watch import Operation, watched

_TAKES_ROOM = {"create", "write", "truncate", "reserve", "sync", "rename", "link", "mkdir"}


class Faults:
    """Within the block operation number ``at`` of this process on files (from 0) fails with the errno ``code``.

    Without ``at`` nothing fails, and ``operations`` tells what there was to fail. ``code=0`` is a short write: the
    first write from there on takes only half of its bytes. With ``lasting``, all operations from there on fail that a
    full disk would refuse: what removes files goes on.

    Example::

        with Faults(at=7, code=errno.ENOSPC) as faults:
            memfeed.cache(dataset, path)  # raises SpaceError
    """

    def __init__(self, at: int | None = None, code: int = 0, *, lasting: bool = False) -> None:
        self.at, self.code, self.lasting = at, code, lasting
        self.operations: list[Operation] = []
        self.failed: Operation | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Faults:
        self._stack.enter_context(watched(self._each))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def _each(self, operation: Operation, do: Callable[..., Any]) -> Any:
        number = len(self.operations)
        self.operations.append(operation)
        if self.at is None or number < self.at:
            return do()
        if self.code == 0:
            if self.failed is None and operation.kind == "write" and len(operation.data) > 1:
                self.failed = operation
                return do(len(operation.data) // 2)
            return do()
        if number == self.at or (self.lasting and operation.kind in _TAKES_ROOM):
            self.failed = self.failed or operation
            raise OSError(self.code, os.strerror(self.code), operation.path)
        return do()
