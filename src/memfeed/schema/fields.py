"""The words of a store: dtypes, paths, fields, the structure of a sample, and the schema that joins them.

Pure descriptions: nothing here touches a file or holds data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import torch

from memfeed.errors import FieldError, SchemaError

Path = tuple[str | int, ...]
"""Where a leaf stands in a sample: ``sample["target"]["boxes"]`` is ``("target", "boxes")``."""

Kind = Literal["fixed", "jagged", "list", "str", "bytes", "json"]
"""How a column is laid out, and what a batch of it is: one tensor, one jagged tensor, or a list."""

Form = Literal["tensor", "scalar", "list"]
"""How one value comes back: a tensor, a Python number, or a list of Python numbers."""

NodeKind = Literal[
    "leaf", "none", "shared", "tuple", "list", "dict", "namedtuple", "dataclass", "tensordict", "tensorclass"
]

DEEPEST = 64
"""How deep containers may nest."""

HEAP_OF_BYTES: frozenset[str] = frozenset({"str", "bytes", "json"})

_DTYPE_NAMES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES}
"""Every dtype that a column can have, by its name in a manifest."""

_STEM = re.compile(r"[A-Za-z0-9_-]{1,100}")
# tensordict's meta.json keeps its own entries beside the keys of the leaves, so a leaf of such a name vanishes on load.
_RESERVED = frozenset(
    [
        "meta",
        "shape",
        "device",
        "type",
        "dtype",
        "data",
        "is_nested",
        "stack_dim",
        "stack_dim_name",
        "memfeed",
        "checksums",
        "start",
        "dims",
        "heap",
        "_type",
        "_names",
        "_class",
        "_format_version",
        "_metadata",
        "_is_non_tensor",
        "_tensordict",
    ]
)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``; raises SchemaError for a dtype that no column can have."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SchemaError(f"found dtype {name}, which no column can hold; expected one of {', '.join(DTYPES)}: cast it")
    return name


def display(path: Path) -> str:
    """``("target", "boxes")`` -> ``"target.boxes"``: for people; two paths may look the same."""
    return ".".join(str(key) for key in path) if path else "value"


class Field(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One leaf of a sample, and the column that keeps it.

    ``shape`` is one row's, with None for each dim that varies between rows. ``stem`` is the column's place in the
    store's directory, with ``/`` between nested names. ``lengths_of`` is, for a jagged field, the number of the first
    field whose rows all have the same lengths as this one's (often its own number).
    """

    path: Path
    name: str
    stem: str
    kind: Kind
    dtype: str
    shape: tuple[int | None, ...] = ()
    form: Form = "tensor"
    optional: bool = False
    lengths_of: int | None = None

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
        """How many dims one row has; 1 (its bytes) for str, bytes and json."""
        return 1 if self.kind in HEAP_OF_BYTES else len(self.shape)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row of a fixed column."""
        return tuple(dim for dim in self.shape if dim is not None)

    @property
    def row_elements(self) -> int:
        """Elements in one row of a fixed column."""
        return math.prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a fixed column."""
        return self.row_elements * self.itemsize

    def describe(self) -> str:
        """Kind, dtype and shape in a few words: ``jagged int64 [*]``."""
        if self.kind in HEAP_OF_BYTES:
            text: str = self.kind
        else:
            dims = ", ".join("*" if dim is None else str(dim) for dim in self.shape)
            text = f"{self.dtype} [{dims}]" if self.kind == "fixed" else f"{self.kind} {self.dtype} [{dims}]"
        return text + (" or None" if self.optional else "")


class Node(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One place in the structure of a sample: a leaf, a constant, or a container and what it holds.

    ``keys`` are a dict's keys or a record's field names, in order; tuples and lists have none. ``batch_dims`` is, for
    a tensordict or tensorclass, how many leading dims of its leaves its own batch_size covers in one sample.
    """

    kind: NodeKind
    name: str = ""
    keys: tuple[str | int, ...] = ()
    children: tuple[Node, ...] = ()
    batch_dims: int = 0
    value: Any = None

    def items(self) -> Iterator[tuple[str | int, Node]]:
        """The children with the keys that lead to them."""
        keys: Iterable[str | int] = self.keys if self.keys else range(len(self.children))
        return zip(keys, self.children, strict=True)

    def leaves(self, at: Path = ()) -> Iterator[Path]:
        """The paths of the leaves, in order."""
        if self.kind == "leaf":
            yield at
        for key, child in self.items():
            yield from child.leaves((*at, key))

    def keep(self, wanted: Callable[[Path], bool], at: Path = ()) -> Node | None:
        """This structure with only the wanted leaves, None where none is below.

        A container that loses none stays as it is; a tuple or record that misses some becomes a dict.
        """
        below = list(self.leaves(at))
        kept = [path for path in below if wanted(path)]
        if not kept:
            return None
        if kept == below:
            return self
        parts = [(key, node) for key, child in self.items() if (node := child.keep(wanted, (*at, key))) is not None]
        kind: NodeKind = "tensordict" if self.kind in ("tensordict", "tensorclass") else "dict"
        if len(parts) == len(self.children):
            return msgspec.structs.replace(self, children=tuple(node for _, node in parts))
        keys, children = zip(*parts, strict=True)
        return Node(kind=kind, keys=keys, children=children, batch_dims=self.batch_dims)


class Schema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a store, in the order of the leaves of its structure."""

    fields: tuple[Field, ...]
    structure: Node

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def field_index(self, which: str | int | Path) -> int:
        """The number of the field that a name, a path, or a path as displayed stands for; FieldError if none does."""
        path = tuple(which) if isinstance(which, tuple | list) else (which,)
        for matches in (
            [i for i, field in enumerate(self.fields) if field.path == path],
            [i for i, field in enumerate(self.fields) if which in (field.name, display(field.path))],
        ):
            if len(matches) == 1:
                return matches[0]
            if matches:
                paths = ", ".join(str(self.fields[i].path) for i in matches)
                raise FieldError(f"found several fields shown as {which!r}: {paths}; name the one you mean by its path")
        raise FieldError(f"found no field {which!r}; this store has: {self.names()}")

    def names(self) -> str:
        """The names of the fields, for messages; long lists are cut."""
        shown = [field.name for field in self.fields[:20]]
        return ", ".join(shown) + (f", and {len(self.fields) - 20} more" if len(self.fields) > 20 else "")

    def under(self, which: str | int | Path) -> list[int]:
        """The numbers of the fields a name or path stands for: one leaf, or all leaves below a container."""
        path = tuple(which) if isinstance(which, tuple | list) else (which,)
        below = [i for i, field in enumerate(self.fields) if field.path[: len(path)] == path]
        return below or [self.field_index(which)]

    def select(self, numbers: Sequence[int]) -> Schema:
        """The schema with only these fields, in their own order; containers stay (see ``Node.keep``)."""
        kept = sorted(set(numbers))
        paths = {self.fields[i].path for i in kept}
        structure = self.structure.keep(lambda path: path in paths)
        if structure is None:
            raise FieldError(f"no field was selected; this store has: {self.names()}")
        renumber = {old: new for new, old in enumerate(kept)}
        fields, seen = [], dict[int, int]()
        for i in kept:
            field = self.fields[i]
            if field.lengths_of is not None:
                # the first field of a group may be gone: the first that stayed leads it now
                lead = seen.setdefault(field.lengths_of, renumber[i])
                field = msgspec.structs.replace(field, lengths_of=lead)
            fields.append(field)
        # a container that lost members is a dict with the same keys, so paths stay true
        return Schema(fields=tuple(fields), structure=structure)


class Stems:
    """Hands out file stems: the key itself where that is a safe and free name, else ``c<N>``."""

    def __init__(self) -> None:
        self._directories: dict[Path, str] = {(): ""}
        self._taken: dict[str, set[str]] = {}

    def _free(self, directory: str, key: str | int) -> str:
        taken = self._taken.setdefault(directory, set())
        stem = str(key)
        if not _STEM.fullmatch(stem) or stem.lower() in _RESERVED or stem.lower() in taken:
            stem = next(name for i in range(len(taken) + 1) if (name := f"c{i}") not in taken)
        taken.add(stem.lower())  # unique without case: file systems differ
        return f"{directory}/{stem}" if directory else stem

    def stem(self, path: Path, name: str | None = None) -> str:
        """The stem for the leaf at ``path``; ``name`` replaces its last key where the user gave one."""
        directory = ""
        for depth in range(1, len(path)):
            part = path[:depth]
            if part not in self._directories:
                self._directories[part] = self._free(directory, path[depth - 1])
            directory = self._directories[part]
        last: str | int = name if name is not None else (path[-1] if path else "value")
        return self._free(directory, last)


def is_stem(text: str) -> bool:
    """Whether ``text`` could be a column's place: safe names joined by ``/``."""
    return all(_STEM.fullmatch(part) and part.lower() not in _RESERVED for part in text.split("/"))
