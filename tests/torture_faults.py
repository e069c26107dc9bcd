"""Disks that refuse and power that fails: scenarios for the torture, and what the short tests share with it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import memfeed
from memfeed import Writer, files
from memfeed.build import DURABLE, Build, build
from memfeed.errors import BuildError, SpaceError, StoreError
from memfeed.testing import Faults, Recorder, Replay
from support import Made, equal

ROWS = 24
CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, 0)


def sample(i: int, version: int = 0) -> dict[str, Any]:
    """A fixed field, a ragged one, a text, and one that turns ragged after the samples that are probed."""
    return {
        "x": torch.full((3,), float(i + 100 * version)),
        "boxes": torch.arange(i % 4 + 1) * 10 + i + version,
        "text": f"{version}:{i}" * (i % 3 + 1),
        "late": torch.full((3 if i == 11 else 2,), i + version),
    }


class Data(Made):
    """Rows of one version, some of which raise; counts those that were read."""

    def __init__(self, version: int = 0, broken: tuple[int, ...] = ()) -> None:
        super().__init__(lambda i: sample(i, version), ROWS)
        self.version, self.broken, self.read = version, broken, Counter[int]()

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        if index in self.broken:
            raise ValueError(f"broken {index}")
        return super().__getitem__(index)


def right(path: Path, version: int = 0, broken: tuple[int, ...] = ()) -> None:
    """Asserts that the store is all there, every row and every byte."""
    store = memfeed.open(path)
    store.verify()
    wanted = [i for i in range(ROWS) if i not in broken]
    assert len(store) == len(wanted)
    for row, i in enumerate(wanted):
        assert equal(store[row], sample(i, version)), (row, store[row])


def digest(path: Path) -> str:
    """Of all files of a store."""
    hashed = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and ".build" not in file.parts:
            hashed.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return hashed.hexdigest()


# --- the conversions: each makes a store at a path, from nothing or from what an earlier try has left there


def convert(path: Path) -> None:
    memfeed.cache(Data(), path, workers=0, progress=False)


def convert_with_holes(path: Path) -> None:
    memfeed.cache(Data(broken=(5, 6, 17)), path, workers=0, progress=False, on_error="skip")


def overwrite(path: Path) -> None:
    memfeed.cache(Data(1), path, workers=0, progress=False, overwrite=True)


def write(path: Path) -> None:
    """A Writer, which refuses a path where it has finished already, or finishes a commit that was cut short."""
    if path.exists():
        return
    try:
        with Writer(path) as writer:
            for i in range(len(writer), ROWS):
                writer.append(sample(i))
    except StoreError as error:
        assert "found a whole store there" in str(error)


WORKS: dict[str, tuple[Callable[[Path], None], int, tuple[int, ...]]] = {
    "convert": (convert, 0, ()),
    "holes": (convert_with_holes, 0, (5, 6, 17)),
    "overwrite": (overwrite, 1, ()),
    "write": (write, 0, ()),
}


@contextlib.contextmanager
def no_syncs():
    """What replays a loss need not wait for the disk."""
    with mock.patch("os.fsync", return_value=None), mock.patch("os.fdatasync", return_value=None):
        yield


@contextlib.contextmanager
def short_syncs():
    """Every run of rows is followed by a sync point, and a run is a few rows."""
    with (
        mock.patch.object(build, "SYNC_SECONDS", 0.0),
        mock.patch("memfeed.convert.run.MOST_ROWS_A_WRITE", 4),
    ):
        yield


# --- a write that fails


def fail_once(directory: Path, name: str, at: int, code: int, *, lasting: bool = False) -> bool:
    """One conversion whose operation ``at`` fails, then another try; False where there are fewer operations."""
    work, version, broken = WORKS[name]
    path = directory / "a.mf"
    before = ""
    if name == "overwrite":
        memfeed.cache(Data(), path, workers=0, progress=False)
        before = digest(path)
    try:
        with Faults(at, code, lasting=lasting) as faults:
            work(path)
    except (SpaceError, BuildError) as error:
        assert code, f"a short write is no error: {error}"
        assert isinstance(error, SpaceError) == (code in (errno.ENOSPC, errno.EDQUOT)), (faults.failed, error)
        assert str(directory) in str(error), error
        if isinstance(error, SpaceError):
            assert "bytes more" in str(error), error
        if before and digest(path) != before:
            right(path, 1)  # the error came after the exchange
    else:
        right(path, version, broken)
        if faults.failed is None:
            return False
    work(path)
    right(path, version, broken)
    assert not [p for p in directory.iterdir() if p != path and list(p.iterdir())], list(directory.iterdir())
    return True


def operations(name: str) -> int:
    """How many operations a conversion has."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.mf"
        if name == "overwrite":
            memfeed.cache(Data(), path, workers=0, progress=False)
        with Faults() as faults:
            WORKS[name][0](path)
    return len(faults.operations)


def faults(seconds: float, rng: random.Random) -> dict[str, int]:
    """Conversions with a fault at a place drawn by chance, until the time is over."""
    counts: Counter[str] = Counter()
    most = {name: operations(name) for name in WORKS}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        name, code = rng.choice(list(WORKS)), rng.choice(CODES)
        with tempfile.TemporaryDirectory() as directory:
            done = fail_once(Path(directory), name, rng.randrange(most[name]), code, lasting=rng.random() < 0.3)
        counts[f"{name}: {errno.errorcode.get(code, 'short write')}" if done else "no fault"] += 1
    return dict(counts)


# --- power that fails


def record(directory: Path, name: str) -> Recorder:
    """A conversion with many sync points; notes which rows each has made durable, and the end."""
    work = WORKS[name][0]
    path = directory / "a.mf"
    if name == "overwrite":
        memfeed.cache(Data(), path, workers=0, progress=False)
    recorder = Recorder(directory)
    sync = Build.sync

    def noted(self: Build) -> None:
        sync(self)
        recorder.note(frozenset((self.presence() == DURABLE).nonzero()[0].tolist()))

    with no_syncs(), recorder, short_syncs(), mock.patch.object(Build, "sync", noted):
        work(path)
    recorder.note("finished")
    return recorder


def survive(directory: Path, name: str, notes: list[object]) -> str:
    """What a power loss has left gives the right rows: says what it was."""
    work, version, broken = WORKS[name]
    path = directory / "a.mf"
    finished = "finished" in notes
    found = "build" if (directory / "a.mf.build" / ".build" / "settings.json").exists() else "nothing"
    if path.exists():
        found = "store"
        if name == "overwrite" and not finished:
            store = memfeed.open(path)
            right(path, int(not equal(store[0], sample(0))))
        else:
            right(path, version, broken)
    assert found == "store" or not finished, "what was promised is gone"
    assert path.exists() or name != "overwrite", "the old store is gone"
    with no_syncs(), mock.patch.object(files, "boot_id", return_value="another"):
        if name in ("convert", "holes") and not finished:
            data = Data(broken=broken)
            memfeed.cache(data, path, workers=0, progress=False, on_error="skip" if broken else "raise")
            durable = next((note for note in reversed(notes) if isinstance(note, frozenset)), frozenset())
            probed = {round(i * (ROWS - 1) / 15) for i in range(16)}
            again = {i for i in durable if data.read[i]} - probed - set(broken)
            assert not again, f"rows {again} were durable and are computed again"
        else:
            work(path)
    right(path, version, broken)
    return found


LOSSES = [("lost", "lost"), ("kept", "zeros"), ("kept", "lost"), ("lost", "kept"), ("some", "some")]


def lose_power(recorder: Recorder, name: str, scratch: Path, losses: Any, seed: int, every: int = 1) -> Counter[str]:
    """Every prefix of a recorded conversion (or each ``every``-th by chance), with these losses; equal ones once."""
    counts: Counter[str] = Counter()
    seen: set[str] = set()
    replay, rng = Replay(recorder), random.Random(seed)
    more = True
    while more:
        if rng.randrange(every) == 0:
            for names, data in losses:
                left = scratch / "left"
                replay.lose(left, names, data, rng.randrange(1 << 30))
                state = digest_all(left) + str(len(replay.notes))
                if state not in seen:
                    seen.add(state)
                    try:
                        counts[survive(left, name, replay.notes)] += 1
                    except Exception as error:
                        where = f"{name}, after {replay.done} operations ({replay.last})"
                        raise AssertionError(f"{where}, names {names}, bytes {data}: {error!r}") from error
        more = replay.step()
    return counts


def digest_all(root: Path) -> str:
    hashed = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        hashed.update(str(file.relative_to(root)).encode() + (file.read_bytes() if file.is_file() else b"/"))
    return hashed.hexdigest()


def powerloss(seconds: float, rng: random.Random) -> dict[str, int]:
    """Power losses at moments and of kinds drawn by chance, until the time is over."""
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        name = rng.choice(list(WORKS))
        with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as scratch:
            recorder = record(Path(base), name)
            losses = [(rng.choice(("lost", "kept", "some")), rng.choice(("lost", "kept", "zeros", "some")))]
            for what, count in lose_power(recorder, name, Path(scratch), losses, rng.randrange(1 << 30), 10).items():
                counts[f"{name}: {what}"] += count
    return dict(counts)
