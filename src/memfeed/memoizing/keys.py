"""The key of a call: its arguments, and size and time of the files among them.

The row of a key is found in a file that only grows, with the first 8 bytes of the digest of each row's key.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import stat
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from memfeed.errors import SchemaError
from memfeed.system import files
from memfeed.system.descriptors import open_read

_LONGEST_PATH = 4096
_MOST_BYTES = 256 << 20
_json = json.JSONEncoder(separators=(",", ":")).encode  # NaN is NaN, and text may hold lone surrogates


class Key(NamedTuple):
    """The key of a call as JSON text, and its files by path: bytes, and time of the last change in nanoseconds."""

    text: bytes
    files: dict[str, list[int]]


class Keys:
    """Makes the keys of a function's calls. A call has one key, whichever way its arguments are written.

    Args:
        function: the function.
        name: it is named so in errors.
        digest: of the function, in hexadecimal.
    """

    def __init__(self, function: Callable[..., Any], name: str, digest: str) -> None:
        self._name = name
        self._function = {"function": name, "digest": digest}
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (ValueError, TypeError):  # of some functions in C
            self._signature = None
        parameters = [] if self._signature is None else [*self._signature.parameters.values()]
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # if each argument has a name, arguments by position need no binding
        self._names = [one.name for one in parameters] if all(one.kind in kinds for one in parameters) else None
        self._defaults = {one.name: one.default for one in parameters if one.default is not one.empty}

    def of(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> Key:
        """Return the key of a call. Raises SchemaError for an argument that no key can hold."""
        names = self._names or []
        left = names[len(arguments) :]
        if (
            self._names is not None
            and not named
            and len(arguments) <= len(names)
            and self._defaults.keys() >= set(left)
        ):
            bound = dict(zip(names, arguments, strict=False))
            bound.update((name, self._defaults[name]) for name in left)
        elif self._signature is None:
            bound = {**{str(i): one for i, one in enumerate(arguments)}, **named}
        else:
            found = self._signature.bind(*arguments, **named)
            found.apply_defaults()
            bound = dict(found.arguments)
        files: dict[str, list[int]] = {}
        encoded = {name: self._encode(value, name, files) for name, value in bound.items()}
        return Key(encode_key({**self._function, "arguments": encoded, "files": files}), files)

    def _encode(self, value: Any, name: str, files: dict[str, list[int]]) -> Any:
        """Return JSON that differs for values that differ, and note the files."""
        kind = type(value)
        if kind is str:
            note_file(value, files)
            return value
        if value is None or kind in (bool, int, float):
            return value
        if isinstance(value, PurePath):
            text = os.fspath(value)
            note_file(text, files, is_path=True)
            return {"path": text}
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind in (tuple, list):
            return {kind.__name__: [self._encode(one, name, files) for one in value]}
        if kind is dict and all(type(key) in (str, int) for key in value):
            return {"dict": [[key, self._encode(one, name, files)] for key, one in value.items()]}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return {str(value.dtype): value.item()}
        raise SchemaError(
            f"{self._name}: found argument {name} of class {kind.__name__} (of {kind.__module__}); expected str, "
            "bytes, numbers, paths, and tuples, lists and dicts of them: memoize a function that gets what its result "
            "depends on"
        )


def encode_key(content: dict[str, Any]) -> bytes:
    """Return the content of a key as JSON text."""
    return _json(content).encode()


def hash_content(data: memoryview | bytes) -> dict[str, str] | None:
    """Return the part of a key for an encoded file in memory; None for a file that is too large to be hashed."""
    return None if len(data) > _MOST_BYTES else {"content": hashlib.blake2b(data, digest_size=16).hexdigest()}


def note_file(path: str, files: dict[str, list[int]], *, is_path: bool = False) -> None:
    """Note size and time of the file or directory at a path, if there is one. A word alone may mean no directory."""
    if not path or len(path) > _LONGEST_PATH:
        return
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # none, or text that can be no path
        return
    if stat.S_ISREG(found.st_mode) or (stat.S_ISDIR(found.st_mode) and (is_path or os.sep in path)):
        files[path if path[0] == "/" else os.path.abspath(path)] = [found.st_size, found.st_mtime_ns]


_BYTES = 8
_MOST_RECENT = 4096  # rows in a dict; all others are in sorted arrays, which take 16 bytes a row


class Digests:
    """Finds the row of a digest. All processes append to one file, while they hold a lock of it.

    Two keys whose digests begin with the same 8 bytes share a row, which then has one of them at a time: each row has
    the whole digest in its blob.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, open_read(path)
        weakref.finalize(self, os.close, self._fd)
        self._count = 0
        self._recent: dict[int, int] = {}
        self._sorted, self._rows = np.empty(0, np.uint64), np.empty(0, np.int64)

    def find(self, digest: bytes) -> int | None:
        """Return the row of a digest, or None if no process has given it one yet."""
        found = self._known(digest)
        if found is None and self._refresh():
            found = self._known(digest)
        return found

    def append(self, digest: bytes) -> int:
        """Return the row of a digest, which is made if there is none. The caller holds the lock."""
        found = self.find(digest)
        if found is not None:
            return found
        row = os.fstat(self._fd).st_size // _BYTES
        with files.opened(self._path) as fd:
            files.write_at(fd, digest[:_BYTES], row * _BYTES)
        return row

    def _known(self, digest: bytes) -> int | None:
        number = int.from_bytes(digest[:_BYTES], "little")
        row = self._recent.get(number)
        if row is None and len(self._sorted):
            at = int(np.searchsorted(self._sorted, np.uint64(number)))
            if at < len(self._sorted) and self._sorted[at] == number:
                return int(self._rows[at])
        return row

    def _refresh(self) -> bool:
        """Read the rows that were added since; return False if there is none."""
        count = os.fstat(self._fd).st_size // _BYTES
        if count <= self._count:
            return False
        data = os.pread(self._fd, (count - self._count) * _BYTES, self._count * _BYTES)
        numbers = np.frombuffer(data, np.uint64)
        rows = np.arange(self._count, self._count + len(numbers))
        self._count += len(numbers)
        self._recent.update(zip(numbers.tolist(), rows.tolist(), strict=True))
        if len(self._recent) > max(_MOST_RECENT, len(self._sorted) // 4):
            recent = np.fromiter(self._recent.keys(), np.uint64, len(self._recent))
            keys = np.concatenate([self._sorted, recent])
            order = np.argsort(keys, kind="stable")
            where = np.concatenate([self._rows, np.fromiter(self._recent.values(), np.int64, len(self._recent))])
            self._rows, self._sorted, self._recent = where[order], keys[order], {}
        return True
