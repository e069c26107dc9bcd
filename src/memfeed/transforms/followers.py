"""Masks, boxes and keypoints that follow the pixels of their images."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfeed.errors import TransformError
from memfeed.schema.jagged import jagged_tensor, ragged_dim_of
from memfeed.transforms.backends.cpu import fused
from memfeed.transforms.batch_fields import BatchField
from memfeed.transforms.params.geometry import Geometry


def follow(field: BatchField, geometries: Sequence[Geometry], shape: torch.Size) -> torch.Tensor:
    """Apply `geometries`, made for images of `shape` [n, c, h, w], to another field.

    Masks [n, h, w] or [n, c, h, w] are sampled by nearest neighbour, 0 outside. Boxes [n, k, 4] or jagged (x1, y1, x2,
    y2, of the edges) become the boxes around their corners, cut off at the edges of the image. Keypoints [n, k, 2] or
    jagged (x, y, of a pixel) may end up outside the image. Fields [n] and [n, k] do not change.

    Raises:
        TransformError: a field of another shape.
    """
    tensor = field.tensor
    if tensor.is_nested:
        if tensor.ndim <= 2:
            return tensor
        if tensor.ndim == 3 and ragged_dim_of(tensor) == 0 and tensor.shape[-1] in (2, 4):
            offsets: torch.Tensor = tensor.offsets()  # type: ignore[attr-defined]
            values = _move_points(tensor.values(), offsets.diff(), geometries, shape)
            return jagged_tensor(values, offsets, tensor)
    elif tensor.ndim <= 2:
        return tensor
    elif tensor.ndim in (3, 4) and tensor.shape[-2:] == shape[-2:]:
        return _move_mask(tensor, geometries)
    elif tensor.ndim == 3 and tensor.shape[-1] in (2, 4):
        n, k, width = tensor.shape
        return _move_points(tensor.reshape(n * k, width), torch.full((n,), k, device="cpu"), geometries, shape).view(
            n, k, width
        )
    raise TransformError(
        f"field {field} follows images {list(shape)}; expected a mask of their height and width, boxes [n, k, 4] or "
        "keypoints [n, k, 2] (dense or jagged), or a number or vector per sample, which stays; leave it out of on="
    )


def _move_mask(mask: torch.Tensor, geometries: Sequence[Geometry]) -> torch.Tensor:
    planes = mask[:, None] if mask.ndim == 3 else mask
    nearest = [geometry.nearest() for geometry in geometries]
    if mask.device.type == "cpu":
        planes = fused(planes, nearest, None)
    else:
        for geometry in nearest:
            planes = geometry.all(planes)
    return planes[:, 0] if mask.ndim == 3 else planes


def _move_points(
    values: torch.Tensor, counts: torch.Tensor, geometries: Sequence[Geometry], shape: torch.Size
) -> torch.Tensor:
    """Move boxes [m, 4] or keypoints [m, 2]. `counts` [n] says how many belong to each sample."""
    sample = torch.repeat_interleave(counts.cpu())
    is_box = values.shape[1] == 4
    exact = values.detach().to("cpu", torch.float64)
    if is_box:
        x1, y1, x2, y2 = exact.unbind(1)
        corners = torch.stack([x1, y1, x2, y1, x1, y2, x2, y2], 1).view(-1, 2)
        sample = sample.repeat_interleave(4)
    else:
        corners = exact + 0.5  # the middle of a pixel
    for geometry in geometries:
        corners = geometry.points(corners, sample)
        shape = geometry.output_shape(shape)
    if is_box:
        four = corners.view(-1, 4, 2)
        moved = torch.cat([four.amin(1), four.amax(1)], 1)
        h, w = shape[-2:]
        moved = moved.clamp(min=torch.zeros(4, device="cpu")).minimum(
            torch.tensor([w, h, w, h], dtype=torch.float64, device="cpu")
        )
    else:
        moved = corners - 0.5
    if not values.dtype.is_floating_point:
        moved = moved.round()
    return moved.to(values.device, values.dtype)
