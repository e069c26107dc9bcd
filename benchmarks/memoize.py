"""Compare ways to keep the result of a function of a file: what a plain loop pays to have each array again.

Photographs of 12 megapixels, photographs of about 500 x 375, compressed volumes, and files of eight numbers. Each
contender is a function from a path to an array. One process reads the same files in shuffled order, page cache warm.
The arrays of all contenders are compared before any is timed. The table has two figures for each: to have the array,
and to have it and read all of it once, because a map is read only then.

    python benchmarks/memoize.py
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

import memfeed
from convert import make_photographs
from measure import PHOTOS, Check, Seconds, in_turns, medians, parser, ratio, seconds_of, show, table, write

DECODE, NPY, BARE = "decode", ".npy beside the file", "np.load(mmap_mode) and a copy"
JOBLIB, MONAI = "joblib.Memory", "MONAI PersistentDataset"
OURS, MAPPED = "memfeed.memoize", "memfeed.memoize, mapped=True"
PACKAGES = {JOBLIB: "joblib", MONAI: "monai"}
LARGE = (4000, 3000)  # width and height: 12 megapixels
VOLUME = (96, 128, 128)
TINY = "eight numbers"
MOST_MICROSECONDS = 30.0

Load = Callable[[Path], Any]


class Input(NamedTuple):
    """Files, and how one is decoded."""

    files: list[Path]
    decode: Load


def decode_image(path: Path) -> Any:
    """Return a photograph as uint8 [h, w, 3]."""
    with Image.open(path) as image:
        return np.array(image.convert("RGB"))


def decode_volume(path: Path) -> Any:
    """Return a volume as float32 [96, 128, 128]."""
    with np.load(path) as found:
        return found["volume"]


def decode_numbers(path: Path) -> Any:
    """Return eight int64."""
    return np.fromfile(path, np.int64)


def make_inputs(base: Path, quick: bool) -> dict[str, Input]:
    """Write the files of each input to directories below ``base``."""
    few, many = (2, 6) if quick else (12, 100)
    large, shape = ((400, 300), (8, 16, 16)) if quick else (LARGE, VOLUME)
    for name in ("source", "large", "small", "volumes", "numbers"):
        (base / name).mkdir()
    photographs = sorted(PHOTOS.rglob("*.jpg")) if PHOTOS.is_dir() else make_photographs(base / "source", many)
    small = [shutil.copyfile(path, base / "small" / f"{i}.jpg") for i, path in enumerate(photographs[:many])]
    generator, files = np.random.default_rng(0), list[Path]()
    for i in range(few):
        files.append(base / "large" / f"{i}.jpg")
        with Image.open(photographs[i]) as image:
            image.convert("RGB").resize(large, Image.Resampling.BICUBIC).save(files[-1], quality=92)
    volumes, numbers = list[Path](), list[Path]()
    for i in range(few):
        volumes.append(base / "volumes" / f"{i}.npz")
        noise = generator.standard_normal(shape, np.float32)
        volume = np.cumsum(np.cumsum(noise, 0), 2).round()  # smooth, as measured volumes are: it can be compressed
        np.savez_compressed(volumes[-1], volume=volume.astype(np.float32))
    for i in range(many):
        numbers.append(base / "numbers" / f"{i}.bin")
        generator.integers(0, 1 << 40, 8).tofile(numbers[-1])
    return {
        "photographs of 12 megapixels": Input(files, decode_image),
        "photographs of about 500 x 375": Input(small, decode_image),
        "compressed volumes": Input(volumes, decode_volume),
        TINY: Input(numbers, decode_numbers),
    }


def make_contenders(given: Input, base: Path) -> dict[str, Load]:
    """Return a function for each way whose package is installed. Each has the results of all files at its first use."""
    decode = given.decode

    def npy(path: Path) -> Any:
        beside = path.with_suffix(".npy")
        return np.load(beside) if beside.exists() else decode(path)

    def bare(path: Path) -> Any:
        return np.array(np.load(path.with_suffix(".npy"), mmap_mode="r"))

    for path in given.files:
        np.save(path.with_suffix(".npy"), decode(path), allow_pickle=False)
    made: dict[str, Load] = {DECODE: decode, NPY: npy, BARE: bare}
    if find_spec("joblib"):
        import joblib

        made[JOBLIB] = joblib.Memory(base / "joblib", mmap_mode=None, verbose=0).cache(decode)
    if find_spec("monai"):
        made[MONAI] = make_persistent(given, base / "monai")
    made[OURS] = memfeed.memoize(decode, base / "ours.mf")
    made[MAPPED] = memfeed.memoize(decode, base / "ours.mf", mapped=True)
    return made


def make_persistent(given: Input, directory: Path) -> Load:
    """Return a function that reads a PersistentDataset of MONAI."""
    from monai.data import PersistentDataset
    from monai.transforms import Transform

    class Decode(Transform):
        def __call__(self, path: str) -> Any:
            return given.decode(Path(path))

    dataset = PersistentDataset([str(path) for path in given.files], Decode(), directory)
    places = {path: place for place, path in enumerate(given.files)}
    return lambda path: dataset[places[path]]


def require_equal(given: Input, contenders: dict[str, Load]) -> None:
    """Compare all values of all contenders, for all files, twice: when they are computed, and when they are read."""
    for path in given.files:
        expected = given.decode(path)
        for name, load in contenders.items():
            for _ in range(1 if name == DECODE else 2):
                found = np.asarray(load(path))
                assert found.dtype == expected.dtype, name
                assert np.array_equal(found, expected), name


def orders(count: int) -> Iterator[list[int]]:
    """Yield a new order of so many files, for ever."""
    generator = np.random.default_rng(1)
    while True:
        yield generator.permutation(count).tolist()


def read_all(array: Any) -> None:
    """Read each byte of an array or tensor once, eight at a time."""
    data = (array.numpy() if isinstance(array, torch.Tensor) else array).reshape(-1).view(np.uint8)
    words = data[: len(data) // 8 * 8].view(np.int64)
    words.sum()


def time_all(
    given: Input, contenders: dict[str, Load], rounds: int, *, reads: bool, least: float
) -> tuple[Seconds, dict[str, float]]:
    """Return the seconds of each contender in each round, for all files, and the median of them, for one file."""
    drawn = orders(len(given.files))

    def turn(load: Load) -> float:
        paths = [given.files[place] for place in next(drawn)]

        def loop() -> None:
            for path in paths:
                array = load(path)
                if reads:
                    read_all(array)

        return seconds_of(loop)

    found = in_turns({name: lambda load=load: turn(load) for name, load in contenders.items()}, rounds, least)
    return found, {name: seconds / len(given.files) for name, seconds in medians(found).items()}


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def measure(what: str, given: Input, base: Path, rounds: int, least: float) -> tuple[dict[str, Any], list[Check]]:
    """Return the figures and the targets of one input."""
    base.mkdir()
    contenders = make_contenders(given, base)
    require_equal(given, contenders)
    kept = {name: load for name, load in contenders.items() if name != MAPPED}
    had, have = time_all(given, kept, rounds, reads=False, least=least)
    cached = {name: load for name, load in contenders.items() if name != DECODE}
    read, reading = time_all(given, cached, rounds, reads=True, least=least)
    nbytes = sum(given.decode(path).nbytes for path in given.files)
    table(
        f"{what}: {len(given.files)} files, {nbytes / len(given.files) / 1e6:,.2f} MB each",
        ["", "to have it", "and to read it"],
        [[name, *(duration(part[name]) if name in part else "" for part in (have, reading))] for name in contenders],
    )
    checks = []
    if what == TINY:
        checks.append(Check(f"{what}: a hit", have[OURS] * 1e6, MOST_MICROSECONDS, at_least=False, unit="us"))
    else:
        checks.append(Check(f"{what}: hits/s, of {BARE}", ratio(had, BARE, OURS), 0.9, at_least=True))
        others = [name for name in (JOBLIB, MONAI, NPY) if name in contenders]
        checks += [Check(f"{what}: hits/s, of {one}", ratio(had, one, OURS), 1.0, at_least=True) for one in others]
    figures = {
        "files": len(given.files),
        "bytes": nbytes,
        "median_seconds": have,
        "median_seconds_read": reading,
        "ratios": {name: ratio(had, name, OURS) for name in have},
        "ratios_read": {name: ratio(read, name, OURS) for name in reading},
    }
    return figures, checks


def main() -> None:
    made = parser("memoize", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to")
    made.add_argument("--rounds", type=int, default=3)
    options = made.parse_args()
    rounds, least = (1, 0.0) if options.quick else (options.rounds, 0.1)
    works: dict[str, Any] = {}
    checks = list[Check]()
    versions = {name: version(package) for name, package in PACKAGES.items() if find_spec(package)}
    missing = [name for name, package in PACKAGES.items() if not find_spec(package)]
    about = {"rounds": rounds, "versions": versions, "real": PHOTOS.is_dir()}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        base = Path(directory)
        for number, (what, given) in enumerate(make_inputs(base, options.quick).items()):
            works[what], found = measure(what, given, base / str(number), rounds, least)
            checks += found
            write(options, about, {"works": works, "missing": missing}, checks)
    show("memoize", checks)


if __name__ == "__main__":
    main()
