"""The order of the documents of a packed store, in each epoch of a loader that shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from memfeed.order.choice import Shuffle
from memfeed.order.epoch_orders import EpochOrders
from memfeed.order.orders import Shuffled
from memfeed.random import derive
from memfeed.store.column import Column
from memfeed.store.store import Store


class DocumentOrder:
    """Change the order of the documents of a packed store in every epoch.

    This needs ``shuffle=True`` and a store with all of its blocks.

    A view of some blocks keeps the stored order of the documents: in another order its blocks would hold tokens of the
    blocks that were left out. So does ``shuffle=Blocks()``, which is for reading a disk in long runs.
    """

    def __init__(self, store: Store, shuffle: Shuffle) -> None:
        packed = [column.packing for column in store._view.columns if column.packing is not None]
        self._count = packed[0].document_count if packed and shuffle is True and store._view.has_all_rows else 0
        self._made: tuple[int, EpochOrders] | None = None

    def orders(self, seed: int) -> list[EpochOrders]:
        """Return the orders of the documents by epoch under ``seed``, in a list; an empty one if they have none."""
        if not self._count:
            return []
        if self._made is None or self._made[0] != seed:
            drawn = partial(Shuffled, self._count, derive("documents", seed))
            self._made = seed, EpochOrders(drawn, self._count)
        return [self._made[1]]

    def columns(self, columns: Sequence[Column], epoch: int, seed: int) -> list[Column] | None:
        """Return ``columns`` as they are in an epoch; None where they are the same in every epoch."""
        for orders in self.orders(seed):
            from memfeed.store.packed import in_order  # most stores have no documents

            return in_order(columns, orders(epoch)(0, self._count))
        return None
