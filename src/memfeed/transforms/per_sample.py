"""Functions of one sample, as albumentations has them, in a batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from memfeed.errors import TransformError
from memfeed.random import Keys, uniform
from memfeed.transforms.batch_fields import BatchField, On, find_all, replace
from memfeed.transforms.transform import Transform

B = TypeVar("B")


class PerSample(Transform):
    """Call a function on each sample by itself: slow, but any function will do.

    One that draws random numbers draws the same for the same key, wherever and whenever.

    Args:
        fn: takes one sample's tensor of each field and gives as many back, of equal shape for all samples: the image
            [c, h, w] alone where `on` names one field. It is called with the global generators of `random`, NumPy and
            torch seeded by the sample's key, and they are put back afterwards. Or an albumentations transform or
            Compose, which gets the fields by name (the first is its "image", others are masks), channels last, as
            arrays, and is seeded by its own `set_random_seed`; it may end with ToTensorV2 or not.
        on: the field or fields, see `Transform`.

    Raises:
        TransformError: later, samples whose results differ in shape, or as many results as there are fields are not
            given. What `fn` raises comes with the row as a note.
    """

    thread_safe = False  # the user's code, and the global generators
    of_whole_batches = True

    def __init__(self, fn: Callable[..., Any], *, on: On = None) -> None:
        super().__init__(on=on)
        if not callable(fn):
            raise TransformError(
                f"PerSample got a {type(fn).__name__}; expected a callable that takes a sample's tensors"
            )
        self.fn = fn
        self._prepared: dict[tuple[str, ...], Any] = {}

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """See `Transform.change_batch`."""
        fields = find_all(batch, on)
        seeds = (uniform(keys, stream)[:, 0] * 2**32).astype(np.int64).tolist()
        results = [self._call(fields, sample, seed, int(keys.rows[sample])) for sample, seed in enumerate(seeds)]
        for number, field in enumerate(fields):
            made = [result[number] for result in results]
            shapes = {tuple(tensor.shape) for tensor in made}
            if len(shapes) > 1:
                raise TransformError(
                    f"field {field}: found results of shapes {sorted(shapes)}; expected one shape for all samples of a "
                    "batch; crop or resize to one size at the end"
                )
            if made:
                batch = replace(batch, field, torch.stack(made).to(field.tensor.device))
        return batch

    def extra_repr(self) -> str:
        """The function, for repr."""
        return str(self.fn)

    def _call(self, fields: Sequence[BatchField], sample: int, seed: int, row: int) -> Sequence[torch.Tensor]:
        tensors = [field.tensor[sample].cpu() for field in fields]
        try:
            if hasattr(self.fn, "set_random_seed") and hasattr(self.fn, "add_targets"):
                return self._call_albumentations(fields, tensors, seed)
            with _seeded(seed):
                results = self.fn(*(tensor.clone() for tensor in tensors))
        except TransformError:
            raise
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"in PerSample, on row {row} of the store")
            raise
        found = (results,) if isinstance(results, torch.Tensor) else tuple(results)
        if len(found) != len(fields) or not all(isinstance(result, torch.Tensor) for result in found):
            kinds = ", ".join(type(result).__name__ for result in found)
            raise TransformError(
                f"the function gave {kinds or 'nothing'} for the fields {', '.join(map(str, fields))}; expected a "
                "tensor for each"
            )
        return found

    def _call_albumentations(
        self, fields: Sequence[BatchField], tensors: Sequence[torch.Tensor], seed: int
    ) -> list[torch.Tensor]:
        names = ["image", *(str(field.names[-1]) for field in fields[1:])]
        prepared: Any = self._prepared.get(tuple(names))
        if prepared is None:  # a copy: the user's own gets no targets
            prepared = self._prepared[tuple(names)] = copy.deepcopy(self.fn)
            prepared.add_targets({name: "mask" for name in names[1:] if name != "mask"})
        prepared.set_random_seed(seed)
        given = {name: _to_array(tensor) for name, tensor in zip(names, tensors, strict=True)}
        made = prepared(**given)
        return [_to_tensor(made[name], tensor) for name, tensor in zip(names, tensors, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": {}}


def _to_array(tensor: torch.Tensor) -> Any:
    """Channels last: [h, w, c], or [h, w] for a mask of one channel or none."""
    if tensor.ndim == 3:
        tensor = tensor[0] if len(tensor) == 1 else tensor.permute(1, 2, 0)
    return np.array(tensor.numpy(), order="C")


def _to_tensor(made: Any, given: torch.Tensor) -> torch.Tensor:
    """Channels first again, as many dims as `given` had."""
    if not isinstance(made, torch.Tensor):
        made = torch.from_numpy(np.ascontiguousarray(made))
        made = made.permute(2, 0, 1) if made.ndim == 3 else made
    elif made.ndim == 3 and given.ndim == 3 and len(made) != len(given) and made.shape[2] == len(given):
        made = made.permute(2, 0, 1)  # ToTensorV2 leaves masks channels last
    if made.ndim == given.ndim - 1:
        made = made[None]
    elif made.ndim == given.ndim + 1 and len(made) == 1:
        made = made[0]
    result: torch.Tensor = made.contiguous()
    return result


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global generators on the CPU seeded within the block, and as they were after it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
