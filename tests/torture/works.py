"""Small conversions of every kind, to be disturbed at each operation, and what each has to give in the end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from torch.utils.data import IterableDataset, Subset, get_worker_info

import memfeed
from memfeed import Writer
from memfeed.building import build
from memfeed.convert.probe import probe_indices
from memfeed.errors import StoreError
from memfeed.system.threads import end_all
from support import Made, equal

ROWS, HALF = 24, 12
PROBED = set(probe_indices(ROWS))
BROKEN = (5, 6, 17)


def sample(i: int, version: int = 0) -> dict[str, Any]:
    """A fixed field, a ragged one, a text, and one that turns ragged after the samples that are probed."""
    return {
        "x": torch.full((3,), float(i + 100 * version)),
        "boxes": torch.arange(i % 4 + 1) * 10 + i + version,
        "text": f"{version}:{i}" * (i % 3 + 1),
        "late": torch.full((3 if i == 11 else 2,), i + version),
    }


def newer(i: int) -> dict[str, Any]:
    return sample(i, 1)


def columns_of(i: int) -> dict[str, Any]:
    return {"x": sample(i)["x"], "y": torch.tensor(i)}


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


class Stream(IterableDataset):
    """The same rows one after the other, shared out among workers."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for i in range(info.id, ROWS, info.num_workers) if info else range(ROWS):
            yield sample(i)


# --- each makes a store at a path, from nothing or from what an earlier try has left there, and tells what was read


def convert(path: Path, data: Data | None = None, **options: Any) -> Counter[int]:
    data = data or Data()
    memfeed.cache(data, path, workers=options.pop("workers", 0), progress=False, **options)
    return data.read


def with_holes(path: Path) -> Counter[int]:
    return convert(path, Data(broken=BROKEN), on_error="skip")


def overwrite(path: Path) -> Counter[int]:
    return convert(path, Data(1), overwrite=True)


def repair(path: Path) -> Counter[int]:
    memfeed.repair(Data(), path, progress=False)
    return Counter()


def in_workers(path: Path) -> Counter[int]:
    convert(path, workers=2)
    return Counter()


def stream(path: Path, workers: int = 0) -> Counter[int]:
    memfeed.cache(Stream(), path, workers=workers, progress=False)
    return Counter()


def stream_in_workers(path: Path) -> Counter[int]:
    return stream(path, 2)


def fill(path: Path) -> Counter[int]:
    """A store that is filled while a loader reads it."""
    data = Data()
    store = memfeed.cache(data, path, lazily=True, workers=0, fields={"late": "jagged"}, progress=False)
    for batch in memfeed.Loader(store, 5, shuffle=True, seed=1):
        for x, version in zip(batch["x"][:, 0].tolist(), batch["text"], strict=True):
            assert version == sample(int(x))["text"]
    store.finish()
    del store
    end_all()
    return data.read


def columns(path: Path) -> Counter[int]:
    rows = [columns_of(i) for i in range(ROWS)]
    memfeed.cache({name: torch.stack([row[name] for row in rows]) for name in rows[0]}, path, progress=False)
    return Counter()


@contextlib.contextmanager
def _unless_finished(path: Path) -> Iterator[None]:
    """A Writer refuses a path where it has finished already, or finishes a commit that was cut short."""
    try:
        yield
    except StoreError as error:
        assert "found a whole store there" in str(error) or (path.exists() and "found something there" in str(error))


def write(path: Path) -> Counter[int]:
    with _unless_finished(path), Writer(path) as writer:
        for i in range(len(writer), ROWS):
            writer.append(sample(i))
    return Counter()


def rewrite(path: Path) -> Counter[int]:
    """Rows by number, from the last to the first, and then with other values."""
    with _unless_finished(path), Writer(path, length=ROWS) as writer:
        for version in (0, 1):
            for i in reversed(range(ROWS)):
                writer[i] = sample(i, version)
    return Counter()


def write_absent(path: Path) -> Counter[int]:
    with _unless_finished(path), Writer(path, length=ROWS) as writer:
        for first, last in writer.absent if len(writer) else [(0, ROWS)]:
            for i in range(first, last):
                writer[i] = newer(i)
    return Counter()


def first_half(path: Path) -> None:
    memfeed.cache(Subset(Data(), range(HALF)), path, workers=0, progress=False)


def append(path: Path) -> Counter[int]:
    """Rows of the second half after those of the first, once."""
    data = Data()
    if len(memfeed.open(path)) == ROWS and not path.with_name("a.mf.append").exists():
        return convert(path)
    memfeed.append(path, Subset(data, range(HALF, ROWS)), workers=0, progress=False)
    return data.read


@functools.cache
def _halves() -> list[Path]:
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place)
    for name, rows in (("one.mf", range(HALF)), ("two.mf", range(HALF, ROWS))):
        fields = {"late": "jagged"}  # as it is in the first half
        memfeed.cache(Subset(Data(), rows), place / name, workers=0, progress=False, fields=fields)
    return [place / "one.mf", place / "two.mf"]


def concat(path: Path) -> Counter[int]:
    if path.exists():
        return convert(path)
    with _unless_finished(path):
        memfeed.concat(_halves(), path, progress=False)
    return Counter()


def rot(path: Path) -> None:
    """A store some of whose bytes are not what was written."""
    convert(path)
    for name in ("x.memmap", "text/heap.bin"):
        file = path / name
        file.chmod(0o644)
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
        file.chmod(0o444)


@dataclass(frozen=True)
class Work:
    """``row`` is what each row has to be in the end, ``older`` what it may be where ``resume`` finished the work.

    ``before`` makes what is there already. With ``spread`` other processes take part. The rows of an iterable that
    workers share come in turns of blocks: not ``ordered``.
    """

    do: Callable[[Path], Counter[int]]
    row: Callable[[int], Any] = sample
    broken: tuple[int, ...] = ()
    before: Callable[[Path], object] | None = None
    resume: Callable[[Path], Counter[int]] | None = None
    older: Callable[[int], Any] | None = None
    spread: bool = False
    ordered: bool = True


WORKS = {
    "convert": Work(convert),
    "holes": Work(with_holes, broken=BROKEN),
    "workers": Work(in_workers, spread=True),
    "overwrite": Work(overwrite, newer, before=convert),
    "repair": Work(repair, before=rot),
    "filled": Work(fill),
    "columns": Work(columns, columns_of),
    "stream": Work(stream),
    "stream, workers": Work(stream_in_workers, spread=True, ordered=False),
    "write": Work(write),
    "append": Work(append, before=first_half),
    "concat": Work(concat),
    "rewrite": Work(rewrite, newer, resume=write_absent, older=sample),
}


def right(path: Path, work: Work, *, resumed: bool = False) -> None:
    """Asserts that the store is all there, every row and every byte."""
    store = memfeed.open(path)
    store.verify()
    wanted = [i for i in range(ROWS) if i not in work.broken]
    assert len(store) == len(wanted)
    older = work.older if resumed else None
    found_rows = list(store) if work.ordered else sorted(store, key=lambda row: float(row["x"][0]))
    for row, (i, found) in enumerate(zip(wanted, found_rows, strict=True)):
        assert equal(found, work.row(i)) or (older and equal(found, older(i))), (row, found)


def digest(path: Path) -> str:
    """Of all files of a store; of a column's file that another generation shares, of the bytes that are this one's."""
    hashed = hashlib.sha256()
    manifest = path / "memfeed.json"
    sizes = msgspec.json.decode(manifest.read_bytes())["files"] if manifest.exists() else {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and ".build" not in file.parts and file.name != "append.begun":
            name = str(file.relative_to(path))
            hashed.update(name.encode() + file.read_bytes()[: sizes.get(name)])
    return hashed.hexdigest()


@contextlib.contextmanager
def no_syncs() -> Iterator[None]:
    """What replays a loss need not wait for the disk."""
    with mock.patch("os.fsync", return_value=None), mock.patch("os.fdatasync", return_value=None):
        yield


@contextlib.contextmanager
def short_syncs() -> Iterator[None]:
    """Every run of rows is followed by a sync point, and a run is a few rows."""
    with (
        mock.patch.object(build, "SYNC_SECONDS", 0.0),
        mock.patch("memfeed.convert.write_run.MOST_ROWS_A_WRITE", 4),
        mock.patch("memfeed.convert.dataset_supply.TICK_SECONDS", 0.002),
    ):
        yield
