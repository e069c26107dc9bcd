"""The two parts of a pipeline that was cut, as functions: of a dataset, and of one sample of a batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from memfeed.errors import SplitError
from memfeed.splitting.steps import name_of, run, seed_step
from memfeed.splitting.values import Value, from_tensor, is_image, kind_of, to_tensor


class Fixed:
    """The fixed part of a pipeline, in its place in a dataset."""

    def __init__(self, steps: Sequence[Any]) -> None:
        self.steps = list(steps)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the steps make of their arguments, in the form of the whole pipeline."""
        return run(self.steps, Value(args, kwargs)).result()

    def __repr__(self) -> str:
        return f"Fixed({', '.join(map(name_of, self.steps))})"


def read_file(path: str) -> bytes:
    """Return the bytes of a file, in place of the image that a dataset's ``loader`` opens."""
    with open(path, "rb") as file:
        return file.read()


class ShortSide:
    """Shrink images so that their short side has at most `size` pixels. Masks keep their values."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the arguments with smaller images: the first is the image, others are masks."""
        value = Value(args, kwargs)
        images = [self._shrunk(image, is_mask=index > 0) for index, image in enumerate(value.images())]
        return value.with_images(images).result()

    def _shrunk(self, image: Any, *, is_mask: bool) -> Any:
        kind = kind_of(image)
        if kind.startswith("PIL"):
            width, height = image.size
            target = self.target(height, width)
            if target == (height, width):
                return image
            from PIL import Image

            mode = Image.Resampling.NEAREST if is_mask else Image.Resampling.BILINEAR
            return image.resize(target[::-1], mode)
        tensor = to_tensor(image)
        is_last = kind == "array" and tensor.ndim == 3  # channels
        planes = tensor.permute(2, 0, 1) if is_last else tensor
        target = self.target(*planes.shape[-2:])
        if target == tuple(planes.shape[-2:]):
            return image
        batch = planes.reshape(1, -1, *planes.shape[-2:])
        if is_mask or kind == "Mask":
            rows, columns = (
                torch.arange(t, device="cpu") * s // t for s, t in zip(planes.shape[-2:], target, strict=True)
            )
            small = batch[0][:, rows[:, None], columns]
        else:
            small = torch.nn.functional.interpolate(batch, target, mode="bilinear", antialias=True)[0]
        small = small.reshape(*planes.shape[:-2], *target)
        return from_tensor((small.permute(1, 2, 0) if is_last else small).contiguous(), kind)

    def target(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width that an image of this size gets."""
        short = min(height, width)
        if short <= self.size:
            return height, width
        return max(1, round(height * self.size / short)), max(1, round(width * self.size / short))


class Rest:
    """Steps of a pipeline as a function of one sample's tensors, for `PerSample`.

    Args:
        steps: of the original pipeline.
        like: a value that the first step got, which says what each tensor was: its images are not kept.
    """

    def __init__(self, steps: Sequence[Any], like: Value) -> None:
        self.steps = list(steps)
        self.kinds = [kind_of(image) for image in like.images()]
        self._form = _Form.of(like)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what the steps make of the images of one sample. Draws from the global generators."""
        images = [from_tensor(tensor, kind) for tensor, kind in zip(tensors, self.kinds, strict=True)]
        for step in self.steps:
            seed_step(step, random.getrandbits(31))
        results = run(self.steps, self._form.value(images)).images()
        if len(results) != len(tensors):
            raise SplitError(f"found {len(results)} images after {self}; expected {len(tensors)}, as before it")
        return tuple(to_tensor(result) for result in results)

    def __repr__(self) -> str:
        return ", ".join(map(name_of, self.steps))


class _Form:
    """The form of the arguments of a pipeline: which of them are images."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    @classmethod
    def of(cls, value: Value) -> _Form:
        marked = value.with_images([torch.empty(0, 0, device="cpu")] * len(value.images()))
        return cls(_without_values(marked.args), _without_values(marked.kwargs))

    def value(self, images: Sequence[Any]) -> Value:
        return Value(self.args, self.kwargs).with_images(images)


def _without_values(tree: Any) -> Any:
    """Return a tree without what differs from sample to sample: labels, names."""
    if isinstance(tree, dict):
        return {key: _without_values(part) for key, part in tree.items() if _holds_image(part)}
    if isinstance(tree, list | tuple):
        parts = [_without_values(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree if is_image(tree) else None


def _holds_image(tree: Any) -> bool:
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else None
    return is_image(tree) if parts is None else any(map(_holds_image, parts))
