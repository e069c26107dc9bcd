"""Coded rows: bytes, rates and errors of each codec, and the libraries that decode JPEG.

Photographs resized to 256 x 256, masks, tokens and floats. Rates are those of one core, by CPU time; the ratio of two
threads to one is measured in turns. Libraries that are not installed are left out: `pip install imagecodecs torchcodec`
adds two.

    python benchmarks/coded_rows.py
"""

from __future__ import annotations

import io
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from PIL import Image

from measure import PHOTOS, Check, decode_rows, in_turns, parser, ratio, table, write
from memfeed.codecs import lossless, parse_codec
from memfeed.codecs.jpeg import ErrorSum

SIDE = 256
JPEGS = ("jpeg:95", "jpeg:90")
CODECS = {
    "photographs": ("lz4", "zstd", "zstd:7", "jpeg:95", "jpeg:95:4:2:0", "jpeg:90:4:4:4", "jpeg:90", "jpeg:80"),
    "masks": ("lz4", "zstd"),
    "tokens": ("lz4", "zstd"),
    "embeddings": ("lz4", "zstd"),
    "volumes": ("lz4", "zstd"),
    "sounds": ("lz4", "zstd"),
}


def photographs(count: int) -> list[np.ndarray]:
    """Return photographs, uint8 [3, side, side]."""
    rows = []
    for path in sorted(PHOTOS.rglob("*.jpg"))[:count]:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
            rows.append(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    return rows


def inputs(count: int) -> dict[str, list[np.ndarray]]:
    """Return the rows of each kind."""
    rng, images = np.random.default_rng(0), photographs(count)
    few, cube = max(count // 4, 2), (64, 64, 64)

    def smooth(shape: tuple[int, ...]) -> np.ndarray:
        values = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        for _ in range(3):
            values = torch.nn.functional.avg_pool3d(values[None], 5, 1, 2, count_include_pad=False)[0]
        return values.numpy()

    blurred = [
        torch.nn.functional.avg_pool2d(torch.from_numpy(row).float()[None], 25, 1, 12)[0, 0].numpy() for row in images
    ]
    return {
        "photographs": images,
        "masks": [(row // 32).astype(np.int64) for row in blurred],
        "tokens": [np.minimum(rng.zipf(1.3, 4096), 50_000).astype(np.int64) for _ in range(count)],
        "embeddings": [rng.standard_normal((64, 768), dtype=np.float32) for _ in range(few)],
        "volumes": [(smooth(cube) * 5000 + rng.normal(0, 5, cube)).astype(np.int16) for _ in range(few)],
        "sounds": [(np.cumsum(rng.integers(-300, 301, 16_000)) % 30_000 / 2**15).astype("f4") for _ in range(few)],
    }


def seconds_a_row(work: Callable[[int], Any], count: int, rounds: int) -> float:
    """Return the CPU seconds that one row takes in this thread: the median of all rounds."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        for index in range(count):
            work(index)
        times.append((time.thread_time() - began) / count)
    return statistics.median(times)


def of_two_threads(work: Callable[[int], Any], count: int, rounds: int) -> float:
    """Return how many times as many rows two threads of the same work do as one."""

    def all_rows(first: int, step: int) -> None:
        for index in range(first, count, step):
            work(index)

    def in_threads(number: int) -> float:
        threads = [threading.Thread(target=all_rows, args=(first, number)) for first in range(number)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    seconds = in_turns({"one": lambda: in_threads(1), "two": lambda: in_threads(2)}, rounds, 0.1)
    return ratio(seconds, "one", "two")


def rates(name: str, rows: list[np.ndarray], form: str, rounds: int) -> dict[str, Any]:
    """Return what one codec does to the rows of one kind."""
    codec = parse_codec(form).fitted(rows[0].dtype, rows[0].shape)
    blobs = [np.frombuffer(codec.encode(row), np.uint8) for row in rows]
    batch = np.empty((len(rows), *rows[0].shape), rows[0].dtype)
    errors = ErrorSum()
    for blob, row, out in zip(blobs, rows, batch, strict=True):
        codec.decode(blob, out)
        if codec.lossless:
            assert out.tobytes() == row.tobytes(), f"{form} changes {name}"
        else:
            errors.add(row, out)
    raw, coded = sum(row.nbytes for row in rows), sum(map(len, blobs))
    decode = seconds_a_row(lambda index: codec.decode(blobs[index], batch[index]), len(rows), rounds)
    batches = {
        threads: lambda threads=threads: _timed(lambda: decode_rows(codec, blobs, batch, threads)) for threads in (1, 2)
    }
    seconds = in_turns({str(threads): work for threads, work in batches.items()}, rounds, 0.1)
    return {
        "ratio": raw / coded,
        "decode_rows_per_second": 1 / decode,
        "decode_bytes_per_second": raw / len(rows) / decode,
        "encode_rows_per_second": 1 / seconds_a_row(lambda index: codec.encode(rows[index]), len(rows), 3),
        "two_threads": ratio(seconds, "1", "2"),
        **({} if codec.lossless else {"error": errors.error()._asdict()}),
    }


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def filtered(rows: list[np.ndarray], form: str, rounds: int) -> dict[str, Any]:
    """Return bytes and rates with each filter alone, and the share of rows whose blob has it."""
    codec = parse_codec(form)
    narrow = [lossless.narrow(row) for row in rows]
    taken = [np.frombuffer(codec.encode(row), np.uint8)[2] for row in rows]
    found = {}
    for code in lossless.filters_of(narrow[0].dtype, narrow[0].shape):
        blobs = [codec._compress(lossless.apply(code, row).data) for row in narrow]
        out = np.empty_like(narrow[0])

        def decode(index: int, code: int = code, blobs: list[bytes] = blobs, out: np.ndarray = out) -> None:
            data = codec._decompress(memoryview(blobs[index]), out.nbytes)
            lossless.undo(code, np.frombuffer(data, np.uint8), out)

        seconds = seconds_a_row(decode, len(rows), rounds)
        found[("none", "channels", "bytes")[code]] = {
            "ratio": sum(row.nbytes for row in rows) / sum(map(len, blobs)),
            "decode_bytes_per_second": rows[0].nbytes / seconds,
            "taken": taken.count(code) / len(taken),
        }
    return found


def decoders() -> dict[str, Callable[[bytes, np.ndarray], Any]]:
    """Return a decoder of each library: bytes and memory [h, w, 3] to an image."""
    found: dict[str, Callable[[bytes, np.ndarray], Any]] = {
        "Pillow": lambda data, out: np.asarray(Image.open(io.BytesIO(data)))
    }
    wanted: dict[str, tuple[str, Callable[[Any], Callable[[bytes, np.ndarray], Any]]]] = {
        "simplejpeg": ("simplejpeg", lambda m: lambda data, out: m.decode_jpeg(data, buffer=out)),
        "imagecodecs": ("imagecodecs", lambda m: lambda data, out: m.jpeg8_decode(data, out=out)),
        "OpenCV": ("cv2", lambda m: lambda data, out: m.imdecode(np.frombuffer(data, np.uint8), m.IMREAD_COLOR_RGB)),
        "torchvision": ("torchvision.io", lambda m: lambda data, out: m.decode_jpeg(_tensor(data))),
        "torchcodec": ("torchcodec.decoders", lambda m: lambda data, out: m.decode_jpeg(_tensor(data))),
    }
    for name, (module, make) in wanted.items():
        try:
            found[name] = make(import_module(module))
        except (ImportError, OSError, RuntimeError) as error:
            print(f"{name} is left out: {error}")
    return found


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def libraries(images: list[np.ndarray], form: str, rounds: int) -> dict[str, Any]:
    """Return the rate of each library for the blobs of one form, and whether its pixels are simplejpeg's."""
    codec = parse_codec(form)
    blobs = [codec.encode(image) for image in images]
    ours = np.empty_like(images[0])
    codec.decode(np.frombuffer(blobs[0], np.uint8), ours)
    found, of_thread = {}, threading.local()

    def memory() -> np.ndarray:
        if not hasattr(of_thread, "out"):
            of_thread.out = np.empty((SIDE, SIDE, 3), np.uint8)
        return of_thread.out

    # torchvision's decoders are a contender as long as they are there
    warnings.filterwarnings("ignore", "The image decoding and encoding capabilities", DeprecationWarning)
    contenders = decoders()
    for name, decode in contenders.items():
        image = decode(blobs[0], memory())
        same = bool(((image.numpy() if isinstance(image, torch.Tensor) else image.transpose(2, 0, 1)) == ours).all())

        def work(index: int, decode: Callable[[bytes, np.ndarray], Any] = decode) -> None:
            decode(blobs[index], memory())

        found[name] = {
            "rows_per_second": 1 / seconds_a_row(work, len(blobs), rounds),
            "two_threads": of_two_threads(work, len(blobs), rounds),
            "same_pixels": same,
        }
    return found


def main() -> None:
    options = parser("coded_rows", __doc__).parse_args()
    count, rounds = (8, 3) if options.quick else (120, 15)
    torch.set_num_threads(1)
    rows = inputs(count)
    found: dict[str, Any] = {
        name: {form: rates(name, rows[name], form, rounds) for form in forms} for name, forms in CODECS.items()
    }
    by_filter = {
        name: {form: filtered(rows[name], form, rounds) for form in ("lz4", "zstd")}
        for name in CODECS
        if name != "masks"
    }
    by_library = {form: libraries(rows["photographs"], form, rounds) for form in JPEGS}
    for name, forms in found.items():
        lines = [
            [form, f"{one['ratio']:.2f}", f"{one['decode_rows_per_second']:,.0f}",
             f"{one['decode_bytes_per_second'] / 1e9:.2f}", f"{one['encode_rows_per_second']:,.0f}",
             f"{one['two_threads']:.2f}", f"{one['error']['psnr']:.1f}" if "error" in one else ""]
            for form, one in forms.items()
        ]  # fmt: skip
        table(name, ["", "ratio", "decoded/s", "GB/s", "encoded/s", "two threads", "PSNR"], lines)
    for form, library in by_library.items():
        lines = [
            [name, f"{one['rows_per_second']:,.0f}", f"{one['two_threads']:.2f}", str(one["same_pixels"])]
            for name, one in library.items()
        ]
        table(f"libraries, {form}", ["", "images/s", "two threads", "same pixels"], lines)
    about = {
        "rows": {
            name: {"count": len(kind), "dtype": str(kind[0].dtype), "shape": list(kind[0].shape)}
            for name, kind in rows.items()
        }
    }
    checks = [
        Check(f"{form}: two threads against one", found["photographs"][form]["two_threads"], 1.8, True)
        for form in JPEGS
    ]
    write(options, about, {"codecs": found, "filters": by_filter, "libraries": by_library}, checks)


if __name__ == "__main__":
    main()
