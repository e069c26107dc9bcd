"""Changes of colour, and turns by the nearest pixel, of one image of bytes, that numba compiles.

The values are those of `params.jitter` and `params.warp`: the same operations on float32 in the same order, each
rounded by itself. `memfeed.system.compiled` says when this module is imported.
"""

import numpy as np
from numba import njit

from memfeed.system.compiled import loop

BRIGHTNESS, CONTRAST, SATURATION, HUE, GRAY = range(5)
MOST_PIXELS = (1 << 24) // 255  # of which torch's sum of bytes in float32 is exact, in whatever order it adds
_0, _1, _2, _4, _6, _12 = (np.float32(number) for number in (0, 1, 2, 4, 6, 12))
_RED, _GREEN, _BLUE = np.float32(0.2989), np.float32(0.587), np.float32(0.114)
_255, _AFTER_255 = np.float32(255), np.float32(256 - 1e-3)
_OF_RED, _OF_GREEN, _OF_BLUE = np.float32(5), np.float32(3), np.float32(1)


@njit
def _clip(value):
    return np.uint8(min(max(value, _0), _255))


@njit
def _luma(r, g, b):
    return np.floor(np.float32(r) * _RED + np.float32(g) * _GREEN + np.float32(b) * _BLUE)


@njit
def _modulo_6(value):
    """Return the remainder, of numbers from above -6 to below 18."""
    rest = value - _12 if value >= _12 else (value - _6 if value >= _6 else value)
    return rest + _6 if rest < _0 else rest


@njit
def _turned(value, chroma, place):
    k = _modulo_6(place)
    share = min(max(min(k, _4 - k), _0), _1)
    return np.uint8(np.int32((value - chroma * share) * _AFTER_255))


@njit
def _turn_hue(red, green, blue, factor):
    move = _6 * factor
    for i in range(len(red)):
        r, g, b = np.float32(red[i]) / _255, np.float32(green[i]) / _255, np.float32(blue[i]) / _255
        value, least = max(max(r, g), b), min(min(r, g), b)
        chroma = value - least
        safe = _1 if chroma == _0 else chroma
        of_red, of_green, of_blue = _modulo_6((g - b) / safe), (b - r) / safe + _2, (r - g) / safe + _4
        hue = of_red if value == r else (of_green if value == g else of_blue)
        red[i] = _turned(value, chroma, _OF_RED + hue + move)
        green[i] = _turned(value, chroma, _OF_GREEN + hue + move)
        blue[i] = _turned(value, chroma, _OF_BLUE + hue + move)


@loop("void(uint8[:, ::1], int64[::1], float32[::1])")
def recolor(planes, kinds, factors):
    """Change the colours of an image, [3, pixels], in place: by changes of these kinds and factors, in this order."""
    red, green, blue = planes
    count = len(red)
    for kind, factor in zip(kinds, factors):  # noqa: B905  numba's zip knows no strict
        rest = _1 - factor
        if kind == HUE:
            _turn_hue(red, green, blue, factor)
        elif kind == SATURATION:
            for i in range(count):
                gray = _luma(red[i], green[i], blue[i]) * rest
                red[i] = _clip(np.float32(red[i]) * factor + gray)
                green[i] = _clip(np.float32(green[i]) * factor + gray)
                blue[i] = _clip(np.float32(blue[i]) * factor + gray)
        elif kind == GRAY:
            for i in range(count):
                red[i] = green[i] = blue[i] = _clip(_luma(red[i], green[i], blue[i]))
        else:
            gray = _0
            if kind == CONTRAST:
                total = np.int64(0)
                for i in range(count):
                    total += np.int32(_luma(red[i], green[i], blue[i]))
                gray = np.float32(total) / np.float32(count) * rest
            for plane in (red, green, blue):
                for i in range(count):
                    plane[i] = _clip(np.float32(plane[i]) * factor + gray)


@loop("void(uint8[:, :, ::1], float32[:, ::1], uint8[::1], uint8[:, :, ::1])")
def turn(image, matrix, fill, output):
    """Write for each pixel the one of the image that is nearest to where `matrix` maps it, [2, 3]; `fill` outside."""
    channels, height, width = image.shape
    half_height, half_width = np.float32((height - 1) / 2), np.float32((width - 1) / 2)
    last_row, last_column = np.float32(height - 1), np.float32(width - 1)
    across, down = np.empty(width, np.float32), np.empty(width, np.float32)
    for x in range(width):
        across[x] = matrix[0, 0] * (np.float32(x) - half_width)
        down[x] = matrix[1, 0] * (np.float32(x) - half_width)
    index = np.empty(width, np.int32)
    pixels, outputs = image.reshape(channels, height * width), output.reshape(channels, height * width)
    for y in range(height):
        at = np.float32(y) - half_height
        column_at, row_at = matrix[0, 1] * at, matrix[1, 1] * at
        for x in range(width):
            column = np.rint(across[x] + column_at + matrix[0, 2] + half_width)
            row = np.rint(down[x] + row_at + matrix[1, 2] + half_height)
            is_inside = (column >= _0) & (column <= last_column) & (row >= _0) & (row <= last_row)
            index[x] = np.int32(row if is_inside else _0) * np.int32(width) + np.int32(column if is_inside else _0)
            index[x] = index[x] if is_inside else np.int32(-1)
        for c in range(channels):
            for x in range(width):
                outputs[c, y * width + x] = pixels[c, index[x]] if index[x] >= 0 else fill[c]
