"""The threads that torch's own operations use in the calling thread: OpenMP keeps their number for each thread.

`torch.set_num_threads` also changes what threads that start later get, and drops what oneDNN has cached.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


@functools.cache
def _openmp() -> Any:
    """Return the OpenMP library that torch uses; None where there is none, or it cannot be called."""
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        library: Any = ctypes.PyDLL(str(Path(torch.__file__).with_name("lib") / name))  # finds what it links to
        works = library.omp_get_max_threads() == torch.get_num_threads() and _can_set(library)
    except (OSError, AttributeError):
        return None
    return library if works else None


def _can_set(library: Any) -> bool:
    """Return True if torch follows the number that this library is given."""
    before = torch.get_num_threads()
    library.omp_set_num_threads(before + 1)
    found = torch.get_num_threads()
    library.omp_set_num_threads(before)
    return found == before + 1


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
