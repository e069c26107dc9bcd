"""Infer the structure of samples: which containers they share, and the kind of each leaf in each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from memfeed.errors import SchemaError
from memfeed.schema import codec, values
from memfeed.schema.fields import DEEPEST, Kind, Node, Path, display
from memfeed.schema.kept_tensors import NAMED, SIZED, class_name, kept_name
from memfeed.schema.tree import open_container
from memfeed.schema.values import ValueSpec

LONGEST_STRUCTURE = 16  # a longer list is data, even if it is the whole sample, or its numbers are of mixed types

_LEAF, _NONE = Node(kind="leaf"), Node(kind="none")

Specs = list[ValueSpec | None]
"""One spec for each sample; None where the sample has None."""


class LeafSpecs(NamedTuple):
    """One leaf of the structure, and what each sample has there."""

    path: Path
    specs: Specs


class Inference:
    """Walks all samples at the same time and collects the leaves, in order.

    ``kinds`` are the kinds that the user chose by path or name, ``indices`` the sample indices for messages.
    """

    def __init__(self, kinds: Mapping[Any, Kind], indices: Sequence[int]) -> None:
        self.kinds, self.indices = kinds, indices
        self.leaves: list[LeafSpecs] = []

    def infer_node(self, path: Path, parts: list[Any], parent_kind: str = "") -> Node:
        """Return the structure at ``path``, where each sample has one of ``parts``. Raises SchemaError."""
        if len(path) > DEEPEST:
            raise SchemaError(
                f"found containers nested more than {DEEPEST} deep at {display(path[:4])}...; expected fewer: flatten "
                "them in the dataset"
            )
        if all(part is None for part in parts):
            return _NONE
        # containers too have kinds here ("json"), so `find_field`, which knows leaves only, comes later
        spelled = (path, *path[:1], display(path)) if len(path) == 1 else (path, display(path))
        kind = next((self.kinds[name] for name in spelled if name in self.kinds), None)
        # lists and dicts in a TensorDict are values, not structure
        in_tensordict = parent_kind in ("tensordict", "tensorclass")
        if kind == "json" or (in_tensordict and any(isinstance(part, list | tuple | dict) for part in parts)):
            return self._json_leaf(path, parts)
        tv_names = set() if in_tensordict else {class_name(part) for part in parts if part is not None}
        if tv_names & SIZED and len(tv_names) == 1 and all(part is not None for part in parts):
            return self._container(path, parts)
        if not in_tensordict and len(set(map(kept_name, parts))) == 1 and kept_name(parts[0]):
            return self._container(path, parts)
        specs = [self._describe(path, i, part) for i, part in enumerate(parts)]
        if _describes_all(specs, parts):
            self._check_agreement(path, specs)
            name = next(iter(tv_names)) if len(tv_names) == 1 and tv_names <= NAMED else ""
            return msgspec.structs.replace(self._leaf(path, specs), name=name)
        lists = [None if part is None else values.describe_list(part) for part in parts]
        if _describes_all(lists, parts) and (resolved := _list_specs(lists, path, kind)) is not None:
            return self._leaf(path, resolved)
        if all(part is None or _is_number_list(part) for part in parts) and not _is_record_like(parts):
            return self._json_leaf(path, parts)
        return self._container(path, parts)

    def _error(self, path: Path, sample: int, text: str) -> SchemaError:
        return SchemaError(f"sample {self.indices[sample]}, field {display(path)}: {text}")

    def _leaf(self, path: Path, specs: Specs) -> Node:
        self.leaves.append(LeafSpecs(path, specs))
        return _LEAF

    def _json_leaf(self, path: Path, parts: list[Any]) -> Node:
        for i, part in enumerate(parts):
            if part is not None:
                try:
                    codec.encode_json(part)
                except SchemaError as error:
                    raise self._error(path, i, str(error)) from None
        return self._leaf(path, [None if part is None else ValueSpec("json") for part in parts])

    def _describe(self, path: Path, sample: int, part: Any) -> ValueSpec | None:
        try:
            return None if part is None else values.describe(part)
        except SchemaError as error:
            raise self._error(path, sample, str(error)) from None
        except (ValueError, TypeError, RuntimeError) as error:
            text = f"found a {type(part).__name__} that cannot be read ({error})"
            raise self._error(path, sample, text) from error

    def _check_agreement(self, path: Path, specs: Specs) -> None:
        """Raise SchemaError unless all samples have one kind, dtype, number of dims and form here."""
        first_sample, first = next((i, spec) for i, spec in enumerate(specs) if spec is not None)
        for i, spec in enumerate(specs):
            if spec is not None and _comparable(spec) != _comparable(first):
                raise self._error(
                    path,
                    i,
                    f"found {_spell(spec)}; expected {_spell(first)}, as in sample {self.indices[first_sample]}: "
                    "return one type, dtype and number of dims in every sample",
                )

    def _container(self, path: Path, parts: list[Any]) -> Node:
        opened = [self._open(path, i, part, parts) for i, part in enumerate(parts)]
        first = opened[0]
        if first is not None and all(
            one is not None and _comparable_node(one[0]) == _comparable_node(first[0]) and len(one[1]) == len(first[1])
            for one in opened
        ):
            node = first[0]
            contents = [_ordered(one, node.keys) for one in opened if one is not None]
            children = tuple(
                self.infer_node((*path, key), list(children), node.kind)
                for key, children in zip(node.keys or range(len(first[1])), zip(*contents, strict=True), strict=True)
            )
            return msgspec.structs.replace(node, children=children)
        formats = {str(one[0].value) for one in opened if one is not None and one[0].kind == "tv_tensor"}
        if len(formats) > 1:
            raise SchemaError(
                f"field {display(path)}: found {type(parts[0]).__name__} of {' and of '.join(sorted(formats))}; "
                "expected one format in every sample: convert them in the dataset"
            )
        try:
            return self._json_leaf(path, parts)
        except SchemaError as error:
            self._check_attributes(path, opened)
            types = sorted({type(part).__name__ for part in parts})
            raise SchemaError(
                f"field {display(path)}: found a structure that varies between samples ({', '.join(types)}) "
                f"and holds more than JSON values ({error}); expected one structure in every sample"
            ) from None

    def _check_attributes(self, path: Path, opened: Sequence[tuple[Node, Sequence[Any]] | None]) -> None:
        """Raise SchemaError if an attribute is missing in some of the graphs."""
        graphs = [(i, set(one[0].keys)) for i, one in enumerate(opened) if one is not None and one[0].kind == "graph"]
        for i, keys in graphs[1:]:
            for key in sorted(keys ^ graphs[0][1]):
                without, having = (i, graphs[0][0]) if key not in keys else (graphs[0][0], i)
                raise self._error(
                    path,
                    without,
                    f"found a graph without the attribute {key!r}, which sample {self.indices[having]} has; expected "
                    f"the same attributes in every sample: data[{key!r}] = ...",
                )

    def _open(self, path: Path, sample: int, part: Any, parts: list[Any]) -> tuple[Node, Sequence[Any]] | None:
        try:
            opened = open_container(part)
        except SchemaError as error:
            raise self._error(path, sample, str(error)) from None
        if opened is None and part is not None and not isinstance(part, str | bytes | bool | int | float):
            spec = self._describe(path, sample, part)
            if spec is not None:
                other = next(
                    i for i, one in enumerate(parts) if one is not None and self._describe(path, i, one) is None
                )
                raise self._error(
                    path,
                    sample,
                    f"found {type(part).__name__} ({spec}); expected {type(parts[other]).__name__}, as in sample "
                    f"{self.indices[other]}: return one type in every sample",
                )
            raise self._error(
                path,
                sample,
                f"found an object of {type(part).__module__}.{type(part).__qualname__}, which no column holds; "
                "expected tensors, arrays, numbers, PIL images, str, bytes, JSON values, or containers of them: "
                "convert it in the dataset",
            )
        return opened


def _describes_all(specs: Specs, parts: list[Any]) -> bool:
    return all(spec is not None or part is None for spec, part in zip(specs, parts, strict=True))


def _list_specs(specs: Specs, path: Path, kind: Kind | None) -> Specs | None:
    """Return the specs of a column of number lists; None if they are structure, or of several dtypes.

    Lists of one length are structure if they have less than two numbers, or if a short list is the whole sample: a
    dataset may return ``[x, y]`` in place of a tuple.
    """
    real = [spec for spec in specs if spec is not None]
    lengths = {spec.shape[0] for spec in real}
    if kind is None and len(real) == len(specs) and len(lengths) == 1:
        length = lengths.pop()
        if length < 2 or (not path and length <= LONGEST_STRUCTURE):
            return None
    dtypes = {spec.dtype for spec in real if spec.dtype}
    if len(dtypes) > 1:
        return None
    dtype = dtypes.pop() if dtypes else "int64"
    return [spec and spec._replace(dtype=dtype) for spec in specs]


def _is_number_list(value: Any) -> bool:
    return type(value) is list and all(type(item) in (bool, int, float) for item in value)


def _is_record_like(lists: list[Any]) -> bool:
    """Return True if lists of mixed numbers are short and have the same types by position, as ``[id, score]``."""
    if any(value is None or len(value) > LONGEST_STRUCTURE for value in lists):
        return False
    return len({tuple(map(type, value)) for value in lists}) == 1


def _comparable(spec: ValueSpec) -> tuple[Any, ...]:
    return spec.kind, spec.dtype, len(spec.shape), spec.form


def _spell(spec: ValueSpec) -> str:
    form = {"scalar": "a Python number as ", "list": "a list of numbers as "}.get(spec.form, "")
    return f"{form}{spec}"


def _comparable_node(node: Node) -> tuple[Any, ...]:
    keys = frozenset(node.keys) if node.kind in ("dict", "graph") else node.keys  # a dict's keys may come in any order
    return node.kind, node.name, keys, node.batch_dims, node.value


def _ordered(opened: tuple[Node, Sequence[Any]], keys: tuple[str | int, ...]) -> Sequence[Any]:
    """Return the content of a container in the order of ``keys``."""
    node, content = opened
    if node.keys == keys:
        return content
    by_key = dict(zip(node.keys, content, strict=True))
    return [by_key[key] for key in keys]
