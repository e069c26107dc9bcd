"""Threads of OpenMP, which torch uses: their number, and forked children, which lack them.

`torch.set_num_threads` also changes what threads that start later get, and drops what oneDNN has cached.

A forked child lacks the threads of its parent; OpenMP would wait for them for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch


@functools.cache
def _openmp() -> Any:
    """Return the OpenMP library that torch uses; None where there is none, or it cannot be called."""
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        library: Any = ctypes.PyDLL(str(Path(torch.__file__).with_name("lib") / name))  # finds what it links to
        before = torch.get_num_threads()
        if library.omp_get_max_threads() != before:
            return None
        library.omp_set_num_threads(before + 1)
        found = torch.get_num_threads()  # does torch follow the number that this library is given?
        library.omp_set_num_threads(before)
    except (OSError, AttributeError):
        return None
    return library if found == before + 1 else None


def can_limit() -> bool:
    """Return True if the number of threads can be set for one thread alone."""
    return _openmp() is not None


def use_one_thread() -> None:
    """Let torch use one thread in the calling thread from now on. Without effect where it `can_limit` none."""
    torch.get_num_threads()  # torch sets the number at its first use in a thread, and would undo this
    if (library := _openmp()) is not None:
        library.omp_set_num_threads(1)


@contextlib.contextmanager
def at_most(threads: int) -> Iterator[None]:
    """Let torch use no more threads than this in the calling thread during the block, where it `can_limit` them."""
    before, library = torch.get_num_threads(), _openmp()
    if library is None or before <= threads:
        yield
        return
    library.omp_set_num_threads(threads)
    try:
        yield
    finally:
        library.omp_set_num_threads(before)


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
