"""Describe samples and columns: dtypes, paths, fields, the structure of a sample, and the schema of a store.

Nothing here opens a file or holds data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import torch

from memfeed.errors import FieldError, SchemaError, cut, listed
from memfeed.schema.names import Name, Names, find_field, find_fields
from memfeed.schema.names import Path as Path
from memfeed.schema.names import display as display

Kind = Literal["fixed", "jagged", "list", "str", "bytes", "json"]
"""The layout of a column. A batch of it is one tensor (fixed), one jagged tensor (jagged), or a list (all others)."""

StoredKind = Literal["fixed", "jagged", "list", "str", "bytes", "json", "coded"]
"""The kinds of columns on the disk: those of batches, and "coded", whose rows are compressed."""

Form = Literal["tensor", "scalar", "list"]
"""The form in which one value is returned: a tensor, a Python number, or a list of Python numbers."""

NodeKind = Literal[
    "leaf",
    "none",
    "shared",
    "tuple",
    "list",
    "dict",
    "namedtuple",
    "dataclass",
    "tensordict",
    "tensorclass",
    "graph",
    "tv_tensor",
    "tensor",
]

DEEPEST = 64
"""The largest depth of nested containers."""

RAW = "raw"
"""The form of a field that is not coded."""

NO_VALUE = (-1,)
"""The dims of None where a column of text, bytes or lists has had none so far."""

HEAP_OF_BYTES: frozenset[str] = frozenset({"str", "bytes", "json", "coded"})

_DTYPE_NAMES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES}
"""All dtypes that a column can have, by their names in a manifest."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``; raise SchemaError for a dtype that no column can have."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SchemaError(f"found dtype {name}, which no column can hold; expected one of {', '.join(DTYPES)}: cast it")
    return name


class Coding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the rows of a coded column are compressed, and what they are once they are decoded.

    ``codec`` and ``parameters`` name a codec, see `memfeed.codecs`; ``kind``, ``dtype`` and ``shape`` are those of the
    decoded field.
    """

    codec: str
    parameters: dict[str, int | str]
    kind: Kind
    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        known = [f"{name}={value}" for name, value in self.parameters.items() if name != "layout"]
        return " ".join([self.codec, *known])


class Field(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One leaf of a sample, and the column that stores it.

    ``shape`` is that of one row, with None for each dim that varies between rows. ``stem`` is the column's path in the
    store's directory, with ``/`` between nested names. ``lengths_of`` is, for a jagged field, the index of the first
    field whose rows all have the same lengths as this one's (often its own index).
    """

    path: Path
    name: str
    stem: str
    kind: StoredKind
    dtype: str
    shape: tuple[int | None, ...] = ()
    form: Form = "tensor"
    optional: bool = False
    lengths_of: int | None = None
    coding: Coding | None = None

    @property
    def decoded(self) -> Field:
        """The field as samples and batches have it: another one only if this one is coded."""
        if self.coding is None:
            return self
        coding = self.coding
        return msgspec.structs.replace(self, kind=coding.kind, dtype=coding.dtype, shape=coding.shape, coding=None)

    @property
    def form_text(self) -> str:
        """How the rows are stored, as people read it: ``jpeg quality=95 subsampling=4:4:4``, or "raw"."""
        return RAW if self.coding is None else str(self.coding)

    def coded(self, codec: str, parameters: dict[str, int | str]) -> Field:
        """Return the stored form of this decoded field: rows of bytes that this codec compressed."""
        coding = Coding(codec=codec, parameters=parameters, kind=self.kind, dtype=self.dtype, shape=self.shape)  # type: ignore[arg-type]
        return msgspec.structs.replace(self, kind="coded", dtype="uint8", shape=(), coding=coding)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.torch_dtype.itemsize

    @property
    def rank(self) -> int:
        """The number of dims of one row; 1 (its bytes) for str, bytes and json."""
        return 1 if self.kind in HEAP_OF_BYTES else len(self.shape)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row of a fixed column."""
        return tuple(dim for dim in self.shape if dim is not None)

    @property
    def row_elements(self) -> int:
        """The number of elements in one row of a fixed column."""
        return math.prod(self.row_shape)

    @property
    def ragged_dim(self) -> int:
        """The dim of a row that varies, for a jagged column."""
        return self.shape.index(None)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a fixed column."""
        return self.row_elements * self.itemsize

    def describe(self) -> str:
        """Return kind, dtype and shape as text: ``jagged int64 [*]``."""
        if self.coding is not None:
            return f"{self.decoded.describe()} as {self.coding.codec}"
        if self.kind in HEAP_OF_BYTES:
            text: str = self.kind
        else:
            dims = ", ".join("*" if dim is None else str(dim) for dim in self.shape)
            text = f"{self.dtype} [{dims}]" if self.kind == "fixed" else f"{self.kind} {self.dtype} [{dims}]"
        return text + (" or None" if self.optional else "")


class Node(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One node of the structure of a sample: a leaf, a constant, or a container with its children.

    ``keys`` are a dict's keys or a record's field names, in order; tuples and lists have none. ``batch_dims`` is, for
    a tensordict or tensorclass, the number of dims of its batch_size in one sample, and ``dim_names`` are the names of
    the dims of a batch: that of the rows, then those of one sample; () if none has a name. A leaf has a
    ``name`` if it is a tv_tensor of that class. The kind ``tv_tensor`` is one with a canvas_size; ``value`` has its
    other options.
    """

    kind: NodeKind
    name: str = ""
    keys: tuple[str | int, ...] = ()
    children: tuple[Node, ...] = ()
    batch_dims: int = 0
    dim_names: tuple[str | None, ...] = ()
    value: Any = None

    def items(self) -> Iterator[tuple[str | int, Node]]:
        """Return pairs of a key and the child that it leads to."""
        keys: Iterable[str | int] = self.keys if self.keys else range(len(self.children))
        return zip(keys, self.children, strict=True)

    def leaves(self, path: Path = ()) -> Iterator[Path]:
        """Yield the paths of the leaves, in order; ``path`` is that of this node."""
        for leaf, _ in self.of_kind("leaf", path):
            yield leaf

    def of_kind(self, kind: NodeKind, path: Path = ()) -> Iterator[tuple[Path, Node]]:
        """Yield the nodes of a kind, in order, with their paths; ``path`` is that of this node."""
        if self.kind == kind:
            yield path, self
        for key, child in self.items():
            yield from child.of_kind(kind, (*path, key))

    def select_leaves(self, selected: Collection[Path], path: Path = ()) -> Node | None:
        """Return this structure with only the ``selected`` leaves; None if none of its leaves is selected.

        A container that keeps all of its leaves stays as it is. A tuple or record that loses a child becomes a dict.
        """
        leaves = list(self.leaves(path))
        kept = [leaf for leaf in leaves if leaf in selected]
        if not kept:
            return None
        if kept == leaves:
            return self
        parts = [
            (key, node)
            for key, child in self.items()
            if (node := child.select_leaves(selected, (*path, key))) is not None
        ]
        kind: NodeKind = "tensordict" if self.kind in ("tensordict", "tensorclass") else "dict"
        if len(parts) == len(self.children):
            return msgspec.structs.replace(self, children=tuple(node for _, node in parts))
        keys, children = zip(*parts, strict=True)
        return Node(kind=kind, keys=keys, children=children, batch_dims=self.batch_dims, dim_names=self.dim_names)


class Schema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a store, in the order of the leaves of its structure."""

    fields: tuple[Field, ...]
    structure: Node

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def _repr_html_(self) -> str:
        from memfeed.system import html_parts  # a training shows no page

        shown = self.fields[: html_parts.MOST_FIELDS]
        rows = [(cut(one.name, html_parts.NAME_WIDTH), one.decoded.describe(), one.form_text) for one in shown]
        heading = html_parts.element("h1", f"Schema: {html_parts.count_text(len(self), 'field')}")
        table = html_parts.table(("field", "values", "form"), rows, "text")
        return html_parts.fragment([heading, table, *html_parts.more_fields(len(self))])

    @property
    def decoded(self) -> Schema:
        """The schema of samples and batches: of a store without coded columns this one."""
        if all(field.coding is None for field in self.fields):
            return self
        return Schema(fields=tuple(field.decoded for field in self.fields), structure=self.structure)

    def field_index(self, name: Name) -> int:
        """Return the index of the one field with this name, see `memfeed.schema.names`; raise FieldError otherwise."""
        return find_field(name, [field.path for field in self.fields], [field.name for field in self.fields])

    def field_indices(self, which: Names) -> list[int]:
        """Return the indices of the fields with this name, all leaves of a container, or several for a list."""
        return find_fields(which, [field.path for field in self.fields], [field.name for field in self.fields])

    def names(self) -> str:
        """Return the names of the fields, for messages; of many fields the first ones."""
        return listed([field.name for field in self.fields])

    def given_names(self) -> dict[Path, str]:
        """Return the names that ``fields=`` gave, by path; other fields are named by their paths."""
        return {field.path: field.name for field in self.fields if field.name != display(field.path)}

    def list_paths(self) -> set[Path]:
        """Return the paths of the fields whose rows are a list on their way through transforms."""
        return {f.path for f in self.fields if f.kind == "list" or (f.kind == "jagged" and len(f.shape) > 2)}

    def select(self, field_indices: Sequence[int]) -> Schema:
        """Return the schema with only these fields, in the order they have here; see ``Node.select_leaves``.

        Raises FieldError if there are none.
        """
        kept = sorted(set(field_indices))
        structure = self.structure.select_leaves({self.fields[i].path for i in kept})
        if structure is None:
            raise FieldError(f"found no selected field; expected one or more of: {self.names()}")
        fields, first_of_group = [], dict[int, int]()
        for new_index, old_index in enumerate(kept):
            field = self.fields[old_index]
            if field.lengths_of is not None:  # the first field of the group may not be selected
                first = first_of_group.setdefault(field.lengths_of, new_index)
                field = msgspec.structs.replace(field, lengths_of=first)
            fields.append(field)
        return Schema(fields=tuple(fields), structure=structure)


def shown_dims(shape: tuple[int, ...]) -> str:
    """Return the dims of a row as text for a message."""
    return "None" if shape == NO_VALUE else f"dims {list(shape)}"
