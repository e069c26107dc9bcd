"""Find a field in a batch of any structure, and replace its tensor."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import optree
import torch
from tensordict import is_tensor_collection

from memfeed.errors import FieldError, TransformError, brief, listed
from memfeed.schema.names import Names, Path, display, find_fields

_POSITIONS = re.compile(r"(^|_)(masks?|bbox(es)?|boxes|keypoints?|label_?maps?|segmentations?)(_|\d|$)")
On: TypeAlias = "Names | list[BatchField] | None"
"""How a user names fields, see `memfeed.schema.names`, or the fields themselves. None: the only field that looks like
images."""
GivenNames: TypeAlias = "Mapping[Path, str]"
"""The names that ``fields=`` gave to leaves of a store, by path."""
Windows: TypeAlias = "Collection[Path]"
"""The paths of the fields of a batch that are windows: [n, steps, ...]."""


@dataclass(frozen=True, eq=False)
class BatchField:
    """One tensor of a batch and the path to it.

    Args:
        path: keys and positions, through containers and tensor collections.
        names: `path` with the names of namedtuple fields in place of their positions.
        given: the name that ``fields=`` gave it, or an empty string.
        tensor: the tensor at that path.
        leaf_index: the index of the leaf that holds it, among the leaves of the batch's containers.
        key: the key within that leaf if the leaf is a TensorDict or tensorclass, else empty.
    """

    path: tuple[Any, ...]
    names: tuple[Any, ...]
    tensor: torch.Tensor
    leaf_index: int
    key: tuple[str, ...]
    given: str = ""

    @property
    def name(self) -> Any:
        """The name that `on=` takes."""
        return self.given or (self.names[0] if len(self.names) == 1 else self.names)

    def __str__(self) -> str:
        """Return the name that `on=` takes, with dtype and shape."""
        return f"{brief(self.name, 100)} ({str(self.tensor.dtype).removeprefix('torch.')} {list(self.tensor.shape)})"


def steps_of(field: BatchField, windows: Windows) -> int | None:
    """Return the steps of a field that is one of `windows`; None for any other."""
    return field.tensor.shape[1] if field.names in windows else None


def without_steps(field: BatchField, windows: Windows) -> torch.Tensor:
    """Return the tensor of a field; that of windows [n, steps, ...] as [n * steps, ...]."""
    return field.tensor if steps_of(field, windows) is None else field.tensor.flatten(0, 1)


def find_all(batch: Any, on: On, given: GivenNames | None = None, windows: Windows = ()) -> list[BatchField]:
    """Return the fields that `on` names, in that order; `given` has names for leaves of a tuple.

    Raises:
        FieldError: the batch has no such field.
        TransformError: `on` is None, and no field or several look like images [n, c, h, w] with 1 to 4 channels.
    """
    if isinstance(on, list) and on and isinstance(on[0], BatchField):
        return on
    fields = list(tensors(batch, given))
    shown = list(map(str, fields)) or [f"no tensors, in a {type(batch).__name__}"]
    if on is not None:
        names = [field.given or display(field.names) for field in fields]
        try:
            indices = find_fields(on, [field.names for field in fields], names, shown)
        except FieldError as error:
            try:  # positions in a namedtuple
                indices = find_fields(on, [field.path for field in fields], names)
            except FieldError:
                raise error from None
        return [fields[index] for index in indices]
    images = [field for field in fields if _looks_like_images(without_steps(field, windows))]
    if len(images) != 1:
        raise TransformError(
            f"found {len(images)} fields that look like images among: {listed(shown)}; expected one of shape "
            "[n, c, h, w] with 1 to 4 channels; name the field with on="
        )
    return images


def find(batch: Any, on: On) -> BatchField:
    """Return the one field that `on` names; see `find_all`. Raise FieldError if it names several."""
    found = find_all(batch, on)
    if len(found) > 1:
        raise FieldError(f"found {brief(on)}, which names several fields; expected one of: {listed(found)}")
    return found[0]


def require_decision(batch: Any, image: BatchField, given: GivenNames | None = None) -> None:
    """Raise TransformError if moving the pixels of `image` would leave a mask, boxes or the like behind.

    Such a field has the spatial size of the images, or a name that says what it is.
    """
    undecided = [field for field in tensors(batch, given) if field.path != image.path and _follows_images(field, image)]
    if undecided:
        names = [field.name for field in (image, *undecided)]
        follow = brief(names, 120)
        raise TransformError(
            f"found {listed(undecided, 120)} beside {image}, whose pixels move; expected on= to say if it follows: "
            f"on={follow} moves all of them, on={image.name!r} only the images"
        )


def _follows_images(field: BatchField, image: BatchField) -> bool:
    tensor = field.tensor
    if tensor.dtype is torch.bool and tensor.ndim <= 2:  # the mask of a window
        return False
    if any(isinstance(name, str) and _POSITIONS.search(name.lower()) for name in (*field.names, field.given)):
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


def tensors(batch: Any, given: GivenNames | None = None) -> Iterator[BatchField]:
    """Yield every tensor of a batch; `given` has names for leaves of a tuple."""
    given = given or {}
    accessors, leaves, _ = _flatten(batch)
    for leaf_index, (accessor, leaf) in enumerate(zip(accessors, leaves, strict=True)):
        path = tuple(entry.entry for entry in accessor)
        names = tuple(e.field if isinstance(e, optree.NamedTupleEntry) else e.entry for e in accessor)
        if isinstance(leaf, torch.Tensor):
            yield BatchField(path, names, leaf, leaf_index, (), given.get(names, ""))
        elif is_tensor_collection(leaf):
            for key, tensor in leaf.items(include_nested=True, leaves_only=True):
                keys = key if isinstance(key, tuple) else (key,)
                if isinstance(tensor, torch.Tensor):
                    full = names + keys
                    yield BatchField(path + keys, full, tensor, leaf_index, keys, given.get(full, ""))


def _flatten(batch: Any) -> tuple[list[optree.PyTreeAccessor], list[Any], Any]:
    return optree.tree_flatten_with_accessor(
        batch, is_leaf=is_tensor_collection, none_is_leaf=True, namespace="memfeed"
    )


def _looks_like_images(tensor: torch.Tensor) -> bool:
    return not tensor.is_nested and tensor.ndim == 4 and 1 <= tensor.shape[1] <= 4
