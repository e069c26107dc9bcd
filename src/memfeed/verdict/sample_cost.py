"""The cost of each step of a sample, the slow samples, and the files that a program opens.

And the price list: what a store would take in each form, measured with some samples of the dataset.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from memfeed.convert import budget
from memfeed.convert.budget import SAMPLES
from memfeed.convert.cache import cache_one
from memfeed.convert.inputs import classify_input
from memfeed.convert.options import options_of
from memfeed.errors import LoaderError
from memfeed.memoizing.decoders import KNOWN
from memfeed.system.files import free_bytes
from memfeed.system.messages import format_bytes
from memfeed.verdict.judge import Form, SampleCost, Step

FILE, DECODE, SLEEP, OWN = "file", "decode", "sleep", "the dataset's own code"
MOST_SAMPLES, MOST_TRACED = 512, 48
_READS = frozenset({"open", "read", "readinto", "readline", "fromfile", "pread", "read_file"})
_DECODERS = {(known.module.partition(".")[0], known.name.rpartition(".")[2]) for known in KNOWN}
_C_DECODERS = {("", "imread"), ("", "imdecode"), ("ImagingDecoder", "decode")}
_CALLS = frozenset({"__call__", "_wrapped_call_impl", "forward"})
_NO_STEPS = ("torch._", "torch.utils.", "torch.ops", "numpy", "PIL.", "importlib", "functools", "enum")


def measure_samples(dataset: Any, rows: Sequence[int], seconds: float) -> SampleCost:
    """Read samples one after another in this thread, for at most about twice ``seconds``.

    First each sample is timed as it is. Then some are read again under a profiler, which says how the time is divided:
    the shares are the profiler's, the sums are those of the first pass.
    """
    durations: list[float] = []
    with noted_files() as files:
        deadline = time.perf_counter() + seconds
        for row in rows[:MOST_SAMPLES]:
            started = time.perf_counter()
            dataset[row]
            durations.append(time.perf_counter() - started)
            if time.perf_counter() > deadline:
                break
    tally = _Tally()
    deadline = time.perf_counter() + seconds
    for row in rows[: min(MOST_TRACED, len(durations))]:
        with tally.tracing():
            dataset[row]
        if time.perf_counter() > deadline:
            break
    times = np.array(durations)
    slowest = np.argsort(times)[::-1][: max(1, len(times) // 100)]
    mean, total = float(times.mean()), max(sum(tally.seconds.values()), 1e-12)
    steps = [Step(name, mean * part / total, part / total) for name, part in tally.seconds.items()]
    return SampleCost(
        mean,
        float(np.median(times)),
        float(times[slowest].mean()),
        tuple(int(rows[i]) for i in slowest[:3]),
        _file_bytes(files, dataset, len(times)),
        len(times),
        tuple(sorted(steps, key=lambda step: -step.seconds)),
    )


def _file_bytes(files: Collection[str], dataset: Any, samples: int) -> float:
    """Return the bytes of files for each sample: of files that samples share, their part of the dataset."""
    if not files:
        return 0.0
    return size_of(files) / (samples if 2 * len(files) >= samples else len(dataset))


class _Tally:
    """Seconds by the step that runs: the innermost function that has a name of its own, with all that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        self._stack, self._since = [OWN], time.perf_counter()
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)
            self.seconds[self._stack[0]] += time.perf_counter() - self._since

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        if event == "call":
            self._stack.append(_step_of_frame(frame) or self._stack[-1])
        elif event == "c_call":
            self._stack.append(_step_of_builtin(argument, self._stack[-1]))
        elif len(self._stack) > 1:
            self._stack.pop()
        self._since = time.perf_counter()


def _step_of_frame(frame: Any) -> str | None:
    """Return the name of the step that a Python function begins; None if it is a part of its caller's."""
    name, module = frame.f_code.co_name, str(frame.f_globals.get("__name__", ""))
    if (module.partition(".")[0], name) in _DECODERS:
        return DECODE
    if name in _READS and not module.startswith("PIL."):
        return FILE
    if name not in _CALLS:
        return None
    cls = type(frame.f_locals.get("self"))
    return None if cls is type(None) or f"{cls.__module__}.".startswith(_NO_STEPS) else cls.__name__


def _step_of_builtin(function: Any, caller: str) -> str:
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if name in _READS:
        return FILE
    if name == "sleep" and caller != FILE:
        return SLEEP
    kind = "" if owner is None or type(owner).__name__ == "module" else type(owner).__name__
    return DECODE if (kind, name) in _C_DECODERS else caller


@contextlib.contextmanager
def noted_files() -> Iterator[set[str]]:
    """Note the names of the files that Python opens for reading during the block, in this process.

    Files that a C library opens by itself are not seen.
    """
    found: set[str] = set()
    own = builtins.open

    def noting(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if isinstance(file, str | os.PathLike) and "r" in mode and "+" not in mode:
            found.add(os.fspath(file))
        return own(file, mode, *arguments, **options)

    builtins.open = io.open = noting  # pathlib calls that of io
    try:
        yield found
    finally:
        builtins.open = io.open = own


def files_below(folder: Path) -> list[str]:
    """Return all files below a directory."""
    return [os.path.join(top, name) for top, _, names in os.walk(folder) for name in names]


def size_of(files: Iterable[str]) -> int:
    """Return the bytes of these files on disk; those that are gone count as none."""
    total = 0
    for name in files:
        with contextlib.suppress(OSError):
            found = os.stat(name)
            total += min(found.st_size, found.st_blocks * 512)
    return total


# --- the price list


def measure_forms(dataset: Any, options: Mapping[str, Any], samples: int = SAMPLES, seconds: float = inf) -> list[Form]:
    """Return the forms that a store of this dataset may have: the first one is what ``options`` give.

    Args:
        options: of `memfeed.cache`.
        samples: how many are stored in each form.
        seconds: after so many no other form is begun.

    Raises LoaderError for anything but a map-style dataset, and what `memfeed.cache` raises.
    """
    given = classify_input(dataset)
    if given.kind != "map" or given.length is None:
        what = "columns, of which a store takes as many bytes" if given.kind == "columns" else "an iterable"
        raise LoaderError(
            f"found a dry run asked for {what}; expected a dataset with len and []: some samples are read"
        )
    asked = {name: value for name, value in options.items() if name != "budget"}
    chosen = options_of(dataset, **{"budget": 1, **asked})  # it allows lossy forms
    chosen = msgspec.structs.replace(chosen, forms=msgspec.structs.replace(chosen.forms, lossy=True))
    found = budget.measure_forms(dataset, chosen, cache_one, rounds_floats=True, samples=samples, seconds=seconds)
    return [Form(one.written, one.row_bytes, one.rows_a_second, one.row_bytes * given.length) for one in found]


def print_forms(dataset: Any, options: Mapping[str, Any], place: Path) -> None:
    """Print a table of the forms that a store may have. Raises what `measure_forms` does; writes nothing."""
    forms = measure_forms(dataset, options)
    count, free = len(dataset), free_bytes(place)
    shown = format_bytes(free) if free else "unknown"
    print(f"{count:,} rows; measured with {min(SAMPLES, count)} of them; free: {shown}")
    print(f"{'forms=':<26}{'a row':>12}{'in all':>12}{'rows/s a core':>15}")
    for one in forms:
        sizes = f"{format_bytes(one.row_bytes):>12}{format_bytes(int(one.total_bytes)):>12}"
        print(f"{one.name:<26}{sizes}{one.rows_a_second:>15,.0f}")
