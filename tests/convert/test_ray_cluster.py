"""Conversions on a Ray cluster of four nodes, which runs in a process of its own; see ray_scenarios.py."""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import memfeed

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif("RAY_TORTURE" not in os.environ, reason="takes minutes: make ray-torture"),
]
SCENARIOS = Path(__file__).with_name("ray_scenarios.py")
SECONDS = 300.0
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore", "RAY_AUTH_MODE": "disabled"}


class Head:
    """The process that has the cluster. ``run`` calls one of its scenarios and returns its result."""

    def __init__(self, folder):
        read, write = os.pipe()
        self.log, self._read, self._unread = folder / "log.txt", read, b""
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, SCENARIOS, str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                env=os.environ | QUIET,
                start_new_session=True,
            )
        os.close(write)

    def run(self, name, folder):
        self._process.stdin.write(json.dumps([name, str(folder)]).encode() + b"\n")
        self._process.stdin.flush()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], SECONDS)
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                pytest.fail(f"no result of {name}; the process printed:\n{self.log.read_text()[-4000:]}")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        result = json.loads(line)
        assert "failed" not in result, result["failed"] + self.log.read_text()[-3000:]
        return result

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._read)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    head = Head(tmp_path_factory.mktemp("ray"))
    yield head
    head.close()


def test_a_store_equals_that_of_worker_processes(head, tmp_path):
    """Fixed columns byte for byte, ragged rows by value; no row is computed twice, on more than one node."""
    found = head.run("equal_stores", tmp_path)
    assert found["fixed"]
    assert found["rows"]
    assert found["verified"]
    assert found["computed"] == found["not probed"]
    assert found["processes"] > 1
    assert sorted(found["left"]) == ["here.mf", "log", "other", "ray.mf"]


def test_a_column_that_drifts_on_a_node_is_promoted(head, tmp_path):
    assert head.run("drift", tmp_path) == {"kind": "jagged", "shape": [6, 3], "rest": True}


def test_an_error_names_the_sample_and_the_next_call_computes_the_rest(head, tmp_path):
    found = head.run("error_and_resume", tmp_path)
    assert found["error"].startswith(f"sample {found['bad']}: the dataset raised KeyError: 'no such file'")
    assert f"[{found['kept']} rows are kept in" in found["error"]
    assert "KeyError" in found["cause"]
    assert found["kept"] > 16
    assert found["again"] == []
    assert found["rows"]


def test_samples_that_raise_or_kill_their_process_are_skipped(head, tmp_path):
    found = head.run("skipped", tmp_path)
    assert found["skipped"] == found["expected"]
    assert found["rows"]


def test_a_dataset_that_does_not_pickle_is_refused_before_anything_is_written(head, tmp_path):
    found = head.run("cannot_pickle", tmp_path)
    assert "found a Logged that cannot be pickled" in found["error"]
    assert found["left"] == []


def test_rows_that_do_not_end_are_named(head, tmp_path):
    said = head.run("stalled", tmp_path)["said"]
    assert "no Ray task has ended for" in said
    assert "has sample" in said
    assert "CPUs are free: see `ray status`" in said


def test_a_ray_dataset_is_stored_in_its_order(head, tmp_path):
    found = head.run("ray_data", tmp_path)
    assert found["rows"] == [[row, str(row)] for row in range(60)]
    assert found["on ray"] == [*range(60)]
    assert found["opened"] == 60
    workers, shuffled = found["errors"]
    assert workers.startswith("ValueError: found workers=2 for a ray.data.Dataset")
    assert shuffled.startswith("RandomDataError: found random samples: iterating twice")


def test_a_killed_head_is_resumed(head, tmp_path):
    """Rows that it marked are not computed again."""
    found = head.run("head_killed", tmp_path)
    assert found["written"] >= 30
    assert found["again"] == []
    assert found["rows"]


def test_a_killed_head_is_resumed_by_one_of_two(head, tmp_path):
    """The other waits, and opens the store."""
    found = head.run("two_heads", tmp_path)
    assert found["again"] == []
    assert found["rows"]
    assert found["statuses"] == [0]


def test_nodes_that_are_killed_lose_only_rows_in_flight(head, tmp_path):
    """Two of four nodes die. The last of this file, because they stay dead."""
    found = head.run("nodes_killed", tmp_path)
    assert found["rows"]
    rows = [row for row, _ in found["reads"]]
    most = -(-found["length"] // 16)  # rows of one task: four tasks at once, of which each has four in turn
    last = {}
    for row, pid in found["reads"]:
        last.setdefault(pid, []).append(row)
    again = {row for row in rows if rows.count(row) > 1}
    first = {row: next(pid for other, pid in found["reads"] if other == row) for row in again}
    assert all(row in last[pid][-most:] for row, pid in first.items())
    assert len({first[row] for row in again}) <= 2


def test_ray_is_started_here_and_shut_down(tmp_path):
    """Without a cluster and a connection of the user's."""
    done = subprocess.run(
        [sys.executable, SCENARIOS, "local", tmp_path / "a.mf", tmp_path / "log"],
        env=os.environ | QUIET | {"RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(memfeed.open(tmp_path / "a.mf")) == 64
