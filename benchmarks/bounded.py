"""Run one epoch of a store in this new process, with less memory than the store. ``cold.py`` starts it.

    python benchmarks/bounded.py STORE ORDER BATCH_SIZE LIMIT_BYTES CGROUP

ORDER is "in order", "blocks", "uniform", or "read": the file in order. Without a control group only memfeed
knows the limit.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import memfeed
from memfeed.system import machine

ORDERS: dict[str, bool | memfeed.Blocks] = {"in order": False, "blocks": memfeed.Blocks(), "uniform": True}


def resident_bytes() -> int:
    """Return the resident memory of this process, with the pages of mapped files."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    path, order, batch, limit, group = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    else:
        machine.memory_limit = lambda: limit  # type: ignore[assignment]
    store = memfeed.open(path)
    most, began = resident_bytes(), time.perf_counter()
    if order == "read":
        buffer = memoryview(bytearray(1 << 24))
        with open(path / "0.memmap", "rb", buffering=0) as file:
            while file.readinto(buffer):
                most = max(most, resident_bytes())
    else:
        rows = 0
        for number, (_, labels) in enumerate(memfeed.Loader(store, batch, shuffle=ORDERS[order])):
            rows += len(labels)
            if number % 8 == 0:
                most = max(most, resident_bytes())
        assert rows == len(store)
    seconds = time.perf_counter() - began
    print(
        json.dumps(
            {
                "bytes": store.nbytes,
                "seconds": seconds,
                "bytes_per_second": store.nbytes / seconds,
                "most_resident_bytes": max(most, resident_bytes()),
            }
        )
    )


if __name__ == "__main__":
    main()
