"""Time an epoch of each form of a store from a slow disk. ``forms.py`` starts it in a new process.

    python benchmarks/forms_disk.py DIRECTORY BATCH_SIZE BYTES_PER_SECOND [BYTES_PER_SECOND ...]

A control group limits the bytes that this process reads from the disk in a second. The page cache is emptied before
each epoch. Without control groups of blkio it prints null.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forms_contenders import FORMS, Work, store_path
from measure import drop_pages

BLKIO = Path("/sys/fs/cgroup/blkio")


@contextlib.contextmanager
def limiting(directory: Path) -> Iterator[Callable[[int], Any] | None]:
    """Put this process into a control group for the disk of ``directory``. Yield a function that sets its limit.

    Yield None where that is not possible.
    """
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    parent = BLKIO / next((path for _, names, path in own if names == "blkio"), "/").lstrip("/")
    made = parent / f"memfeed-benchmark-{os.getpid()}"
    device = os.stat(directory).st_dev
    whole = f"{os.major(device)}:{os.minor(device)}"

    def limit(rate: int) -> None:
        (made / "blkio.throttle.read_bps_device").write_text(f"{whole} {rate}")

    try:
        made.mkdir()
        limit(1 << 30)
        (made / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        with contextlib.suppress(OSError):
            made.rmdir()
        yield None
        return
    try:
        yield limit
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        made.rmdir()


def seconds_of_epoch(work: Work, form: str, batch_size: int) -> float:
    """Return the seconds of an epoch of one store, page cache empty."""
    import memfeed

    path = store_path(work, form)
    drop_pages(path)  # before a store is open: pages that are mapped stay
    store = memfeed.open(path)
    loader = memfeed.Loader(store, batch_size, shuffle=True)
    began = time.perf_counter()
    seen = sum(len(labels) for _, labels in loader)
    seconds = time.perf_counter() - began
    assert seen == len(store), f"found {seen} rows in an epoch, expected {len(store)}"
    return seconds


def main() -> None:
    base, batch_size, rates = Path(sys.argv[1]), int(sys.argv[2]), [int(rate) for rate in sys.argv[3:]]
    from memfeed.transforms.backends.compiled_passes import LOOPS

    LOOPS.wait()
    work = Work(base / "photographs", base)
    found: dict[str, dict[int, float]] | None = {form: {} for form in FORMS}
    with limiting(base) as limit:
        if limit is None:
            found = None
        else:
            for form, of_form in found.items():
                for rate in rates:
                    limit(rate)
                    of_form[rate] = seconds_of_epoch(work, form, batch_size)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
