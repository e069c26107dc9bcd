"""Batches on their way to a device: gathered into one page-locked slab, one copy, taken apart on arrival."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from memfeed.schema.jagged import nested
from memfeed.schema.tree import tensors_in
from memfeed.system.buffers import Lender, Pool
from memfeed.transfer.packing import ALIGNMENT
from memfeed.transfer.streams import Event, Streams
from memfeed.transfer.to_device import to_device

SLABS = 3  # one is filled, one crosses, one is late
KEPT_APART = 4  # a leaf smaller than this part of its slab gets memory of its own on the device
WIDE = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)


Arrive = Callable[[Any, "Event | None"], Any]


class Transfer(Protocol):
    """The way of batches to a device.

    Where ``slabs``, for each batch: ``begin``, gather its leaves into memory of ``lenders``, ``send`` them, do with
    them what may be done before the caller asks for the batch, ``mark``; all of it within ``aside``. In the caller's
    thread then ``arrive``, also where there are no slabs.
    """

    ahead: bool  # whether transforms may run before the caller asks for the batch
    slabs: bool

    @property
    def device(self) -> torch.device | None:
        """Where batches go; None where they stay."""

    def lenders(self, count: int) -> list[Lender]:
        """What to gather into: one for each column."""

    def begin(self) -> None:
        """Memory leased from now on belongs to the next batch; waits until there is some."""

    def send(self, leaves: Sequence[Any], index: torch.Tensor | None = None) -> list[Any]:
        """The leaves of one batch on the device, those of columns that live there picked by ``index`` (int [k])."""

    def aside(self) -> AbstractContextManager[Any]:
        """What is done on the device within the block waits for what was sent, and not for the caller."""

    def mark(self) -> Event | None:
        """What ``arrive`` has to wait for."""

    # both are functions of their own, which keep none of the columns alive: these may have to make room

    @property
    def current(self) -> Callable[[], object]:
        """Gives what ``arrive`` makes ready for: anything else needs another call."""

    @property
    def arrive(self) -> Arrive:
        """Makes a batch, or its leaves, ready for the caller."""


class SyncTransfer:
    """No streams: batches stay on the CPU (the twin of ``StreamTransfer`` there), or are moved when the caller asks for
    them, in its thread (MPS, XPU)."""

    slabs = False

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.ahead = device is None or device.type == "cpu"

    def lenders(self, count: int) -> list[Lender]:
        """See ``Transfer.lenders``: memory that comes back when the batch dies."""
        return [Pool() for _ in range(count)]

    def begin(self) -> None:
        """Nothing to wait for."""

    def send(self, leaves: Sequence[Any], index: torch.Tensor | None = None) -> list[Any]:
        """They stay where they are."""
        return list(leaves)

    def aside(self) -> AbstractContextManager[Any]:
        """There is one queue."""
        return nullcontext()

    def mark(self) -> None:
        """Nothing to wait for."""

    def current(self) -> None:
        """It is the same for all."""

    def arrive(self, batch: Any, event: Event | None) -> Any:
        """See ``Transfer.arrive``; waits for the copy."""
        return batch if self.device is None else to_device(batch, self.device, non_blocking=False)


class StreamTransfer:
    """A device with streams: one asynchronous copy a batch, while the device computes.

    Args:
        streams: of the device.
        tables: columns that live on the device or are seen from it, [n, *shape] by their numbers; ``send`` gives rows
            of them in place of the leaves of those numbers.
        slabs: how many batches may be between the gather and the end of their copy.
    """

    ahead, slabs = True, True

    def __init__(self, streams: Streams, tables: Mapping[int, torch.Tensor], slabs: int = SLABS) -> None:
        self._streams, self.device = streams, streams.device
        self._tables = {number: (_wide(table), table) for number, table in tables.items()}
        self._ring = deque(_Slab(streams) for _ in range(slabs))
        self._here = threading.local()  # the slab that is filled: a loader may be read by several iterators

    def lenders(self, count: int) -> list[Lender]:
        """See ``Transfer.lenders``."""
        return [self] * count

    def lease(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory in the slab of the batch that this thread gathers."""
        leased: torch.Tensor = self._here.slab.lease(shape, dtype)
        return leased

    def begin(self) -> None:
        """See ``Transfer.begin``."""
        slab = getattr(self._here, "slab", None)  # one is left where the batch before was not sent
        if slab is None:
            try:
                slab = self._ring.popleft()
            except IndexError:  # the threads of other iterators fill all of them
                slab = _Slab(self._streams)
        self._here.slab = slab
        slab.begin()

    def send(self, leaves: Sequence[Any], index: torch.Tensor | None = None) -> list[Any]:
        """See ``Transfer.send``; within ``aside``. Leaves that are no tensors stay as they are."""
        parts = [part for leaf in leaves for part in _parts(leaf)]
        slab: _Slab = self._here.slab
        arrived = iter(slab.cross(parts if index is None else [*parts, index]))
        made = [_rebuilt(leaf, arrived) for leaf in leaves]
        if index is not None:
            there = next(arrived)
            for number, (wide, table) in self._tables.items():
                rows = self._streams.select(wide, there)
                made[number] = rows.view(torch.uint8).view(table.dtype).view(len(there), *table.shape[1:])
        self._here.slab = None
        self._ring.append(slab)
        return made

    def aside(self) -> AbstractContextManager[Any]:
        """See ``Transfer.aside``."""
        return self._streams.aside()

    def mark(self) -> Event:
        """See ``Transfer.mark``."""
        return self._streams.mark()

    @property
    def current(self) -> Callable[[], object]:
        """See ``Transfer.current``: a stream."""
        return self._streams.current

    @property
    def arrive(self) -> Arrive:
        """See ``Transfer.arrive``: the caller's stream waits, the caller does not."""
        return partial(_arrive, self._streams)


class _Slab:
    """Page-locked memory for all that crosses with one batch, used again when its copy is done."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._pieces = [torch.empty(0, dtype=torch.uint8)]  # one, but for batches that are larger than all before
        self._used = [0]
        self._crossed: Event | None = None

    def begin(self) -> None:
        """Waits until the last copy has read it."""
        if self._crossed is not None:
            self._crossed.synchronize()
            self._crossed = None
        if len(self._pieces) > 1:
            self._pieces = [self._streams.page_locked(sum(map(len, self._pieces)))]
        self._used = [0]

    def lease(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory for one tensor of the batch."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        at = -(-self._used[-1] // ALIGNMENT) * ALIGNMENT
        if at + size > len(self._pieces[-1]):
            # what was leased lies in the other piece: the batch crosses in two, the next ones in one again
            self._pieces.append(self._streams.page_locked(max(size, len(self._pieces[-1]) // 2)))
            self._used.append(0)
            at = 0
        self._used[-1] = at + size
        return self._pieces[-1][at : at + size].view(dtype).view(tuple(shape))

    def cross(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """These tensors on the device; those that do not lie in the slab yet are copied into it."""
        shared = {id(part): part for part in parts}  # offsets, of jagged leaves of equal lengths
        places = {key: self._place(part) for key, part in shared.items()}
        there = [
            self._streams.copy(piece[:used]) if used else None
            for piece, used in zip(self._pieces, self._used, strict=True)
        ]
        made = {}
        for key, (number, at) in places.items():
            part, piece = shared[key], there[number]
            if piece is None:  # no bytes to copy
                made[key] = torch.empty_like(part, device=self._streams.device)
                continue
            flat = piece[at : at + part.nbytes]
            # who keeps the labels of an epoch must not keep its images
            flat = self._streams.copy(flat) if 0 < part.nbytes * KEPT_APART < len(piece) else flat
            # .data: views share a version counter, and a write to one leaf would forbid the backward of another
            made[key] = flat.view(part.dtype).view(part.shape).data
        self._crossed = self._streams.mark()
        return [made[id(part)] for part in parts]

    def _place(self, part: torch.Tensor) -> tuple[int, int]:
        """Which piece a tensor lies in, and where."""
        if not part.nbytes:
            return 0, 0
        for number, piece in enumerate(self._pieces):
            at = part.data_ptr() - piece.data_ptr()
            if 0 <= at < len(piece) and part.is_contiguous():
                return number, at
        leased = self.lease(part.shape, part.dtype).copy_(part)
        return len(self._pieces) - 1, leased.data_ptr() - self._pieces[-1].data_ptr()


def _wide(table: torch.Tensor) -> torch.Tensor:
    """Rows as the widest numbers that they are made of, [n, m]: a GPU copies uint8 one by one, these 16 bytes at a
    time."""
    row_bytes = math.prod(table.shape[1:]) * table.itemsize
    if not table.numel() or not table.is_contiguous():
        return table
    flat = table.reshape(-1).view(torch.uint8)
    for dtype in WIDE:
        if row_bytes % dtype.itemsize == 0 and flat.data_ptr() % dtype.itemsize == 0:
            return flat.view(dtype).view(len(table), -1)
    return table


def _arrive(streams: Streams, batch: Any, event: Event | None) -> Any:
    assert event is not None
    streams.arrive(event, (part for tensor in tensors_in(batch) for part in _parts(tensor)))
    return batch


def _parts(leaf: Any) -> Sequence[torch.Tensor]:
    """The dense tensors that a leaf of a batch consists of."""
    if isinstance(leaf, torch.Tensor):
        return (leaf.values(), leaf.offsets()) if leaf.is_nested else (leaf,)  # type: ignore[attr-defined]
    return [part for part in leaf if isinstance(part, torch.Tensor)] if isinstance(leaf, list) else ()


def _rebuilt(leaf: Any, parts: Iterator[torch.Tensor]) -> Any:
    """The same leaf of other tensors, in the order of ``_parts``."""
    if isinstance(leaf, torch.Tensor):
        return nested(next(parts), next(parts)) if leaf.is_nested else next(parts)
    if isinstance(leaf, list):
        return [next(parts) if isinstance(part, torch.Tensor) else part for part in leaf]
    return leaf
