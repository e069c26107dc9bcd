"""Move batches to a device: gather each into a page-locked staging buffer, copy it, and view the leaves in the copy."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from memfeed.schema.containers import tensors_in
from memfeed.schema.jagged import jagged_tensor
from memfeed.system.buffers import Allocator, Pool
from memfeed.transfer.packing import ALIGNMENT
from memfeed.transfer.streams import Event, Streams
from memfeed.transfer.to_device import to_device

STAGING_BUFFERS = 3  # one is being filled, one is being copied, one is for a copy that is late
SMALL_FRACTION = 4  # a column is small if its rows are smaller than those of the largest column by this factor
GAP_BYTES = 64 * ALIGNMENT  # room between leaves
RAGGED_ROW_BYTES = 1024  # what a row of a ragged column is taken to have
_ROW_DTYPES = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)  # the widest first


ReceiveBatch = Callable[[Any, "Event | None"], Any]
TableRows = Mapping[int, torch.Tensor]
"""By field index, the rows of a table that a batch has: int [k], or [k, steps] for windows."""


class Transfer:
    """Moves batches to a device; this one without streams: they stay on the CPU, or are moved on request (MPS, XPU).

    If ``is_staged``, do for each batch, within ``on_side_stream``: ``begin_batch``; gather its leaves into memory of
    ``allocators``; ``send_batch``; any work that may be done before the caller asks for the batch; ``record_event``.
    In all cases call ``receive_batch`` in the caller's thread.

    Args:
        device: that batches are moved to; None if they stay where they are.

    Attributes:
        can_transform_ahead: True if transforms may run before the caller asks for the batch.
        is_staged: True if batches are gathered into staging buffers.
    """

    is_staged = False

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.can_transform_ahead = device is None or device.type == "cpu"

    def allocators(self, column_count: int, row_bytes: Sequence[int | None] | None = None) -> Sequence[Allocator]:
        """Return the memory to gather into, one allocator for each column: here pools, used again without the batch.

        ``row_bytes`` says how many bytes a row of each column has, None where they differ; 0 if it is not gathered.
        """
        return [Pool() for _ in range(column_count)]

    def lag(self, batches: int) -> Lag | None:
        """Return the `Lag` that keeps the device at most so many batches behind the caller; None without streams."""
        return None

    def begin_batch(self) -> None:
        """Use a free staging buffer for the memory that this thread leases from now on; block until one is free."""

    def send_batch(self, leaves: Sequence[Any], index: TableRows | None = None) -> list[Any]:
        """Return the leaves of one batch on the device; without streams as they are.

        The leaves of columns that the device can read are rows of these columns, selected by ``index``.
        """
        return list(leaves)

    def on_side_stream(self) -> AbstractContextManager[Any]:
        """Queue the device's work of the block after the copies, and not after the caller's work."""
        return nullcontext()

    def record_event(self) -> Event | None:
        """Return the event that ``receive_batch`` has to wait for."""
        return None

    # who holds one of these two methods keeps no column alive: the caller's loader may have to free the columns

    def current_stream(self) -> object:
        """Return the stream for which ``receive_batch`` makes a batch ready; another one needs another call of it."""
        return None

    def receive_batch(self, batch: Any, event: Event | None) -> Any:
        """Make a batch, or its leaves, ready for the caller's stream, and return it; without streams on the device."""
        return batch if self.device is None else to_device(batch, self.device, non_blocking=False)


class StreamTransfer(Transfer):
    """Batches to a device with streams: one asynchronous copy for each batch, while the device computes.

    Args:
        streams: of the device.
        tables: columns in memory that the device can read, [n, *shape], by field index; ``send_batch`` returns rows of
            them in place of the leaves of these fields.
        staging_buffers: how many batches may be between the gather and the end of their copy.
    """

    can_transform_ahead, is_staged = True, True

    def __init__(
        self, streams: Streams, tables: Mapping[int, torch.Tensor], staging_buffers: int = STAGING_BUFFERS
    ) -> None:
        self._streams, self.device = streams, streams.device
        self._tables = {field_index: (_as_wide_rows(table), table) for field_index, table in tables.items()}
        self._free = deque(StagingBuffer(streams) for _ in range(staging_buffers))
        self._local = threading.local()  # the buffer in use: several iterators may read one loader
        # of the streams alone
        self.on_side_stream = streams.on_side_stream  # type: ignore[method-assign]
        self.record_event = streams.record_event  # type: ignore[method-assign]
        self.current_stream = streams.current_stream  # type: ignore[method-assign]
        self.receive_batch = partial(_receive_batch, streams)  # type: ignore[method-assign]

    def allocators(self, column_count: int, row_bytes: Sequence[int | None] | None = None) -> list[Allocator]:
        """Return memory in the staging buffer of the batch that the calling thread gathers; see `StagingBuffer`."""
        sizes = [None] * column_count if row_bytes is None else row_bytes
        is_small = small_columns(sizes)
        region_bytes = [0, 0]  # of a row, in the region of large leaves and in that of small ones
        for small, size in zip(is_small, sizes, strict=True):
            region_bytes[small] += size or 0
        return [_ColumnAllocator(self._local, small, region_bytes[small]) for small in is_small]

    def lag(self, batches: int) -> Lag:
        """Return the `Lag` that keeps the device at most so many batches behind the caller."""
        return Lag(self._streams.record_use, batches)

    def begin_batch(self) -> None:
        """Take the oldest staging buffer and block until its copy is done."""
        buffer = getattr(self._local, "buffer", None)  # not None if the batch before could not be gathered
        if buffer is None:
            try:
                buffer = self._free.popleft()
            except IndexError:  # the threads of other iterators use all of them
                buffer = StagingBuffer(self._streams)
        self._local.buffer = buffer
        buffer.begin()

    def send_batch(self, leaves: Sequence[Any], index: TableRows | None = None) -> list[Any]:
        """Queue the copy of the leaves and return them on the device; leaves that are no tensors stay as they are."""
        parts = [part for leaf in leaves for part in _dense_parts(leaf)]
        buffer: StagingBuffer = self._local.buffer
        copies = iter(buffer.copy_to_device([*parts, *(index or {}).values()]))
        sent = [_with_parts(leaf, copies) for leaf in leaves]
        for field_index, device_index in zip(index or {}, copies, strict=True):
            wide, table = self._tables[field_index]
            rows = self._streams.select(wide, device_index.reshape(-1))
            shape = (*device_index.shape, *table.shape[1:])
            sent[field_index] = rows.view(torch.uint8).view(table.dtype).view(shape)
        self._local.buffer = None
        self._free.append(buffer)
        return sent


class _ColumnAllocator:
    """Memory for one column, in the staging buffer of the batch that the calling thread gathers."""

    def __init__(self, local: threading.local, is_small: bool, region_row_bytes: int) -> None:
        self._local, self._is_small, self._region_row_bytes = local, is_small, region_row_bytes

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See ``Allocator.allocate``."""
        buffer: StagingBuffer = self._local.buffer
        expected = shape[0] * self._region_row_bytes if len(shape) else 0
        return buffer.allocate(shape, dtype, is_small=self._is_small, expected_bytes=expected)


def _as_wide_rows(table: torch.Tensor) -> torch.Tensor:
    """View rows as the widest numbers that divide them, [n, m]: a GPU copies up to 16 bytes a number, of uint8 one."""
    row_bytes = math.prod(table.shape[1:]) * table.itemsize
    if not table.numel() or not table.is_contiguous():
        return table
    flat = table.reshape(-1).view(torch.uint8)
    for dtype in _ROW_DTYPES:
        if row_bytes % dtype.itemsize == 0 and flat.data_ptr() % dtype.itemsize == 0:
            return flat.view(dtype).view(len(table), -1)
    return table


def _receive_batch(streams: Streams, batch: Any, event: Event | None) -> Any:
    assert event is not None
    streams.wait_before_use(event, (part for tensor in tensors_in(batch) for part in _dense_parts(tensor)))
    return batch


def _dense_parts(leaf: Any) -> Sequence[torch.Tensor]:
    """Return the dense tensors of which a leaf of a batch consists."""
    if isinstance(leaf, torch.Tensor):
        return (leaf.values(), leaf.offsets()) if leaf.is_nested else (leaf,)  # type: ignore[attr-defined]
    return [part for part in leaf if isinstance(part, torch.Tensor)] if isinstance(leaf, list) else ()


def _with_parts(leaf: Any, parts: Iterator[torch.Tensor]) -> Any:
    """Return a leaf like ``leaf`` that consists of the next ``parts``, in the order of ``_dense_parts``."""
    if isinstance(leaf, torch.Tensor):
        return jagged_tensor(next(parts), next(parts), leaf) if leaf.is_nested else next(parts)
    if isinstance(leaf, list):
        return [next(parts) if isinstance(part, torch.Tensor) else part for part in leaf]
    return leaf


class Lag:
    """Keeps the device at most ``batches`` batches behind the one that is made next.

    A batch that the caller has dropped keeps its memory until the device has used it. A caller who queues work faster
    than the device does it would take the memory of one more batch with each step.

    Args:
        record_use: returns an event on the caller's current stream.
        batches: how many.
    """

    def __init__(self, record_use: Callable[[], Event], batches: int) -> None:
        self._record_use, self._batches = record_use, batches
        self._begun = 0
        self._taken: deque[tuple[int, Event]] = deque()

    def begin(self) -> int:
        """Wait until the device is near enough to make one more batch; return its number, for ``take``."""
        number = self._begun
        self._begun += 1
        while self._taken and self._taken[0][0] <= number - self._batches:
            self._taken.popleft()[1].synchronize()
        return number

    def take(self, number: int) -> None:
        """Note that the caller takes this batch now: when the device gets here, it has used all batches before."""
        self._taken.append((number, self._record_use()))


def small_columns(row_bytes: Sequence[int | None]) -> list[bool]:
    """Return True for each column that is small beside the largest one; None stands for rows that differ in size."""
    sizes = [RAGGED_ROW_BYTES if size is None else size for size in row_bytes]
    largest = max(sizes, default=0)
    return [size is not None and size * SMALL_FRACTION < largest for size in row_bytes]


class StagingBuffer:
    """Page-locked memory for all leaves of one batch, used again when its copies are done.

    Small leaves lie together in a region of their own, and cross in a copy of their own: a caller who keeps the labels
    of an epoch must not keep its images alive.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._large, self._small = _Region(streams), _Region(streams)
        self._copied: Event | None = None

    def begin(self) -> None:
        """Block until the last copies have read the buffer, then clear it."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        self._large.clear()
        self._small.clear()

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, *, is_small: bool = False, expected_bytes: int = 0
    ) -> torch.Tensor:
        """Return uninitialised memory for one leaf; ``expected_bytes`` is what all leaves of its region may need."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        region = self._small if is_small else self._large
        return region.allocate(nbytes, expected_bytes).view(dtype).view(tuple(shape))

    def copy_to_device(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Queue the copies of these tensors and return them on the device; those outside the buffer are added first."""
        by_id = {id(part): part for part in parts}  # jagged leaves of equal lengths share their offsets
        places = {key: self._place(part) for key, part in by_id.items()}
        copies = {id(region): region.copies() for region in (self._large, self._small)}
        sent = {}
        for key, part in by_id.items():
            place = places[key]
            if place is None:  # no bytes to copy
                sent[key] = torch.empty_like(part, device=self._streams.device)
                continue
            region, piece_index, start = place
            copied = copies[id(region)][piece_index]
            assert copied is not None
            # .data: views share a version counter, and a write to one leaf would forbid the backward of another
            sent[key] = copied[start : start + part.nbytes].view(part.dtype).view(part.shape).data
        self._copied = self._streams.record_event()
        return [sent[id(part)] for part in parts]

    def _place(self, part: torch.Tensor) -> tuple[_Region, int, int] | None:
        """Return where a tensor is stored: region, piece, first byte; copy it into the buffer if it is not there."""
        if not part.nbytes:
            return None
        for region in (self._large, self._small):
            found = region.find(part)
            if found is not None:
                return region, *found
        is_small = part.nbytes * SMALL_FRACTION < self._large.used_bytes
        leased = self.allocate(part.shape, part.dtype, is_small=is_small).copy_(part)
        region = self._small if is_small else self._large
        found = region.find(leased)
        assert found is not None
        return region, *found


class _Region:
    """Memory for leaves that cross in one copy; more than one piece only where a batch is larger than all before."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._pieces = [torch.empty(0, dtype=torch.uint8, device="cpu")]
        self._piece_bytes = [0]  # used of each piece

    @property
    def used_bytes(self) -> int:
        """The bytes leased since ``clear``."""
        return sum(self._piece_bytes)

    def clear(self) -> None:
        """Take all leases back. The pieces become one."""
        if len(self._pieces) > 1:
            total = sum(map(len, self._pieces))
            self._pieces = []  # the old ones are free before the new one is locked
            self._pieces = [self._streams.allocate_staging(total)]
        self._piece_bytes = [0]

    def allocate(self, nbytes: int, expected_bytes: int) -> torch.Tensor:
        """Return memory, uint8 [nbytes]."""
        start = -(-self._piece_bytes[-1] // ALIGNMENT) * ALIGNMENT
        if start + nbytes > len(self._pieces[-1]):
            # leased memory cannot move: a batch that is larger than expected takes two copies, the next ones one again
            size = max(nbytes, expected_bytes + (expected_bytes and GAP_BYTES), len(self._pieces[-1]))
            piece = self._streams.allocate_staging(size)
            if self._piece_bytes == [0]:
                self._pieces = [piece]
            else:
                self._pieces.append(piece)
                self._piece_bytes.append(0)
            start = 0
        self._piece_bytes[-1] = start + nbytes
        return self._pieces[-1][start : start + nbytes]

    def find(self, part: torch.Tensor) -> tuple[int, int] | None:
        """Return the piece in which a tensor lies, and its first byte there; None if it lies elsewhere."""
        for piece_index, piece in enumerate(self._pieces):
            start = part.data_ptr() - piece.data_ptr()
            if 0 <= start < len(piece) and part.is_contiguous():
                return piece_index, start
        return None

    def copies(self) -> list[torch.Tensor | None]:
        """Queue the copies of the used pieces."""
        return [
            self._streams.copy(piece[:used]) if used else None
            for piece, used in zip(self._pieces, self._piece_bytes, strict=True)
        ]
