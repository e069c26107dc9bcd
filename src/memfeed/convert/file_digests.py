"""Hash the sizes and times of the files that a dataset's attributes name: a folder of images, a table, an HDF5 file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from memfeed.convert.digests import BLOCK_BYTES, Digest, add, chosen
from memfeed.convert.plain_data import Leaf
from memfeed.store import format
from memfeed.tables.table_column import is_a

MOST_SECONDS = 4.0  # for the files of one attribute; where there are more, SOME files stand for all
SOME = 4096
TIME_GROUPS = 16
WHOLE_BYTES = 16 << 20  # of one file that is named by itself; of a larger one, blocks are read
NO_FILE = -1
ROOT = "root"


def digest_single_files(leaves: Sequence[Leaf]) -> dict[str, Digest]:
    """Return digests of the files that an attribute names by itself: of their bytes, and of a large one's time too."""
    found: dict[str, Digest] = {}
    for leaf in leaves:
        if isinstance(leaf.value, str | os.PathLike):
            _add_file(found, leaf)
    return found


def digest_files(leaves: Sequence[Leaf], target: Path) -> dict[str, Digest]:
    """Return digests of the files that lists, records and tables among these attributes name.

    They are of the sizes, and of the times of last change in nanoseconds, in up to `TIME_GROUPS` groups, so that an
    edit of some can be told from a copy of all. A dataset that holds no data makes the names of its files itself: then
    the files below its ``root`` count. `target`, the store's directory, is none of them.
    """
    found: dict[str, Digest] = {}
    for leaf in leaves:
        for names in _text_columns(leaf.value):
            folder = _folder_of(names, leaf.folders)
            if folder is not None:
                _add_files(found, leaf.path, [os.path.join(folder, name) for name in names])
    has_data = any(leaf.kind == "data" for leaf in leaves)
    for leaf in leaves:
        if not has_data and leaf.path.rpartition(".")[2] in ("", ROOT) and isinstance(leaf.value, str | os.PathLike):
            _add_folder(found, leaf.path, os.fspath(leaf.value), target)
    return found


def times_differ_in_all(one: str, other: str) -> bool:
    """Return True if the times of all files differ, as after a copy."""
    groups = [text.split(",") for text in (one, other)]
    return len(groups[0]) == len(groups[1]) and all(a != b for a, b in zip(*groups, strict=True))


def _add_file(found: dict[str, Digest], leaf: Leaf) -> None:
    """Add the digest of a file that an attribute names."""
    name = os.fspath(leaf.value)
    if not isinstance(name, str) or not name or len(name) > 1024:
        return
    for folder in ("", *leaf.folders):
        path = os.path.join(folder, name)
        try:
            if not os.path.isfile(path):
                continue
            stat = os.stat(path)
            hashed = xxhash.xxh3_64(f"{os.path.basename(path)} {stat.st_size} ".encode("utf-8", "surrogateescape"))
            with open(path, "rb") as file:
                if stat.st_size <= WHOLE_BYTES:
                    hashed.update(file.read(WHOLE_BYTES))
                else:
                    add(found, f"{leaf.path} (file times)", Digest(str(stat.st_mtime_ns), "times"))
                    for block in chosen(stat.st_size // BLOCK_BYTES, 256):
                        file.seek(block * BLOCK_BYTES)
                        hashed.update(file.read(BLOCK_BYTES))
        except (OSError, ValueError):  # it may not be read, or no file can have such a name
            continue
        add(found, f"{leaf.path} (file)", Digest(hashed.hexdigest(), "data"))
        return


def _text_columns(value: Any) -> Iterable[list[str]]:
    """Yield the columns of text in a list of paths, of records with paths, in a dict, or in a column of a table."""
    if isinstance(value, dict):
        columns: list[list[Any]] = [list(value), list(value.values())]
    elif isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "UO":
        columns = [value.tolist()]
    elif is_a(value, "pandas", "Series") or is_a(value, "polars", "Series") or is_a(value, "pyarrow", "ChunkedArray"):
        head = value[:1].to_numpy()
        columns = [value.to_numpy().tolist()] if len(head) and isinstance(head[0], str) else []
    elif isinstance(value, list | tuple):
        columns = [list(value)]
    else:
        return
    for column in columns:
        if not column:
            continue
        first = column[0]
        if isinstance(first, str | os.PathLike):
            if all(isinstance(one, str | os.PathLike) for one in column):
                yield list(map(os.fspath, column))
        elif isinstance(first, tuple | list) and all(type(one) is type(first) for one in column):
            for position, part in enumerate(first):
                is_path = isinstance(part, str | os.PathLike)
                if is_path and all(len(one) > position and isinstance(one[position], type(part)) for one in column):
                    yield [os.fspath(one[position]) for one in column]


def _folder_of(names: Sequence[str], folders: Sequence[str]) -> str | None:
    """Return the folder in which these names are those of files, "" if they are paths; None if they name no files."""
    some = {names[0], names[len(names) // 2], names[-1]}
    if not all(isinstance(name, str) and 0 < len(name) <= 1024 and "\0" not in name for name in some):
        return None
    return next((one for one in ("", *folders) if all(os.path.isfile(os.path.join(one, name)) for name in some)), None)


def _add_files(found: dict[str, Digest], path: str, files: Sequence[str]) -> None:
    some = chosen(len(files), SOME)
    started = time.monotonic()
    stats = _stat([files[i] for i in some])
    seconds = (time.monotonic() - started) / len(some) * len(files)
    _add_stats(found, f"{path} ({{}} of some)" if len(some) < len(files) else f"{path} ({{}})", stats)
    if len(some) < len(files) and seconds < MOST_SECONDS:
        _add_stats(found, f"{path} ({{}})", _stat(files))


def _add_stats(found: dict[str, Digest], path: str, stats: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    sizes, times = stats
    add(found, path.format("file sizes"), Digest(xxhash.xxh3_64_hexdigest(sizes.tobytes()), "data"))
    groups = [
        xxhash.xxh3_64_hexdigest(times[i::TIME_GROUPS].tobytes())[:8] for i in range(min(TIME_GROUPS, len(times)))
    ]
    add(found, path.format("file times"), Digest(",".join(groups), "times"))


def _stat(files: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the sizes in bytes and the times in nanoseconds of files, int64 [2, n]; of one that is not there, -1."""
    found = np.full((2, len(files)), NO_FILE, np.int64)
    sizes, times = [], []
    for file in files:
        try:
            stat = os.stat(file)
            sizes.append(stat.st_size)
            times.append(stat.st_mtime_ns)
        except (OSError, ValueError):
            sizes.append(NO_FILE)
            times.append(NO_FILE)
    found[0], found[1] = sizes, times
    return found


def _add_folder(found: dict[str, Digest], path: str, root: str, target: Path) -> None:
    """Add the files below a folder, for a dataset that holds no data: it makes the names of its files itself.

    Stores are left out. A folder with the program's own working directory in it holds more than data.
    """
    top = os.path.realpath(root)
    if not os.path.isdir(root) or os.path.commonpath([top, os.path.realpath(os.getcwd())]) == top:
        return
    names: list[str] = []
    started = time.monotonic()
    for folder, folders, files in os.walk(top):
        if format.MANIFEST in files or os.path.realpath(target) == folder or folder.endswith((".build", ".append")):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names += [os.path.relpath(os.path.join(folder, name), top) for name in sorted(files) if name[0] != "."]
        if time.monotonic() - started > MOST_SECONDS:
            return
    if names:
        add(
            found,
            f"{path} (files)",
            Digest(xxhash.xxh3_64_hexdigest("\0".join(names).encode("utf8", "surrogateescape")), "data"),
        )
        _add_files(found, path, [os.path.join(top, name) for name in names])
