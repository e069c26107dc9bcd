"""A process with a Ray cluster of four nodes, for test_ray_cluster.py: it runs the functions below when told to.

Ray is kept out of pytest's process, whose warnings are errors and whose threads are counted.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch

import memfeed
from memfeed.building.partial import ABSENT
from memfeed.convert import ray_engine, watchdog
from memfeed.convert.probe import probe_indices
from memfeed.errors import BuildError, SampleError
from memfeed.store import format
from support import wait_until

ROWS = 64
WAIT_SECONDS = 240.0
NOT_PROBED = [row for row in range(ROWS) if row not in probe_indices(ROWS)]
cluster, nodes = None, []


class Logged:
    """Samples with a fixed and two ragged fields. Each read appends the row and the process to a log."""

    def __init__(self, log, rows=ROWS, seconds=0.0, act=None):
        self.log, self.rows, self.seconds, self.act = log, rows, seconds, act

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        with open(self.log, "a") as log:
            log.write(f"{row} {os.getpid()}\n")
        time.sleep(self.seconds)
        if self.act is not None:
            self.act(row)
        return {"x": torch.full((4, 3), row * 0.5), "tokens": torch.arange(row % 5), "name": f"row {row}"}


def reads(log, head):
    """Return (row, process) of each read in a task, in order."""
    if not Path(log).exists():
        return []
    found = [tuple(map(int, line.split())) for line in Path(log).read_text().splitlines(keepends=True) if "\n" in line]
    return [(row, pid) for row, pid in found if pid != head]


def wait_for(condition):
    wait_until(condition, WAIT_SECONDS)


def rows_of(store):
    return [[row["x"].tolist(), row["tokens"].tolist(), row["name"]] for row in (store[i] for i in range(len(store)))]


def expected(rows):
    return [[[[row * 0.5] * 3] * 4, list(range(row % 5)), f"row {row}"] for row in range(rows)]


def convert(path, dataset, workers=None, **options):
    workers = f"ray:{workers}" if workers else "ray"
    return memfeed.cache(dataset, path, workers=workers, progress=False, **options)


# --- scenarios: each returns what the test asserts


def equal_stores(folder):
    log, here = f"{folder}/log", memfeed.cache(Logged(f"{folder}/other"), f"{folder}/here.mf", workers=0)
    store = convert(f"{folder}/ray.mf", Logged(log))
    return {
        "fixed": (store.path / "x.memmap").read_bytes() == (here.path / "x.memmap").read_bytes(),
        "rows": rows_of(store) == rows_of(here) == expected(ROWS),
        "computed": sorted(row for row, _ in reads(log, os.getpid())),
        "processes": len({pid for _, pid in reads(log, os.getpid())}),
        "not probed": NOT_PROBED,
        "verified": not memfeed.open(store.path).verify(),
        "left": os.listdir(folder),
    }


def drift(folder):
    class Drifting(Logged):
        def __getitem__(self, row):
            sample = super().__getitem__(row)
            return {**sample, "x": torch.full((6, 3), 1.5)} if row == NOT_PROBED[20] else sample

    store = convert(f"{folder}/a.mf", Drifting(f"{folder}/log"))
    found = rows_of(store)
    found[NOT_PROBED[20]][0] = found[NOT_PROBED[19]][0] = expected(ROWS)[NOT_PROBED[19]][0]
    return {
        "kind": store.schema.fields[0].kind,
        "shape": list(store[NOT_PROBED[20]]["x"].shape),
        "rest": found[: NOT_PROBED[20]] == expected(ROWS)[: NOT_PROBED[20]],
    }


def error_and_resume(folder):
    bad, log = NOT_PROBED[30], f"{folder}/log"

    def act(row):
        if row == bad and not os.path.exists(f"{folder}/mended"):
            raise KeyError("no such file")

    path, found = f"{folder}/a.mf", {}
    try:
        convert(path, Logged(log, act=act), workers=2)
    except SampleError as error:
        found = {"error": str(error), "cause": repr(error.__cause__)}
    presence = (format.build_path(Path(path)) / ".build" / "presence").read_bytes()
    before = len(reads(log, os.getpid()))
    Path(f"{folder}/mended").touch()
    store = convert(path, Logged(log, act=act))
    again = {row for row, _ in reads(log, os.getpid())[before:]}
    return found | {
        "bad": bad,
        "kept": sum(state != ABSENT for state in presence),
        "again": [row for row in again if presence[row] != ABSENT],
        "rows": rows_of(store) == expected(ROWS),
    }


def skipped(folder):
    raises, dies = NOT_PROBED[10], NOT_PROBED[25]

    def act(row):
        if row == raises:
            raise ValueError("damaged")
        if row == dies:
            os._exit(3)

    ray_engine.RETRIES = 0  # a process takes seconds to start
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, ray_engine, "RETRIES", 3)
        store = convert(f"{folder}/a.mf", Logged(f"{folder}/log", act=act), on_error="skip")
    kept = [row for row in range(ROWS) if row not in (raises, dies)]
    return {
        "skipped": list(store.skipped),
        "expected": sorted([raises, dies]),
        "rows": rows_of(store) == [expected(ROWS)[row] for row in kept],
    }


def cannot_pickle(folder):
    dataset = Logged(f"{folder}/log")
    dataset.lock = threading.Lock()
    try:
        convert(f"{folder}/a.mf", dataset)
    except BuildError as error:
        return {"error": str(error), "left": [name for name in os.listdir(folder) if name != "log"]}
    return {}


def stalled(folder):
    """One sample takes longer than the others: the head says which rows have no end."""

    def act(row):
        if row == NOT_PROBED[0] and os.getpid() != head:
            wait_for(lambda: os.path.exists(f"{folder}/go"))

    head, said = os.getpid(), []
    watchdog.STALL_SECONDS, write_line = 1.0, ray_engine.write_line

    def listen(text):
        said.append(text)
        Path(f"{folder}/go").touch()

    ray_engine.write_line = listen
    try:
        convert(f"{folder}/a.mf", Logged(f"{folder}/log", act=act), workers=1)
    finally:
        watchdog.STALL_SECONDS, ray_engine.write_line = 60.0, write_line
    return {"said": said[0]}


def ray_data(folder):
    import ray

    def slow_at_first(row):
        time.sleep(0.1 if row["id"] < 10 else 0)
        return {"id": row["id"], "text": str(row["id"])}

    dataset = ray.data.range(60, override_num_blocks=6).map(slow_at_first)
    store = memfeed.cache(dataset, f"{folder}/a.mf", progress=False)
    on_ray = convert(f"{folder}/b.mf", ray.data.range(60, override_num_blocks=6).map(slow_at_first))
    errors = []
    for options, given in (({"workers": 2}, dataset), ({}, ray.data.range(60).random_shuffle())):
        try:
            memfeed.cache(given, f"{folder}/c.mf", progress=False, **options)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {
        "rows": [[int(row["id"]), row["text"]] for row in (store[i] for i in range(len(store)))],
        "on ray": [int(on_ray[i]["id"]) for i in range(len(on_ray))],
        "opened": len(memfeed.cache(dataset, f"{folder}/a.mf", progress=False)),
        "errors": errors,
    }


def head_killed(folder, heads=1):
    """Kill the head; then this process resumes, or two heads at once."""
    log, path = f"{folder}/log", f"{folder}/a.mf"
    command = [sys.executable, __file__, "convert", path, log]
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    first = subprocess.Popen(command, env=environment)
    presence = format.build_path(Path(path)) / ".build" / "presence"
    wait_for(lambda: presence.exists() and sum(map(bool, presence.read_bytes())) >= 30)
    first.kill()
    first.wait(WAIT_SECONDS)
    before, written = len(reads(log, 0)), presence.read_bytes()
    others = [subprocess.Popen(command, env=environment) for _ in range(heads - 1)]
    store = convert(path, Logged(log, seconds=0.05))
    statuses = [other.wait(WAIT_SECONDS) for other in others]
    pids = {os.getpid(), *(other.pid for other in others)}
    again = [row for row, pid in reads(log, 0)[before:] if pid not in pids and written[row] != ABSENT]
    return {
        "statuses": statuses,
        "rows": rows_of(store) == expected(ROWS),
        "written": sum(map(bool, written)),
        "again": again,
    }


def nodes_killed(folder):
    log, head = f"{folder}/log", os.getpid()

    def kill():
        wait_for(lambda: len(reads(log, head)) >= 40)
        for node in nodes[1:3]:
            cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=kill)
    thread.start()
    dataset = Logged(log, rows=200, seconds=0.05)
    store = convert(f"{folder}/a.mf", dataset)
    thread.join()
    return {"rows": rows_of(store) == expected(200), "reads": reads(log, head), "length": 200}


def two_heads(folder):
    return head_killed(folder, heads=2)


# --- the process


def main(results):
    global cluster
    import ray
    from ray.cluster_utils import Cluster

    temporary = tempfile.mkdtemp(prefix="mfray", dir="/tmp")  # paths of sockets must be short
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False, "temp_dir": temporary})
    try:
        nodes.extend(cluster.add_node(wait=False, **small) for _ in range(3))
        cluster.wait_for_nodes()
        ray.init(address=cluster.address)
        for line in sys.stdin:
            name, folder = json.loads(line)
            try:
                answer = globals()[name](folder)
            except BaseException:
                answer = {"failed": traceback.format_exc()}
            results.write(json.dumps(answer) + "\n")
            results.flush()
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(sys.argv[2], Logged(sys.argv[3], seconds=0.05))
    elif sys.argv[1] == "local":
        handler = signal.getsignal(signal.SIGTERM)
        convert(sys.argv[2], Logged(sys.argv[3]), workers=1)
        import ray

        assert not ray.is_initialized()
        assert signal.getsignal(signal.SIGTERM) == handler
    else:
        with open(int(sys.argv[1]), "w") as file:
            main(file)
