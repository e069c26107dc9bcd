"""Copy all rows of a store to a device, or into existing tensors, chunk by chunk.

No more than a chunk of the store is in memory at a time, so a store larger than RAM can be copied to a larger device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch

from memfeed.errors import FieldError, StoreError, brief
from memfeed.schema.codec import Int64Array
from memfeed.schema.containers import leaves_with_paths
from memfeed.schema.fields import Field, Path, display
from memfeed.schema.jagged import batch_shape
from memfeed.schema.tensordicts import is_tensor_collection
from memfeed.store.columns import Column
from memfeed.store.gather import Gather
from memfeed.store.view import View
from memfeed.system.buffers import Fresh
from memfeed.system.messages import format_bytes
from memfeed.system.progress import SLOW_SECONDS, Progress
from memfeed.transfer.streams import Copy, copies_to, memory_info
from memfeed.transfer.to_device import check_device, to_device

CHUNK_BYTES = 64 << 20


class Unfilled(NamedTuple):
    """The keys that `Store.into` left out with ``strict=False``, named as by `torch.nn.Module.load_state_dict`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load(view: View, device: torch.device | str, *, progress: bool | None) -> Any:
    """Return one batch of all rows of a view on a device; see ``Store.to``."""
    columns, rows, title = view.columns, view.all_rows(), view.path.name
    target = check_device(device) or torch.device("cpu")
    needed = sum(_bytes(column, rows) for column in columns if column.layout == "dense")
    if target.type == "cuda" and needed > (free := memory_info(target)[0]):
        raise StoreError(
            f"{title}: found {format_bytes(free)} free on {target}; expected {format_bytes(needed)} for all rows: "
            "select() fields, or leave the store mapped and let a Loader move the batches"
        )
    offsets: dict[int, torch.Tensor] = {}
    leaves = []
    total = sum(_bytes(column, rows) for column in columns)
    with (
        Progress(f"{title} to {target}", total, unit="B", progress=progress, delay_seconds=SLOW_SECONDS) as bar,
        copies_to(target) as copy,
    ):
        for column in columns:
            if column.layout == "dense":
                leaf: Any = torch.empty(_shape(column, rows), dtype=column.field.torch_dtype, device=target)
                copy_rows(column, rows, leaf, bar, copy)
            elif column.field.kind == "jagged":
                leaf = _jagged(column, rows, target, offsets, bar, copy)
            else:
                leaf = to_device(Gather([column], [Fresh()])(rows)[0], target)
                bar.advance(_bytes(column, rows))
            leaves.append(leaf)
    return to_device(view.assemble_batch(leaves), target, non_blocking=False)  # a TensorDict says where it is


def into(view: View, dest: Any, *, strict: bool) -> Unfilled:
    """Fill the tensors in ``dest`` with all rows of a view; see ``Store.into``."""
    columns, rows, title = view.columns, view.all_rows(), str(view.path)
    targets = dict(_tensors(dest))
    pairs: list[tuple[Column, torch.Tensor]] = []
    missing, problems, used = [], [], set()
    for column in columns:
        key = _key(column.field, targets)
        if key is None:
            missing.append(column.field.name)
            continue
        used.add(key)
        target = targets[key]
        if column.layout != "dense":
            problems.append(
                f"{column.field.name}: found {column.field.describe()}; expected a field whose rows have one shape"
            )
            continue
        shape = _shape(column, rows)
        if tuple(target.shape) != shape or target.dtype != column.field.torch_dtype:
            problems.append(
                f"{column.field.name}: found {target.dtype} {list(target.shape)} to fill; expected "
                f"{column.field.torch_dtype} {list(shape)}"
            )
        pairs.append((column, target))
    unexpected = [display(key) for key in targets if key not in used]
    if strict and (missing or unexpected):
        raise FieldError(
            f"{title}: found no tensor for the fields {brief(missing, 80) if missing else 'none'}, and no field for "
            f"the tensors {brief(unexpected, 80) if unexpected else 'none'}; expected the same on both sides: select() "
            "fields, or pass strict=False to fill those that both have"
        )
    if problems:
        more = f"; and {len(problems) - 2} more" if len(problems) > 2 else ""
        raise FieldError(f"{title}: {'; '.join(problems[:2])}{more}")
    with torch.no_grad(), ExitStack() as stack:
        copies: dict[torch.device, Copy] = {}
        for column, target in pairs:
            first = int(rows[0]) if len(rows) else 0
            if _is_run(rows) and column.read(first, target):
                continue
            if target.device not in copies:
                copies[target.device] = stack.enter_context(copies_to(target.device))
            for part, chunk in _chunks(column, rows):
                copies[target.device](target[part], chunk)
    return Unfilled(missing, unexpected)


def copy_rows(
    column: Column, rows: Int64Array, out: torch.Tensor, bar: Progress, copy: Copy = torch.Tensor.copy_
) -> None:
    """Copy rows of one shape into ``out``, [len(rows), *shape] on any device, by ``copy``; see `copies_to`."""
    for part, chunk in _chunks(column, rows):
        copy(out[part], chunk)
        bar.advance(chunk.nbytes)


def _shape(column: Column, rows: Int64Array) -> tuple[int, ...]:
    return column.field.row_shape if column.row_count is None else (len(rows), *column.field.row_shape)


def _chunks(column: Column, rows: Int64Array) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield parts of ``rows`` of bounded size: the index of the part, and its values."""
    if column.row_count is None:
        yield ..., column.whole
        return
    step = max(1, CHUNK_BYTES // max(column.field.row_bytes, 1))
    gather = Gather([column], [Fresh()])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if _is_run(part) and column.whole is not None:
            chunk = column.whole[int(part[0]) : int(part[-1]) + 1]
        else:
            chunk = gather(part)[0]
        yield slice(start, start + len(part)), chunk


def _is_run(rows: Int64Array) -> bool:
    """Return True for consecutive rows, and for none."""
    return not len(rows) or (rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all()))


def _jagged(
    column: Column,
    rows: Int64Array,
    target: torch.device,
    shared: dict[int, torch.Tensor],
    bar: Progress,
    copy: Copy,
) -> torch.Tensor:
    """Return ``rows`` as one nested tensor. Fields of equal lengths share their offsets through ``shared``."""
    field = column.field
    located, dim = column.locate(rows), field.ragged_dim
    along, sizes = located.dims[:, dim], located.lengths
    ends = torch.from_numpy(np.concatenate([[0], along.cumsum()]))
    values = torch.empty(batch_shape(field, int(ends[-1])), dtype=field.torch_dtype, device=target)
    gather = Gather([column], [Fresh()])
    stops = np.searchsorted(sizes.cumsum(), np.arange(CHUNK_BYTES, int(sizes.sum()) + CHUNK_BYTES, CHUNK_BYTES)) + 1
    start = 0
    for stop in np.unique(stops.clip(max=len(rows))).tolist():
        chunk = gather(rows[start:stop])[0].values()
        copy(values.narrow(dim, int(ends[start]), int(ends[stop] - ends[start])), chunk)
        bar.advance(chunk.nbytes)
        start = stop
    known = shared.get(field.lengths_of) if field.lengths_of is not None else None
    offsets = known if known is not None and torch.equal(known.cpu(), ends) else ends.to(target)
    if field.lengths_of is not None:
        shared[field.lengths_of] = offsets
    low, high = (int(along.min()), int(along.max())) if len(along) else (0, 0)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim + 1, min_seqlen=low, max_seqlen=high)


def _bytes(column: Column, rows: Int64Array) -> int:
    if column.layout == "dense":
        return math.prod(_shape(column, rows)) * column.field.itemsize
    return column.locate(rows).nbytes if column.layout == "ragged" else 0


def _tensors(tree: Any, parent: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors of a nesting of containers, TensorDicts and tensorclasses with their paths."""
    for path, leaf in leaves_with_paths(tree):
        if isinstance(leaf, torch.Tensor):
            yield (*parent, *path), leaf
        elif is_tensor_collection(leaf):
            for key, value in leaf.items():
                yield from _tensors(value, (*parent, *path, key))
        else:
            raise FieldError(
                f"found {type(leaf).__name__} at {display((*parent, *path))!r} of the target; expected tensors, in "
                "dicts, lists or TensorDicts"
            )


def _key(field: Field, targets: Mapping[Path, torch.Tensor]) -> Path | None:
    """Return the key of the tensor that a field fills, or None.

    Tried in turn: its path, its name (a nested path joined by dots, as in a state_dict), the path that its name spells.
    """
    keys = field.path, (field.name,), tuple(field.name.split("."))
    return next((key for key in keys if key in targets), None)
