"""Infer a schema from real samples: which columns there are, and which of their dims vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
import torch

from memfeed.errors import FieldError, SchemaError, brief, listed
from memfeed.schema.fields import NO_VALUE, Field, Kind, Node, Path, Schema, display, dtype_name
from memfeed.schema.kept_tensors import SIZED_KEYS
from memfeed.schema.names import StemAssigner, find_field
from memfeed.schema.structure import Inference, LeafSpecs
from memfeed.schema.tensordicts import is_tensorclass
from memfeed.schema.tree import record_names


class Inferred(NamedTuple):
    """The schema that some samples have.

    ``structure`` is that of the samples; the schema's differs if a record class replaces the outermost container.
    ``casts`` are the indices of the fields that forms= casts, ``chosen_kinds`` of those whose kind fields= chooses.
    """

    schema: Schema
    structure: Node
    casts: frozenset[int]
    chosen_kinds: frozenset[int]

    def structure_like(self, stored: Schema) -> Node:
        """Return the structure to take samples apart with: a few samples may be simpler than all that were stored."""
        return stored.structure if self.structure == self.schema.structure else self.structure


def infer(
    samples: Sequence[Any],
    *,
    indices: Sequence[int] | None = None,
    fields: Sequence[str] | Mapping[Any, Kind] | None = None,
    kinds: Mapping[Path, Kind] | None = None,
    dtypes: Mapping[Any, torch.dtype] | None = None,
    types: Sequence[type] = (),
) -> Inferred:
    """Return the schema of a dataset whose samples look like these.

    Args:
        samples: one or more.
        indices: the sample indices for messages.
        fields: names for the leaves, in order, or kinds by path or name.
        kinds: kinds that the dataset itself knows, by path.
        dtypes: dtypes to cast to, by path or name.
        types: tensorclass, dataclass or namedtuple classes; one that is none of the samples' own replaces their
            outermost container.

    Raises:
        SchemaError: the samples differ, or hold values that no column can hold.
        FieldError: ``fields`` or ``dtypes`` names a field that does not exist.
    """
    chosen = fields if isinstance(fields, Mapping) else {}
    for key, kind in chosen.items():
        if kind not in get_args(Kind):
            raise FieldError(
                f"found kind {brief(kind)} for {brief(key)} in fields=; expected one of {', '.join(get_args(Kind))}"
            )
    inference = Inference({**(kinds or {}), **chosen}, indices or range(len(samples)))
    structure, leaves = inference.infer_node((), list(samples)), inference.leaves
    if not leaves:
        raise SchemaError("found samples without any value; expected at least one tensor, number, str or other value")
    outer = _as_record(structure, types)
    names = [display(path) for path in outer.leaves()]
    aliases: Sequence[str | None] = [None] * len(names)
    if fields is not None and not isinstance(fields, Mapping):
        names = aliases = _names_of_leaves(fields, structure)
    chosen_kinds = _by_path(chosen, leaves, names, "fields")
    casts = {path: dtype_name(dtype) for path, dtype in _by_path(dtypes, leaves, names, "forms").items()}
    # a tensorclass that replaces a tuple holds tensors in place of numbers
    as_tensors = outer.kind == "tensorclass" != structure.kind
    stems, columns = StemAssigner(), []
    for leaf, path, name, alias in zip(leaves, outer.leaves(), names, aliases, strict=True):
        field = _infer_field(leaf, path, name, chosen_kinds.get(leaf.path), casts.get(leaf.path))
        form = "tensor" if as_tensors and field.form == "scalar" else field.form
        columns.append(msgspec.structs.replace(field, stem=stems.assign(path, alias), form=form))
    paths = [leaf.path for leaf in leaves]
    return Inferred(
        Schema(fields=tuple(columns), structure=outer),
        structure,
        frozenset(map(paths.index, casts)),
        frozenset(map(paths.index, chosen_kinds)),
    )


def _infer_field(leaf: LeafSpecs, path: Path, name: str, chosen: Kind | None, dtype: str | None) -> Field:
    """Return the field of a leaf, without its stem."""
    specs = [spec for spec in leaf.specs if spec is not None]
    first, optional = specs[0], len(specs) < len(leaf.specs)
    if first.kind == "array":
        kind, dims = _kind_and_dims(leaf, chosen)
    elif chosen not in (None, first.kind):
        raise SchemaError(
            f"field {display(leaf.path)}: found {first.kind}; expected {chosen}, as fields= says: drop that entry"
        )
    elif dtype is not None:
        raise SchemaError(f"found {name} in forms=, which is {first.kind}; expected a field of numbers")
    else:
        kind, dims = first.kind, ()  # type: ignore[assignment]
    dtype = dtype or first.dtype
    return Field(path=path, name=name, stem="", kind=kind, dtype=dtype, shape=dims, form=first.form, optional=optional)


def _kind_and_dims(leaf: LeafSpecs, chosen: Kind | None) -> tuple[Kind, tuple[int | None, ...]]:
    """Return how a column of arrays is stored, and the shape of a row, with None for each dim that varies."""
    specs = [spec for spec in leaf.specs if spec is not None]
    optional = len(specs) < len(leaf.specs)
    sizes_of_dims = [set(sizes) for sizes in zip(*(spec.shape for spec in specs), strict=True)]
    dims: tuple[int | None, ...] = tuple(sizes.pop() if len(sizes) == 1 else None for sizes in sizes_of_dims)
    if chosen in ("jagged", "list"):
        if not dims:
            raise SchemaError(
                f"field {display(leaf.path)}: found a number without dims; expected {chosen}, as fields= says: drop "
                "that entry"
            )
        dims = dims if None in dims else (None, *dims[1:])
    kind: Kind
    if optional or chosen == "list" or dims.count(None) > 1:
        kind, dims = "list", (None,) * len(dims)
    else:
        kind = "jagged" if None in dims else "fixed"
    if chosen is not None and chosen != kind:
        shapes = sorted({spec.shape for spec in specs})[:3]
        raise SchemaError(
            f"field {display(leaf.path)}: found {'values and None' if optional else f'shapes {shapes}'}, "
            f"which is {kind}; expected {chosen}, as fields= says: change the samples, or drop that entry"
        )
    return kind, dims


def _by_path(
    options: Mapping[Any, Any] | None, leaves: list[LeafSpecs], names: Sequence[str], argument: str
) -> dict[Path, Any]:
    """Return the entries of fields= or forms= by path; raise FieldError for one that names no leaf."""
    paths = [leaf.path for leaf in leaves]
    try:
        return {paths[find_field(key, paths, names)]: value for key, value in (options or {}).items()}
    except FieldError as error:
        raise FieldError(f"{argument}=: {error}") from None


def _names_of_leaves(given: Sequence[str], structure: Node) -> list[str]:
    """Return the name of each leaf; raise FieldError unless fields= gives one for each.

    Boxes have one name: it is that of their numbers.
    """
    paths = list(structure.leaves())
    sizes = {(*path, SIZED_KEYS[1]) for path, _ in structure.of_kind("tv_tensor")}
    leaves = [display(path) for path in paths if path not in sizes]
    if len(given) != len(leaves) or len(set(given)) != len(given):
        raise FieldError(
            f"found {len(given)} names in fields= ({listed(given, 100)}); expected {len(leaves)} different ones, one "
            f"for each leaf of a sample, in this order: {listed(leaves)}"
        )
    names, found = iter(given), list[str]()
    for path in paths:
        found.append(f"{found[-1]}.{path[-1]}" if path in sizes else next(names))
    return found


def _record_names_in(structure: Node) -> set[str]:
    return {structure.name}.union(*map(_record_names_in, structure.children))


def _as_record(structure: Node, types: Sequence[type]) -> Node:
    """Return ``structure`` with its outermost container replaced by the class in ``types`` that no sample has."""
    found = _record_names_in(structure)
    others = [cls for cls in types if cls.__name__ not in found]
    if len(others) > 1:
        raise SchemaError(
            f"found types= with {listed([cls.__name__ for cls in others])}, which no sample holds; expected one such "
            "class at most: it replaces the outermost container of a sample"
        )
    if not others:
        return structure
    record = others[0]
    keys = record_names(record)
    children: tuple[Node, ...] = structure.children
    by_key = dict(structure.items())
    if structure.kind not in ("tuple", "list") and set(by_key) == set(keys):
        children = tuple(by_key[key] for key in keys)
        if structure.keys != keys:
            raise SchemaError(
                f"found the keys {brief(structure.keys, 100)} in a sample; expected {brief(keys, 100)}, the order of "
                "the fields of "
                f"types={record.__name__}: return them in that order"
            )
    elif structure.kind not in ("tuple", "list") or len(children) != len(keys):
        raise SchemaError(
            f"found a sample that is a {structure.kind} of {len(children)} "
            f"({listed(list(by_key), 100) or 'no parts'}); expected one part for each field of "
            f"types={record.__name__}: {listed(keys, 100)}"
        )
    if is_tensorclass(record):
        return Node(kind="tensorclass", name=record.__name__, keys=keys, children=children)
    kind = "namedtuple" if issubclass(record, tuple) else "dataclass"
    return Node(kind=kind, name=record.__name__, keys=keys, children=children)  # type: ignore[arg-type]


def promote(field: Field, shapes: Sequence[tuple[int, ...]]) -> Field:
    """Return the field that also admits rows of these shapes: jagged if one dim varies, list if several do.

    It has optional values if one of them is `NO_VALUE`.
    """
    if NO_VALUE in shapes and field.kind in ("str", "bytes", "list"):
        return msgspec.structs.replace(field, optional=True)
    dims = tuple(
        None if dim is None or any(shape[i] != dim for shape in shapes) else dim for i, dim in enumerate(field.shape)
    )
    if dims.count(None) == 1:
        return msgspec.structs.replace(field, kind="jagged", shape=dims)
    return msgspec.structs.replace(field, kind="list", shape=(None,) * len(dims))
