"""Hash the sizes and times of the files that a dataset's attributes name: a folder of images, a table, an HDF5 file."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from memfeed.convert.digests import BLOCK_BYTES, Digest, add, chosen
from memfeed.convert.opened_files import OpenedFiles
from memfeed.convert.plain_data import OF_MODULE, WIDEST, Column, Leaf, ordered
from memfeed.schema.tensordicts import is_a
from memfeed.store import format

MOST_SECONDS = 4.0  # for the files of one attribute; where there are more, SOME files stand for all
SOME = 4096
TIME_GROUPS = 16
WHOLE_BYTES = 16 << 20  # of one file that is named by itself; of a larger one, blocks are read
NO_FILE = -1
DEEPEST = 3  # containers around a name
STEM_SECONDS = 1.0  # of looking for files that have the names of samples, without their ends
MOST_NAMED = 16  # files of one folder in whose names one entry of a list is looked for
FEW = 4  # opened files for each folder, or shape, that show that all folders, or shapes, were seen
ROOT = "root"


class _Found(dict[str, Digest]):
    """Digests by the paths of attributes, and the lists of files that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[Sequence[str]] = []


def digest_single_files(leaves: Sequence[Leaf]) -> dict[str, Digest]:
    """Return digests of the files that an attribute names by itself: of their bytes, and of a large one's time too."""
    found: dict[str, Digest] = {}
    for leaf in leaves:
        if isinstance(leaf.value, str | os.PathLike):
            _add_file(found, leaf)
    return found


def digest_files(
    leaves: Sequence[Leaf], target: Path, changing: Collection[str] = (), opened: OpenedFiles | None = None
) -> dict[str, Digest]:
    """Return digests of the files that lists, records and tables among these attributes name, and of those ``opened``.

    They are of the sizes, and of the times of last change in nanoseconds, in up to `TIME_GROUPS` groups, so that an
    edit of some can be told from a copy of all. Where none names files, their names without folder and end may stand
    there. A dataset that holds no data makes the names of its files itself: then the files below its ``root`` count.
    `target`, the store's directory, is none of them. Attributes that are `changing`, by their paths, are caches.
    """
    found = _Found()
    stems: dict[str, list[tuple[str, Sequence[Any], tuple[Any, ...]]]] = {}
    for leaf in leaves:
        for column in _columns(leaf.value) if leaf.path not in changing else ():
            some = [column[0], column[len(column) // 2], column[-1]]
            for name, keys, few in _parts(some):
                folder = _folder_of(few, leaf.folders)
                if folder is None:
                    for one in dict.fromkeys(map(os.path.realpath, leaf.folders)):  # one folder may have many names
                        stems.setdefault(one, []).append((leaf.path + name, column, keys))
                    continue
                names = _extracted(column, keys)
                if names and all(isinstance(one, str | os.PathLike) for one in names):
                    _add_files(found, leaf.path + name, [os.path.join(folder, one) for one in names])
    has_data = any(leaf.kind == "data" for leaf in leaves)
    for folder, columns in stems.items() if not found else ():
        _add_stems(found, folder, columns, target)
    for leaf in leaves:
        if not has_data and leaf.path.rpartition(".")[2] in ("", ROOT) and isinstance(leaf.value, str | os.PathLike):
            _add_folder(found, leaf.path, os.fspath(leaf.value), target)
    if opened is not None:
        _add_opened(found, opened, target)
    return found


def _add_file(found: dict[str, Digest], leaf: Leaf) -> None:
    name = os.fspath(leaf.value)
    if isinstance(name, str) and 0 < len(name) <= 1024:
        any(_add_content(found, leaf.path, os.path.join(folder, name)) for folder in ("", *leaf.folders))


def _add_content(found: dict[str, Digest], name: str, path: str) -> bool:
    """Add the digest of a file's bytes. Return False if there is no such file, or it may not be read."""
    try:
        if not os.path.isfile(path):
            return False
        stat = os.stat(path)
        hashed = xxhash.xxh3_64(f"{os.path.basename(path)} {stat.st_size} ".encode("utf-8", "surrogateescape"))
        with open(path, "rb") as file:
            if stat.st_size <= WHOLE_BYTES:
                hashed.update(file.read(WHOLE_BYTES))
            else:
                add(found, f"{name} (file times)", Digest(str(stat.st_mtime_ns), "times"))
                for block in chosen(stat.st_size // BLOCK_BYTES, 256):
                    file.seek(block * BLOCK_BYTES)
                    hashed.update(file.read(BLOCK_BYTES))
    except (OSError, ValueError):  # no file can have such a name
        return False
    add(found, f"{name} (file)", Digest(hashed.hexdigest(), "data"))
    return True


def _columns(value: Any) -> Iterator[Sequence[Any]]:
    """Yield the values that may name a file for each sample: a list, keys and values of a dict, a column."""
    if isinstance(value, dict):
        if len(value):  # some dicts have no truth value
            values = list(value.values())
            yield list(value)
            yield [value[key] for key in ordered(value)] if isinstance(values[0], dict) else values
    elif isinstance(value, np.ndarray):
        if value.ndim == 1 and len(value) and value.dtype.kind in "UOi":
            yield value.tolist() if value.dtype.kind in "UO" else Column(value, int)
    elif is_a(value, "pandas", "Series") or is_a(value, "polars", "Series") or is_a(value, "pyarrow", "ChunkedArray"):
        head = value[:1].to_numpy()
        if len(head) and isinstance(head[0], str):
            yield value.to_numpy().tolist()
    elif isinstance(value, list | tuple | Column) and len(value):
        yield value


def _parts(some: list[Any], name: str = "", keys: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield the parts of some values that are text or ints: how to show them, the keys that reach them, the parts."""
    first = some[0]
    if all(isinstance(one, str | os.PathLike) for one in some) or all(type(one) is int for one in some):
        yield name, keys, some
    elif isinstance(first, tuple | list | dict) and len(keys) < DEEPEST and len(set(map(type, some))) == 1:
        for key, part in list(first.items() if isinstance(first, dict) else enumerate(first))[:WIDEST]:
            has_key = all(key in one if isinstance(one, dict) else len(one) > key for one in some)
            is_token = isinstance(first, list) and isinstance(part, int)
            if has_key and not is_token and isinstance(part, str | os.PathLike | int | tuple | list | dict):
                # those of a list of tuples are one digest
                is_first = not keys and not isinstance(first, dict) and isinstance(part, str | os.PathLike)
                shown = name if is_first else f"{name}[*][{key!r}]"
                yield from _parts([one[key] for one in some], shown, (*keys, key))


def _extracted(column: Sequence[Any], keys: tuple[Any, ...]) -> list[Any]:
    """Return one part of each value; nothing if a value does not have it."""
    try:
        return [reduce(getitem, keys, one) for one in column] if keys else list(column)
    except (KeyError, IndexError, TypeError):
        return []


def _folder_of(names: Sequence[str], folders: Sequence[str]) -> str | None:
    """Return the folder in which these names are those of files, "" if they are paths; None if they name no files."""
    some = [os.fspath(name) if isinstance(name, os.PathLike) else name for name in names]
    if not all(isinstance(name, str) and 0 < len(name) <= 1024 and "\0" not in name for name in some):
        return None
    return next((one for one in ("", *folders) if all(os.path.isfile(os.path.join(one, name)) for name in some)), None)


def _add_stems(
    found: _Found,
    folder: str,
    columns: list[tuple[str, Sequence[Any], tuple[Any, ...]]],
    target: Path,
) -> None:
    """Add the files below a folder that have the values of a column in their names (`_by_name`)."""
    top = os.path.realpath(folder)
    some_of = [_extracted([column[i] for i in chosen(len(column), 64)], keys) for _, column, keys in columns]
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for file in (_files_below(top, target, STEM_SECONDS) or ()) if any(map(_are_stems, some_of)) else ():
        stem, end = os.path.splitext(os.path.basename(file))
        groups.setdefault((os.path.dirname(file), end), {})[stem] = os.path.join(top, file)
    for (path, column, keys), some in zip(columns, some_of, strict=True):
        for (inner, end), files in groups.items() if _are_stems(some) else ():
            for shown, by_name in _by_name(files, some):
                names = _extracted(column, keys) if all(one in by_name for one in some) else []
                named = [by_name[one] for one in names if isinstance(one, int | str) and one in by_name]
                if names and len(named) == len(names):
                    _add_files(found, f"{path} in {os.path.join(inner, shown + end)}", named)


def _by_name(files: Mapping[str, str], some: Sequence[Any]) -> Iterator[tuple[str, Mapping[Any, str]]]:
    """Yield the files of a folder by what may be their names: stems, or what stands before or behind "_mask", say."""
    first = some[0]
    if type(first) is int:
        yield "*", {int(stem): file for stem, file in files.items() if stem.isdecimal()}
        return
    yield "*", files
    longer = [stem for stem in files if len(stem) > len(first) and first in stem]
    starting = [stem[len(first) :] for stem in longer if stem.startswith(first)]
    for rest in sorted(set(starting[:MOST_NAMED])):
        if not rest[0].isalnum():
            yield f"*{rest}", {stem.removesuffix(rest): file for stem, file in files.items() if stem.endswith(rest)}
    for mark in sorted({stem[-len(first) - 1] for stem in longer if stem.endswith(first)}):
        if not mark.isalnum():  # what stands before it may differ: the name of a speaker
            ends = [(stem[i + 1 :], file) for stem, file in files.items() for i, c in enumerate(stem) if c == mark]
            counts = Counter(end for end, _ in ends)
            yield f"*{mark}*", {end: file for end, file in ends if counts[end] == 1}


def _are_stems(some: Sequence[Any]) -> bool:
    """Return True if these values may be names of files without folder and end: they are all different."""
    are_names = all(
        type(one) is int or (isinstance(one, str) and 0 < len(one) <= 255 and os.sep not in one) for one in some
    )
    return bool(some) and are_names and len(set(some)) == len(some)


def _add_files(found: _Found, path: str, files: Sequence[str]) -> None:
    found.files.append(files)
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
    found: list[tuple[int, int]] = []
    for file in files:
        try:
            stat = os.stat(file)
            found.append((stat.st_size, stat.st_mtime_ns))
        except (OSError, ValueError):
            found.append((NO_FILE, NO_FILE))
    stats: np.ndarray[Any, np.dtype[np.int64]] = np.array(found, np.int64).T
    return stats


def _add_folder(found: _Found, path: str, root: str, target: Path) -> None:
    """Add the files below a folder, for a dataset that holds no data: it makes the names of its files itself."""
    top = os.path.realpath(root)
    names = _files_below(top, target, MOST_SECONDS)
    if names:
        add(
            found,
            f"{path} (files)",
            Digest(xxhash.xxh3_64_hexdigest("\0".join(names).encode("utf8", "surrogateescape")), "data"),
        )
        _add_files(found, path, [os.path.join(top, name) for name in names])


def _add_opened(found: _Found, opened: OpenedFiles, target: Path) -> None:
    """Add the files that samples were read from and that no attribute names.

    Where samples have files of their own, all files of their folders with the same end count, or with the same shape
    if few were seen: their names differ in digits alone. Where samples share a file, others of its shape count, as the
    parts of a large set. The next run may read fewer samples: each folder and each shape has a digest of its own.
    """
    files = opened.files()
    names = set(map(os.path.basename, files))
    known = {os.path.realpath(one) for each in found.files for one in each if one.rpartition(os.sep)[2] in names}
    by_end: dict[str, list[str]] = {}
    for one in files:
        if os.path.realpath(one) not in known:
            by_end.setdefault(os.path.splitext(one)[1], []).append(one)
    for end, some in by_end.items():
        folders, shapes = sorted(set(map(os.path.dirname, some))), sorted(set(map(_shape, some)))
        are_own = len(some) > 1 and len(some) * 2 >= len(opened.samples)
        top, below = os.path.commonpath(folders), list[str]()
        if are_own and len(folders) * FEW > len(some):  # there may be more of them
            below = [os.path.join(top, one) for one in _files_below(os.path.realpath(top), target, MOST_SECONDS) or ()]
        for folder, listed in [(top, below)] if below else [(one, _names_in(one)) for one in folders]:
            place = os.path.basename(folder) if len(folders) > 1 else ""  # the only folder may be renamed
            if are_own and len(shapes) * FEW > len(some):
                shown = os.path.join(place, "**" if below else "", f"*{end}")
                _add_files(found, OF_MODULE + shown, [one for one in listed if one.endswith(end)])
                continue
            for shape in shapes:
                alike = [one for one in listed if _shape(one) == shape]
                if alike and (are_own or len(alike) > MOST_NAMED):
                    shown = os.path.join(place, os.path.relpath(shape, _shape(folder)))
                    _add_files(found, OF_MODULE + shown, alike)
                    continue
                for one in alike:
                    _add_content(found, OF_MODULE + os.path.join(place, os.path.basename(one)), one)


def _shape(path: str) -> str:
    """Return a path with a pattern in the place of its digits."""
    return re.sub(r"\d+", "[0-9]*", path)


def _names_in(folder: str) -> list[str]:
    """Return the paths of the files in a folder; none if it may not be listed."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if entry.is_file())
    return []


def _files_below(top: str, target: Path, seconds: float) -> list[str] | None:
    """Return the names of the files below a folder; None if there are too many.

    Stores are left out. A folder with the program's own working directory in it holds more than data.
    """
    if not os.path.isdir(top) or os.path.commonpath([top, os.path.realpath(os.getcwd())]) == top:
        return None
    names: list[str] = []
    started = time.monotonic()
    for folder, folders, files in os.walk(top):
        if format.MANIFEST in files or os.path.realpath(target) == folder or folder.endswith((".build", ".append")):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = "" if folder == top else os.path.relpath(folder, top)
        names += [os.path.join(below, name) for name in sorted(files) if name[0] != "."]
        if time.monotonic() - started > seconds:
            return None
    return names
