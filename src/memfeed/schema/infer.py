"""Real samples -> a schema: what is structure, what is a column, which dims vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
import torch
from tensordict import is_tensorclass

from memfeed.errors import FieldError, SchemaError
from memfeed.schema import codec
from memfeed.schema.codec import Leaf
from memfeed.schema.fields import DEEPEST, Field, Kind, Node, Path, Schema, Stems, display, dtype_name
from memfeed.schema.tree import open_container, record_names

LONGEST_STRUCTURE = 16  # a longer list of numbers is data, even if every sample probed has the same length

_LEAF = Node(kind="leaf")
_COLLECTIONS = ("tensordict", "tensorclass")
_NONE = Node(kind="none")


class _Found(msgspec.Struct):
    """A leaf as the samples show it: one description per sample, None where the sample has None."""

    path: Path
    leaves: list[Leaf | None]


class _Inference:
    def __init__(self, kinds: Mapping[Path, Kind], indices: Sequence[int]) -> None:
        self.kinds, self.indices = kinds, indices
        self.found: list[_Found] = []

    def fail(self, path: Path, which: int, text: str) -> SchemaError:
        return SchemaError(f"sample {self.indices[which]}, field {display(path)}: {text}")

    def leaf(self, path: Path, leaves: list[Leaf | None]) -> Node:
        self.found.append(_Found(path, leaves))
        return _LEAF

    def node(self, path: Path, values: list[Any], inside: str = "") -> Node:
        """The structure at ``path``, given what each sample has there; ``inside`` is the kind of container it is in."""
        if len(path) > DEEPEST:
            raise SchemaError(
                f"found containers nested more than {DEEPEST} deep at {display(path[:4])}...; flatten them"
            )
        if all(value is None for value in values):
            return _NONE
        forced = self.kinds.get(path)
        # a TensorDict holds lists and dicts as values of their own, not as structure
        opaque = inside in _COLLECTIONS and any(isinstance(value, list | tuple | dict) for value in values)
        if forced == "json" or opaque:
            return self.leaf(path, [self.json(path, i, value) for i, value in enumerate(values)])
        described = [self.describe(path, i, value) for i, value in enumerate(values)]
        if all(leaf is not None or value is None for leaf, value in zip(described, values, strict=True)):
            return self.leaf(path, self.agree(path, described))
        lists = [None if value is None else codec.describe_list(value) for value in values]
        if all(leaf is not None or value is None for leaf, value in zip(lists, values, strict=True)):
            node = self.numbers(path, values, [leaf for leaf in lists if leaf], lists, forced)
            if node is not None:
                return node
        if all(value is None or _is_numbers(value) for value in values) and not _agree_by_place(values):
            return self.leaf(path, [self.json(path, i, value) for i, value in enumerate(values)])
        return self.container(path, values)

    def describe(self, path: Path, which: int, value: Any) -> Leaf | None:
        try:
            return None if value is None else codec.describe(value)
        except SchemaError as error:
            raise self.fail(path, which, str(error)) from None
        except (ValueError, TypeError, RuntimeError) as error:
            raise self.fail(path, which, f"found a {type(value).__name__} that cannot be read ({error})") from error

    def agree(self, path: Path, leaves: list[Leaf | None]) -> list[Leaf | None]:
        """Checks that all samples have one kind, dtype and number of dims here."""
        first_at = next(i for i, leaf in enumerate(leaves) if leaf is not None)
        first = leaves[first_at]
        assert first is not None
        for i, leaf in enumerate(leaves):
            if leaf is None:
                continue
            if (leaf.kind, leaf.dtype, len(leaf.shape), leaf.form) != (
                first.kind,
                first.dtype,
                len(first.shape),
                first.form,
            ):
                raise self.fail(
                    path,
                    i,
                    f"found {_spell(leaf)}; expected {_spell(first)}, as in sample {self.indices[first_at]}: "
                    "return one type, dtype and number of dims in every sample",
                )
        return leaves

    def numbers(
        self, path: Path, values: list[Any], real: list[Leaf], lists: list[Leaf | None], forced: Kind | None
    ) -> Node | None:
        """Lists of Python numbers: structure while short and of one length, else a ragged column."""
        lengths = {leaf.shape for leaf in real}
        if len(lengths) == 1 and real[0].shape[0] <= LONGEST_STRUCTURE and len(real) == len(values) and forced is None:
            return None
        dtypes = {leaf.dtype for leaf in real if leaf.dtype}
        if len(dtypes) > 1:
            return None
        dtype = dtypes.pop() if dtypes else "int64"
        return self.leaf(path, [leaf._replace(dtype=dtype) if leaf else None for leaf in lists])

    def container(self, path: Path, values: list[Any]) -> Node:
        opened = []
        for i, value in enumerate(values):
            try:
                content = open_container(value)
            except SchemaError as error:
                raise self.fail(path, i, str(error)) from None
            if content is None and value is not None and not isinstance(value, str | bytes | bool | int | float):
                raise self.fail(
                    path,
                    i,
                    f"found an object of {type(value).__module__}.{type(value).__qualname__}, which no column holds; "
                    "expected tensors, arrays, numbers, PIL images, str, bytes, JSON values, or containers of them: "
                    "convert it in the dataset",
                )
            opened.append(content)
        first = opened[0]
        same = first is not None and all(
            content is not None and _shape_of(content[0]) == _shape_of(first[0]) and len(content[1]) == len(first[1])
            for content in opened
        )
        if same:
            assert first is not None
            node = first[0]
            columns = [self._child(content, i, node) for i, content in enumerate(opened)]
            keys = node.keys or range(len(first[1]))
            children = tuple(
                self.node((*path, key), [column[position] for column in columns], node.kind)
                for position, key in enumerate(keys)
            )
            return msgspec.structs.replace(node, children=children)
        try:
            return self.leaf(path, [self.json(path, i, value) for i, value in enumerate(values)])
        except SchemaError as error:
            kinds = sorted({type(value).__name__ for value in values})
            raise SchemaError(
                f"field {display(path)}: found a structure that varies between samples ({', '.join(kinds)}) "
                f"and holds more than JSON values ({error}); expected one structure in every sample"
            ) from None

    def _child(self, content: tuple[Node, Sequence[Any]] | None, which: int, node: Node) -> Sequence[Any]:
        assert content is not None
        if content[0].keys == node.keys:
            return content[1]
        held = dict(zip(content[0].keys, content[1], strict=True))
        return [held[key] for key in node.keys]

    def json(self, path: Path, which: int, value: Any) -> Leaf | None:
        if value is None:
            return None
        try:
            codec.encode_json(value)
        except SchemaError as error:
            raise self.fail(path, which, str(error)) from None
        return Leaf("json")


def _is_numbers(value: Any) -> bool:
    return type(value) is list and all(type(item) in (bool, int, float) for item in value)


def _agree_by_place(values: list[Any]) -> bool:
    """Whether lists of numbers of mixed types are short, and alike enough to be structure: ``[id, score]``."""
    if any(value is None or len(value) > LONGEST_STRUCTURE for value in values):
        return False
    return len({tuple(map(type, value)) for value in values}) == 1


def _spell(leaf: Leaf) -> str:
    form = {"scalar": "a Python number as ", "list": "a list of numbers as "}.get(leaf.form, "")
    return f"{form}{leaf}"


def _shape_of(node: Node) -> tuple[Any, ...]:
    """What must agree for two containers to be the same structure: a dict's keys in any order."""
    keys = frozenset(node.keys) if node.kind == "dict" else node.keys
    return node.kind, node.name, keys, node.batch_dims


def _column(
    found: _Found, forced: Kind | None, dtype: str | None
) -> tuple[Kind, str, tuple[int | None, ...], Leaf, bool]:
    real = [leaf for leaf in found.leaves if leaf is not None]
    first, optional = real[0], len(real) < len(found.leaves)
    if first.kind != "array":
        if forced not in (None, first.kind):
            raise SchemaError(f"field {display(found.path)}: found {first.kind}; it cannot be kept as {forced}")
        kind: Kind = first.kind  # type: ignore[assignment]
        return kind, "uint8", (), first, optional
    dims = tuple(
        next(iter(sizes)) if len(sizes) == 1 else None
        for sizes in (set(column) for column in zip(*(leaf.shape for leaf in real), strict=True))
    )
    if first.form == "list":
        dims = (None,)
    if forced in ("jagged", "list"):
        if not dims:
            raise SchemaError(f"field {display(found.path)}: found a number without dims; it cannot be {forced}")
        dims = (None, *dims[1:]) if forced == "jagged" else (None,) * len(dims)
    varying = [i for i, dim in enumerate(dims) if dim is None]
    if optional:
        kind = "list"
        dims = (None,) * len(dims)
    elif not varying:
        kind = "fixed"
    else:
        kind = "jagged" if varying == [0] and forced != "list" else "list"
        dims = dims if kind == "jagged" else (None,) * len(dims)
    if forced is not None and forced != kind:
        shapes = sorted({leaf.shape for leaf in real})[:3]
        raise SchemaError(
            f"field {display(found.path)}: found {'values and None' if optional else f'shapes {shapes}'}, "
            f"which is {kind}; expected {forced}, as fields= says: make the samples so, or drop that entry"
        )
    return kind, dtype or first.dtype, dims, first, optional


def _keyed(wanted: Mapping[Any, Any] | None, found: list[_Found], names: Sequence[str], what: str) -> dict[Path, Any]:
    """The entries of fields= or dtypes= by path; FieldError for one that stands for no leaf."""
    by_path: dict[Path, Any] = {}
    for key, value in (wanted or {}).items():
        path = tuple(key) if isinstance(key, tuple | list) else (key,)
        matches = [
            f.path for f, name in zip(found, names, strict=True) if path == f.path or key in (name, display(f.path))
        ]
        if len(matches) != 1:
            raise FieldError(f"{what}= names {key!r}, but the samples have: {', '.join(names)}")
        by_path[matches[0]] = value
    return by_path


class Inferred(NamedTuple):
    """What some samples show.

    ``structure`` is that of the samples; the schema's differs where a record class takes the place of the outermost
    container. ``casts`` are the numbers of the fields that dtypes= casts, ``held`` those that fields= fixes.
    """

    schema: Schema
    structure: Node
    casts: frozenset[int]
    held: frozenset[int]


def infer(
    samples: Sequence[Any],
    *,
    indices: Sequence[int] | None = None,
    fields: Sequence[str] | Mapping[Any, Kind] | None = None,
    dtypes: Mapping[Any, torch.dtype] | None = None,
    record: type | None = None,
) -> Inferred:
    """The schema of a dataset whose samples look like these; ``record`` is a tensorclass, dataclass or namedtuple.

    ``indices`` are the sample numbers for messages. Raises SchemaError or FieldError.
    """
    kinds = fields if isinstance(fields, Mapping) else {}
    for key, kind in kinds.items():
        if kind not in get_args(Kind):
            raise SchemaError(f"fields= wants {key!r} to be {kind!r}; expected one of {', '.join(get_args(Kind))}")
    # json must be known before looking, the other kinds only decide how a leaf is kept
    early = {_as_path(key): kind for key, kind in kinds.items()}
    inference = _Inference(early, indices or range(len(samples)))
    structure = inference.node((), list(samples))
    if not inference.found:
        raise SchemaError("found samples without any value; expected at least one tensor, number, str or the like")
    outer = _as_record(structure, record) if record is not None else structure
    names = [display(path) for path in outer.leaves()]
    aliases: Sequence[str | None] = [None] * len(names)
    if fields is not None and not isinstance(fields, Mapping):
        names = _checked_names(fields, [display(found.path) for found in inference.found])
        aliases = names
    forced = _keyed(kinds, inference.found, names, "fields")
    casts = {path: dtype_name(dtype) for path, dtype in _keyed(dtypes, inference.found, names, "dtypes").items()}
    # a tensorclass made of a tuple holds its numbers as tensors
    as_tensors = outer.kind == "tensorclass" != structure.kind
    stems, columns = Stems(), []
    for found, path, name, alias in zip(inference.found, outer.leaves(), names, aliases, strict=True):
        kind, dtype, dims, first, optional = _column(found, forced.get(found.path), casts.get(found.path))
        if found.path in casts and first.kind != "array":
            raise SchemaError(f"dtypes= names {name}, which is {first.kind}; expected a field of numbers")
        columns.append(
            Field(
                path=path,
                name=name,
                stem=stems.stem(path, alias),
                kind=kind,
                dtype=dtype,
                shape=dims,
                form="tensor" if as_tensors and first.form == "scalar" else first.form,
                optional=optional,
            )
        )
    paths = [found.path for found in inference.found]
    return Inferred(
        Schema(fields=tuple(columns), structure=outer),
        structure,
        frozenset(paths.index(path) for path in casts),
        frozenset(paths.index(path) for path in forced),
    )


def _checked_names(given: Sequence[str], leaves: Sequence[str]) -> list[str]:
    """The names that fields= gives; raises FieldError unless there is one for each leaf."""
    if isinstance(given, str) or not all(isinstance(name, str) and name for name in given):
        raise FieldError(f"fields= gives {given!r}; expected a name (a str) for each leaf, in order")
    if len(given) != len(leaves) or len(set(given)) != len(given):
        raise FieldError(
            f"fields= gives {len(given)} names ({', '.join(given)}), but a sample has {len(leaves)} "
            f"leaves ({', '.join(leaves)}); expected one name each, in that order"
        )
    return list(given)


def _as_path(key: Any) -> Path:
    if isinstance(key, tuple | list):
        return tuple(key)
    return tuple(key.split(".")) if isinstance(key, str) and "." in key else (key,)


def _as_record(structure: Node, record: type) -> Node:
    """The outermost container of a sample replaced by a record class with as many fields."""
    keys = record_names(record)
    if not keys:
        raise SchemaError(f"type= is {record.__name__}; expected a tensorclass, dataclass or namedtuple class")
    children: tuple[Node, ...] = structure.children
    by_key = dict(structure.items())
    if structure.kind not in ("tuple", "list") and set(by_key) == set(keys):
        children = tuple(by_key[key] for key in keys)
        if structure.keys != keys:
            raise SchemaError(
                f"type={record.__name__} has the fields {keys}; a sample has them as {structure.keys}: "
                "return them in the class's order"
            )
    elif structure.kind not in ("tuple", "list") or len(children) != len(keys):
        raise SchemaError(
            f"type={record.__name__} has the fields {', '.join(keys)}, but a sample is a {structure.kind} of "
            f"{len(children)} ({', '.join(map(str, by_key)) or 'no parts'}); expected one part per field"
        )
    if is_tensorclass(record):
        return Node(kind="tensorclass", name=record.__name__, keys=keys, children=children)
    kind = "namedtuple" if issubclass(record, tuple) else "dataclass"
    return Node(kind=kind, name=record.__name__, keys=keys, children=children)  # type: ignore[arg-type]


def promote(field: Field, shapes: Sequence[tuple[int, ...]]) -> Field:
    """The field once rows of these shapes (of its rank) are in it too: fixed -> jagged -> list."""
    dims = tuple(
        None if dim is None or any(shape[i] != dim for shape in shapes) else dim for i, dim in enumerate(field.shape)
    )
    if all(dim is not None for dim in dims[1:]):
        return msgspec.structs.replace(field, kind="jagged", shape=dims)
    return msgspec.structs.replace(field, kind="list", shape=(None,) * len(dims))
