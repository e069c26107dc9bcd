"""Where each column lives while a loader reads it: the device's memory, page-locked memory, or its file's map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from memfeed.errors import LoaderError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Schema
from memfeed.store.bulk import copy_rows
from memfeed.store.columns import Column, FixedColumn, InMemory, JoinedFixed, KeptFixed, Pieces
from memfeed.system import machine
from memfeed.system.progress import Progress
from memfeed.system.units import format_bytes
from memfeed.transfer.streams import Streams

Where = Literal["device", "pinned", "mapped"]
Asked = Literal["auto", "device", "pinned", "mapped"]
Placing = Asked | Mapping[Any, Asked]

RESERVE = 0.5  # of the device's memory is left for the model, by "auto"
# of the memory that is free is used for page-locked columns at most, by "auto"; by a process for each device of the
# machine together, since they start at the same time and see the same memory
SHARE = 0.5
SLOW_SECONDS = 2.0  # a load that takes longer shows a bar


class Placed(NamedTuple):
    """Where a column lives, why there, and the bytes it takes."""

    where: Where
    why: str
    nbytes: int = 0


@dataclass(frozen=True)
class Room:
    """Bytes that are free: on the device (``total`` there are), where there is one with streams of ours, and in RAM,
    which the processes of ``devices`` share."""

    device: int | None
    total: int
    host: int
    devices: int = 1

    @classmethod
    def now(cls, streams: Streams | None) -> Room:
        """As it is at the moment."""
        if streams is None:
            return cls(None, 0, machine.memory_limit())
        return cls(*streams.room(), machine.memory_limit(), streams.count())


def asked_of(placement: Any, schema: Schema, device: torch.device | None) -> list[Asked]:
    """What is asked for each field. Raises LoaderError for what cannot be, FieldError for a field that is not there."""
    asked: list[Asked] = ["auto"] * len(schema)
    each = placement.items() if isinstance(placement, Mapping) else [(None, placement)]
    for which, where in each:
        if where not in get_args(Asked):
            raise LoaderError(
                f'found placement={placement!r}; expected "auto", "device", "pinned" or "mapped", or {{field: one of '
                "these}"
            )
        if where in ("device", "pinned") and device is not None and device.type not in ("cpu", "cuda"):
            raise LoaderError(f'found placement={placement!r} for {device}; expected "mapped": only CUDA has others')
        for number in range(len(schema)) if which is None else schema.under(which):
            field = schema.fields[number]
            if which is not None and where in ("device", "pinned") and field.kind != "fixed":
                raise LoaderError(
                    f"found placement {where!r} for field {field.name}, which is {field.describe()}; expected a field "
                    "whose rows have one shape: leave this one mapped"
                )
            asked[number] = where
    return asked


def choose(names: Sequence[str], sizes: Sequence[int | None], asked: Sequence[Asked], room: Room) -> list[Placed]:
    """Where columns of these sizes (bytes; None for rows that differ in size) go.

    Every field of a batch is read as often as the others, so the largest save the most and come first. Raises
    LoaderError where what is asked for does not fit.
    """
    chosen: dict[int, Placed] = {}
    device, host = room.device, room.host

    def take(number: int, where: Where, why: str) -> None:
        nonlocal device, host
        size = sizes[number] or 0
        if where == "device" and device is not None:
            device -= size
        elif where in ("device", "pinned"):
            host -= size
        chosen[number] = Placed(where, why, size)

    largest_first = sorted(range(len(sizes)), key=lambda number: -(sizes[number] or 0))
    for number in largest_first:
        where, size = asked[number], sizes[number]
        if where == "auto" or size is None:
            continue
        free = device if where == "device" and device is not None else host
        if where != "mapped" and size > free:
            others = choose(names, sizes, ["auto"] * len(sizes), room)
            raise LoaderError(
                f"found placement {where!r} for field {names[number]}, which needs {format_bytes(size)}, with "
                f'{format_bytes(max(free, 0))} free; expected it to fit: placement="auto" would choose '
                f'"{others[number].where}"'
            )
        take(number, where, "asked for")
    for number in largest_first:
        size = sizes[number]
        if number in chosen or size is None:
            continue
        if device is None:
            take(number, "mapped", "batches do not go to a CUDA device")
        elif size <= device - int(RESERVE * room.total):
            kept = format_bytes(int(RESERVE * room.total))
            take(number, "device", f"{format_bytes(size)} fit beside the {kept} left for the model")
        elif size <= SHARE * host / room.devices:
            take(number, "pinned", f"{format_bytes(size)} are too much for the device, and fit into free memory")
        else:
            take(number, "mapped", f"{format_bytes(size)} are too much for the device and for half of free memory")
    return [chosen.get(number, Placed("mapped", "rows differ in size")) for number in range(len(sizes))]


@dataclass(frozen=True)
class Placement:
    """Columns where they were placed.

    Args:
        placed: where each is, and why.
        columns: what the CPU gathers from: those of the store, or copies in its memory.
        tables: those that the device picks rows from itself, [m, *shape] by number.
        kept: which rows the copies hold, ascending; None for all.
    """

    placed: Sequence[Placed]
    columns: Sequence[Column]
    tables: Mapping[int, torch.Tensor]
    kept: Int64Array | None

    def index(self, ids: Int64Array) -> torch.Tensor | None:
        """Rows by their places in the tables, int [k]; None without tables."""
        if not self.tables:
            return None
        return torch.from_numpy(ids if self.kept is None else np.searchsorted(self.kept, ids))


def sizes_of(columns: Sequence[Column], rows: int) -> list[int | None]:
    """Bytes of so many rows of each column; None where they differ in size."""
    return [_row_bytes(column, rows) for column in columns]


def _row_bytes(column: Column, rows: int) -> int | None:
    placeable = isinstance(column, FixedColumn | JoinedFixed | Pieces) and column.field.kind == "fixed"
    return (rows * column.field.row_bytes or None) if placeable else None


def place(
    columns: Sequence[Column], placed: Sequence[Placed], rows: Int64Array, whole: bool, streams: Streams | None
) -> Placement:
    """Loads columns to where they belong; ``rows`` (ascending) are those that will be read.

    A column that meets the end of memory stays a rung below: page-locked, or mapped.
    """
    placed, there, tables = list(placed), list(columns), {}
    total = sum(len(rows) * columns[n].field.row_bytes for n, one in enumerate(placed) if one.where != "mapped")
    with Progress("placing columns", total, unit="B", shown=total > 0, delay_seconds=SLOW_SECONDS) as bar:
        for number, column in enumerate(columns):
            while placed[number].where != "mapped":
                try:
                    copy, table = _load(column, placed[number].where, rows, whole, streams, bar)
                    break
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                placed[number] = lower(placed[number])
            else:
                continue
            there[number] = copy
            if table is not None:
                tables[number] = table
    return Placement(placed, there, tables, None if whole else rows)


def _load(
    column: Column, where: Where, rows: Int64Array, whole: bool, streams: Streams | None, bar: Progress
) -> tuple[Column, torch.Tensor | None]:
    """The column for the CPU to gather from, and the table where the device can pick rows itself."""
    field, shape = column.field, (len(rows), *column.field.row_shape)
    if where == "device" and streams is not None:
        with streams.aside():  # the stream that will read it: only then is its memory not reused too early
            table = torch.empty(shape, dtype=field.torch_dtype, device=streams.device)
            copy_rows(column, rows, table, bar)
        return column, table
    if streams is None:
        data = torch.empty(shape, dtype=field.torch_dtype)
    else:
        data = streams.page_locked(len(rows) * field.row_bytes).view(field.torch_dtype).view(shape)
    copy_rows(column, rows, data, bar)
    here = InMemory(field, data) if whole else KeptFixed(field, data, rows)
    return here, None if streams is None else _seen(data, streams)


def _seen(data: torch.Tensor, streams: Streams) -> torch.Tensor | None:
    """Page-locked rows as the device sees them; None where it does not, and batches are gathered by the CPU."""
    flat = data.reshape(-1).view(torch.uint8)
    try:
        seen = streams.seen_from_device(flat)
        return seen.view(data.dtype).view(data.shape) if torch.equal(seen[:64].cpu(), flat[:64]) else None
    except (RuntimeError, TypeError):
        return None


def lower(placed: Placed) -> Placed:
    """A rung below, after memory has run out; two where the lower one has no room either."""
    fits = placed.nbytes <= SHARE * machine.memory_limit()  # else the system may kill the process
    rung: Where = "pinned" if placed.where == "device" and fits else "mapped"
    return placed._replace(where=rung, why=f"out of memory as {placed.where!r}")


def lowered(placed: Sequence[Placed]) -> list[Placed] | None:
    """All columns of the highest rung one rung below; None where all are mapped."""
    for where in ("device", "pinned"):
        if any(one.where == where for one in placed):
            return [lower(one) if one.where == where else one for one in placed]
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the device or for page-locking."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )
