"""The Triton kernels that resize boxes of images and that warp images.

Each computes a tile of one output image: some channels of rows x columns pixels, as a block [channels, rows, columns],
of which the last dim goes to neighbouring threads. Tables in `parameters` say what each image gets; `sampling` packs
them.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton reads the types.

from __future__ import annotations

import triton
import triton.language as tl

NOT_SPECIALIZED = ["n", "h", "w", "sample_stride", "channel_stride", "row_stride", "height"]
WINDOW = tl.constexpr(4)  # rows of `parameters` that say which window is shown; the next six are of one kernel


@triton.jit
def _block(parameters, n, height, width, c, channels: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Return the sample, channels and pixels of a program's tile, and which pixels these show: a window, mirrored."""
    across = (width + columns - 1) // columns
    tiles = across * ((height + rows - 1) // rows)
    blocks = (c + channels - 1) // channels
    sample = tl.program_id(0) // (tiles * blocks)
    tile = tl.program_id(0) % tiles
    block = tl.program_id(0) // tiles % blocks
    channel = (block * channels + tl.arange(0, channels))[:, None, None]
    row = (tile // across * rows + tl.arange(0, rows))[None, :, None]
    column = (tile % across * columns + tl.arange(0, columns))[None, None, :]
    mine = parameters + sample
    y = tl.load(mine) + tl.where(tl.load(mine + 2 * n) != 0, height - 1 - row, row)
    x = tl.load(mine + n) + tl.where(tl.load(mine + 3 * n) != 0, width - 1 - column, column)
    return sample, channel, row, column, y, x


@triton.jit
def _float(address):
    """Return the float32 whose bits are in the int32 at `address`."""
    return tl.load(address).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(values, low: tl.constexpr, high: tl.constexpr):
    """Round float32 values to integers, halves to even as torch does, and cut them off at the limits."""
    near = tl.floor(values + 0.5)
    is_odd_half = (near - values == 0.5) & (tl.floor(near * 0.5) * 2 != near)
    return tl.minimum(tl.maximum(tl.where(is_odd_half, near - 1, near), low), high)


@triton.jit
def _store(
    values,
    output,
    floats,
    sample,
    channel,
    row,
    column,
    height,
    width,
    c: tl.constexpr,
    cast: tl.constexpr,
    rounded: tl.constexpr,
    scaled: tl.constexpr,
    last: tl.constexpr,
):
    """Cast the values, scale them, and write them. `floats` has the bits of a scale and a shift for each channel."""
    is_needed = (channel < c) & (row < height) & (column < width)
    if cast:
        values = values.to(tl.float32)
        if rounded:
            values = values.to(output.dtype.element_ty)
    if scaled:
        scale = tl.load(floats + channel, mask=channel < c, other=0).to(tl.float32, bitcast=True)
        shift = tl.load(floats + c + channel, mask=channel < c, other=0).to(tl.float32, bitcast=True)
        values = values.to(tl.float32) * scale + shift
    target = output + sample.to(tl.int64) * (c * height * width)
    if last:
        target += row * (width * c) + (column * c + channel)
    else:
        target += row * width + (channel * (height * width) + column)
    tl.store(target, values.to(output.dtype.element_ty), mask=is_needed)


@triton.jit
def _weight(line, center, inverse, box, cubic: tl.constexpr, antialias: tl.constexpr):
    """Return the weight of the pixels `line` for outputs whose middle is at `center`; all in pixels of the box."""
    distance = tl.abs(line.to(tl.float32) - center) * inverse
    if cubic:
        a: tl.constexpr = -0.5 if antialias else -0.75
        near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
        far = a * (((distance - 5) * distance + 8) * distance - 4)
        weight = tl.where(distance <= 1, near, tl.where(distance < 2, far, 0.0))
    else:
        weight = tl.maximum(1 - distance, 0.0)
    if antialias:  # what lies beyond the box does not count; without, the edge counts in its place
        weight = tl.where((line >= 0) & (line < box), weight, 0.0)
    return weight


@triton.jit
def _taps(at, scale, radius: tl.constexpr, antialias: tl.constexpr):
    """Return where outputs lie in the box, the factor of distances, and the first pixels they see and how many."""
    center = (at.to(tl.float32) + 0.5) * scale - 0.5
    shrunk = scale * 0 + 1
    if antialias:
        shrunk = tl.maximum(scale, 1.0)
    first = tl.floor(center - radius * shrunk).to(tl.int32) + 1
    return center, 1 / shrunk, first, tl.ceil(2 * radius * shrunk).to(tl.int32)


@triton.jit
def _total(center, inverse, first, taps, box, cubic: tl.constexpr):
    """Return the sum of all weights of each output; 1 beyond the output, where there are none."""
    total = tl.zeros_like(center)
    for tap in range(taps):
        total += _weight(first + tap, center, inverse, box, cubic, True)
    return tl.where(total == 0, 1.0, total)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def resize(
    image,
    output,
    parameters,
    n,
    h,
    w,
    sample_stride,
    channel_stride,
    row_stride,
    column_stride,
    height,
    width,
    c: tl.constexpr,
    channels: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    picks: tl.constexpr,
    cubic: tl.constexpr,
    antialias: tl.constexpr,
    half: tl.constexpr,
    integer: tl.constexpr,
    low: tl.constexpr,
    high: tl.constexpr,
    cast: tl.constexpr,
    rounded: tl.constexpr,
    scaled: tl.constexpr,
    last: tl.constexpr,
    listed: tl.constexpr,
):
    """Resize a box of each image, by one gather: the weights of rows and columns are computed where they are used."""
    sample, channel, row, column, y, x = _block(parameters, n, height, width, c, channels, rows, columns)
    is_needed = (channel < c) & (row < height) & (column < width)
    mine = parameters + WINDOW * n + sample
    top, left, box_height, box_width = tl.load(mine), tl.load(mine + n), tl.load(mine + 2 * n), tl.load(mine + 3 * n)
    scale_y, scale_x = _float(mine + 4 * n), _float(mine + 5 * n)
    floats = parameters + (WINDOW + 6) * n
    start = sample.to(tl.int64) * sample_stride
    if listed:  # each image has its own place and strides
        floats += 4 * n
        start = tl.load(mine + 6 * n).to(tl.int64) * 2147483648 + tl.load(mine + 7 * n)
        channel_stride, row_stride = tl.load(mine + 8 * n), tl.load(mine + 9 * n)
    source = image + start + (top * row_stride + left * column_stride)
    source += channel * channel_stride
    if picks:
        line = tl.minimum(((y.to(tl.float32) + half) * scale_y).to(tl.int32), box_height - 1)
        across = tl.minimum(((x.to(tl.float32) + half) * scale_x).to(tl.int32), box_width - 1)
        values = tl.load(source + (line * row_stride + across * column_stride), mask=is_needed, other=0)
    else:
        radius: tl.constexpr = 2 if cubic else 1
        center_y, inverse_y, first_y, taps_y = _taps(y, scale_y, radius, antialias)
        center_x, inverse_x, first_x, taps_x = _taps(x, scale_x, radius, antialias)
        values = tl.zeros([channels, rows, columns], tl.float32)
        for i in range(taps_y):
            line = first_y + i
            weight_y = _weight(line, center_y, inverse_y, box_height, cubic, antialias)
            begin = source + tl.minimum(tl.maximum(line, 0), box_height - 1) * row_stride
            is_seen = (channel < c) & (weight_y != 0)
            total = tl.zeros([channels, rows, columns], tl.float32)
            for j in range(taps_x):
                across = first_x + j
                weight_x = _weight(across, center_x, inverse_x, box_width, cubic, antialias)
                pixel = begin + tl.minimum(tl.maximum(across, 0), box_width - 1) * column_stride
                if integer:  # pixels beyond the output see some of the box too
                    part = tl.load(pixel, mask=channel < c, other=0)
                else:  # 0 times infinity is no number
                    part = tl.load(pixel, mask=is_seen & (weight_x != 0), other=0)
                total += weight_x * part.to(tl.float32)
            values += weight_y * total
        if antialias:
            values /= _total(center_y, inverse_y, first_y, taps_y, box_height, cubic)
            values /= _total(center_x, inverse_x, first_x, taps_x, box_width, cubic)
        if integer:
            values = _rounded(values, low, high)
    _store(values, output, floats, sample, channel, row, column, height, width, c, cast, rounded, scaled, last)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def warp(
    image,
    output,
    parameters,
    n,
    h,
    w,
    sample_stride,
    channel_stride,
    row_stride,
    column_stride,
    height,
    width,
    c: tl.constexpr,
    channels: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    picks: tl.constexpr,
    integer: tl.constexpr,
    low: tl.constexpr,
    high: tl.constexpr,
    cast: tl.constexpr,
    rounded: tl.constexpr,
    scaled: tl.constexpr,
    last: tl.constexpr,
):
    """Show the points of each image to which its affine map takes the pixels of the output, and the fill outside."""
    sample, channel, row, column, y, x = _block(parameters, n, height, width, c, channels, rows, columns)
    is_needed = (channel < c) & (row < height) & (column < width)
    mine = parameters + WINDOW * n + sample
    floats = parameters + (WINDOW + 6) * n
    fill = tl.load(floats + 2 * c + channel, mask=channel < c, other=0).to(tl.float32, bitcast=True)
    middle_y, middle_x = (h - 1) * 0.5, (w - 1) * 0.5
    y, x = y.to(tl.float32) - middle_y, x.to(tl.float32) - middle_x
    at_x = _float(mine) * x + _float(mine + n) * y + _float(mine + 2 * n) + middle_x
    at_y = _float(mine + 3 * n) * x + _float(mine + 4 * n) * y + _float(mine + 5 * n) + middle_y
    at_x = tl.minimum(tl.maximum(at_x, -2.0), w + 1.0)  # an int32 does not hold what may lie far outside
    at_y = tl.minimum(tl.maximum(at_y, -2.0), h + 1.0)
    source = image + sample.to(tl.int64) * sample_stride + channel * channel_stride
    if picks:
        across, line = _rounded(at_x, -2, 2**30).to(tl.int32), _rounded(at_y, -2, 2**30).to(tl.int32)
        is_inside = (across >= 0) & (across < w) & (line >= 0) & (line < h)
        values = tl.load(source + (line * row_stride + across * column_stride), mask=is_needed & is_inside, other=0)
        values = tl.where(is_inside, values, fill.to(values.dtype))
    else:
        left, top = tl.floor(at_x).to(tl.int32), tl.floor(at_y).to(tl.int32)
        values = tl.zeros([channels, rows, columns], tl.float32)
        share = tl.zeros([1, rows, columns], tl.float32)
        for i in tl.static_range(4):
            line, across = top + i // 2, left + i % 2
            weight = (1 - tl.abs(at_y - line)) * (1 - tl.abs(at_x - across))
            is_inside = (across >= 0) & (across < w) & (line >= 0) & (line < h) & (weight != 0)
            pixel = source + (line * row_stride + across * column_stride)
            values += weight * tl.load(pixel, mask=is_needed & is_inside, other=0).to(tl.float32)
            share += tl.where(is_inside, weight, 0.0)
        values += (1 - share) * fill
        if integer:
            values = _rounded(values, low, high)
    _store(values, output, floats, sample, channel, row, column, height, width, c, cast, rounded, scaled, last)
