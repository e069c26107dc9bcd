"""Let the cache of a store go on after rows were appended: what it has is the beginning of the new files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from memfeed.remote.ranges import ChunkTable
from memfeed.store import format
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.manifest import Manifest
from memfeed.store.tensordict_layout import METADATA
from memfeed.system import files

if TYPE_CHECKING:
    from memfeed.remote.directory import CacheDirectory


def chunks_kept(
    old: CacheDirectory, manifest: Manifest, table: ChunkTable, hashes: npt.NDArray[np.uint64]
) -> dict[str, tuple[slice, slice]] | None:
    """Return for each file which chunks of a cache are chunks of the new store too, by their numbers in both.

    None unless each file of the old store is the beginning of the new one, by the checksums of all its whole chunks.
    """
    kept = {}
    if old.manifest.schema != manifest.schema or old.table.steps != table.steps:
        return None
    for name, size in old.manifest.files.items():
        if manifest.files[name] < size:
            return None
        is_same = manifest.files[name] == size
        first, last = old.table.of_file(name)
        whole = last - first if is_same else size // table.steps[name]
        begin, _ = table.of_file(name)
        kept[name] = slice(first, first + whole), slice(begin, begin + whole)
        if (old.hashes[kept[name][0]] != hashes[kept[name][1]]).any():
            return None
    return kept


def grow(
    old: CacheDirectory, manifest: Manifest, table: ChunkTable, kept: dict[str, tuple[slice, slice]], settings: str
) -> None:
    """Make the files of a cache those of the new store, which has more rows. Only while no other process uses it.

    If the process is killed, the cache is either the old one, or begun anew by the next process: ``settings`` is the
    name of the file whose absence says so.
    """
    root, work = old.root, old.root / WORK_DIRECTORY
    presence, used = np.zeros(table.count, np.uint8), np.zeros(table.count)
    for name, (before, after) in kept.items():
        presence[after], used[after] = old.presence[before], old.used[before]
        if old.settings.size is not None:  # only then room is counted; and the file is not mapped by anyone
            for chunk in range(before.stop, old.table.of_file(name)[1]):
                old.remove(chunk)
    # a process that reads the complete cache as a store keeps its rows: no byte of them changes
    older = [*format.generations(root), old.settings.digest]
    files.write_atomically(root / format.GENERATIONS, "".join(f"{digest}\n" for digest in older).encode())
    for path in (root / format.MANIFEST, root / METADATA, work / settings, work / "pieces", work / "hashed"):
        if path.exists():
            files.remove(path)
    files.sync_directory(work)
    files.sync_directory(root)
    for name, size in manifest.files.items():
        files.truncate(root / name, size)
    for name, values in (("presence", presence), ("used", used)):
        files.write_file(work / name, values.tobytes())
