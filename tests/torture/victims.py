"""Processes to kill, a dataset that writes down what is read of it, and whether what was written is right."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import memfeed
from support import equal, wait_until

HANG_SECONDS = 60.0  # many times what anything here takes, on a busy machine too
PROBE = -1

# children of a process without threads that has imported everything: they start in milliseconds
_server = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "tensordict", "memfeed.convert.cache", "memfeed.loading.loader", "torture.victims"]
_server.set_forkserver_preload(PRELOADED)


def sample(i: int) -> dict[str, Any]:
    """Fixed and ragged fields, different for every i."""
    g = torch.Generator().manual_seed(i)
    return {
        "image": torch.randint(0, 256, (3, 16, 16), generator=g, dtype=torch.uint8),
        "label": i,
        "boxes": torch.rand(i % 5, 4, generator=g),
        "text": f"row {i} " * (i % 3),
        "long": torch.full((i % 7 * 500,), i, dtype=torch.int32),
    }


CODED = {"image": "zstd", "long": "lz4"}


class Logged(Dataset):
    """Appends (run, worker, index) to a file at every read; worker is ``PROBE`` in the builder's own process."""

    def __init__(self, n: int, log: Path, run: int, seconds: float) -> None:
        self.n, self.log, self.run, self.seconds = n, log, run, seconds

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        info = get_worker_info()
        fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(fd, f"{self.run} {info.id if info else PROBE} {i}\n".encode())
        os.close(fd)
        time.sleep(self.seconds)
        return sample(i)


class LoggedStream(IterableDataset):
    """The same samples one after the other; workers share them out."""

    def __init__(self, samples: Logged) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        share, shares = (info.id, info.num_workers) if info else (0, 1)
        yield from (self.samples[i] for i in range(share, len(self.samples), shares))


def reads(log: Path, start: int = 0) -> Iterator[tuple[int, int, int]]:
    """(run, worker, index) of every read that was written down from byte ``start``."""
    for line in log.read_bytes()[start:].decode().splitlines() if log.exists() else ():
        run, worker, index = line.split()
        yield int(run), int(worker), int(index)


def convert(path: Path, dataset: Dataset, workers: int, sync_seconds: float) -> None:
    """What a child does to make a store; exits with 3 where memfeed says that a worker died."""
    with _converting(sync_seconds):
        store = memfeed.cache(dataset, path, workers=workers, progress=False)
    if len(store) != len(dataset):
        sys.exit(4)


def convert_coded(path: Path, dataset: Dataset, workers: int, sync_seconds: float) -> None:
    """The same with compressed rows."""
    with _converting(sync_seconds):
        store = memfeed.cache(dataset, path, forms=CODED, workers=workers, progress=False)
    if len(store) != len(dataset):
        sys.exit(4)


def convert_stream(path: Path, dataset: Logged, workers: int, sync_seconds: float) -> None:
    """The same, one sample after the other."""
    with _converting(sync_seconds):
        memfeed.cache(LoggedStream(dataset), path, workers=workers, progress=False)


def write(path: Path, dataset: Logged, workers: int, sync_seconds: float) -> None:
    """The same with a Writer, in turn or by number."""
    length = len(dataset) if workers else None
    with _converting(sync_seconds), memfeed.Writer(path, length=length) as writer:
        if length is None:
            for i in range(len(writer), len(dataset)):
                writer.append(dataset[i])
            return
        for first, last in writer.absent if len(writer) else [(0, length)]:
            for i in reversed(range(first, last)):
                writer[i] = dataset[i]


@contextlib.contextmanager
def _converting(sync_seconds: float) -> Iterator[None]:
    memfeed.building.build.SYNC_SECONDS = sync_seconds
    try:
        yield
    except memfeed.errors.StoreError as error:
        if "an earlier Writer was cut short and has been finished now" not in str(error):
            raise
    except memfeed.errors.BuildError as error:
        print(error, file=sys.stderr)
        sys.exit(3)


def _in_child(stderr: Path, action: Callable[..., None], *arguments: Any) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # not the one this child was started with
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # of what is forked from here, too
    torch.set_num_threads(1)
    action(*arguments)


def start(stderr: Path, action: Callable[..., None], *arguments: Any) -> Any:
    """A child in a process group of its own that does ``action(*arguments)``."""
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # older Pythons' servers see no sys.path
        forkserver.ensure_running()
    child = _server.Process(target=_in_child, args=(stderr, action, *arguments))
    child.start()
    # so that the whole group can be killed
    wait_for(lambda: child.exitcode is not None or os.getpgid(child.pid) == child.pid)
    return child


def wait_for(condition: Callable[[], object]) -> None:
    """Returns once it holds."""
    wait_until(condition, HANG_SECONDS)


def is_stopped(pid: int) -> bool:
    """True once no thread of a child runs, because it was stopped or has ended."""
    states = [Path(f"/proc/{pid}/task/{thread}/stat").read_text() for thread in os.listdir(f"/proc/{pid}/task")]
    return all(state.rpartition(")")[2].split()[0] in "TZX" for state in states)


def workers_of(pid: int) -> list[int]:
    """The processes that ``pid`` started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def ended(child: Any) -> bool:
    """Whether the child ends; one that hangs writes to its stderr where it is, and is killed."""
    child.join(HANG_SECONDS)
    if child.exitcode is not None:
        return True
    for pid in _members(child.pid):
        os.kill(pid, signal.SIGUSR1)
        time.sleep(1)  # one after the other
    os.killpg(child.pid, signal.SIGKILL)
    child.join()
    return False


def left_behind(group: int, seconds: float = 10.0) -> int:
    """1 if processes of a group live on after that time (they are killed), else 0."""
    try:
        wait_until(lambda: not _members(group), seconds)
    except AssertionError:
        os.killpg(group, signal.SIGKILL)
        return 1
    return 0


def _members(group: int) -> list[int]:
    """The processes of a group that live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(its_group) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


def presence(path: Path) -> np.ndarray:
    """The state of every row of the build of ``path``; empty without one."""
    file = path.with_name(path.name + ".build") / ".build" / "presence"
    try:
        return np.frombuffer(file.read_bytes(), np.uint8)
    except FileNotFoundError:
        return np.zeros(0, np.uint8)


def compared(
    path: Path, n: int, *, ordered: bool = True, same_bytes: bool = False, forms: Any = None
) -> dict[str, int]:
    """Rows ``lost`` and ``wrong`` of a finished store, against one made without interruption in the same ``forms``.

    With ``same_bytes`` also the column files that differ.
    """
    store = memfeed.open(path)
    rows = list(store) if ordered else sorted(store, key=lambda row: int(row["label"]))
    wrong = sum(not equal(row, sample(i)) for i, row in enumerate(rows[:n]))
    if ordered:
        whole = memfeed.cache([sample(i) for i in range(n)], forms=forms, progress=False)
        for name in ("image", "label"):
            wrong += store[:][name].numpy().tobytes() != whole[:][name].numpy().tobytes()
        names = whole._view.manifest.files if same_bytes else ()
        wrong += sum((store.path / name).read_bytes() != (whole.path / name).read_bytes() for name in names)
    try:
        store.verify()
    except memfeed.errors.CorruptStoreError:
        wrong += 1
    return {"lost": n - len(store), "wrong": wrong}


def digest(path: Path) -> str:
    """A hash of every name and byte in a directory."""
    hashed = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        hashed.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return hashed.hexdigest()
