"""Where each column is kept while a loader reads it: the device's memory, page-locked memory, or its file's map.

With `placement="nvjpeg"` a GPU decodes the rows of a JPEG field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from memfeed.errors import CorruptStoreError, LoaderError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Schema
from memfeed.store.bulk import copy_rows
from memfeed.store.coded_columns import CodedColumn
from memfeed.store.columns import Column, InMemoryColumn, RowSubsetColumn
from memfeed.system import machine
from memfeed.system.messages import format_bytes
from memfeed.system.progress import SLOW_SECONDS, Progress
from memfeed.transfer import nvjpeg
from memfeed.transfer.page_locked import is_out_of_memory
from memfeed.transfer.streams import Copy, Streams, copies_to
from memfeed.transfer.transfer import TableRows

Where = Literal["device", "pinned", "mapped", "nvjpeg"]
PlacementRequest = Literal["auto", "device", "pinned", "mapped", "sharded", "nvjpeg"]
PlacementOption = PlacementRequest | Mapping[Any, PlacementRequest]

RESIDENT = ("device", "pinned")
"""The places that hold the rows of a column. "nvjpeg" leaves them in the map: the device decodes those of a batch."""
RESERVE = 0.5  # "auto" leaves this part of the device's memory to the model
# "auto" takes at most this part of the free RAM for page-locked columns, for the processes of all devices together:
# they start at the same time and see the same free memory
SHARE = 0.5


class ColumnPlacement(NamedTuple):
    """The place of a column, the reason for it, and the bytes it takes."""

    where: Where
    why: str
    nbytes: int = 0


@dataclass
class FreeMemory:
    """Bytes that are free on the device and in RAM.

    Args:
        device: free on the device; None without a device whose streams we use.
        total: all memory of the device.
        host: free RAM, which the processes of ``devices`` share.
        devices: devices of this kind in the machine.
    """

    device: int | None
    total: int
    host: int
    devices: int = 1

    @classmethod
    def now(cls, streams: Streams | None) -> FreeMemory:
        """Return the memory that is free now."""
        if streams is None:
            return cls(None, 0, machine.memory_limit())
        return cls(*streams.memory_info(), machine.memory_limit(), streams.device_count())

    def at(self, where: Where) -> int:
        """Return the bytes that are free at a place."""
        return self.device if where == "device" and self.device is not None else self.host

    def taken(self, placement: ColumnPlacement) -> ColumnPlacement:
        """Return the placement of a column, whose bytes are not free any more."""
        if placement.where == "device" and self.device is not None:
            self.device -= placement.nbytes
        elif placement.where in RESIDENT:
            self.host -= placement.nbytes
        return placement

    def automatic(self, size: int) -> ColumnPlacement:
        """Return the place of a column of this size as "auto" chooses it."""
        reserve = int(RESERVE * self.total)
        shown = format_bytes(size)
        if self.device is None:
            return ColumnPlacement("mapped", "batches do not go to a CUDA device", size)
        if size <= self.device - reserve:
            return ColumnPlacement("device", f"{shown} fit beside the {format_bytes(reserve)} left for the model", size)
        if size <= SHARE * self.host / self.devices:
            return ColumnPlacement("pinned", f"{shown} are too much for the device, and fit into free memory", size)
        return ColumnPlacement("mapped", f"{shown} are too much for the device and for half of free memory", size)


def placement_requests(
    placement: Any, columns: Sequence[Column], schema: Schema, device: torch.device | None
) -> list[PlacementRequest]:
    """Return the placement that is requested for each field.

    Raises LoaderError for a request that cannot be met, FieldError for a field that is not there.
    """
    requests: list[PlacementRequest] = ["auto"] * len(schema)
    pairs = list(placement.items()) if isinstance(placement, Mapping) else [(None, placement)]
    for which, where in pairs:
        if where not in get_args(PlacementRequest):
            raise LoaderError(
                f'found placement={placement!r}; expected "auto", "device", "pinned", "mapped", "sharded" or "nvjpeg", '
                "or {field: one of these}"
            )
        if where in ("device", "pinned", "sharded") and device is not None and device.type not in ("cpu", "cuda"):
            raise LoaderError(f'found placement={placement!r} for {device}; expected "mapped": only CUDA has others')
        for field_index in range(len(schema)) if which is None else schema.field_indices(which):
            field = schema.fields[field_index]
            if which is not None and where in ("device", "pinned", "sharded") and field.kind != "fixed":
                raise LoaderError(
                    f"found placement {where!r} for field {field.name}, which is {field.describe()}; expected a field "
                    "whose rows have one shape: leave this one mapped"
                )
            requests[field_index] = where
    if "nvjpeg" in requests:
        check_decoded(columns, requests, device)
    if "sharded" not in requests:
        return requests
    if not {where for _, where in pairs} <= {"sharded", "mapped"}:
        raise LoaderError(
            f'found placement={placement!r}; expected "sharded" beside "mapped" only: the rows that a rank keeps '
            "change with every epoch"
        )
    return ["sharded" if where == "sharded" else "mapped" for where in requests]


def choose(
    names: Sequence[str], sizes: Sequence[int | None], requests: Sequence[PlacementRequest], free: FreeMemory
) -> list[ColumnPlacement]:
    """Return a place for each column of these sizes (bytes; None for rows that differ in size).

    Every field of a batch is read as often as the others, so the largest columns save the most and come first. Raises
    LoaderError where a requested placement does not fit.
    """
    left = replace(free)
    placements = {at: ColumnPlacement("nvjpeg", "asked for") for at, one in enumerate(requests) if one == "nvjpeg"}
    largest_first = sorted(
        (field_index for field_index, size in enumerate(sizes) if size is not None), key=lambda at: -(sizes[at] or 0)
    )
    for field_index in largest_first:
        request, size = requests[field_index], sizes[field_index] or 0
        if request == "auto" or request == "nvjpeg":
            continue
        where: Where = "device" if request == "sharded" else request
        available = left.at(where)
        if where != "mapped" and size > available:
            automatic = choose(names, sizes, ["auto"] * len(sizes), free)
            raise LoaderError(
                f"found placement {request!r} for field {names[field_index]}, which needs {format_bytes(size)}, with "
                f'{format_bytes(max(available, 0))} free; expected it to fit: placement="auto" would choose '
                f'"{automatic[field_index].where}"'
            )
        why = "this rank's piece" if request == "sharded" else "asked for"
        placements[field_index] = left.taken(ColumnPlacement(where, why, size))
    for field_index in largest_first:
        if field_index not in placements:
            placements[field_index] = left.taken(left.automatic(sizes[field_index] or 0))
    ragged = ColumnPlacement("mapped", "rows differ in size")
    return [placements.get(field_index, ragged) for field_index in range(len(sizes))]


@dataclass(frozen=True)
class Placement:
    """Columns at their places.

    Args:
        placements: where each column is, and why.
        columns: what the CPU gathers from: those of the store, or copies in its memory.
        tables: the columns that the device picks rows from, [m, *shape], by field index.
        kept: which rows the table of a field holds, ascending; a table of all rows has no entry.
    """

    placements: Sequence[ColumnPlacement]
    columns: Sequence[Column]
    tables: Mapping[int, torch.Tensor]
    kept: Mapping[int, Int64Array]

    def index(self, ids: Int64Array) -> TableRows | None:
        """Return where rows are in each table, int [k], for windows [k, steps]; None without tables."""
        found: dict[int, torch.Tensor] = {}
        plain: torch.Tensor | None = None  # for all fields without windows: it is sent once
        for field_index in self.tables:
            column, kept = self.columns[field_index], self.kept.get(field_index)
            rows = column.base_rows(ids)
            if rows is not ids:
                found[field_index] = _table_rows(rows, kept)
            else:
                plain = found[field_index] = _table_rows(rows, kept) if plain is None else plain
        return found or None


def _table_rows(rows: Int64Array, kept: Int64Array | None) -> torch.Tensor:
    return torch.from_numpy(rows if kept is None else np.searchsorted(kept, rows))


def place(
    columns: Sequence[Column],
    placements: Sequence[ColumnPlacement],
    rows: Int64Array,
    streams: Streams | None,
) -> Placement:
    """Load the columns into their places. ``rows`` are those a loader reads, ascending.

    Where memory runs out, a column falls back to the next placement that needs less.
    """
    placements, there, tables, kept = list(placements), list(columns), {}, {}
    total = sum(one.nbytes for one in placements if one.where in RESIDENT)
    target = torch.device("cpu") if streams is None else streams.device
    progress = None if total else False
    with (
        Progress("placing columns", total, unit="B", progress=progress, delay_seconds=SLOW_SECONDS) as bar,
        copies_to(target, streams) as copy_to_device,
    ):
        for field_index, column in enumerate(columns):
            while placements[field_index].where in RESIDENT:
                placed, here = column.base, column.rows_needed(rows)
                is_whole = len(here) == placed.row_count
                try:
                    copy, table = _load(
                        placed, placements[field_index].where, here, is_whole, streams, bar, copy_to_device
                    )
                    break
                except (RuntimeError, MemoryError, OSError) as error:
                    if is_out_of_memory(error):
                        placements[field_index] = fall_back(placements[field_index])
                    elif placements[field_index].where == "pinned" and isinstance(error, RuntimeError):
                        # CUDA cannot lock memory here
                        placements[field_index] = ColumnPlacement("mapped", f"cannot be page-locked: {error}"[:200])
                    else:
                        raise
            else:
                continue
            there[field_index] = column.over(copy)
            if table is not None:
                tables[field_index] = table
                if not is_whole:
                    kept[field_index] = here
    return Placement(placements, there, tables, kept)


@torch.inference_mode(False)  # the columns outlive the caller's block
def _load(
    column: Column, where: Where, rows: Int64Array, whole: bool, streams: Streams | None, bar: Progress, to_device: Copy
) -> tuple[Column, torch.Tensor | None]:
    """Return the column for the CPU to gather from, and the table where the device can pick rows by itself."""
    field, shape = column.field, (len(rows), *column.field.row_shape)
    if where == "device" and streams is not None:
        with streams.on_side_stream():  # the stream that will read it: else its memory could be reused too early
            table = torch.empty(shape, dtype=field.torch_dtype, device=streams.device)
            copy_rows(column, rows, table, bar, to_device)
        return column, table
    if streams is None:
        data = torch.empty(shape, dtype=field.torch_dtype, device="cpu")
    else:
        data = streams.allocate_page_locked(len(rows) * field.row_bytes).view(field.torch_dtype).view(shape)
    copy_rows(column, rows, data, bar)
    here = InMemoryColumn(field, data) if whole else RowSubsetColumn(field, data, rows)
    return here, None if streams is None else _seen(data, streams)


def _seen(data: torch.Tensor, streams: Streams) -> torch.Tensor | None:
    """Return page-locked rows as a tensor of the device; None where it cannot read them, and the CPU gathers."""
    flat = data.reshape(-1).view(torch.uint8)
    try:
        seen = streams.device_view(flat)
        return seen.view(data.dtype).view(data.shape) if torch.equal(seen[:64].cpu(), flat[:64]) else None
    except (RuntimeError, TypeError):
        return None


def fall_back(placement: ColumnPlacement) -> ColumnPlacement:
    """Return the next placement that needs less memory: device, then pinned where it fits, then mapped."""
    fits = placement.nbytes <= SHARE * machine.memory_limit()  # else the system may kill the process
    where: Where = "pinned" if placement.where == "device" and fits else "mapped"
    return placement._replace(where=where, why=f"out of memory as {placement.where!r}")


def fallback(placements: Sequence[ColumnPlacement]) -> list[ColumnPlacement] | None:
    """Return the placements after all columns of the fastest place in use fell back; None where all are mapped."""
    for where in ("device", "pinned"):
        if any(one.where == where for one in placements):
            return [fall_back(one) if one.where == where else one for one in placements]
    return None


class DeviceDecoder:
    """Decode the rows of one column on a device.

    Only the bytes of the blobs go over the bus. Each header is compared with the field before, so that no blob makes
    the device take more memory than its field says.
    """

    def __init__(self, column: CodedColumn, device: torch.device) -> None:
        self._column, self._device = column, device
        self._layout = str(getattr(column.codec, "layout", "chw"))

    def __call__(self, ids: Int64Array) -> Any:
        """Return the leaf of a batch: uint8 [k, *shape], or a list of k images where their sizes differ."""
        field = self._column.field
        blobs = self._column.blobs(ids)
        try:
            images = [_arranged(image, self._layout) for image in nvjpeg.decode(blobs, self._device)]
        except RuntimeError as error:
            if is_out_of_memory(error):  # columns may make room
                raise
            raise CorruptStoreError(
                f"field {field.name}: nvJPEG refuses the rows {ids[:8].tolist()} ({error}); expected JPEG images, and "
                'torchcodec or torchvision with nvJPEG: run verify(), or read them with placement="mapped"'
            ) from error
        if field.kind != "fixed":
            return images
        if not images:
            return torch.empty((0, *field.row_shape), dtype=torch.uint8, device=self._device)
        return torch.stack(images)


def _arranged(image: torch.Tensor, layout: str) -> torch.Tensor:
    """Return an image [c, h, w] in the layout of its field."""
    if layout == "hwc":
        return image.permute(1, 2, 0).contiguous()
    return image[0] if layout == "hw" else image


def check_decoded(columns: Sequence[Column], requests: Sequence[str], device: torch.device | None) -> None:
    """Raise LoaderError for "nvjpeg" among ``requests`` where the rows of that column cannot be decoded on ``device``.

    Raises ModuleNotFoundError with the line to install if torchcodec and torchvision are missing.
    """
    for column, request in zip(columns, requests, strict=True):
        if request != "nvjpeg":
            continue
        stored, field = column.stored.field, column.field
        is_jpeg = isinstance(column, CodedColumn) and stored.coding is not None and stored.coding.codec == "jpeg"
        if not is_jpeg or field.kind not in ("fixed", "list") or field.optional:
            raise LoaderError(
                f'found placement "nvjpeg" for field {field.name}, which is {stored.describe()}; expected images that '
                "a store has as JPEG, of one size or of several heights and widths, and no windows: "
                'memfeed.cache(..., forms={"image": "jpeg:95"})'
            )
        if device is None or device.type != "cuda":
            raise LoaderError(
                f'found placement "nvjpeg" and device={device}; expected device="cuda", whose GPU decodes'
            )
        nvjpeg.require()
