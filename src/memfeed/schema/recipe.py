"""The transforms of a pipeline as JSON: names of classes of memfeed, and their arguments. No code, and no pickle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

PER_SAMPLE = "PerSample"
"""The name of a step that holds a user's functions, which a store cannot keep; its ``shown`` says what they are."""

NAMES = frozenset({
    "CenterCrop", "ColorJitter", "Normalize", "RandomAffine", "RandomCrop", "RandomErasing", "RandomGrayscale",
    "RandomHorizontalFlip", "RandomResizedCrop", "RandomRotation", "RandomVerticalFlip", "Resize", "ToDtype",
    "Decode",
})  # fmt: skip
"""The classes of `memfeed.transforms` that a recipe may name."""


class RecipeStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One transform: the name of its class, its arguments as JSON, and the paths of its fields, the images first.

    ``shown`` describes functions of the user's, for people.
    """

    name: str
    arguments: dict[str, Any] = {}
    on: tuple[tuple[str | int, ...], ...] = ()
    shown: str = ""


def recipe_problem(steps: Sequence[RecipeStep]) -> str:
    """Return a phrase that says what is wrong with a recipe, or an empty string."""
    for step in steps:
        if step.name not in NAMES and step.name != PER_SAMPLE:
            return f"a transform {step.name!r:.60}, which memfeed does not have"
    return ""
