"""The operation of one transform: the methods that a subclass of `Transform` writes, and its step in a plan.

A sequence of operations runs on one tensor, or list, of images: one by one, or fused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from memfeed.errors import TransformError
from memfeed.random import Keys, uniform, uniform_streams
from memfeed.schema.names import Path
from memfeed.transforms.batch_fields import On
from memfeed.transforms.params.geometry import Geometry, Imagewise, Warped
from memfeed.transforms.params.sizes import BySize, GeometryBySize, Images, ImageShape, Sizes
from memfeed.transforms.params.value_changes import HALVES, Affine, Scaled
from memfeed.transforms.params.window import Window

B = TypeVar("B")


class DrawUniform(Protocol):
    """Draws random numbers for the samples of a batch."""

    def __call__(self, draws: int, samples: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Return random numbers in [0, 1), float64 [n, draws].

        Keyed numbers are the same in a second call. So ask that call for more draws, and use those after the first
        call's.

        Args:
            draws: how many numbers per sample.
            samples: indices in the batch of the samples to draw for, int64 [m]; None for all.
        """


DrawFromStream: TypeAlias = Callable[[str, int, "NDArray[np.int64] | None"], NDArray[np.float64]]
"""A `DrawUniform` that takes the name of a stream first."""


class KeyedDraws:
    """A `DrawFromStream` whose numbers depend on the keys of the samples alone.

    Args:
        keys: of the samples of one batch.
        asked: how many numbers each stream was asked for in batches before. These are drawn in one pass, at the first
            call. Streams that are not in it are added.
    """

    def __init__(self, keys: Keys, asked: dict[str, int] | None = None) -> None:
        self.keys, self._asked = keys, {} if asked is None else asked
        self._drawn: dict[Any, NDArray[np.float64]] | None = None

    def __call__(self, stream: str, draws: int, samples: NDArray[np.int64] | None) -> NDArray[np.float64]:
        """Return random numbers in [0, 1), float64 [n, draws]; see `DrawUniform`."""
        if samples is not None:
            return uniform(self.keys, stream, draws, samples)
        if self._drawn is None:
            self._drawn = uniform_streams(self.keys, tuple(self._asked.items())) if len(self._asked) > 1 else {}
        drawn = self._drawn.pop(stream, None)  # the caller owns it, and may write to it
        if drawn is not None and drawn.shape[1] >= draws:
            return drawn[:, :draws]
        self._asked[stream] = max(draws, self._asked.get(stream, 0))
        return uniform(self.keys, stream, draws)


@dataclass(frozen=True, eq=False)
class StreamDraws:
    """The `DrawUniform` of one step.

    Args:
        stream: the name of its stream.
        draw: draws from any stream.
        group: the samples that it draws for; None for all.
        drawn: what groups share: the numbers of all samples, by the number of draws.
    """

    stream: str
    draw: DrawFromStream
    group: NDArray[np.int64] | None = None
    drawn: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    def __call__(self, draws: int, samples: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """See `DrawUniform`."""
        if self.group is None:
            return self.draw(self.stream, draws, samples)
        if samples is not None:
            return self.draw(self.stream, draws, self.group[samples])
        if draws not in self.drawn:
            self.drawn[draws] = self.draw(self.stream, draws, None)
        return self.drawn[draws][self.group]

    def in_first_epoch(self) -> tuple[NDArray[np.float64], int]:
        """Return the first number that each sample got in epoch 0, float64 [n, 1], and the epoch of this batch.

        Raises:
            TransformError: the numbers come from torch's global generator, which knows no rows and no epochs.
        """
        if not isinstance(self.draw, KeyedDraws):
            raise TransformError(
                "alternate=True was called without keys; expected the rows and the epoch: "
                "apply(batch, Keys(seed, epoch, rows)), or pass the transform itself to the Loader"
            )
        keys = self.draw.keys
        first = KeyedDraws(Keys(keys.seed, 0, keys.rows))  # occurrence 0: orders of ours visit each row once
        return first(self.stream, 1, self.group), keys.epoch


_SET_BY_LOADERS = ("schema", "training", "transforms", "gives_samples")


class Operation(torch.nn.Module):
    """An operation on one field of a batch, without the means to apply it, which `Transform` adds."""

    memory_format = torch.contiguous_format  # of the images that come out
    thread_safe = True  # False for transforms that change the state of the process, as global generators
    of_whole_batches = False  # True if `change_batch` is called in place of `make_params` and `transform`
    is_batched = True  # False if it calls a function for each sample of a batch, in Python
    passes_views = False  # True if `change_batch` hands fields on without a look at their values
    paths_read: Collection[Path] | None = None  # the fields it takes out of a batch, where `on` does not name them
    takes_bytes = False  # True if its field is no tensor, and `change_batch` finds it by its path
    makes_one_size = False  # True if the outputs have one size, whatever the sizes of the images
    spatial_dims: ClassVar[tuple[int, ...]] = (2,)  # of the images that it can change: 0 for vectors, 3 for volumes
    _shown: ClassVar[tuple[str, ...]] = ()  # attributes that repr shows

    def __init__(self, *, on: On = None) -> None:
        super().__init__()
        self.on = on

    def as_of_store(self) -> Self:
        """Return this operation, whose attributes, and those of its parts, a program can no longer set."""
        for part in self.modules():
            if isinstance(part, Operation):
                part.__dict__["_is_of_store"] = True
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_of_store" in self.__dict__ and not (name.startswith("_") or name in _SET_BY_LOADERS):
            raise AttributeError(
                f"found {name!r} set on {type(self).__name__}, a part of a store's transform, where it changes no "
                f"sample; expected it on the step of the dataset itself, as dataset.transform.{name} = ..., and a new "
                "Loader(dataset, cache=...) after that: the same store serves"
            )
        super().__setattr__(name, value)

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Any:
        """Decide what to do with images of `shape` [n, c, h, w] and `dtype`.

        Args:
            shape: of the images.
            dtype: of the images.
            uniform: `uniform(draws)` gives random numbers in [0, 1), float64 [n, draws]; see `DrawUniform`.

        Returns:
            The parameters that `transform` takes. If they are Imagewise, or an Affine, neighbours are fused.

        Raises:
            TransformError: the images do not fit.
        """
        raise NotImplementedError

    def make_params_by_size(self, sizes: Sizes, dtype: torch.dtype, stream: str, uniform: DrawFromStream) -> list[Any]:
        """Return what `make_params` returns for each group of images of several sizes.

        Operations that compute all groups together return the same numbers.
        """
        drawn: dict[int, NDArray[np.float64]] = {}
        return [
            self.make_params(shape, dtype, StreamDraws(stream, uniform, group, drawn))
            for shape, group in zip(sizes.shapes, sizes.samples, strict=True)
        ]

    def transform(self, image: torch.Tensor, params: Any) -> torch.Tensor:
        """Apply `params` to images [n, c, h, w], on any device, without writing to them."""
        raise NotImplementedError

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Change several fields of a batch at once, in place of `make_params` and `transform`.

        Args:
            batch: as for `apply`.
            keys: one key per sample.
            stream: the name of the stream to draw from.
            on: the fields, as the user named them, or as `find_all` found them.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the parameters, for repr."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in self._shown)


@dataclass(frozen=True, eq=False)
class Step:
    """One operation of a plan, the field it works on, and the stream that it draws from."""

    operation: Operation
    on: On
    stream: str

    def make_params(self, shape: ImageShape, dtype: torch.dtype, uniform: DrawFromStream) -> Any:
        """Return the operation's parameters for images of this shape and dtype. Errors name the operation.

        Parameters of images of several sizes are a BySize, or one Affine, which is the same for all sizes.
        """
        try:
            if isinstance(shape, Sizes):
                return self._make_by_size(shape, dtype, uniform)
            return self.operation.make_params(shape, dtype, StreamDraws(self.stream, uniform))
        except TransformError as error:
            raise TransformError(f"{self.operation}: {error}") from None

    def _make_by_size(self, sizes: Sizes, dtype: torch.dtype, uniform: DrawFromStream) -> BySize | Affine:
        parts = self.operation.make_params_by_size(sizes, dtype, self.stream, uniform)
        if all(isinstance(part, Affine) for part in parts):
            if any(part != parts[0] for part in parts):
                raise TransformError("found images of different numbers of channels; expected one number in a list")
            affine: Affine = parts[0]
            return affine
        return BySize.joined(parts, sizes, makes_one_size=self.operation.makes_one_size)

    def transform(self, images: Images, shape: ImageShape, params: Any) -> tuple[Images, ImageShape]:
        """Apply the operation alone to images of `shape`. Return the images, and their shape."""
        if isinstance(images, torch.Tensor):
            images = self.operation.transform(images, params)
            return images, images.shape
        assert isinstance(shape, Sizes)
        of_groups = params.parts if isinstance(params, BySize) else [params] * len(shape.shapes)
        images = shape.each(images, lambda group, same: self.operation.transform(same, of_groups[group]))
        after = BySize((), shape, self.operation.makes_one_size).after(
            [torch.Size((len(s), *images[s[0]].shape)) for s in shape.samples]
        )
        return images if isinstance(after, Sizes) else torch.stack(images), after


TransformResult: TypeAlias = tuple[Images, list[Geometry]]
"""Images, and the changes that moved their pixels, in order, for the fields that follow them."""

FusedPass: TypeAlias = Callable[[Images, Sequence[Imagewise], "Affine | None"], Images]
"""Carries out changes and then an Affine on images [n, c, h, w] or a list of them: `passes.fused`, or `kernel.fused` on
a GPU."""


def shape_of(images: Images) -> ImageShape:
    """Return [n, c, h, w], or the sizes in a list."""
    return Sizes.of(images) if isinstance(images, list) else images.shape


def run_plain(steps: Sequence[Step], image: Images, uniform: DrawFromStream) -> TransformResult:
    """Apply each operation alone to the whole batch, in order: slow, obviously right, on any device."""
    geometries: list[Geometry] = []
    pending: Any = None
    shape = shape_of(image)
    for step in [*steps, None]:
        dtype = image.dtype if isinstance(image, torch.Tensor) else image[0].dtype
        params = None if step is None else step.make_params(shape, dtype, uniform)
        if pending is not None:
            joined = _join(pending, params) if params is not None and _is_warp(params) else None
            if joined is None:
                image = pending.all(image)
                geometries.append(pending)
            params, pending = (params if joined is None else joined), None
        if _is_warp(params):
            pending = params
        elif step is not None:
            image, shape = step.transform(image, shape, params)
            geometries += [params] if isinstance(params, Geometry) else []
    return image, geometries


def run_fused(steps: Sequence[Step], image: Images, uniform: DrawFromStream, fused_pass: FusedPass) -> TransformResult:
    """Give the result of `run_plain`, in as few fused passes as the sequence allows."""
    shape = shape_of(image)
    dtype = image[0].dtype if isinstance(image, list) else image.dtype
    done: list[Imagewise] = []
    pending: list[Imagewise] = []
    affine: Affine | None = None
    affine_of = dtype  # of the images that it is applied to
    for step in steps:
        params = step.make_params(shape, dtype, uniform)
        if isinstance(params, Imagewise):
            if affine is not None and not _commutes_with_affine(params, shape):
                pending, affine = [*pending, Scaled(affine)], None
            joined = _join(pending[-1], params) if pending else None
            pending = [*pending, params] if joined is None else [*pending[:-1], joined]
            shape, dtype = params.output_shape(shape), params.output_dtype(dtype)  # type: ignore[arg-type]
        elif isinstance(params, Affine) and (affine is None or affine.dtype == params.dtype):
            affine, affine_of = (params, dtype) if affine is None else (affine.then(params), affine_of)
            dtype = affine.dtype
        elif isinstance(params, Affine) and affine is not None and _folds_cast(affine_of, affine, params):
            affine, dtype = replace(affine, dtype=params.dtype), params.dtype
        else:  # a second cast rounds, and other parameters need all values: both end the pass
            image = fused_pass(image, pending, affine)
            done, pending, affine = done + pending, [], None
            if isinstance(params, Affine):
                affine, affine_of, dtype = params, dtype, params.dtype
            else:
                image, shape = step.transform(image, shape, params)
                dtype = image.dtype if isinstance(image, torch.Tensor) else image[0].dtype
    return fused_pass(image, pending, affine), [c for c in done + pending if isinstance(c, Geometry)]


def _commutes_with_affine(params: Imagewise, shape: ImageShape) -> bool:
    """Return True if `params` neither computes nor fills in values, and so can come before the Affines ahead of it."""
    if isinstance(params, BySize) and isinstance(shape, Sizes):
        return all(map(_commutes_with_affine, params.parts, shape.shapes))
    return isinstance(params, Window) and params.lies_within(*shape[2:])  # type: ignore[index]


def _folds_cast(dtype: torch.dtype, affine: Affine, cast: Affine) -> bool:
    """Return True if a `cast` to 16 bits after a float32 `affine` of images of `dtype` may be part of it.

    An Affine of 16 bits casts first, computes in float32 and rounds once. So its first cast must not change a value.
    """
    is_exact = dtype in (torch.uint8, torch.int8)
    return is_exact and affine.dtype is torch.float32 and cast.scale is None and cast.dtype in HALVES


def _is_warp(params: Any) -> bool:
    if isinstance(params, BySize):
        return all(isinstance(part, Warped) for part in params.parts)
    return isinstance(params, Warped)


def _join(first: Imagewise, second: Imagewise) -> Imagewise | None:
    if isinstance(first, BySize) and isinstance(second, BySize):
        parts = [_join(*pair) for pair in zip(first.parts, second.parts, strict=True)]
        if any(part is None for part in parts):
            return None
        return GeometryBySize(tuple(parts), second.sizes, second.makes_one_size)
    if isinstance(first, Window) and isinstance(second, Window):
        return first.then(second)
    return first.then(second) if isinstance(first, Warped) and isinstance(second, Warped) else None
