"""The values that go through the steps of a pipeline: the arguments of a call, and the images in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfeed.errors import SplitError, brief
from memfeed.schema.compare import equal
from memfeed.splitting.leaves import copied_tree, kind_of, take_apart, to_tensor


@dataclass(frozen=True, eq=False)
class Value:
    """The arguments of one call of a step, or what it returned, in the same form."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def after(self, step: Any) -> Value:
        """Apply a step to a copy of this value. Return the result as the arguments of the next step.

        Raises:
            SplitError: its result has another form than its arguments: it cannot be passed on.
        """
        return self.copy()._after(step)

    def copy(self) -> Value:
        """Return a copy, also of its leaves."""
        return Value(*copied_tree((self.args, self.kwargs)))

    def _after(self, step: Any) -> Value:
        """Apply a step to this value itself, as `after` to a copy of it."""
        args, kwargs = self.args, self.kwargs
        result = step(*args, **kwargs)
        if len(args) == 1 and not kwargs:
            return Value((result,), {})
        if isinstance(result, Mapping) and kwargs and not args:
            return Value((), dict(result))
        if isinstance(result, list | tuple) and not kwargs:
            return Value(tuple(result), {})
        raise SplitError(f"found {brief(result, 60)}; expected what the next step takes: a result like the arguments")

    def through(self, steps: Sequence[Any]) -> Value:
        """Apply steps to this value, one after the other, as a pipeline does: a step may write to what it gets."""
        value = self
        for step in steps:
            value = value._after(step)
        return value

    def leaves(self) -> list[Any]:
        """Return the leaves, in order."""
        return take_apart((self.args, self.kwargs))[0]

    def images(self) -> list[Any]:
        """Return the leaves that are images or masks, in order: the first has 1 to 4 channels, the others its size."""
        return [leaf for leaf, _ in self._scene()]

    def fields(self) -> list[torch.Tensor]:
        """Return the images as fields that transforms take, see `as_field`."""
        return [field for _, field in self._scene()]

    def _scene(self) -> list[tuple[Any, torch.Tensor]]:
        """Return the images, each with its field; [] if the first has no channels, or they differ in size."""
        found = [(leaf, as_field(leaf)) for leaf in self.leaves() if kind_of(leaf).is_image]
        if not found or found[0][1].ndim != 3 or not 1 <= len(found[0][1]) <= 4:
            return []
        height_and_width = found[0][1].shape[-2:]
        return found if all(field.shape[-2:] == height_and_width for _, field in found) else []

    def others(self) -> list[Any]:
        """Return the leaves that are no images."""
        return [leaf for leaf in self.leaves() if not kind_of(leaf).is_image]

    def with_images(self, images: Sequence[Any]) -> Value:
        """Return this value with other images."""
        left = iter(images)
        leaves, form = take_apart((self.args, self.kwargs))
        args, kwargs = form.build([next(left) if kind_of(leaf).is_image else leaf for leaf in leaves])
        return Value(args, kwargs)


def have_same_others(one: Value, other: Value) -> bool:
    """Return True if the leaves of two values that are no images are the same."""
    return equal(one.others(), other.others())


def as_field(leaf: Any) -> torch.Tensor:
    """Return an image of a pipeline as a field that transforms take: channels first."""
    tensor = to_tensor(leaf)
    return tensor.permute(2, 0, 1) if kind_of(leaf).name == "array hwc" else tensor


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest difference between two images as tensors, in levels of 8 bits; infinity for other shapes."""
    left, right = to_tensor(one), to_tensor(other)
    if left.shape != right.shape or left.dtype != right.dtype:
        return float("inf")
    if not left.numel() or torch.equal(left, right):
        return 0.0
    scale = 255.0 if left.dtype.is_floating_point else 1.0
    return float((left.double() - right.double()).abs().nan_to_num(0.0).max() * scale)
