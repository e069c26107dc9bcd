"""The fields for the stored part of a sample: in place of the leaves that are made of it, or beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfeed.schema.names import Path, display
from memfeed.splitting.leaves import is_numbers, is_sized, kind_of, stored_count, take_apart, to_stored
from memfeed.splitting.pattern import Pattern, Read, from_parts, to_parts

PATTERN = "pattern"
"""The field with the number of a sample's pattern, where there are several."""


@dataclass(frozen=True, eq=False)
class InPlace:
    """Each stored leaf has the place of the leaf that is made of it: stored samples look like finished ones.

    Args:
        pattern: of all samples.
        source: for each leaf of a sample the number of the stored leaf.
    """

    pattern: Pattern
    source: tuple[int, ...]

    def stored(self, number: int, leaves: Sequence[Any]) -> Any:
        """Return the sample that a store keeps, of the leaves that were read."""
        given = len(leaves) - self.pattern.links.count(None)  # arguments of calls; the others are as they are
        kept = [
            leaf
            if i >= given or leaf is None or is_sized(leaf) or is_numbers(leaf)
            else to_stored(leaf, self.pattern.kinds[i])[0]
            for i, leaf in enumerate(leaves)
        ]
        return self.pattern.form.build([kept[i] for i in self.source])

    def path(self, number: int, leaf: int) -> Path:
        """Return the path of a stored leaf in a stored sample."""
        return self.pattern.form.paths()[self.source.index(leaf)]


@dataclass(frozen=True, eq=False)
class Named:
    """Stored leaves are fields of a dict, with the name of the first leaf of a sample that is made of them.

    Args:
        patterns: of the samples.
        names: for each pattern the field of each part, see `to_parts`.
        empty: what a sample has in the fields of other patterns.
    """

    patterns: tuple[Pattern, ...]
    names: tuple[tuple[str, ...], ...]
    empty: dict[str, Any]

    def stored(self, number: int, leaves: Sequence[Any]) -> Any:
        """Return the sample that a store keeps, of the leaves that were read."""
        parts = to_parts(self.patterns[number], leaves)
        sample = {**self.empty, **dict(zip(self.names[number], parts, strict=True))}
        return {PATTERN: number, **sample} if len(self.patterns) > 1 else sample

    def loaded(self, sample: Any) -> tuple[Pattern, list[Any]]:
        """Return the leaves again of a stored sample."""
        number = int(sample[PATTERN]) if len(self.patterns) > 1 else 0
        pattern = self.patterns[number]
        return pattern, from_parts(pattern, [sample[name] for name in self.names[number]])

    def path(self, number: int, leaf: int) -> Path:
        """Return the path of a stored leaf in a stored sample."""
        pattern = self.patterns[number]
        leaf = pattern.same_as[leaf]
        before = sum(stored_count(kind) for i, kind in enumerate(pattern.kinds[:leaf]) if pattern.same_as[i] == i)
        return (self.names[number][before],)


Layout = InPlace | Named


def in_place(patterns: Sequence[Pattern], read: Read) -> InPlace | None:
    """Return a layout in which stored samples look like finished ones; None unless each leaf has one stored leaf."""
    source = _sources_in_place(patterns[0], read) if len(patterns) == 1 else None
    return None if source is None else InPlace(patterns[0], source)


def named(patterns: Sequence[Pattern]) -> Named:
    """Return a layout of fields with names, for samples of these patterns."""
    kinds: dict[str, tuple[Any, ...]] = {}
    names, empty = [], dict[str, Any]()
    for pattern in patterns:
        found = []
        for base, form, value in _parts_of(pattern):
            name, number = base, 1
            while name in found or kinds.setdefault(name, form) != form:
                number += 1
                name = f"{base}_{number}"
            found.append(name)
            empty.setdefault(name, value)
        names.append(tuple(found))
    shared = set(names[0]).intersection(*names)
    return Named(tuple(patterns), tuple(names), {name: value for name, value in empty.items() if name not in shared})


def _parts_of(pattern: Pattern) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield for each part a name, what rows of one column must share, and an empty value."""
    paths, made_by = pattern.form.paths(), dict[int, Path]()
    first = 0
    for number, entry in pattern.calls:
        count = entry.links.count(None)
        of_call = [
            path for path, link in zip(paths, pattern.links, strict=True) if link is not None and link[0] >= number
        ]
        made_by.update({first + i: of_call[min(i, len(of_call) - 1)] for i in range(count) if of_call})
        first += count
    others = [path for path, link in zip(paths, pattern.links, strict=True) if link is None]
    made_by.update({first + i: path for i, path in enumerate(others)})
    for index, kind in enumerate(pattern.kinds):
        if pattern.same_as[index] != index:
            continue
        name = display(made_by[index]) if made_by.get(index) else "input"
        dtype = {"int": "int64", "float": "float64", "complex": "complex128"}.get(kind.dtype, kind.dtype)
        dtype = dtype.removeprefix("torch.") if kind.rank else kind.dtype
        if kind.name in ("value", "numpy scalar", "encoded"):
            yield name, (dtype,), {"str": "", "bytes": b"", "float": 0.0, "bool": False}.get(dtype, 0)
            continue
        yield name, (dtype, kind.rank), _no_elements(dtype, kind.rank)
        if stored_count(kind) == 2:
            extra = "palette" if kind.name == "PIL P" else "canvas"
            yield f"{name}_{extra}", (extra,), _no_elements("uint8" if extra == "palette" else "int64", 1)


def _no_elements(dtype: str, rank: int) -> Any:
    return torch.empty([0] * rank, dtype=getattr(torch, dtype, torch.uint8), device="cpu")


def _sources_in_place(pattern: Pattern, read: Read) -> tuple[int, ...] | None:
    """Return for each leaf of a sample the stored leaf that it is made of; None unless there is one for each."""
    if len(pattern.calls) != len(pattern.tape) or pattern.same_as != tuple(range(len(pattern.kinds))):
        return None
    stored_of: dict[tuple[int, int], int] = {}
    first = 0
    for number, entry in pattern.calls:
        count = len(entry.links)
        if (
            any(link is not None for link in entry.links)
            or sum(link is not None and link[0] == number for link in pattern.links) != count
        ):
            return None
        stored_of.update({(number, i): first + i for i in range(count)})
        first += count
    source = []
    for link in pattern.links:
        if link is not None and link not in stored_of:
            return None
        source.append(first if link is None else stored_of[link])
        first += link is None
    if sorted(source) != list(range(len(pattern.kinds))):
        return None
    leaves = take_apart(read.sample)[0]
    for leaf, link, at in zip(leaves, pattern.links, source, strict=True):
        stored, made = pattern.kinds[at], kind_of(leaf)
        if stored_count(stored) > 1 and not (link is None and is_sized(leaf)):
            return None
        if link is not None and (
            (stored.rank or 3) != (made.rank or 3) or made.name == "array hwc" or stored.is_image != made.is_image
        ):
            return None
    return tuple(source)
