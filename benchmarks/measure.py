"""The parts of every benchmark: the machine, timing in turns, fsync timed apart, targets, JSON."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import mmap
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from memfeed.codecs import Codec
from memfeed.system.mapped_memory import in_page_cache
from memfeed.system.share import Threads, share

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "torchvision", "pillow", "tensordict", "numpy", "numba", "memfeed")  # whose versions are kept
PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "hymenoptera_data"

Seconds = dict[str, list[float]]


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all benchmarks take."""
    made = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    made.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", help="where the results go")
    made.add_argument("--quick", action="store_true", help="a short form that shows it runs; its figures mean nothing")
    return made


# --- timing


def seconds_of(function: Callable[[], Any]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turns(contenders: Mapping[str, Callable[[], float]], rounds: int, least_seconds: float = 0.0) -> Seconds:
    """Run all contenders one after another in each round, so that other programs disturb all of them alike.

    A contender returns the seconds it took. If it took less than ``least_seconds``, it runs again until its turn has
    lasted that long. Each round begins with another contender. Returns the median of each contender in every round.
    """
    seconds: Seconds = {name: [] for name in contenders}
    names = list(contenders)
    gc.collect()
    gc.freeze()  # what is there now stays: beside torch and Triton, to search it takes longer than a short turn
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            times = [contenders[name]()]
            while sum(times) < least_seconds:
                times.append(contenders[name]())
            seconds[name].append(statistics.median(times))
    gc.unfreeze()
    return seconds


def ratio(seconds: Seconds, one: str, other: str) -> float:
    """Return the seconds of ``one`` as a multiple of those of ``other``: the median of the ratios of each round.

    Within a round both had the same load. Between rounds the load may change, on a machine that others use too.
    """
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its ended children so far, all cores together."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def medians(seconds: Seconds) -> dict[str, float]:
    """Return the median of every contender's runs."""
    return {name: statistics.median(times) for name, times in seconds.items()}


@contextlib.contextmanager
def without_sync() -> Iterator[None]:
    """Let fsync and fdatasync do nothing within the block. ``sync_files`` times them apart.

    To subtract their time instead would favour a program that works in another thread meanwhile.
    """
    kept = {name: getattr(os, name) for name in ("fsync", "fdatasync") if hasattr(os, name)}
    for name in kept:
        setattr(os, name, lambda fd: None)
    try:
        yield
    finally:
        for name, sync in kept.items():
            setattr(os, name, sync)


def sync_files(root: Path) -> float:
    """Write everything under ``root`` to the disk. Return the seconds that took."""
    start = time.perf_counter()
    for path in [root, *root.rglob("*")]:
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # a mark of a process that works there
            continue
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return time.perf_counter() - start


# --- the page cache


def drop_pages(root: Path) -> None:
    """Remove the files under ``root`` from the page cache. Raises RuntimeError if the system keeps them.

    No process may have them mapped: the kernel keeps mapped files.
    """
    sync_files(root)
    gc.collect()
    files = _plain_files(root)
    for pause in (0.0, 0.1, 0.5, 2.0):  # pages that are being read cannot be removed yet
        time.sleep(pause)
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        warm = [path for path in files if _resident(path)]
        if len(warm) <= len(files) // 20:  # another process may read one or two
            return
    raise RuntimeError(
        f"found {len(warm)} files still in the page cache after dropping them, as {warm[0]}; "
        "if that directory lies in memory (tmpfs), set TMPDIR to one on a disk"
    )


def _plain_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.stat().st_size]


def _resident(path: Path) -> bool:
    """Return True if the middle of a file is in the page cache."""
    middle = path.stat().st_size // 2 // mmap.PAGESIZE * mmap.PAGESIZE
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 1, mmap.MAP_PRIVATE, offset=middle) as page:
        return in_page_cache(ctypes.addressof(ctypes.c_char.from_buffer(page)))


# --- results


@dataclass(frozen=True)
class Check:
    """One figure and its target. ``missed.py`` says why targets are missed."""

    what: str
    found: float
    limit: float
    at_least: bool
    unit: str = "x"

    @property
    def passed(self) -> bool:
        """True if the target is reached."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit


def show(title: str, checks: list[Check]) -> None:
    """Print figures beside their targets."""
    table = Table(title=title, title_justify="left")
    for column, justify in (("what", "left"), ("found", "right"), ("target", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for check in checks:
        sign = "at least" if check.at_least else "at most"
        verdict = "[green]pass[/]" if check.passed else "[red]FAIL[/]"
        table.add_row(check.what, f"{check.found:,.2f} {check.unit}", f"{sign} {check.limit:g} {check.unit}", verdict)
    Console().print(table)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table with names in the first column and numbers in the others."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    Console().print(made)


def listed(counts: Mapping[str, int]) -> str:
    """List the counts and their names in one line."""
    return ", ".join(f"{count:,} {what}" for what, count in counts.items())


def write(
    options: argparse.Namespace, about: Mapping[str, Any], figures: Mapping[str, Any], checks: list[Check]
) -> None:
    """Write the results as JSON, with a description of the machine."""
    result = {
        "benchmark": options.json.stem,
        "quick": options.quick,
        "machine": machine(),
        "input": about,
        **figures,
        "checks": [{**asdict(check), "passed": check.passed} for check in checks],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Describe the machine and the versions of the packages."""
    models = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    huge = _lines("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": list(os.getloadavg()),
        "system": platform.platform(),
        "huge_pages": huge[0] if huge else "",
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def decode_rows(codec: Codec, blobs: Sequence[Any], outs: Sequence[Any], threads: int) -> None:
    """Fill each of ``outs`` from its blob, in so many threads, as a store does."""

    def decode(begin: int, end: int) -> None:
        for blob, out in zip(blobs[begin:end], outs[begin:end], strict=True):
            codec.decode(blob, out)

    with Threads(threads).in_use():
        share(len(blobs), decode, kind="decode")
