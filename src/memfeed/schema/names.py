"""Paths of fields, and the fields that a user names. Every argument that names fields follows the rule of this module.

``select`` chooses fields of a store, `memfeed.open(path, select=...)` and `Store.select` alike. ``fields=`` names them,
or chooses their kinds, where a store is made.

- A str or int is one field: the name that ``fields=`` gave it, its key or position, or its path joined by dots.
- A tuple is one path: ``("target", "boxes")``. Keys that contain a dot are reached by it: ``("a.b",)``.
- A list is several of these.
- A name or path of a container stands for all fields in it.

The names of a column's files, its stem, are its keys, encoded as tensordict encodes them, so that its reader shows the
keys.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, TypeAlias

from memfeed.errors import FieldError, brief, listed

Path = tuple[str | int, ...]
"""The keys that lead to a leaf: ``sample["target"]["boxes"]`` has the path ``("target", "boxes")``."""

Name: TypeAlias = "str | int | tuple[str | int, ...]"
Names: TypeAlias = "Name | list[Name]"


def display(path: Path) -> str:
    """Return ``"target.boxes"`` for ``("target", "boxes")``, for messages; two paths may give the same text."""
    return ".".join(str(key) for key in path) if path else "value"


def find_fields(which: Any, paths: Sequence[Path], names: Sequence[str], shown: Sequence[str] = ()) -> list[int]:
    """Return the indices of the fields that ``which`` names, in the order named, each once.

    Args:
        which: one name, or a list of them.
        paths: the paths of all fields.
        names: the names of all fields, as ``fields=`` gave them; others are the paths joined by dots.
        shown: the fields as error messages list them; by default the names.

    Raises:
        FieldError: a name that no field has, or that means several.
    """
    if not isinstance(which, list):
        return _find_one(which, paths, names, shown or names)
    if not which:
        raise FieldError(f"found an empty list of fields; expected one or more of: {listed(shown or names)}")
    return list(dict.fromkeys(index for name in which for index in _find_one(name, paths, names, shown or names)))


def find_field(which: Any, paths: Sequence[Path], names: Sequence[str]) -> int:
    """Return the index of the one field that ``which`` names; see `find_fields`. A list raises FieldError."""
    if isinstance(which, list):
        raise FieldError(f"found a list of fields, {brief(which)}; expected one field of: {listed(names)}")
    found = _find_one(which, paths, names, names)
    if len(found) > 1:
        inside = listed([names[index] for index in found])
        raise FieldError(f"found {brief(which)}, which holds several fields; expected one of: {inside}")
    return found[0]


def _find_one(name: Any, paths: Sequence[Path], names: Sequence[str], shown: Sequence[str]) -> list[int]:
    if isinstance(name, bool) or not isinstance(name, str | int | tuple):
        raise FieldError(
            f"found {brief(name)} as the name of a field; expected a str or int, a tuple for one path, or a list for "
            f"several fields, of: {listed(shown)}"
        )
    found = _matches(name, paths, names)
    if found:
        return found
    hint = ""
    if isinstance(name, tuple) and len(name) > 1 and all(_matches(key, paths, names) for key in name):
        hint = f". A tuple is one path; for several fields write {brief(list(name), 120)}"
    elif close := difflib.get_close_matches(str(name), names, 1):
        hint = f": write {brief(close[0])}"
    raise FieldError(f"found no field {brief(name)}; expected one of: {listed(shown)}{hint}")


def _matches(name: Name, paths: Sequence[Path], names: Sequence[str]) -> list[int]:
    """Return the indices of the fields with this name. Raise FieldError if it means more than one place."""
    path = name if isinstance(name, tuple) else (name,)
    keyed = [index for index, other in enumerate(paths) if other[: len(path)] == path]
    if isinstance(name, tuple):
        return keyed
    given = [index for index, other in enumerate(names) if other == name and other != display(paths[index])]
    if keyed and given and keyed != given:
        raise _ambiguous(name, [path, paths[given[0]]])
    if keyed or given or not isinstance(name, str):
        return keyed or given
    places = {other[:depth] for other in paths for depth in range(len(other) + 1) if display(other[:depth]) == name}
    places -= {()} if any(paths) else set()  # "value" means the root only if that is the only field
    if len(places) > 1:
        raise _ambiguous(name, sorted(places, key=repr))
    return [index for index, other in enumerate(paths) for place in places if other[: len(place)] == place]


def _ambiguous(name: Name, places: Sequence[Path]) -> FieldError:
    ways = " or ".join(brief(place, 100) for place in places[:2])
    return FieldError(f"found several fields named {brief(name)}; expected the path of one, a tuple: write {ways}")


# --- the names of files

# characters that tensordict writes as %XX in a file's name
_UNSAFE = re.compile(r'[\x00-\x20\x7f/<>:"|?*\\%]')
_ENCODED = re.compile(r"%([0-9A-F]{2})")
LONGEST_DIRECTORY = 500  # bytes; below it names are short, because systems limit the length of a path
LONGEST = 200  # bytes of one name; file systems allow 255, with the suffix
# tensordict keeps entries of these names in meta.json beside those of the leaves, and drops a leaf on loading
_RESERVED = frozenset(["shape", "device", "_type"])
# a directory of such a name would be in the way of another file of the store
_FILES = frozenset(["meta.json", "memfeed.json", "checksums.bin", "targets.bin"])
_SUFFIXES = (".memmap", ".copy")


def encode_key(key: str) -> str:
    """Return the name that tensordict gives to the file of a key."""
    if key in ("", ".", ".."):
        return "%2E" * len(key) or "%"
    return _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", key)


def decode_key(name: str) -> str:
    """Return the key whose file has this name: the inverse of ``encode_key``."""
    return "" if name == "%" else _ENCODED.sub(lambda match: chr(int(match[1], 16)), name)


def same_file(stem: str) -> str:
    """Return a text that two stems share if some file system takes them for one: in case, or as accents are written."""
    return unicodedata.normalize("NFC", stem).casefold()


def is_stem(text: str) -> bool:
    """Return True if ``text`` can be the stem of a column: encoded keys joined by ``/``."""
    return all(_is_name(part) for part in text.split("/"))


def _is_name(part: str) -> bool:
    key = decode_key(part)
    return (
        key not in ("", ".", "..")  # some versions of tensordict do not encode these
        and encode_key(key) == part
        and not key.startswith(".")
        and _byte_count(part) <= LONGEST
        and key not in _RESERVED
        and same_file(part) not in _FILES
        and not same_file(part).endswith(_SUFFIXES)
    )


def _byte_count(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:  # half of a surrogate pair, which no file's name can have
        return LONGEST + 1


class StemAssigner:
    """Assigns unique file stems: the encoded key if that is a safe name and not in use, else ``c<N>``.

    Below a long directory they are all ``c<N>``.
    """

    def __init__(self) -> None:
        self._directories: dict[Path, str] = {(): ""}
        self._used: dict[str, set[str]] = {}

    def assign(self, path: Path, name: str | None = None) -> str:
        """Return the stem for the leaf at ``path``; ``name``, if given by the user, replaces its last key."""
        directory = ""
        for depth in range(1, len(path)):
            parent = path[:depth]
            if parent not in self._directories:
                self._directories[parent] = self._assign_in(directory, path[depth - 1])
            directory = self._directories[parent]
        last: str | int = name if name is not None else (path[-1] if path else "value")
        return self._assign_in(directory, last)

    def _assign_in(self, directory: str, key: str | int) -> str:
        used = self._used.setdefault(directory, set())
        stem = encode_key(str(key))
        is_deep = len(directory.encode()) > LONGEST_DIRECTORY
        if is_deep or not _is_name(stem) or same_file(stem) in used:
            stem = next(name for i in range(len(used) + 1) if (name := f"c{i}") not in used)
        used.add(same_file(stem))  # some file systems ignore case
        return f"{directory}/{stem}" if directory else stem
