"""Documents packed into blocks of one size: a view of a store whose rows are blocks of tokens.

The documents stand one after another in some order, and are cut every ``size`` tokens. The view itself has the stored
order; a loader that shuffles lays the documents out in a new order in every epoch (`in_order`). The documents of a
block, and where they begin in it, are arithmetic on the documents' lengths.
"""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from memfeed.errors import FieldError, brief
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Node, Schema
from memfeed.store.backing import Backing
from memfeed.store.columns import Column, ComputedColumn, FileRows
from memfeed.store.copied_ranges import LOOPS, must_fit
from memfeed.store.lengths import Fill, fill_values, jagged_field, same_lengths
from memfeed.store.ragged_columns import RaggedRows
from memfeed.store.ragged_gather import raw
from memfeed.store.view import View


class DocumentPieces(NamedTuple):
    """The parts of documents of which some blocks consist, in order; each lies in one block.

    Args:
        document: the row of the base columns, int64 [m]; -1 for what fills the last block.
        skipped: the tokens of the document before the piece, int64 [m].
        length: the tokens of the piece, the end token included, int64 [m]; they sum to k * size.
        stored: those of them that the columns have, int64 [m].
        number: the position of the piece among those of its block, int32 [m].
        begin: the position of its first token in its block, int32 [m].
    """

    document: Int64Array
    skipped: Int64Array
    length: Int64Array
    stored: Int64Array
    number: npt.NDArray[np.int32]
    begin: npt.NDArray[np.int32]


class Packing:
    """Documents in one order, cut into blocks.

    Args:
        rows: the documents' rows of the base columns, as stored, int64 [n].
        lengths: their tokens, int64 [n].
        size: tokens of a block.
        has_end: each document is followed by an end token.
        fills: the last block is filled up; else the tokens that make no whole block are left out.
        order: the documents in the order in which they follow each other, int [n]; None for the stored order.
    """

    def __init__(
        self, rows: Int64Array, lengths: Int64Array, size: int, *, has_end: bool, fills: bool, order: Any = None
    ) -> None:
        self._rows, self._lengths, self.size, self._has_end, self._fills = rows, lengths, size, has_end, fills
        self._order = order
        ordered = lengths if order is None else lengths[order]
        self._begins = np.zeros(len(rows) + 1 + fills, np.int64)  # of each document, in tokens; then the end
        np.cumsum(ordered + has_end if has_end else ordered, out=self._begins[1 : len(rows) + 1])
        tokens = int(self._begins[len(rows)])
        self.block_count = -(-tokens // size) if fills else tokens // size
        if fills:  # what fills the last block is like one more document
            self._begins[-1] = self.block_count * size
        self._held: tuple[Int64Array, DocumentPieces] | None = None

    @property
    def document_count(self) -> int:
        """The number of documents."""
        return len(self._rows)

    def in_order(self, order: Any) -> Packing:
        """Return the packing of the same documents in another order; see ``order`` above."""
        return Packing(self._rows, self._lengths, self.size, has_end=self._has_end, fills=self._fills, order=order)

    def pieces(self, blocks: Int64Array) -> DocumentPieces:
        """Return the pieces of ``cut``, and keep them: the columns of one batch ask with the same array."""
        held = self._held
        if held is None or held[0] is not blocks:
            held = self._held = blocks, self.cut(blocks)
        return held[1]

    def cut(self, blocks: Int64Array) -> DocumentPieces:
        """Return the pieces of ``blocks``, int [k], all in range."""
        begins, size, n = self._begins, self.size, len(self._rows)
        edge = blocks.astype(np.int64) * size
        first = np.searchsorted(begins, edge, side="right") - 1
        counts = np.searchsorted(begins, edge + size, side="left") - first
        place, skipped, length, number, in_block = _cut(begins, edge, first, counts, size)
        is_document = place < n
        at = np.minimum(place, n - 1) if self._fills else place
        at = at if self._order is None else self._order[at]
        stored = length
        if self._has_end:
            stored = np.minimum(length, np.maximum(self._lengths[at] - skipped, 0))
        if self._fills:
            stored = np.where(is_document, stored, 0)
        document = np.where(is_document, self._rows[at], -1) if self._fills else self._rows[at]
        return DocumentPieces(document, skipped, length, stored, number, in_block)


_Cut = tuple[Int64Array, Int64Array, Int64Array, npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Place, skipped, length, number and begin, see ``DocumentPieces``; place is the document's position in the order.

The fill's place is the number of the documents.
"""


def _cut(begins: Int64Array, edge: Int64Array, first: Int64Array, counts: Int64Array, size: int) -> _Cut:
    """Cut the documents from ``first``, ``counts`` of them, for blocks of ``size`` tokens from ``edge``: int64 [k]."""
    if (loops := LOOPS.get()) is not None:
        most = int(counts.sum())
        place, skipped, length = (np.empty(most, np.int64) for _ in range(3))
        number, in_block = (np.empty(most, np.int32) for _ in range(2))
        count = loops.cut(begins, edge // size, first, size, place, skipped, length, number, in_block)
        must_fit(count >= 0)
        return place[:count], skipped[:count], length[:count], number[:count], in_block[:count]
    block = np.repeat(np.arange(len(edge)), counts)
    place = np.arange(len(block)) + np.repeat(first - np.cumsum(counts) + counts, counts)
    begin = np.maximum(begins[place], edge[block])
    length = np.minimum(begins[place + 1], edge[block] + size) - begin
    if not length.all():  # empty documents
        kept = length > 0
        block, place, begin, length = block[kept], place[kept], begin[kept], length[kept]
    number = np.arange(len(block)) - np.searchsorted(block, np.arange(len(edge)))[block]
    in_block = (begin - edge[block]).astype(np.int32)  # half the bytes to repeat for every token
    return place, begin - begins[place], length, number.astype(np.int32), in_block


# --- columns


def _repeat(values: npt.NDArray[Any], lengths: Int64Array, out: npt.NDArray[Any]) -> None:
    """Write each value as often as its length says into ``out``, flat, which has exactly their size."""
    loops = LOOPS.get()
    if loops is None:
        out[:] = np.repeat(values, lengths)
    else:
        must_fit(loops.repeat(values, lengths, out))


class PackedColumn(ComputedColumn):
    """A column of a packed view: row i is what block i has of a field, [size, ...]."""

    packing: Packing
    why_mapped = "packed for each batch"

    def __init__(self, field: Field, packing: Packing) -> None:
        super().__init__(field, packing.block_count)
        self.packing = packing

    def repacked(self, packing: Packing) -> PackedColumn:
        """Return the same column of another packing, which has as many blocks."""
        made = copy.copy(self)
        made.packing = packing
        return made


class TokenColumn(PackedColumn):
    """The tokens of a ragged column, [size, ...].

    Args:
        source: the ragged column.
        end, fill: the values of end tokens, and of what fills the last block; None where there are none.
    """

    def __init__(self, field: Field, packing: Packing, source: RaggedRows, end: Any, fill: Any) -> None:
        super().__init__(field, packing)
        self.source, self._end, self._fill = source, end, fill
        self._token_bytes = field.row_bytes // packing.size

    def places(self, pieces: DocumentPieces) -> tuple[Int64Array, Int64Array]:
        """Return where ``pieces`` start in the column's file, and how long they are, in bytes; without empty ones."""
        document, skipped, stored = pieces.document, pieces.skipped, pieces.stored
        if self._end is not None or self._fill is not None:
            kept = stored > 0
            document, skipped, stored = document[kept], skipped[kept], stored[kept]
        return self.source.locate(document).starts + skipped * self._token_bytes, stored * self._token_bytes

    def files(self, begin: int = 0) -> Iterator[FileRows]:
        """See ``Column.files``; none where the documents are in several."""
        for part in self.source.files() if self.source.gives_views else ():
            yield FileRows(
                part.column, begin, self.row_count, lambda rows: self.places(self.packing.cut(rows)), None, True
            )

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``Column.gather_into``."""
        pieces = self.packing.pieces(rows)
        starts, lengths = self.places(pieces)
        stored, total = int(lengths.sum()), out.nbytes
        if stored == total:
            if total:
                self.source.copy(starts, lengths, out.view(-1).view(torch.uint8).numpy())
            return out
        found = torch.empty(stored // self._token_bytes, *out.shape[2:], dtype=out.dtype, device="cpu")
        if stored:
            self.source.copy(starts, lengths, found.view(-1).view(torch.uint8).numpy())
        self._spread(pieces, found, out)
        return out

    def _spread(self, pieces: DocumentPieces, found: torch.Tensor, out: torch.Tensor) -> None:
        """Write the stored tokens of pieces, ``found``, to their places in ``out``, and end and fill tokens between."""
        flat, missing = raw(out.view(-1, *out.shape[2:])), pieces.length - pieces.stored
        begins = np.cumsum(pieces.length) - pieces.length
        loops, size = LOOPS.get(), self._token_bytes
        if loops is None:
            parts = np.stack([pieces.stored, missing], 1).ravel()
            flat[np.repeat(np.tile([True, False], len(missing)), parts)] = raw(found)
        else:
            of_found = np.cumsum(pieces.stored) - pieces.stored
            places = of_found * size, pieces.stored * size, begins * size
            source, target = (tensor.view(-1).view(torch.uint8).numpy() for tensor in (found, out))
            must_fit(loops.copy_ranges(source, *places, target))
        if self._end is not None:  # a piece has one at most
            is_end = (missing > 0) & (pieces.document >= 0)
            flat[(begins + pieces.stored)[is_end]] = raw(torch.full((1,), self._end, dtype=out.dtype, device="cpu"))[0]
        if self._fill is not None:
            for piece in np.flatnonzero(pieces.document < 0).tolist():
                part = slice(int(begins[piece]), int(begins[piece] + pieces.length[piece]))
                flat[part] = raw(torch.full((1,), self._fill, dtype=out.dtype, device="cpu"))[0]


class DocumentIds(PackedColumn):
    """The number of the document of each token in its block, from 0: int32 [size]; -1 for what fills the last."""

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``Column.gather_into``."""
        pieces = self.packing.pieces(rows)
        values = np.where(pieces.document < 0, np.int32(-1), pieces.number)
        _repeat(values, pieces.length, out.numpy().reshape(-1))
        return out


class PositionIds(PackedColumn):
    """The position of a token in its document, from 0 at the first one that is in the block: int64 [size]."""

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``Column.gather_into``."""
        pieces, size, loops = self.packing.pieces(rows), self.packing.size, LOOPS.get()
        if loops is not None:
            must_fit(loops.count_up(pieces.length, out.numpy().reshape(-1)))
            return out
        begins = np.repeat(pieces.begin, pieces.length).reshape(-1, size)
        np.subtract(np.arange(size, dtype=np.int32), begins, out=out.numpy())
        return out


class Mask(PackedColumn):
    """True for the tokens of documents, False for what fills the last block: bool [size]."""

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``Column.gather_into``."""
        pieces = self.packing.pieces(rows)
        _repeat(pieces.document >= 0, pieces.length, out.numpy().reshape(-1))
        return out


def packed_backing(view: View, which: tuple[Any, ...], size: int, end: Fill, fill: Fill) -> Backing:
    """Return the columns of ``store.packed``; see there."""
    if not which:
        raise FieldError(
            'found packed([], ...); expected a field of varying length, or several: ["input_ids", "labels"]'
        )
    indices = [jagged_field(view.schema, name, "packed") for name in which]
    sources: list[Any] = [view.columns[index] for index in indices]
    try:
        size = 0 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        raise FieldError(f"found blocks of {size!r:.60} tokens; expected a whole number, at least 1") from None
    if size < 1:
        raise FieldError(f"found blocks of {size} tokens; expected at least 1")
    if other := next((source.field for source in sources if source.field.ragged_dim), None):
        raise FieldError(
            f"found field {other.name}, which is {other.describe()}; expected tokens along the first dim: transpose "
            "them in the dataset"
        )
    rows = view.base_rows(np.arange(len(view)))
    lengths = same_lengths(sources, rows)
    packing = Packing(rows, lengths, size, has_end=end is not None, fills=fill is not None)
    if not packing.block_count and len(rows):
        raise FieldError(
            f"found {int(lengths.sum()):,} tokens in field {sources[0].field.name}; expected at least one block of "
            f"{size:,}: pack into smaller blocks, or fill up the last one with pad=0"
        )
    ends, fills = (_values(given, view.schema, indices, option) for given, option in ((end, "eos"), (fill, "pad")))
    columns: list[Column] = []
    for index, source in zip(indices, sources, strict=True):
        name = source.field.name.rpartition(".")[2]
        field = Field(
            path=(name,), name=name, stem=name, kind="fixed", dtype=source.field.dtype,
            shape=(size, *source.field.shape[1:]),
        )  # fmt: skip
        columns.append(TokenColumn(field, packing, source, ends.get(index), fills.get(index)))
    first = columns[0].field.name
    computed: list[tuple[str, str, type[PackedColumn]]] = [
        ("document_ids", "int32", DocumentIds),
        ("position_ids", "int64", PositionIds),
        *([(f"{first}_mask", "bool", Mask)] if fill is not None else []),
    ]
    for name, dtype, kind in computed:
        field = Field(path=(name,), name=name, stem=name, kind="fixed", dtype=dtype, shape=(size,))
        columns.append(kind(field, packing))
    names = tuple(column.field.name for column in columns)
    if len(set(names)) < len(names):
        raise FieldError(f"found packed fields {', '.join(names)}; expected names that differ: select() or rename them")
    leaves = (Node(kind="leaf"),) * len(columns)
    schema = Schema(
        fields=tuple(column.field for column in columns), structure=Node(kind="dict", keys=names, children=leaves)
    )
    digest = hashlib.blake2b(repr((view.source_digest(), names, size, end, fill)).encode(), digest_size=8).hexdigest()
    return Backing(
        view.path, schema, packing.block_count, digest, columns.__getitem__, owner=view,
        remake=(packed_backing, (view, which, size, end, fill)), description=f"blocks of {size} tokens",
        check_dataset=lambda _: view.check_dataset(),
    )  # fmt: skip


def _values(given: Fill, schema: Schema, indices: Sequence[int], option: str) -> dict[int, Any]:
    """Return the value of each packed field; see ``fill_values``. Raise FieldError if some have one and others not."""
    found = fill_values(given, schema, indices, option)
    left = [schema.fields[index].name for index in indices if found and index not in found]
    if left:
        raise FieldError(
            f"found {option}={brief(given)} without field {left[0]}; expected a number for each packed field: add "
            f"{left[0]}, or write one number for all"
        )
    return found


def in_order(columns: Sequence[Column], order: Any) -> list[Column]:
    """Return columns with those of packed views laid out in another order of their documents; see ``Packing``.

    They share one packing, as before.
    """
    made: dict[int, Packing] = {}
    found: list[Column] = []
    for column in columns:
        if isinstance(column, PackedColumn):
            packing = made.setdefault(id(column.packing), column.packing.in_order(order))
            column = column.repacked(packing)
        found.append(column)
    return found
