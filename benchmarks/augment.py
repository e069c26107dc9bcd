"""Time shuffled, augmented epochs of photographs: memfeed, torchvision v2 with DataLoader, FFCV, DALI and OpenCV.

The photographs (made ones if there are none) are uint8 [3, 256, 256], kept without compression by everyone. A batch
is 64 of them, as float32 [64, 3, 224, 224]: a random resized crop, a random flip, normalised. Each contender has its
own process, draws its own crops, and must give every row once with its label, in batches whose mean and deviation are
those of the photographs. Then they run epochs in turns. torchvision v2 runs with 0, 1 and 2 workers.

    python benchmarks/augment.py         # in the environment of make peers: with FFCV
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import distributions, packages_distributions, version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from measure import PHOTOS, Check, Seconds, machine, medians, parser, ratio, seconds_of, show, table, write
from others import Contender, Work, answer_all, mapped_rows
from peers import Rows
from peers.rows import Batch, Epochs, save_npy

SIDE, CROP, BATCH = 256, 224, 64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OURS, VISION = "memfeed.Loader", "torchvision v2, DataLoader(num_workers={})"
WORKERS = (0, 1, 2)
PREPARE_SECONDS, TURN_SECONDS = 240.0, 90.0  # the longest waits for a process
MEAN_DIFFERS, STD_DIFFERS = 0.15, 0.15  # of normalised pixels: other crops of the same photographs
BYTE_MEAN, BYTE_STD = ([255 * one for one in values] for values in (MEAN, STD))


def photographs(count: int) -> torch.Tensor:
    """Return uint8 [count, 3, 256, 256]: the photographs of hymenoptera_data again and again, or smooth made ones."""
    files = sorted(PHOTOS.rglob("*.jpg"))[: count or None]
    if not files:
        small = torch.randint(0, 256, (count, 3, 16, 16), generator=torch.Generator().manual_seed(0)).float()
        return torch.nn.functional.interpolate(small, size=SIDE, mode="bilinear").to(torch.uint8)
    from PIL import Image, ImageOps

    found = torch.stack(
        [torch.from_numpy(np.array(ImageOps.fit(Image.open(file).convert("RGB"), (SIDE, SIDE)))) for file in files]
    )
    return found.permute(0, 3, 1, 2).contiguous()[torch.arange(count) % len(files)]


# --- the contenders


def ours(rows: Rows, directory: Path) -> Iterable[Any]:
    import memfeed
    from memfeed.transforms import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop
    from memfeed.transforms.backends.compiled_passes import LOOPS

    LOOPS.wait()  # compiled once, as what the others import
    store = memfeed.cache(tuple(rows), directory, allow="copy", progress=False)
    recipe = Compose([RandomResizedCrop(CROP), RandomHorizontalFlip(), Normalize(MEAN, STD)])
    return memfeed.Loader(store, BATCH, shuffle=True, transform=recipe)


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """The rows as samples of torchvision's transforms."""

    def __init__(self, rows: Rows) -> None:
        from torchvision.transforms import v2

        self.rows = rows
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(CROP, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        """Return an augmented image, and its label."""
        return self.transform(self.rows.images[i]), int(self.rows.labels[i])


def by_torchvision(rows: Rows, directory: Path, workers: int) -> Iterable[Any]:
    if workers:
        torch.set_num_threads(1)
    return DataLoader(Photographs(rows), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def by_opencv(rows: Rows, directory: Path) -> Iterable[Any]:
    """Loop by hand: OpenCV and NumPy on two threads, channels last until the last step, into one buffer."""
    import cv2

    cv2.setNumThreads(1)
    images = np.ascontiguousarray(rows.images.permute(0, 2, 3, 1).numpy())
    scale, shift = (
        np.float32(values) for values in ([1 / s for s in BYTE_STD], [-m / s for m, s in zip(MEAN, STD, strict=True)])
    )
    buffer = np.empty((BATCH, 3, CROP, CROP), np.float32)
    pool = ThreadPoolExecutor(2)
    random = np.random.default_rng(0)

    def one(place: int, row: int, area: float, aspect: float, at: np.ndarray[Any, Any], flip: bool) -> None:
        h, w = (min(SIDE, max(1, round(SIDE * (area * a) ** 0.5))) for a in (1 / aspect, aspect))
        top, left = (int(a * (SIDE - side + 1)) for a, side in zip(at, (h, w), strict=True))
        crop = cv2.resize(images[row, top : top + h, left : left + w], (CROP, CROP), interpolation=cv2.INTER_LINEAR)
        if flip:
            crop = crop[:, ::-1]
        np.multiply(crop.transpose(2, 0, 1), scale[:, None, None], out=buffer[place])
        buffer[place] += shift[:, None, None]

    def epoch() -> Iterator[Batch]:
        for ids in np.array_split(random.permutation(len(images)), range(BATCH, len(images), BATCH)):
            k = len(ids)
            areas, aspects = random.uniform(0.08, 1, k), np.exp(random.uniform(-np.log(4 / 3), np.log(4 / 3), k))
            list(pool.map(one, range(k), ids, areas, aspects, random.random((k, 2)), random.random(k) < 0.5))
            yield torch.from_numpy(buffer[:k]), rows.labels[ids]

    return Epochs(epoch)


def by_ffcv(rows: Rows, directory: Path) -> Iterable[Any]:
    """FFCV's own random resized crop of raw images, flip and normalisation. It resizes by OpenCV's INTER_AREA."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    class Samples:
        def __len__(self) -> int:
            return len(rows.labels)

        def __getitem__(self, i: int) -> tuple[np.ndarray[Any, Any], int]:
            return np.ascontiguousarray(rows.images[i].permute(1, 2, 0).numpy()), int(rows.labels[i])

    directory.mkdir(parents=True)
    path = str(directory / "rows.beton")
    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    DatasetWriter(path, fields, num_workers=1).from_indexed_dataset(Samples())
    image: list[Any] = [
        RandomResizedCropRGBImageDecoder((CROP, CROP)),
        RandomHorizontalFlip(),
        NormalizeImage(np.array(BYTE_MEAN), np.array(BYTE_STD), np.float32),
        ToTensor(),
        ToTorchImage(),
    ]
    loader = Loader(
        path,
        BATCH,
        num_workers=2,
        os_cache=True,
        order=OrderOption.RANDOM,
        drop_last=False,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor()]},
    )

    def epoch() -> Iterator[Batch]:
        for images, labels in loader:
            yield images, labels[:, 0]

    return Epochs(epoch)


def by_dali(rows: Rows, directory: Path) -> Iterable[Any]:
    """DALI's pipeline of the CPU. A source gives it batches of mapped rows, channels last as its operators need."""
    from nvidia.dali import fn, pipeline_def, types

    images, _ = save_npy(Rows(rows.images.permute(0, 2, 3, 1).contiguous(), rows.labels), directory)
    order: list[np.ndarray[Any, Any]] = []
    random = np.random.default_rng(0)

    def next_batch() -> list[np.ndarray[Any, Any]]:
        if not order:
            shuffled = random.permutation(len(images))
            order.extend(shuffled[at : at + BATCH] for at in range(0, len(shuffled), BATCH))
        given.append(order.pop(0))
        return [images[row] for row in given[-1]]

    given: list[np.ndarray[Any, Any]] = []

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None)
    def pipeline() -> Any:
        batch = fn.external_source(source=next_batch, batch=True, layout="HWC")
        crops = fn.random_resized_crop(batch, size=[CROP, CROP])
        mirror = fn.random.coin_flip()
        return fn.crop_mirror_normalize(
            crops, dtype=types.FLOAT, output_layout="CHW", mirror=mirror, mean=BYTE_MEAN, std=BYTE_STD
        )

    made = pipeline()
    made.build()

    def epoch() -> Iterator[Batch]:
        left = len(images)
        while left:
            (batch,) = made.run()
            ids = given.pop(0)
            left -= len(ids)
            yield torch.from_dlpack(batch.as_tensor()), rows.labels[ids]

    return Epochs(epoch)


CONTENDERS: dict[str, tuple[str, Callable[[Rows, Path], Iterable[Any]]]] = {
    OURS: ("memfeed", ours),
    "FFCV": ("ffcv", by_ffcv),
    "DALI, CPU": ("nvidia.dali", by_dali),
    "OpenCV and NumPy by hand": ("cv2", by_opencv),
    **{VISION.format(workers): ("torchvision", partial(by_torchvision, workers=workers)) for workers in WORKERS},
}
"""name -> (module, function that makes its epochs)"""


# --- a contender's process


def check(name: str, rows: Rows, epochs: Iterable[Any]) -> None:
    """Check that an epoch has every row once, in float32 batches of the right size, like the photographs."""
    wanted = rows.images.float().flatten(2) / 255
    mean, std = wanted.mean(), wanted.std()
    order, sums, squares, pixels = [], 0.0, 0.0, 0
    for images, labels in epochs:
        assert tuple(images.shape) == (len(labels), 3, CROP, CROP), f"{name}: images are {list(images.shape)}"
        assert images.dtype == torch.float32, f"{name}: images are {images.dtype}"
        order += labels.tolist()
        back = images * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
        sums, squares, pixels = sums + float(back.sum()), squares + float((back**2).sum()), pixels + back.numel()
    assert sorted(order) == list(range(len(rows.labels))), f"{name}: not every row once"
    assert order != sorted(order), f"{name}: not shuffled"
    found_std = (squares / pixels - (sums / pixels) ** 2) ** 0.5
    assert abs(sums / pixels - mean) < MEAN_DIFFERS, f"{name}: the mean is {sums / pixels:.3f}, of the rows {mean:.3f}"
    assert abs(found_std - std) < STD_DIFFERS, f"{name}: the deviation is {found_std:.3f}, of the rows {std:.3f}"


def serve(name: str, log: Path, connection: Connection) -> None:
    """Answer requests: a Work to prepare, then the least seconds of a turn."""
    epochs: Iterable[Any] = ()
    count = 0

    def answer(request: Any) -> float | None:
        nonlocal epochs, count
        if isinstance(request, Work):
            rows = mapped_rows(request)
            count = len(rows.labels)
            epochs = CONTENDERS[name][1](rows, request.directory / f"of-{list(CONTENDERS).index(name)}")
            check(name, rows, epochs)
            return None

        def drain() -> None:
            seen = sum(len(labels) for _, labels in epochs)
            assert seen == count, f"found {seen} rows in an epoch, expected {count}"

        times = [seconds_of(drain)]
        while sum(times) < request:
            times.append(seconds_of(drain))
        return statistics.median(times)

    answer_all(log, connection, answer)


def race(images: torch.Tensor, rounds: int, least: float, names: list[str]) -> tuple[Seconds, dict[str, str]]:
    """Return the seconds of an epoch of each contender in each round, and why others failed."""
    failed: dict[str, str] = {}
    seconds: Seconds = {name: [] for name in names}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = Work("photographs", len(images), tuple(images.shape[1:]), BATCH, Path(folder) / "work")
        save_npy(Rows(images, torch.arange(len(images))), work.directory / "rows")
        running = [Contender(name, Path(folder), serve) for name in names]
        try:
            for contender in [*running]:
                contender.start()
                try:
                    contender.ask(work, PREPARE_SECONDS)
                except RuntimeError as error:
                    if contender.name == OURS:
                        raise
                    failed[contender.name] = str(error)
                    running.remove(contender)
                    contender.close()
                    contender.join()
            for turn in range(rounds):
                for contender in running[turn % len(running) :] + running[: turn % len(running)]:
                    seconds[contender.name].append(contender.ask(least, TURN_SECONDS))
        finally:
            for contender in running:
                contender.close()
            for contender in running:
                contender.join()
    return {name: times for name, times in seconds.items() if times}, failed


def main() -> None:
    options = parser("augment", __doc__).parse_args()
    count, rounds, least = (128, 2, 0.0) if options.quick else (2000, 7, 0.5)
    there = {name: found for name, (module, _) in CONTENDERS.items() if (found := version_of(module))}
    images = photographs(count)
    seconds, failed = race(images, rounds, least, list(there))
    median = medians(seconds)
    times_ours = {name: ratio(seconds, name, OURS) for name in seconds}
    table(
        f"{count:,} photographs, resized crop, flip, normalise, batches of {BATCH}",
        ["", "images/s", "memfeed is"],
        [
            [name, f"{count / t:,.0f}", f"{times_ours[name]:.2f} x"]
            for name, t in sorted(median.items(), key=lambda i: i[1])
        ],
    )
    best = min((name for name in median if name.startswith("torchvision")), key=median.__getitem__, default=None)
    checks = (
        []
        if best is None
        else [Check("torchvision v2 with its best workers takes", times_ours[best], 5, at_least=True)]
    )
    if "FFCV" in median:
        checks.append(Check("FFCV takes", times_ours["FFCV"], 4, at_least=True))
    show("augment", checks)
    for name, why in failed.items():
        print(f"{name} failed:\n{why}")
    write(
        options,
        {"photographs": bool(any(PHOTOS.rglob("*.jpg"))), "rows": count, "batch_size": BATCH, "rounds": rounds},
        {
            "machine": {**machine(), "versions": there},
            "images_per_second": {name: count / t for name, t in median.items()},
            "times_ours": times_ours,
            "failed": failed,
            "missing": [name for name in CONTENDERS if name not in there],
            "seconds": seconds,
        },
        checks,
    )


def version_of(module: str) -> str | None:
    """Return the version of the library that brings this module; None if it is not installed."""
    try:
        if find_spec(module) is None:
            return None
    except ModuleNotFoundError:  # the package that it is a part of
        return None
    if module.startswith("nvidia"):  # many libraries are in that package
        return next(d.version for d in distributions() if d.name.startswith("nvidia-dali"))
    return version(packages_distributions()[module][0])


if __name__ == "__main__":
    main()
