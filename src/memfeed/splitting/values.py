"""What goes through a pipeline: the arguments of a call, the images in them, and images as tensors and back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memfeed.errors import SplitError, brief
from memfeed.schema import values


@dataclass(frozen=True, eq=False)
class Value:
    """The arguments of one call of a pipeline, or what it returned, in the same form."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def copied(self) -> Value:
        """Return a copy that a step may write to."""
        return Value(*copy.deepcopy((self.args, self.kwargs)))

    def result(self) -> Any:
        """Return it as a pipeline returns it: one value, a tuple of several, or a dict."""
        if self.kwargs:
            return self.kwargs
        return self.args[0] if len(self.args) == 1 else self.args

    def after(self, result: Any) -> Value:
        """Return what a step made of it as the arguments of the next step."""
        if self.kwargs:
            return Value((), dict(result))
        return Value((result,) if len(self.args) == 1 else tuple(result), {})

    def images(self) -> list[Any]:
        """Return the leaves that are images, masks or other tensors, in order."""
        return [leaf for leaf in _leaves((self.args, self.kwargs)) if is_image(leaf)]

    def with_images(self, images: Sequence[Any]) -> Value:
        """Return this value with other images."""
        left = iter(images)
        args, kwargs = _replaced((self.args, self.kwargs), left)
        return Value(args, kwargs)


def is_image(leaf: Any) -> bool:
    """Return True for PIL images, and for tensors and arrays with two dims or more."""
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return leaf.ndim >= 2
    return hasattr(leaf, "getbands")


def kind_of(leaf: Any) -> str:
    """Return what an image is: "PIL RGB" and the like, "array", "tensor", or the class of torchvision's tv_tensor."""
    if hasattr(leaf, "getbands"):
        return f"PIL {leaf.mode}"
    if isinstance(leaf, np.ndarray):
        return "array"
    module = type(leaf).__module__
    return type(leaf).__name__ if module.startswith("torchvision.tv_tensors") else "tensor"


def to_tensor(leaf: Any) -> torch.Tensor:
    """Return an image as a store keeps it: PIL images [c, h, w], tensors and arrays as they are."""
    tensor = values.as_tensor(leaf)
    if tensor is None:
        raise SplitError(f"found {brief(leaf)} in a pipeline; expected an image, a tensor or an array")
    return tensor


def from_tensor(tensor: torch.Tensor, kind: str) -> Any:
    """Return a tensor as the image of this kind that it was stored from."""
    if kind.startswith("PIL "):
        from PIL import Image

        mode, array = kind[4:], tensor.numpy()
        array = np.ascontiguousarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0))
        if mode == "1":
            return Image.fromarray(array).convert("1")
        image = Image.fromarray(array)
        if image.mode == mode:
            return image
        return Image.frombytes(mode, image.size, array.tobytes())
    if kind == "array":
        return tensor.numpy()
    if kind == "tensor":
        return tensor
    from torchvision import tv_tensors

    return getattr(tv_tensors, kind)(tensor)


def difference(one: Any, other: Any) -> float:
    """Return the largest difference between two images as tensors, in levels of 8 bits; infinity for other shapes."""
    left, right = to_tensor(one), to_tensor(other)
    if left.shape != right.shape or left.dtype != right.dtype:
        return float("inf")
    if not left.numel():
        return 0.0
    scale = 255.0 if left.dtype.is_floating_point else 1.0
    found = (left.double() - right.double()).abs().nan_to_num(0.0).max() * scale
    return float(found)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in _leaves(part)]
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in _leaves(part)]
    return [tree]


def _replaced(tree: Any, images: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _replaced(part, images) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [_replaced(part, images) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return next(images) if is_image(tree) else tree
