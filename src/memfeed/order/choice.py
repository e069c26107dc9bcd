"""The orders that a loader's arguments choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from memfeed.order.epoch_orders import EpochOrders
from memfeed.order.mixture import Mixed
from memfeed.order.orders import WINDOW_BLOCKS, BlockOrder, Order, Sequential, Shuffled
from memfeed.order.pieces import RankCut, RankPieces
from memfeed.random import derive

BLOCK_BYTES = 1 << 20  # of one block of rows: a disk reads it at full speed
BLOCK_ROWS = 1024  # at most


@dataclass(frozen=True)
class Blocks:
    """Shuffle blocks of neighbouring rows, for stores beyond memory or of more than 10^8 rows: `Loader(shuffle=)`.

    Blocks come in random order, and the rows of 128 blocks at a time are mixed. This needs memory for these rows only,
    and reads a disk in long runs. `memfeed.order.orders.BlockOrder` says how far it is from a uniform permutation.

    Args:
        rows: rows of a block; None takes as many as make 1 MiB, at most 1,024.
    """

    rows: int | None = None


Shuffle = bool | Blocks


def default_block_rows(row_bytes: int) -> int:
    """Return how many rows make a block of 1 MiB, at most 1,024."""
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(row_bytes, 1)))


def mixed_rows(shuffle: Shuffle, n: int, block_rows: int, chunk_rows: int) -> int:
    """Return among how many of ``n`` rows an order mixes, 0 if it leaves them in order.

    Blocks that are smaller than the ``chunk_rows`` that are fetched together leave the rest of each chunk for later.
    """
    if isinstance(shuffle, Blocks) and block_rows >= chunk_rows:
        return min(n, WINDOW_BLOCKS * block_rows)
    return n if shuffle else 0


def orders_of(n: int, shuffle: Shuffle, seed: int, block_rows: int) -> EpochOrders:
    """Return the orders of ``n`` rows, by epoch."""
    if isinstance(shuffle, Blocks):
        return EpochOrders(lambda epoch: BlockOrder(n, seed, epoch, block_rows), None)
    return EpochOrders(partial(Shuffled, n, seed), n) if shuffle else EpochOrders(lambda epoch: Sequential(n), None)


def piece_orders(n: int, shuffle: Shuffle, seed: int, block_rows: int, cut: RankCut) -> EpochOrders:
    """Return the orders of ``n`` rows that are cut into pieces; those of one piece are `orders_of`."""
    if cut.pieces == 1:
        return orders_of(n, shuffle, seed, block_rows)
    in_blocks = isinstance(shuffle, Blocks)

    def make(epoch: int) -> Order:
        return RankPieces(n, seed, epoch, shuffle=bool(shuffle), in_blocks=in_blocks, block_rows=block_rows, cut=cut)

    return EpochOrders(make, None)


def mixed_orders(
    sizes: Sequence[int], counts: Sequence[int], shuffle: Shuffle, seed: int, block_rows: int
) -> EpochOrders:
    """Return the orders that mix sources of ``sizes`` rows: ``counts[i]`` rows of source i in each epoch."""
    passes = [orders_of(n, shuffle, derive("source", seed, i), block_rows) for i, n in enumerate(sizes)]

    def make(epoch: int) -> Order:
        return Mixed(sizes, counts, epoch, passes, derive("mixture", seed, epoch) if shuffle else None)

    return EpochOrders(make, None)
