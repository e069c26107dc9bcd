"""The passes of the CPU over bytes that numba compiles: a box of each image resized, or a window of it moved.

The values are those of torch. A resize of bytes there computes with weights of 16 bits, the columns first and then the
rows, each rounded to a byte (``aten/src/ATen/native/cpu/UpSampleKernel.cpp``). Here eight columns take two bytes each
out of 16 neighbouring ones at once, and add their products with two weights.

`memfeed.system.compiled` says when this module is imported. Images are int64 [n, 5]: the address of the first byte, the
strides of channels and rows in bytes, height and width. Images to resize, and outputs, are at least `LANES` wide.
"""

import math

import numpy as np
from numba import njit

from memfeed.system.compiled import loop
from memfeed.transforms.backends.lanes import (
    HALF,
    LANES,
    add_pairs,
    add_row,
    byte,
    interleave_bytes,
    interleave_floats,
    read,
    read_mirrored,
    spread8,
    spread16,
    write8,
    write16,
    write_floats,
    write_fused_floats,
)

BYTES, FLOATS, FUSED_FLOATS = 0, 1, 2  # outputs: as they are; scaled, then shifted; the same, rounded once


@njit
def _write(sums, shift, kind, scale, offset, place):
    """Write 16 values at `place`."""
    if kind == BYTES:
        write16(sums, shift, place)
    elif kind == FUSED_FLOATS:
        write_fused_floats(sums, shift, scale, offset, place)
    else:
        write_floats(sums, shift, scale, offset, place)


@njit
def _write_pixels(row, output, begin, channels, width):
    """Copy a row of each channel, [channels, pitch], to pixels."""
    size, row_at, place = row.itemsize, row.ctypes.data, output.ctypes.data + begin * row.itemsize
    if channels == 3:
        for block in range(0, width, LANES):
            x = min(block, width - LANES)
            if size == 1:
                interleave_bytes(row_at + x, row.shape[1], place + 3 * x)
            else:
                interleave_floats(row_at + 4 * x, row.shape[1] * 4, place + 12 * x)
        return
    for c in range(channels):
        for x in range(width):
            output[begin + channels * x + c] = row[c, x]


@njit
def _filter(distance, is_cubic):
    """Return the weight of a pixel at this distance from the one that is shown."""
    if not is_cubic:
        return 1.0 - distance if distance < 1.0 else 0.0
    if distance < 1.0:
        return ((-0.5 + 2.0) * distance - (-0.5 + 3.0)) * distance * distance + 1.0
    if distance < 2.0:
        return (((distance - 5.0) * distance + 8.0) * distance - 4.0) * -0.5
    return 0.0


@njit
def _weigh(size, out, is_cubic, first, count, weights, real):
    """Compute for each of `out` lines which of `size` lines it shows, and their weights. Return the bits of one."""
    scale = size / out
    reach = (2.0 if is_cubic else 1.0) * max(scale, 1.0)
    inverse = 1.0 / scale if scale >= 1.0 else 1.0
    largest = 0.0
    for line in range(out):
        center = scale * (line + 0.5)
        low = max(int(center - reach + 0.5), 0)
        taps = min(int(center + reach + 0.5), size) - low
        total = 0.0
        for tap in range(taps):
            real[line, tap] = _filter(abs((tap + low - center + 0.5) * inverse), is_cubic)
            total += real[line, tap]
        for tap in range(taps):
            real[line, tap] /= total
            largest = max(largest, real[line, tap])
        first[line], count[line] = low, taps
    bits = 0
    while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < (1 << 15):
        bits += 1
    for line in range(out):
        for tap in range(count[line]):
            value = real[line, tap] * (1 << bits)
            weights[line, tap] = np.int16(int(value - 0.5) if value < 0 else int(value + 0.5))
    return bits


@njit
def _step_columns(first, count, weights, left, mirrored, box_left, width, columns, begins, starts, which, paired):
    """Cut the columns' sums into steps: 8 columns, each of which adds two of 16 neighbouring bytes of a row."""
    step = 0
    done = np.empty(HALF, np.int64)
    for block in range((columns + HALF - 1) // HALF):
        begins[block] = step
        done[:] = 0
        while True:
            low = width
            for lane in range(HALF):
                at = block * HALF + lane
                if at < columns:
                    line = left + (columns - 1 - at if mirrored else at)
                    if done[lane] < count[line]:
                        low = min(low, box_left + first[line] + done[lane])
            if low == width:
                break
            starts[step] = min(low, width - LANES)
            for lane in range(HALF):
                at = block * HALF + lane
                line = left + (columns - 1 - at if mirrored else at)
                for place in (2 * lane, 2 * lane + 1):
                    which[step, place], paired[step, place] = 0, 0
                    if at < columns and done[lane] < count[line]:
                        byte = box_left + first[line] + done[lane] - starts[step]
                        if byte < LANES:
                            which[step, place], paired[step, place] = byte, weights[line, done[lane]]
                            done[lane] += 1
            step += 1
    begins[(columns + HALF - 1) // HALF] = step


@njit
def _most_taps(size, out, is_cubic):
    """Return how many lines one line can show at most, and one more."""
    return math.ceil((2.0 if is_cubic else 1.0) * max(size / out, 1.0)) * 2 + 1


@njit
def _resize_columns(source, stride, upper, lower, half, bits, begins, starts, which_at, paired_at, target, pitch):
    """Write the rows from `upper` to before `lower` of one channel, with their columns resized, `pitch` bytes apart."""
    for block in range(len(begins) - 1):
        begin, end = begins[block], begins[block + 1]
        which, paired = which_at + begin * LANES, paired_at + begin * LANES * 2
        if end - begin == 1:  # most often; the loop reads nothing but bytes
            at, place = source + upper * stride + starts[begin], target + upper * pitch + block * HALF
            for _ in range(upper, lower):
                write8(add_pairs(half, at, which, paired), bits, place)
                at, place = at + stride, place + pitch
            continue
        for y in range(upper, lower):
            sums = half
            for step in range(end - begin):
                at = source + y * stride + starts[begin + step]
                sums = add_pairs(sums, at, which + step * LANES, paired + step * LANES * 2)
            write8(sums, bits, target + y * pitch + block * HALF)


@njit
def _resize_row(source, pitch, weights, taps, half, bits, kind, scale, offset, place, width, size):
    """Write one row: the sum of the `taps` rows from `source` on, times their weights."""
    one, two = weights[0], weights[1]
    for block in range(0, width, LANES):
        x = min(block, width - LANES)  # the last lanes overlap those before
        sums = half
        if taps == 2:
            sums = add_row(add_row(sums, source + x, one), source + pitch + x, two)
        else:
            for tap in range(taps):
                sums = add_row(sums, source + tap * pitch + x, weights[tap])
        _write(sums, bits, kind, scale, offset, place + x * size)


@loop(
    "void(int64[:, ::1], int64[:, ::1], int64[:, ::1], int64, int64, boolean, int64, float32[:, ::1], uint8[::1], "
    "float32[::1], int64, int64, int64, boolean)"
)
def resize(
    images, boxes, windows, full_height, full_width, is_cubic, kind, values, as_bytes, as_floats, channels, height,
    width, is_last,
):  # fmt: skip
    """Resize a box of each image, and write a window of the result.

    Args:
        images: see the module.
        boxes: top, left, height and width of each box, [n, 4].
        windows: top and left of each window in its resized box; whether to mirror its columns, and its rows; [n, 4].
        full_height: of the resized boxes.
        full_width: likewise.
        is_cubic: True for the bicubic filter, False for the bilinear one; both average what shrinks.
        kind: of the output: BYTES, FLOATS or FUSED_FLOATS.
        values: to multiply by, and to add, for floats, [2, channels].
        as_bytes: the output, if its kind is BYTES; else empty.
        as_floats: the output for the other kinds.
        channels: of images and outputs.
        height: of the windows.
        width: likewise.
        is_last: True if the channels of the output come last.
    """
    tallest, widest = boxes[:, 2].max(), boxes[:, 3].max()
    most = max(_most_taps(tallest, full_height, is_cubic), _most_taps(widest, full_width, is_cubic))
    lines, blocks = max(full_height, full_width), (width + HALF - 1) // HALF
    first, count = np.empty(lines, np.int64), np.empty(lines, np.int64)
    weights, real = np.empty((lines, most), np.int16), np.empty((lines, most))
    begins, starts = np.empty(blocks + 1, np.int64), np.empty(blocks * HALF * most, np.int64)
    which, paired = np.empty((len(starts), LANES), np.uint8), np.empty((len(starts), LANES), np.int16)
    pitch = (width + LANES - 1) // LANES * LANES
    across = np.empty((channels, tallest, pitch), np.uint8)
    row_bytes, row_floats = np.empty((channels, pitch), np.uint8), np.empty((channels, pitch), np.float32)
    size, row_at, output_at = 4, row_floats.ctypes.data, as_floats.ctypes.data
    if kind == BYTES:
        size, row_at, output_at = 1, row_bytes.ctypes.data, as_bytes.ctypes.data
    for n in range(len(images)):
        address, plane, stride, _, image_width = images[n]
        box_top, box_left, box_height, box_width = boxes[n]
        top, left, is_mirrored, is_upside_down = windows[n]
        bits = np.int32(_weigh(box_width, full_width, is_cubic, first, count, weights, real))
        _step_columns(
            first, count, weights, left, is_mirrored, box_left, image_width, width, begins, starts, which, paired
        )
        half = spread8(np.int32(1 << (bits - 1)))
        bits_down = np.int32(_weigh(box_height, full_height, is_cubic, first, count, weights, real))
        last = top + height - 1
        for c in range(channels):
            _resize_columns(
                address + c * plane + box_top * stride, stride, first[top], first[last] + count[last], half, bits,
                begins, starts, which.ctypes.data, paired.ctypes.data, across[c].ctypes.data, pitch,
            )  # fmt: skip
        half_down = spread16(np.int32(1 << (bits_down - 1)))
        for y in range(height):
            line = top + (height - 1 - y if is_upside_down else y)
            for c in range(channels):
                place = output_at + ((n * channels + c) * height + y) * width * size
                _resize_row(
                    across[c].ctypes.data + first[line] * pitch, pitch, weights[line], count[line], half_down,
                    bits_down, kind, values[0, c], values[1, c], row_at + c * pitch * size if is_last else place, width,
                    size,
                )  # fmt: skip
            if is_last and kind == BYTES:
                _write_pixels(row_bytes, as_bytes, (n * height + y) * width * channels, channels, width)
            elif is_last:
                _write_pixels(row_floats, as_floats, (n * height + y) * width * channels, channels, width)


@loop(
    "void(int64[:, ::1], int64[:, ::1], uint8[::1], int64, float32[:, ::1], uint8[::1], float32[::1], int64, int64, "
    "int64, boolean)"
)
def crop(images, windows, fill, kind, values, as_bytes, as_floats, channels, height, width, is_last):
    """Write a window of each image. Pixels outside of it are `fill`, one byte for each channel. Else see `resize`."""
    pitch = (width + LANES - 1) // LANES * LANES
    row_bytes, row_floats = np.empty((channels, pitch), np.uint8), np.empty((channels, pitch), np.float32)
    padded, nothing = np.empty(pitch, np.uint8), np.int32(0)
    size, row_at, output_at = 4, row_floats.ctypes.data, as_floats.ctypes.data
    if kind == BYTES:
        size, row_at, output_at = 1, row_bytes.ctypes.data, as_bytes.ctypes.data
    for n in range(len(images)):
        address, plane, stride, image_height, image_width = images[n]
        top, left, is_mirrored, is_upside_down = windows[n]
        for y in range(height):
            line = top + (height - 1 - y if is_upside_down else y)
            for c in range(channels):
                place = output_at + ((n * channels + c) * height + y) * width * size
                if is_last:
                    place = row_at + c * pitch * size
                source = address + c * plane + line * stride + left
                if line < 0 or line >= image_height or left < 0 or left + width > image_width:
                    padded[:] = fill[c]
                    if 0 <= line < image_height:
                        for x in range(max(0, -left), min(width, image_width - left)):
                            padded[x] = byte(source + x)
                    source = padded.ctypes.data
                for block in range(0, width, LANES):
                    x = min(block, width - LANES)
                    values_here = read_mirrored(source + width - LANES - x) if is_mirrored else read(source + x)
                    _write(values_here, nothing, kind, values[0, c], values[1, c], place + x * size)
            if is_last and kind == BYTES:
                _write_pixels(row_bytes, as_bytes, (n * height + y) * width * channels, channels, width)
            elif is_last:
                _write_pixels(row_floats, as_floats, (n * height + y) * width * channels, channels, width)
