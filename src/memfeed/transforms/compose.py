"""A sequence of transforms."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from memfeed.errors import TransformError
from memfeed.schema.names import Path
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
