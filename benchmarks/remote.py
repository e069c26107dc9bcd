"""Train from a store at an address behind a limited link: bandwidth used, first batch, second epoch, a small cache.

The server (object_server.py) speaks S3: 100 MB/s for all requests together, and 30 ms before each answer. It stands for
the object store of a region. LitData, MosaicML Streaming, Lance and WebDataset, where they are installed, train from
the same server and the same rows, each in its own format and its own process.

    python benchmarks/remote.py                    # with the peers: make peers, and the Python of .venv-peers
    python benchmarks/remote.py --only peers       # one part; the others stay in the JSON file as they are
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import memfeed
from measure import Check, parser, seconds_of, show, sync_files, table, write
from memfeed.order.orders import WINDOW_BLOCKS
from memfeed.remote import remote_supply
from memfeed.remote.opening import chunk_rows
from memfeed.remote.remote_supply import ROOM_FACTOR
from object_server import BUCKET, BYTES_PER_SECOND, LATENCY_SECONDS, answered, environment, round_trips, server
from others import Work, make_rows, mapped_rows
from remote_peers import OURS, compare

ROW_SHAPE = (3, 128, 128)
BATCH_SIZE = 64
ROOMS = 1.1, 1.3, 1.5, 2.0  # of small caches, over the bytes of the rows that blocks mix
SHUFFLES = {"shuffle=Blocks()": memfeed.Blocks(), "shuffle=True": True}
ADDRESS = f"s3://{BUCKET}/memfeed.mf"


def read(loader: Any) -> int:
    """Read an epoch; return its rows."""
    return sum(len(batch["label"]) for batch in loader)


def train(server: str, local: memfeed.Store, cache: Path, shuffle: Any) -> dict[str, float]:
    """Return the figures of the first epoch from the server, and of later ones beside those of the local store."""
    answered(server)
    began = time.perf_counter()
    store = memfeed.open(ADDRESS, cache_dir=cache)
    loader = memfeed.Loader(store, BATCH_SIZE, shuffle=shuffle, seed=0)
    batches = iter(loader)
    rows = len(next(batches)["label"])
    found, first_batch = answered(server), time.perf_counter() - began
    rows += sum(len(batch["label"]) for batch in batches)
    epoch = time.perf_counter() - began
    assert rows == len(local), f"found {rows} rows in an epoch, expected {len(local)}"
    requests = [*found, *answered(server)]
    store.finish()
    sync_files(cache)  # else the disk is still at work
    other = memfeed.Loader(local, BATCH_SIZE, shuffle=shuffle, seed=0)
    read(loader), read(other)
    seconds = [(seconds_of(lambda: read(loader)), seconds_of(lambda: read(other))) for _ in range(15)]
    for batch in loader:
        assert torch.equal(batch["image"], local.column("image")[batch["label"]])
    assert not answered(server), "found a request to the server in a later epoch"
    return {
        "first epoch, s": epoch,
        "first epoch, of the bandwidth": local.nbytes / epoch / BYTES_PER_SECOND,
        "first epoch, requests": len(requests),
        "first epoch, bytes fetched / bytes of the store": sum(one.size for one in requests) / local.nbytes,
        "first batch, s": first_batch,
        "first batch, requests": len(found),
        "first batch, round trips": round_trips(found),
        "first batch, MB fetched": sum(one.size for one in found) / 1e6,
        "second epoch, s": statistics.median(mine for mine, _ in seconds),
        "second epoch / local store": statistics.median(mine / theirs for mine, theirs in seconds),
    }


def small_cache(server: str, local: memfeed.Store, cache: Path, room: float) -> dict[str, float]:
    """Return the figures of two epochs by blocks with a small cache; every eighth batch is compared.

    Rooms that memfeed refuses are measured too: they show where the limit has to be.
    """
    mixed = WINDOW_BLOCKS * chunk_rows(local._view.manifest)
    size = int(room * mixed * local.nbytes / len(local))
    store = memfeed.open(ADDRESS, cache_dir=cache, size=size)
    answered(server)
    most, figures = 0, {"size / store": size / local.nbytes}
    remote_supply.ROOM_FACTOR = min(ROOM_FACTOR, room)
    loader = memfeed.Loader(store, BATCH_SIZE, shuffle=memfeed.Blocks(), seed=0)
    for which in ("first", "second"):
        began, rows = time.perf_counter(), list[torch.Tensor]()
        for batch in loader:
            rows.append(batch["label"])
            if len(rows) % 8 == 0:  # else the comparisons take the time of the loader, on two cores
                assert torch.equal(batch["image"], local.column("image")[batch["label"]])
                most = max(most, allocated_bytes(cache))
        seconds = time.perf_counter() - began
        assert torch.equal(torch.cat(rows).sort().values, torch.arange(len(local)))
        requests = answered(server)
        fetched = sum(one.size for one in requests)
        figures |= {
            f"{which} epoch, s": seconds,
            f"{which} epoch, of the bandwidth": local.nbytes / seconds / BYTES_PER_SECOND,
            f"{which} epoch, bytes fetched / store": fetched / local.nbytes,
            f"{which} epoch, requests": len(requests),
        }
    return figures | {"most disk / size": most / size}


def allocated_bytes(directory: Path) -> int:
    """Return the bytes of the blocks that the files of a directory have on the disk."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:  # removed meanwhile
            continue
    return total


def our_checks(figures: dict[str, Any]) -> list[Check]:
    checks = []
    for name, found in figures["memfeed"].items():
        bandwidth, trips = found["first epoch, of the bandwidth"], found["first batch, round trips"]
        checks += [
            Check(f"{name}: first epoch, of the bandwidth", bandwidth, 0.9, at_least=True),
            Check(f"{name}: first batch, round trips", trips, 10, at_least=False, unit=""),
            Check(f"{name}: second epoch / local store", found["second epoch / local store"], 1.1, at_least=False),
        ]
    return checks


def small_cache_checks(figures: dict[str, Any]) -> list[Check]:
    checks = []
    for name, found in figures["small cache"].items():
        checks.append(Check(f"{name}: most disk / size", found["most disk / size"], 1.05, at_least=False))
        if float(name.split()[2]) < ROOM_FACTOR:  # refused
            continue
        for which in ("first", "second"):
            bandwidth, fetched = (
                found[f"{which} epoch, {one}"] for one in ("of the bandwidth", "bytes fetched / store")
            )
            checks.append(Check(f"{name}: {which} epoch, of the bandwidth", bandwidth, 0.9, at_least=True))
            checks.append(Check(f"{name}: {which} epoch, bytes fetched / store", fetched, 1.05, at_least=False))
    return checks


def peers_checks(figures: dict[str, Any]) -> list[Check]:
    checks, ours = [], figures["peers"]["memfeed"]
    for name, found in figures["peers"].items():
        if name not in OURS:
            for which in ("first", "second"):
                ratio = found[f"{which} epoch seconds"] / ours[f"{which} epoch seconds"]
                checks.append(Check(f"{name} takes, {which} epoch", ratio, 1, at_least=True))
    return checks


CHECKS = {"memfeed": our_checks, "small cache": small_cache_checks, "peers": peers_checks}


def measure(part: str, rows: int, batch_size: int, base: Path) -> dict[str, Any]:
    """Return the figures of one part, by the names of the JSON file."""
    work = Work("images", rows, ROW_SHAPE, batch_size, base)
    make_rows(work)
    root, cache = base / "origin", base / "cache"
    with server(root) as address:
        os.environ.update(environment(address))
        if part == "peers":
            scratch = base / "scratch"
            scratch.mkdir()
            figures, failed = compare(work, address, root, scratch)
            return {"peers": figures, "failed": {name: why.strip().splitlines()[-1] for name, why in failed.items()}}
        found = mapped_rows(work)
        columns = {"image": found.images, "label": found.labels}
        local = memfeed.cache(columns, base / "local.mf", allow="copy", progress=False)
        memfeed.push(local, f"file://{root / BUCKET / 'memfeed.mf'}")
        del found
        shutil.rmtree(work.directory / "rows")  # the store has them
        trained = {}
        if part == "small cache":
            for room in ROOMS:
                trained[f"room for {room} times the rows that are mixed"] = small_cache(address, local, cache, room)
                shutil.rmtree(cache)
            return {part: trained}
        for name, shuffle in SHUFFLES.items():
            trained[name] = train(address, local, cache, shuffle)
            shutil.rmtree(cache)
        return {part: trained}


def main() -> None:
    made = parser("remote", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to")
    made.add_argument("--megabytes", type=int, default=1000)
    made.add_argument("--only", choices=CHECKS, help="run one part; the others stay as they are in the JSON file")
    options = made.parse_args()
    megabytes = dict.fromkeys(CHECKS, 20 if options.quick else options.megabytes)
    megabytes["peers"] //= 2  # each writes its own copy, and some read it from the server three times
    megabytes["small cache"] += megabytes["small cache"] * 3 // 10  # twice the 512 MiB that blocks mix are less
    figures: dict[str, Any] = {}
    if options.only and options.json.exists():
        known = json.loads(options.json.read_text())
        figures = {name: known[name] for name in (*CHECKS, "failed") if name in known and not known["quick"]}
        elsewhere = dict.fromkeys(figures.keys() & CHECKS.keys(), known["machine"]) | known.get("elsewhere", {})
        figures["elsewhere"] = {part: found for part, found in elsewhere.items() if part != options.only}
    for part in [options.only] if options.only else CHECKS:
        with tempfile.TemporaryDirectory(dir=options.dir, ignore_cleanup_errors=True) as directory:
            rows = megabytes[part] * 10**6 // (3 * 128 * 128)
            figures |= measure(part, rows, BATCH_SIZE, Path(directory))
    checks = [check for part in CHECKS if part in figures for check in CHECKS[part](figures)]
    ours = [(part, name) for part in ("memfeed", "small cache") for name in figures.get(part, {})]
    for part, name in ours:
        found = figures[part][name]
        table(f"{part}, {name}", ["", ""], [[what, f"{value:.2f}"] for what, value in found.items()])
    if "peers" in figures:
        columns = ["first batch seconds", "first epoch seconds", "second epoch seconds"]
        rows_of = {who: [f"{one[column]:.2f}" for column in columns] for who, one in figures["peers"].items()}
        table("beside other libraries", ["", *columns], [[who, *cells] for who, cells in rows_of.items()])
        for who, why in figures["failed"].items():
            print(f"{who}: {why}")
    show("a store at an address", checks)
    about = {
        "megabytes": megabytes,
        "row_bytes": 3 * 128 * 128 + 8,
        "batch_size": BATCH_SIZE,
        "bytes_per_second": BYTES_PER_SECOND,
        "latency_seconds": LATENCY_SECONDS,
    }
    write(options, about, figures, checks)


if __name__ == "__main__":
    main()
