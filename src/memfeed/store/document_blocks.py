"""Documents in some order, cut into blocks of one size: arithmetic on the documents' lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memfeed.schema.codec import Int64Array
from memfeed.store.copied_ranges import LOOPS, must_fit


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
        loops = LOOPS.get()
        cut = (
            _cut(begins, edge, first, counts, size)
            if loops is None
            else _cut_compiled(loops, begins, blocks.astype(np.int64), first, counts, size)
        )
        place, skipped, length, number, in_block = cut
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


class _Cut(NamedTuple):
    """See ``DocumentPieces``; ``place`` is the document's position in the order, of the fill their number."""

    place: Int64Array
    skipped: Int64Array
    length: Int64Array
    number: npt.NDArray[np.int32]
    begin: npt.NDArray[np.int32]


def _cut(begins: Int64Array, edge: Int64Array, first: Int64Array, counts: Int64Array, size: int) -> _Cut:
    """Cut the documents from ``first``, ``counts`` of them, for blocks of ``size`` tokens from ``edge``: int64 [k]."""
    block = np.repeat(np.arange(len(edge)), counts)
    place = np.arange(len(block)) + np.repeat(first - np.cumsum(counts) + counts, counts)
    begin = np.maximum(begins[place], edge[block])
    length = np.minimum(begins[place + 1], edge[block] + size) - begin
    if not length.all():  # empty documents
        kept = length > 0
        block, place, begin, length = block[kept], place[kept], begin[kept], length[kept]
    number = np.arange(len(block)) - np.searchsorted(block, np.arange(len(edge)))[block]
    in_block = (begin - edge[block]).astype(np.int32)  # half the bytes to repeat for every token
    return _Cut(place, begin - begins[place], length, number.astype(np.int32), in_block)


def _cut_compiled(
    loops: Any, begins: Int64Array, blocks: Int64Array, first: Int64Array, counts: Int64Array, size: int
) -> _Cut:
    """Cut as ``_cut`` does, with compiled loops."""
    most = int(counts.sum())
    place, skipped, length = (np.empty(most, np.int64) for _ in range(3))
    number, in_block = (np.empty(most, np.int32) for _ in range(2))
    count = loops.cut(begins, blocks, first, size, place, skipped, length, number, in_block)
    must_fit(count >= 0)
    return _Cut(place[:count], skipped[:count], length[:count], number[:count], in_block[:count])
