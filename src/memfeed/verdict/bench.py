"""``memfeed.bench``: measure a program, and say whether a store would help it."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memfeed.errors import MemfeedError, brief
from memfeed.loading.sources import is_dataset
from memfeed.splitting.generators import Generators
from memfeed.store.opened import open as open_store
from memfeed.store.store import Store
from memfeed.system.files import free_bytes
from memfeed.system.machine import core_count, memory_limit
from memfeed.system.mapped_memory import evict
from memfeed.system.messages import format_bytes
from memfeed.system.temporary import TemporaryDirectory
from memfeed.verdict.judge import (
    LEAST_TURNS,
    Form,
    Loop,
    Measured,
    SampleCost,
    Turn,
    break_even,
    ceiling,
    judge,
    times_as_fast,
)
from memfeed.verdict.program import Program, batch_rows, describe, messages_kept
from memfeed.verdict.sample_cost import files_below, measure_forms, measure_samples, noted_files, size_of
from memfeed.verdict.verdict import Verdict

SECONDS = 40.0
STORE = "s.mf"
MOST_TURNS = 9
MOST_ROWS = 20_000
"""More are not stored: a turn reads them several times."""
_TURN_SHARE = 1 / 32
"""Of the time, for a turn of one loop: 4 loops in 5 turns take 5 / 8 of it."""
_FORM_SAMPLES, _FORM_SHARE = 16, 1 / 8
_BATCHES_A_WORKER = 3
"""The least that a turn has: the first one of each worker is left out."""
_NEW_WORKERS_GAIN = 1.05
_SHARE_OF_MEMORY = 0.8
_Maker = tuple[str, Callable[[float], Turn]]
"""A loop in words, and what runs a turn of it for so many seconds."""


def bench(
    dataset: Any,
    step: Callable[[Any], Any] | None = None,
    *,
    batch_size: int | None = None,
    workers: int | None = None,
    device: torch.device | str | None = None,
    epochs: int | None = None,
    seconds: float = SECONDS,
    out: str | os.PathLike[str] = ".",
) -> Verdict:
    """Measure whether memfeed would make a program faster, on a sample of its rows. Takes about a minute.

    Four loops run in turns: torch's loader as it is today; the same with its best number of workers; one batch again
    and again, which no loader can beat; and memfeed, from a store of the sample in a temporary directory. It helps only
    if the whole spread of its turns is better than torch's loader at its best.

    Args:
        dataset: a map-style dataset, or the `torch.utils.data.DataLoader` of today.
        step: what is done with a batch, such as a training step. Without it the verdict is "cannot tell" where loading
            is faster. On a CPU it returns when its work is done.
        batch_size, workers: of today's loader, if a dataset is given: 32, and 0 worker processes.
        device: where batches go before the step; None leaves them in CPU memory.
        epochs: how often the program reads the data; None if that is not known.
        seconds: about what the measurement may take. If three batches for each core take longer than an eighth of it,
            it takes longer, as a note says.
        out: a place on the disk that the store would be on, for its free space.

    Raises LoaderError for arguments that do not fit together, and the errors of the dataset and of the step. All random
    generators are where they were afterwards.

    Example::

        verdict = memfeed.bench(loader, step)
        print(verdict)
        verdict.save("verdict.html")
    """
    started = time.perf_counter()
    program = describe(dataset, step, batch_size, workers, device)
    if isinstance(program, str):
        return Verdict("cannot tell", program, "a map-style dataset, with len and []", 0, batch_size or 0, workers or 0)
    with Generators(program.dataset).preserved(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores are tried too
        verdict = _Bench(program, epochs, seconds, Path(out)).run()
    return replace(verdict, seconds=time.perf_counter() - started)


class _Bench:
    """The measurement of one program."""

    def __init__(self, program: Program, epochs: int | None, seconds: float, out: Path) -> None:
        self.program, self.epochs, self.seconds, self.out = program, epochs, seconds, out
        self.turn_seconds = seconds * _TURN_SHARE
        self.rng = np.random.default_rng(0)
        self.notes = list(program.notes)
        self.rows: list[int] = []
        self.batch: Any = None
        self.folder: Path | None = None  # of the store, if there is one
        self.sample_files: set[str] = set()
        self.loaders: dict[int, Any] = {}
        self.is_cold = self.is_store_cold = False

    def run(self) -> Verdict:
        program, started = self.program, time.perf_counter()
        sample = measure_samples(program.dataset, self._some(512), 2 * self.turn_seconds)
        self._repeated_turn(0.0)  # libraries choose their kernels in the first steps
        repeated = None if program.step is None else self._repeated_turn(self.turn_seconds / 2)
        self._choose_rows(sample, repeated)
        best_workers = self._best_workers(repeated)
        directory = TemporaryDirectory()
        try:
            with messages_kept():
                fill_seconds, loader, refused = self._fill(directory.path)
            row_bytes = self._row_bytes(loader)
            makers = self._makers(best_workers, loader)
            found = self._take_turns(makers, started)
        finally:
            directory.remove()
        best = _faster(found.get("best"), found["today"], program.row_count)
        measured = Measured(
            found["today"], best, found.get("repeated"), found.get("memfeed"), refused, program.row_count,
            program.batch_size, self.epochs, fill_seconds, row_bytes * program.row_count, free_bytes(self.out),
        )  # fmt: skip
        return self._verdict(measured, sample)

    def _verdict(self, found: Measured, sample: SampleCost) -> Verdict:
        program, rows, result = self.program, found.row_count, judge(found)
        if program.device is not None and program.device.type == "cuda":
            self.notes.append("of memfeed the transfer to the device counts as waiting")
        return Verdict(
            result.kind,
            result.because,
            result.instead,
            rows,
            program.batch_size,
            program.worker_count,
            None if found.memfeed is None else times_as_fast(found.memfeed, found.rival, rows),
            None if found.memfeed is None else times_as_fast(found.memfeed, found.today, rows),
            ceiling(found),
            result.break_even,
            found.store_bytes,
            found.fill_seconds,
            len(self.rows),
            found.today,
            found.best,
            found.repeated,
            found.memfeed,
            sample,
            tuple(self._forms(found)),
            tuple(self.notes),
            f"{core_count()} cores, {platform.machine()}, torch {torch.__version__}",
        )

    def _some(self, count: int) -> list[int]:
        """Return row numbers from all over the dataset: in random order if the loader shuffles."""
        total = self.program.row_count
        rows = self.rng.permutation(total)[:count] if total < 10**7 else self.rng.integers(0, total, count)
        rows = np.unique(rows)
        return list(map(int, self.rng.permutation(rows) if self.program.is_shuffled else rows))

    def _choose_rows(self, sample: SampleCost, repeated: Turn | None) -> None:
        """Choose as many rows as today's loader reads in a turn, with some batches after those of its start."""
        program, size = self.program, self.program.batch_size
        row_seconds = sample.seconds / min(max(1, program.worker_count), core_count())
        row_seconds = max(row_seconds, 0.0 if repeated is None else repeated.seconds_a_row)
        least = _BATCHES_A_WORKER * max(program.worker_count, core_count()) * size
        count = max(min(int(self.turn_seconds / row_seconds), MOST_ROWS), least)
        self.rows = self._some(min(-(-count // size) * size, program.row_count))
        if (took := len(self.rows) * row_seconds) > 4 * self.turn_seconds:
            self.notes.append(
                f"it took longer than the {self.seconds:g} s of seconds=: a turn reads {len(self.rows)} rows at least, "
                f"and those take {took:.1f} s"
            )
        self.is_cold = sample.file_bytes * program.row_count > _SHARE_OF_MEMORY * memory_limit()
        if self.is_cold:
            self.notes.append("the files do not fit in memory: today's loops were measured with a cold page cache")

    def _repeated_turn(self, seconds: float) -> Turn:
        if self.batch is None:
            self.batch = next(iter(self.program.torch_loader(self._some(self.program.batch_size), 0)))
        count = 4
        sizes = [min(self.program.batch_size, self.program.row_count)] * count
        return self.program.run_turn(lambda: [self.batch] * count, sizes, 1, seconds)

    def _torch_turn(self, worker_count: int, seconds: float) -> Turn:
        if self.is_cold:
            evict(self._files())
        sizes = batch_rows(len(self.rows), self.program.batch_size)
        loader = self.loaders.get(worker_count) or self.program.torch_loader(self.rows, worker_count)
        if loader.persistent_workers:
            self.loaders[worker_count] = loader  # its processes start once
        return self.program.run_turn(lambda: loader, sizes, max(1, worker_count), seconds)

    def _memfeed_turn(self, loader: Any, seconds: float) -> Turn:
        if self.is_store_cold and self.folder is not None:
            evict(files_below(self.folder))
        sizes = batch_rows(len(self.rows), self.program.batch_size)
        workers = 0 if isinstance(loader.dataset, Store) else self.program.worker_count  # of decoded files
        return self.program.run_turn(lambda: loader, sizes, max(1, workers), seconds, is_transferred=True)

    def _files(self) -> set[str]:
        """Return the files of the sample; they are found by reading it once."""
        if not self.sample_files:
            with noted_files() as files:
                for row in self.rows:
                    self.program.dataset[row]
            self.sample_files = files
        return self.sample_files

    def _best_workers(self, repeated: Turn | None) -> int:
        """Return the number of workers with which torch's loader is fastest: one turn each, while it gains."""
        limit = 0.0 if repeated is None else repeated.seconds_a_row * _NEW_WORKERS_GAIN
        own = self.program.worker_count
        found = {own: self._torch_turn(own, 0.0).seconds_a_row}
        most = min(4 * core_count(), len(self.rows) // self.program.batch_size // _BATCHES_A_WORKER)
        failures, count = 0, 0
        while count <= most and failures < 2 and min(found.values()) > limit:
            before = min(found.values())
            if count not in found:
                try:
                    found[count] = self._torch_turn(count, 0.0).seconds_a_row
                except Exception as error:  # a dataset that cannot be read in another process
                    # of one in a worker process the message is the last line, below its traceback
                    said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                    self.notes.append(f"not measured with {_workers(count)}: {brief(said, 120)}")
                    break
                failures = failures + 1 if count and found[count] * _NEW_WORKERS_GAIN > before else 0
            count = 2 * count or 1
        best = min(found, key=found.__getitem__)
        best = best if found[best] * _NEW_WORKERS_GAIN < found[own] else own
        self.loaders = {count: one for count, one in self.loaders.items() if count in (own, best)}
        return best

    def _fill(self, folder: Path) -> tuple[float, Any, str]:
        """Run the first epoch, which fills the store. Return what it takes for all rows, the loader, and no reason."""
        program, started = self.program, time.perf_counter()
        try:
            loader = program.memfeed_loader(self.rows, folder / STORE)
            opened = time.perf_counter() - started
            sizes = batch_rows(len(self.rows), program.batch_size)
            turn = program.run_turn(lambda: loader, sizes, max(1, program.worker_count), 0.0, is_transferred=True)
        except MemfeedError as error:
            return 0.0, None, " ".join(str(error).split())
        if not is_dataset(program.dataset):
            return 0.0, loader, ""  # columns in memory are read in place
        self.folder = folder
        started = time.perf_counter()
        if isinstance(loader.dataset, Store):
            loader.dataset.finish()  # writes what the epoch has left, such as checksums
        else:
            self.notes.append("no store can be made of its random samples: decoded files are kept in its place")
        return opened + turn.epoch_seconds(program.row_count) + time.perf_counter() - started, loader, ""

    def _row_bytes(self, loader: Any) -> float:
        if loader is None or self.folder is None:
            return 0.0
        is_store = isinstance(loader.dataset, Store)
        found = open_store(self.folder / STORE).nbytes if is_store else size_of(files_below(self.folder))
        row_bytes = found / len(self.rows)
        if row_bytes * self.program.row_count > _SHARE_OF_MEMORY * memory_limit():
            self.is_store_cold = True
            total, memory = format_bytes(row_bytes * self.program.row_count), format_bytes(memory_limit())
            self.notes.append(f"the store ({total}) does not fit in memory ({memory}): measured with a cold page cache")
        return row_bytes

    def _makers(self, best_workers: int, loader: Any) -> dict[str, _Maker]:
        """Return the loops by their names in a `Verdict`."""
        own = self.program.worker_count
        makers: dict[str, _Maker] = {"today": (f"today, {_workers(own)}", partial(self._torch_turn, own))}
        if best_workers != own:
            makers["best"] = _workers(best_workers), partial(self._torch_turn, best_workers)
        if self.program.step is not None:
            makers["repeated"] = "one batch repeated", self._repeated_turn
        if loader is not None:
            makers["memfeed"] = "memfeed", partial(self._memfeed_turn, loader)
        return makers

    def _take_turns(self, makers: dict[str, _Maker], started: float) -> dict[str, Loop]:
        """Run each loop in each turn, every turn beginning with another loop, until the time is over."""
        loops: dict[str, list[Turn]] = {name: [] for name in makers}
        names = list(makers)
        longest = 0.0
        for number in range(MOST_TURNS):
            spent = time.perf_counter() - started
            if number and spent + longest > self.seconds * (0.85 if number >= LEAST_TURNS else 2):
                break
            for name in names[number % len(names) :] + names[: number % len(names)]:
                loops[name].append(makers[name][1](self.turn_seconds / 2))
            longest = max(longest, time.perf_counter() - started - spent)
        return {name: Loop(makers[name][0], tuple(turns)) for name, turns in loops.items()}

    def _forms(self, found: Measured) -> Iterator[Form]:
        """Yield the price list, with the cores that the step needs, and the break-even of each form."""
        if not is_dataset(self.program.dataset):
            return
        options = {"split": "auto", "allow": []}
        try:
            with messages_kept():
                forms = measure_forms(self.program.dataset, options, _FORM_SAMPLES, self.seconds * _FORM_SHARE)
        except MemfeedError:
            return
        rows, judged = found.row_count, judge(found)
        for number, one in enumerate(forms):
            reading = 1 / one.rows_a_second
            step = 0.0 if found.repeated is None else found.repeated.middle("seconds_a_row")
            epoch = break_even(found.fill_seconds, rows * max(step, reading), found.rival.epoch_seconds(rows))
            if not number or judged.break_even is None:  # where a store saves nothing, no form is said to
                epoch = judged.break_even
            yield replace(one, cores=reading / step if step else None, break_even=epoch)


def _faster(best: Loop | None, today: Loop, row_count: int) -> Loop | None:
    """Return the loop with another number of workers, unless its turns say that it was chosen by chance."""
    is_faster = best is not None and best.epoch_seconds(row_count) < today.epoch_seconds(row_count)
    return best if is_faster else None


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"
