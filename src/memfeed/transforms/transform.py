"""What every transform is: a module that works on one field of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.random import Keys, uniform
from memfeed.transforms.backends.fused import fused
from memfeed.transforms.backends.gpu import gpu_kernel
from memfeed.transforms.batch_fields import On, find_all, replace
from memfeed.transforms.followers import follow
from memfeed.transforms.memory import Empty, channels_last, empty
from memfeed.transforms.params.affine import Affine
from memfeed.transforms.params.geometry import Imagewise
from memfeed.transforms.planning import Moved, Stage, Step, Uniform, UniformOf, make_params, run_fused, run_plain

B = TypeVar("B")
T = TypeVar("T", bound="Transform")


class Transform(torch.nn.Module):
    """A transform of image batches [n, c, h, w] whose random parameters can be keyed by row.

    A subclass says what to do in two methods, `make_params` and `transform`. Images on the CPU, and on
    CUDA where Triton is there, take the fused road as far as the parameters allow it; the result is the same. Train and
    eval mode make no difference, as in torchvision.

    Args:
        on: the field to work on: a key, a position, or a tuple of these for a nested one. A tuple of several fields,
            as ("image", "mask"): the first are the images, and the others go where their pixels go: masks ([n, h, w]
            or [n, c, h, w], by nearest neighbour), boxes (x1, y1, x2, y2: [n, k, 4] or jagged) and keypoints (x, y of
            a pixel: [n, k, 2] or jagged); numbers and vectors ([n], [n, k]) stay as they are. None: the one field that
            looks like images, [n, c, h, w] with 1 to 4 channels.
    """

    memory_format = torch.contiguous_format  # of the images that come out
    thread_safe = True  # False for what touches the state of the process, as global generators
    of_whole_batches = False  # whether `change_batch` is called, and not `transform`

    def __init__(self, *, on: On = None) -> None:
        super().__init__()
        self.on = on
        self._seen: dict[On, tuple[torch.Size, torch.dtype]] = {}

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: Uniform) -> Any:
        """Decide what to do with images of `shape` [n, c, h, w] and `dtype`.

        Args:
            shape: of the images.
            dtype: of the images.
            uniform: `uniform(draws)` gives random numbers in [0, 1), float64 [n, draws]; see `Uniform`.

        Returns:
            Whatever `transform` takes. One that is Imagewise, or an Affine, lets neighbours fuse.

        Raises:
            TransformError: the images do not fit.
        """
        raise NotImplementedError

    def transform(self, image: torch.Tensor, params: Any) -> torch.Tensor:
        """Carry `params` out on images [n, c, h, w], on any device, without writing to them."""
        raise NotImplementedError

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Change several fields of a batch at once, in place of `make_params` and `transform`.

        Args:
            batch: as for `apply`.
            keys: one key per sample.
            stream: the name to draw under.
            on: the fields, as the user named them.
        """
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
        return self._on_fields(batch, keys, lambda steps, image, draw: self._run(steps, image, draw, empty))

    def reference(self, batch: B, keys: Keys) -> B:
        """What `apply` gives, transform by transform: the slow road that tests compare the fast one with."""

        def plain(steps: list[Step], image: torch.Tensor, draw: UniformOf) -> Moved:
            image, moves = run_plain(steps, image, draw)
            return image.contiguous(memory_format=self.memory_format), moves

        result: B = self._on_fields(batch, keys, plain)
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
        if any(step.transform.of_whole_batches for step in steps):
            seed = int(torch.randint(2**62, (), device="cpu"))
            return self.apply(image, Keys(seed, 0, torch.arange(len(image))))
        fields = {step.on for step in steps}
        if len(fields) > 1:
            raise TransformError(
                f"{type(self).__name__} was called with one tensor and works on the fields {sorted(fields, key=repr)}; "
                "expected one field; use apply(batch, keys)"
            )
        _check_images(image, "the tensor")
        self._seen = {step.on: (image.shape[1:], image.dtype) for step in steps}
        return self._run(steps, image, partial(_draw_globally, len(image)), empty)[0]

    def params(
        self,
        ids: Sequence[int] | torch.Tensor,
        epoch: int = 0,
        *,
        seed: int = 0,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """What rows of the store get in an epoch, to look at: one entry per row in each array.

        Args:
            ids: row numbers in the store.
            epoch: of the loader.
            seed: of the loader.
            shape: (c, h, w) of the images; None for those of the newest batch.
            dtype: of the images; None for that of the newest batch, or uint8.

        Returns:
            By the name of the transform and its number among its like ("RandomCrop.0"), what `make_params` made: a
            Window, Resampled, Warped, Jitter, Erased, Affine, or what a transform of your own makes.

        Raises:
            TransformError: no shape, and no batch seen yet.

        >>> RandomCrop(2).params([7, 8], epoch=3, shape=(3, 4, 4))["RandomCrop.0"].top.shape  # doctest: +SKIP
        (2,)
        """
        rows = torch.as_tensor(ids, dtype=torch.int64).reshape(-1)
        keys, found = Keys(seed, epoch, rows), {}
        imagewise = (step for step in self._steps() if not step.transform.of_whole_batches)
        for on, steps in groupby(imagewise, key=lambda step: step.on):
            seen = self._seen.get(on)
            if shape is None and seen is None:
                raise TransformError(
                    "found no batch yet whose images would tell their shape; expected shape=(c, h, w), or a batch first"
                )
            size = torch.Size((len(rows), *(shape or seen[0])))  # type: ignore[index]
            kind = dtype or (seen[1] if seen else torch.uint8)
            for step in steps:
                made = found[step.stream] = make_params(step, size, kind, _keyed(keys))
                if isinstance(made, Imagewise):
                    size, kind = made.output_shape(size), made.output_dtype(kind)
                kind = made.dtype if isinstance(made, Affine) else kind
        return found

    def _run(self, steps: list[Step], image: torch.Tensor, uniform: UniformOf, empty: Empty) -> Moved:
        stage = None if image.requires_grad else self._stage(image.device, empty)  # into a buffer flows no gradient
        image, moves = run_plain(steps, image, uniform) if stage is None else run_fused(steps, image, uniform, stage)
        return image.contiguous(memory_format=self.memory_format), moves

    def _stage(self, device: torch.device, empty: Empty) -> Stage | None:
        """What fuses on this device; None where nothing does."""
        if device.type == "cpu":
            return partial(
                fused, empty=empty if self.memory_format is torch.contiguous_format else channels_last(empty)
            )
        kernel = gpu_kernel(device) if device.type == "cuda" else None
        return None if kernel is None else partial(kernel.fused, memory_format=self.memory_format)

    @property
    def runs_anywhere(self) -> bool:
        """Whether a loader may run it in a thread ahead of its caller."""
        return all(step.transform.thread_safe for step in self._steps())

    def _steps(self) -> list[Step]:
        return [Step(self, self.on, f"{type(self).__name__}.0")]

    def _on_fields(self, batch: Any, keys: Keys, run: Callable[[list[Step], torch.Tensor, UniformOf], Moved]) -> Any:
        for (on, whole), steps in groupby(self._steps(), key=lambda step: (step.on, step.transform.of_whole_batches)):
            if whole:
                for step in steps:
                    batch = step.transform.change_batch(batch, keys, step.stream, on)
                continue
            field, *others = find_all(batch, on)
            _check_images(field.tensor, f"field {field}")
            self._seen[on] = field.tensor.shape[1:], field.tensor.dtype
            if len(keys.rows) != len(field.tensor):
                raise TransformError(
                    f"field {field} has {len(field.tensor)} samples for {len(keys.rows)} keys; "
                    "expected one key per sample; pass the rows of this very batch"
                )
            try:
                image, moves = run(list(steps), field.tensor, _keyed(keys))
            except TransformError as error:
                raise TransformError(f"field {field}: {error}") from None
            batch = replace(batch, field, image)
            for other in others:
                batch = replace(batch, other, follow(other, moves, field.tensor.shape))
        return batch


class ImageTransform(Transform):
    """A transform whose parameters are Imagewise, and say it all."""

    def transform(self, image: torch.Tensor, params: Imagewise) -> torch.Tensor:
        """The plain form of it."""
        return params.all(image)


def check_probability(p: float) -> float:
    """`p` as a float; raises TransformError if it is no probability."""
    if not 0.0 <= p <= 1.0:  # false for NaN, too
        raise TransformError(f"p={p!r}; expected a probability from 0 to 1; e.g. 0.5 for every other image")
    return float(p)


def _keyed(keys: Keys) -> UniformOf:
    def draw(stream: str, draws: int, samples: NDArray[np.int64] | None) -> NDArray[np.float64]:
        return uniform(keys if samples is None else keys.part(samples), stream, draws)

    return draw


def _draw_globally(n: int, stream: str, draws: int, samples: NDArray[np.int64] | None) -> NDArray[np.float64]:
    count = n if samples is None else len(samples)
    numbers: NDArray[np.float64] = torch.rand(count, draws, dtype=torch.float64, device="cpu").numpy()
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
