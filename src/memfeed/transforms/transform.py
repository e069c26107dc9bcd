"""What every transform is: a module that works on one field of a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.keyed import Keys, uniform
from memfeed.transforms.fields import On, find, replace
from memfeed.transforms.memory import Empty, empty
from memfeed.transforms.steps import Step, Uniform, UniformOf, run_fused, run_plain

B = TypeVar("B")
T = TypeVar("T", bound="Transform")


class Transform(torch.nn.Module):
    """A transform of image batches [n, c, h, w] whose random parameters can be keyed by row.

    A subclass says what to do in two methods, `make_params` and `transform`. Images on the CPU take the fused road
    where the parameters allow it; the result is the same. Train and eval mode make no difference, as in torchvision.

    Args:
        on: the field to work on: a key, a position, or a tuple of these for a nested one. None: the one field that
            looks like images, [n, c, h, w] with 1 to 4 channels.
    """

    def __init__(self, *, on: On = None) -> None:
        super().__init__()
        self.on = on

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: Uniform) -> Any:
        """Decide what to do with images of `shape` [n, c, h, w] and `dtype`.

        Args:
            shape: of the images.
            dtype: of the images.
            uniform: `uniform(draws)` gives random numbers in [0, 1), float64 [n, draws]; call it
                once at most, since a keyed one gives the same numbers again.

        Returns:
            Whatever `transform` takes. A Window or an Affine lets neighbours fuse.

        Raises:
            TransformError: the images do not fit.
        """
        raise NotImplementedError

    def transform(self, image: torch.Tensor, params: Any) -> torch.Tensor:
        """Carry `params` out on images [n, c, h, w], on any device, without writing to them."""
        raise NotImplementedError

    @overload
    def apply(self: T, fn: Callable[[torch.nn.Module], Any]) -> T: ...
    @overload
    def apply(self, batch: B, keys: Keys, *, empty: Empty = empty) -> B: ...
    def apply(  # type: ignore[misc]  # mypy misses that `batch` and `fn` together take what Module.apply's `fn` takes
        self, batch: Any = None, keys: Keys | None = None, *, empty: Empty = empty, fn: Any = None
    ) -> Any:
        """Transform one field of a batch; with one callable argument, `torch.nn.Module.apply` as ever.

        Args:
            batch: what a loader yields: a tensor, or any nesting of containers, TensorDicts and tensorclasses.
            keys: one key per sample; the same key draws the same parameters wherever and whenever.
            empty: allocates the output, see `memory.Empty`. A loader can lend buffers here.

        Returns:
            A batch of the same structure with that field replaced. The batch passed in stays as it is.

        Raises:
            FieldError: the field does not exist.
            TransformError: there is no telling which field is meant, or it does not fit.
        """
        if fn is not None or (keys is None and callable(batch)):
            return super().apply(batch if fn is None else fn)
        if keys is None:
            raise TransformError(
                f"{type(self).__name__}.apply got a {type(batch).__name__} and no keys; expected apply(batch, keys); "
                "call the transform itself, with a tensor, to draw from torch's global generator"
            )
        return self._on_fields(batch, keys, lambda steps, image, draw: _run(steps, image, draw, empty))

    def reference(self, batch: B, keys: Keys) -> B:
        """What `apply` gives, transform by transform: the slow road that tests compare the fast one with."""
        result: B = self._on_fields(batch, keys, run_plain)
        return result

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Transform images [n, c, h, w] with parameters from torch's global generator, whatever `on` says.

        Raises:
            TransformError: not images, or the parts of a Compose work on different fields.
        """
        if not isinstance(image, torch.Tensor):
            raise TransformError(
                f"{type(self).__name__} was called with a {type(image).__name__}; expected a tensor [n, c, h, w]; "
                "use apply(batch, keys) for other batches"
            )
        steps = self._steps()
        fields = {step.on for step in steps}
        if len(fields) > 1:
            raise TransformError(
                f"{type(self).__name__} was called with one tensor and works on the fields {sorted(fields, key=repr)}; "
                "expected one field; use apply(batch, keys)"
            )
        _check_images(image, "the tensor")
        return _run(steps, image, partial(_draw_globally, len(image)), empty)

    def _steps(self) -> list[Step]:
        return [Step(self, self.on, f"{type(self).__name__}.0")]

    def _on_fields(
        self, batch: Any, keys: Keys, run: Callable[[list[Step], torch.Tensor, UniformOf], torch.Tensor]
    ) -> Any:
        for on, steps in groupby(self._steps(), key=lambda step: step.on):
            field = find(batch, on)
            _check_images(field.tensor, f"field {field}")
            if len(keys.rows) != len(field.tensor):
                raise TransformError(
                    f"field {field} has {len(field.tensor)} samples for {len(keys.rows)} keys; "
                    "expected one key per sample; pass the rows of this very batch"
                )
            try:
                image = run(list(steps), field.tensor, partial(uniform, keys))
            except TransformError as error:
                raise TransformError(f"field {field}: {error}") from None
            batch = replace(batch, field, image)
        return batch


def _run(steps: list[Step], image: torch.Tensor, uniform: UniformOf, empty: Empty) -> torch.Tensor:
    # Writing into a buffer has no gradient, and slicing sample by sample launches a kernel for each on a GPU.
    if image.device.type != "cpu" or image.requires_grad:
        return run_plain(steps, image, uniform)
    return run_fused(steps, image, uniform, empty)


def _draw_globally(n: int, stream: str, draws: int) -> NDArray[np.float64]:
    numbers: NDArray[np.float64] = torch.rand(n, draws, dtype=torch.float64, device="cpu").numpy()
    return numbers


def _check_images(tensor: torch.Tensor, name: str) -> None:
    if tensor.is_nested or tensor.ndim != 4:
        rank = "a nested tensor" if tensor.is_nested else f"rank {tensor.ndim}"
        raise TransformError(
            f"{name} has {rank}; expected images [n, c, h, w]; "
            "unsqueeze a single image, and permute channels to the second place"
        )
    if tensor.dtype is torch.bool or tensor.is_complex():
        raise TransformError(f"{name} is {tensor.dtype}; expected integers or floats; convert it first")
