"""The machine and its processes: memory, host name, boot, and the parent process."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from memfeed.system.libc import LIBC
from memfeed.system.threads import started


def memory_limit() -> int:
    """Return the bytes of memory, page cache included, that this process can use: those available, or its cgroup's."""
    limits = [line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemAvailable:")]
    found = [int(limit) * 1024 for limit in limits] or [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        names = {"": "/sys/fs/cgroup{}/memory.max", "memory": "/sys/fs/cgroup/memory{}/memory.limit_in_bytes"}
        for directory in (group.rstrip("/"), ""):  # inside a container the group's own directory is the root
            limit = _read(names.get(controllers, "").format(directory)).strip()
            found += [int(limit)] if limit.isdigit() else []
    return min(found)


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def boot_id() -> str:
    """Return an id of this boot of the machine, "" if unknown. After another boot, unsynced writes may be lost."""
    found = _read("/proc/sys/kernel/random/boot_id").strip()
    if not found and sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found


def host_name() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def die_with_parent() -> None:
    """End this process when its parent is dead: on Linux by the kernel, at once, and everywhere by a thread.

    The kernel watches the process that forked this one. That may be a fork server, or may be dead already.
    """
    set_parent_death_signal, kill = 1, 9
    if sys.platform == "linux":
        LIBC.prctl(set_parent_death_signal, kill, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None:
        started(threading.Thread(target=_exit_after, args=(parent,), name="memfeed-parent", daemon=True))


def process_state(pid: int | None) -> str:
    """Return in words whether a process of this machine is alive or stopped; "alive" where that is unknown."""
    words = {
        "T": "stopped by a signal",
        "t": "stopped by a debugger",
        "D": "waiting for a disk",
        "Z": "dead",
        "X": "dead",
    }
    status = _read(f"/proc/{pid}/stat")
    if not status and sys.platform == "linux":
        return "dead"
    return words.get(status.rpartition(")")[2].split(maxsplit=1)[0], "alive") if status else "alive"


def is_daemon() -> bool:
    """Return True in a process that may not start processes: a worker of a DataLoader or of a multiprocessing pool."""
    return bool(multiprocessing.current_process().daemon)


def start_method(context: Any = None) -> str:
    """Return how `torch.multiprocessing` starts processes, and leave the choice to those who have made none.

    ``context`` is a ``multiprocessing_context`` of a DataLoader, which decides if it is given.
    """
    if context is not None:
        return context if isinstance(context, str) else str(context.get_start_method())
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def imports_program() -> bool:
    """Return True in a process that imports the program of another one, before it works for that one.

    It may be the fork server, which does so first since Python 3.14.
    """
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def imports_program_of(pid: int) -> bool:
    """Return whether this process imports the program of process ``pid``: its parent, or that of the fork server."""
    parent = os.getppid()
    return imports_program() and (pid == parent or f"PPid:\t{pid}\n" in _read(f"/proc/{parent}/status"))


def _exit_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
