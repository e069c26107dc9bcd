"""Run a sequence of operations on one tensor of images: one by one, or fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from memfeed.transforms.operation import DrawFromStream, Step
from memfeed.transforms.params.geometry import Geometry, Imagewise
from memfeed.transforms.params.values import Affine, Scaled
from memfeed.transforms.params.warp import Warped
from memfeed.transforms.params.window import Window

TransformResult: TypeAlias = tuple[torch.Tensor, list[Geometry]]
"""Images, and the changes that moved their pixels, in order, for the fields that follow them."""

FusedPass: TypeAlias = Callable[[torch.Tensor, Sequence[Imagewise], "Affine | None"], torch.Tensor]
"""Carries out changes and then an Affine on images [n, c, h, w]: `cpu.fused`, or `kernel.fused` on a GPU."""


def run_plain(steps: Sequence[Step], image: torch.Tensor, uniform: DrawFromStream) -> TransformResult:
    """Apply each operation alone to the whole batch, in order: slow, obviously right, on any device."""
    geometries: list[Geometry] = []
    pending: Warped | None = None
    for step in [*steps, None]:
        params = None if step is None else step.make_params(image.shape, image.dtype, uniform)
        if pending is not None:
            joined = pending.then(params) if isinstance(params, Warped) else None
            if joined is None:
                image = pending.all(image)
                geometries.append(pending)
            params, pending = (params if joined is None else joined), None
        if isinstance(params, Warped):
            pending = params
        elif step is not None:
            image = step.operation.transform(image, params)
            geometries += [params] if isinstance(params, Geometry) else []
    return image, geometries


def run_fused(
    steps: Sequence[Step], image: torch.Tensor, uniform: DrawFromStream, fused_pass: FusedPass
) -> TransformResult:
    """Give the result of `run_plain`, in as few fused passes as the sequence allows."""
    shape, dtype = image.shape, image.dtype
    done: list[Imagewise] = []
    pending: list[Imagewise] = []
    affine: Affine | None = None
    for step in steps:
        params = step.make_params(shape, dtype, uniform)
        if isinstance(params, Imagewise):
            if affine is not None and not _commutes_with_affine(params, shape):
                pending, affine = [*pending, Scaled(affine)], None
            joined = _join(pending[-1], params) if pending else None
            pending = [*pending, params] if joined is None else [*pending[:-1], joined]
            shape, dtype = params.output_shape(shape), params.output_dtype(dtype)
        elif isinstance(params, Affine) and (affine is None or affine.dtype == params.dtype):
            affine = params if affine is None else affine.then(params)
            dtype = affine.dtype
        else:  # a second cast rounds, and other parameters need all values: both end the pass
            image = fused_pass(image, pending, affine)
            done, pending, affine = done + pending, [], None
            if isinstance(params, Affine):
                affine, dtype = params, params.dtype
            else:
                image = step.operation.transform(image, params)
                shape, dtype = image.shape, image.dtype
    return fused_pass(image, pending, affine), [c for c in done + pending if isinstance(c, Geometry)]


def _commutes_with_affine(params: Imagewise, shape: torch.Size) -> bool:
    """Return True if `params` neither computes nor fills in values, and so can come before the Affines ahead of it."""
    return isinstance(params, Window) and params.lies_within(shape[2], shape[3])


def _join(first: Imagewise, second: Imagewise) -> Imagewise | None:
    if isinstance(first, Window) and isinstance(second, Window):
        return first.then(second)
    return first.then(second) if isinstance(first, Warped) and isinstance(second, Warped) else None
