"""Photo-like JPEGs: soft colours, a few shapes and the grain of natural images, so that they decode like photographs.

The grain has a 1/f amplitude spectrum, as natural images have on average (Field, 1987); it is what makes a JPEG of
this size weigh and cost what a photograph's does.
"""

from __future__ import annotations

import colorsys
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SIZE = (500, 375)
"""Width and height in pixels, of three photos in four; the others stand upright."""
CLASSES = ("bubbles", "crates", "ribbons", "shards")
QUALITY = 92
GRAIN_SIDE = 1024
GRAIN = 34.0
"""Standard deviation of the grain, in grey levels of 255."""


def make_photos(root: Path, count: int, *, seed: int = 0, advance: Callable[[int], None] = lambda done: None) -> int:
    """Writes ``count`` JPEGs into ``root``/CLASS/, the same for the same seed; returns their bytes.

    Uses one thread per core (Pillow and numpy let go of the interpreter where they work), and calls ``advance(1)``
    after each photo.
    """
    for name in CLASSES:
        (root / name).mkdir(parents=True, exist_ok=True)
    grain = _grain(np.random.default_rng(seed))

    def make(number: int) -> int:
        kind = number % len(CLASSES)
        path = root / CLASSES[kind] / f"{number:05}.jpg"
        _photo(np.random.default_rng([seed, number]), kind, grain).save(path, quality=QUALITY)
        return path.stat().st_size

    total = 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for size in pool.map(make, range(count)):
            total += size
            advance(1)
    return total


def _grain(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Noise with a 1/f amplitude spectrum, [GRAIN_SIDE, GRAIN_SIDE, 3], standard deviation 1, mostly grey."""
    frequency = np.hypot(np.fft.fftfreq(GRAIN_SIDE)[:, None], np.fft.rfftfreq(GRAIN_SIDE)[None, :])
    frequency[0, 0] = 1.0
    layers = [np.fft.irfft2(np.fft.rfft2(rng.standard_normal((GRAIN_SIDE, GRAIN_SIDE))) / frequency) for _ in range(4)]
    grey, *colours = [layer / layer.std() for layer in layers]
    return np.stack([grey + 0.25 * colour for colour in colours], axis=-1).astype(np.float32)


def _photo(rng: np.random.Generator, kind: int, grain: npt.NDArray[np.float32]) -> Any:
    from PIL import Image, ImageDraw, ImageFilter

    width, height = SIZE if rng.random() < 0.75 else SIZE[::-1]
    hue = kind / len(CLASSES) + rng.normal(0, 0.08)
    backdrop = np.array([[_colour(rng, hue) for _ in range(4)] for _ in range(3)], np.uint8)
    image = Image.fromarray(backdrop).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(rng.integers(4, 10)):
        _shape(draw, rng, kind, (width, height), _colour(rng, hue + 0.45))
    image = image.filter(ImageFilter.GaussianBlur(1.2))
    top, left = rng.integers(0, GRAIN_SIDE - height), rng.integers(0, GRAIN_SIDE - width)
    window = grain[top : top + height, left : left + width]
    pixels = np.asarray(image, np.float32) + window * np.float32(GRAIN * rng.uniform(0.6, 1.3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _shape(draw: Any, rng: np.random.Generator, kind: int, size: tuple[int, int], colour: tuple[int, ...]) -> None:
    x, y = rng.uniform(0, 1, 2) * size
    reach = rng.uniform(0.06, 0.22) * min(size)
    if kind == 0:
        draw.ellipse((x - reach, y - reach, x + reach, y + reach), fill=colour)
    elif kind == 1:
        draw.rectangle((x - reach, y - reach * 0.7, x + reach, y + reach * 0.7), fill=colour)
    elif kind == 2:
        points = np.cumsum(rng.normal(0, reach * 1.5, (5, 2)), axis=0) + (x, y)
        draw.line([tuple(point) for point in points.tolist()], fill=colour, width=int(reach / 3) + 2, joint="curve")
    else:
        points = rng.normal(0, reach, (3, 2)) + (x, y)
        draw.polygon([tuple(point) for point in points.tolist()], fill=colour)


def _colour(rng: np.random.Generator, hue: float) -> tuple[int, ...]:
    channels = colorsys.hsv_to_rgb((hue + rng.normal(0, 0.05)) % 1, rng.uniform(0.25, 0.7), rng.uniform(0.35, 0.9))
    return tuple(int(255 * channel) for channel in channels)
