"""Time the way to the device: batches from each placement beside plain copies, augmentation there, and a ResNet.

On a CUDA machine the figures have targets. Without one the same programs run on the CPU, where nothing is transferred:
that shows only that the benchmark runs, and how much time the loader takes beside a model.

Every program must give the same rows before it is timed. They take turns, and the ratios come from one run. Other
libraries take part where they are installed. Each part has an amount of time; what fails is written down with its
error, the result is written after each part, and the other parts follow.

    python benchmarks/device.py [--device cuda] [--parts feeding,resident]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

import torch

from device_augmenting import augmenting
from device_feeding import feeding, host_times, resident
from device_photographs import decoding, photo_epochs
from device_run import Run, Sizes
from device_training import training
from measure import parser, show

RESIDENT = 20 * 10**9 // (3 * 64 * 64) + 1  # rows
GPU = Sizes((4000, 50_000), (RESIDENT, 64), (4096, 50), 3, 12_800, 2048, 32, (12_800, 256), 7, 30.0, 8)
CPU = Sizes((256, 2560), (256, 2), (16, 2), 2, 1280, 256, 1, (256, 64), 7, 60.0, 0)
QUICK = Sizes((128, 1024), (64, 2), (4, 2), 2, 640, 16, 1, (16, 8), 1, 60.0, 0)
QUICK_GPU = Sizes((64, 512), (16, 2), (2, 2), 1, 128, 16, 1, (4, 2), 1, 60.0, 0)

PARTS: dict[str, Callable[[Run], None]] = {
    "feeding": feeding, "host": host_times, "augmenting": augmenting, "resident": resident, "decoding": decoding,
    "training": training, "photo_epochs": photo_epochs,
}  # fmt: skip


def sizes_of(device: torch.device, *, quick: bool) -> Sizes:
    """Return how much to measure on a device."""
    if device.type == "cuda":
        return QUICK_GPU if quick else GPU
    return QUICK if quick else CPU


def chosen(names: str) -> Iterator[tuple[str, Callable[[Run], None]]]:
    """Yield the parts of these names, separated by commas; all of them for an empty string."""
    for name in names.split(",") if names else PARTS:
        yield name, PARTS[name]


def main() -> None:
    made = parser("device-cuda" if torch.cuda.is_available() else "device-cpu", __doc__)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--rounds", type=int, help="turns of each contender, if there is time")
    made.add_argument("--seconds", type=float, help="that the turns of one part take at most")
    made.add_argument("--parts", default="", help=f"some of {','.join(PARTS)}")
    made.add_argument("--minutes", type=float, default=7.0, help="no part begins later")
    options = made.parse_args()
    device = torch.device(options.device)
    sizes = sizes_of(device, quick=options.quick)
    changed = {name: value for name in ("rounds", "seconds") if (value := getattr(options, name)) is not None}
    run = Run(options, device, sizes._replace(**changed))
    print(f"{os.cpu_count()} cores, {device}")
    end = time.perf_counter() + 60 * options.minutes
    for name, part in chosen(options.parts):
        start = time.perf_counter()
        if start > end:
            run.skipped[name] = f"{options.minutes:g} minutes were over"
            continue
        try:
            part(run)
        except Exception as error:
            run.note_failure(name, error)
        finally:
            run.write()
        print(f"{name}: {time.perf_counter() - start:.0f} s")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if device.type == "cuda":
        show("to the device", run.checks)
    else:
        for check in run.checks:
            print(f"{check.what:60} {check.found:8.2f} {check.unit}")
        print("no CUDA device: nothing crosses here, and the targets are a GPU's")
    for kind, found in (("skipped", run.skipped), ("failed", run.failed)):
        for name, why in found.items():
            print(f"{kind}: {name}: {why}")
    if run.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
