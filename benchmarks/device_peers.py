"""Other ways to feed and to augment on a device, for ``device.py``: those that are installed, the others by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from transforms import MEAN, STD

Epoch = Callable[[], Iterator[Any]]
Road = Callable[[torch.Tensor], Any]
SHARED = Path("/dev/shm")


def installed(name: str) -> bool:
    """Return True if a module can be imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it
        return False


# --- ways to feed


def feeders(
    images: torch.Tensor, labels: torch.Tensor, batch: int, device: torch.device, at: Path, workers: int
) -> tuple[dict[str, Epoch], dict[str, str]]:
    """Return what iterates over an epoch of batches on the device, by name, and why others are skipped.

    ``labels`` are arange(n).
    """
    found: dict[str, Epoch] = {}
    skipped: dict[str, str] = {}
    batch_bytes = batch * images[0].nbytes
    if workers and not _has_shared_memory(4 * workers * batch_bytes):
        skipped["DataLoader with workers"] = f"{SHARED} has too little room for the batches of {workers} workers"
        workers = 0
    loader = DataLoader(
        TensorDataset(images, labels), batch, shuffle=True, drop_last=True, num_workers=workers,
        pin_memory=device.type == "cuda", persistent_workers=workers > 0,
    )  # fmt: skip
    found[f"DataLoader, pin_memory, {workers} workers"] = lambda: _moved(loader, device)
    if installed("ffcv"):
        from peers.ffcv import make
        from peers.rows import Rows

        epochs = make(Rows(images, labels), batch, at)
        found["FFCV"] = lambda: _moved(epochs, device)
    else:
        skipped["FFCV"] = "the package ffcv is not installed"
    return found, skipped


def _moved(batches: Any, device: torch.device) -> Iterator[Any]:
    for batch in batches:
        yield [part.to(device, non_blocking=True) for part in batch]


def _has_shared_memory(nbytes: int) -> bool:
    """Return True if worker processes can pass so many bytes: they lie in files of /dev/shm."""
    if not SHARED.is_dir():
        return False
    found = os.statvfs(SHARED)
    return found.f_bavail * found.f_frsize >= nbytes


# --- ways to augment a batch on the device


def augmenters(device: torch.device, images: torch.Tensor) -> tuple[dict[str, Road], dict[str, str], list[str]]:
    """Return the two augmentations of ``device.py`` with other libraries, and why others are skipped.

    They draw one crop for the whole batch, or their own numbers: their results are not compared. The last list names
    those that work on streams of their own, whose time events of the current stream do not show.
    """
    found: dict[str, Road] = {}
    skipped: dict[str, str] = {}
    if installed("torchvision"):
        from torchvision.transforms import v2

        after = [v2.RandomHorizontalFlip(), v2.ToDtype(torch.bfloat16, scale=True), v2.Normalize(MEAN, STD)]
        found["torchvision v2, one crop for all"] = v2.Compose([v2.RandomCrop(224), *after])
        resized = v2.RandomResizedCrop(224, antialias=True)
        found["torchvision v2, one RandomResizedCrop for all"] = v2.Compose([resized, *after])
    else:
        skipped["torchvision v2"] = "the package torchvision is not installed"
    if installed("kornia"):
        import kornia.augmentation as K

        crops = {"kornia": K.RandomCrop((224, 224)), "kornia, RandomResizedCrop": K.RandomResizedCrop((224, 224))}
        for name, crop in crops.items():
            normalize = K.Normalize(torch.tensor(MEAN), torch.tensor(STD))
            each = K.AugmentationSequential(crop, K.RandomHorizontalFlip(), normalize).to(device)
            found[name] = lambda images, each=each: each(images.float() / 255).to(torch.bfloat16)
    else:
        skipped["kornia"] = "the package kornia is not installed"
    dali = "DALI, RandomResizedCrop, to float16"
    if device.type == "cuda" and installed("nvidia.dali"):
        found[dali] = dali_pipeline(device, images)
    else:
        skipped["DALI"] = "the package nvidia-dali is not installed" if device.type == "cuda" else "there is no GPU"
    return found, skipped, [dali]


def dali_pipeline(device: torch.device, images: torch.Tensor) -> Road:
    """Return DALI's GPU pipeline over uint8 images that are on the device: it takes them channels last."""
    from nvidia.dali import fn, pipeline_def, types

    channels_last = images.permute(0, 2, 3, 1).contiguous()
    of_bytes = {"mean": [255 * one for one in MEAN], "std": [255 * one for one in STD]}

    @pipeline_def(batch_size=len(images), num_threads=4, device_id=device.index or 0)
    def pipeline() -> Any:
        batch = fn.external_source(source=lambda: channels_last, device="gpu", batch=True, layout="HWC")
        crops = fn.random_resized_crop(batch, size=[224, 224])
        mirror = fn.random.coin_flip()
        return fn.crop_mirror_normalize(crops, dtype=types.FLOAT16, output_layout="HWC", mirror=mirror, **of_bytes)

    made = pipeline()
    made.build()
    return lambda _: made.run()
