"""Ranks that read a store at an address without its bytes: the loader's read-ahead, and the plan of `memfeed.remote`.

The order and the deal, which rows are asked for ahead (`loading.presence`), which chunks rows lie in, which chunk is
next, and which are joined into one request (`remote.rows`, `building.unit_queue`, `remote.ranges`) are the real ones. A
range that is asked for is there at once; `replay` gives each a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from memfeed.building.unit_queue import UnitQueue
from memfeed.loading.gather_tasks import tasks_of_order
from memfeed.loading.readahead import present_tasks
from memfeed.order.choice import Blocks, orders_of
from memfeed.order.pieces import RankCut, RankShards
from memfeed.remote.fetching import MOST_IN_FLIGHT
from memfeed.remote.ranges import MOST_CHUNKS, ByteRange, ChunkTable
from memfeed.remote.remote_supply import RowByteRanges
from memfeed.schema.fields import Field, Schema
from memfeed.schema.fields import Node as TreeNode
from memfeed.store.manifest import CHUNK_BYTES
from memfeed.store.row_supply import ReadRequest


class Data(NamedTuple):
    """A store of one column, and how it is read."""

    rows: int
    row_bytes: int = 4096
    batch_size: int = 256
    block_chunks: int = 1

    @property
    def block_rows(self) -> int:
        """Rows of a block: those of so many chunks, as `Loader` counts them for a store at an address."""
        return self.block_chunks * max(1, CHUNK_BYTES // self.row_bytes)


def order_of(data: Data, deal: str, ranks: int, shuffle: bool | str = "blocks", epoch: int = 0) -> Any:
    """Return the order of an epoch: "steps" deals each global batch to the ranks, "pieces" blocks of their own."""
    chosen = Blocks() if shuffle == "blocks" else bool(shuffle)
    if deal == "pieces":
        return orders_of(data.rows, chosen, 0, data.block_rows, RankCut(ranks, data.batch_size))(epoch)
    return orders_of(data.rows, chosen, 0, data.block_rows)(epoch)


def tasks_of(data: Data, order: Any, ranks: int, rank: int) -> Any:
    """Return the gathers of a rank from the middle of an epoch on, a batch each, as of a store that is being filled."""
    shards = RankShards(data.rows, data.batch_size, rank, ranks, "drop")
    middle = data.rows // 2 // shards.stride * shards.stride
    return tasks_of_order(order, shards, middle, None, 1, repeats=False)


class Node:
    """The ranks of a machine. They share a cache, which has room for all that they read."""

    def __init__(
        self, data: Data, deal: str, ranks: int, first_rank: int, count: int, shuffle: bool | str = "blocks"
    ) -> None:
        self.table = ChunkTable({"x.memmap": data.rows * data.row_bytes})
        self.present: set[int] = set()
        self.by_chunk: dict[int, int] = {}  # the request that brought each
        order = order_of(data, deal, ranks, shuffle)
        self.ranks = [Rank(self, data, tasks_of(data, order, ranks, first_rank + one)) for one in range(count)]

    def steps(self) -> Iterator[list[Step]]:
        """Yield what each rank does at a step, until one has no more batches."""
        while True:
            found = [rank.step() for rank in self.ranks]
            if any(one is None for one in found):
                return
            yield [one for one in found if one is not None]


class Step(NamedTuple):
    """What a rank asks for before a batch, and the ranges that the batch needs, by their numbers on the node."""

    asked: list[tuple[int, ByteRange]]
    needed: list[int]


class Rank:
    """One rank: a `RowSupply` whose requests are answered at once."""

    in_caller = False

    def __init__(self, node: Node, data: Data, tasks: Any) -> None:
        field = Field(path=("x",), name="x", stem="x", kind="fixed", dtype="uint8", shape=(data.row_bytes,))
        schema = Schema(fields=(field,), structure=TreeNode(kind="leaf"))
        self._node, self._asked, self._needed = node, list[tuple[int, ByteRange]](), list[int]()
        self._places = RowByteRanges(schema, data.rows, node.table, _no_column, self._are_absent)
        self._queue = UnitQueue(
            node.table.count, self._are_absent, units_of=self._places.chunks, span_of=node.table.span
        )
        view = SimpleNamespace(supply=self, reader=ReadRequest)
        store: Any = SimpleNamespace(_view=view, _backing=SimpleNamespace(masks_rows=False))
        self._batches = present_tasks(tasks, store, has_own_order=True)

    def step(self) -> Step | None:
        """Return what the next batch takes; None at the end of the epoch."""
        self._asked, self._needed = [], []
        is_there = next(self._batches, None) is not None
        self._take()
        return Step(self._asked, self._needed) if is_there else None

    def want(self, reader: ReadRequest, rows: Any) -> None:
        """See `RowSupply`. What is asked for together is taken together, by ``wait`` and ``step``."""
        self._queue.want(reader, rows)

    def wait(self, reader: ReadRequest, rows: Any) -> None:
        """See `RowSupply`."""
        self._queue.wait(reader, rows)
        chunks = self._places.record_chunks(reader, rows)
        self._queue.prioritise(chunks[self._are_absent(chunks)])
        self._take()
        assert not self._are_absent(chunks).any()
        self._needed += sorted({self._node.by_chunk[chunk] for chunk in chunks.tolist()})

    def forget(self, reader: ReadRequest) -> None:
        """See `RowSupply`."""
        self._queue.forget(reader)

    def _take(self) -> None:
        while len(found := self._queue.next_units(0.0, MOST_CHUNKS, MOST_IN_FLIGHT)):
            number = len(self._node.by_chunk)
            for chunk in found.tolist():
                self._node.present.add(chunk)
                self._node.by_chunk[chunk] = number
            self._queue.give_back(found, 0.0)
            self._asked.append((number, self._node.table.range_of(int(found[0]), int(found[-1]) + 1)))

    def _are_absent(self, chunks: Any) -> Any:
        return np.array([chunk not in self._node.present for chunk in chunks.tolist()], bool)


def _no_column(index: int) -> Any:
    raise AssertionError("a fixed column is not read to find its rows")


def replay(
    steps: list[list[Step]], nodes: int, step_seconds: float, seconds_of: Any, in_flight: int = MOST_IN_FLIGHT
) -> tuple[float, float]:
    """Give each request a time, on ``nodes`` nodes that all have the plan ``steps``, and times of their own.

    All ranks begin each step together, once the slowest has its batch. Returns the seconds to the first batch, and the
    time from there on over that of the steps alone. ``seconds_of`` draws the seconds of requests from their bytes.
    """
    busy = np.zeros((len(steps[0]), nodes, in_flight))  # when each connection of a rank is free
    ended: dict[int, Any] = {}
    now = first = 0.0
    every = np.arange(nodes)
    for number, ranks in enumerate(steps):
        for rank, step in enumerate(ranks):
            for request, fetched in step.asked:
                free = busy[rank].argmin(1)
                begins = np.maximum(now, busy[rank, every, free])
                ended[request] = busy[rank, every, free] = begins + seconds_of(fetched.stop - fetched.start, nodes)
        ready = max((float(ended[one].max()) for step in ranks for one in step.needed), default=0.0)
        now = max(now, ready)
        if not number:
            first = now
        now += step_seconds
    return first, (now - first) / (len(steps) * step_seconds)
