"""Functions of the user's within a Compose, and how a function is called on one field of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.schema.jagged import RaggedList
from memfeed.transforms.batch_fields import On, find_all, mark_ragged, own_ragged, replace
from memfeed.transforms.transform import Transform

B = TypeVar("B")


class Call(Transform):
    """A function of the user's as a part of a Compose: of the batch, or of one field.

    Args:
        fn: takes a batch and returns one; or takes a field, and returns what takes its place.
        on: the field; None for the batch.
    """

    thread_safe = False  # the user's code
    of_whole_batches = True

    def __init__(self, fn: Callable[[Any], Any], *, on: On = None) -> None:
        super().__init__(on=on)
        self.fn = fn

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Call the function; see `Operation.change_batch`."""
        if on is not None:
            for field in find_all(batch, on):
                batch = replace(batch, field, call_on_field(self.fn, field.tensor, f"field {field}"))
            return batch
        result: Any = self.fn(own_ragged(batch))
        if result is None:
            raise TransformError(f"{self.extra_repr()} returned None for a batch; expected a batch: return it")
        marked: B = mark_ragged(result, len(keys.rows))
        return marked

    def extra_repr(self) -> str:
        """Return the function, for repr."""
        return str(getattr(self.fn, "__qualname__", self.fn))


def call_on_field(function: Callable[[Any], Any], value: Any, name: str) -> Any:
    """Return the result of `function` for a field. Images of several sizes are passed one by one, and become one batch.

    Raises:
        TransformError: the images that it returns are not of one shape; `name` is what the message calls the field.
    """
    is_images = isinstance(value, torch.Tensor) and value.is_nested and value.ndim > 3
    if not is_images and not isinstance(value, RaggedList):
        if isinstance(function, Transform) and value.ndim == 3 and not value.is_nested:
            return function(value.unsqueeze(1)).squeeze(1)  # by itself it could be a single image
        return function(value)
    rows = list(value.unbind()) if isinstance(value, torch.Tensor) else list(value.owned())
    if isinstance(function, Transform):
        made = function(rows)
        return RaggedList(made) if isinstance(made, list) else made
    return one_batch([function(row) for row in rows], name)


def one_batch(results: list[Any], name: str) -> torch.Tensor:
    """Stack what a function made of each sample. Raise TransformError if the results are not tensors of one shape."""
    shapes = {tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__ for result in results}
    if len(shapes) != 1 or not isinstance(results[0], torch.Tensor):
        raise TransformError(
            f"{name}: found results of shapes {sorted(shapes, key=str)[:4]}; expected one shape for all samples of a "
            "batch; crop or resize to one size at the end, or for a list: PerSample(f, one_size=False)"
        )
    return torch.stack(results)
