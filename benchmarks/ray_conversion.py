"""Convert on a Ray cluster of four nodes on this machine: two of them killed, and with one to four tasks at once.

The nodes share the cores and the disk of one machine, so samples that compute are no faster than its cores are, and
samples that wait (for a network, say) show what the engine itself allows. With nodes killed, each read of a sample is
logged with its process: a row that was read twice has to be one that was in flight on a killed node.

    python benchmarks/ray_conversion.py
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memfeed
from measure import Check, in_turns, medians, parser, ratio, seconds_of, show, table, write

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore", "RAY_AUTH_MODE": "disabled"}
NODES, KILLED = 4, 2
WAIT_SECONDS = 240.0
SAMPLE_SECONDS = 0.01


class Samples:
    """Samples with a fixed and a ragged field, each of which takes 10 ms: computing, or waiting."""

    def __init__(self, length: int, *, computes: bool, log: str | None = None) -> None:
        self.length, self.computes, self.log = length, computes, log

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> dict[str, Any]:
        if self.log is not None:
            with open(self.log, "a") as log:
                log.write(f"{row} {os.getpid()}\n")
        if not self.computes:
            time.sleep(SAMPLE_SECONDS)
        until = time.thread_time() + SAMPLE_SECONDS * self.computes
        while time.thread_time() < until:
            np.sort(np.arange(2000)[::-1])
        image = np.random.default_rng(row).integers(0, 256, (3, 64, 64), np.uint8)
        return {"image": torch.from_numpy(image), "tokens": torch.arange(row % 7), "label": row}


@contextlib.contextmanager
def cluster() -> Iterator[tuple[Any, list[Any]]]:
    """Yield a cluster, and those of its nodes that are not the head."""
    os.environ.update(QUIET)
    import ray
    from ray.cluster_utils import Cluster

    temporary = tempfile.mkdtemp(prefix="mfray", dir="/tmp")  # paths of sockets must be short
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False, "temp_dir": temporary})
    try:
        nodes = [made.add_node(wait=False, **small) for _ in range(NODES - 1)]
        made.wait_for_nodes()
        ray.init(address=made.address, log_to_driver=False)
        yield made, nodes
    finally:
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)


def convert(dataset: Samples, path: Path, workers: int, *, on_ray: bool = True) -> memfeed.Store:
    """Write a store, in place of one that is there."""
    shutil.rmtree(path, ignore_errors=True)
    return memfeed.cache(dataset, path, workers=f"ray:{workers}" if on_ray else workers, progress=False)


def scaling(base: Path, length: int, rounds: int, counts: list[int]) -> dict[str, Any]:
    """Return the seconds of conversions with so many tasks at once, of samples that compute and that wait."""
    found: dict[str, Any] = {}
    for computes in (True, False):
        dataset = Samples(length, computes=computes)
        convert(dataset, base / "warm", counts[-1])  # the processes of all nodes are started

        def timed(name: str, workers: int, *, on_ray: bool, dataset: Samples = dataset) -> float:
            return seconds_of(lambda: convert(dataset, base / name, workers, on_ray=on_ray))

        contenders = {f"Ray, {count} tasks": partial(timed, "ray.mf", count, on_ray=True) for count in counts}
        contenders["worker processes, 2"] = partial(timed, "own.mf", 2, on_ray=False)
        seconds = in_turns(contenders, rounds)
        first, last = f"Ray, {counts[0]} tasks", f"Ray, {counts[-1]} tasks"
        found["compute" if computes else "wait"] = {
            "median_seconds": medians(seconds),
            "times_as_fast": {name: ratio(seconds, first, name) for name in contenders if name != first},
            "last": ratio(seconds, first, last),
        }
    return found


def reads(log: Path) -> list[tuple[int, int]]:
    """Return (row, process) of each read, in order, without those of this process, which probes."""
    lines = [line.split() for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(int(row), int(pid)) for row, pid in lines if int(pid) != os.getpid()]


def with_nodes_killed(made: Any, nodes: list[Any], base: Path, length: int) -> dict[str, Any]:
    """Kill two nodes in the middle of a conversion. Return what was computed, and whether the store is right."""
    log = base / "log"
    log.touch()
    dataset = Samples(length, computes=False, log=str(log))
    mine = convert(Samples(length, computes=False), base / "own.mf", 0, on_ray=False)
    at_kill: list[tuple[int, int]] = []

    def kill() -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while len(reads(log)) < length // 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        for node in nodes[:KILLED]:
            made.remove_node(node, allow_graceful=False)
        at_kill.extend(reads(log))

    thread = threading.Thread(target=kill)
    thread.start()
    began = time.perf_counter()
    store = convert(dataset, base / "killed.mf", NODES)
    seconds = time.perf_counter() - began
    thread.join()
    done = reads(log)
    counts = Counter(row for row, _ in done)
    first = dict(reversed(done))
    again = sorted(row for row, count in counts.items() if count > 1)
    ended = {first[row] for row in again}
    fixed = [name for name in ("image", "label") if store.schema.fields[store.schema.field_index(name)].kind == "fixed"]
    return {
        "rows": length,
        "read_at_kill": len(at_kill),
        "seconds": seconds,
        "computed_twice": len(again),
        "computed_more_often": sum(count > 2 for count in counts.values()),
        "processes_that_lost_rows": len(ended),
        "fixed_bytes_equal": all(
            (store.path / f"{name}.memmap").read_bytes() == (mine.path / f"{name}.memmap").read_bytes()
            for name in fixed
        ),
        "ragged_rows_equal": all(torch.equal(store[row]["tokens"], mine[row]["tokens"]) for row in range(length)),
        "verified": not store.verify(),
    }


def main() -> None:
    made = parser("ray", __doc__)
    made.set_defaults(json=made.get_default("json").with_name("ray.json"))
    made.add_argument("--length", type=int, default=800)
    made.add_argument("--rounds", type=int, default=3)
    options = made.parse_args()
    length, rounds, counts = (60, 1, [1, 2]) if options.quick else (options.length, options.rounds, [1, 2, 3, 4])
    with tempfile.TemporaryDirectory() as directory, cluster() as (ray_cluster, nodes):
        base = Path(directory)
        speeds = scaling(base, length // 2, rounds, counts)
        killed = with_nodes_killed(ray_cluster, nodes, base, length)
    for what, found in speeds.items():
        rows = [[name, f"{t:.2f} s", f"{length / 2 / t:,.0f}"] for name, t in found["median_seconds"].items()]
        table(f"samples that {what}", ["", "time", "rows/s"], rows)
    table(f"{KILLED} of {NODES} nodes killed", ["", ""], [[what, str(value)] for what, value in killed.items()])
    # a task takes about a second: what two tasks were computing when their nodes were killed
    in_flight = KILLED * 1.5 / SAMPLE_SECONDS
    is_right = killed["fixed_bytes_equal"] and killed["ragged_rows_equal"] and killed["verified"]
    lost = killed["processes_that_lost_rows"]
    checks = [
        Check("2 of 4 nodes killed: columns equal, byte for byte", float(is_right), 1, True, ""),
        Check("2 of 4 nodes killed: rows computed twice", killed["computed_twice"], in_flight, False, "rows"),
        Check("2 of 4 nodes killed: rows computed more often", killed["computed_more_often"], 0, False, "rows"),
        Check("2 of 4 nodes killed: processes whose rows were computed again", lost, KILLED, False, ""),
        Check(f"samples that wait: {counts[-1]} tasks / 1", speeds["wait"]["last"], 0.7 * counts[-1], True),
        Check("samples that compute: 2 tasks / 1", speeds["compute"]["times_as_fast"]["Ray, 2 tasks"], 1.6, True),
    ]
    show("conversions on Ray", checks)
    about = {"rows": length, "nodes": NODES, "killed": KILLED, "sample_seconds": SAMPLE_SECONDS, "counts": counts}
    write(options, about, {"scaling": speeds, "nodes_killed": killed}, checks)


if __name__ == "__main__":
    main()
