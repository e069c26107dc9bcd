"""Find the pipelines that a dataset and the datasets inside it hold, and put another in their place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset

from memfeed.errors import SplitError

NAMES = ("transforms", "transform")
_DEEPEST = 16


@dataclass(frozen=True, eq=False)
class Place:
    """A pipeline, and where it is: the attributes from the dataset to its owner, and its name there."""

    path: tuple[str | int, ...]
    owner: Any
    name: str
    pipeline: Any

    def __str__(self) -> str:
        """Return the expression that reaches it."""
        parts = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in (*self.path, self.name))
        return f"dataset{parts}"


def find_places(dataset: Any, name: str | None = None) -> list[Place]:
    """Return the pipelines of a dataset and of those that it wraps, the outermost first.

    Args:
        dataset: any.
        name: the attribute that holds the pipeline; None for ``transforms`` and ``transform``.
    """
    found = []
    for path, owner in _owners(dataset, (), 0):
        joint = getattr(owner, "transforms", None)
        names = (name,) if name is not None else NAMES
        if name is None and type(joint).__name__ == "StandardTransform":  # torchvision's, of the other two
            names = ("transform",)
        pipelines = [(one, getattr(owner, one, None)) for one in names]
        found += [Place(path, owner, one, pipeline) for one, pipeline in pipelines if is_pipeline(pipeline)]
    return found


def is_pipeline(value: Any) -> bool:
    """Return True for a function, or a list of functions."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(callable, value))
    return callable(value) and not isinstance(value, type)


def with_pipeline(dataset: Any, places: list[Place], pipeline: Any) -> Any:
    """Return a shallow copy of `dataset` with `pipeline` at these places. The dataset given does not change."""
    for place in places:
        dataset = with_attribute(dataset, place.path, place.name, pipeline)
    return dataset


def with_attribute(dataset: Any, path: tuple[str | int, ...], name: str, value: Any) -> Any:
    """Return a shallow copy of `dataset` in which the owner at `path` has another value of an attribute."""
    if path and isinstance(path[0], int):  # of the datasets of a ConcatDataset
        return [with_attribute(one, path[1:], name, value) if i == path[0] else one for i, one in enumerate(dataset)]
    changed = copy.copy(dataset)
    first = str(path[0]) if path else name
    try:
        if path:
            value = with_attribute(getattr(dataset, first), path[1:], name, value)
        setattr(changed, first, value)
    except AttributeError as error:
        raise SplitError(
            f"found that {type(dataset).__name__} does not let its {first} be set ({error}); expected a plain "
            "attribute: store the fixed part by a dataset of yours, and pass transform= to Loader"
        ) from None
    joint = getattr(dataset, "transforms", None)
    if first == "transform" and type(joint).__name__ == "StandardTransform":
        changed.transforms = copy.copy(joint)
        changed.transforms.transform = value
    return changed


def _owners(value: Any, path: tuple[str | int, ...], depth: int) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield a dataset and those inside it: `Subset`, `ConcatDataset`, wrappers of the user's."""
    if depth > _DEEPEST:
        return
    yield path, value
    if isinstance(value, ConcatDataset):
        for index, part in enumerate(value.datasets):
            yield from _owners(part, (*path, "datasets", index), depth + 1)
        return
    inner = {} if isinstance(value, torch.nn.Module) else getattr(value, "__dict__", {})
    for name, one in inner.items():
        if one is not value and (isinstance(one, Dataset) or (name == "dataset" and hasattr(one, "__getitem__"))):
            yield from _owners(one, (*path, name), depth + 1)
