"""Transforms as JSON: what a store keeps of a pipeline, and how the transforms are made again.

A recipe names classes of this package only, and their arguments. Nothing else can be made from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from memfeed.errors import TransformError, brief
from memfeed.schema.fields import DTYPES
from memfeed.schema.names import Path
from memfeed.transforms.batch_fields import Names
from memfeed.transforms.compose import Compose
from memfeed.transforms.ops.color import ColorJitter, RandomGrayscale
from memfeed.transforms.ops.crop import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomVerticalFlip
from memfeed.transforms.ops.erase import RandomErasing
from memfeed.transforms.ops.normalize import Normalize, ToDtype
from memfeed.transforms.ops.resize import RandomResizedCrop, Resize
from memfeed.transforms.ops.rotate import RandomAffine, RandomRotation
from memfeed.transforms.transform import Transform

PER_SAMPLE = "PerSample"
"""The name of a step that holds a user's functions, which a store cannot keep; its ``shown`` says what they are."""

_CLASSES: dict[str, type[Transform]] = {
    cls.__name__: cls
    for cls in (
        CenterCrop, ColorJitter, Normalize, RandomAffine, RandomCrop, RandomErasing, RandomGrayscale,
        RandomHorizontalFlip, RandomResizedCrop, RandomRotation, RandomVerticalFlip, Resize, ToDtype,
    )
}  # fmt: skip


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
        if step.name not in _CLASSES and step.name != PER_SAMPLE:
            return f"a transform {step.name!r:.60}, which memfeed does not have"
    return ""


def make_transform(step: RecipeStep) -> Transform:
    """Return the transform of a step. Raise TransformError for arguments that its class does not take."""
    arguments = dict(step.arguments)
    if "dtype" in arguments:
        arguments["dtype"] = DTYPES.get(arguments["dtype"])
    try:
        return _CLASSES[step.name](**arguments, on=on_of(step.on))
    except (TypeError, ValueError, AttributeError) as error:
        raise TransformError(f"found the arguments {brief(step.arguments)} of {step.name} in a store: {error}") from None


def make_pipeline(steps: Sequence[RecipeStep]) -> Transform | None:
    """Return the transforms of a recipe as one; None if it has functions that no store can keep."""
    if any(step.name == PER_SAMPLE for step in steps):
        return None
    return Compose(map(make_transform, steps))


def on_of(paths: Sequence[Path]) -> Names | None:
    """Return what ``on=`` takes for these paths: a tuple is one path, a list several fields."""
    return list(paths) if len(paths) > 1 else paths[0] if paths else None
