"""Find a field in a batch of any structure, and replace its tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import optree
import torch
from tensordict import is_tensor_collection

from memfeed.errors import FieldError, TransformError

_POSITIONS = re.compile(r"(^|_)(masks?|bbox(es)?|boxes|keypoints?|label_?maps?|segmentations?)(_|\d|$)")
Entry: TypeAlias = "str | int"
On: TypeAlias = "Entry | tuple[Entry | tuple[Entry, ...], ...] | None"
"""How a user names a field: a key, a position, or a path of these; or several fields, in a tuple. None: the only field
that looks like images."""


@dataclass(frozen=True, eq=False)
class BatchField:
    """One tensor of a batch and the path to it.

    Args:
        path: keys and positions, through containers and tensor collections.
        names: `path` with the names of namedtuple fields in place of their positions.
        tensor: the tensor at that path.
        leaf_index: the index of the leaf that holds it, among the leaves of the batch's containers.
        key: the key within that leaf if the leaf is a TensorDict or tensorclass, else empty.
    """

    path: tuple[Any, ...]
    names: tuple[Any, ...]
    tensor: torch.Tensor
    leaf_index: int
    key: tuple[str, ...]

    def __str__(self) -> str:
        """Return the name that `on=` takes, with dtype and shape."""
        name = repr(self.names[0]) if len(self.names) == 1 else repr(self.names)
        return f"{name} ({str(self.tensor.dtype).removeprefix('torch.')} {list(self.tensor.shape)})"


def find(batch: Any, on: On) -> BatchField:
    """Return the field that `on` names.

    Raises:
        FieldError: the batch has no such field.
        TransformError: `on` is None, and no field or several look like images [n, c, h, w] with 1 to 4 channels.
    """
    fields = list(tensors(batch))
    listing = ", ".join(map(str, fields)) or f"no tensors, in a {type(batch).__name__}"
    if on is not None:
        path = on if isinstance(on, tuple) else (on,)
        for field in fields:
            if path in (field.path, field.names):
                return field
        raise FieldError(f"no field {on!r} in the batch; found {listing}; name one of these with on=")
    images = [field for field in fields if _looks_like_images(field.tensor)]
    if len(images) != 1:
        raise TransformError(
            f"found {len(images)} fields that look like images among {listing}; "
            "expected one of shape [n, c, h, w] with 1 to 4 channels; name the field with on="
        )
    return images[0]


def find_all(batch: Any, on: On) -> list[BatchField]:
    """Return the fields that `on` names: several if it is a tuple whose first entry is a field itself. See `find`."""
    if isinstance(on, tuple) and len(on) > 1:
        first = on[0] if isinstance(on[0], tuple) else (on[0],)
        if any(first in (field.path, field.names) for field in tensors(batch)):
            return [find(batch, name) for name in on]
    return [find(batch, on)]


def require_decision(batch: Any, image: BatchField) -> None:
    """Raise TransformError if moving the pixels of `image` would leave a mask, boxes or the like behind.

    Such a field has the spatial size of the images, or a name that says what it is.
    """
    undecided = [field for field in tensors(batch) if field.path != image.path and _follows_images(field, image)]
    if undecided:
        names = [field.names[0] if len(field.names) == 1 else field.names for field in (image, *undecided)]
        follow, stay = (repr(tuple(dict.fromkeys(names)))), repr(names[0])
        raise TransformError(
            f"found {', '.join(map(str, undecided[:4]))} beside {image}, whose pixels move; expected on= to say if it "
            f"follows: on={follow} moves all of them, on={stay} only the images"
        )


def _follows_images(field: BatchField, image: BatchField) -> bool:
    tensor = field.tensor
    if any(isinstance(name, str) and _POSITIONS.search(name.lower()) for name in field.names):
        return True
    size = image.tensor.shape
    return not tensor.is_nested and tensor.ndim > 2 and (len(tensor), *tensor.shape[-2:]) == (size[0], *size[-2:])


def replace(batch: Any, field: BatchField, tensor: torch.Tensor) -> Any:
    """Return a batch with `tensor` as `field`. Its containers are new, and the other tensors are shared."""
    leaves, structure = _flatten(batch)[1:]
    leaf = leaves[field.leaf_index]
    if field.key:
        leaf = leaf.clone(recurse=False)  # new nested TensorDicts, unlocked, with the same tensors
        leaf.set(field.key, tensor)
    else:
        leaf = tensor
    leaves[field.leaf_index] = leaf
    return structure.unflatten(leaves)


def tensors(batch: Any) -> Iterator[BatchField]:
    """Yield every tensor of a batch."""
    accessors, leaves, _ = _flatten(batch)
    for leaf_index, (accessor, leaf) in enumerate(zip(accessors, leaves, strict=True)):
        path = tuple(entry.entry for entry in accessor)
        names = tuple(e.field if isinstance(e, optree.NamedTupleEntry) else e.entry for e in accessor)
        if isinstance(leaf, torch.Tensor):
            yield BatchField(path, names, leaf, leaf_index, ())
        elif is_tensor_collection(leaf):
            for key, tensor in leaf.items(include_nested=True, leaves_only=True):
                keys = key if isinstance(key, tuple) else (key,)
                if isinstance(tensor, torch.Tensor):
                    yield BatchField(path + keys, names + keys, tensor, leaf_index, keys)


def _flatten(batch: Any) -> tuple[list[optree.PyTreeAccessor], list[Any], Any]:
    return optree.tree_flatten_with_accessor(
        batch, is_leaf=is_tensor_collection, none_is_leaf=True, namespace="memfeed"
    )


def _looks_like_images(tensor: torch.Tensor) -> bool:
    return not tensor.is_nested and tensor.ndim == 4 and 1 <= tensor.shape[1] <= 4
