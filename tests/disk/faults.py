"""A disk that fails: the k-th operation is refused, or writes only part of its bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from disk.watch import Operation, watched

_TAKES_ROOM = {"create", "write", "truncate", "reserve", "sync", "rename", "link", "mkdir"}


class Faults:
    """Make one operation of this process on files fail with the errno ``code`` within the block.

    ``at`` is its index, counted from 0, or a function that returns True for it (where threads write at once, the index
    differs from run to run). Without ``at`` nothing fails, and ``operations`` lists those that could. ``code=0`` is a
    short write: the first write from there on takes only half of its bytes. With ``lasting``, all later operations
    that a full disk would refuse fail too: files can still be removed.

    Example::

        with Faults(at=7, code=errno.ENOSPC) as faults:
            memfeed.cache(dataset, path)  # raises SpaceError
    """

    def __init__(
        self, at: int | Callable[[Operation], bool] | None = None, code: int = 0, *, lasting: bool = False
    ) -> None:
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
        index = len(self.operations)
        self.operations.append(operation)
        if callable(self.at) and self.at(operation):
            self.at = index
        if not isinstance(self.at, int) or index < self.at:
            return do()
        if self.code == 0:
            if self.failed is None and operation.kind == "write" and len(operation.data) > 1:
                self.failed = operation
                return do(len(operation.data) // 2)
            return do()
        if index == self.at or (self.lasting and operation.kind in _TAKES_ROOM):
            self.failed = self.failed or operation
            raise OSError(self.code, os.strerror(self.code), operation.path)
        return do()
