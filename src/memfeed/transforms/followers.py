"""Masks, boxes and keypoints that follow the pixels of their images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from memfeed.errors import TransformError
from memfeed.schema.jagged import jagged_tensor, ragged_dim_of
from memfeed.schema.ragged_list import RaggedList
from memfeed.transforms.backends.cpu import fused
from memfeed.transforms.backends.gpu import kernel_for
from memfeed.transforms.batch_fields import BatchField
from memfeed.transforms.params.geometry import Geometry, of_points
from memfeed.transforms.params.sizes import Images, ImageShape


def follow(field: BatchField, geometries: Sequence[Geometry], shape: ImageShape) -> Any:
    """Apply `geometries`, made for images of `shape` [n, c, h, w] or of several sizes, to another field.

    Masks [n, h, w] or [n, c, h, w], or lists of [h, w] or [c, h, w], are sampled by nearest neighbour, 0 outside. So
    are masks [n, d, h, w] or [n, c, d, h, w] of volumes. Boxes [n, k, 4] or jagged (x1, y1, x2, y2, of the edges)
    become the boxes around their corners, cut off at the edges of the image. Keypoints [n, k, 2] or jagged (x, y, of a
    pixel) may end up outside the image. Fields [n] and [n, k] do not change.

    Raises:
        TransformError: a field of another shape.
    """
    tensor = field.tensor
    if not geometries or (isinstance(tensor, torch.Tensor) and tensor.ndim <= 2):
        return tensor
    masks = _as_masks(tensor, shape)
    if masks is not None:
        return _move_masks(masks, geometries, shape)
    along_rows = isinstance(tensor, torch.Tensor) and (not tensor.is_nested or ragged_dim_of(tensor) == 0)
    if along_rows and tensor.ndim == 3 and tensor.shape[-1] in (2, 4):
        if tensor.is_nested:
            offsets: torch.Tensor = tensor.offsets()
            points = torch.arange(len(tensor.values()), device=offsets.device)
            sample = torch.searchsorted(offsets, points, right=True) - 1
            return jagged_tensor(_move_points(tensor.values(), sample, geometries, shape), offsets, tensor)
        n, k, width = tensor.shape
        sample = torch.arange(n, device=tensor.device)[:, None].expand(n, k).reshape(-1)
        return _move_points(tensor.reshape(n * k, width), sample, geometries, shape).view(n, k, width)
    images = list(shape) if isinstance(shape, torch.Size) else "of several sizes"
    raise TransformError(
        f"field {field} follows images {images}; expected a mask of their height and width, boxes [n, k, 4] or "
        "keypoints [n, k, 2] (dense or jagged), or a number or vector per sample, which stays; leave it out of on="
    )


def _as_masks(tensor: Any, shape: ImageShape) -> Images | None:
    """Return masks of the images' sizes, a list of them if the images are a list; None for other fields."""
    sizes = _image_sizes(shape)
    if isinstance(shape, torch.Size) and isinstance(tensor, torch.Tensor) and not tensor.is_nested:
        dims = len(shape) - 2
        return tensor if tensor.ndim - dims in (1, 2) and tensor.shape[-dims:] == shape[2:] else None
    is_jagged = isinstance(tensor, torch.Tensor) and tensor.is_nested
    if isinstance(shape, torch.Size) and is_jagged and ragged_dim_of(tensor) == 0 and tensor.shape[-1] != shape[-1]:
        return None  # of another width; to take its rows apart, the CPU waits for a device
    rows = list(tensor.unbind()) if isinstance(tensor, torch.Tensor) else list(tensor)
    if len(rows) != len(sizes) or any(
        row is None or row.ndim - len(size) not in (0, 1) or row.shape[-len(size) :] != size
        for row, size in zip(rows, sizes, strict=True)
    ):
        return None
    if not isinstance(shape, torch.Size):
        return rows
    return torch.stack(rows) if len({row.shape for row in rows}) == 1 else None


def _image_sizes(shape: ImageShape) -> list[torch.Size]:
    """Return height and width (of volumes depth, height and width) of each image."""
    if isinstance(shape, torch.Size):
        return [shape[2:]] * shape[0]
    sizes: list[torch.Size] = [torch.Size()] * len(shape)
    for group, samples in zip(shape.shapes, shape.samples, strict=True):
        for sample in samples.tolist():
            sizes[sample] = group[2:]
    return sizes


def _move_masks(masks: Images, geometries: Sequence[Geometry], shape: ImageShape) -> Any:
    dims = len(shape if isinstance(shape, torch.Size) else shape.shapes[0]) - 2
    lacks_channel = (masks.ndim - 1 if isinstance(masks, torch.Tensor) else masks[0].ndim) == dims
    planes: Any = masks
    if lacks_channel:
        planes = masks[:, None] if isinstance(masks, torch.Tensor) else [mask[None] for mask in masks]
    nearest = [geometry.nearest() for geometry in geometries]
    kernel = kernel_for(planes) if isinstance(planes, torch.Tensor) else None
    if (masks if isinstance(masks, torch.Tensor) else masks[0]).device.type == "cpu":
        planes = fused(planes, nearest, None)
    elif kernel is not None:
        planes = kernel.fused(planes, nearest, None, torch.contiguous_format)
    else:
        for geometry in nearest:
            planes = geometry.all(planes)
    if isinstance(planes, torch.Tensor):
        return planes[:, 0] if lacks_channel else planes
    return RaggedList(plane[0] if lacks_channel else plane for plane in planes)


def _move_points(
    values: torch.Tensor, sample: torch.Tensor, geometries: Sequence[Geometry], shape: ImageShape
) -> torch.Tensor:
    """Move boxes [m, 4] or keypoints [m, 2] of the images `sample`, int64 [m], on their device."""
    exact, is_box = values.detach().to(torch.float64), values.shape[1] == 4
    if is_box:
        x1, y1, x2, y2 = exact.unbind(1)
        corners = torch.stack([x1, y1, x2, y1, x1, y2, x2, y2], 1).view(-1, 2)
        sample = sample[:, None].expand(-1, 4).reshape(-1)
    else:
        corners = exact + 0.5  # the middle of a pixel
    for geometry in geometries:
        corners = geometry.points(corners, sample)
        shape = geometry.output_shape(shape)  # type: ignore[arg-type]  # a BySize takes Sizes
    if is_box:
        four = corners.view(-1, 4, 2)
        sizes = np.array(_image_sizes(shape), np.float64).reshape(-1, 2)
        largest = of_points(sample[::4], sizes[:, 1], sizes[:, 0]).T  # width, height
        moved = torch.cat([four.amin(1), four.amax(1)], 1)
        moved = moved.clamp(min=0).minimum(largest.repeat(1, 2))
    else:
        moved = corners - 0.5
    if not values.dtype.is_floating_point:
        moved = moved.round()
    return moved.to(values.dtype)
