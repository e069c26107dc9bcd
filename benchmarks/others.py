"""Time shuffled epochs of memfeed, of plain PyTorch and of every other loading library that is installed.

Two workloads: 50,000 uint8 [3, 32, 32] with an int64 label in batches of 512, and 4,000 uint8 [3, 256, 256] with a
label in batches of 64; page cache warm. Each contender has its own process, because FFCV, TensorFlow and others
change global settings. It writes the rows in its own format, must give every row once with its label, and then runs
epochs in turns with the others, timed inside its process.

    python benchmarks/others.py          # make bench-others: with all that benchmarks/peers knows
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from measure import Check, Seconds, machine, medians, parser, ratio, seconds_of, show, sync_files, table, write
from peers import EXACT, PEERS, Rows, available, check, missing
from peers.rows import Batch, Epochs, save_npy

OURS, BARE = "memfeed.Loader", "bare index_select loop"
PREPARE_SECONDS, TURN_SECONDS, END_SECONDS = 240.0, 90.0, 10.0  # the longest waits for a process
SETTLE_SECONDS = 0.03  # the last contender may still work: SPDL fetches batches ahead
LEAST_ROUNDS = 2


class Work(NamedTuple):
    """The rows to load, and the batch size."""

    name: str
    rows: int
    shape: tuple[int, ...]
    batch_size: int
    directory: Path


def works(base: Path, quick: bool) -> list[Work]:
    return [
        Work("small images", 2048 if quick else 50_000, (3, 32, 32), 512, base / "small"),
        Work("large images", 128 if quick else 4000, (3, 256, 256), 64, base / "large"),
    ]


def make_rows(work: Work) -> None:
    """Write two .npy files for every contender. The labels are the row numbers: peers.check needs that."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (work.rows, *work.shape), dtype=torch.uint8, generator=generator)
    save_npy(Rows(images, torch.arange(work.rows)), work.directory / "rows")


def mapped_rows(work: Work) -> Rows:
    """Map those files, privately ("c"), because torch warns of memory that cannot be written."""
    columns = (np.load(work.directory / "rows" / f"{name}.npy", mmap_mode="c") for name in Rows._fields)
    return Rows(*map(torch.from_numpy, columns))


# --- the contenders beside benchmarks/peers; memfeed and tensordict are imported only in the processes that use them


def store(rows: Rows, directory: Path) -> Any:
    """Return the store that two contenders read: the first writes it, the second opens it."""
    import memfeed

    return memfeed.cache(tuple(rows), directory.parent / "rows.mf", allow="copy", progress=False)


def make_ours(rows: Rows, batch_size: int, directory: Path) -> Iterable[Batch]:
    import memfeed

    return memfeed.Loader(store(rows, directory), batch_size, shuffle=True)


def make_bare(rows: Rows, batch_size: int, directory: Path) -> Iterable[Batch]:
    """Make the loop that only gathers rows: from memfeed's columns to one buffer, used again by every batch."""
    columns = [store(rows, directory).column(number) for number in range(2)]
    buffers = [torch.empty(batch_size, *column.shape[1:], dtype=column.dtype) for column in columns]

    def epoch() -> Iterator[Batch]:
        for ids in torch.randperm(len(rows.labels)).split(batch_size):
            images, labels = (
                torch.index_select(column, 0, ids, out=buffer[: len(ids)])
                for column, buffer in zip(columns, buffers, strict=True)
            )
            yield images, labels

    return Epochs(epoch)


def make_plain(rows: Rows, batch_size: int, directory: Path) -> Iterable[Batch]:
    """Copy the rows to memory for a DataLoader. It has no workers: without decoding they make it slower."""
    return DataLoader(TensorDataset(rows.images.clone(), rows.labels.clone()), batch_size, shuffle=True)


def identity(batch: Any) -> Any:
    return batch


def make_tensordict(rows: Rows, batch_size: int, directory: Path) -> Iterable[Batch]:
    from tensordict import TensorDict

    mapped = TensorDict(rows._asdict(), [len(rows.labels)]).memmap(str(directory))
    loader = DataLoader(mapped, batch_size, shuffle=True, collate_fn=identity)

    def epoch() -> Iterator[Batch]:
        for batch in loader:
            yield batch["images"], batch["labels"]

    return Epochs(epoch)


OWN = {
    OURS: make_ours,
    BARE: make_bare,
    "DataLoader": make_plain,
    "DataLoader(TensorDict memmap)": make_tensordict,
}
PACKAGES = {OURS: "memfeed", BARE: "torch", "DataLoader": "torch", "DataLoader(TensorDict memmap)": "tensordict"}


# --- a contender's process


def prepare(name: str, work: Work) -> Iterable[Batch]:
    """Write the contender's format and check that an epoch is complete. That epoch also loads its pages."""
    rows = mapped_rows(work)
    directory = work.directory / re.sub(r"\W+", "-", name)
    epochs = (OWN | PEERS)[name](rows, work.batch_size, directory)
    check(name, rows, epochs)
    return epochs


def turn(epochs: Iterable[Batch], rows: int, least_seconds: float) -> float:
    """Return the median of as many epochs as fill ``least_seconds``: one, except for the fast contenders."""

    def drain() -> None:
        seen = sum(len(labels) for _, labels in epochs)
        assert seen == rows, f"found {seen} rows in an epoch, expected {rows}"

    gc.collect()
    times = [seconds_of(drain)]
    while sum(times) < least_seconds:
        times.append(seconds_of(drain))
    return statistics.median(times)


def answer_all(log: Path, connection: Connection, answer: Callable[[Any], Any]) -> None:
    """Answer requests until the pipe is closed, with (True, the answer) or (False, the traceback)."""
    os.setsid()  # so that all processes of a library can be ended together
    multiprocessing.set_start_method(None, force=True)  # the system's, as in a program of its own: here it was "spawn"
    # Streaming leaves files in the first, datasets in the second
    os.environ["TMPDIR"], os.environ["HF_HOME"] = str(log.parent), str(log.parent / "huggingface")
    tempfile.tempdir = None
    with log.open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    with contextlib.suppress(EOFError):
        while True:
            request = connection.recv()
            try:
                connection.send((True, answer(request)))
            except Exception:
                connection.send((False, traceback.format_exc(limit=-3)))


def serve(name: str, log: Path, connection: Connection) -> None:
    """Answer requests: a Work to prepare, or the seconds that a turn must last."""
    epochs: Iterable[Batch] | None = None
    rows = 0

    def answer(request: Any) -> Any:
        nonlocal epochs, rows
        if isinstance(request, Work):
            epochs = None  # those of the last workload: their threads and workers end with them
            gc.collect()
            epochs, rows = prepare(name, request), request.rows
            return None
        assert epochs is not None, "found a turn before anything was prepared"
        return turn(epochs, rows, request)

    answer_all(log, connection, answer)


class Contender:
    """The process of one contender, from its start to its end. Its output goes to a file in ``scratch``."""

    def __init__(self, name: str, scratch: Path, serve: Callable[[str, Path, Connection], None] = serve) -> None:
        self.name, self._log = name, scratch / f"{re.sub(r'[^a-zA-Z]+', '-', name)}.log"
        spawn = multiprocessing.get_context("spawn")
        self._pipe, self._childs_end = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(name, self._log, self._childs_end))

    def start(self) -> None:
        """Start the process, which begins to import its library."""
        self._process.start()
        self._childs_end.close()

    def ask(self, request: Any, most_seconds: float) -> Any:
        """Return its answer. Raises RuntimeError, with its name, if it fails, dies, or takes too long."""
        deadline = time.monotonic() + most_seconds
        try:
            self._pipe.send(request)
            # the end of the pipe does not show every death: forked workers may hold the pipe open
            while not self._pipe.poll(0.2):
                if self._process.exitcode is not None:
                    raise EOFError
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name} gave no answer for {most_seconds:.0f} s{self._last_words()}")
            fine, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            raise RuntimeError(f"{self.name} died with exit code {code}{self._last_words()}") from None
        if not fine:
            raise RuntimeError(f"{self.name} failed:\n{answer}")
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-8:] if self._log.exists() else []
        return "".join(f"\n  {line}" for line in ["; the last it printed:", *lines]) if lines else ""

    def close(self) -> None:
        """Close the pipe, which ends the process. ``join`` waits for that."""
        self._pipe.close()

    def join(self) -> None:
        """Wait for its end. After ten seconds, kill it."""
        if self._process.pid is None:
            return
        self._process.join(END_SECONDS)
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()


# --- the race


class Race:
    """All contenders. One that fails takes no further part, and ``failed`` says why. memfeed may not fail."""

    def __init__(self, names: Iterable[str], scratch: Path) -> None:
        self.contenders = [Contender(name, scratch) for name in names]
        self.failed: dict[str, str] = {}

    def __enter__(self) -> Race:
        try:
            for contender in self.contenders:
                contender.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for contender in self.contenders:
            contender.close()
        for contender in self.contenders:
            contender.join()

    def running(self) -> list[Contender]:
        """Return the contenders that have not failed."""
        return [contender for contender in self.contenders if contender.name not in self.failed]

    def prepare(self, work: Work) -> None:
        """Prepare all of them for a workload, two at a time, and sync everything that was written."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda contender: self._try(contender, work, PREPARE_SECONDS), self.running()))
        sync_files(work.directory)

    def run(self, rounds: int, least_seconds: float, share_seconds: float) -> dict[str, dict[int, float]]:
        """Return the seconds of each contender in each round it took part in.

        All take part in the first rounds. A contender that has then used its share of the time stops.
        """
        seconds: dict[str, dict[int, float]] = {contender.name: {} for contender in self.contenders}
        used = dict.fromkeys(seconds, 0.0)
        for number in range(rounds):
            contenders = self.running()
            first = number % len(contenders)  # each round begins with another contender
            for contender in contenders[first:] + contenders[:first]:
                name = contender.name
                turns = len(seconds[name])
                if turns >= LEAST_ROUNDS and used[name] * (turns + 1) / turns > share_seconds:
                    continue
                time.sleep(SETTLE_SECONDS)
                start = time.perf_counter()
                found = self._try(contender, least_seconds, TURN_SECONDS)
                used[name] += time.perf_counter() - start
                if found is not None:
                    seconds[name][number] = found
        return {name: times for name, times in seconds.items() if times and name not in self.failed}

    def _try(self, contender: Contender, request: Any, most_seconds: float) -> Any:
        try:
            return contender.ask(request, most_seconds)
        except RuntimeError as error:
            if contender.name == OURS:
                raise
            print(error, file=sys.stderr)
            self.failed[contender.name] = str(error)
            contender.close()  # it may still work, and must not disturb the others
            contender.join()
            return None


def ratio_to_ours(seconds: dict[str, dict[int, float]], name: str) -> float:
    """Return its seconds as a multiple of memfeed's, over the rounds that it took part in."""
    both: Seconds = {who: [seconds[who][number] for number in seconds[name]] for who in (name, OURS)}
    return ratio(both, name, OURS)


def figures_of(work: Work, seconds: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Return the part of the JSON file for one workload."""
    listed = {name: list(times.values()) for name, times in seconds.items()}
    median = medians(listed)
    return {
        "rows": work.rows,
        "shape": work.shape,
        "batch_size": work.batch_size,
        "row_bytes": int(np.prod(work.shape)) + 8,
        "median_seconds": median,
        "rows_per_second": {name: work.rows / t for name, t in median.items()},
        "ratios": {name: ratio_to_ours(seconds, name) for name in seconds},
        "seconds": listed,
    }


def main() -> None:
    made = parser("others", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to; every contender writes the rows")
    options = made.parse_args()
    quick = options.quick
    rounds, least, share = (LEAST_ROUNDS, 0.0, 0.0) if quick else (15, 0.15, 8.0)
    versions = {**{name: machine()[package] for name, package in PACKAGES.items()}, **available()}
    found: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory(dir=options.dir, ignore_cleanup_errors=True) as directory,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,  # not in dir: a socket's path must be short
        Race(versions, Path(scratch)) as race,
    ):
        for work in works(Path(directory), quick):
            make_rows(work)
            race.prepare(work)
            found[work.name] = figures_of(work, race.run(rounds, least, share))
    for name, part in found.items():
        table(
            f"{name}: {part['rows']:,} uint8 {list(part['shape'])} and a label, batches of {part['batch_size']}, warm",
            ["", "epoch", "rows/s", "memfeed is"],
            [
                [who, f"{t * 1e3:.1f} ms", f"{part['rows'] / t:,.0f}", f"{part['ratios'][who]:.2f} x"]
                for who, t in sorted(part["median_seconds"].items(), key=lambda item: item[1])
            ],
        )
    checks = [
        Check(f"{name}: faster than FFCV", part["ratios"].get("FFCV", 0.0), 2, at_least=True)
        for name, part in found.items()
        if "FFCV" in versions
    ]
    if checks:
        show("others", checks)
    for title, names in (("not installed", missing()), ("failed", list(race.failed))):
        if names:
            print(f"{title}: {', '.join(names)}")
    write(
        options,
        {"works": list(found), "rounds": rounds},
        {
            "machine": {**machine(), "versions": versions},
            "works": found,
            "exact_shuffle": {name: EXACT.get(name, True) for name in versions},
            "missing": missing(),
            "failed": race.failed,
        },
        checks,
    )


if __name__ == "__main__":
    main()
