"""How a sample is made of what is stored of it, and one reading of a sample taken apart in this way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memfeed.schema.compare import equal
from memfeed.schema.names import display
from memfeed.splitting.leaves import NONE, Form, Kind, from_stored, stored_count, to_stored
from memfeed.splitting.recording import Entry, Node
from memfeed.splitting.tracer import Callee

_SMALL = 1 << 14  # bytes of labels or tokens


@dataclass(frozen=True, eq=False)
class Pattern:
    """How samples of one kind are made of what is stored of them.

    Args:
        tape: the calls and operations, in order. Values are those that are the same in all samples.
        form: of the samples.
        links: for each leaf of a sample the node that made it; None for a leaf that is stored.
        kinds: of what is stored: the arguments of the calls that no entry made, then the leaves of the sample.
        same_as: for each of these the first that is always equal to it, which is stored for both.
    """

    tape: tuple[Entry, ...]
    form: Form
    links: tuple[Node | None, ...]
    kinds: tuple[Kind, ...]
    same_as: tuple[int, ...]

    @property
    def calls(self) -> list[tuple[int, Entry]]:
        """The calls of the tape, each with its number."""
        return [(number, entry) for number, entry in enumerate(self.tape) if isinstance(entry.function, Callee)]

    @cached_property
    def given(self) -> int:
        """The number of stored leaves that are arguments of calls; they come first."""
        return sum(entry.links.count(None) for _, entry in self.calls)

    def differs_from(self, other: Pattern) -> str:
        """Return a phrase that says in what this differs from `other`, or an empty string."""
        mine, theirs = [[(e.function, e.links) for e in one.tape] for one in (self, other)]
        if [one for one in mine if isinstance(one[0], Callee)] != [one for one in theirs if isinstance(one[0], Callee)]:
            return "it calls other steps, or in another order"
        if mine != theirs:
            return "it changes the result of its pipeline in another way"
        for one, two in zip(self.tape, other.tape, strict=True):
            if one.form != two.form or (one.made is not None and one.made != two.made):
                return "its pipeline gets or returns other containers"
            is_operation = not isinstance(one.function, Callee)
            if is_operation and not equal(one.values, two.values):
                return "it changes the result of its pipeline with other numbers"
        if self.form != other.form:
            return "it has other containers, or another number of leaves"
        if self.links != other.links:
            field = next(i for i, (a, b) in enumerate(zip(self.links, other.links, strict=True)) if a != b)
            is_made = "comes from its pipeline" if self.links[field] else "does not come from its pipeline"
            return f"field {display(self.form.paths()[field])} {is_made} here, and elsewhere from another place"
        pairs = enumerate(zip(self.kinds, other.kinds, strict=True))
        at = next((i for i, (a, b) in pairs if a != b and not (i >= self.given and a == NONE)), None)
        if at is not None:
            return f"found {describe(self.kinds[at])} where others have {describe(other.kinds[at])}"
        if any(self.same_as[i] != self.same_as[j] for i, j in enumerate(other.same_as)):
            return "two of its values that are stored once, because they are equal in other samples, differ"
        return ""


@dataclass(frozen=True, eq=False)
class Read:
    """One reading of a sample.

    Args:
        sample: as the dataset gave it.
        pattern: how it was made.
        leaves: what a store would keep of it, in memory of their own.
        states: of the generators where the random part of each call began.
    """

    sample: Any
    pattern: Pattern
    leaves: list[Any]
    states: list[Any]

    @property
    def writes(self) -> bool:
        """True if a call changed, in place, what an earlier call or operation had made."""
        return any(entry.writes for _, entry in self.pattern.calls)

    @property
    def keeps_work(self) -> bool:
        """True if a store keeps more than the path of a file that a random step reads, numbers, text and tokens."""
        given, kinds = self.pattern.given, self.pattern.kinds
        if any(kind.rank or kind.name == "encoded" for kind in kinds[:given]):
            return True
        pairs = zip(self.leaves[given:], kinds[given:], strict=True)
        beside = [leaf for leaf, kind in pairs if kind.rank and not isinstance(leaf, list)]
        if any(isinstance(leaf, str) and os.path.isfile(leaf) for leaf in self.leaves[:given]):
            return sum(getattr(leaf, "nbytes", _SMALL) for leaf in beside) >= _SMALL
        return bool(beside)


def describe(kind: Kind) -> str:
    """Return a kind for messages."""
    of_dtype = "" if kind.name.startswith("PIL") else f" {kind.dtype.removeprefix('torch.')}"
    return f"{kind.name}{of_dtype}" + (f" of {kind.rank} dims" if kind.rank else "")


def to_parts(pattern: Pattern, leaves: Sequence[Any]) -> list[Any]:
    """Return the values that a store keeps of the leaves of a sample, without those that are kept already."""
    return [
        part
        for index, (leaf, kind) in enumerate(zip(leaves, pattern.kinds, strict=True))
        if pattern.same_as[index] == index
        for part in ([None] * stored_count(kind) if leaf is None and kind != NONE else to_stored(leaf, kind))
    ]


def from_parts(pattern: Pattern, parts: Sequence[Any]) -> list[Any]:
    """Return the leaves of a sample from the values that a store keeps of them."""
    left, leaves = iter(parts), list[Any]()
    for index, kind in enumerate(pattern.kinds):
        if pattern.same_as[index] != index:
            leaves.append(leaves[pattern.same_as[index]])
        else:
            values = [next(left) for _ in range(stored_count(kind))]
            leaves.append(None if values[0] is None else from_stored(values, kind))
    return leaves


def equal_leaves(leaves: Sequence[Any], kinds: Sequence[Kind]) -> tuple[int, ...]:
    """Return for each leaf the first that is equal to it, among images, tensors and arrays.

    Numbers and text that are equal are so by chance.
    """
    found: list[int] = []
    for i, kind in enumerate(kinds):
        alike = (j for j in range(i) if kinds[j] == kind and found[j] == j)
        found.append(next((j for j in alike if equal(leaves[j], leaves[i])), i) if kind.rank else i)
    return tuple(found)
