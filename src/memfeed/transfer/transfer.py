"""Move batches to a device: gather each into a page-locked staging buffer, copy it, and view the leaves in the copy."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from memfeed.schema.containers import tensors_in
from memfeed.schema.jagged import jagged_tensor
from memfeed.system.buffers import Allocator, Pool
from memfeed.transfer.staging import StagingBuffer, small_columns
from memfeed.transfer.streams import Event, Streams
from memfeed.transfer.to_device import to_device

STAGING_BUFFERS = 3  # one is being filled, one is being copied, one is for a copy that is late
_ROW_DTYPES = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)  # the widest first


ReceiveBatch = Callable[[Any, "Event | None"], Any]
TableRows = Mapping[int, torch.Tensor]
"""By field index, the rows of a table that a batch has: int [k], or [k, steps] for windows."""


class Transfer(Protocol):
    """Moves batches to a device.

    If ``is_staged``, do for each batch, within ``on_side_stream``: ``begin_batch``; gather its leaves into memory of
    ``allocators``; ``send_batch``; any work that may be done before the caller asks for the batch; ``record_event``.
    In all cases call ``receive_batch`` in the caller's thread.
    """

    can_transform_ahead: bool  # True if transforms may run before the caller asks for the batch
    is_staged: bool  # True if batches are gathered into staging buffers

    @property
    def device(self) -> torch.device | None:
        """The device that batches are moved to; None if they stay where they are."""

    def allocators(self, column_count: int, row_bytes: Sequence[int | None] | None = None) -> list[Allocator]:
        """Return the memory to gather into, one allocator for each column.

        ``row_bytes`` says how many bytes a row of each column has, None where they differ; 0 if it is not gathered.
        """

    def lag(self, batches: int) -> Lag | None:
        """Return the `Lag` that keeps the device at most so many batches behind the caller, or None."""

    def begin_batch(self) -> None:
        """Use a free staging buffer for the memory that this thread leases from now on; block until one is free."""

    def send_batch(self, leaves: Sequence[Any], index: TableRows | None = None) -> list[Any]:
        """Return the leaves of one batch on the device.

        The leaves of columns that the device can read are rows of these columns, selected by ``index``.
        """

    def on_side_stream(self) -> AbstractContextManager[Any]:
        """Queue the device's work of the block after the copies, and not after the caller's work."""

    def record_event(self) -> Event | None:
        """Return the event that ``receive_batch`` has to wait for."""

    # These two return functions that keep no column alive: the caller's loader may have to free the columns.

    @property
    def current_stream(self) -> Callable[[], object]:
        """A function that returns the stream for which ``receive_batch`` makes a batch ready.

        Another stream needs another call of ``receive_batch``.
        """

    @property
    def receive_batch(self) -> ReceiveBatch:
        """A function that makes a batch, or its leaves, ready for the caller's stream and returns it."""


class SyncTransfer:
    """Batches without streams: they stay on the CPU, or are moved in the caller's thread on request (MPS, XPU).

    On the CPU it gives the same batches as `StreamTransfer`.
    """

    is_staged = False

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.can_transform_ahead = device is None or device.type == "cpu"

    def allocators(self, column_count: int, row_bytes: Sequence[int | None] | None = None) -> list[Allocator]:
        """Return pools, whose memory is reused after the batch has been deleted."""
        return [Pool() for _ in range(column_count)]

    def lag(self, batches: int) -> None:
        """Return None: batches are moved when the caller asks for them."""

    def begin_batch(self) -> None:
        """Do nothing: memory is always free."""

    def send_batch(self, leaves: Sequence[Any], index: TableRows | None = None) -> list[Any]:
        """Return the leaves as they are."""
        return list(leaves)

    def on_side_stream(self) -> AbstractContextManager[Any]:
        """Do nothing: there is one queue."""
        return nullcontext()

    def record_event(self) -> None:
        """Return None: there is nothing to wait for."""

    def current_stream(self) -> None:
        """Return None: all streams are the same."""

    def receive_batch(self, batch: Any, event: Event | None) -> Any:
        """Return the batch on the device, after its copy is done."""
        return batch if self.device is None else to_device(batch, self.device, non_blocking=False)


class StreamTransfer:
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
        # functions of the streams alone, which keep no column alive
        self.on_side_stream, self.record_event = streams.on_side_stream, streams.record_event
        self.current_stream = streams.current_stream
        self.receive_batch: ReceiveBatch = partial(_receive_batch, streams)

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
