"""Run in a forked child, which lacks the threads of its parent, those of OpenMP included.

OpenMP would wait for them for ever.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
_is_child = False


def _after_fork() -> None:
    global _is_child
    _is_child = True


os.register_at_fork(after_in_child=_after_fork)


def is_child() -> bool:
    """Return True in a process that was forked after memfeed was imported."""
    return _is_child


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Let torch use one thread during the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fork_safe(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that copies tensors, so that it uses one thread in a forked child."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        if not _is_child:
            return function(*arguments, **options)
        with on_one_thread():
            return function(*arguments, **options)

    return call
