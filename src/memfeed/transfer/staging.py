"""A staging buffer: page-locked memory into which one batch is gathered, and from which it is copied to the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from memfeed.transfer.packing import ALIGNMENT
from memfeed.transfer.streams import Event, Streams

SMALL_FRACTION = 4  # a column is small if its rows are smaller than those of the largest column by this factor
GAP_BYTES = 64 * ALIGNMENT  # room between leaves
RAGGED_ROW_BYTES = 1024  # what a row of a ragged column is taken to have


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
