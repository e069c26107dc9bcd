"""Which files a program opens, and removing files from the page cache, so that a disk is read again."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memfeed.system.mapped_memory import file_maps, page_out


@contextlib.contextmanager
def noted_files() -> Iterator[set[str]]:
    """Note the names of the files that Python opens for reading during the block, in this process.

    Files that a C library opens by itself are not seen.
    """
    found: set[str] = set()
    own = builtins.open

    def noting(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if isinstance(file, str | os.PathLike) and "r" in mode and "+" not in mode:
            found.add(os.fspath(file))
        return own(file, mode, *arguments, **options)

    builtins.open = io.open = noting  # pathlib calls that of io
    try:
        yield found
    finally:
        builtins.open = io.open = own


def files_below(folder: Path) -> list[str]:
    """Return all files below a directory."""
    return [os.path.join(top, name) for top, _, names in os.walk(folder) for name in names]


def evict(files: Iterable[str]) -> None:
    """Remove files from the page cache, where the system can. Pages that another process has mapped stay."""
    wanted = {os.path.realpath(name) for name in files}
    for start, end, path in list(file_maps()):
        if path in wanted:
            page_out(start, end - start)
    for name in wanted if hasattr(os, "posix_fadvise") else ():
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDONLY)
            try:
                os.fsync(fd)  # pages that are not yet written would stay
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def size_of(files: Iterable[str]) -> int:
    """Return the bytes of these files on disk; those that are gone count as none."""
    total = 0
    for name in files:
        with contextlib.suppress(OSError):
            found = os.stat(name)
            total += min(found.st_size, found.st_blocks * 512)
    return total
