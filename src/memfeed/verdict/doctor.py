"""The machine that a loader runs on: memory, disk, page-locked memory, /dev/shm, limits, and the file system."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from memfeed.errors import LoaderError
from memfeed.system.files import free_bytes
from memfeed.system.machine import core_count, memory_limit
from memfeed.system.mapped_memory import evict
from memfeed.system.messages import format_bytes

BYTES = 256 << 20  # of each copy and each file
LEAST_MEMORY, LEAST_COLD, LEAST_WARM, LEAST_BUS = 4e9, 500e6, 2e9, 10e9  # bytes/s
LEAST_SHM = 1 << 30
LEAST_FILES = 4096
LEAST_LOCKED = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
WEAKNESSES = {
    "nfs": "each open and each page costs a round trip, and locks are slow: keep the store on a local disk",
    "lustre": "many small files are slow, and mapped reads fetch page by page: one store instead of many files helps",
    "fuse": "each read passes through another process: keep the store on a local disk",
    "9p": "each read passes through the host, without a shared page cache: keep the store inside the machine",
    "virtiofs": "each read that is not cached passes through the host: keep the store inside the machine",
    "overlay": "a changed file is first copied as a whole, and goes with the container: keep the store on a volume",
    "tmpfs": "it takes memory, and is empty after a restart: good for a store that is made anew for each run",
    "btrfs": "copies on write and compresses: set chattr +C on the directory before a store is written",
    "zfs": "it has a cache of its own beside the page cache, so mapped files count twice: limit zfs_arc_max",
    "ceph": "small reads cost a round trip each: keep the store on a local disk",
    "gpfs": "mapped reads are slow: keep the store on a local disk",
    "beegfs": "mapped reads are slow: keep the store on a local disk",
    "smb": "locks and renames differ from those of a local disk: keep the store on a local disk",
    "cifs": "locks and renames differ from those of a local disk: keep the store on a local disk",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        name: what it is.
        value: what was found, in words.
        advice: what to do, for a low figure; "" where nothing needs to be done.
    """

    name: str
    value: str
    advice: str = ""


def examine(place: Path = Path()) -> Iterator[Finding]:
    """Yield what this machine gives. Writes a file of up to 256 MB into the directory ``place``, and removes it.

    Raises LoaderError if it is no directory.
    """
    if not place.is_dir():
        raise LoaderError(f"{place}: found no such directory; expected the one that stores are kept in")
    memory = memory_limit()
    yield Finding("cores", str(core_count()))
    yield Finding(
        "memory available", format_bytes(memory), "stores beyond it are read from the disk" if memory < 8e9 else ""
    )
    yield _memory_copy()
    kind, free = file_system(place), free_bytes(place)
    words = next((text for name, text in WEAKNESSES.items() if kind.startswith(name)), "")
    yield Finding("file system", f"{kind}, {format_bytes(free) if free else 'unknown bytes'} free", words)
    yield from _disk(place)
    yield from _bus()
    yield _shared_memory()
    yield from _limits()


def _rate(name: str, rate: float, least: float, advice: str) -> Finding:
    return Finding(name, f"{format_bytes(rate)}/s", advice if rate < least else "")


def _best_seconds(work: Callable[[], object], times: int = 3) -> float:
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return max(min(found), 1e-9)


def _memory_copy() -> Finding:
    source = torch.ones(BYTES, dtype=torch.uint8, device="cpu")
    target = torch.empty_like(source)
    rate = BYTES / _best_seconds(lambda: target.copy_(source))
    return _rate(
        "memory copy", rate, LEAST_MEMORY, "the machine is busy, or has few memory channels: smaller dtypes help"
    )


def file_system(place: Path) -> str:
    """Return the type of the file system of ``place``, as the kernel calls it; "unknown" where it does not say."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    whole, found = place.resolve(), (-1, "unknown")
    for line in lines:
        fields, _, rest = line.partition(" - ")
        top = Path(fields.split()[4].replace("\\040", " "))
        if whole == top or top in whole.parents:
            found = max(found, (len(top.parts), rest.split()[0]), key=lambda one: one[0])
    return found[1]


def _disk(place: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(place).free
    if free < 4 * (1 << 20):
        yield Finding("disk", "not measured", f"only {format_bytes(free)} are free: free some space")
        return
    size = min(BYTES, free // 4)
    with tempfile.NamedTemporaryFile(dir=place, prefix=".memfeed-") as file:
        data = os.urandom(1 << 20)
        started = time.perf_counter()
        for _ in range(size >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = size / (time.perf_counter() - started)
        yield _rate("disk, written and synced", written, LEAST_COLD / 4, "a conversion waits for it: another disk")
        evict([file.name])
        cold = size / _best_seconds(lambda: _read(file.name), 1)
        warm = size / _best_seconds(lambda: _read(file.name))
    if hasattr(os, "posix_fadvise"):
        advice = "a store beyond memory waits for it: a local NVMe disk, or a smaller form (memfeed bench --dry-run)"
        yield _rate("disk, cold", cold, LEAST_COLD, advice)
    yield _rate(
        "disk, warm", warm, LEAST_WARM, "files do not stay in the page cache: more memory, or another file system"
    )


def _read(name: str) -> None:
    buffer = bytearray(1 << 22)
    with open(name, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _bus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("page-locked memory, copy to the GPU", "not measured: no CUDA device")
        return
    for name, source in (
        ("page-locked memory, copy to the GPU", torch.ones(BYTES, dtype=torch.uint8, device="cpu").pin_memory()),
        ("other memory, copy to the GPU", torch.ones(BYTES, dtype=torch.uint8, device="cpu")),
    ):
        target = torch.empty_like(source, device="cuda")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(2):  # the first copy is not counted
            begin.record(torch.cuda.current_stream())
            target.copy_(source, non_blocking=True)
            end.record(torch.cuda.current_stream())
            torch.cuda.synchronize()
        rate = BYTES / max(begin.elapsed_time(end) / 1000, 1e-9)
        least = LEAST_BUS if source.is_pinned() else 0.0
        yield _rate(
            name, rate, least, "few lanes, or another process: see nvidia-smi topo -m; uint8 instead of float32"
        )


def _shared_memory() -> Finding:
    if not SHARED_MEMORY.is_dir():
        return Finding("/dev/shm", "none", "worker processes of DataLoader need it on Linux")
    found = shutil.disk_usage(SHARED_MEMORY)
    is_low = found.free < LEAST_SHM
    advice = "workers of DataLoader end with a bus error: docker run --shm-size=8g (or --ipc=host)"
    return Finding(
        "/dev/shm", f"{format_bytes(found.free)} free of {format_bytes(found.total)}", advice if is_low else ""
    )


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    is_low = soft != resource.RLIM_INFINITY and soft < LEAST_FILES
    advice = f"workers may meet it: ulimit -n {LEAST_FILES if hard < 0 else min(hard, 65536)}"
    yield Finding("open files", most, advice if is_low else "")
    if not hasattr(resource, "RLIMIT_MEMLOCK"):
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_low = soft != resource.RLIM_INFINITY and soft < LEAST_LOCKED and torch.cuda.is_available()
    shown = "no limit" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    advice = "page-locked memory may fail: ulimit -l unlimited (docker run --ulimit memlock=-1)"
    yield Finding("locked memory", shown, advice if is_low else "")
