"""Running a sequence of transforms on one tensor of images, one by one or fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.transforms.batch_fields import On
from memfeed.transforms.params.affine import Affine, Scaled
from memfeed.transforms.params.geometry import Geometry, Imagewise
from memfeed.transforms.params.warp import Warped
from memfeed.transforms.params.window import Window

if TYPE_CHECKING:
    from memfeed.transforms.transform import Transform


class Uniform(Protocol):
    """Draws for the samples of a batch."""

    def __call__(self, draws: int, samples: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Random numbers in [0, 1), float64 [n, draws], or for some samples only, by their places in the batch, int64
        [m]. Keyed ones are the same in a second call, which is therefore to use those beyond the first call's."""


UniformOf: TypeAlias = Callable[[str, int, "NDArray[np.int64] | None"], NDArray[np.float64]]
"""The same, with the stream to draw from first."""


Moved: TypeAlias = tuple[torch.Tensor, list[Geometry]]
"""Images, and what moved their pixels, for the fields that follow them."""


Stage: TypeAlias = Callable[[torch.Tensor, Sequence[Imagewise], "Affine | None"], torch.Tensor]
"""Carries out changes and then an Affine on images [n, c, h, w] together: `fused.fused`, or `kernel.fused` on a GPU."""


@dataclass(frozen=True, eq=False)
class Step:
    """A transform, the field it works on and the stream that it draws from."""

    transform: Transform
    on: On
    stream: str


def run_plain(steps: Sequence[Step], image: torch.Tensor, uniform: UniformOf) -> Moved:
    """Each transform alone on the whole batch, in order: slow, obviously right, on any device."""
    moves: list[Geometry] = []
    pending: Warped | None = None
    for step in [*steps, None]:
        params = None if step is None else make_params(step, image.shape, image.dtype, uniform)
        if pending is not None:
            joined = pending.then(params) if isinstance(params, Warped) else None
            if joined is None:
                image = pending.all(image)
                moves.append(pending)
            params, pending = (params if joined is None else joined), None
        if isinstance(params, Warped):
            pending = params
        elif step is not None:
            image = step.transform.transform(image, params)
            moves += [params] if isinstance(params, Geometry) else []
    return image, moves


def run_fused(steps: Sequence[Step], image: torch.Tensor, uniform: UniformOf, stage: Stage) -> Moved:
    """What `run_plain` gives, in as few stages as the sequence allows."""
    shape, dtype = image.shape, image.dtype
    changes: list[Imagewise] = []
    pending: list[Imagewise] = []
    affine: Affine | None = None
    for step in steps:
        params = make_params(step, shape, dtype, uniform)
        if isinstance(params, Imagewise):
            if affine is not None and not _only_moves(params, shape):  # it needs the values that the Affine makes
                pending, affine = [*pending, Scaled(affine)], None
            joined = _joined(pending[-1], params) if pending else None
            pending = [*pending, params] if joined is None else [*pending[:-1], joined]
            shape, dtype = params.output_shape(shape), params.output_dtype(dtype)
        elif isinstance(params, Affine) and (affine is None or affine.dtype == params.dtype):
            affine = params if affine is None else affine.then(params)
            dtype = affine.dtype
        else:  # a second cast, which would round, or what needs all values: what is pending comes first
            image = stage(image, pending, affine)
            changes, pending, affine = changes + pending, [], None
            if isinstance(params, Affine):
                affine, dtype = params, params.dtype
            else:
                image = step.transform.transform(image, params)
                shape, dtype = image.shape, image.dtype
    return stage(image, pending, affine), [c for c in changes + pending if isinstance(c, Geometry)]


def _only_moves(params: Imagewise, shape: torch.Size) -> bool:
    """Whether it neither computes nor fills in values, so that its place among the Affines is free."""
    return isinstance(params, Window) and params.lies_within(shape[2], shape[3])


def _joined(first: Imagewise, second: Imagewise) -> Imagewise | None:
    if isinstance(first, Window) and isinstance(second, Window):
        return first.then(second)
    return first.then(second) if isinstance(first, Warped) and isinstance(second, Warped) else None


def make_params(step: Step, shape: torch.Size, dtype: torch.dtype, uniform: UniformOf) -> Any:
    """What a step does to images of this shape and dtype."""
    try:
        return step.transform.make_params(
            shape, dtype, lambda draws, samples=None: uniform(step.stream, draws, samples)
        )
    except TransformError as error:
        raise TransformError(f"{step.transform}: {error}") from None
