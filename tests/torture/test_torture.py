"""Short forms of `make torture`, and single deaths that it meets only by chance."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

import memfeed
from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.convert import jobs, watchdog
from memfeed.convert.write_run import RunWriter
from memfeed.errors import BuildError
from memfeed.schema.infer import infer
from memfeed.system import machine
from torture import SCENARIOS, losses
from torture.victims import (
    Logged,
    compared,
    convert,
    convert_stream,
    digest,
    ended,
    left_behind,
    presence,
    reads,
    sample,
    start,
    wait_for,
    workers_of,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
SECONDS = 60


class Blocked(Logged):
    """Sample 37 blocks for ever in a worker."""

    def __getitem__(self, i):
        if i == 37 and get_worker_info():
            time.sleep(10_000)
        return super().__getitem__(i)


LONG = {"powerloss", "failed_syncs", "mutations"}  # other test files have them in short


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in SCENARIOS]
)
def test_short_torture(name):
    counts = SCENARIOS[name](1.0, random.Random(7))
    assert not losses(counts), counts


def test_the_table_of_losses_knows_a_loss():
    assert losses({"rows": 5, "lost": 0, "wrong": 2}) == {"wrong": 2}


class Guarded(Logged):
    """Makes a file when an interrupt leaves a sample that was begun: who holds a lock would give it back there."""

    def __getitem__(self, i):
        try:
            return super().__getitem__(i)
        except KeyboardInterrupt:
            self.log.with_name(f"left-by-{os.getpid()}").touch()
            raise


@pytest.mark.long
@pytest.mark.parametrize("work", [convert, convert_stream])
def test_ctrl_c_reaches_workers_and_builder_alike(path, work):
    stderr, log = path.with_name("stderr"), path.with_name("log")
    child = start(stderr, work, path, Guarded(400, log, 0, 0.2), 2, 0.1)
    wait_for(lambda: {0, 1} <= {worker for _, worker, _ in reads(log)})
    workers = workers_of(child.pid)
    os.killpg(child.pid, signal.SIGINT)
    assert ended(child)
    assert child.exitcode == 1, "by KeyboardInterrupt, not for a worker's death"
    assert stderr.read_text().splitlines()[-1] == "KeyboardInterrupt"
    assert not left_behind(child.pid)
    assert {path.with_name(f"left-by-{pid}").exists() for pid in workers} == {True}
    assert not (presence(path) == 1).any(), "all that was written is synced"


def interrupted_twice(path, dataset):
    jobs.MOST_SECONDS = 0.3
    try:
        convert(path, dataset, 2, 0.1)
    except KeyboardInterrupt:
        sys.exit(5 if multiprocessing.active_children() else 7)


def test_an_impatient_ctrl_c_leaves_no_worker(path):
    log = path.with_name("log")
    child = start(path.with_name("stderr"), interrupted_twice, path, Blocked(100, log, 0, 0.0))
    wait_for(lambda: np.count_nonzero(presence(path)) > 60)
    for _ in range(2):
        os.kill(child.pid, signal.SIGINT)
        time.sleep(0.15)
    assert ended(child)
    assert child.exitcode == 7


def reporting(path, dataset):
    jobs.MOST_SECONDS = 0.3
    watchdog.STALL_SECONDS = 0.3
    convert(path, dataset, 2, 0.1)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_dataset_that_blocks_is_named_and_can_be_left(path, number):
    stderr, log = path.with_name("stderr"), path.with_name("log")
    child = start(stderr, reporting, path, Blocked(100, log, 0, 0.0))
    wait_for(lambda: stderr.exists() and "has been reading sample 37 for" in stderr.read_text())
    wait_for(lambda: np.count_nonzero(presence(path)) > 60)  # the other worker goes on
    assert "memfeed: worker " in stderr.read_text()
    begun = time.monotonic()
    os.kill(child.pid, number)
    assert ended(child)
    assert time.monotonic() - begun < 5
    assert child.exitcode == (-signal.SIGTERM if number == signal.SIGTERM else 1)
    assert not left_behind(child.pid)
    assert not (presence(path) == 1).any(), "all that was written is synced"
    before = presence(path)
    again = start(stderr, convert, path, Logged(100, log, 1, 0.0), 2, 0.1)
    assert ended(again)
    assert again.exitcode == 0
    assert not [i for run, worker, i in reads(log) if run == 1 and worker >= 0 and before[i]]
    assert compared(path, 100) == {"lost": 0, "wrong": 0}


def with_handler(path, dataset, stderr, raises):
    def handler(number, frame):
        with open(stderr, "a") as file:
            file.write("user's own\n")
        if raises:
            raise SystemExit(7)

    signal.signal(signal.SIGTERM, handler)
    convert(path, dataset, 2, 100.0)
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("raises", [False, True])
def test_a_handler_of_the_users_decides(path, raises):
    stderr, log = path.with_name("stderr"), path.with_name("log")
    child = start(stderr, with_handler, path, Logged(300, log, 0, 0.002), stderr, raises)
    wait_for(lambda: np.count_nonzero(presence(path)) > 60)
    os.kill(child.pid, signal.SIGTERM)
    if raises:
        assert ended(child)
        assert child.exitcode == 7
        assert (presence(path) == 2).any(), "synced"
    else:
        wait_for(lambda: path.exists() or (presence(path) == 2).any())
        assert ended(child)
        assert child.exitcode == 0
    assert stderr.read_text() == "user's own\n"
    assert not left_behind(child.pid)


def repairing(path, dataset):
    memfeed.repair(dataset, path, progress=False)


def test_a_repair_is_left_in_order(path):
    log, n = path.with_name("log"), 60
    memfeed.cache(Logged(n, log, 0, 0.0), path, workers=0, progress=False)
    (path / "image.memmap").chmod(0o644)
    with open(path / "image.memmap", "r+b") as file:
        file.write(b"rot")
    before = digest(path)
    child = start(path.with_name("stderr"), repairing, path, Logged(n, log, 1, 0.05))
    wait_for(lambda: sum(run == 1 for run, _, _ in reads(log)) > 20)
    os.kill(child.pid, signal.SIGTERM)
    assert ended(child)
    assert child.exitcode == -signal.SIGTERM
    assert digest(path) == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.mf", "log", "stderr"]
    repairing(path, Logged(n, log, 2, 0.0))
    assert compared(path, n) == {"lost": 0, "wrong": 0}


def outlived(path, dataset):
    machine.die_with_parent = lambda: None  # as where the kernel does not do that
    jobs.MOST_SECONDS = 0.3
    convert(path, dataset, 2, 0.1)


def test_another_takes_over_while_workers_of_the_dead_builder_live_on(path):
    stderr, log = path.with_name("stderr"), path.with_name("log")
    child = start(stderr, outlived, path, Blocked(200, log, 0, 0.01))
    wait_for(lambda: np.count_nonzero(presence(path)) > 60)
    os.kill(child.pid, signal.SIGKILL)
    other = start(stderr, convert, path, Logged(200, log, 1, 0.0), 2, 0.1)
    assert ended(other)
    assert other.exitcode == 0
    assert left_behind(child.pid, 0.1), "the blocked worker was alive all the time"
    assert compared(path, 200) == {"lost": 0, "wrong": 0}


def served(path, dataset):
    multiprocessing.set_start_method("forkserver", force=True)
    convert(path, dataset, 1, 0.1)


@pytest.mark.long
def test_workers_end_with_the_builder_though_a_server_forked_them(path):
    child = start(path.with_name("stderr"), served, path, Logged(2000, path.with_name("log"), 0, 0.01))
    wait_for(lambda: np.count_nonzero(presence(path)) > 60)
    os.kill(child.pid, signal.SIGKILL)
    assert not left_behind(child.pid)


def slowly_forked(path, dataset):
    os.register_at_fork(after_in_child=lambda: time.sleep(0.3))
    convert(path, dataset, 4, 0.1)


def test_workers_end_though_the_builder_died_while_they_were_forked(path):
    child = start(path.with_name("stderr"), slowly_forked, path, Logged(2000, path.with_name("log"), 0, 0.01))
    wait_for(lambda: workers_of(child.pid))  # the first: none has been told yet what to do
    os.kill(child.pid, signal.SIGKILL)
    assert not left_behind(child.pid)


def test_a_worker_of_a_dead_builder_skips_nothing(path):
    with claim(path) as root:
        build = Build.begin(root, infer([torch.arange(3)]).schema, 4, None)
        writer = RunWriter(build, None, may_promote=False)
        Build.resume(root)
        with pytest.raises(BuildError, match="another process has taken this build over"):
            writer.rows.skip(2)
        assert build.presence().tolist() == [0] * 4


def test_children_have_no_part_in_the_lock(path):
    context = multiprocessing.get_context("fork")
    with claim(path):
        child = context.Process(target=time.sleep, args=(SECONDS,), daemon=True)
        child.start()
    try:
        with claim(path) as root:
            assert json.loads((root / ".build" / "owner").read_bytes())["pid"] == os.getpid()
    finally:
        child.kill()
        child.join()


def waiting(path, dataset):
    sys.modules["memfeed.building.claim"].REPORT_SECONDS = 0.3
    convert(path, dataset, 1, 0.1)


@pytest.mark.long
def test_who_waits_opens_what_was_made_and_checks_it(path):
    stderr, log = path.with_name("stderr"), path.with_name("log")
    first = start(stderr, convert, path, Logged(150, log, 0, 0.04), 1, 0.1)
    wait_for(lambda: np.count_nonzero(presence(path)) > 20)
    second = start(path.with_name("stderr2"), waiting, path, Logged(150, log, 1, 0.0))
    assert ended(first)
    assert ended(second)
    assert (first.exitcode, second.exitcode) == (0, 0)
    told = path.with_name("stderr2").read_text()
    assert 1 < told.count(f"memfeed: process {first.pid} on ") < 60, "once in a while"
    assert f"is building {path}; waiting for it\n" in told
    assert f"is building {path}; waiting for it (0 min so far)\n" in told
    # run and delay are settings of the dataset that differ from then, so that its rows are compared for a second
    assert len([run for run, _, _ in reads(log) if run == 1]) <= 16 + 150, "compared once, not probed"
    assert memfeed.open(path)[3]["label"] == sample(3)["label"]


def claiming(path, times):
    claims = sys.modules["memfeed.building.claim"]
    claims.WAIT_SECONDS, claims._report = 0.0001, lambda *owner: None
    for _ in range(times):
        with claim(path):
            pass


def test_many_come_and_go(path):
    """Each makes the build's directory and takes it away again, in the midst of the others."""
    children = [start(path.with_name("stderr"), claiming, path, 100) for _ in range(6)]
    assert all(ended(child) for child in children)
    assert [child.exitcode for child in children] == [0] * 6, path.with_name("stderr").read_text()
    assert not path.with_name("a.mf.build").exists()
