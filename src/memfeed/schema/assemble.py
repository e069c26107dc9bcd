"""Build samples and batches from their leaves: the inverse of `memfeed.schema.tree`.

A structure becomes two optree specs: one builds samples as the dataset returned them, one builds batches by the rule of
`torch.utils.data.default_collate`, where a tuple becomes a list.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch.utils.data import default_collate

from memfeed.errors import SchemaError, brief
from memfeed.schema import kept_tensors
from memfeed.schema.fields import Form, Node
from memfeed.schema.graphs import collate_graphs, graph_class, with_parts
from memfeed.schema.kept_tensors import make_kept
from memfeed.schema.tensordicts import is_tensor_collection
from memfeed.schema.tree import is_unbatched, record_names, typed_name

if TYPE_CHECKING:
    from tensordict import TensorDict

NAMESPACE = "memfeed"  # of optree's registrations, so that they do not change how a user's own calls of optree work


class _Constructed:
    """Stands in a template for a container that is built by calling ``construct(children)``."""

    def __init__(self, construct: Callable[[Sequence[Any]], Any], children: Sequence[Any]) -> None:
        self.construct, self.children = construct, children


def _open_constructed(node: Any) -> tuple[Sequence[Any], Any]:
    return node.children, node.construct


def _close_constructed(construct: Any, children: Iterable[Any]) -> Any:
    return construct(tuple(children))


optree.register_pytree_node(_Constructed, _open_constructed, _close_constructed, namespace=NAMESPACE)  # type: ignore[arg-type]


def _rebuild_namedtuple(name: str, keys: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return generated_namedtuple(name, keys)(*values)


@functools.lru_cache(maxsize=1024)
def generated_namedtuple(name: str, keys: tuple[str, ...]) -> type:
    """Return a picklable namedtuple class of this name and these fields; a store may not import the original class."""
    try:
        cls = collections.namedtuple(name, keys)  # type: ignore[misc]
    except (ValueError, SyntaxError) as error:  # Python normalises names, so two of them may become equal
        raise SchemaError(f"found a namedtuple {name!r} with fields {keys}; expected Python names: {error}") from None
    setattr(cls, "__reduce__", lambda self: (_rebuild_namedtuple, (name, keys, tuple(self))))  # noqa: B010
    return cls


def _batch_size(values: Sequence[Any], batch_dims: int) -> tuple[int, ...]:
    """Return the leading dims that the values share, at most ``batch_dims``; ragged leaves share only the first.

    Lists of other values fit any batch_size, so they count only if there is no tensor.
    """
    known: list[tuple[int, ...]] = []
    for value in values:
        if is_unbatched(value):
            continue
        if isinstance(value, list):
            known.append((len(value),) if any(map(_is_tensor, value)) else ())
        elif _is_tensor(value):
            known.append(
                (value.shape[0],) if isinstance(value, torch.Tensor) and value.is_nested else tuple(value.shape)
            )
    known = [dims for dims in known if dims] or [(len(value),) for value in values if isinstance(value, list)]
    return min((dims[:batch_dims] for dims in known), key=len, default=())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_tensor_collection(value)


def _non_tensor(value: Any, batch: tuple[int, ...]) -> Any:
    """Wrap a value that is no tensor for a TensorDict: a list as long as the batch holds one value per row."""
    from tensordict import NonTensorData, NonTensorStack

    if batch and isinstance(value, list) and len(value) == batch[0] > 0:  # tensordict 0.8 has no empty stack
        return NonTensorStack(*(_non_tensor(row, batch[1:]) for row in value))
    return NonTensorData(value, batch_size=batch)


def make_tensordict(keys: Sequence[Any], values: Sequence[Any], batch_dims: int) -> TensorDict:
    """Return a TensorDict whose batch_size is the first ``batch_dims`` dims of its tensors; a list is per-row data."""
    from tensordict import TensorDict

    batch = _batch_size(values, batch_dims)
    # TensorDict would convert a bare number to a tensor
    entries = (value if _is_tensor(value) else _non_tensor(value, batch) for value in values)
    return TensorDict(dict(zip(map(str, keys), entries, strict=True)), batch_size=batch)


_PLAIN = {torch.Tensor}


def _tensordict_constructor(keys: Sequence[Any], batch_dims: int) -> Callable[[Sequence[Any]], TensorDict]:
    """Return `make_tensordict` for these keys, five times as fast for batches of plain tensors, the common case."""
    from tensordict import TensorDict

    names = list(map(str, keys))
    # tensordict itself uses this for the results of indexing; it checks nothing
    unchecked: Callable[..., TensorDict] = getattr(TensorDict, "_new_unsafe", TensorDict)

    def construct(values: Sequence[Any]) -> TensorDict:
        if batch_dims == 1 and {*map(type, values)} == _PLAIN:
            return unchecked(dict(zip(names, values, strict=True)), batch_size=values[0].shape[:1])
        return make_tensordict(names, values, batch_dims)

    return construct


def _make_dataclass(cls: type, keys: Sequence[str], values: Sequence[Any]) -> Any:
    # as copy and pickle do: the values are final, __init__ and __post_init__ ran before they were stored
    record: Any = object.__new__(cls)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(record, key, value)
    return record


@functools.cache
def _register_dataclass(cls: type) -> None:
    names = record_names(cls)
    optree.register_pytree_node(
        cls,
        lambda record: ([getattr(record, name) for name in names], None, names),
        lambda _, values: _make_dataclass(cls, names, tuple(values)),
        namespace=NAMESPACE,
    )


def _make_tensorclass(cls: Any, keys: Sequence[str], values: Sequence[Any], batch_dims: int) -> Any:
    td = make_tensordict(keys, values, batch_dims)
    for key, value in zip(keys, values, strict=True):
        if value is None:
            del td[key]
    # as tensordict's own indexing does: the class decides if __post_init__ runs again
    return cls._from_tensordict(td, dict.fromkeys(set(record_names(cls)) - set(td.keys())))


def _record_class(node: Node, types: Mapping[str, type]) -> type | None:
    """Return the class of that name in ``types``, or None; raise SchemaError if its fields are not the stored ones."""
    cls = types.get(node.name)
    if cls is None or record_names(cls) == node.keys or (node.kind == "tensordict" and typed_name(cls)):
        return cls
    # tensordict does not write fields that are None, and writes the others in any order
    if node.kind != "tensorclass" or not set(node.keys) <= set(record_names(cls)):
        raise SchemaError(
            f"found a {node.kind} {node.name} with the fields {brief(node.keys, 120)}, but the class given in "
            f"types= has {brief(record_names(cls), 120)}; pass the class the store was made with"
        )
    return cls


def _collection(node: Node, cls: type | None, dims: int) -> Callable[[Sequence[Any]], Any]:
    """Return a function that builds a TensorDict or tensorclass of ``dims`` batch dims from its values."""
    if node.kind == "tensorclass" and cls:
        return lambda values: _make_tensorclass(cls, node.keys, values, dims)  # type: ignore[arg-type]
    return _tensordict_constructor(node.keys, dims)


def _finished(
    construct: Callable[[Sequence[Any]], Any], node: Node, cls: Any, batched: bool
) -> Callable[[Sequence[Any]], Any]:
    """Return ``construct`` with the class of a TypedTensorDict and the names of the dims added to what it builds."""
    names = node.dim_names if batched else node.dim_names[1:]
    typed = cls if node.kind == "tensordict" else None
    if not any(names) and typed is None:
        return construct

    def finished(values: Sequence[Any]) -> Any:
        built = construct(values)
        if any(names):
            built.names = list(names[: built.batch_dims])
        return built if typed is None else typed.from_tensordict(built)

    return finished


def _rows(leaf: Any, form: Form) -> list[Any]:
    """Return the leaf of a batch as one value for each row."""
    rows = leaf if isinstance(leaf, list) else list(leaf.unbind(0))
    return rows if form == "tensor" else [row.tolist() if isinstance(row, torch.Tensor) else row for row in rows]


def _collated(node: Node, types: Mapping[str, type], forms: Sequence[Form], indices: list[int]) -> _Constructed:
    """Return the function that collates graphs, or tensors of a class: only their own library knows how."""
    make = assembler(node, types.values(), forms=(), batched=False)
    collate = collate_graphs if node.kind == "graph" else default_collate  # the class decides

    def construct(leaves: Sequence[Any]) -> Any:
        rows = zip(*(_rows(leaf, forms[index]) for leaf, index in zip(leaves, indices, strict=True)), strict=True)
        return collate([make(list(row)) for row in rows])

    return _Constructed(construct, indices)


def _template(
    node: Node, types: Mapping[str, type], forms: Sequence[Form], batched: bool, field_indices: Iterator[int]
) -> Any:
    """Return the structure as a tree whose leaves are the field indices."""
    if node.kind == "leaf":
        leaf = next(field_indices)
        wrap = kept_tensors.name_wrapper(node.name) if node.name and not batched else None
        return leaf if wrap is None else _Constructed(lambda values: wrap(values[0]), [leaf])
    if node.kind == "none":
        return None
    if node.kind == "shared":
        return _Constructed(lambda _: node.value if is_unbatched(node.value) else _non_tensor(node.value, ()), ())
    if node.kind in ("graph", "tensor") and batched:
        return _collated(node, types, forms, list(itertools.islice(field_indices, len(list(node.leaves())))))
    children = [_template(child, types, forms, batched, field_indices) for child in node.children]
    if node.kind == "tv_tensor":  # default_collate makes plain tensors of them
        plain = operator.itemgetter(0)
        return _Constructed(plain if batched else kept_tensors.sized_wrapper(node.name, node.value), children)
    if node.kind == "list" or (node.kind == "tuple" and batched):
        return children
    if node.kind == "tuple":
        return tuple(children)
    if node.kind == "tensor":
        return _Constructed(lambda values: make_kept(node.name, values), children)
    if node.kind == "graph":
        graph = graph_class(node.name, types.get(node.name))
        names = [str(key) for key in node.keys]
        # as PyTorch Geometric makes those of its data sets
        return _Constructed(lambda values: with_parts(graph(), dict(zip(names, values, strict=True))), children)
    keys, cls = node.keys, _record_class(node, types)
    dims = node.batch_dims + batched
    if node.kind in ("tensordict", "tensorclass"):
        return _Constructed(_finished(_collection(node, cls, dims), node, cls, batched), children)
    if node.kind == "namedtuple":
        return (cls or generated_namedtuple(node.name, keys))(*children)
    if node.kind == "dataclass" and cls:
        _register_dataclass(cls)  # transforms open batches with optree
        return _make_dataclass(cls, record_names(cls), children)
    return dict(zip(keys, children, strict=True))


def assembler(
    structure: Node, types: Iterable[type] = (), *, batched: bool, forms: Sequence[Form] = ()
) -> Callable[[Sequence[Any]], Any]:
    """Return a function that builds a sample, or a batch, from the list of its leaves in the order of the fields.

    Everything that depends only on the structure is computed here, once. A batch of graphs needs the ``forms`` of the
    fields.

    Raises:
        SchemaError: a class in ``types`` has other fields than the stored record of its name.
    """
    plain = [child.kind == "leaf" and (batched or not child.name) for child in (structure, *structure.children)]
    if plain[0]:
        return operator.itemgetter(0)
    if structure.kind in ("tuple", "list") and all(plain[1:]):
        return list if structure.kind == "list" or batched else tuple  # the common case costs nothing
    by_name = {cls.__name__: cls for cls in types}
    if structure.kind == "tensordict" and all(plain[1:]):
        construct = _tensordict_constructor(structure.keys, structure.batch_dims + batched)
        return _finished(construct, structure, _record_class(structure, by_name), batched)
    template = _template(structure, by_name, forms, batched, itertools.count())
    order, spec = optree.tree_flatten(template, namespace=NAMESPACE)
    if order == sorted(order):
        return spec.unflatten
    return lambda leaves: spec.unflatten([leaves[field_index] for field_index in order])  # optree sorts dict keys
