"""The positions of an epoch that each rank reads at each step, or the piece of its rows that a rank reads alone.

The global batch of a step is ``batch_size * world_size`` consecutive positions; rank r reads the r-th slice of it. So a
step reads the same rows for any number of ranks with the same global batch, and a position in the epoch is one number:
how many rows all ranks together have read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from memfeed.order.orders import Bijection, BlockOrder, InTurn, Order, Rows, Sequential, Shuffled
from memfeed.random import derive

HELD_BLOCKS = 4096
LEAST_BLOCKS = 128  # of one piece, where it has as many rows: a piece is a random sample of the store's parts


class RankCut(NamedTuple):
    """How an epoch is cut: ``pieces``, one for each rank, of which each gives ``batch_size`` rows at a step."""

    pieces: int
    batch_size: int


class RankPieces:
    """Random blocks of neighbouring rows for each rank, in every epoch other ones, and the rows of a rank shuffled.

    The blocks of all rows are put in random order and cut into pieces that differ by at most one row. At step k, rank
    r of the `RankShards` that deal this order reads the next ``batch_size`` rows of piece r. The rows that make no
    whole step come at the end, those of piece 0 first. Each row comes once.

    How far it is from uniform: with ``shuffle=True`` only the rows of one block are not dealt independently. They
    come to one rank in an epoch, where a uniform shuffle would spread them; their order there, and the ranks of
    rows of two blocks, are uniform (the latter up to a pseudo-random permutation). A block has ``block_rows`` rows, or
    fewer: a piece has at least 128 blocks if it has so many rows. And each step takes exactly ``batch_size`` rows
    of each piece. With `Blocks` the rows of 128 blocks of a piece at a time are mixed, in memory that does not depend
    on n. With False the pieces are the rows in turn, the same in every epoch.
    """

    def __init__(
        self, n: int, seed: int, epoch: int, *, shuffle: bool, in_blocks: bool = False, block_rows: int, cut: RankCut
    ) -> None:
        self.n, self.cut = n, cut
        self._shuffle, self._in_blocks, self._seed, self._epoch = shuffle, in_blocks, seed, epoch
        self.block_rows = max(1, min(block_rows, n // (cut.pieces * LEAST_BLOCKS)))
        self._key = derive("pieces", seed, epoch, self.block_rows, cut.pieces)
        self._count = -(-n // self.block_rows)
        self._place = Bijection(self._count, self._key) if shuffle else InTurn()
        self._missing = self._count * self.block_rows - n  # rows that the last block lacks; it can come at any place
        self._short = int(self._place.inverse(np.array([self._count - 1]))[0]) if n else 0
        self._size, self._larger = divmod(n, cut.pieces)
        self._drawn: dict[int, Order] = {}
        self._held: dict[int, tuple[int, Rows]] = {}

    def __call__(self, start: int, stop: int) -> Rows:
        """Return the rows at positions ``start`` to ``stop`` of the epoch, int64."""
        return self.at(np.arange(start, min(stop, self.n)))

    def at(self, places: Rows) -> Rows:
        """Return the rows at these positions, int64 [k]. Draws the order of the pieces that they are in, once."""
        piece, local = self._dealt(places)
        rows = np.empty(len(places), np.int64)
        for one in np.unique(piece).tolist():
            chosen = np.flatnonzero(piece == one)
            wanted = local[chosen]
            low, high = int(wanted.min()), int(wanted.max())
            mixed = self._order(one)(low, high + 1)[wanted - low].astype(np.int64)
            rows[chosen] = self._rows(one, self._begin(one) + mixed)
        return rows

    def rows_of(self, piece: int) -> Rows:
        """Return the rows of a piece, ascending, int64 [k]."""
        begin, end = self._begin(piece), self._begin(piece + 1)
        if begin == end:
            return np.empty(0, np.int64)
        first, last = self._block_at(np.array([begin, end - 1])).tolist()
        places = np.arange(first, last + 1)
        edges = np.append(self._block_begin(places), end)
        starts = self._place(places) * self.block_rows
        starts[0] += begin - edges[0]
        edges[0] = begin
        lengths, ascending = np.diff(edges), np.argsort(starts)
        starts, lengths = starts[ascending], lengths[ascending]
        return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(end - begin)

    def _begin(self, piece: int) -> int:
        """Return where a piece begins in the line of all blocks."""
        return piece * self._size + min(piece, self._larger)

    def _dealt(self, places: Rows) -> tuple[Rows, Rows]:
        """Return the piece of each position, and the position in that piece."""
        pieces, batch_size = self.cut
        stride = pieces * batch_size
        whole = self.n // stride
        step, within = np.divmod(places, stride)
        piece, local = within // batch_size, step * batch_size + within % batch_size
        size, more = divmod(self.n - whole * stride, pieces)
        left = places - whole * stride
        in_larger = left < more * (size + 1)
        last_piece = np.where(in_larger, left // (size + 1), more + (left - more * (size + 1)) // max(size, 1))
        last_local = whole * batch_size + left - (last_piece * size + np.minimum(last_piece, more))
        return np.where(left < 0, piece, last_piece), np.where(left < 0, local, last_local)

    def _order(self, piece: int) -> Order:
        """Return the order of the rows of a piece, by their positions in its part of the line."""
        if piece not in self._drawn:
            count, seed = self._begin(piece + 1) - self._begin(piece), derive("piece", self._seed, piece)
            order: Order = Sequential(count)
            if self._in_blocks:  # which are in random order already
                order = BlockOrder(count, seed, self._epoch, self.block_rows, in_turn=True)
            elif self._shuffle:
                order = Shuffled(count, seed, self._epoch)
            self._drawn[piece] = order
        return self._drawn[piece]

    def _rows(self, piece: int, line: Rows) -> Rows:
        """Return the rows at positions of a piece's part of the line, int64 [k]."""
        place = self._block_at(line)
        low, high = int(place.min()), int(place.max())
        first, blocks = self._held.get(piece, (0, line[:0]))
        if not first <= low <= high < first + len(blocks):
            if self._in_blocks:
                first, last = low, max(high, low + HELD_BLOCKS)
            else:
                first, last = self._block_at(np.array([self._begin(piece), self._begin(piece + 1) - 1])).tolist()
            blocks = self._place(np.arange(first, min(last + 1, self._count)))
            self._held[piece] = first, blocks
        rows: Rows = blocks[place - first] * self.block_rows + line - self._block_begin(place)
        return rows

    def _block_at(self, line: Rows) -> Rows:
        """Return the place of the block that holds each position of the line."""
        after_short = line >= self._short * self.block_rows + self.block_rows - self._missing
        place: Rows = (line + self._missing * after_short) // self.block_rows
        return place

    def _block_begin(self, place: Rows) -> Rows:
        begin: Rows = place * self.block_rows - self._missing * (place > self._short)
        return begin


LastRows = Literal["repeat", "uneven", "drop", "pad"]
"""What ranks do with the rows left at the end of an epoch, which are fewer than a global batch."""


class StepRun(NamedTuple):
    """Consecutive steps that are alike.

    At step j of ``steps`` this rank reads ``size`` positions from ``start + j * stride``; then all ranks together have
    read ``row + (j + 1) * stride`` rows (at most n).
    """

    row: int
    start: int
    size: int
    steps: int
    stride: int


@dataclass(frozen=True)
class RankShards:
    """The share of each rank in an epoch of ``rows``.

    Args:
        rows: rows of the epoch.
        batch_size: rows of a batch of one rank.
        rank, world_size: which share this is, of how many.
        last: what becomes of the rows left at the end, fewer than a global batch. "repeat": every rank gets the same
            number of them, filled up with positions beyond the end (which stand for the first rows of the epoch).
            "uneven": ranks differ by at most one row, and some may get none. "drop": they are left out. "pad": every
            rank gets a whole batch, filled up with positions beyond the end.
    """

    rows: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    last: LastRows = "repeat"

    @property
    def stride(self) -> int:
        """The number of rows that all ranks read together at a step."""
        return self.batch_size * self.world_size

    def end(self, row: int = 0) -> int:
        """Return the row where an epoch that begins (or resumes) at ``row`` ends."""
        return self.rows - (self.rows - row) % self.stride if self.last == "drop" else self.rows

    def count(self, row: int = 0) -> int:
        """Return the number of steps from ``row`` to the end at which this rank gets a batch."""
        full, left = divmod(max(self.rows - row, 0), self.stride)
        if self.last == "drop" or not left:
            return full
        return full + (self.last != "uneven" or self.rank < left)

    def runs(self, row: int, most: int) -> Iterator[StepRun]:
        """Yield the steps from ``row`` on, at most ``most`` at a time; the last by itself if it differs."""
        while (full := (self.rows - row) // self.stride) > 0:
            count = min(full, most)
            yield StepRun(row, row + self.rank * self.batch_size, self.batch_size, count, self.stride)
            row += count * self.stride
        left = self.rows - row
        if left <= 0 or self.last == "drop":
            return
        size, more = divmod(left, self.world_size)
        if self.last == "uneven":
            mine, start = size + (self.rank < more), row + self.rank * size + min(self.rank, more)
        else:
            mine = self.batch_size if self.last == "pad" else size + (more > 0)
            start = row + self.rank * mine
        if mine:
            yield StepRun(row, start, mine, 1, self.stride)

    @property
    def repeated(self) -> int:
        """The number of rows that are read a second time at the end of an epoch."""
        return -self.rows % self.world_size if self.last == "repeat" else 0
