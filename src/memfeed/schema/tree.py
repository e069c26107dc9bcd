"""Take samples apart into leaves, along the structure that was inferred from the first ones.

`memfeed.schema.assemble` does the inverse. To walk containers of any class, without a structure, see
`memfeed.schema.containers`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

import msgspec
import torch

from memfeed.errors import SchemaError, brief
from memfeed.schema import kept_tensors
from memfeed.schema.fields import Node, Path, display
from memfeed.schema.graphs import is_graph, is_graph_class, open_graph
from memfeed.schema.kept_tensors import kept_name, open_kept, part_names
from memfeed.schema.tensordicts import is_a, is_tensorclass


def record_names(cls: type) -> tuple[str, ...]:
    """Return the field names of a namedtuple, dataclass or tensorclass; () for any other class."""
    if dataclasses.is_dataclass(cls):  # a tensorclass is one too
        return tuple(field.name for field in dataclasses.fields(cls))
    return tuple(getattr(cls, "_fields", ()))


def as_types(types: type | Iterable[type]) -> tuple[type, ...]:
    """Return ``types=`` as a user gives it, one class or several, as a tuple. Raise SchemaError for anything else."""
    classes = (types,) if isinstance(types, type) else tuple(types) if isinstance(types, Iterable) else (types,)
    for cls in classes:
        if not isinstance(cls, type) or not (record_names(cls) or typed_name(cls) or is_graph_class(cls)):
            name = cls.__name__ if isinstance(cls, type) else brief(cls)
            raise SchemaError(f"found types={name}; expected tensorclass, dataclass or namedtuple classes")
    return classes


def is_unbatched(value: Any) -> bool:
    """Return True for tensordict's UnbatchedTensor, which belongs to a whole TensorDict and not to its rows."""
    return is_a(value, "tensordict", "UnbatchedTensor")


def typed_name(cls: type) -> str:
    """Return the name of a class made with tensordict's TypedTensorDict; an empty string for any other class."""
    # older versions of tensordict do not have it
    typed: type | None = getattr(sys.modules.get("tensordict"), "TypedTensorDict", None)
    return cls.__name__ if typed is not None and issubclass(cls, typed) else ""


def open_container(value: Any) -> tuple[Node, Sequence[Any]] | None:
    """Return the kind of container that ``value`` is (a Node without children) and its content; None for a leaf.

    Raises SchemaError for a dict key that is neither str nor int, and for a dataclass with a field that is not set
    or an attribute that is no field.
    """
    cls = type(value)
    if isinstance(value, torch.Tensor):
        if kept := kept_name(value):
            return Node(kind="tensor", name=kept, keys=part_names(kept)), open_kept(value)
        if cls is torch.Tensor or (name := kept_tensors.class_name(value)) not in kept_tensors.SIZED:
            return None
        node = Node(kind="tv_tensor", name=name, keys=kept_tensors.SIZED_KEYS, value=kept_tensors.options_of(value))
        return node, kept_tensors.parts_of(value)
    if isinstance(value, str | bytes):
        return None
    if isinstance(value, tuple):
        if hasattr(cls, "_fields"):
            return Node(kind="namedtuple", name=cls.__name__, keys=tuple(cls._fields)), value
        return Node(kind="tuple"), value
    if isinstance(value, list):
        return Node(kind="list"), value
    if is_a(value, "tensordict", "TensorDictBase"):
        keys = tuple(value.keys())
        node = Node(
            kind="tensordict",
            name=typed_name(cls),
            keys=keys,
            batch_dims=value.batch_dims,
            dim_names=_dim_names(value),
        )
        return node, [value[key] for key in keys]
    if isinstance(value, Mapping):
        # an Enum of strings is equal to them, and looked up by them
        keys = tuple(key.value if isinstance(key, Enum) and isinstance(key, str) else key for key in value)
        for key in keys:
            if type(key) not in (str, int):
                raise SchemaError(
                    f"found the dict key {key!r} of type {type(key).__name__}; expected str or int keys: convert it in "
                    "the dataset"
                )
        return Node(kind="dict", keys=keys), list(value.values())
    if dataclasses.is_dataclass(cls):
        names = record_names(cls)
        unset = [name for name in names if not hasattr(value, name)]
        if unset:
            raise SchemaError(
                f"found a {cls.__name__} whose field {unset[0]} is not set; expected a value for each field: set it in "
                "the dataset"
            )
        content = [getattr(value, name) for name in names]
        if is_tensorclass(cls):
            node = Node(kind="tensorclass", name=cls.__name__, keys=names, batch_dims=value.batch_dims)
            return msgspec.structs.replace(node, dim_names=_dim_names(value)), content
        own = (name for name in getattr(value, "__dict__", ()) if name not in names and name[:2] != "__")
        beside = [name for name in own if not isinstance(getattr(cls, name, None), cached_property)]
        if beside:
            raise SchemaError(
                f"found a {cls.__name__} with the attribute {beside[0]} beside its fields, which a store would lose; "
                f"expected fields only: {beside[0]}: ... = dataclasses.field(init=False), or a property"
            )
        return Node(kind="dataclass", name=cls.__name__, keys=names), content
    if is_graph(value):
        keys, content = open_graph(value)
        return Node(kind="graph", name=cls.__name__, keys=keys), content
    return None


def _dim_names(value: Any) -> tuple[str | None, ...]:
    """Return the names of the dims of a sample's batch, the dim of the rows first; () if none has a name."""
    names = value.names
    return (None, *names) if any(names) else ()


class Flattener:
    """Takes samples of one structure apart into their leaves, in the order of the schema's fields.

    A leaf of the structure may be a whole container of the sample (a json value, a list of numbers of any length).
    Therefore this walks along the structure and not, as optree would, along the sample.
    """

    stands_for: ClassVar[Mapping[str, str]] = {}  # by kind of container, another one that may take its place

    def __init__(self, structure: Node) -> None:
        self.structure = structure

    def __call__(self, sample: Any) -> list[Any]:
        """Return the leaves of ``sample``; raise SchemaError where its structure differs."""
        leaves: list[Any] = []
        self._walk(self.structure, sample, (), leaves)
        return leaves

    def _walk(self, node: Node, value: Any, path: Path, leaves: list[Any]) -> None:
        if node.kind == "leaf":
            if node.name and value is not None and kept_tensors.class_name(value) != node.name:
                raise self._mismatch(path, type(value).__name__, f"an {node.name} of torchvision")
            leaves.append(value)
            return
        if node.kind == "none":
            if value is not None:
                raise self._mismatch(path, type(value).__name__, "None")
            return
        opened = open_container(value)
        if opened is None or opened[0].kind not in (node.kind, self.stands_for.get(node.kind)):
            expected = node.name if node.kind in ("tv_tensor", "tensor") else f"a {node.kind}"
            raise self._mismatch(path, type(value).__name__, expected)
        found, content = opened
        if node.kind in ("tuple", "list"):
            if len(content) != len(node.children):
                hint = ""
                if node.kind == "list" and path:
                    hint = f"; if its length may vary, pass fields={{{display(path)!r}: 'jagged'}} and overwrite=True"
                raise self._mismatch(path, f"a {node.kind} of {len(content)}", f"one of {len(node.children)}", hint)
        elif node.kind == "tv_tensor" and (found.name, found.value) != (node.name, node.value):
            raise self._mismatch(path, f"{found.name} of {found.value}", f"{node.name} of {node.value}")
        elif node.kind == "tensor" and found.name != node.name:
            raise self._mismatch(path, found.name, node.name)
        elif found.keys != node.keys:
            by_key = dict(zip(found.keys, content, strict=True))
            if set(by_key) != set(node.keys):
                raise self._mismatch(path, f"the keys {brief(list(by_key), 120)}", brief(list(node.keys), 120))
            content = [by_key[key] for key in node.keys]
        for (key, child), part in zip(node.items(), content, strict=True):
            if child.kind == "leaf" and not child.name:
                leaves.append(part)
            else:
                self._walk(child, part, (*path, key), leaves)

    def _mismatch(self, path: Path, found: str, expected: str, hint: str = "") -> Exception:
        where = f" at {display(path)}" if path else ""
        return SchemaError(f"found {found}{where}; expected {expected}, as in the samples probed{hint}")


def add_type(types: dict[str, type], cls: type) -> None:
    """Add a record class to ``types``, by its name. Raises SchemaError if another class has that name."""
    other = types.setdefault(cls.__name__, cls)
    if other is not cls:
        raise SchemaError(
            f"found two classes named {cls.__name__} ({other.__module__}.{other.__qualname__} and "
            f"{cls.__module__}.{cls.__qualname__}); expected one, because a store distinguishes them by name: "
            "rename one"
        )


def types_of(samples: Iterable[Any]) -> tuple[type, ...]:
    """Return the namedtuple, dataclass and tensorclass classes in some samples, as ``types=`` takes them.

    Raises SchemaError for two classes of one name, which a store could not distinguish.
    """
    types: dict[str, type] = {}

    def collect(value: Any) -> None:
        opened = open_container(value)
        if opened is None or opened[0].kind in ("tv_tensor", "tensor"):
            return
        if opened[0].name:
            add_type(types, type(value))
        for part in opened[1]:
            collect(part)

    for sample in samples:
        collect(sample)
    return tuple(types.values())
