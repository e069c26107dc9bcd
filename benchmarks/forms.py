"""Compare the forms of a store: images/s, bytes and CPU time, beside FFCV's jpg mode, DALI on the CPU and DataLoader.

Photographs of several sizes, a random resized crop to 224, a random flip, normalised, batches of 64, page cache warm.
Also: decoding in two threads, the first epoch while a store is filled, epochs from a disk that reads so many bytes a
second (a control group limits it), and a small network that is trained on raw images and on JPEG.

    python benchmarks/forms.py         # in the environment of make peers: with FFCV and DALI
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

import forms_training
import memfeed
from augment import version_of
from convert import make_photographs
from forms_contenders import (
    BATCH,
    CONTENDERS,
    FFCV,
    FORMS,
    OURS,
    VISION,
    WORKERS,
    Work,
    beton,
    dataset_of,
    serve,
    store_path,
)
from measure import (
    PHOTOS,
    Check,
    Seconds,
    decode_rows,
    in_turns,
    machine,
    medians,
    parser,
    ratio,
    seconds_of,
    show,
    table,
    write,
)
from memfeed.codecs import parse_codec
from memfeed.transforms.backends.compiled_passes import LOOPS
from others import Contender

PREPARE_SECONDS, TURN_SECONDS = 240.0, 90.0  # the longest waits for a process
DISK_RATES = (100_000_000, 250_000_000, 1_000_000_000)  # bytes a second
SLOW = 250_000_000
CODED = ("jpeg:95", "jpeg:90")


def make_folder(base: Path, copies: int, few: int) -> Path:
    """Return a folder of photographs in classes: those of hymenoptera_data, several times each, or made ones.

    Their number is a multiple of the batch size. ``few`` leaves all others out, 0 none.
    """
    made = base / "made"
    made.mkdir()
    files = sorted(PHOTOS.rglob("*.jpg")) if PHOTOS.is_dir() else make_photographs(made, BATCH)
    listed = [(copy, file) for copy in range(copies) for file in files][: few or None]
    for number, (copy, file) in enumerate(listed[: len(listed) // BATCH * BATCH]):
        link = base / "photographs" / file.parent.name / f"{copy}-{number}.jpg"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    return base / "photographs"


def make_stores(work: Work) -> None:
    """Write the photographs in each form. The rows of the coded ones must be raw rows, encoded and decoded."""
    dataset = dataset_of(work.photographs)
    for form, forms in FORMS.items():
        memfeed.cache(dataset, store_path(work, form), forms=forms, split=True, workers=WORKERS, progress=False)
    raw = memfeed.open(store_path(work, "raw 256")).column(0)
    for form in CODED:
        coded = memfeed.open(store_path(work, form)).column(0)
        codec = parse_codec(form).fitted(np.dtype(np.uint8), (3, None, None))
        for row in range(0, len(raw), max(1, len(raw) // 64)):
            expected = np.empty(tuple(raw[row].shape), np.uint8)
            codec.decode(np.frombuffer(codec.encode(raw[row].numpy()), np.uint8), expected)
            assert np.array_equal(coded[row].numpy(), expected), f"{form}: row {row} has other pixels"


def race(work: Work, scratch: Path, names: list[str], rounds: int, least: float) -> dict[str, Any]:
    """Return the seconds and the CPU seconds of an epoch of each contender in each round, and why others failed."""
    failed: dict[str, str] = {}
    seconds: Seconds = {name: [] for name in names}
    cpu: Seconds = {name: [] for name in names}
    running = []
    for number, name in enumerate(names):
        (scratch / str(number)).mkdir()
        running.append(Contender(name, scratch / str(number), serve))
    try:
        for contender in [*running]:
            contender.start()
            try:
                contender.ask(work, PREPARE_SECONDS)
            except RuntimeError as error:
                if contender.name.startswith("memfeed"):
                    raise
                failed[contender.name] = str(error)
                running.remove(contender)
                contender.close()
                contender.join()
        for turn in range(rounds):
            for contender in running[turn % len(running) :] + running[: turn % len(running)]:
                taken, busy = contender.ask(least, TURN_SECONDS)
                seconds[contender.name].append(taken)
                cpu[contender.name].append(busy)
    finally:
        for contender in running:
            contender.close()
        for contender in running:
            contender.join()
    there = [name for name in names if name not in failed]
    return {
        "seconds": {name: seconds[name] for name in there},
        "cpu_seconds": {name: cpu[name] for name in there},
        "failed": failed,
    }


def bytes_of(work: Work, scratch: Path, names: list[str]) -> dict[str, int]:
    """Return the bytes that each contender reads."""
    files = sum(Path(path).stat().st_size for path, _ in dataset_of(work.photographs).samples)
    found = dict.fromkeys(names, files)
    for form in FORMS:
        found[OURS.format(form)] = memfeed.open(store_path(work, form)).nbytes
    for quality in (95, 90):
        name = FFCV.format(quality)
        if name in found:
            found[name] = beton(scratch / str(names.index(name)), quality).stat().st_size
    return found


def two_threads(work: Work, rounds: int) -> dict[str, float]:
    """Return how many times as many rows of a coded store two threads decode as one."""
    found = {}
    raw = memfeed.open(store_path(work, "raw 256")).column(0)
    rows = [raw[row].numpy() for row in range(min(128, len(raw)))]
    for form in CODED:
        codec = parse_codec(form).fitted(np.dtype(np.uint8), (3, None, None))
        blobs = [np.frombuffer(codec.encode(row), np.uint8) for row in rows]
        outs = [np.empty_like(row) for row in rows]

        def decode(threads: int, codec: Any = codec, blobs: Any = blobs, outs: Any = outs) -> float:
            return seconds_of(lambda: decode_rows(codec, blobs, outs, threads))

        seconds = in_turns({"1": lambda run=decode: run(1), "2": lambda run=decode: run(2)}, rounds, 0.1)
        found[form] = ratio(seconds, "1", "2")
    return found


def first_epochs(work: Work, base: Path, rounds: int) -> tuple[Seconds, Seconds]:
    """Return the seconds of the first epoch of DataLoader, and of Loader while it fills a store.

    Also return those of them that pass until the Loader is made: then the cut is proven, which takes the same time for
    any number of photographs.
    """
    LOOPS.wait()  # compiled once, as what the others import
    dataset = dataset_of(work.photographs)
    numbers = itertools.count()
    proving: Seconds = {}

    def drain(batches: Any) -> None:
        assert sum(len(labels) for _, labels in batches) == len(dataset)

    def plain() -> float:
        return seconds_of(lambda: drain(DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS)))

    def filling(name: str, forms: Any) -> float:
        made: list[memfeed.Loader[Any]] = []
        path = base / f"filled-{next(numbers)}.mf"

        def make() -> None:
            made.append(memfeed.Loader(dataset, BATCH, shuffle=True, num_workers=WORKERS, cache=path, forms=forms))

        def run() -> None:
            proving.setdefault(name, []).append(seconds_of(make))
            drain(made[0])

        seconds = seconds_of(run)
        made[0].store.finish()
        return seconds

    contenders = {
        "DataLoader": plain,
        "filling raw 256": lambda: filling("filling raw 256", FORMS["raw 256"]),
        "filling jpeg:95": lambda: filling("filling jpeg:95", FORMS["jpeg:95"]),
    }
    return in_turns(contenders, rounds), proving


def from_disk(base: Path, rates: tuple[int, ...]) -> dict[str, dict[str, float]] | None:
    """Return the seconds of an epoch of each form, by bytes that the disk reads in a second; None without limits."""
    command = [sys.executable, str(Path(__file__).parent / "forms_disk.py"), str(base), str(BATCH), *map(str, rates)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, dict[str, float]] | None = json.loads(done.stdout.splitlines()[-1])
    return found


def crossing(bytes_a_row: dict[str, float], warm: dict[str, float], one: str, other: str) -> float | None:
    """Return the bytes a second of the disk above which ``one`` has more rows a second than ``other``.

    A form has the rows that the disk reads, at most those that it has from memory. None if there is no such rate.
    """
    if warm[one] <= warm[other] or bytes_a_row[one] <= bytes_a_row[other]:
        return None
    return warm[other] * bytes_a_row[one]


def main() -> None:
    made = parser("forms", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to; not one in memory")
    options = made.parse_args()
    quick = options.quick
    rounds, least, copies = (1, 0.0, 1) if quick else (4, 1.0, 4)
    there = {name: found for name, (module, _) in CONTENDERS.items() if (found := version_of(module))}
    names = list(there)
    rates = (SLOW,) if quick else DISK_RATES
    with tempfile.TemporaryDirectory(dir=options.dir, ignore_cleanup_errors=True) as directory:
        base, scratch = Path(directory), Path(directory) / "scratch"
        scratch.mkdir()
        work = Work(make_folder(base, copies, 2 * BATCH if quick else 0), base)
        count = len(dataset_of(work.photographs))
        make_stores(work)
        raced = race(work, scratch, names, rounds, least)
        names = list(raced["seconds"])
        print(raced, flush=True)
        size = bytes_of(work, scratch, list(there))
        threads = two_threads(work, 1 if quick else 9)
        first, proving = first_epochs(work, base, 1 if quick else 3)
        disk = from_disk(base, rates)
        trained = forms_training.compare(base, 2 if quick else 5, 1 if quick else 8)
    seconds, median = raced["seconds"], medians(raced["seconds"])
    busy = {name: 1000 * t / count for name, t in medians(raced["cpu_seconds"]).items()}
    warm = {form: count / median[OURS.format(form)] for form in FORMS}
    a_row = {form: size[OURS.format(form)] / count for form in FORMS}
    crossings = {form: crossing(a_row, warm, "raw 256", form) for form in CODED}
    best = OURS.format("jpeg:90")
    table(
        f"{count:,} photographs, resized crop, flip, normalise, batches of {BATCH}",
        ["", "images/s", "MB", "CPU s/1,000", "of jpeg:90"],
        [
            [name, f"{count / t:,.0f}", f"{size[name] / 1e6:,.1f}", f"{busy[name]:.2f}",
             f"{ratio(seconds, best, name):.2f}"]
            for name, t in median.items()
        ],
    )  # fmt: skip
    proofs = medians(proving)
    shown = [[name, f"{t:.2f}", f"{proofs.get(name, 0):.2f}"] for name, t in medians(first).items()]
    table("first epoch", ["", "s", "of which the proof"], shown)
    for form, found in (disk or {}).items():
        print(form, ", ".join(f"{int(rate) / 1e6:.0f} MB/s: {count / t:,.0f} rows/s" for rate, t in found.items()))
    print("crossing", crossings, "training", trained)
    checks = [
        Check(f"{form}: decoding in two threads, of one", found, 1.8, at_least=True) for form, found in threads.items()
    ]
    for name, limit in ((FFCV.format(90), 1.3), (VISION, 6)):
        if name in seconds:
            checks.append(Check(f"jpeg:90: images/s, of {name}", ratio(seconds, name, best), limit, at_least=True))
    filled = ratio(first, "filling jpeg:95", "DataLoader")
    checks.append(Check("filling jpeg:95: the first epoch, of DataLoader's", filled, 1.1, at_least=False))
    apart = trained["difference"] / trained["spread"] if trained["spread"] else float(trained["difference"] > 0)
    checks.append(
        Check("trained on jpeg:95: difference of mean accuracies, of the seeds' spread", apart, 1.0, at_least=False)
    )
    show("forms", checks)
    for name, why in raced["failed"].items():
        print(f"{name} failed:\n{why}")
    write(
        options,
        {"photographs": PHOTOS.is_dir(), "rows": count, "batch_size": BATCH, "rounds": rounds, "workers": WORKERS},
        {
            "machine": {**machine(), "versions": there},
            "images_per_second": {name: count / t for name, t in median.items()},
            "cpu_seconds_a_thousand": busy,
            "bytes": size,
            "ratios": {name: ratio(seconds, name, best) for name in seconds},
            "two_threads": threads,
            "first_epoch_seconds": medians(first),
            "proof_seconds": proofs,
            "disk_rows_per_second": disk
            and {form: {rate: count / t for rate, t in found.items()} for form, found in disk.items()},
            "bytes_a_row": a_row,
            "crossing_bytes_per_second": crossings,
            "training": trained,
            "failed": raced["failed"],
            "missing": [name for name in CONTENDERS if name not in there],
            "seconds": seconds,
        },
        checks,
    )


if __name__ == "__main__":
    main()
