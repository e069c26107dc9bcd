"""Open any directory that `TensorDict.memmap()` wrote, or an archive of one, as the fields and columns of a store.

`memfeed.store.tensordict_layout` reads and checks it, `memfeed.store.tensordict_columns` makes columns of its entries.
"""

from __future__ import annotations

from pathlib import Path

from memfeed.errors import StoreError
from memfeed.store.manifest import MOST_EMPTY_ROWS
from memfeed.store.tensordict_columns import Contents, contents_of
from memfeed.store.tensordict_entries import DESCRIPTIONS, Group
from memfeed.store.tensordict_layout import MetadataReader


def read(root: Path) -> tuple[Contents, str]:
    """Return the contents of a directory written by `TensorDict.memmap()` or that of a tensorclass, and their digest.

    ``root`` may also be a ``.tdz`` archive. Raises StoreError for contents that are refused (symbolic links, the layout
    older than meta.json, a lazy stack along another dim than the first, a dtype that no column can have),
    CorruptStoreError for files that are shorter than the metadata says. Pickles are left out.
    """
    reader = MetadataReader(root)
    top = reader.directory(root, 0)
    if not isinstance(top, Group):
        raise StoreError(f"{root}: found {DESCRIPTIONS[type(top)]}; expected a TensorDict: save it inside one")
    try:
        contents = contents_of(top)
    except StoreError as error:
        raise StoreError(f"{root}: {error}") from None
    rows = contents.row_count or 0
    if rows > MOST_EMPTY_ROWS and not any(column.nbytes for column in contents.columns):
        raise StoreError(
            f"{root}: found {rows:,} rows in no byte at all; expected at most {MOST_EMPTY_ROWS:,} of those"
        )
    return contents, reader.hash.hexdigest()
