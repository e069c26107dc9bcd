"""Make transforms of their description in a store; see `memfeed.schema.recipe`."""

from __future__ import annotations

from collections.abc import Sequence

from memfeed import transforms
from memfeed.errors import TransformError, brief
from memfeed.schema.fields import DTYPES
from memfeed.schema.names import Names, Path
from memfeed.schema.recipe import PER_SAMPLE, RecipeStep, arguments_problem
from memfeed.transforms.compose import Compose
from memfeed.transforms.transform import Transform


def make_transform(step: RecipeStep) -> Transform:
    """Return the transform of a step. Raise TransformError for arguments that its class does not take."""
    problem = arguments_problem(step.name, step.arguments)
    if problem:
        raise TransformError(f"found the transform {step.name} of a store with {problem}")
    arguments = dict(step.arguments)
    if "dtype" in arguments:
        arguments["dtype"] = DTYPES.get(arguments["dtype"])
    try:
        made: Transform = getattr(transforms, step.name)(**arguments, on=on_of(step.on))
        return made
    except (TypeError, ValueError, AttributeError) as error:
        raise TransformError(
            f"found the arguments {brief(step.arguments)} of {step.name} in a store: {error}"
        ) from None


def make_pipeline(steps: Sequence[RecipeStep]) -> Transform | None:
    """Return the transforms of a recipe as one; None if it has functions that no store can keep."""
    if any(step.name == PER_SAMPLE for step in steps):
        return None
    return Compose(map(make_transform, steps))


def on_of(paths: Sequence[Path]) -> Names | None:
    """Return the value of ``on=`` for these paths: a tuple is one path, a list several fields."""
    return list(paths) if len(paths) > 1 else paths[0] if paths else None
