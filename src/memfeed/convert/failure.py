"""Exceptions that a worker process sends to another process, with their causes."""

from __future__ import annotations

import pickle
import traceback
from typing import NamedTuple

from memfeed.errors import MemfeedError


class Failure(NamedTuple):
    """An exception that a worker sends, and its cause."""

    error: Exception
    cause: Exception | None


def failure_of(error: Exception) -> Failure:
    """Return `error` in a form that can be sent. A MemfeedError keeps its cause; others get their traceback as one."""
    cause = error.__cause__ if isinstance(error, MemfeedError) else _traceback_of(error)
    return Failure(_picklable(error), None if cause is None else _picklable(cause))


def _picklable(error: BaseException) -> Exception:
    """Return `error` itself if it survives pickling, else a RuntimeError with its traceback."""
    try:
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # any class can break pickling in its own way
        pass
    return _traceback_of(error)


def _traceback_of(error: BaseException) -> RuntimeError:
    return RuntimeError("".join(traceback.format_exception(error)))
