"""Give the bytes of a whole file to a second one: as another name of it, as shared blocks, or as a copy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from memfeed.system import files, libc

_NO_LINKS = files.NO_SUPPORT | {errno.EPERM, errno.EXDEV, errno.EMLINK}


def link(path: Path, to: Path) -> bool:
    """Give a file a second name; return False if the file system does not support it."""
    try:
        os.link(path, to)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise files.refused(error, to, f"linking it to {path}") from error
    return True


def copy(path: Path, to: Path) -> None:
    """Create a file with the bytes of another; not synced."""
    with open(path, "rb") as source:
        size, done = os.fstat(source.fileno()).st_size, 0
        files.check_room(to, size, f"a copy of {path}")
        with files.opened(to, os.O_CREAT | os.O_TRUNC) as fd:
            while block := source.read(files.COPY_BYTES):
                done += files.write_at(fd, block, done)


def clone(path: Path, fd: int, offset: int = 0) -> bool:
    """Let an open file share the bytes of the file at ``path``, from byte ``offset`` on (a reflink).

    Returns False, and does nothing, if the file system cannot, or not at this offset: it must be a multiple of
    `files.BLOCK_BYTES`.
    """
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc.clone_range(source, fd, offset)
    except OSError as error:
        if error.errno in _NO_LINKS | {errno.ENOTTY, errno.EBADF, errno.ETXTBSY}:
            return False
        raise files.refused(error, path, "letting another file share its bytes") from error
    finally:
        os.close(source)
    return True
