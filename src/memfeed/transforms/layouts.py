"""Fields that are no batch of images [n, c, h, w]: what the operations see of them, and how they become fields again.

| field | the operations see | spatial dims |
|---|---|---|
| [n, c, h, w], or a list of [c, h, w] | the same | 2 |
| [n, h, w], or a list of [h, w] | [n, 1, h, w], or a list of [1, h, w] | 2 |
| [n, c, d, h, w], or a list of [c, d, h, w] | the same | 3 |
| [n, d] | the same | 0 |
| jagged [n, c, h, *] and the like | a list of [c, h, w] | 2 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from memfeed.errors import TransformError
from memfeed.schema.ragged_list import RaggedList
from memfeed.schema.row_views import RowViews
from memfeed.transforms.operation import Operation
from memfeed.transforms.params.sizes import Images

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
        ndim, close = value.ndim - 1, _as_it_is
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
        ndim, close = (rows[0].ndim if rows else 3), _as_list
        if ndim == 2 and not isinstance(value, torch.Tensor):
            rows, close = [row.unsqueeze(0) for row in rows], _list_without_channel
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


def _as_it_is(images: Images) -> Any:
    return images


def _without_channel(images: Images) -> Any:
    assert isinstance(images, torch.Tensor)
    return images.squeeze(1)


def _as_list(images: Images) -> Any:
    return RaggedList(images) if isinstance(images, list) else images


def _list_without_channel(images: Images) -> Any:
    return RaggedList(image.squeeze(0) for image in images) if isinstance(images, list) else images.squeeze(1)
