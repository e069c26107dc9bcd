"""Train from a store at an address behind a limited link: bandwidth used, first batch, second epoch, a small cache.

The server answers ranges of files over HTTP, 100 MB/s for all requests together and 30 ms before each answer. It runs
in a process of its own. It stands for the object store of a region.

    python benchmarks/remote.py
"""

from __future__ import annotations

import contextlib
import http.server
import json
import multiprocessing
import shutil
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import memfeed
from measure import Check, parser, seconds_of, show, table, write

BYTES_PER_SECOND, LATENCY_SECONDS = 100e6, 0.03
PIECE = 64 << 10
ROW_SHAPE = (3, 128, 128)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET with a range, HEAD, and GET /log/: when each request began and ended."""

    protocol_version = "HTTP/1.1"
    root: Path
    lock, free_at, log = threading.Lock(), 0.0, list[tuple[float, float, int]]()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Answer with the size."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """Answer with bytes."""
        if self.path == "/log/":
            body = json.dumps(self.log).encode()
            self.log.clear()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        began = time.monotonic()
        time.sleep(LATENCY_SECONDS)
        path = self.root / self.path.lstrip("/")
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size, wanted = path.stat().st_size, self.headers.get("Range")
        first, last = 0, size - 1
        if wanted:
            first, last = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(last - first + 1 if with_body else size))
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns:x}"')
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if with_body:
            self._send(path, first, last + 1)
        Handler.log.append((began, time.monotonic(), last - first + 1 if with_body else 0))

    def _send(self, path: Path, first: int, stop: int) -> None:
        with open(path, "rb") as file:
            file.seek(first)
            while first < stop:
                data = file.read(min(PIECE, stop - first))
                first += len(data)
                with Handler.lock:
                    Handler.free_at = max(Handler.free_at, time.monotonic()) + len(data) / BYTES_PER_SECOND
                    wait = Handler.free_at - time.monotonic()
                if wait > 0.002:
                    time.sleep(wait)
                self.wfile.write(data)


def serve(root: Path, port: Any) -> None:
    """Serve a directory until the process is ended."""
    Handler.root = root
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    port.send(server.server_address[1])
    server.serve_forever()


@contextlib.contextmanager
def server(root: Path) -> Iterator[str]:
    """Yield the address of a server of the files below ``root``."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(root, sender), daemon=True)
    process.start()
    yield f"http://127.0.0.1:{receiver.recv()}"
    process.terminate()
    process.join()


def requests(address: str) -> list[list[float]]:
    """Return when each request since the last call began and ended, and its bytes."""
    with urllib.request.urlopen(f"{address}/log/", timeout=60) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def longest_chain(found: list[list[float]]) -> int:
    """Return how many requests came one after another, each begun after the one before it had ended."""
    ended, count = 0.0, 0
    for began, end, _ in sorted(found, key=lambda one: one[1]):
        if began >= ended:
            ended, count = end, count + 1
    return count


def read(loader: Any) -> int:
    """Read an epoch; return its rows."""
    return sum(len(batch["label"]) for batch in loader)


def train(address: str, local: memfeed.Store, cache: Path, shuffle: Any) -> dict[str, float]:
    """Return the figures of two epochs from an address."""
    requests(address)
    store = memfeed.open(f"{address}/a.mf", cache=cache)
    loader = memfeed.Loader(store, 64, shuffle=shuffle, seed=0)
    batches, began = iter(loader), time.perf_counter()
    rows = len(next(batches)["label"])
    found = requests(address)
    first_batch = time.perf_counter() - began
    rows += sum(len(batch["label"]) for batch in batches)
    epoch = time.perf_counter() - began
    assert rows == len(local)
    store.finish()
    read(loader)
    other = memfeed.Loader(local, 64, shuffle=shuffle, seed=0)
    read(other)
    seconds = [(seconds_of(lambda: read(loader)), seconds_of(lambda: read(other))) for _ in range(5)]
    return {
        "seconds": epoch,
        "bandwidth": local.nbytes / epoch / BYTES_PER_SECOND,
        "first batch seconds": first_batch,
        "first batch requests": len(found),
        "first batch round trips": longest_chain(found),
        "second epoch / local": statistics.median(mine / theirs for mine, theirs in seconds),
    }


def small_cache(address: str, local: memfeed.Store, cache: Path) -> dict[str, float]:
    """Return the figures of two epochs by blocks with a cache of 0.3 of the store; every row is compared."""
    size = int(0.3 * local.nbytes)
    store = memfeed.open(f"{address}/a.mf", cache=cache, size=size)
    requests(address)
    most = 0
    for _ in range(2):
        for batch in memfeed.Loader(store, 64, shuffle="blocks", seed=0):
            for label, image in zip(batch["label"].tolist(), batch["image"], strict=True):
                assert torch.equal(image, local.column("image")[label])
            most = max(most, sum(path.stat().st_blocks * 512 for path in cache.rglob("*") if path.is_file()))
    fetched = sum(size for _, _, size in requests(address))
    return {"disk / size": most / size, "fetched / store, an epoch": fetched / 2 / local.nbytes}


def main() -> None:
    made = parser("remote", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to")
    made.add_argument("--megabytes", type=int, default=600)
    options = made.parse_args()
    n = (30 if options.quick else options.megabytes) * 10**6 // (3 * 128 * 128)
    figures: dict[str, Any] = {}
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        base = Path(directory)
        images = torch.randint(0, 256, (n, *ROW_SHAPE), dtype=torch.uint8)
        columns = {"image": images, "label": torch.arange(n)}
        local = memfeed.cache(columns, base / "origin" / "a.mf", progress=False)
        del images, columns
        with server(base / "origin") as address:
            for shuffle in (True, "blocks"):
                found = figures[f"shuffle={shuffle!r}"] = train(address, local, base / "cache", shuffle)
                shutil.rmtree(base / "cache")
                name = f"shuffle={shuffle!r}"
                checks += [
                    Check(f"{name}: first epoch, of the bandwidth", found["bandwidth"], 0.9, at_least=True),
                    Check(
                        f"{name}: first batch, round trips",
                        found["first batch round trips"],
                        10,
                        at_least=False,
                        unit="",
                    ),
                    Check(f"{name}: second epoch / local store", found["second epoch / local"], 1.1, at_least=False),
                ]
            found = figures["cache of 0.3"] = small_cache(address, local, base / "cache")
            checks.append(Check("cache of 0.3: disk / size", found["disk / size"], 1.05, at_least=False))
        nbytes = local.nbytes
    for name, found in figures.items():
        table(name, ["", ""], [[what, f"{value:.2f}"] for what, value in found.items()])
    show("a store at an address", checks)
    about = {"rows": n, "bytes": nbytes, "bytes_per_second": BYTES_PER_SECOND, "latency_seconds": LATENCY_SECONDS}
    write(options, about, {"figures": figures}, checks)


if __name__ == "__main__":
    main()
