"""JPEG files that take as long to decode as photographs: soft colours, a few shapes, and the grain of natural images.

The grain has a 1/f amplitude spectrum, as natural images have on average (Field, 1987). It gives the files the size
and the decoding time of photographs.
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
"""Width and height in pixels of three photos in four; the others have height and width exchanged."""
CLASSES = ("red", "green", "cyan", "violet")
"""The classes, by the colour of the background: hues 0, 1/4, 1/2 and 3/4."""
QUALITY = 92
GRAIN_SIDE = 1024
GRAIN = 34.0
"""Standard deviation of the grain, in grey levels of 255."""


def make_photos(root: Path, count: int, *, seed: int = 0, advance: Callable[[int], None] = lambda done: None) -> int:
    """Write ``count`` JPEG files to ``root``/CLASS/, equal for equal seeds. Return the bytes of all files.

    Uses one thread per core (Pillow and numpy release the interpreter lock), and calls ``advance(1)`` after each file.
    """
    for name in CLASSES:
        (root / name).mkdir(parents=True, exist_ok=True)
    grain = _grain(np.random.default_rng(seed))

    def make(index: int) -> int:
        label = index % len(CLASSES)
        path = root / CLASSES[label] / f"{index:05}.jpg"
        _photo(np.random.default_rng([seed, index]), label / len(CLASSES), grain).save(path, quality=QUALITY)
        return path.stat().st_size

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        total = 0
        for size in pool.map(make, range(count)):
            total += size
            advance(1)
    return total


def _grain(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return noise with a 1/f amplitude spectrum, [GRAIN_SIDE, GRAIN_SIDE, 3], standard deviation 1, mostly grey."""
    frequency = np.hypot(np.fft.fftfreq(GRAIN_SIDE)[:, None], np.fft.rfftfreq(GRAIN_SIDE)[None, :])
    frequency[0, 0] = 1.0
    layers = [np.fft.irfft2(np.fft.rfft2(rng.standard_normal((GRAIN_SIDE, GRAIN_SIDE))) / frequency) for _ in range(4)]
    grey, *colours = [layer / layer.std() for layer in layers]
    return np.stack([grey + 0.25 * colour for colour in colours], axis=-1).astype(np.float32)


def _photo(rng: np.random.Generator, hue: float, grain: npt.NDArray[np.float32]) -> Any:
    """Return a Pillow image: ellipses of the opposite hue on a background of ``hue``, with grain."""
    from PIL import Image, ImageDraw, ImageFilter

    width, height = SIZE if rng.random() < 0.75 else SIZE[::-1]
    hue += rng.normal(0, 0.08)
    background = np.array([[_colour(rng, hue) for _ in range(4)] for _ in range(3)], np.uint8)
    image = Image.fromarray(background).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(rng.integers(4, 10)):
        (x, y), radius = rng.uniform(0, 1, 2) * (width, height), rng.uniform(0.06, 0.22) * min(SIZE)
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_colour(rng, hue + 0.45))
    image = image.filter(ImageFilter.GaussianBlur(1.2))
    top, left = rng.integers(0, GRAIN_SIDE - height), rng.integers(0, GRAIN_SIDE - width)
    window = grain[top : top + height, left : left + width]
    pixels = np.asarray(image, np.float32) + window * np.float32(GRAIN * rng.uniform(0.6, 1.3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _colour(rng: np.random.Generator, hue: float) -> tuple[int, ...]:
    channels = colorsys.hsv_to_rgb((hue + rng.normal(0, 0.05)) % 1, rng.uniform(0.25, 0.7), rng.uniform(0.35, 0.9))
    return tuple(int(255 * channel) for channel in channels)
