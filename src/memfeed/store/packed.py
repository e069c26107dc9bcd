"""Documents packed into blocks of one size: a view of a store whose rows are blocks of tokens.

The documents stand one after another in some order, and are cut every ``size`` tokens. The view itself has the stored
order; a loader that shuffles lays the documents out in a new order in every epoch (`in_order`). The documents of a
block, and where they begin in it, are arithmetic on the documents' lengths.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memfeed.errors import FieldError, brief
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Node, Schema
from memfeed.store.backing import Backing
from memfeed.store.columns import Column, ComputedColumn, FileRows
from memfeed.store.copied_ranges import LOOPS, must_fit
from memfeed.store.document_blocks import DocumentPieces, Packing
from memfeed.store.lengths import Fill, fill_values, jagged_field, same_lengths
from memfeed.store.ragged_columns import RaggedRows
from memfeed.store.ragged_gather import raw
from memfeed.store.view import View


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
        """Return the same column of another packing."""
        return type(self)(self.field, packing)


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

    def repacked(self, packing: Packing) -> PackedColumn:
        """See ``PackedColumn.repacked``."""
        return TokenColumn(self.field, packing, self.source, self._end, self._fill)

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
