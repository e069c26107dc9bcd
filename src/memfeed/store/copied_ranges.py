"""Copy rows of one size, and ranges of bytes of any length, into the memory of a batch: many bytes on several threads.

A loop in Python over short ranges takes longer than the copy, and no second thread can help. So many ranges are copied
by torch, as blocks of one size: the output is a grid of blocks, and each is somewhere in the heap. Blocks may begin at
any byte: torch selects them from a view of the heap in which row i begins at byte i. Where numba is installed, a loop
that it compiles copies the ranges one by one, in half of the time and less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memfeed.errors import CorruptStoreError
from memfeed.schema.codec import Int64Array
from memfeed.system.compiled import Loops
from memfeed.system.share import share

Bytes = npt.NDArray[np.uint8]

LOOPS = Loops("memfeed.store.copy_loops", after=1 << 30)  # bytes, which then have cost as much as numba's start

LONG_BYTES = 8192  # average length from which Python's loop does not count
BLOCKS_FROM = 1000  # ranges: for fewer, making the arrays of the blocks takes longer than a loop in Python
SHORTEST_FOR_BLOCKS = 64
SMALLEST_BLOCK, LARGEST_BLOCK = 128, 1024
JOINED_AT_ONCE = 500  # more objects than 700 start Python's garbage collector, which took ten times the copy


def copy_ranges(heap: torch.Tensor, starts: Int64Array, lengths: Int64Array, out: Bytes) -> None:
    """Copy ranges of ``heap`` (uint8 [n]) one after another into ``out``, which has exactly their size."""
    loops = LOOPS.get(out.size)
    if loops is not None:
        _copy_compiled(loops, heap.numpy(), starts, lengths, out)
        return
    starts, lengths = _merge(starts, lengths)
    mean = out.size // max(len(starts), 1)
    block = min(max(1 << (mean // 8).bit_length(), SMALLEST_BLOCK), LARGEST_BLOCK)
    if mean >= LONG_BYTES:
        _concatenate(heap.numpy(), starts, lengths, out)
    elif mean >= SHORTEST_FOR_BLOCKS and len(starts) >= BLOCKS_FROM and len(heap) >= block:
        _copy_blocks(heap, starts, lengths, out, block)
    else:
        _join(heap.numpy(), starts, lengths, out)


def must_fit(fits: bool) -> None:
    """Raise CorruptStoreError unless ``fits``, which a compiled loop returned."""
    if not fits:
        raise CorruptStoreError(
            "found a range outside of the heap, or of the memory of the batch; expected it inside: the store was "
            "changed while it was read, run verify()"
        )


def _copy_compiled(loops: Any, heap: Bytes, starts: Int64Array, lengths: Int64Array, out: Bytes) -> None:
    """Copy ranges of any length, on the threads that help."""
    if not len(starts):
        return
    begins = np.cumsum(lengths) - lengths

    def copy(first: int, last: int) -> None:
        part = slice(first, last)
        must_fit(loops.copy_ranges(heap, starts[part], lengths[part], begins[part], out))

    share(len(starts), copy, least=-(-PART_BYTES * len(starts) // max(out.size, 1)), kind="gather", work=out.size)


def _merge(starts: Int64Array, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the same bytes as fewer ranges if many begin where the one before ends, as in stored order."""
    cuts = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1
    if 2 * len(cuts) >= len(starts):
        return starts, lengths
    firsts = np.append(0, cuts)
    return starts[firsts], np.add.reduceat(lengths, firsts)


def _concatenate(heap: Bytes, starts: Int64Array, lengths: Int64Array, out: Bytes) -> None:
    """Copy long ranges, on the threads that help."""
    ranges = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    parts, edges = [heap[start:stop] for start, stop in ranges], [0, *np.cumsum(lengths).tolist()]

    def copy(first: int, last: int) -> None:
        np.concatenate(parts[first:last], out=out[edges[first] : edges[last]])

    share(len(parts), copy, least=-(-PART_BYTES * len(parts) // out.size), kind="gather", work=out.size)


def _join(heap: Bytes, starts: Int64Array, lengths: Int64Array, out: Bytes) -> None:
    """Copy short ranges: joining slices of a memoryview takes a third of the time, although it copies once more."""
    view, target, end = heap.data, out.data, 0
    for first in range(0, len(starts), JOINED_AT_ONCE):
        part = slice(first, first + JOINED_AT_ONCE)
        ranges = zip(starts[part].tolist(), (starts[part] + lengths[part]).tolist(), strict=True)
        joined = b"".join([view[start:stop] for start, stop in ranges])
        begin, end = end, end + len(joined)
        target[begin:end] = joined


def _copy_blocks(heap: torch.Tensor, starts: Int64Array, lengths: Int64Array, out: Bytes, block: int) -> None:
    """Copy ranges as blocks of ``block`` bytes, at most as many as ``out`` and ``heap`` have.

    Each block of the output comes from the range that its first byte belongs to. What it has beyond the end of this
    range is wrong, and written again: the first ``block`` bytes of each range are copied to their place, in ascending
    order, so that only bytes of later ranges are wrong at any time. Ranges for which a block does not fit, at the end
    of the output or of the heap, are copied whole at last.
    """
    ends = np.cumsum(lengths)
    begins, count, last = ends - lengths, out.size // block, len(heap) - block
    first_blocks = np.minimum((begins + (block - 1)) // block, count)
    sources = np.repeat(starts - begins, np.diff(first_blocks, append=count))
    sources += np.arange(0, count * block, block)
    np.minimum(sources, last, out=sources)
    overlapping = heap.as_strided((last + 1, block), (1, 1))
    grid = torch.from_numpy(out[: count * block]).view(count, block)
    select_rows(overlapping, torch.from_numpy(sources), grid)
    fits = (begins + block <= out.size) & (starts <= last)
    firsts = torch.from_numpy(starts[fits])
    heads = select_rows(overlapping, firsts, torch.empty(len(firsts), block, dtype=torch.uint8, device="cpu"))
    placed = np.ndarray(out.size - block + 1, f"V{block}", out, strides=(1,))
    placed[begins[fits]] = heads.numpy().view(f"V{block}")[:, 0]
    whole = ~fits | (starts + lengths > last) | (ends > count * block)
    ranges = zip(begins[whole].tolist(), ends[whole].tolist(), starts[whole].tolist(), strict=True)
    source = heap.numpy()
    for begin, end, start in ranges:
        out[begin:end] = source[start : start + end - begin]


PART_BYTES = 128 * 1024  # a part of a batch that a thread takes is at least this large
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""For dtypes of which torch 2.6 copies no rows by an index, those of the same size."""


def select_rows(data: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy the rows ``index`` (int [k]) of ``data`` into ``out``, [k, *shape] and contiguous, and return it."""
    if data.dtype in _SIGNED:
        select_rows(data.view(_SIGNED[data.dtype]), index, out.view(_SIGNED[data.dtype]))
        return out
    size, count = out.nbytes, len(index)
    if size < 2 * PART_BYTES or count < 2:
        return torch.index_select(data, 0, index, out=out)

    def select(begin: int, end: int) -> None:
        torch.index_select(data, 0, index[begin:end], out=out[begin:end])

    _share(select, count, size)
    return out


def copy_run(data: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy ``data``, consecutive rows, into ``out``, of the same shape, and return it."""
    size, count = out.nbytes, len(out)
    if size < 2 * PART_BYTES or count < 2:
        return out.copy_(data)

    def copy(begin: int, end: int) -> None:
        out[begin:end].copy_(data[begin:end])

    _share(copy, count, size)
    return out


def _share(copy: Callable[[int, int], object], count: int, size: int) -> None:
    least = -(-PART_BYTES * count // size)
    share(count, copy, least=least, kind="gather", work=size, by_torch=True)
