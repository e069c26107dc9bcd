"""Paths of fields, and the fields that a user names. Every argument that names fields follows the rule of this module.

``select`` chooses fields of a store, `memfeed.open(path, select=...)` and `Store.select` alike. ``fields=`` names them,
or chooses their kinds, where a store is made.

- A str or int is one field: the name that ``fields=`` gave it, its key or position, or its path joined by dots.
- A tuple is one path: ``("target", "boxes")``. Keys that contain a dot are reached by it: ``("a.b",)``.
- A list is several of these.
- A name or path of a container stands for all fields in it.
"""

from __future__ import annotations

import difflib
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
