"""The contenders of ``forms.py``: each has a process of its own, in which it makes and times its epochs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from measure import seconds_of
from others import answer_all
from peers.rows import Batch, Epochs

SIDE, CROP, BATCH, WORKERS = 256, 224, 64, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BYTE_MEAN, BYTE_STD = ([255 * one for one in values] for values in (MEAN, STD))
MEAN_DIFFERS, STD_DIFFERS = 0.15, 0.15  # of pixels: other crops of the same photographs
FORMS: dict[str, Any] = {
    "raw 256": SIDE,
    "jpeg:95": (SIDE, "jpeg:95"),
    "jpeg:90": (SIDE, "jpeg:90"),
    "encoded": "encoded",
}
"""What a store is called -> ``forms=`` of memfeed."""


class Work(NamedTuple):
    """The photographs, in the classes of a folder, and the stores of them that exist."""

    photographs: Path
    stores: Path


def dataset_of(photographs: Path) -> Any:
    """Return the photographs with random crops; the label of a photograph is its number."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    dataset = ImageFolder(
        str(photographs),
        v2.Compose(
            [
                v2.RandomResizedCrop(CROP, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        ),
    )
    dataset.samples = [(path, number) for number, (path, _) in enumerate(dataset.samples)]
    dataset.targets = list(range(len(dataset.samples)))
    return dataset


def store_path(work: Work, form: str) -> Path:
    return work.stores / f"{form.replace(' ', '-').replace(':', '-')}.mf"


def ours(work: Work, scratch: Path, form: str) -> Iterable[Any]:
    import memfeed
    from memfeed.transforms.backends.compiled_passes import LOOPS

    LOOPS.wait()  # compiled once, as what the others import
    store = memfeed.cache(
        dataset_of(work.photographs), store_path(work, form), forms=FORMS[form], split=True, progress=False
    )
    return memfeed.Loader(store, BATCH, shuffle=True)


def by_torchvision(work: Work, scratch: Path) -> Iterable[Any]:
    torch.set_num_threads(1)
    dataset = dataset_of(work.photographs)
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)


def by_ffcv(work: Work, scratch: Path, quality: int) -> Iterable[Any]:
    """FFCV's ``jpg`` mode: the pixels of the raw store, encoded by it. It resizes by OpenCV's INTER_AREA."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    import memfeed

    images = memfeed.open(store_path(work, "raw 256")).column(0)

    class Samples:
        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, i: int) -> tuple[np.ndarray[Any, Any], int]:
            return np.ascontiguousarray(images[i].permute(1, 2, 0).numpy()), i

    path = str(beton(scratch, quality))
    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=quality), "label": IntField()}
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
        num_workers=WORKERS,
        os_cache=True,
        order=OrderOption.RANDOM,
        drop_last=False,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor()]},
    )

    def epoch() -> Iterator[Batch]:
        for images, labels in loader:
            yield images, labels[:, 0]

    return Epochs(epoch)


def beton(scratch: Path, quality: int) -> Path:
    """Return the file that FFCV writes."""
    return scratch / f"rows-{quality}.beton"


def by_dali(work: Work, scratch: Path) -> Iterable[Any]:
    """DALI on the CPU: files, of which it decodes the random crop alone, as in its example for ImageNet."""
    from nvidia.dali import fn, pipeline_def, types

    samples = dataset_of(work.photographs).samples
    files, numbers = zip(*samples, strict=True)

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None)
    def pipeline() -> Any:
        data, labels = fn.readers.file(files=list(files), labels=list(numbers), shuffle_after_epoch=True)
        crops = fn.decoders.image_random_crop(data, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3])
        images = fn.resize(crops, size=[CROP, CROP], interp_type=types.INTERP_LINEAR)
        mirror = fn.random.coin_flip()
        images = fn.crop_mirror_normalize(
            images, dtype=types.FLOAT, output_layout="CHW", mirror=mirror, mean=BYTE_MEAN, std=BYTE_STD
        )
        return images, labels

    made = pipeline()
    made.build()

    def epoch() -> Iterator[Batch]:
        for _ in range(len(samples) // BATCH):  # all batches are full
            images, labels = made.run()
            yield torch.from_dlpack(images.as_tensor()), torch.from_dlpack(labels.as_tensor())[:, 0]

    return Epochs(epoch)


FFCV, DALI, VISION = "FFCV, jpg mode, quality {}", "DALI, CPU, files", f"DataLoader(num_workers={WORKERS}), files"
OURS = "memfeed, {}"
CONTENDERS: dict[str, tuple[str, Callable[[Work, Path], Iterable[Any]]]] = {
    **{OURS.format(form): ("memfeed", partial(ours, form=form)) for form in FORMS},
    **{FFCV.format(quality): ("ffcv", partial(by_ffcv, quality=quality)) for quality in (95, 90)},
    DALI: ("nvidia.dali", by_dali),
    VISION: ("torchvision", by_torchvision),
}
"""name -> (module, function that makes its epochs)"""


# --- a contender's process


def check(name: str, work: Work, epochs: Iterable[Any]) -> int:
    """Check that an epoch has every photograph once, in float32 batches of the right size, with their usual pixels.

    Return how many there are.
    """
    import memfeed

    rows = memfeed.open(store_path(work, "raw 256")).column(0)
    pixels = torch.cat([row[:, ::4, ::4].flatten() for row in rows]).float() / 255
    wanted_mean, wanted_std = float(pixels.mean()), float(pixels.std())
    order, sums, squares, count = [], 0.0, 0.0, 0
    std, mean = torch.tensor(STD).view(3, 1, 1), torch.tensor(MEAN).view(3, 1, 1)
    for images, labels in epochs:
        assert tuple(images.shape) == (len(labels), 3, CROP, CROP), f"{name}: images are {list(images.shape)}"
        assert images.dtype == torch.float32, f"{name}: images are {images.dtype}"
        order += labels.tolist()
        back = images[..., ::4, ::4] * std + mean
        sums, squares, count = sums + float(back.sum()), squares + float((back**2).sum()), count + back.numel()
    assert sorted(order) == list(range(len(rows))), f"{name}: not every photograph once"
    found_mean = sums / count
    found_std = (squares / count - found_mean**2) ** 0.5
    assert abs(found_mean - wanted_mean) < MEAN_DIFFERS, f"{name}: the mean is {found_mean:.3f}, not {wanted_mean:.3f}"
    assert abs(found_std - wanted_std) < STD_DIFFERS, f"{name}: the deviation is {found_std:.3f}, not {wanted_std:.3f}"
    return len(rows)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that run, all cores together."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def serve(name: str, log: Path, connection: Connection) -> None:
    """Answer requests: a Work to prepare, then the least seconds of a turn, with the seconds and CPU seconds of one."""
    epochs: Iterable[Any] = ()
    count = 0

    def answer(request: Any) -> tuple[float, float] | None:
        nonlocal epochs, count
        if isinstance(request, Work):
            epochs = CONTENDERS[name][1](request, log.parent)
            count = check(name, request, epochs)
            return None

        def drain() -> None:
            seen = sum(len(labels) for _, labels in epochs)
            assert seen == count, f"found {seen} photographs in an epoch, expected {count}"

        times, began = list[float](), cpu_seconds()
        while not times or sum(times) < request:
            times.append(seconds_of(drain))
        return float(np.median(times)), (cpu_seconds() - began) / len(times)

    answer_all(log, connection, answer)
