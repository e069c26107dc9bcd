"""Run a sequence of operations on one tensor, or list, of images: one by one, or fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from memfeed.transforms.operation import DrawFromStream, Step
from memfeed.transforms.params.geometry import Geometry, Imagewise
from memfeed.transforms.params.sizes import BySize, GeometryBySize, Images, ImageShape, Sizes
from memfeed.transforms.params.value_changes import HALVES, Affine, Scaled
from memfeed.transforms.params.warp import Warped
from memfeed.transforms.params.window import Window

TransformResult: TypeAlias = tuple[Images, list[Geometry]]
"""Images, and the changes that moved their pixels, in order, for the fields that follow them."""

FusedPass: TypeAlias = Callable[[Images, Sequence[Imagewise], "Affine | None"], Images]
"""Carries out changes and then an Affine on images [n, c, h, w] or a list of them: `cpu.fused`, or `kernel.fused` on a
GPU."""


def shape_of(images: Images) -> ImageShape:
    """Return [n, c, h, w], or the sizes in a list."""
    return Sizes.of(images) if isinstance(images, list) else images.shape


def run_plain(
    steps: Sequence[Step], image: Images, uniform: DrawFromStream, shape: ImageShape | None = None
) -> TransformResult:
    """Apply each operation alone to the whole batch, in order: slow, obviously right, on any device."""
    geometries: list[Geometry] = []
    pending: Any = None
    shape = shape_of(image) if shape is None else shape
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


def run_fused(
    steps: Sequence[Step],
    image: Images,
    uniform: DrawFromStream,
    fused_pass: FusedPass,
    shape: ImageShape | None = None,
) -> TransformResult:
    """Give the result of `run_plain`, in as few fused passes as the sequence allows."""
    shape = shape_of(image) if shape is None else shape
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
