"""Running a sequence of transforms on one tensor of images, one by one or fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.transforms.affine import Affine
from memfeed.transforms.fields import On
from memfeed.transforms.fused import fused
from memfeed.transforms.memory import Empty
from memfeed.transforms.window import Window

if TYPE_CHECKING:
    from memfeed.transforms.transform import Transform

Uniform: TypeAlias = Callable[[int], NDArray[np.float64]]
"""Takes a number of draws and gives random numbers in [0, 1), float64 [n, draws]."""
UniformOf: TypeAlias = Callable[[str, int], NDArray[np.float64]]
"""Likewise, with the stream to draw from first."""


@dataclass(frozen=True, eq=False)
class Step:
    """A transform, the field it works on and the stream that it draws from."""

    transform: Transform
    on: On
    stream: str


def run_plain(steps: Sequence[Step], image: torch.Tensor, uniform: UniformOf) -> torch.Tensor:
    """Each transform alone on the whole batch, in order: slow, obviously right, on any device."""
    for step in steps:
        params = _make_params(step, image.shape, image.dtype, uniform)
        image = step.transform.transform(image, params)
    return image


def run_fused(steps: Sequence[Step], image: torch.Tensor, uniform: UniformOf, empty: Empty) -> torch.Tensor:
    """What `run_plain` gives, on the CPU, in as few passes over the images as the sequence allows."""
    shape, dtype = image.shape, image.dtype
    window: Window | None = None
    affine: Affine | None = None
    for step in steps:
        params = _make_params(step, shape, dtype, uniform)
        if isinstance(params, Window):  # moves pixels whatever their values, so its place among the Affines is free
            window = params if window is None else window.then(params)
            shape = window.output_shape(shape)
        elif isinstance(params, Affine) and (affine is None or affine.dtype == params.dtype):
            affine = params if affine is None else affine.then(params)
            dtype = affine.dtype
        else:  # a second cast, which would round, or a transform of the user's: what is pending comes first
            image = fused(image, window, affine, empty)
            window, affine = None, None
            if isinstance(params, Affine):
                affine = params
                dtype = params.dtype
            else:
                image = step.transform.transform(image, params)
                shape, dtype = image.shape, image.dtype
    return fused(image, window, affine, empty)


def _make_params(step: Step, shape: torch.Size, dtype: torch.dtype, uniform: UniformOf) -> Any:
    try:
        return step.transform.make_params(shape, dtype, lambda draws: uniform(step.stream, draws))
    except TransformError as error:
        raise TransformError(f"{step.transform}: {error}") from None
