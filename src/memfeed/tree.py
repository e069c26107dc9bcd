"""Sample <-> ordered leaves: optree does the work, this module says what its nodes are.

A structure becomes two optree specs for putting together: one gives samples as the dataset returned them, one gives
batches, where `torch.utils.data.default_collate`'s rule holds that a tuple becomes a list.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensorclass

from memfeed.errors import SchemaError
from memfeed.schema import Node

NAMESPACE = "memfeed"  # optree keeps registrations apart by it, so nothing of the user's own is touched
_registered: set[type] = set()


def record_names(cls: type) -> tuple[str, ...]:
    """The field names of a namedtuple, dataclass or tensorclass."""
    if dataclasses.is_dataclass(cls):  # a tensorclass is one too
        return tuple(field.name for field in dataclasses.fields(cls))
    return tuple(getattr(cls, "_fields", ()))


def _flatten_tensordict(td: TensorDictBase) -> tuple[list[Any], tuple[Any, ...], tuple[str, ...]]:
    keys = tuple(sorted(td.keys()))  # as optree does with dicts: two samples may have set their keys in another order
    return [td[key] for key in keys], (keys, td.batch_dims), keys


def _flatten_tensorclass(value: Any) -> tuple[list[Any], tuple[Any, ...], tuple[str, ...]]:
    names = record_names(type(value))
    return [getattr(value, name) for name in names], (names, value.batch_dims), names


def _flatten_dataclass(value: Any) -> tuple[list[Any], tuple[str, ...], tuple[str, ...]]:
    names = record_names(type(value))
    return [getattr(value, name) for name in names], names, names


def _flatten_mapping(value: Mapping[Any, Any]) -> tuple[list[Any], tuple[Any, ...], tuple[Any, ...]]:
    keys = tuple(sorted(value, key=lambda key: (type(key).__name__, key)))
    return [value[key] for key in keys], keys, keys


def _register(cls: type, flatten: Callable[[Any], Any]) -> None:
    if cls not in _registered:
        _registered.add(cls)
        # samples are only taken apart through these; what is put together comes from a _Maker
        optree.register_pytree_node(cls, flatten, lambda meta, children: list(children), namespace=NAMESPACE)


def open_container(value: Any) -> tuple[Node, list[Any]] | None:
    """What kind of container ``value`` is (a Node without children) and what it holds; None for a leaf."""
    cls = type(value)
    if isinstance(value, torch.Tensor):
        return None
    if is_tensorclass(cls):
        _register(cls, _flatten_tensorclass)
        held, (names, batch_dims), _ = _flatten_tensorclass(value)
        return Node(kind="tensorclass", name=cls.__name__, keys=names, batch_dims=batch_dims), held
    if isinstance(value, TensorDictBase):
        _register(cls, _flatten_tensordict)
        held, (keys, batch_dims), _ = _flatten_tensordict(value)
        return Node(kind="tensordict", keys=keys, batch_dims=batch_dims), held
    if isinstance(value, Mapping):
        if cls not in (dict, collections.OrderedDict, collections.defaultdict):
            _register(cls, _flatten_mapping)
        for key in value:
            if type(key) not in (str, int):
                raise SchemaError(f"found the dict key {key!r} of type {type(key).__name__}; expected str or int keys")
        return Node(kind="dict", keys=tuple(value)), list(value.values())
    if isinstance(value, tuple):
        if hasattr(cls, "_fields"):
            return Node(kind="namedtuple", name=cls.__name__, keys=tuple(cls._fields)), list(value)
        return Node(kind="tuple"), list(value)
    if isinstance(value, list):
        return Node(kind="list"), value
    if dataclasses.is_dataclass(cls):
        _register(cls, _flatten_dataclass)
        held, names, _ = _flatten_dataclass(value)
        return Node(kind="dataclass", name=cls.__name__, keys=names), held
    return None


class Flattener:
    """Takes samples of one structure apart into their leaves, in the order of the schema's fields.

    ``exemplar`` is one sample of that structure. A leaf may stand where the sample has a whole container (a json
    value, a list of numbers of any length).
    """

    def __init__(self, structure: Node, exemplar: Any) -> None:
        whole: set[int] = set()
        order: dict[tuple[Any, ...], int] = {}
        constants: set[tuple[Any, ...]] = set()

        def walk(node: Node, value: Any, at: tuple[Any, ...]) -> None:
            if node.kind == "none":
                constants.add(at)
            elif node.kind == "leaf":
                order[at] = len(order)
                whole.add(id(value))
            else:
                opened = open_container(value)
                if opened is None or len(opened[1]) != len(node.children):
                    raise SchemaError(f"found {type(value).__name__} at {at}; expected a {node.kind}")
                # optree's own paths give the position, not the name, for a namedtuple
                keys = node.keys if node.keys and node.kind != "namedtuple" else range(len(node.children))
                for key, child, held in zip(keys, node.children, opened[1], strict=True):
                    walk(child, held, (*at, key))

        walk(structure, exemplar, ())
        paths, _, self._spec = optree.tree_flatten_with_path(
            exemplar,
            is_leaf=lambda value: id(value) in whole and value is not None,
            none_is_leaf=True,
            namespace=NAMESPACE,
        )
        self._take = [paths.index(path) for path in order]
        self._constants = [(paths.index(path), path) for path in constants]

    def __call__(self, sample: Any) -> list[Any]:
        """The leaves of ``sample``; raises SchemaError where its structure differs."""
        try:
            leaves = self._spec.flatten_up_to(sample)
        except (ValueError, TypeError) as error:
            raise SchemaError(f"found another structure than in the samples probed: {error}") from None
        for number, path in self._constants:
            if leaves[number] is not None:
                raise SchemaError(
                    f"found {type(leaves[number]).__name__} at {'.'.join(map(str, path))}; "
                    "expected None, as in the samples probed"
                )
        return [leaves[number] for number in self._take]


class _Maker:
    """Stands in a template for a container that is put together by calling ``make(children)``."""

    def __init__(self, make: Callable[[Sequence[Any]], Any], children: Sequence[Any]) -> None:
        self.make, self.children = make, children


def _unmake(maker: Any) -> tuple[Sequence[Any], Any]:
    return maker.children, maker.make


def _make(make: Any, children: Iterable[Any]) -> Any:
    return make(tuple(children))


optree.register_pytree_node(_Maker, _unmake, _make, namespace=NAMESPACE)  # type: ignore[arg-type]


def _rebuild_namedtuple(name: str, keys: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return generated_namedtuple(name, keys)(*values)


@functools.lru_cache(maxsize=1024)
def generated_namedtuple(name: str, keys: tuple[str, ...]) -> type:
    """A namedtuple class equal to one that the store may not import: same name, same fields, and picklable."""
    try:
        cls = collections.namedtuple(name, keys)  # type: ignore[misc]
    except ValueError as error:
        raise SchemaError(f"found a namedtuple {name!r} with fields {keys}; expected Python names: {error}") from None
    setattr(cls, "__reduce__", lambda self: (_rebuild_namedtuple, (name, keys, tuple(self))))  # noqa: B010
    return cls


def _batch_size(values: Sequence[Any], batch_dims: int) -> tuple[int, ...]:
    """The leading dims that the values share, at most ``batch_dims``; ragged leaves share only the first.

    Lists of other values fit any batch_size, so they decide only where nothing else does.
    """
    known: list[tuple[int, ...]] = []
    for value in values:
        if isinstance(value, list):
            known.append((len(value),) if any(map(_is_kept, value)) else ())
        elif isinstance(value, torch.Tensor) and value.is_nested:
            known.append((value.shape[0],))
        elif _is_kept(value) and not isinstance(value, dict):
            known.append(tuple(value.shape))
    known = [dims for dims in known if dims] or [(len(value),) for value in values if isinstance(value, list)]
    return min((dims[:batch_dims] for dims in known), key=len, default=())


def _is_kept(value: Any) -> bool:
    """Whether TensorDict takes a value for what it is; others it must be told to keep (3 would become a tensor)."""
    if isinstance(value, dict):
        return any(map(_is_kept, value.values()))
    return isinstance(value, torch.Tensor | TensorDictBase) or is_tensorclass(value)


def _non_tensor(value: Any, batch: tuple[int, ...]) -> Any:
    """A value that is no tensor as TensorDict keeps it: a list as long as the batch is one value per row."""
    if batch and isinstance(value, list) and len(value) == batch[0] > 0:  # tensordict 0.8 has no stack of nothing
        return NonTensorStack(*(_non_tensor(row, batch[1:]) for row in value))
    return NonTensorData(value, batch_size=batch)


def _held(value: Any, batch: tuple[int, ...]) -> Any:
    """A value as TensorDict keeps it: a dict with tensors becomes one too, and its other values stay what they are."""
    if isinstance(value, dict) and _is_kept(value):
        return TensorDict({str(key): _held(held, batch) for key, held in value.items()}, batch_size=batch)
    return value if _is_kept(value) else _non_tensor(value, batch)


def make_tensordict(keys: Sequence[Any], values: Sequence[Any], batch_dims: int) -> TensorDict:
    """A TensorDict whose batch_size is the first ``batch_dims`` dims of its tensors; a list is per-row data."""
    batch = _batch_size(values, batch_dims)
    source = {str(key): _held(value, batch) for key, value in zip(keys, values, strict=True)}
    return TensorDict(source, batch_size=batch)


def _make_dataclass(cls: type, keys: Sequence[str], values: Sequence[Any]) -> Any:
    # as copy and pickle do: the values are an instance's final ones, __init__ and __post_init__ have run already
    made: Any = object.__new__(cls)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(made, key, value)
    return made


def _make_tensorclass(cls: Any, keys: Sequence[str], values: Sequence[Any], batch_dims: int) -> Any:
    td = make_tensordict(keys, values, batch_dims)
    present = dict.fromkeys(record_names(cls)) | {
        key: td.get(key) for key, value in zip(keys, values, strict=True) if value is not None
    }
    return cls(**present, batch_size=td.batch_size)


def _restored(node: Node, types: Mapping[str, type]) -> type | None:
    """The user's class for a record, if one of that name was given; its fields must be the ones stored."""
    cls = types.get(node.name)
    if cls is None or record_names(cls) == node.keys:
        return cls
    # tensordict writes no field that is None, and the others in any order
    if node.kind != "tensorclass" or not set(node.keys) <= set(record_names(cls)):
        raise SchemaError(
            f"found a {node.kind} {node.name} with the fields {node.keys}, but the class given in types= has "
            f"{record_names(cls)}; pass the class the store was made with"
        )
    return cls


def _template(node: Node, types: Mapping[str, type], batched: bool, numbers: Iterator[int]) -> Any:
    """The structure as a tree whose leaves are the numbers of the fields."""
    if node.kind == "leaf":
        return next(numbers)
    if node.kind == "none":
        return None
    if node.kind == "shared":
        return _Maker(lambda _: NonTensorData(node.value), ())
    children = [_template(child, types, batched, numbers) for child in node.children]
    if node.kind == "list" or (node.kind == "tuple" and batched):
        return children
    if node.kind == "tuple":
        return tuple(children)
    keys, cls = node.keys, _restored(node, types)
    dims = node.batch_dims + batched
    if node.kind == "namedtuple":
        return (cls or generated_namedtuple(node.name, keys))(*children)
    if node.kind == "dataclass" and cls:
        return _Maker(functools.partial(_make_dataclass, cls, keys), children)  # type: ignore[arg-type]
    if node.kind == "tensorclass" and cls:
        return _Maker(lambda values: _make_tensorclass(cls, keys, values, dims), children)  # type: ignore[arg-type]
    if node.kind in ("tensordict", "tensorclass"):
        return _Maker(lambda values: make_tensordict(keys, values, dims), children)
    return dict(zip(keys, children, strict=True))


def assembler(structure: Node, types: Iterable[type] = (), *, batched: bool) -> Callable[[Sequence[Any]], Any]:
    """Plan once: a function that puts leaves (in the order of the fields) together as a sample or as a batch."""
    if structure.kind == "leaf":
        return lambda leaves: leaves[0]
    if structure.kind in ("tuple", "list") and all(child.kind == "leaf" for child in structure.children):
        return list if structure.kind == "list" or batched else tuple  # the common case, at no cost
    template = _template(structure, {cls.__name__: cls for cls in types}, batched, itertools.count())
    order, spec = optree.tree_flatten(template, namespace=NAMESPACE)
    if order == sorted(order):
        return spec.unflatten
    return lambda leaves: spec.unflatten([leaves[number] for number in order])  # optree sorts dict keys


def types_of(samples: Iterable[Any]) -> tuple[type, ...]:
    """The namedtuple, dataclass and tensorclass classes in some samples: what ``types=`` would have to name."""
    found: dict[str, type] = {}

    def look(value: Any) -> None:
        opened = open_container(value)
        if opened is not None:
            if opened[0].name:
                found[opened[0].name] = type(value)
            for held in opened[1]:
                look(held)

    for sample in samples:
        look(sample)
    return tuple(found.values())
