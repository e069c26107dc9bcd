"""Two epochs of memfeed and of other libraries from one object server, each in a process of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from object_server import BUCKET, answered
from others import Contender, Work, answer_all, mapped_rows
from peers import available, check
from peers.rows import Batch, Rows

WRITE_SECONDS, EPOCH_SECONDS = 200.0, 150.0  # the longest waits for a process
OURS = {"memfeed": True, "memfeed, blocks": "blocks"}
SHUFFLES = {
    "memfeed": "all rows",
    "memfeed, blocks": "windows of 128 blocks of 4 MiB",
    "Lance": "all rows",
    "MosaicML Streaming": "all rows",
    "LitData": "chunks of 64 MB, then blocks of 32 rows in a chunk, then the rows in a block",
    "WebDataset": "16 tar files, then a buffer of 1,000 rows",
}
"""Over what each shuffles. Hugging Face datasets, SPDL, Grain, ... of benchmarks/peers read no object storage so."""
_MODULES = {"Lance": "lance", "MosaicML Streaming": "mosaicml", "LitData": "litdata", "WebDataset": "webdataset"}


class Source(NamedTuple):
    """Where a contender's rows lie, and a directory for what it downloads."""

    server: str
    directory: str  # of the bucket
    cache: Path


def write(name: str, work: Work, directory: Path) -> None:
    """Write the rows in the contender's own format."""
    rows = mapped_rows(work)
    if name in _MODULES:
        import_module(f"peers.{_MODULES[name]}").write(rows, directory)
        return
    import memfeed

    memfeed.cache({"image": rows.images, "label": rows.labels}, directory, allow="copy", progress=False)


def read(name: str, work: Work, source: Source) -> Iterable[Any]:
    """Return epochs from the server."""
    shape = (work.rows, *work.shape)
    if name in _MODULES:
        of_web = name == "WebDataset"
        address = f"{source.server}/{BUCKET}/{source.directory}" if of_web else f"s3://{BUCKET}/{source.directory}"
        return import_module(f"peers.{_MODULES[name]}").read(  # type: ignore[no-any-return]
            address, source.cache, shape, work.batch_size
        )
    import memfeed

    store = memfeed.open(f"s3://{BUCKET}/{source.directory}", cache_dir=source.cache)
    return memfeed.Loader(store, work.batch_size, shuffle=memfeed.Blocks() if OURS[name] == "blocks" else True, seed=0)


def labels_of(batch: Any) -> Any:
    return batch["label"] if isinstance(batch, dict) or not isinstance(batch, (tuple, list)) else batch[1]


def pairs(epochs: Iterable[Any]) -> Iterable[Batch]:
    """Yield (images, labels) of an epoch of any contender."""
    for batch in epochs:
        yield tuple(batch) if isinstance(batch, (tuple, list)) else (batch["image"], batch["label"])  # type: ignore[misc]


def epoch(epochs: Iterable[Any], rows: int, began: float) -> dict[str, float]:
    """Read an epoch. Return the seconds from ``began`` to the first batch and to the end."""
    first, seen = 0.0, 0
    for batch in epochs:
        first = first or time.perf_counter() - began
        seen += len(labels_of(batch))
    assert seen == rows, f"found {seen} rows in an epoch, expected {rows}"
    return {"first batch seconds": first, "seconds": time.perf_counter() - began}


def serve(name: str, log: Path, connection: Connection) -> None:
    """Answer requests: (Work, directory) to write, (Work, Source) for the first epoch, "second" or "check"."""
    found: tuple[Work, Iterable[Any]] | None = None

    def answer(request: Any) -> Any:
        nonlocal found
        if isinstance(request, tuple):
            work, place = request
            if not isinstance(place, Source):
                return write(name, work, place)
            began = time.perf_counter()
            found = work, read(name, work, place)
            return epoch(found[1], work.rows, began)
        assert found is not None, "found another epoch before the first"
        work, epochs = found
        if request == "second":
            return epoch(epochs, work.rows, time.perf_counter())
        rows: Rows = mapped_rows(work)
        return check(name, rows, pairs(epochs))[:0]

    answer_all(log, connection, answer)


def compare(work: Work, address: str, root: Path, scratch: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures of each contender, and why others failed. memfeed may not fail."""
    versions = available()
    figures: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in SHUFFLES:
        if name in _MODULES and name not in versions:
            failed[name] = "not installed: make peers"
            continue
        contender, cache = Contender(name, scratch, serve), scratch / "cache"
        directory = (_MODULES.get(name) or "memfeed.mf").replace(" ", "-")
        try:
            contender.start()
            if not (root / BUCKET / directory).exists():
                contender.ask((work, root / BUCKET / directory), WRITE_SECONDS)
            answered(address)
            first = contender.ask((work, Source(address, directory, cache)), EPOCH_SECONDS)
            requests = answered(address)
            second = contender.ask("second", EPOCH_SECONDS)
            again = answered(address)
            contender.ask("check", EPOCH_SECONDS)
            figures[name] = {
                "version": versions.get(name),
                "shuffles": SHUFFLES[name],
                "first batch seconds": first["first batch seconds"],
                "first epoch seconds": first["seconds"],
                "first epoch requests": len(requests),
                "first epoch bytes": sum(one.size for one in requests),
                "second epoch seconds": second["seconds"],
                "second epoch bytes": sum(one.size for one in again),
            }
        except RuntimeError as error:
            if name in OURS:
                raise
            failed[name] = str(error)
        finally:
            contender.close()
            contender.join()
            shutil.rmtree(cache, ignore_errors=True)
    return figures, failed
