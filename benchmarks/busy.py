"""Time memfeed.Loader where others want the cores: two spinning processes, a training step, a second reading process.

* An epoch of 256 x 256 images, quiet, and while one spinning process a core runs; the CPU time it takes; beside the
  loop that torch's own threads copy.
* The steps of a ResNet-18 on the CPU, fed by memfeed, and on one batch again and again.
* Two processes that read an epoch each, against one, and the same with bare copies by one thread.
* Short epochs, against the same batches in one long epoch.

    python benchmarks/busy.py
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import memfeed
from measure import Check, cpu_seconds, in_turns, medians, parser, ratio, seconds_of, show, table, write

OURS, ONE, TORCH = "memfeed.Loader", "memfeed.Loader, one thread", "bare loop, torch's threads"
FED, SAME = "fed by memfeed", "one batch again"
SPIN = "print(flush=True)\nwhile True: pass"
READER = """
import sys, time, torch, memfeed
kind, path, size, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store = memfeed.open(path)
if kind == "loader":
    loader = memfeed.Loader(store, size, shuffle=True)
    def epoch():
        for batch in loader:
            pass
else:
    torch.set_num_threads(1)
    data, buffers = store.column(0), [torch.empty(size, *store.column(0).shape[1:], dtype=torch.uint8) for _ in "12"]
    def epoch():
        for at, ids in enumerate(torch.randperm(len(data)).split(size)):
            torch.index_select(data, 0, ids, out=buffers[at % 2][: len(ids)])
epoch()
print(flush=True)
sys.stdin.readline()
start = time.perf_counter()
for _ in range(epochs):
    epoch()
print(time.perf_counter() - start, flush=True)
"""


@contextlib.contextmanager
def taken_cores() -> Iterator[None]:
    """Run one spinning process a core during the block."""
    count = torch.get_num_threads()
    processes = [subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def drain(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def timed(epochs: dict[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each contender in every round, and the median CPU seconds of one epoch."""
    cpu: dict[str, list[float]] = {name: [] for name in epochs}

    def run(name: str) -> float:
        began = cpu_seconds()
        seconds = seconds_of(epochs[name])
        cpu[name].append(cpu_seconds() - began)
        return seconds

    for epoch in epochs.values():  # the choice of threads is made in the first epochs
        until = time.perf_counter() + (0.0 if rounds < 3 else 0.5)
        epoch()
        while time.perf_counter() < until:
            epoch()
    seconds = in_turns({name: lambda name=name: run(name) for name in epochs}, rounds)
    return seconds, medians(cpu)


def large_images(store: memfeed.Store, size: int, rounds: int) -> tuple[dict[str, Any], list[Check]]:
    """Time epochs on a quiet machine, and on one whose cores are taken."""
    loader = memfeed.Loader(store, size, shuffle=True)
    one = memfeed.Loader(store, size, shuffle=True)
    data = store.column(0)
    buffers = [torch.empty(size, *data.shape[1:], dtype=data.dtype) for _ in range(2)]

    def bare() -> None:
        for at, ids in enumerate(torch.randperm(len(data)).split(size)):
            torch.index_select(data, 0, ids, out=buffers[at % 2][: len(ids)])

    def on_one_thread() -> None:
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        drain(one)
        torch.set_num_threads(count)

    for batch in loader:
        assert torch.equal(batch[0], data[batch[1]])
    epochs: dict[str, Callable[[], Any]] = {OURS: lambda: drain(loader), ONE: on_one_thread, TORCH: bare}
    quiet, quiet_cpu = timed(epochs, rounds)
    chosen = loader.stats()["plan"]["threads"]
    with taken_cores():
        busy, busy_cpu = timed(epochs, rounds)
        chosen_busy = loader.stats()["plan"]["threads"]
    found = {
        "median_seconds": {"quiet": medians(quiet), "busy": medians(busy)},
        "cpu_seconds": {"quiet": quiet_cpu, "busy": busy_cpu},
        "threads": {"quiet": chosen, "busy": chosen_busy},
        "seconds": {"quiet": quiet, "busy": busy},
    }
    times = found["median_seconds"]
    checks = [
        Check("busy: an epoch takes, of the quiet one", times["busy"][OURS] / times["quiet"][OURS], 2.5, False),
        Check("quiet: an epoch takes, of torch's threads'", ratio(quiet, OURS, TORCH), 1.05, False),
        Check("busy: an epoch takes, of torch's threads'", ratio(busy, OURS, TORCH), 1.0, False),
    ]
    if ratio(quiet, ONE, OURS) < 1.2:  # a second thread gains less than a fifth
        checks.append(Check("quiet: CPU time, of one thread's", quiet_cpu[OURS] / quiet_cpu[ONE], 1.1, False))
    return found, checks


def training(base: Path, rows: int, size: int, rounds: int) -> tuple[dict[str, Any], list[Check]]:
    """Time the steps of a ResNet-18 on small images."""
    from torchvision.models import resnet18  # only this part needs torchvision

    images = torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8)
    store = memfeed.cache((images, torch.arange(rows) % 10), base / "small.mf", progress=False)
    loader = memfeed.Loader(store, size, shuffle=True, drop_last=True)
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def steps(batches: Iterable[Any]) -> None:
        for picture, label in batches:
            loss = torch.nn.functional.cross_entropy(model(picture.float().div_(255)), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    same = next(iter(loader))
    contenders = {FED: lambda: steps(loader), SAME: lambda: steps(same for _ in range(len(loader)))}
    seconds = in_turns({name: lambda run=run: seconds_of(run) for name, run in contenders.items()}, rounds)
    found = {"median_seconds": medians(seconds), "steps": len(loader), "policy": loader.stats()["plan"]}
    return found, [Check("ResNet-18: a step takes, of one on the same batch", ratio(seconds, FED, SAME), 1.02, False)]


def two_readers(store: memfeed.Store, size: int, epochs: int, rounds: int) -> tuple[dict[str, Any], list[Check]]:
    """Time processes that each read epochs of one store at the same time."""

    def read(kind: str, count: int) -> float:
        command = [sys.executable, "-c", READER, kind, str(store.path), str(size), str(epochs)]
        processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
        ]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return statistics.mean(float(process.communicate()[0]) for process in processes)

    runs = [(kind, count) for kind in ("loader", "copies") for count in (1, 2)]
    seconds = in_turns({f"{kind} {count}": lambda k=kind, c=count: read(k, c) for kind, count in runs}, rounds)
    gains = {kind: 2 * ratio(seconds, f"{kind} 1", f"{kind} 2") for kind in ("loader", "copies")}
    checks = [Check("two processes: gain, of that of bare copies", gains["loader"] / gains["copies"], 0.95, True)]
    return {"median_seconds": medians(seconds), "gains": gains}, checks


def short_epochs(base: Path, batches: int, count: int, rounds: int) -> tuple[dict[str, Any], list[Check]]:
    """Time epochs of few batches against an epoch of all of them, with a caller that is busy after each batch."""
    size, work = 512, torch.rand(384, 384)
    images = torch.randint(0, 256, (size * batches * count, 3, 32, 32), dtype=torch.uint8)
    store = memfeed.cache((images, torch.arange(len(images))), base / "short.mf", progress=False)
    long = memfeed.Loader(store, size, shuffle=True)
    short = memfeed.Loader(store.subset(range(size * batches)), size, shuffle=True)

    def busy(batches_: Iterable[Any]) -> None:
        for _ in batches_:
            torch.mm(work, work)

    def shorts() -> None:
        for _ in range(count):
            busy(short)

    contenders = {"short": shorts, "long": lambda: busy(long)}
    seconds = in_turns({name: lambda run=run: seconds_of(run) for name, run in contenders.items()}, rounds)
    times = medians(seconds)
    start = (times["short"] - times["long"]) / count
    about = f"short epochs of {batches} batches: time, of a long one's batches"
    return {"median_seconds": times, "start_seconds": start}, [
        Check(about, ratio(seconds, "short", "long"), 1.1, False)
    ]


def main() -> None:
    made = parser("busy", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to")
    options = made.parse_args()
    quick = options.quick
    rounds = 1 if quick else 11
    parts: dict[str, Any] = {}
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        base = Path(directory)
        n = 128 if quick else 4_000
        pictures = torch.randint(0, 256, (n, 3, 256, 256), dtype=torch.uint8)
        store = memfeed.cache((pictures, torch.arange(n)), base / "large.mf", progress=False)
        works: dict[str, Callable[[], tuple[dict[str, Any], list[Check]]]] = {
            "large images": lambda: large_images(store, 64, rounds),
            "two processes": lambda: two_readers(store, 64, 1 if quick else 10, 1 if quick else 5),
            "training": lambda: training(base, 64 if quick else 1_024, 32, 1 if quick else 5),
            "short epochs": lambda: short_epochs(base, 4, 2 if quick else 20, rounds),
        }
        for name, run in works.items():
            parts[name], found = run()
            checks += found
    for name in ("quiet", "busy"):
        times, cpu = (parts["large images"][key][name] for key in ("median_seconds", "cpu_seconds"))
        rows = [[who, f"{times[who] * 1e3:,.1f} ms", f"{cpu[who] * 1e3:,.1f} ms"] for who in times]
        table(f"{n:,} images [3, 256, 256], batches of 64, {name}", ["", "epoch", "CPU time"], rows)
    show("busy", checks)
    write(options, {"rounds": rounds, "images": n}, {"works": parts}, checks)


if __name__ == "__main__":
    main()
