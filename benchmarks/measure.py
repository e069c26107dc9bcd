"""What every benchmark shares: the machine, timing in turns, fsync counted apart, checks against targets, JSON."""

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from memfeed.system.page_cache import in_page_cache

RESULTS = Path(__file__).parent / "results"
PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "hymenoptera_data"

Seconds = dict[str, list[float]]


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The arguments that all benchmarks take."""
    made = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    made.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", help="where the results go")
    made.add_argument("--quick", action="store_true", help="a short form that shows it runs; its figures mean nothing")
    return made


# --- timing


def seconds_of(function: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turns(contenders: Mapping[str, Callable[[], float]], rounds: int, least_seconds: float = 0.0) -> Seconds:
    """Lets contenders run one after another in each round, so that all of them meet the same disturbances.

    A contender returns the seconds it took; one that takes less than ``least_seconds`` runs again until its turn has
    lasted that long. Each round begins with another contender. Gives each contender's median of every round.
    """
    seconds: Seconds = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            times = [contenders[name]()]
            while sum(times) < least_seconds:
                times.append(contenders[name]())
            seconds[name].append(statistics.median(times))
    return seconds


def ratio(seconds: Seconds, one: str, other: str) -> float:
    """How many times longer ``one`` takes than ``other``: the median of the rounds' ratios.

    Within a round both met the same load; between rounds, on a machine that others use too, it may differ.
    """
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def cpu_seconds() -> float:
    """What this process and its ended children have used so far, all cores together."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def medians(seconds: Seconds) -> dict[str, float]:
    """The median of every contender's runs."""
    return {name: statistics.median(times) for name, times in seconds.items()}


@contextlib.contextmanager
def without_sync() -> Iterator[None]:
    """fsync and fdatasync return at once within the block, so that what they take is counted apart, by ``sync_files``.

    To subtract the time they took would flatter a program that does something else meanwhile.
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
    """Writes what lies under ``root`` to the disk; returns the seconds that took."""
    start = time.perf_counter()
    for path in [root, *root.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return time.perf_counter() - start


# --- the page cache


def drop_pages(root: Path) -> None:
    """Takes the files under ``root`` out of the page cache. Raises RuntimeError where the system kept them.

    Nothing may have them mapped: the kernel keeps what is mapped.
    """
    sync_files(root)
    gc.collect()
    files = _plain_files(root)
    for pause in (0.0, 0.1, 0.5, 2.0):  # pages on their way from the disk cannot be dropped yet
        time.sleep(pause)
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        warm = [path for path in files if _resident(path)]
        if len(warm) <= len(files) // 20:  # somebody else may be reading one or two
            return
    raise RuntimeError(
        f"found {len(warm)} files still in the page cache after dropping them, as {warm[0]}; "
        "if that directory lies in memory (tmpfs), set TMPDIR to one on a disk"
    )


def _plain_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.stat().st_size]


def _resident(path: Path) -> bool:
    """Whether the middle of a file is in the page cache."""
    middle = path.stat().st_size // 2 // mmap.PAGESIZE * mmap.PAGESIZE
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 1, mmap.MAP_PRIVATE, offset=middle) as page:
        return in_page_cache(ctypes.addressof(ctypes.c_char.from_buffer(page)))


# --- results


@dataclass(frozen=True)
class Check:
    """One figure against its target."""

    what: str
    found: float
    limit: float
    at_least: bool
    unit: str = "x"

    @property
    def passed(self) -> bool:
        """Whether the target is reached."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit


def show(title: str, checks: list[Check]) -> None:
    """Prints figures beside their targets."""
    table = Table(title=title, title_justify="left")
    for column, justify in (("what", "left"), ("found", "right"), ("target", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for check in checks:
        sign = "at least" if check.at_least else "at most"
        verdict = "[green]pass[/]" if check.passed else "[red]FAIL[/]"
        table.add_row(check.what, f"{check.found:,.2f} {check.unit}", f"{sign} {check.limit:g} {check.unit}", verdict)
    Console().print(table)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Prints a table whose first column holds names and whose others hold numbers."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    Console().print(made)


def listed(counts: Mapping[str, int]) -> str:
    """Counts and what they count, in one line."""
    return ", ".join(f"{count:,} {what}" for what, count in counts.items())


def write(
    options: argparse.Namespace, about: Mapping[str, Any], figures: Mapping[str, Any], checks: list[Check]
) -> None:
    """Writes the results as JSON, with the machine they are from."""
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
    """The machine and the versions that a result is from."""
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
        **{name: _version(name) for name in ("torch", "torchvision", "pillow", "tensordict", "numpy", "memfeed")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
