"""The machine under this process: its memory, its name, this boot of it, and the process that started this one."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


def memory_limit() -> int:
    """Bytes of memory that this process can expect to have, page cache included: what is available, or its cgroup's."""
    limits = [line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemAvailable:")]
    found = [int(limit) * 1024 for limit in limits] or [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        names = {"": "/sys/fs/cgroup{}/memory.max", "memory": "/sys/fs/cgroup/memory{}/memory.limit_in_bytes"}
        for at in (group.rstrip("/"), ""):  # inside a container the group's own directory is the root
            limit = _read(names.get(controllers, "").format(at)).strip()
            found += [int(limit)] if limit.isdigit() else []
    return min(found)


def boot_id() -> str:
    """Names this boot of this machine: after another one, writes that were not synced may be gone; "" if unknown."""
    found = _read("/proc/sys/kernel/random/boot_id").strip()
    if not found and sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found


def host_name() -> str:
    """This machine's name."""
    return socket.gethostname()


def die_with_parent() -> None:
    """Ends this process once the one it works for is dead: on Linux by the kernel, at once, and by a thread everywhere.

    The kernel looks at who forked it, which may be a server of processes, or dead before this is called.
    """
    set_parent_death_signal, kill = 1, 9
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_parent_death_signal, kill, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), name="memfeed-parent", daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
