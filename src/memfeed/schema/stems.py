"""The names of a column's files: its keys, encoded as tensordict encodes them, so that its reader shows the keys."""

from __future__ import annotations

import re
import unicodedata

from memfeed.schema.fields import Path

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
