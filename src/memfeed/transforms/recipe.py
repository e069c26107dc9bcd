"""Make transforms of their description in a store; see `memfeed.schema.recipe`."""

from __future__ import annotations

from collections.abc import Sequence

from memfeed.errors import TransformError, brief
from memfeed.schema.fields import DTYPES
from memfeed.schema.names import Names, Path
from memfeed.schema.recipe import NAMES, PER_SAMPLE, RecipeStep
from memfeed.transforms.compose import Compose
from memfeed.transforms.decode import Decode
from memfeed.transforms.ops.color import ColorJitter, RandomGrayscale
from memfeed.transforms.ops.crop import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomVerticalFlip
from memfeed.transforms.ops.erase import RandomErasing
from memfeed.transforms.ops.normalize import Normalize, ToDtype
from memfeed.transforms.ops.resize import RandomResizedCrop, Resize
from memfeed.transforms.ops.rotate import RandomAffine, RandomRotation
from memfeed.transforms.transform import Transform

_CLASSES: dict[str, type[Transform]] = {
    cls.__name__: cls
    for cls in (
        CenterCrop, ColorJitter, Decode, Normalize, RandomAffine, RandomCrop, RandomErasing, RandomGrayscale,
        RandomHorizontalFlip, RandomResizedCrop, RandomRotation, RandomVerticalFlip, Resize, ToDtype,
    )
}  # fmt: skip
assert _CLASSES.keys() == NAMES


def make_transform(step: RecipeStep) -> Transform:
    """Return the transform of a step. Raise TransformError for arguments that its class does not take."""
    arguments = dict(step.arguments)
    if "dtype" in arguments:
        arguments["dtype"] = DTYPES.get(arguments["dtype"])
    try:
        return _CLASSES[step.name](**arguments, on=on_of(step.on))
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
    """Return what ``on=`` takes for these paths: a tuple is one path, a list several fields."""
    return list(paths) if len(paths) > 1 else paths[0] if paths else None
