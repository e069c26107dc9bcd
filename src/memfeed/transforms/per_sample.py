"""Functions of the user's as transforms: of one sample, as albumentations has, of one field, or of a whole batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from memfeed.errors import TransformError, listed
from memfeed.random import Keys, uniform
from memfeed.schema.jagged import RaggedList
from memfeed.system import random_state
from memfeed.transforms.batch_fields import BatchField, On, find_all, mark_ragged, own_ragged, replace, require_decision
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


class PerSample(Transform):
    """Call a function on each sample by itself: slow, but it can be any function.

    A function that draws random numbers always draws the same for the same key.

    Args:
        fn: takes one sample's tensor of each field and returns as many, of equal shape for all samples. If `on` names
            one field, that is the image [c, h, w], of any size if the batch has a list of images. The global generators
            of `random`, NumPy and torch are seeded by the sample's key during the call, and restored after it. Or an
            albumentations transform or Compose, which gets the fields by name (the first is its "image", others are
            masks), channels last, as arrays; all of its steps draw from one pair of generators, seeded by the sample's
            key. It may end with ToTensorV2 or not.
        one_size: the results are one batch [n, ...]. False: they may differ in size, and become a list of tensors.
        on: the field or fields, see `Transform`.

    Raises:
        TransformError: `fn` is not callable; later, results that differ in shape between samples, or not one result per
            field. An error of `fn` gets a note with the row.
    """

    thread_safe = False  # it runs the user's code and sets the global generators
    of_whole_batches = True
    is_batched = False

    def __init__(self, fn: Callable[..., Any], *, one_size: bool = True, on: On = None) -> None:
        super().__init__(on=on)
        if not callable(fn):
            raise TransformError(
                f"PerSample got a {type(fn).__name__}; expected a callable that takes a sample's tensors"
            )
        self.fn, self.one_size = fn, one_size
        self._prepared: dict[tuple[str, ...], Any] = {}

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Call the function on each sample; see `Operation.change_batch`."""
        fields = find_all(batch, on)
        if on is None:  # the function may move pixels
            require_decision(batch, fields[0])
        seeds = (uniform(keys, stream)[:, 0] * 2**32).astype(np.int64).tolist()
        with random_state.preserved():  # once: to save and restore takes longer than many functions
            results = []
            for sample, seed in enumerate(seeds):
                made = self._call(fields, sample, seed, int(keys.rows[sample]))
                results.append([one.clone() for one in made])  # the function may fill the same memory again
        for index, field in enumerate(fields):
            values = [result[index] for result in results]
            if values:
                device = field.tensor[0].device
                one = one_batch(values, f"field {field}").to(device) if self.one_size else None
                batch = replace(batch, field, RaggedList(v.to(device) for v in values) if one is None else one)
        return batch

    def extra_repr(self) -> str:
        """Return the function, for repr."""
        return str(self.fn)

    def _call(self, fields: Sequence[BatchField], sample: int, seed: int, row: int) -> Sequence[torch.Tensor]:
        tensors = [field.tensor[sample].cpu() for field in fields]
        try:
            if hasattr(self.fn, "set_random_seed") and hasattr(self.fn, "add_targets"):
                return self._call_albumentations(fields, tensors, seed)
            getattr(self.fn, "seed_generators", random_state.seed)(seed)  # a part of a pipeline may have more of them
            results = self.fn(*(tensor.clone() for tensor in tensors))
        except TransformError:
            raise
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"in PerSample, on row {row} of the store")
            raise
        found = tuple(results) if isinstance(results, tuple | list) else (results,)
        if len(found) != len(fields) or not all(isinstance(result, torch.Tensor) for result in found):
            kinds = ", ".join(type(result).__name__ for result in found)
            raise TransformError(
                f"PerSample's function returned {kinds or 'nothing'} for the fields {listed(fields, 120)}; expected a "
                "tensor for each"
            )
        return found

    def _call_albumentations(
        self, fields: Sequence[BatchField], tensors: Sequence[torch.Tensor], seed: int
    ) -> list[torch.Tensor]:
        names = ["image", *(field.given or str(field.names[-1]) for field in fields[1:])]
        prepared: Any = self._prepared.get(tuple(names))
        if prepared is None:  # a copy, so that the user's object gets no targets
            prepared = self._prepared[tuple(names)] = copy.deepcopy(self.fn)
            prepared.add_targets({name: "mask" for name in names[1:] if name != "mask"})
        _share_generators(prepared, np.random.default_rng(seed), random.Random(seed))
        given = {name: _to_array(tensor) for name, tensor in zip(names, tensors, strict=True)}
        results = prepared(**given)
        return [_to_tensor(results[name], tensor) for name, tensor in zip(names, tensors, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": {}}


def _share_generators(transform: Any, generator: np.random.Generator, python: random.Random) -> None:
    """Let a transform of albumentations, and all transforms inside it, draw from these two generators.

    Its `set_random_seed` gives each transform generators of its own with the same seed: so all draw the same numbers.
    """
    if hasattr(transform, "set_random_state"):
        transform.set_random_state(generator, python)
    else:  # a Compose of older versions
        transform.random_generator, transform.py_random = generator, python
    for inner in getattr(transform, "transforms", ()):  # older versions do not pass it on
        _share_generators(inner, generator, python)


def _to_array(tensor: torch.Tensor) -> Any:
    """Return an array with channels last, [h, w, c], or [h, w] if there is one channel or no channel dim."""
    if tensor.ndim == 3:
        tensor = tensor[0] if len(tensor) == 1 else tensor.permute(1, 2, 0)
    return np.array(tensor.numpy(), order="C")


def _to_tensor(values: Any, given: torch.Tensor) -> torch.Tensor:
    """Return a tensor with channels first, with as many dims as `given`."""
    if not isinstance(values, torch.Tensor):
        values = torch.from_numpy(np.ascontiguousarray(values))
        values = values.permute(2, 0, 1) if values.ndim == 3 else values
    elif values.ndim == 3 and given.ndim == 3 and len(values) != len(given) and values.shape[2] == len(given):
        values = values.permute(2, 0, 1)  # ToTensorV2 leaves masks channels last
    if values.ndim == given.ndim - 1:
        values = values[None]
    elif values.ndim == given.ndim + 1 and len(values) == 1:
        values = values[0]
    result: torch.Tensor = values.contiguous()
    return result
