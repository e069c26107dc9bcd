"""The rows of a replay buffer that TorchRL dumped: it saves its whole storage, and how much of that is filled."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from memfeed.errors import CorruptStoreError
from memfeed.system.descriptors import open_read

METADATA = "storage_metadata.json"
MOST_BYTES = 1 << 20


class _StorageMetadata(msgspec.Struct):
    """The part of ``storage_metadata.json`` that is read; ``len`` is the number of rows that are filled."""

    len: int | None = None


def filled_rows(root: Path) -> int | None:
    """Return how many rows of the directory are filled; None if TorchRL did not write it.

    Raises CorruptStoreError for metadata that cannot be read.
    """
    path = root / METADATA
    if not os.path.lexists(path):
        return None
    try:
        fd = open_read(path)
        try:
            found = msgspec.json.decode(os.read(fd, MOST_BYTES), type=_StorageMetadata).len
        finally:
            os.close(fd)
    except (OSError, msgspec.MsgspecError) as error:
        raise CorruptStoreError(
            f"{path}: found metadata that cannot be read ({error}); expected how many rows of the storage are filled: "
            "dump the replay buffer again"
        ) from None
    if found is not None and found < 0:
        raise CorruptStoreError(f"{path}: found len {found}; expected 0 or more: dump the replay buffer again")
    return found
