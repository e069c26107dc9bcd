"""Read a directory of memoized results as a store: each row has the key of a call and its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from memfeed.errors import CorruptStoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import DTYPES, Field, Kind, Node, Schema, display
from memfeed.schema.fields import Path as FieldPath
from memfeed.schema.names import StemAssigner
from memfeed.store.columns import Column
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.memo_format import BLOB, FOOTER_BYTES, KEY, Blob, is_right, layout_bytes, read_footer
from memfeed.store.ragged import Located, ragged_files
from memfeed.store.ragged_columns import HeapColumn, NestedColumn, RaggedRows
from memfeed.system.mapped_memory import map_file, read_file

_LEAVES = ("bytes", "tensor", "array", "scalar", "image")
PRESENT = (1, 2)  # the states of a row that can be read: WRITTEN and DURABLE of memfeed.building.partial


class Rows(NamedTuple):
    """The rows that are there: their numbers, int64 [n], and where keys and blobs lie: byte and size, int64 [n, 2]."""

    numbers: Int64Array
    keys: Int64Array
    blobs: Int64Array


class Contents(NamedTuple):
    """The schema and columns of the results, their rows, and a hash of which rows they are."""

    schema: Schema
    columns: list[Column]
    rows: Rows
    digest: str


def present_rows(root: Path) -> Int64Array:
    """Return the numbers of the rows that can be read now, in the order in which they were made, int64 [n]."""
    states = np.fromfile(root / WORK_DIRECTORY / "presence", np.uint8)
    return np.flatnonzero(np.isin(states, PRESENT))


def read(root: Path, numbers: Int64Array) -> Contents:
    """Return the contents of the results at ``root``, of the rows with these numbers.

    A row is ``{"key": ..., "result": ...}``. If results differ in structure, dtype or number of dims, each kind of them
    is a field of its own (``result_0``, ``result_1``), and None in all other rows.

    Raises CorruptStoreError for rows that do not fit into their files.
    """
    places = [_places(root, field, numbers) for field in (KEY, BLOB)]
    rows = Rows(numbers, *places)
    blobs = _read_blobs(root, rows.blobs)
    fields = _Fields(root, rows, blobs)
    columns, nodes = [fields.key()], {"key": Node(kind="leaf")}
    kinds: dict[str, list[int]] = {}
    for row, blob in enumerate(blobs):
        try:
            kind = _kind_of(blob)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise CorruptStoreError(
                f"{root}: found a result with a layout that cannot be read ({error!s:.200}), in row {numbers[row]}; "
                "expected one of memfeed's: the directory is damaged; remove it, and the results are computed again"
            ) from None
        kinds.setdefault(kind, []).append(row)
    for index, members in enumerate(kinds.values()):
        name = "result" if len(kinds) == 1 else f"result_{index}"
        node, found = fields.of_nodes((name,), members, [blobs[row].layout.tree for row in members])
        nodes[name] = node
        columns += found
    structure = Node(kind="dict", keys=tuple(nodes), children=tuple(nodes.values()))
    schema = Schema(fields=tuple(column.field for column in columns), structure=structure)
    digest = xxhash.xxh3_128(numbers.tobytes())
    for blob in blobs:
        digest.update(blob.digest)
    return Contents(schema, columns, rows, digest.hexdigest())


def verify(root: Path, rows: Rows, report: Callable[[int, int], None] | None) -> None:
    """Read the results and compare them with their hashes. Raises CorruptStoreError that names the first bad row."""
    heap, done, total = ragged_files(root, BLOB).heap, 0, int(rows.blobs[:, 1].sum())
    for number, (start, size) in zip(rows.numbers.tolist(), rows.blobs.tolist(), strict=True):
        data = np.empty(size, np.uint8)
        read_file(heap, data, start)
        if not is_right(data):
            raise CorruptStoreError(
                f"{heap}: found row {number} with other bytes than were written ({size:,} from byte {start:,}); "
                f"expected those of its hash: remove {root}, and the results are computed again"
            )
        done += size
        if report is not None:
            report(done, total)


def _places(root: Path, field: Field, numbers: Int64Array) -> Int64Array:
    """Return the first byte and the size of rows in the heap of a column of bytes, int64 [n, 2], inside the heap."""
    paths = ragged_files(root, field)
    try:
        start, dims = (np.fromfile(path, np.int64)[numbers] for path in (paths.start, paths.dims))
    except IndexError:
        raise CorruptStoreError(
            f"{paths.start}: found fewer rows than there are; expected {int(numbers.max()) + 1:,}: the directory is "
            f"damaged; remove {root}, and the results are computed again"
        ) from None
    heap = paths.heap.stat().st_size
    bad = (start < 0) | (dims < 0) | (start > heap) | (dims > heap - start)
    if field is BLOB:
        bad |= dims < FOOTER_BYTES
    if bad.any():
        row = int(bad.argmax())
        raise CorruptStoreError(
            f"{paths.heap}: found row {int(numbers[row])} at byte {int(start[row])} with {int(dims[row])} bytes; "
            f"expected it inside {heap:,} bytes: the directory is damaged; remove {root}, and the results are computed "
            "again"
        )
    return np.stack([start, dims], axis=1)


def _read_blobs(root: Path, places: Int64Array) -> list[Blob]:
    """Read footer and layout of each blob."""
    heap, found = ragged_files(root, BLOB).heap, list[Blob]()
    if not len(places):
        return found
    mapped = map_file(heap, int(places.sum(axis=1).max())).numpy()
    for start, size in places.tolist():
        blob = mapped[start : start + size]
        found.append(read_footer(blob[-min(size, layout_bytes(blob)) :], size, heap))
    return found


def _kind_of(blob: Blob) -> str:
    """Return a key of the results that are one field: their structure, dtypes and numbers of dims.

    Raises ValueError, TypeError or IndexError for a structure that is none.
    """
    leaves = blob.layout.leaves

    def kind(node: Any) -> Any:
        name, content = node[0], node[1]
        if name == "value":
            return ["value", type(content).__name__]
        if name in ("tuple", "list"):
            return [name, [kind(one) for one in content]]
        if name == "dict":
            if not all(type(key) in (str, int) for key, _ in content):
                raise ValueError("a key of another type than str and int")
            return [name, [[key, kind(one)] for key, one in content]]
        index, order = _leaf_index(node), _order_of(node)
        if name not in _LEAVES or not 0 <= index < len(leaves):
            raise ValueError(f"a node {name!r:.40} of leaf {index}, of {len(leaves)}")
        leaf = leaves[index]
        if order and sorted(order) != list(range(len(leaf.shape))):
            raise ValueError(f"an order of dims {order!r:.40}")
        return ["leaf", name == "bytes", leaf.dtype, len(leaf.shape), order]

    return json.dumps(kind(blob.layout.tree))


def _leaf_index(node: Any) -> int:
    return int(node[3] if node[0] == "image" else node[1])


def _order_of(node: Any) -> list[int]:
    """Return the order in which the dims of a tensor or array lie in memory; [] for their own."""
    return list(node[2]) if node[0] in ("tensor", "array") and len(node) > 2 else []


class _PermutedColumn(RaggedRows):
    """Leaves of results whose dims lie in memory in another order.

    Args:
        field: of the rows.
        heap: of all results.
        places: the first byte of each row in it, int64 [n]; -1 for None.
        dims: of each row, int64 [n, rank].
        order: in which the dims lie in memory.
    """

    def __init__(self, field: Field, heap: Path, places: Int64Array, dims: Int64Array, order: Sequence[int]) -> None:
        self.field, self.row_count, self._heap = field, len(dims), heap
        self._places, self._dims, self._order = places, dims, tuple(order)

    def locate(self, rows: Int64Array) -> Located:
        """See ``RaggedRows.locate``; here the start is the row's number."""
        dims = self._dims[rows]
        lengths = np.where(dims[:, 0] < 0, -1, dims.prod(axis=1) * self.field.itemsize)
        return Located(rows, lengths, dims)

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``RaggedRows.view``."""
        dims = self._dims[start]
        data = np.empty(length, np.uint8)
        read_file(self._heap, data, int(self._places[start]))
        kept = torch.from_numpy(data).view(self.field.torch_dtype).view([int(dims[dim]) for dim in self._order])
        undone = kept.permute([self._order.index(dim) for dim in range(len(self._order))])
        return undone.contiguous().view(-1).view(torch.uint8)


class _Fields:
    """Makes the columns of results."""

    def __init__(self, root: Path, rows: Rows, blobs: Sequence[Blob]) -> None:
        self._root, self._rows, self._blobs = root, rows, blobs
        self._stems = StemAssigner()
        self._heap_bytes = int(rows.blobs.sum(axis=1).max(initial=0))

    def key(self) -> Column:
        field = self._field(("key",), "json", "uint8", (), optional=False)
        heap = ragged_files(self._root, KEY).heap
        places = self._rows.keys
        return HeapColumn(field, heap, int(places.sum(axis=1).max(initial=0)), places[:, 0], places[:, 1:].copy())

    def _field(
        self, path: FieldPath, kind: Kind, dtype: str, shape: tuple[int | None, ...], *, optional: bool
    ) -> Field:
        stem = self._stems.assign(path)
        return Field(path=path, name=display(path), stem=stem, kind=kind, dtype=dtype, shape=shape, optional=optional)

    def of_nodes(self, path: FieldPath, members: Sequence[int], nodes: list[Any]) -> tuple[Node, list[Column]]:
        """Return the structure and the columns of nodes of some rows, which are of one kind."""
        kind = nodes[0][0]
        if kind in ("tuple", "list", "dict"):
            is_dict = kind == "dict"
            keys = [key for key, _ in nodes[0][1]] if is_dict else list(range(len(nodes[0][1])))
            children, columns = [], list[Column]()
            for index, key in enumerate(keys):
                parts = [node[1][index][1] if is_dict else node[1][index] for node in nodes]
                child, found = self.of_nodes((*path, key), members, parts)
                children.append(child)
                columns += found
            return Node(kind=kind, keys=tuple(keys) if is_dict else (), children=tuple(children)), columns
        if kind == "value":
            values = [node[1] for node in nodes]
            if values[0] is None:
                return Node(kind="none"), []
            return Node(kind="leaf"), [self._of_values(path, members, values)]
        return Node(kind="leaf"), [self._of_leaves(path, members, nodes)]

    def _of_values(self, path: FieldPath, members: Sequence[int], values: list[Any]) -> Column:
        is_text = isinstance(values[0], str)
        texts = [(value if is_text else json.dumps(value)).encode("utf-8", "surrogatepass") for value in values]
        dims = np.full((len(self._blobs), 1), -1, np.int64)
        dims[members, 0] = [len(text) for text in texts]
        is_all = len(members) == len(self._blobs)
        field = self._field(path, "str" if is_text else "json", "uint8", (), optional=not is_all)
        data = torch.frombuffer(bytearray(b"".join(texts) or b"\0"), dtype=torch.uint8)
        return NestedColumn(field, data, dims)

    def _of_leaves(self, path: FieldPath, members: Sequence[int], nodes: list[Any]) -> Column:
        leaves = [self._blobs[row].layout.leaves[_leaf_index(node)] for row, node in zip(members, nodes, strict=True)]
        dtype, rank, is_all = leaves[0].dtype, len(leaves[0].shape), len(members) == len(self._blobs)
        start = np.zeros(len(self._blobs), np.int64)
        dims = np.full((len(self._blobs), max(rank, 1)), -1, np.int64)
        dims[members] = [leaf.shape or (1,) for leaf in leaves]
        start[members] = [leaf.offset for leaf in leaves]
        start[members] += self._rows.blobs[members, 0]
        if order := _order_of(nodes[0]):
            dims[members] = dims[members][:, [order.index(dim) for dim in range(rank)]]
            shapes = {tuple(shape) for shape in dims[members].tolist()}
            is_fixed = is_all and len(shapes) == 1
            shape = next(iter(shapes)) if is_fixed else (None,) * rank
            field = self._field(path, "fixed" if is_fixed else "list", dtype, shape, optional=not is_all)
            return _PermutedColumn(field, ragged_files(self._root, BLOB).heap, start, dims, order)
        start[members] //= DTYPES[dtype].itemsize
        if nodes[0][0] == "bytes":
            field = self._field(path, "bytes", "uint8", (), optional=not is_all)
        elif is_all and len({leaf.shape for leaf in leaves}) == 1:
            field = self._field(path, "fixed", dtype, leaves[0].shape, optional=False)
        else:
            field = self._field(path, "list", dtype, (None,) * rank, optional=not is_all)
        return HeapColumn(field, ragged_files(self._root, BLOB).heap, self._heap_bytes, start, dims)
