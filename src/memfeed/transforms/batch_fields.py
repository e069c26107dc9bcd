"""Find a field in a batch of any structure, and replace its tensor."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import optree
import torch

from memfeed.errors import FieldError, TransformError, brief, listed
from memfeed.schema.jagged import RaggedList, RowViews
from memfeed.schema.names import Names, Path, display, find_fields
from memfeed.schema.tensordicts import is_a, is_tensor_collection

_POSITIONS = re.compile(
    r"(^|_)(masks?|b?box(es)?|(key)?points?|landmarks?|joints?|pose|label_?maps?|segmentations?)(_|\d|$)"
)
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
        tensor: the tensor at that path, or its RowViews, or the RaggedList of its rows, if they differ in shape.
        leaf_index: the index of the leaf that holds it, among the leaves of the batch's containers.
        key: the key within that leaf if the leaf is a TensorDict or tensorclass, else empty.
    """

    path: tuple[Any, ...]
    names: tuple[Any, ...]
    tensor: Any
    leaf_index: int
    key: tuple[str, ...]
    given: str = ""

    @property
    def name(self) -> Any:
        """The name that `on=` takes."""
        if not self.names:
            return self.given or display(())
        return self.given or (self.names[0] if len(self.names) == 1 else self.names)

    def __str__(self) -> str:
        """Return the name that `on=` takes, with dtype and shape."""
        if isinstance(self.tensor, RaggedList):
            return f"{brief(self.name, 100)} ({_describe_rows(self.tensor)})"
        return f"{brief(self.name, 100)} ({str(self.tensor.dtype).removeprefix('torch.')} {list(self.tensor.shape)})"


def steps_of(field: BatchField, windows: Windows) -> int | None:
    """Return the steps of a field that is one of `windows`; None for any other."""
    return field.tensor.shape[1] if field.names in windows else None


def without_steps(field: BatchField, windows: Windows) -> Any:
    """Return the tensor of a field, or its RaggedList; that of windows [n, steps, ...] as [n * steps, ...]."""
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
    if on is not None:
        names, paths = [field.given or display(field.names) for field in fields], [field.names for field in fields]
        for those in (paths, [field.path for field in fields]):  # these have positions in a namedtuple
            with contextlib.suppress(FieldError):
                return [fields[index] for index in find_fields(on, those, names)]
        find_fields(on, paths, names, _described(fields, batch))  # raises
    images = [field for field in fields if looks_like_images(without_steps(field, windows))]
    if len(images) != 1:
        shown = listed(_described(fields, batch))
        raise TransformError(
            f"found {len(images)} fields that look like images among: {shown}; expected one of shape [n, c, h, w] with "
            "1 to 4 channels; name the field with on="
        )
    return images


def _described(fields: Sequence[BatchField], batch: Any) -> list[str]:
    """Return the fields as errors list them. To describe them takes longer than to find one."""
    return list(map(str, fields)) or [f"no tensors, in a {type(batch).__name__}"]


def find(batch: Any, on: On) -> BatchField:
    """Return the one field that `on` names; see `find_all`. Raise FieldError if it names several."""
    found = find_all(batch, on)
    if len(found) > 1:
        raise FieldError(f"found {brief(on)}, which names several fields; expected one of: {listed(found)}")
    return found[0]


def require_decision(batch: Any, image: BatchField, given: GivenNames | None = None, windows: Windows = ()) -> None:
    """Raise TransformError if moving the pixels of `image` might leave a mask, boxes or the like behind.

    Such a field has the spatial size of the images, the shape of boxes or points in each sample, or a name that says
    what it is.
    """
    others = (field for field in tensors(batch, given) if field.path != image.path)
    undecided = [
        field for field in others if _follows_images(field, image) or _may_be_points(without_steps(field, windows))
    ]
    if undecided:
        names = [field.name for field in (image, *undecided)]
        follow = brief(names, 120)
        raise TransformError(
            f"found {listed(undecided, 120)} beside {image}, whose pixels move; expected on= to say what follows: "
            f"on={follow} moves all of them, on={image.name!r} only the images"
        )


def _follows_images(field: BatchField, image: BatchField) -> bool:
    tensor = field.tensor
    if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.bool and tensor.ndim <= 2:  # the mask of a window
        return False
    if any(isinstance(name, str) and _POSITIONS.search(name.lower()) for name in (*field.names, field.given)):
        return True
    if isinstance(tensor, list) or isinstance(image.tensor, list):
        sizes, others = ([None if row is None else row.shape[-2:] for row in rows] for rows in (image.tensor, tensor))
        return sizes == others and all(row.ndim > 1 for row in tensor)
    if tensor.ndim < 3 or len(tensor) != len(image.tensor):
        return False
    return all(_is_same_dim(tensor, image.tensor, dim) for dim in (-2, -1))


def _is_same_dim(one: Any, other: Any, dim: int) -> bool:
    """Return True if each row of two tensors has the same size in a dim, which may vary from row to row."""
    sizes = [tensor.shape[dim] for tensor in (one, other)]
    if all(isinstance(size, int) for size in sizes):
        return bool(sizes[0] == sizes[1])
    if any(isinstance(size, int) for size in sizes):
        return False
    # of columns on a GPU the sizes are not read, for which it would wait: they may be the same
    return one.device.type != "cpu" or torch.equal(one.offsets().diff(), other.offsets().diff())


def _may_be_points(tensor: Any) -> bool:
    """Return True for boxes [n, k, 4] and points [n, k, 2], dense or jagged; a vector per sample is no list of them."""
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 3 or tensor.dtype in (torch.bool, torch.uint8):
        return False
    return tensor.shape[-1] in (2, 4)


def replace(batch: Any, field: BatchField, tensor: torch.Tensor | list[torch.Tensor]) -> Any:
    """Return a batch with `tensor` as `field`. Its containers are new, and the other tensors are shared."""
    leaves, structure = flatten(batch)[1:]
    leaf = leaves[field.leaf_index]
    if field.key:
        leaf = leaf.clone(recurse=False)  # new nested TensorDicts, unlocked, with the same tensors
        leaf.set(field.key, _non_tensors(tensor) if isinstance(tensor, list) else tensor)
    else:
        leaf = tensor
    leaves[field.leaf_index] = leaf
    return structure.unflatten(leaves)


def tensors(batch: Any, given: GivenNames | None = None) -> Iterator[BatchField]:
    """Yield every tensor of a batch, and every RaggedList; `given` has names for leaves of a tuple."""
    given = given or {}
    accessors, leaves, _ = flatten(batch)
    for leaf_index, (accessor, leaf) in enumerate(zip(accessors, leaves, strict=True)):
        path, names = _path(accessor), names_of(accessor)
        if isinstance(leaf, torch.Tensor | RaggedList | RowViews):
            yield BatchField(path, names, leaf, leaf_index, (), given.get(names, ""))
        elif is_tensor_collection(leaf):
            for key, value in leaf.items(include_nested=True, leaves_only=True, is_leaf=_is_leaf_of_tensordict):
                keys = key if isinstance(key, tuple) else (key,)
                rows: Any = value.tolist() if is_a(value, "tensordict", "NonTensorStack") else None
                tensor = RaggedList(rows) if _is_tensor_list(rows) else value
                if isinstance(tensor, torch.Tensor | RaggedList):
                    full = names + keys
                    yield BatchField(path + keys, full, tensor, leaf_index, keys, given.get(full, ""))


def mark_ragged(batch: Any, row_count: int, paths: Collection[Path] | None = None) -> Any:
    """Return a batch of so many rows with a RaggedList for each field that is a list of tensors.

    ``paths`` are those of these fields; None tells them by their shapes: the first dim of all other tensors is
    ``row_count``.
    """
    accessors, leaves, structure = flatten(batch, _is_tensor_list)
    for index, (accessor, leaf) in enumerate(zip(accessors, leaves, strict=True)):
        if type(leaf) is list and (
            _is_ragged(leaf, row_count) if paths is None else _path(accessor) in paths or names_of(accessor) in paths
        ):
            leaves[index] = RaggedList(leaf)
    return structure.unflatten(leaves)


def own_ragged(batch: Any) -> Any:
    """Return a batch with plain lists for the RaggedLists and tensors for the RowViews, in memory of their own."""
    _, leaves, structure = flatten(batch)
    return structure.unflatten([leaf.owned() if isinstance(leaf, RaggedList | RowViews) else leaf for leaf in leaves])


def _is_ragged(rows: list[Any], row_count: int) -> bool:
    if len(rows) != row_count or any(row is None or row.is_nested for row in rows):
        return False
    if len({(row.ndim, row.dtype) for row in rows}) > 1 or rows[0].ndim < 2:
        return False
    # three images of three channels differ from three fields of three rows by their sizes only
    differ = rows[0].ndim > 2 and len({row.shape for row in rows}) > 1
    return differ or any(len(row) != row_count for row in rows)


def _is_tensor_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and not isinstance(value, RaggedList)
        and any(isinstance(row, torch.Tensor) for row in value)
        and all(row is None or isinstance(row, torch.Tensor) for row in value)
    )


def _is_leaf_of_tensordict(cls: type) -> bool:
    from tensordict import NonTensorData, NonTensorStack

    return issubclass(cls, NonTensorStack | NonTensorData) or not is_tensor_collection(cls)


def _non_tensors(rows: list[Any]) -> Any:
    from tensordict import NonTensorData, NonTensorStack

    return NonTensorStack(*map(NonTensorData, rows))


def _path(accessor: optree.PyTreeAccessor) -> tuple[Any, ...]:
    return tuple(entry.entry for entry in accessor)


def names_of(accessor: optree.PyTreeAccessor) -> tuple[Any, ...]:
    """Return the way to a leaf with the names of namedtuple fields in place of their positions."""
    return tuple(e.field if isinstance(e, optree.NamedTupleEntry) else e.entry for e in accessor)


def flatten(
    batch: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[optree.PyTreeAccessor], list[Any], Any]:
    """Return the ways to the leaves of a batch, the leaves, and its structure. Tensor collections are leaves too.

    So is what ``is_leaf`` says.
    """
    is_leaf_here = is_tensor_collection if is_leaf is None else lambda node: is_leaf(node) or is_tensor_collection(node)
    leaves, structure = optree.tree_flatten(batch, is_leaf=is_leaf_here, none_is_leaf=True, namespace="memfeed")
    try:
        return _accessors_of(structure), leaves, structure
    except Exception:  # a class that a user registered may keep in its structure what cannot be compared: tensors
        return structure.accessors(), leaves, structure


@lru_cache(64)
def _accessors_of(structure: optree.PyTreeSpec) -> list[optree.PyTreeAccessor]:
    """Return the ways to the leaves of a structure; to make them takes longer than all else of `flatten`."""
    return structure.accessors()


def _describe_rows(rows: RaggedList) -> str:
    """Return dtype and shape of the rows, as "list of 4 uint8 [3, *, *]"."""
    shapes = [row.shape for row in rows if row is not None]
    if not shapes or len({len(shape) for shape in shapes}) > 1:
        return f"list of {len(rows)}"
    dims = ["*" if len({*sizes}) > 1 else str(sizes[0]) for sizes in zip(*shapes, strict=True)]
    dtype = next(row.dtype for row in rows if row is not None)
    return f"list of {len(rows)} {str(dtype).removeprefix('torch.')} [{', '.join(dims)}]"


def looks_like_images(tensor: Any) -> bool:
    """Return True for images [n, c, h, w], or a list of images [c, h, w], with 1 to 4 channels."""
    if isinstance(tensor, RaggedList):
        return all(row is None or (row.ndim == 3 and 1 <= len(row) <= 4) for row in tensor)
    channels = tensor.shape[1] if tensor.ndim == 4 else None  # a ragged dim is no int
    return isinstance(channels, int) and 1 <= channels <= 4
