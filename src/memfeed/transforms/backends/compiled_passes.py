"""Run parts of a pass over bytes in compiled loops on the CPU, where numba is installed; see `loops` and `color_loops`.

A whole part of a batch is one call, without Python's lock. The values are those of the other way, each byte and each
float, so which one runs changes nothing but the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.schema.jagged import RowViews
from memfeed.system.compiled import Loops
from memfeed.system.share import RowsFunction
from memfeed.transforms.params.geometry import Imagewise, Warped, filled
from memfeed.transforms.params.pixels import borrow
from memfeed.transforms.params.resample import Resampled
from memfeed.transforms.params.sizes import GeometryBySize, Images
from memfeed.transforms.params.value_changes import HALVES, Affine, Gray, Jitter, scale_and_shift
from memfeed.transforms.params.window import Window

LOOPS = Loops("memfeed.transforms.backends.loops", after=150_000_000)  # values of outputs: half a second of work
COLOR_LOOPS = Loops("memfeed.transforms.backends.color_loops", after=30_000_000)  # bytes of images: likewise
_MOST_CHANNELS = 4  # torch resizes more of them by other code
_LEAST_WIDTH = 16  # see `loops.LANES`
_MOST_HUE = 0.5  # the most that `color_loops` turns it
_NO_BYTES, _NO_FLOATS = np.empty(0, np.uint8), np.empty(0, np.float32)


@dataclass(frozen=True, eq=False)
class Head:
    """The first changes of a pass over images of bytes. It gives the images after them, as RowViews gives rows.

    Args:
        source: owns the memory of the images.
        images: as the loops take them, int64 [n, 5].
        boxes: to resize, int64 [n, 4], and the size they get; None if there is nothing to resize.
        windows: of the result, int64 [n, 4].
        fill: of pixels outside the images, one byte for each channel.
        size: (channels, height, width) of the images after the changes.
        length: how many changes there are.
    """

    source: Any
    images: NDArray[np.int64]
    boxes: tuple[NDArray[np.int64], int, int, bool] | None
    windows: NDArray[np.int64]
    fill: NDArray[np.uint8]
    size: tuple[int, int, int]
    length: int

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, which: slice) -> Sequence[torch.Tensor]:
        """Return these images after the changes, each [c, h, w]."""
        begin, end, _ = which.indices(len(self))
        target, constants = borrow(end - begin, *self.size), _constants(None, self.size[0])
        assert constants is not None
        self._write(_rows(target), False, constants, begin, end)
        return target.unbind(0)

    def filler(self, affine: Affine | None, output: torch.Tensor, at_once: int) -> RowsFunction | None:
        """Return what fills rows `begin` to `end` of the output; those of 16 bits by float32, `at_once` at a time.

        None if it cannot do the Affine exactly as torch. Several threads may call it. With other dtypes it calls no
        function of torch: most of them give Python's lock back, and then wait for it.
        """
        constants = _constants(affine, self.size[0])
        if constants is None:
            return None
        if output.dtype in HALVES:
            return partial(self._fill_halves, constants, output, at_once)
        is_last, rows = not output.is_contiguous(), _rows(output)
        return lambda begin, end: self._write(rows[begin:end], is_last, constants, begin, end)

    def _fill_halves(
        self, constants: tuple[int, NDArray[np.float32]], output: torch.Tensor, at_once: int, begin: int, end: int
    ) -> None:
        scratch = torch.empty(min(at_once, end - begin), *self.size, device="cpu")
        for first in range(begin, end, at_once):
            last = min(first + at_once, end)
            part = scratch[: last - first]
            self._write(_rows(part), False, constants, first, last)
            output[first:last].copy_(part)

    def _write(
        self, rows: NDArray[Any], is_last: bool, constants: tuple[int, NDArray[np.float32]], begin: int, end: int
    ) -> None:
        """Write images `begin` to `end` to rows, whose channels come last if `is_last`."""
        flat = rows.reshape(-1)
        outputs = (flat, _NO_FLOATS) if flat.dtype == np.uint8 else (_NO_BYTES, flat)
        images, windows = self.images[begin:end], self.windows[begin:end]
        if self.boxes is None:
            LOOPS.get().crop(images, windows, self.fill, *constants, *outputs, *self.size, is_last)
            return
        boxes, *full = self.boxes
        LOOPS.get().resize(images, boxes[begin:end], windows, *full, *constants, *outputs, *self.size, is_last)


def _rows(images: torch.Tensor) -> NDArray[Any]:
    """Return images [n, c, h, w] as they lie in memory, [n, c * h * w]."""
    return (images if images.is_contiguous() else images.permute(0, 2, 3, 1)).flatten(1).numpy()


def head_of(images: Images | RowViews, changes: Sequence[Imagewise], values: int) -> Head | None:
    """Return the first changes of images that compiled loops can do; None if there are none, or no loops yet.

    The images are those of `passes.fused`; ``values`` is how many the output has.
    """
    resize = changes[0] if changes and isinstance(changes[0], (Resampled, GeometryBySize)) else None
    if changes and resize is None and type(changes[0]) is not Window:
        return None
    places = None if LOOPS.get(values) is None else _places(images)
    if places is None:
        return None
    channels, array = places
    boxes = None if resize is None else _boxes(resize, array)
    if (resize is not None and boxes is None) or (boxes is None and isinstance(images, list)):
        return None
    length = 0 if boxes is None else 1
    height, width = array[0, 3:].tolist() if boxes is None else boxes[1:3]
    windows, fill = np.zeros((len(array), 4), np.int64), np.zeros(channels, np.uint8)
    window = changes[length] if len(changes) > length else None
    if type(window) is Window and len(window.top) == len(array):
        is_inside = window.lies_within(height, width)
        if is_inside or boxes is None:
            windows[:] = np.stack([window.top, window.left, window.hflip, window.vflip], 1)
            if not is_inside:
                bytes_like = torch.empty(0, dtype=torch.uint8, device="cpu")
                fill[:] = filled(window.fill, (channels, 1, 1), bytes_like).view(-1).numpy()
            length, height, width = length + 1, window.height, window.width
    if width < _LEAST_WIDTH or (changes and not length):
        return None
    return Head(images, array, boxes, windows, fill, (channels, height, width), length)


def _places(images: Images | RowViews) -> tuple[int, NDArray[np.int64]] | None:
    """Return the number of channels, and images as the loops take them; None if their bytes are no such planes."""
    rows: NDArray[np.int64] | None = None
    if isinstance(images, list):
        alike = {(image.dtype, image.ndim, image.size(0), image.stride(-1)) for image in images}
        if len(alike) > 1 or images[0].dtype is not torch.uint8 or images[0].ndim != 3 or images[0].stride(2) != 1:
            return None
        array = np.array([[torch.Tensor.data_ptr(i), *i.stride()[:2], *i.shape[1:]] for i in images], np.int64)
        channels = images[0].size(0)
    else:
        data, rows = (images.data, images.rows) if isinstance(images, RowViews) else (images, None)
        if data.dtype is not torch.uint8 or data.ndim != 4 or data.stride(3) != 1:
            return None
        array = np.empty((len(images), 5), np.int64)
        array[:, 0] = np.arange(len(images)) if rows is None else rows
        array[:, 0] *= data.stride(0)
        array[:, 0] += data.data_ptr()
        array[:, 1:] = *data.stride()[1:3], *data.shape[2:]
        channels = data.size(1)
    is_fitting = 1 <= channels <= _MOST_CHANNELS and array[:, 3:].min() > 0
    return (channels, array) if is_fitting else None


def _boxes(resize: Imagewise, array: NDArray[np.int64]) -> tuple[NDArray[np.int64], int, int, bool] | None:
    """Return boxes of all images, the size they get, and whether the filter is bicubic; None if loops cannot do it."""
    parts, samples = [resize], [np.arange(len(array))]
    if isinstance(resize, GeometryBySize):
        parts, samples = [*resize.parts], [*resize.sizes.samples]
    resampled = [part for part in parts if type(part) is Resampled and part.antialias]
    if len(resampled) < len(parts) or [len(part.top) for part in resampled] != [*map(len, samples)]:
        return None
    boxes, of_parts = np.zeros((len(array), 4), np.int64), np.concatenate(samples)
    for column, name in enumerate(("top", "left", "box_height", "box_width")):
        boxes[of_parts, column] = np.concatenate([getattr(part, name) for part in resampled])
    (height, width, mode), *others = {(part.height, part.width, part.mode) for part in resampled}
    is_inside = boxes[:, :2].min() >= 0 and boxes[:, 2:].min() > 0
    is_inside = is_inside and bool((boxes[:, :2] + boxes[:, 2:] <= array[:, 3:]).all())
    if others or mode not in ("bilinear", "bicubic") or not is_inside or array[:, 4].min() < _LEAST_WIDTH:
        return None
    return boxes, height, width, mode == "bicubic"


@lru_cache(64)
def _constants(affine: Affine | None, channels: int) -> tuple[int, NDArray[np.float32]] | None:
    """Return the kind of output and its numbers, as the loops take them; None if torch computes it in another way."""
    loops, numbers = LOOPS.get(), np.zeros((2, channels), np.float32)
    if affine is None or affine.dtype is torch.uint8:
        return None if affine is not None and affine.scale is not None else (loops.BYTES, numbers)
    if affine.dtype not in (torch.float32, *HALVES):
        return None
    if affine.scale is None or affine.shift is None:
        numbers[0] = 1
        return loops.FLOATS, numbers
    if len(affine.scale) != channels:
        return None
    numbers[:] = affine.scale, affine.shift
    every_byte = torch.arange(256, dtype=torch.uint8, device="cpu").expand(1, channels, 1, 256).contiguous()
    expected = torch.empty(every_byte.shape, device="cpu")
    scale_and_shift(every_byte.float(), affine.scale, affine.shift, expected)
    image = np.array([[every_byte.data_ptr(), 256, 256, 1, 256]], np.int64)
    found = np.empty(channels * 256, np.float32)
    for kind in (loops.FUSED_FLOATS, loops.FLOATS):  # as torch does, which depends on the processor
        no_window, no_fill = np.zeros((1, 4), np.int64), np.zeros(channels, np.uint8)
        loops.crop(image, no_window, no_fill, kind, numbers, _NO_BYTES, found, channels, 1, 256, False)
        if np.array_equal(found, expected.view(-1).numpy()):
            return kind, numbers
    return None


def change_one(change: Imagewise, image: torch.Tensor, sample: int) -> torch.Tensor:
    """Change one image as `change.one` does: by a compiled loop, if there is one for this change of this image."""
    is_ours = type(change) in (Jitter, Gray, Warped) and image.dtype is torch.uint8 and image.ndim == 3
    loops = COLOR_LOOPS.get(image.numel()) if is_ours and image.is_cpu else None
    if loops is None or not image.numel():
        return change.one(image, sample)
    if isinstance(change, Warped):
        is_whole = change.mode == "nearest" and image.shape[1:] == (change.height, change.width)
        return _turned(change, image, sample, loops) if is_whole else change.one(image, sample)
    changes = _colors(change, image, sample, loops)
    if changes is None:
        return change.one(image, sample)
    output = _copied(image)
    loops.recolor(output.view(3, -1).numpy(), *changes)
    return output


def _colors(change: Imagewise, image: torch.Tensor, sample: int, loops: Any) -> tuple[Any, Any] | None:
    """Return the kinds of changes of an image and their factors, in their order; None if no loop computes them."""
    if image.size(0) != 3:
        return None
    if isinstance(change, Gray):
        is_gray = bool(change.chosen[sample])
        return (np.array([loops.GRAY]), np.zeros(1, np.float32)) if is_gray else None
    assert isinstance(change, Jitter)
    kinds = {
        "brightness": loops.BRIGHTNESS, "contrast": loops.CONTRAST, "saturation": loops.SATURATION, "hue": loops.HUE,
    }  # fmt: skip
    factors = {name: change.factors[name][sample] for name in change.factors}
    if not factors or ("contrast" in factors and image.numel() > 3 * loops.MOST_PIXELS):
        return None
    if not kinds.keys() >= factors.keys() or abs(factors.get("hue", 0)) > _MOST_HUE:
        return None
    order = change.order[sample]
    return np.array([kinds[name] for name in factors])[order], np.array([*factors.values()], np.float32)[order]


def _turned(change: Warped, image: torch.Tensor, sample: int, loops: Any) -> torch.Tensor:
    """Return an image as a Warped by the nearest pixel turns it."""
    whole = image if image.is_contiguous() else _copied(image)
    fill = filled(change.fill, (image.size(0), 1, 1), image).view(-1).numpy()
    output = borrow(*image.shape)
    loops.turn(whole.numpy(), change.matrix[sample].astype(np.float32), fill, output.numpy())
    return output


def _copied(image: torch.Tensor) -> torch.Tensor:
    output = borrow(*image.shape)
    np.copyto(output.numpy(), image.numpy())
    return output
