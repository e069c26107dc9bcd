"""Walk any nesting of containers: the samples and batches of users, of whatever classes they are.

optree, in C++, opens tuples, lists, dicts, deques and namedtuples, and the classes that users registered with it. This
module opens the rest: classes registered with torch's pytrees, dataclasses, and subclasses of containers. A TensorDict
or tensorclass is a leaf. To walk along a structure that was inferred before, see `memfeed.schema.tree`.

Tell datasets of torch that are read by their parts, in place of sample by sample.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import UserList
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import optree
import torch
import torch.utils._pytree as pytree
from torch.nn.utils.rnn import PackedSequence

from memfeed.errors import SchemaError
from memfeed.schema.graphs import graph_parts, is_graph, with_parts
from memfeed.schema.tensordicts import is_a, is_tensor_collection

# A PackedSequence is opened differently here than in transforms, which use the namespace of `memfeed.schema.assemble`.
NAMESPACE = "memfeed.containers"

# Types that hold no other value: most leaves need no further look.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.Size, type(None), bool, int, float, complex, str, bytes})

Unflatten = Callable[[Sequence[Any]], Any]
IsLeaf: TypeAlias = "Callable[[Any], bool] | None"


def _open_packed(packed: PackedSequence) -> tuple[list[torch.Tensor], torch.Tensor]:
    tensors = (packed.data, packed.sorted_indices, packed.unsorted_indices)
    return [tensor for tensor in tensors if tensor is not None], packed.batch_sizes


def _close_packed(batch_sizes: torch.Tensor, tensors: Any) -> PackedSequence:
    data, *indices = tensors
    return PackedSequence(data, batch_sizes, *indices)  # torch reads batch_sizes on the CPU, wherever the data is


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # optree warns that it opens namedtuples without a registration
    optree.register_pytree_node(PackedSequence, _open_packed, _close_packed, namespace=NAMESPACE)  # type: ignore[arg-type]


def flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], Unflatten]:
    """Return the leaves of ``tree``, and a function that builds the same tree from as many other leaves.

    Dicts keep the order of their keys. Objects for which ``is_leaf`` returns True are not opened; it is called only for
    classes that neither optree nor torch knows. A container of such a class is returned itself, and not rebuilt,
    where all of its new leaves are the old ones.
    """
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    if _PLAIN.issuperset(map(type, leaves)):
        return leaves, spec.unflatten
    flat: list[Any] = []
    inner: list[Unflatten | None] = []
    ends: list[int] = []
    for leaf in leaves:
        opened = open_any(leaf, is_leaf)
        if opened is None:
            flat.append(leaf)
            inner.append(None)
        else:
            content, close = opened
            parts, unflatten = flatten(content, is_leaf)
            flat += parts
            inner.append(_closing(leaf, parts, unflatten, close))
        ends.append(len(flat))
    if not any(inner):
        return flat, spec.unflatten

    def unflatten_all(new: Sequence[Any]) -> Any:
        starts = [0, *ends[:-1]]
        return spec.unflatten(
            new[start] if unflatten is None else unflatten(new[start:end])
            for start, end, unflatten in zip(starts, ends, inner, strict=True)
        )

    return flat, unflatten_all


def _closing(value: Any, parts: list[Any], unflatten: Unflatten, close: Callable[[Any], Any]) -> Unflatten:
    def closed(new: Sequence[Any]) -> Any:
        # this saves time, and a class that nobody has registered is rebuilt only where it has to be
        if all(part is old for part, old in zip(new, parts, strict=True)):
            return value
        return close(unflatten(new))

    return closed


def leaves_with_paths(tree: Any, is_leaf: IsLeaf = None) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every leaf of ``tree`` with its path of keys, positions and field names; much slower than `flatten`."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True, namespace=NAMESPACE)
    for path, leaf in zip(paths, leaves, strict=True):
        opened = open_any(leaf, is_leaf)
        if opened is None:
            yield path, leaf
        else:
            yield from (((*path, *rest), part) for rest, part in leaves_with_paths(opened[0], is_leaf))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of ``tree`` in which every leaf is replaced by ``function(leaf)`` and every container is new.

    A mapping that is not a dict is a leaf: setting its items may write to a file. Raises SchemaError for a container
    that contains itself.
    """

    def mapped(leaf: Any) -> Any:
        opened = open_any(leaf, lambda value: isinstance(value, Mapping) and not isinstance(value, dict))
        if opened is None:
            return function(leaf)
        content, close = opened
        return close(map_leaves(function, content))

    try:
        return optree.tree_map(mapped, tree, none_is_leaf=True, namespace=NAMESPACE)
    except RecursionError:
        raise SchemaError(
            f"found a {type(tree).__name__} that contains itself, or is nested hundreds of levels deep; expected "
            "tensors, numbers and text in a few levels of containers: leave that part out of the sample"
        ) from None


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of ``tree``, also those in TensorDicts and in the lists that a TensorDict keeps as a value."""
    for leaf in flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_a(leaf, "tensordict", "NonTensorStack"):
            yield from tensors_in(leaf.tolist())
        elif is_a(leaf, "tensordict", "NonTensorData"):
            yield from tensors_in(leaf.data)
        elif is_tensor_collection(leaf):
            for value in leaf.values():
                yield from tensors_in(value)


def device_of(tree: Any) -> torch.device | None:
    """Return the device that tensors of ``tree`` are on, other than the CPU; None if all are on the CPU.

    Raises SchemaError for tensors of several such devices.
    """
    found = {tensor.device for tensor in tensors_in(tree) if tensor.device.type not in ("cpu", "meta")}
    if len(found) > 1:
        names = " and ".join(sorted(map(str, found)))
        raise SchemaError(f"found tensors on {names}; expected those of a sample on one device: move them there")
    return next(iter(found), None)


def open_any(value: Any, is_leaf: IsLeaf = None) -> tuple[Any, Callable[[Any], Any]] | None:
    """Return the content of a container as a list or dict, and a function that builds one of other content.

    None for a leaf. optree opens the usual containers, this one all others.
    """
    cls = type(value)
    if cls in _PLAIN or isinstance(value, torch.Tensor | str | bytes) or is_tensor_collection(value):
        return None
    node = pytree.SUPPORTED_NODES.get(cls)
    if node is not None:
        (content, context), unflatten_node = node.flatten_fn(value), node.unflatten_fn
        return list(content), lambda parts: unflatten_node(parts, context)
    if is_leaf is not None and is_leaf(value):
        return None
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return fields, partial(_with_fields, value)
    if is_graph(value):
        return graph_parts(value), lambda parts: with_parts(copy.copy(value), parts)
    if isinstance(value, Mapping):
        return dict(value), partial(_with_items, value)
    if isinstance(value, list | UserList):
        return list(value), partial(_with_elements, value)
    if isinstance(value, tuple):
        return list(value), partial(_construct, cls, otherwise=tuple)
    return None


# A copy keeps what a subclass holds besides its items, as in torch.utils.data's pin_memory.


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    new = copy.copy(value)  # without __init__ and __post_init__: the values are final
    for name, content in fields.items():
        object.__setattr__(new, name, content)  # works for frozen dataclasses too
    return new


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return _construct(type(value), items, dict)
    new = copy.copy(value)
    for key, item in items.items():  # one by one: Counter.update adds
        new[key] = item
    return new


def _with_elements(value: list[Any] | UserList[Any], elements: list[Any]) -> Any:
    new = copy.copy(value)
    new[:] = elements
    return new


def _construct(cls: Callable[[Any], Any], content: Any, otherwise: Callable[[Any], Any]) -> Any:
    try:
        return cls(content)
    except TypeError:  # its constructor takes something else
        return otherwise(content)


def reads_as(data: Any, cls: type) -> bool:
    """Return True for a dataset of this class of torch, also of a subclass that changes neither samples nor length."""
    names = ("__getitem__", "__getitems__", "__len__")
    return isinstance(data, cls) and all(getattr(type(data), n, None) is getattr(cls, n, None) for n in names)
