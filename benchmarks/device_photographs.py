"""Parts of ``device.py``: photographs that are decoded on the device, and epochs of photographs from files."""

from __future__ import annotations

import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import memfeed
from device_run import Run, timed
from forms import make_folder
from forms_contenders import BATCH, FORMS, dataset_of
from measure import PHOTOS, medians, table
from memfeed.codecs import parse_codec

# --- decoding


def decoding(run: Run) -> None:
    """Time photographs of 256 x 256 that a store has as JPEG: decoded by the GPU and by the CPU, beside raw rows.

    The bare calls give the same files, which lie in memory, to torchvision: in batches to nvJPEG, and one by one to the
    CPU. What differs between nvJPEG and libjpeg-turbo is noted in grey levels.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    warnings.filterwarnings("ignore", ".*TorchCodec")  # in whose favour torchvision gives up its decoder
    device, count = run.device, run.sizes.photographs
    images = photographs(count)
    batch = min(64, count // 2)
    with tempfile.TemporaryDirectory() as at:
        stores = {}
        for name, forms in (("raw", None), ("jpeg", {"0": "jpeg:90"})):
            stores[name] = memfeed.cache((images, torch.arange(count)), Path(at) / name, forms=forms, progress=False)
        options = {"batch_size": batch, "shuffle": True, "drop_last": True, "device": device}
        loaders = {
            "raw rows, mapped": memfeed.Loader(stores["raw"], **options, placement="mapped"),
            "jpeg:90, decoded by the CPU": memfeed.Loader(stores["jpeg"], **options, placement="mapped"),
        }
        if device.type == "cuda":
            place = {"0": "nvjpeg", "1": "mapped"}
            loaders["jpeg:90, decoded by nvJPEG"] = memfeed.Loader(stores["jpeg"], **options, placement=place)
        expected = next(iter(memfeed.Loader(stores["jpeg"], count)))[0]
        apart: list[torch.Tensor] = []
        for name, loader in loaders.items():
            for found, numbers in loader:
                wanted = (images if name.startswith("raw") else expected)[numbers.cpu()]
                difference = (found.cpu().int() - wanted.int()).abs()
                if "nvJPEG" in name:
                    apart.append(difference.float().flatten())
                else:
                    assert not difference.any(), name
        if apart:
            levels = torch.cat(apart)
            run.shares["nvjpeg_levels_mean_and_largest"] = [float(levels.mean()), float(levels.max())]
        files = [torch.frombuffer(bytearray(jpeg_of(image)), dtype=torch.uint8) for image in images]
        rgb = ImageReadMode.RGB

        def bare(call: Callable[[list[torch.Tensor]], Any]) -> Callable[[], None]:
            def run_all() -> None:
                for start in range(0, count // batch * batch, batch):
                    call(files[start : start + batch])

            return run_all

        works = {name: bare_epoch(loader) for name, loader in loaders.items()}
        works["bare torchvision on the CPU"] = bare(lambda part: [decode_jpeg(one, rgb) for one in part])
        if device.type == "cuda":
            works["bare torchvision with nvJPEG"] = bare(lambda part: torch.stack(decode_jpeg(part, rgb, device)))
        seconds = run.turns({name: lambda work=work: timed(device, work) for name, work in works.items()})
        found_rates = {name: count // batch * batch / value for name, value in medians(seconds).items()}
        run.median_seconds[f"{count // batch * batch} photographs"] = medians(seconds)
        table(
            "photographs of 256 x 256", ["", "images/s"], [[name, f"{rate:,.0f}"] for name, rate in found_rates.items()]
        )
        what = "nvJPEG: of the bare call"
        run.check(what, seconds, "bare torchvision with nvJPEG", "jpeg:90, decoded by nvJPEG", 0.9)


def bare_epoch(loader: memfeed.Loader[Any]) -> Callable[[], None]:
    """Return a function that reads an epoch and keeps nothing of it."""

    def read() -> None:
        for part in loader:
            del part

    return read


def photographs(count: int) -> torch.Tensor:
    """Return photographs, cut and shrunk to uint8 [count, 3, 256, 256]: of the shared data, or those of scikit-image.

    There are fewer files than ``count``, so each is cut at several places.
    """
    from PIL import Image

    files = sorted(PHOTOS.rglob("*.jpg")) if PHOTOS.is_dir() else []
    opened = [Image.open(file).convert("RGB") for file in files[: min(count, 128)]] or pictures()
    made = torch.empty(count, 3, 256, 256, dtype=torch.uint8)
    for number in range(count):
        image, turn = opened[number % len(opened)], number // len(opened)
        scale = 288 / min(image.size)
        small = image.resize((round(image.width * scale), round(image.height * scale)))
        left, top = turn * 5 % (small.width - 255), turn * 3 % (small.height - 255)
        cut = small.crop((left, top, left + 256, top + 256))
        made[number] = torch.frombuffer(bytearray(cut.tobytes()), dtype=torch.uint8).view(256, 256, 3).permute(2, 0, 1)
    return made


def pictures() -> list[Any]:
    """Return the pictures in color that scikit-image brings along."""
    from PIL import Image
    from skimage import data

    return [Image.fromarray(image) for image in (data.astronaut(), data.coffee(), data.chelsea())]


def jpeg_of(image: torch.Tensor) -> bytes:
    """Return an image, uint8 [3, h, w], as a JPEG file of quality 90."""
    codec = parse_codec("jpeg:90").fitted(np.dtype(np.uint8), (3, *image.shape[1:]))
    return bytes(codec.encode(image.numpy()))


# --- epochs from files


def photo_epochs(run: Run) -> None:
    """Time epochs of photographs from files while a ResNet-18 is trained on a GPU: DataLoader, and stores of each form.

    The first epochs, in which a store is filled, are timed beside first epochs of DataLoader, which start its workers.
    """
    device, copies, workers = run.device, run.sizes.copies, run.sizes.workers
    step = trained_step(device)
    with tempfile.TemporaryDirectory() as at:
        dataset = dataset_of(make_folder(Path(at), copies, 2 * BATCH if copies == 1 else 0))
        paths = (Path(at) / f"{number}.mf" for number in itertools.count())

        def epoch(loader: Iterable[Any]) -> float:
            def train() -> None:
                for images, labels in loader:
                    step(images.to(device, non_blocking=True), labels.to(device, non_blocking=True) % 1000)

            return timed(device, train)

        def today(persistent: bool) -> torch.utils.data.DataLoader[Any]:
            return torch.utils.data.DataLoader(
                dataset, BATCH, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda",
                persistent_workers=persistent and workers > 0,
            )  # fmt: skip

        def filled(form: str) -> float:
            path = next(paths)
            start = time.perf_counter()
            loader = memfeed.Loader(
                dataset, BATCH, shuffle=True, num_workers=workers, cache=path, forms=FORMS[form], device=device
            )
            seconds = time.perf_counter() - start + epoch(loader)
            loader.store.finish()
            stores[form] = path
            return seconds

        stores: dict[str, Path] = {}
        epoch(today(False))  # chooses algorithms
        began = {f"filling {form}": lambda form=form: filled(form) for form in ("raw 256", "jpeg:90")}
        seconds = run.turns({"DataLoader": lambda: epoch(today(False))} | began)
        run.median_seconds[f"the first epoch of {len(dataset)} photographs"] = medians(seconds)
        loaders: dict[str, Iterable[Any]] = {f"DataLoader, {workers} workers": today(True)}
        for form, path in stores.items():
            for place in ("auto", "nvjpeg") if form == "jpeg:90" and device.type == "cuda" else ("auto",):
                name = f"memfeed, {form}" + (", nvJPEG" if place == "nvjpeg" else "")
                placement = {"0": "nvjpeg"} if place == "nvjpeg" else "auto"
                loaders[name] = memfeed.Loader(
                    dataset, BATCH, shuffle=True, cache=path, forms=FORMS[form], device=device, placement=placement
                )
        kept = [part.to(device) for part in next(iter(loaders["memfeed, raw 256"]))]
        works = {name: lambda loader=loader: epoch(loader) for name, loader in loaders.items()}
        works["one batch reused"] = lambda: epoch([kept] * (len(dataset) // BATCH))
        for name in loaders:
            works[name]()  # starts workers
        seconds = run.turns(works)
    name = f"an epoch of {len(dataset)} photographs"
    run.median_seconds[name] = medians(seconds)
    table(name, ["", "images/s"], [[who, f"{len(dataset) / t:,.0f}"] for who, t in medians(seconds).items()])


def trained_step(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return one step of training a ResNet-18 on a GPU, and on the CPU a step that does nothing."""
    if device.type != "cuda":
        return lambda images, labels: None
    from torchvision.models import resnet18

    model = resnet18().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step
