"""Parts of ``device.py``: batches from each placement, columns on the device, and the caller's time for a step."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import memfeed
import memfeed.transforms as T
from device_peers import Epoch, feeders
from device_run import SHAPES, Run, timed
from measure import Check, Seconds, medians, table
from memfeed.transfer.streams import Streams
from transforms import MEAN, STD

LARGE_ROW_BYTES = 64 << 10  # one copy a row is worth a comparison from here on


# --- batches from each placement


def feeding(run: Run) -> None:
    """Time the rows of an epoch from each placement, by other libraries, and by the plain copies that limit them."""
    with tempfile.TemporaryDirectory() as at:
        for (name, (shape, batch)), rows in zip(SHAPES.items(), run.sizes.rows, strict=True):
            seconds = feed_one(run, shape, batch, rows, Path(at) / name.replace(" ", ""))
            total = rows // batch * batch * torch.Size(shape).numel()
            rates = run.rates[name] = {who: total / time_s / 1e9 for who, time_s in medians(seconds).items()}
            table(name, ["", "GB/s"], [[who, f"{rate:.2f}"] for who, rate in rates.items()])
            slower = max(("bare copy to the device", "bare gather"), key=lambda who: medians(seconds).get(who, 0.0))
            limits = {"pinned": ("bare copy to the device", 0.9), "mapped": (slower, 0.9)}
            limits["device"] = "bare copy on the device", 0.6
            for where, (limit, least) in limits.items():
                run.check(f"{name}, {where}: of the {limit}", seconds, limit, where, least)
            run.check(f"{name}, pinned: one copy a row takes", seconds, "one copy a row", "pinned", 1.0)
            for who in seconds:
                if who.startswith("DataLoader"):
                    run.check(f"{name}, {who}: takes", seconds, who, "mapped", 2.0)


def feed_one(run: Run, shape: tuple[int, ...], batch: int, rows: int, at: Path) -> Seconds:
    device, cuda = run.device, run.device.type == "cuda"
    data, labels = torch.randint(0, 256, (rows, *shape), dtype=torch.uint8), torch.arange(rows)
    at.mkdir()
    store = memfeed.cache((data, labels), at / "rows.mf", progress=False)
    loaders = {
        where: memfeed.Loader(store, batch, shuffle=True, drop_last=True, device=device, placement=where)
        for where in ("pinned", "mapped", "device")
    }
    for where, loader in loaders.items():
        for images, numbers in loader:
            assert torch.equal(images.cpu(), data[numbers.cpu()]), where
    others, skipped = feeders(data, labels, batch, device, at / "peers", run.sizes.workers)
    run.skipped.update(skipped)
    steps, column = rows // batch, store.column(0)
    here = torch.empty(batch, *shape, dtype=torch.uint8, pin_memory=cuda)
    there, other = (torch.empty(batch, *shape, dtype=torch.uint8, device=device) for _ in range(2))
    ids = torch.randperm(rows)[: steps * batch].view(steps, batch)

    def repeat(work: Callable[[int], Any]) -> Callable[[], None]:
        def run_all() -> None:
            for step in range(steps):
                work(step)

        return run_all

    bare = {
        "bare copy to the device": repeat(lambda step: there.copy_(here, non_blocking=True)),
        "bare gather": repeat(lambda step: torch.index_select(column, 0, ids[step], out=here)),
        "bare copy on the device": repeat(lambda step: other.copy_(there)),
    }
    if cuda:
        streams = Streams(device)
        locked = streams.allocate_page_locked(data.nbytes).view(data.shape).copy_(data)
        seen = streams.device_view(locked.view(-1)).view(data.shape)
        there_ids = ids.to(device)
        bare["bare gather over the bus"] = repeat(lambda step: torch.index_select(seen, 0, there_ids[step], out=there))
        if data[0].nbytes >= LARGE_ROW_BYTES:

            def copy_rows(step: int) -> None:
                for at_row, row in enumerate(ids[step].tolist()):
                    there[at_row].copy_(locked[row], non_blocking=True)

            bare["one copy a row"] = repeat(copy_rows)

    def consume(epoch: Epoch) -> None:
        for part in epoch():
            del part

    epochs = {name: lambda loader=loader: iter(loader) for name, loader in loaders.items()} | others
    works = {name: lambda epoch=epoch: timed(device, lambda: consume(epoch)) for name, epoch in epochs.items()}
    return run.turns(works | {name: lambda work=work: timed(device, work) for name, work in bare.items()})


# --- columns that lie on the device, and the caller's time


def resident(run: Run) -> None:
    """Time batches from columns in the device's memory, one epoch after the other, beside plain gathers and copies."""
    device, (rows, epochs) = run.device, run.sizes.resident
    block = torch.randint(0, 256, (min(rows, 1 << 14), 3, 64, 64), dtype=torch.uint8)
    data, batch = torch.empty(rows, 3, 64, 64, dtype=torch.uint8), min(512, rows // 4)
    for start in range(0, rows, len(block)):  # to draw 20 GB takes half a minute
        data[start : start + len(block)] = block[: rows - start]
    numbers = torch.arange(rows)
    loader = memfeed.Loader((data, numbers), batch, shuffle=True, drop_last=True, device=device, placement="device")
    images, found = next(iter(loader))
    assert torch.equal(images.cpu(), data[found.cpu()])
    there, steps = data.to(device), rows // batch
    other = torch.empty_like(there[: min(rows, 1 << 18)])  # 3 GB, beside which the L2 is small
    ids = torch.randperm(rows)[: steps * batch].view(steps, batch).to(device)

    def fed() -> None:
        for _ in range(epochs):
            for part in loader:
                del part

    def gathered() -> None:
        for _ in range(epochs):
            for step in range(steps):
                there[ids[step]]

    def copied() -> None:
        for _ in range(epochs):
            for start in range(0, steps * batch, len(other)):
                part = there[start : min(start + len(other), steps * batch)]
                other[: len(part)].copy_(part)

    works = {"memfeed": fed, "index on the device": gathered, "copy on the device": copied}
    seconds = run.turns({name: lambda work=work: timed(device, work) for name, work in works.items()})
    run.median_seconds[f"resident, {epochs} epochs of {data.nbytes / 1e9:.1f} GB"] = medians(seconds)
    run.check("resident, of the copy's rate", seconds, "copy on the device", "memfeed", 0.6)


def host_times(run: Run) -> None:
    """Time what the caller's thread spends on a step of a small batch: `next()` and nothing else."""
    rows = run.sizes.host_rows
    data = torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8), torch.arange(rows)
    augment = T.Compose([T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)])
    found: dict[str, float] = {}
    for name, transform, limit in (("without a transform", None, 30), ("with transforms", augment, 60)):
        loader = memfeed.Loader(data, 64, shuffle=True, drop_last=True, device=run.device, transform=transform)
        of_epochs = []
        for _ in range(run.sizes.rounds + 1):
            steps, batches = [], iter(loader)
            while True:
                start = time.thread_time()  # the CPU time of the caller: it may wait for the batches
                if next(batches, None) is None:
                    break
                steps.append(time.thread_time() - start)
            of_epochs.append(statistics.median(steps))
        found[name] = statistics.median(of_epochs[1:])
        what = f"the caller's CPU time a step, {name}"
        run.checks.append(Check(what, found[name] * 1e6, limit, False, "us"))
    run.median_seconds["the caller's CPU time a step"] = found
