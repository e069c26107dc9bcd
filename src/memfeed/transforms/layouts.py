"""Fields that are no batch of images [n, c, h, w]: what the operations see of them, and how they become fields again.

| field | the operations see | spatial dims |
|---|---|---|
| [n, c, h, w], or a list of [c, h, w] | the same | 2 |
| [n, h, w], or a list of [h, w] | [n, 1, h, w], or a list of [1, h, w] | 2 |
| [n, c, d, h, w], or a list of [c, d, h, w] | the same | 3 |
| [n, d] | the same | 0 |
| jagged [n, c, h, *] and the like | a list of [c, h, w] | 2 |

Masks, boxes and keypoints follow the pixels of their images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memfeed.errors import TransformError
from memfeed.schema.jagged import RaggedList, RowViews, jagged_tensor, ragged_dim_of
from memfeed.transforms.backends.passes import fused, kernel_for
from memfeed.transforms.batch_fields import BatchField
from memfeed.transforms.operation import Operation
from memfeed.transforms.params.geometry import Geometry, of_points
from memfeed.transforms.params.sizes import Images, ImageShape

KINDS = {0: "rank 2, vectors [n, d]", 2: "images [n, c, h, w]", 3: "volumes [n, c, d, h, w]"}


class Opened(NamedTuple):
    """A field as the operations see it.

    Args:
        images: the tensor, or a list of tensors of several sizes.
        spatial_dims: of each of them.
        close: turns what the operations made of it into the field.
    """

    images: Images
    spatial_dims: int
    close: Callable[[Images], Any]


def open_field(value: Any, name: str) -> Opened:
    """Return the images of a tensor, or of a list of tensors, as the operations see them. See the table above.

    Raises:
        TransformError: a value of another kind; `name` is what the message calls it.
    """
    if isinstance(value, RowViews) and value.ndim != 4:
        value = value.owned()
    if isinstance(value, torch.Tensor | RowViews) and not value.is_nested:
        ndim, close = value.ndim - 1, _as_field
        if ndim == 2 and isinstance(value, torch.Tensor):
            value, close = value.unsqueeze(1), _without_channel
        rows: list[Any] = [value]
    else:
        rows = list(value.unbind()) if isinstance(value, torch.Tensor) else list(value)
        if any(row is None for row in rows):
            raise TransformError(f"{name} has rows without a value; expected an image in each row; filter the store")
        found = sorted({(row.ndim, str(row.dtype)) for row in rows})
        if len(found) > 1:
            listing = " and ".join(f"{dtype} of {dims} dims" for dims, dtype in found[:2])
            raise TransformError(f"{name} has rows of {listing}; expected one dtype and number of dims")
        ndim, close = (rows[0].ndim if rows else 3), _as_field
        if ndim == 2 and not isinstance(value, torch.Tensor):
            rows, close = [row.unsqueeze(0) for row in rows], _without_channel
        elif ndim < 3:
            raise TransformError(f"{name} has rows of rank {ndim}; expected images [c, h, w]; pad it, or leave it out")
        value = [row if type(row) is torch.Tensor else row.as_subclass(torch.Tensor) for row in rows]
    if ndim not in (1, 2, 3, 4):
        raise TransformError(
            f"{name} has rank {ndim + 1}; expected images [n, c, h, w]; "
            "unsqueeze a single image, and permute channels to the second place"
        )
    if rows and (rows[0].dtype is torch.bool or rows[0].dtype.is_complex):
        raise TransformError(f"{name} is {rows[0].dtype}; expected integers or floats; convert it first")
    return Opened(value, {1: 0, 2: 2, 3: 2, 4: 3}[ndim], close)


def check_operations(operations: Iterable[Operation], opened: Opened, name: str) -> None:
    """Raise TransformError if one of `operations` has no meaning for such a field."""
    for operation in operations:
        if opened.spatial_dims not in operation.spatial_dims:
            expected = " or ".join(KINDS[dims] for dims in operation.spatial_dims)
            raise TransformError(
                f"{name} has {KINDS[opened.spatial_dims]}; expected {expected} for {operation}; "
                "name another field with on="
            )


def in_format(images: Images, memory_format: torch.memory_format) -> Images:
    """Return images that lie in memory as asked for: as they are, where they do so already."""
    if isinstance(images, list):
        return [in_format(image[None], memory_format)[0] for image in images]
    if memory_format is torch.channels_last and images.ndim != 4:
        memory_format = torch.channels_last_3d if images.ndim == 5 else torch.contiguous_format
    return images.contiguous(memory_format=memory_format)


def owned(images: Images, given: Any) -> Images:
    """Return images that share no memory with the views of a store that were given."""
    if not isinstance(images, list) or not isinstance(given, RaggedList) or given.own is None:
        return images
    storages = {row.untyped_storage().data_ptr() for row in given}
    return [image.clone() if image.untyped_storage().data_ptr() in storages else image for image in images]


def _as_field(images: Images) -> Any:
    return RaggedList(images) if isinstance(images, list) else images


def _without_channel(images: Images) -> Any:
    return RaggedList(image.squeeze(0) for image in images) if isinstance(images, list) else images.squeeze(1)


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
