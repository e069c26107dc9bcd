"""Samples as trees of tensors: those of a dataset, and those that a batch is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate


class WrongStructureError(Exception):
    """A batch has another structure than the samples that it should be made of."""


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key, attribute or position; None for a leaf."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "to_dict") and not isinstance(value, torch.Tensor):  # graphs, TensorDict, tensorclass
        return dict(value.to_dict())
    if hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a container like `value` with these parts. Dicts stand for graphs, dataclasses and tensorclasses."""
    if hasattr(value, "_fields"):
        return type(value)(*parts.values())
    if isinstance(value, list | tuple):
        return list(parts.values()) if isinstance(value, list) else tuple(parts.values())
    return parts


def collated(leaf: Any) -> Any:
    """Return what `default_collate` makes of one leaf, without the batch's dim; PIL images as [c, h, w].

    What it cannot collate stays as it is.
    """
    if isinstance(leaf, Image.Image):
        pixels = torch.from_numpy(np.array(leaf))
        return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone().as_subclass(torch.Tensor)
    if isinstance(leaf, str | bytes):
        return leaf
    try:
        return default_collate([leaf])[0].clone()
    except TypeError:
        return leaf


def sample_tree(sample: Any) -> Any:
    """Return a copy of a sample of a dataset, whose numbers, arrays and images are tensors as in a batch."""
    parts = parts_of(sample)
    if parts is None:
        return collated(sample)
    return rebuilt(sample, {key: sample_tree(part) for key, part in parts.items()})


def row_tree(batch: Any, like: Any, row: int, where: str = "batch") -> Any:
    """Return a copy of one row of a batch, as a tree like the sample `like`.

    Raises WrongStructureError if the batch has other containers or keys, or no row for a leaf.
    """
    if hasattr(batch, "get_example"):
        batch, row = batch.get_example(row), None
    parts = parts_of(like)
    if parts is None:
        return _row_of_leaf(batch, row, where)
    found = parts_of(batch)
    if found is None or found.keys() != parts.keys():
        shown = type(batch).__name__ if found is None else f"{type(batch).__name__} of {list(found)}"
        raise WrongStructureError(f"{where} is {shown}; the sample has {list(parts)}")
    return rebuilt(like, {key: row_tree(found[key], part, row, f"{where}[{key!r}]") for key, part in parts.items()})


def _row_of_leaf(batch: Any, row: int | None, where: str) -> Any:
    if row is None or batch is None:
        return collated(batch)
    try:
        value = batch.unbind()[row] if isinstance(batch, torch.Tensor) and batch.is_nested else batch[row]
    except (TypeError, IndexError, KeyError) as error:
        raise WrongStructureError(f"{where} is {type(batch).__name__}, which has no row {row}") from error
    return collated(value)


def leaves_of(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return the leaves of a tree by path."""
    parts = parts_of(tree)
    if parts is None:
        return {path: tree}
    return {at: leaf for key, part in parts.items() for at, leaf in leaves_of(part, (*path, key)).items()}


def describe(value: Any) -> Any:
    """Return the containers, types, dtypes and shapes of a batch, to be compared."""
    if isinstance(value, torch.Tensor):
        return type(value).__name__, str(value.dtype), tuple(value.shape)
    parts = parts_of(value)
    if parts is None:
        return type(value).__name__
    return type(value).__name__, tuple((key, describe(part)) for key, part in parts.items())


def expected_batch(samples: list[Any]) -> Any:
    """Return the description of what `default_collate` makes of samples; None if it raises."""
    try:
        return _with_lists_of_text(describe(default_collate(samples)))
    except (TypeError, RuntimeError, ValueError, KeyError, AttributeError):
        return None


def _with_lists_of_text(described: Any) -> Any:
    """Return a description with lists of text: default_collate gives a tuple, which docs/trainers.md tells."""
    if not isinstance(described, tuple):
        return described
    if len(described) == 2 and described[0] == "tuple" and all(one in ("str", "bytes") for _, one in described[1]):
        return ("list", described[1])
    return tuple(map(_with_lists_of_text, described))


def apply(function: Callable[[Any], bool], tree: Any) -> bool:
    """Return True if a property holds for a sample; it may return a tensor of one bool."""
    return bool(function(tree))
