"""Loops that numba compiles (`system/compiled.py`): copy ranges of bytes, cut documents into blocks, fill in their ids.

None of them writes outside of its arrays: what does not fit is found before it is written, and False is returned.
"""

from __future__ import annotations

from typing import Any

from numba import types

from memfeed.system.compiled import loop

# the C library's: an address to write to, one to read from, and a number of bytes
_memcpy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


@loop("boolean(uint8[::1], int64[::1], int64[::1], int64[::1], uint8[::1])")
def copy_ranges(source: Any, starts: Any, lengths: Any, begins: Any, out: Any) -> bool:
    """Copy ``lengths[i]`` bytes from ``starts[i]`` in ``source`` to ``begins[i]`` in ``out``, for each i."""
    read_from, write_to = source.ctypes.data, out.ctypes.data
    for i in range(len(starts)):
        start, length, begin = starts[i], lengths[i], begins[i]
        if length < 0 or not (0 <= start <= source.size - length and 0 <= begin <= out.size - length):
            return False
        _memcpy(write_to + begin, read_from + start, length)
    return True


@loop(
    "boolean(int32[::1], int64[::1], int32[::1])",
    "boolean(boolean[::1], int64[::1], boolean[::1])",
)
def repeat(values: Any, lengths: Any, out: Any) -> bool:
    """Write ``values[i]`` to ``out`` ``lengths[i]`` times, for each i, as ``np.repeat`` does."""
    at = 0
    for i in range(len(lengths)):
        length, value = lengths[i], values[i]
        if length < 0 or length > out.size - at:
            return False
        out[at : at + length] = value
        at += length
    return bool(at == out.size)


@loop("boolean(int64[::1], int64[::1])")
def count_up(lengths: Any, out: Any) -> bool:
    """Write 0, 1, ..., ``lengths[i]`` - 1 to ``out``, for each i."""
    at = 0
    for length in lengths:
        if length < 0 or length > out.size - at:
            return False
        for position in range(length):
            out[at + position] = position
        at += length
    return bool(at == out.size)


@loop("int64(int64[::1], int64[::1], int64[::1], int64, int64[::1], int64[::1], int64[::1], int32[::1], int32[::1])")
def cut(
    begins: Any, blocks: Any, firsts: Any, size: int,
    places: Any, skipped: Any, lengths: Any, numbers: Any, in_block: Any,
) -> int:  # fmt: skip
    """Cut documents that begin at the tokens ``begins`` into pieces, for ``blocks`` of ``size`` tokens.

    Block i begins in document ``firsts[i]``. Write of each piece: its document, the tokens of it before the piece and
    in it, its number among those of its block, and the position of its first token there. Return how many there are;
    -1 if they are more than the arrays hold, or if the documents end before a block does.
    """
    count = 0
    for i in range(len(blocks)):
        begin, place, number = blocks[i] * size, firsts[i], 0
        edge = begin
        while begin < edge + size:
            if place < 0 or place + 1 >= len(begins):
                return -1
            end = min(begins[place + 1], edge + size)
            if end > begin:  # else the document is empty
                if count == len(places):
                    return -1
                places[count], skipped[count], lengths[count] = place, begin - begins[place], end - begin
                numbers[count], in_block[count] = number, begin - edge
                count, number, begin = count + 1, number + 1, end
            place += 1
    return count
