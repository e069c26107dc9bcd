"""Sample <-> ordered leaves.

Samples are taken apart by the structure that was inferred. A structure becomes two optree specs for putting together:
one gives samples as the dataset returned them, one gives batches, where `torch.utils.data.default_collate`'s rule
holds that a tuple becomes a list.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensorclass
from torch.nn.utils.rnn import PackedSequence

from memfeed.errors import SchemaError
from memfeed.schema.fields import Node, Path, display

NAMESPACE = "memfeed"  # optree keeps registrations apart by it, so nothing of the user's own is touched
_registered: set[type] = set()


def record_names(cls: type) -> tuple[str, ...]:
    """The field names of a namedtuple, dataclass or tensorclass."""
    if dataclasses.is_dataclass(cls):  # a tensorclass is one too
        return tuple(field.name for field in dataclasses.fields(cls))
    return tuple(getattr(cls, "_fields", ()))


def open_container(value: Any) -> tuple[Node, Sequence[Any]] | None:
    """What kind of container ``value`` is (a Node without children) and what it holds; None for a leaf."""
    cls = type(value)
    if isinstance(value, torch.Tensor | str | bytes):
        return None
    if isinstance(value, tuple):
        if hasattr(cls, "_fields"):
            return Node(kind="namedtuple", name=cls.__name__, keys=tuple(cls._fields)), value
        return Node(kind="tuple"), value
    if isinstance(value, list):
        return Node(kind="list"), value
    if isinstance(value, TensorDictBase):
        keys = tuple(value.keys())
        return Node(kind="tensordict", keys=keys, batch_dims=value.batch_dims), [value[key] for key in keys]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise SchemaError(f"found the dict key {key!r} of type {type(key).__name__}; expected str or int keys")
        return Node(kind="dict", keys=tuple(value)), list(value.values())
    if dataclasses.is_dataclass(cls):
        names = record_names(cls)
        unset = [name for name in names if not hasattr(value, name)]
        if unset:
            raise SchemaError(f"found a {cls.__name__} whose field {unset[0]} was never set; expected a value in each")
        held = [getattr(value, name) for name in names]
        if is_tensorclass(cls):
            return Node(kind="tensorclass", name=cls.__name__, keys=names, batch_dims=value.batch_dims), held
        return Node(kind="dataclass", name=cls.__name__, keys=names), held
    return None


class Flattener:
    """Takes samples of one structure apart into their leaves, in the order of the schema's fields.

    A leaf may stand where a sample has a whole container (a json value, a list of numbers of any length): that is why
    the walk follows the structure and not, as optree would, the sample.
    """

    def __init__(self, structure: Node) -> None:
        self.structure = structure

    def __call__(self, sample: Any) -> list[Any]:
        """The leaves of ``sample``; raises SchemaError where its structure differs."""
        leaves: list[Any] = []
        self._walk(self.structure, sample, (), leaves)
        return leaves

    def _walk(self, node: Node, value: Any, at: Path, leaves: list[Any]) -> None:
        if node.kind == "leaf":
            leaves.append(value)
            return
        if node.kind == "none":
            if value is not None:
                raise self._other(at, f"{type(value).__name__}", "None")
            return
        opened = open_container(value)
        if opened is None or opened[0].kind != node.kind:
            raise self._other(at, type(value).__name__, f"a {node.kind}")
        found, held = opened
        if node.kind in ("tuple", "list"):
            if len(held) != len(node.children):
                error = self._other(at, f"a {node.kind} of {len(held)}", f"one of {len(node.children)}")
                if node.kind == "list" and at:
                    hint = f"if its length may vary, pass fields={{{display(at)!r}: 'jagged'}} and overwrite=True"
                    error.args = (f"{error.args[0]}; {hint}",)
                raise error
        elif found.keys != node.keys:
            by_key = dict(zip(found.keys, held, strict=True))
            if set(by_key) != set(node.keys):
                raise self._other(at, f"the keys {list(by_key)}", f"{list(node.keys)}")
            held = [by_key[key] for key in node.keys]
        for (key, child), part in zip(node.items(), held, strict=True):
            if child.kind == "leaf":
                leaves.append(part)
            else:
                self._walk(child, part, (*at, key), leaves)

    def _other(self, at: Path, found: str, expected: str) -> SchemaError:
        where = f" at {display(at)}" if at else ""
        return SchemaError(f"found {found}{where}; expected {expected}, as in the samples probed")


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
    except (ValueError, SyntaxError) as error:  # two names may be one to Python: it normalises them
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
            known.append((len(value),) if any(map(_is_tensors, value)) else ())
        elif _is_tensors(value):
            known.append(
                (value.shape[0],) if isinstance(value, torch.Tensor) and value.is_nested else tuple(value.shape)
            )
    known = [dims for dims in known if dims] or [(len(value),) for value in values if isinstance(value, list)]
    return min((dims[:batch_dims] for dims in known), key=len, default=())


def _is_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor | TensorDictBase) or is_tensorclass(value)


def _non_tensor(value: Any, batch: tuple[int, ...]) -> Any:
    """A value that is no tensor as TensorDict keeps it: a list as long as the batch is one value per row."""
    if batch and isinstance(value, list) and len(value) == batch[0] > 0:  # tensordict 0.8 has no stack of nothing
        return NonTensorStack(*(_non_tensor(row, batch[1:]) for row in value))
    return NonTensorData(value, batch_size=batch)


def make_tensordict(keys: Sequence[Any], values: Sequence[Any], batch_dims: int) -> TensorDict:
    """A TensorDict whose batch_size is the first ``batch_dims`` dims of its tensors; a list is per-row data."""
    batch = _batch_size(values, batch_dims)
    # told to keep a number, it does; left alone, TensorDict would make a tensor of it
    held = (value if _is_tensors(value) else _non_tensor(value, batch) for value in values)
    return TensorDict(dict(zip(map(str, keys), held, strict=True)), batch_size=batch)


_PLAIN = {torch.Tensor}


def _tensordicts(keys: Sequence[Any], batch_dims: int) -> Callable[[Sequence[Any]], TensorDict]:
    """``make_tensordict`` for these keys; batches of plain tensors, the common case, in a fifth of the time."""
    names = list(map(str, keys))
    # what tensordict itself makes the results of indexing with; it checks nothing
    unchecked: Callable[..., TensorDict] = getattr(TensorDict, "_new_unsafe", TensorDict)

    def make(values: Sequence[Any]) -> TensorDict:
        if batch_dims == 1 and {*map(type, values)} == _PLAIN:
            return unchecked(dict(zip(names, values, strict=True)), batch_size=values[0].shape[:1])
        return make_tensordict(names, values, batch_dims)

    return make


def _make_dataclass(cls: type, keys: Sequence[str], values: Sequence[Any]) -> Any:
    # as copy and pickle do: the values are an instance's final ones, __init__ and __post_init__ have run already
    made: Any = object.__new__(cls)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(made, key, value)
    return made


def _register_dataclass(cls: type) -> None:
    names = record_names(cls)

    def flatten(made: Any) -> Any:
        return [getattr(made, name) for name in names], None, names

    if cls not in _registered:
        _registered.add(cls)
        optree.register_pytree_node(
            cls, flatten, lambda _, values: _make_dataclass(cls, names, tuple(values)), namespace=NAMESPACE
        )


def _make_tensorclass(cls: Any, keys: Sequence[str], values: Sequence[Any], batch_dims: int) -> Any:
    td = make_tensordict(keys, values, batch_dims)
    for key, value in zip(keys, values, strict=True):
        if value is None:
            del td[key]
    # a rebuild, as tensordict's own indexing is: whether __post_init__ runs again is for the class to say
    return cls._from_tensordict(td, dict.fromkeys(set(record_names(cls)) - set(td.keys())))


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
        make = functools.partial(_make_dataclass, cls, record_names(cls))
        _register_dataclass(cls)  # transforms look into batches with optree
        return _Maker(make, children)
    if node.kind == "tensorclass" and cls:
        return _Maker(lambda values: _make_tensorclass(cls, keys, values, dims), children)  # type: ignore[arg-type]
    if node.kind in ("tensordict", "tensorclass"):
        return _Maker(_tensordicts(keys, dims), children)
    return dict(zip(keys, children, strict=True))


def assembler(structure: Node, types: Iterable[type] = (), *, batched: bool) -> Callable[[Sequence[Any]], Any]:
    """Plan once: a function that puts leaves (in the order of the fields) together as a sample or as a batch."""
    if structure.kind == "leaf":
        return operator.itemgetter(0)
    if structure.kind in ("tuple", "list") and all(child.kind == "leaf" for child in structure.children):
        return list if structure.kind == "list" or batched else tuple  # the common case, at no cost
    if structure.kind == "tensordict" and all(child.kind == "leaf" for child in structure.children):
        return _tensordicts(structure.keys, structure.batch_dims + batched)
    template = _template(structure, {cls.__name__: cls for cls in types}, batched, itertools.count())
    order, spec = optree.tree_flatten(template, namespace=NAMESPACE)
    if order == sorted(order):
        return spec.unflatten
    return lambda leaves: spec.unflatten([leaves[number] for number in order])  # optree sorts dict keys


def types_of(samples: Iterable[Any]) -> tuple[type, ...]:
    """The namedtuple, dataclass and tensorclass classes in some samples: what ``types=`` would have to name.

    Raises SchemaError for two classes of one name, which a store could not tell apart.
    """
    found: dict[str, type] = {}

    def look(value: Any) -> None:
        opened = open_container(value)
        if opened is not None:
            name, cls = opened[0].name, type(value)
            if name and found.setdefault(name, cls) is not cls:
                other = found[name]
                raise SchemaError(
                    f"found two classes named {name} ({other.__module__}.{other.__qualname__} and "
                    f"{cls.__module__}.{cls.__qualname__}); expected one, because a store tells them apart by name: "
                    "rename one"
                )
            for held in opened[1]:
                look(held)

    for sample in samples:
        look(sample)
    return tuple(found.values())


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not is_tensorclass(type(value))


def _is_whole(value: Any) -> bool:
    """What is moved in one piece, or by its own fields."""
    cls = type(value)
    return isinstance(value, TensorDictBase | PackedSequence) or is_tensorclass(cls) or _is_record(value)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with ``function`` of every leaf; a TensorDict or tensorclass is one leaf."""

    def walk(value: Any) -> Any:
        if not _is_record(value):
            return function(value)
        made = object.__new__(type(value))
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, map_leaves(function, getattr(value, field.name)))
        return made

    return optree.tree_map(walk, tree, is_leaf=_is_whole, none_is_leaf=True)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors of a nesting, those in TensorDicts and lists of theirs too."""
    for leaf in optree.tree_leaves(tree, is_leaf=_is_whole, namespace=NAMESPACE):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, NonTensorStack):
            yield from tensors_in(leaf.tolist())
        elif isinstance(leaf, NonTensorData):
            yield from tensors_in(leaf.data)
        elif isinstance(leaf, TensorDictBase) or is_tensorclass(type(leaf)):
            for value in leaf.values():
                yield from tensors_in(value)
        elif _is_record(leaf):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))
