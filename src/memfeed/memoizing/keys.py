"""The key of a call: its arguments, and size and time of the files among them."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from memfeed.errors import SchemaError

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
