"""JPEG: images of uint8, smaller by the loss of small differences. The library is libjpeg-turbo, through simplejpeg.

A blob is a JPEG file: baseline (SOF0), 8 bits, 1 or 3 components, one scan, and nothing behind its end. Its pixels are
those of libjpeg-turbo's exact integer transform and smooth upsampling, its defaults.

How far decoded images are from the original ones is told in grey levels.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from memfeed.codecs.contract import Array, Blob, Codec, Shape, corrupt
from memfeed.errors import SchemaError, brief
from memfeed.system.compiled import Loops

SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")
FULL_COLOR_FROM = 93
"""The quality from which colors have the full resolution: below, half of it costs less than a lower quality."""
LARGEST_SIDE = 65500  # of libjpeg

_LAYOUTS = ("chw", "hwc", "hw")
_START, _START_OF_IMAGE_DATA = 0xD8, 0xDA
_END = re.compile(b"\xff\xd9")  # re took a third of the time of bytes.find
_BASELINE, _OTHER_FRAMES = 0xC0, frozenset({*range(0xC1, 0xD0)} - {0xC4, 0xC8, 0xCC})
_MOST_KNOWN, _MOST_KNOWN_BYTES = 4, 4096  # headers, and the bytes of one, that are kept
_MOST_SCRATCH = 16 << 20  # bytes that a thread keeps
LOOPS = Loops("memfeed.codecs.pixel_loops", after=1 << 29)  # bytes of images: they save as much as numba's start takes


@dataclass(frozen=True)
class Jpeg(Codec):
    """Images of uint8 as JPEG files: `[c, h, w]`, `[h, w, c]` or `[h, w]`, with c = 1 (gray) or 3 (RGB).

    Args:
        quality: from 1 to 100. 95 takes about a fifth of the bytes of raw pixels, 90 a tenth.
        subsampling: the resolution of colors. `"4:4:4"` is full, `"4:2:0"` half in both dims. Empty: full from quality
            93, else half.
        layout: the order of dims, `"chw"`, `"hwc"` or `"hw"`. `fitted` changes it where it does not fit a column.
    """

    name: ClassVar[str] = "jpeg"
    lossless: ClassVar[bool] = False
    module: ClassVar[str] = "simplejpeg"
    quality: int = 95
    subsampling: str = ""
    layout: str = "chw"

    def __post_init__(self) -> None:
        if type(self.quality) is not int or not 1 <= self.quality <= 100:
            raise ValueError(f"found quality={brief(self.quality)}; expected an int from 1 to 100")
        if self.subsampling == "":
            object.__setattr__(self, "subsampling", "4:4:4" if self.quality >= FULL_COLOR_FROM else "4:2:0")
        if self.subsampling not in SUBSAMPLINGS:
            raise ValueError(f"found subsampling={brief(self.subsampling)}; expected one of {', '.join(SUBSAMPLINGS)}")
        if self.layout not in _LAYOUTS:
            raise ValueError(f"found layout={brief(self.layout)}; expected one of {', '.join(_LAYOUTS)}")

    def parameters(self) -> Mapping[str, int | str]:
        """Return quality, subsampling and layout."""
        return {"quality": self.quality, "subsampling": self.subsampling, "layout": self.layout}

    def fitted(self, dtype: np.dtype[Any], shape: Shape) -> Jpeg:
        """Return this codec with the layout of the column."""
        fitting = [layout for layout in (self.layout, *_LAYOUTS) if _fits(layout, shape)]
        known = [layout for layout in fitting if "c" not in layout or shape[layout.index("c")] is not None]
        return replace(self, layout=[*known, *fitting, self.layout][0])

    def accepts(self, dtype: np.dtype[Any], shape: Shape) -> str:
        """Return why rows cannot be encoded, by this codec or after `fitted`; empty if they can: see `Codec`."""
        if dtype != np.uint8 or not any(_fits(layout, shape) for layout in _LAYOUTS):
            return (
                f"jpeg has uint8 images [c, h, w], [h, w, c] or [h, w], with c = 1 or 3 and sides from 1 to "
                f"{LARGEST_SIDE}; this is {dtype} {list(shape)}"
            )
        return ""

    def encode(self, row: Array) -> bytes:
        """Return the blob of one row: see `Codec`."""
        if row.dtype != np.uint8 or not _fits(self.layout, row.shape):
            raise SchemaError(self.accepts(row.dtype, row.shape) or f"found {list(row.shape)}; expected {self.layout}")
        image = row.transpose(1, 2, 0) if self.layout == "chw" else row
        if image.ndim == 2:
            image = image[..., None]
        color, subsampling = ("RGB", self.subsampling.replace(":", "")) if image.shape[2] == 3 else ("GRAY", "Gray")
        encode = _simplejpeg().encode_jpeg
        return bytes(
            encode(np.ascontiguousarray(image), quality=self.quality, colorspace=color, colorsubsampling=subsampling)
        )

    def shape(self, blob: Blob) -> tuple[int, ...]:
        """Return the shape of a row from the header of its blob: see `Codec`."""
        return self._row_shape(_read_header(blob))

    def _row_shape(self, header: _Header) -> tuple[int, ...]:
        if self.layout == "chw":
            return (header.channels, header.height, header.width)
        if self.layout == "hwc":
            return (header.height, header.width, header.channels)
        if header.channels != 1:
            raise corrupt(f"{header.channels} components", "1, for the layout hw")
        return (header.height, header.width)

    def check(self, blob: Blob) -> None:
        """Raise CorruptStoreError unless the blob is one whole image: see `Codec`."""
        _check_end(blob.data, _read_header(blob))

    def decode(self, blob: Blob, out: Array) -> None:
        """Fill `out` with the row: see `Codec`."""
        header = _read_header(blob)
        shape = self._row_shape(header)
        if shape != out.shape or out.dtype != np.uint8:
            raise corrupt(f"uint8 {brief(list(shape))}", f"{out.dtype} {list(out.shape)}")
        _check_end(blob.data, header)
        try:
            self._decode_checked(blob.data, header, out)
        except (ValueError, RuntimeError) as error:
            raise corrupt(f"image data that libjpeg-turbo refuses ({brief(str(error))})", "an image") from None

    def _decode_checked(self, data: memoryview, header: _Header, out: Array) -> None:
        decode = _simplejpeg().decode_jpeg
        height, width = header.height, header.width
        color = "RGB" if header.channels == 3 else "GRAY"
        image = (height, width, header.channels)
        is_planes = header.channels == 3 and self.layout == "chw"
        if out.flags.c_contiguous and not is_planes:
            decode(data, colorspace=color, buffer=out.reshape(image))
            return
        pixels = _scratch(out.size)
        decode(data, colorspace=color, buffer=pixels.reshape(image))
        loops = LOOPS.get(out.size) if is_planes and out.flags.c_contiguous else None
        if loops is not None:
            loops.write_planes(pixels, out.reshape(3, -1))
        else:
            np.copyto(out, pixels.reshape(image).transpose(2, 0, 1) if is_planes else pixels.reshape(out.shape))


def _check_end(data: memoryview, header: _Header) -> None:
    end = _END.search(data, header.data_begin)  # image data never has these two bytes
    if end is None or end.end() != len(data):
        raise corrupt("bytes behind the end of the image, or no end", "one image")


def _fits(layout: str, shape: Shape) -> bool:
    """Return True if an image of this shape can have the layout."""
    if len(shape) != len(layout):
        return False
    dims = dict(zip(layout, shape, strict=True))
    sides = (dims["h"], dims["w"])
    return dims.get("c", 1) in (1, 3, None) and all(side is None or 1 <= side <= LARGEST_SIDE for side in sides)


class _Header(NamedTuple):
    height: int
    width: int
    channels: int
    data_begin: int  # the first byte of the entropy-coded data


class _Known(NamedTuple):
    """A header that was read: files of one encoder differ from it in their height and width only."""

    size_begin: int
    before: bytes
    after: bytes
    header: _Header


_known: tuple[_Known, ...] = ()


def _read_header(blob: Blob) -> _Header:
    """Return the size of a JPEG image; raise CorruptStoreError unless it is a baseline image with one scan."""
    global _known
    data = blob.data
    for known in _known:
        begin, header = known.size_begin, known.header
        # bytes are compared at once, a memoryview byte by byte
        if bytes(data[:begin]) == known.before and bytes(data[begin + 4 : header.data_begin]) == known.after:
            high, low, wide, narrow = data[begin : begin + 4]
            return _Header(high << 8 | low, wide << 8 | narrow, header.channels, header.data_begin)
    begin, header = _parse_header(data)
    known = _Known(begin, bytes(data[:begin]), bytes(data[begin + 4 : header.data_begin]), header)
    if header.data_begin <= _MOST_KNOWN_BYTES:
        _known = (known, *_known[: _MOST_KNOWN - 1])
    return header


def _parse_header(data: memoryview) -> tuple[int, _Header]:
    """Return where the height of an image stands, and its header; see `_read_header`."""
    if len(data) < 4 or data[0] != 0xFF or data[1] != _START:
        raise corrupt(f"{len(data)} bytes that do not begin with an image", "a JPEG image")
    place, found, size_begin = 2, None, 0
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker, begin, end = data[place + 1], place + 4, place + 2 + (data[place + 2] << 8 | data[place + 3])
        if end < begin or end > len(data):
            break
        if marker in _OTHER_FRAMES:
            raise corrupt(f"a JPEG image of kind {marker:#x}", f"{_BASELINE:#x}, baseline")
        if marker == _BASELINE:
            if found is not None or end - begin < 6 or data[begin] != 8:
                break
            height, width = data[begin + 1] << 8 | data[begin + 2], data[begin + 3] << 8 | data[begin + 4]
            found, size_begin = _Header(height, width, data[begin + 5], 0), begin + 1
        if marker == _START_OF_IMAGE_DATA:
            if found is None or found.channels not in (1, 3) or end == begin or data[begin] != found.channels:
                break
            return size_begin, found._replace(data_begin=end)
        place = end
    raise corrupt(f"{len(data)} bytes without a valid header of an image", "a baseline JPEG image with one scan")


_of_thread = threading.local()


def _scratch(size: int) -> Array:
    """Return `size` bytes that the next call in this thread may return again."""
    if size > _MOST_SCRATCH:
        return np.empty(size, np.uint8)
    kept = getattr(_of_thread, "scratch", None)
    if kept is None or len(kept) < size:
        kept = _of_thread.scratch = np.empty(size, np.uint8)
    scratch: Array = kept[:size]
    return scratch


@functools.cache
def _simplejpeg() -> Any:
    Jpeg.require()
    import simplejpeg

    return simplejpeg


PEAK = 255  # of uint8


class ImageError(NamedTuple):
    """The mean and largest absolute difference, in grey levels, and the PSNR in dB: infinite if there is no difference.

    PSNR is 10 log10(255**2 / MSE), with the mean over all images, channels and pixels that were compared.
    """

    mean: float
    largest: int
    psnr: float


class ErrorSum:
    """The differences of images that are compared one after another."""

    def __init__(self) -> None:
        self._count, self._sum, self._squares, self._largest = 0, 0, 0, 0

    def add(self, original: Array, decoded: Array) -> None:
        """Compare two arrays of uint8, of one shape."""
        if original.dtype != np.uint8 or decoded.dtype != np.uint8 or original.shape != decoded.shape:
            raise ValueError(
                f"found {original.dtype} {list(original.shape)} and {decoded.dtype} {list(decoded.shape)}; expected "
                "uint8 of one shape"
            )
        # counts of each difference: exact, and without memory for squares
        differences = np.maximum(original, decoded) - np.minimum(original, decoded)
        counts = np.bincount(differences.reshape(-1), minlength=PEAK + 1)
        levels = np.arange(PEAK + 1)
        self._count += differences.size
        self._sum += int(counts @ levels)
        self._squares += int(counts @ levels**2)
        self._largest = max(self._largest, int(differences.max(initial=0)))

    def error(self) -> ImageError:
        """Return the error of all that was added; of nothing, 0."""
        if not self._squares:
            return ImageError(0.0, 0, math.inf)
        psnr = 10 * math.log10(PEAK**2 * self._count / self._squares)
        return ImageError(self._sum / self._count, self._largest, psnr)
