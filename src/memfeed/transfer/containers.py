"""Batches of any kind taken apart into what a device can be asked to hold, and put together again.

optree, in C++, opens tuples, lists, dicts, deques and namedtuples, and what users registered with it. What it takes for
a leaf is looked at here: classes registered with torch's pytrees, dataclasses, subclasses of containers.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import UserList
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import optree
import torch
import torch.utils._pytree as pytree
from tensordict import TensorDictBase, is_tensorclass
from torch.nn.utils.rnn import PackedSequence

NAMESPACE = "memfeed.transfer"  # apart from the one of transforms, which look into no PackedSequence

# types that hold nothing to be moved separately: most leaves need no further look
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.Size, type(None), bool, int, float, complex, str, bytes})

PutTogether = Callable[[Sequence[Any]], Any]


def _open_packed(packed: PackedSequence) -> tuple[list[torch.Tensor], torch.Tensor]:
    moved = (packed.data, packed.sorted_indices, packed.unsorted_indices)
    return [tensor for tensor in moved if tensor is not None], packed.batch_sizes


def _close_packed(batch_sizes: torch.Tensor, moved: Any) -> PackedSequence:
    data, *indices = moved
    return PackedSequence(data, batch_sizes, *indices)  # torch reads batch_sizes on the CPU, wherever the data is


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # optree: it is a namedtuple, and would be opened without this
    optree.register_pytree_node(PackedSequence, _open_packed, _close_packed, namespace=NAMESPACE)  # type: ignore[arg-type]


def has_to(value: Any) -> bool:
    """Whether the class of ``value`` knows how to move it; an attribute of one instance may be a field named "to"."""
    return callable(getattr(type(value), "to", None))


def take_apart(tree: Any) -> tuple[list[Any], PutTogether]:
    """The leaves of ``tree``, and a function that makes the same tree of as many others.

    Dicts keep the order of their keys. A TensorDict, a tensorclass and an object with a method ``to`` are leaves.
    """
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    if _PLAIN.issuperset(map(type, leaves)):
        return leaves, spec.unflatten
    flat: list[Any] = []
    inner: list[PutTogether | None] = []
    ends: list[int] = []
    for leaf in leaves:
        held = _opened(leaf)
        if held is None:
            flat.append(leaf)
            inner.append(None)
        else:
            parts, put = take_apart(held[0])
            flat += parts
            inner.append(_closing(leaf, parts, put, held[1]))
        ends.append(len(flat))
    if not any(inner):
        return flat, spec.unflatten

    def put_together(moved: Sequence[Any]) -> Any:
        starts = [0, *ends[:-1]]
        return spec.unflatten(
            moved[start] if put is None else put(moved[start:end])
            for start, end, put in zip(starts, ends, inner, strict=True)
        )

    return flat, put_together


def _closing(value: Any, parts: list[Any], put: PutTogether, close: Callable[[Any], Any]) -> PutTogether:
    def closed(moved: Sequence[Any]) -> Any:
        # not only cheaper: a class nobody has registered is put together only where it has to be
        if all(new is old for new, old in zip(moved, parts, strict=True)):
            return value
        return close(put(moved))

    return closed


def _opened(value: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """What a container holds, as a list or a dict, and what makes such a container of another; None for a leaf."""
    cls = type(value)
    if cls in _PLAIN or isinstance(value, torch.Tensor | TensorDictBase | str | bytes) or is_tensorclass(cls):
        return None
    node = pytree.SUPPORTED_NODES.get(cls)
    if node is not None:
        held, context = node.flatten_fn(value)
        return list(held), lambda moved: node.unflatten_fn(moved, context)
    if has_to(value):
        return None
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return fields, lambda moved: _with_fields(value, moved)
    if isinstance(value, Mapping):
        return dict(value), lambda moved: _with_items(value, moved)
    if isinstance(value, list | UserList):
        return list(value), lambda moved: _with_elements(value, moved)
    if isinstance(value, tuple):
        return list(value), lambda moved: _made_of(cls, moved, tuple)
    return None


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    made = copy.copy(value)  # __init__ and __post_init__ have run already
    for name, held in fields.items():
        object.__setattr__(made, name, held)  # frozen ones too
    return made


# As torch.utils.data's pin_memory: a copy keeps what a subclass has besides its items.


def _with_items(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return _made_of(type(value), items, dict)
    made = copy.copy(value)
    for key, held in items.items():  # one by one: Counter.update adds
        made[key] = held
    return made


def _with_elements(value: list[Any] | UserList[Any], elements: list[Any]) -> Any:
    made = copy.copy(value)
    made[:] = elements
    return made


def _made_of(cls: Callable[[Any], Any], held: Any, otherwise: Callable[[Any], Any]) -> Any:
    try:
        return cls(held)
    except TypeError:  # its constructor takes something else
        return otherwise(held)


def paths(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf and its place, as ``labels[0]`` or ``target.boxes``; as slow as error messages may be."""
    for keys, leaf in _paths(tree):
        shown = "".join(f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in keys)
        yield shown.removeprefix("."), leaf


def _paths(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    keys, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True, namespace=NAMESPACE)
    for at, leaf in zip(keys, leaves, strict=True):
        held = _opened(leaf)
        if held is None:
            yield at, leaf
        else:
            yield from (((*at, *rest), part) for rest, part in _paths(held[0]))
