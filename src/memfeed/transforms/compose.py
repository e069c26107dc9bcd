"""A sequence of transforms: of a user, or of their description in a store; see `memfeed.schema.recipe`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from memfeed import transforms as known_transforms
from memfeed.errors import TransformError, brief
from memfeed.schema.fields import DTYPES
from memfeed.schema.names import Names, Path
from memfeed.schema.recipe import PER_SAMPLE, RecipeStep, arguments_problem
from memfeed.transforms.batch_fields import On
from memfeed.transforms.operation import Operation, Step
from memfeed.transforms.per_sample import Call
from memfeed.transforms.transform import Transform


class Compose(Transform):
    """Apply transforms in order, and fuse neighbours that allow it.

    On the CPU, consecutive crops, flips, casts and normalisations become one copy of each sample's window from the
    source into the output, and one pass over the output. On CUDA they become one kernel. `reference` gives the same
    images, one transform after another.

    Two transforms of one class draw from different streams (the name of the class and the index among the transforms of
    that class). To add or remove a transform of another class changes no draws. A Compose in a Compose counts as its
    parts.

    A part may also be whatever a loader takes as ``transform=``: a callable, which gets the batch and returns one
    (whatever `on` says), or ``{field: callable}``. These run in the caller's thread, and their random numbers are not
    keyed: for that, use `PerSample`.

    Args:
        transforms: to apply, in order.
        on: the field, see `Transform`, for those transforms that name none themselves.
        memory_format: of the images that come out: `torch.contiguous_format`, or `torch.channels_last`, with which
            convolutions on a GPU are fastest. That of the outermost Compose counts.

    Raises:
        TransformError: a part that is neither a Transform nor callable, or another memory format.

    >>> augment = Compose([RandomCrop(224), RandomHorizontalFlip(), Normalize(mean, std)])  # doctest: +SKIP
    >>> images = augment.apply(images, Keys(seed=0, epoch=0, rows=ids))  # doctest: +SKIP
    """

    def __init__(
        self,
        transforms: Iterable[Transform | Callable[[Any], Any] | Mapping[Any, Callable[[Any], Any]]],
        on: On = None,
        *,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__(on=on)
        if memory_format not in (torch.contiguous_format, torch.channels_last):
            raise TransformError(
                f"memory_format={memory_format}; expected torch.contiguous_format or torch.channels_last"
            )
        self.memory_format = memory_format
        self.transforms = torch.nn.ModuleList(part for given in transforms for part in _parts(given))
        schemas = [part.schema for part in self.transforms if isinstance(part, Transform)]
        self.leaf_makers: Mapping[Path, Callable[[Any], Any]] = {}  # rows of finished batches to leaves of samples
        self.schema = next((schema for schema in reversed(schemas) if schema is not None), None)

    def giving_samples(self) -> Compose:
        """Return this transform, whose last part gives samples in place of a batch of them, if that makes samples."""
        last: Any = self.transforms[-1] if len(self.transforms) else None
        if not hasattr(last, "giving_samples") or isinstance(last, Compose):
            return self
        other = copy.copy(self)
        other.__dict__["_modules"] = dict(other.__dict__["_modules"])
        other.transforms = torch.nn.ModuleList([*self.transforms[:-1], last.giving_samples()])
        return other

    def _steps(self) -> list[Step]:
        seen: Counter[str] = Counter()
        steps = []
        for transform, on in _flatten(self, None):
            name = type(transform).__name__
            steps.append(Step(transform, on, f"{name}.{seen[name]}"))
            seen[name] += 1
        return steps


def _parts(given: Any) -> list[Transform]:
    """Return one part of a Compose, as a user gave it, as transforms."""
    if isinstance(given, Transform):
        return [given]
    functions = given.items() if isinstance(given, Mapping) else [(None, given)]
    for _, function in functions:
        if not callable(function):
            raise TransformError(
                f"Compose got a {type(function).__name__}; expected a memfeed.transforms transform, a callable that "
                "takes a batch, or {field: callable}"
            )
    return [Call(function, on=field) for field, function in functions]


def _flatten(transform: Operation, outer: On) -> Iterable[tuple[Operation, On]]:
    """Return the transforms in a transform, each with its field."""
    on = outer if transform.on is None and not isinstance(transform, Call) else transform.on
    if not isinstance(transform, Compose):
        return [(transform, on)]
    parts = [part for part in transform.transforms if isinstance(part, Transform)]
    return [step for part in parts for step in _flatten(part, on)]


def make_transform(step: RecipeStep) -> Transform:
    """Return the transform of a step. Raise TransformError for arguments that its class does not take."""
    problem = arguments_problem(step.name, step.arguments)
    if problem:
        raise TransformError(f"found the transform {step.name} of a store with {problem}")
    arguments = dict(step.arguments)
    if "dtype" in arguments:
        arguments["dtype"] = DTYPES.get(arguments["dtype"])
    try:
        made: Transform = getattr(known_transforms, step.name)(**arguments, on=on_of(step.on))
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
