"""The loop that sends rows to workers, with workers that are a few lines of this file."""

import contextlib
from collections import deque

import numpy as np
import pytest

from building.small_build import SCHEMA
from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.building.partial import ABSENT, SKIPPED, WRITTEN
from memfeed.convert.driver import RowEngine
from memfeed.convert.processes import Pool, WorkerDied, WorkerInterrupted
from memfeed.convert.write_run import Report, WritePlan

ROWS = 40


class Workers:
    """Two workers that mark rows as written. ``hurt`` may raise, or return a report, in place of that."""

    def __init__(self, build, hurt=lambda rows: None):
        self.build, self.hurt, self.pools, self.lists = build, hurt, 0, []

    @contextlib.contextmanager
    def open(self):
        self.pools += 1
        sent, open_count = deque(), {0, 1}

        def reports():
            while open_count:
                worker, rows = sent.popleft()
                if rows is None:
                    open_count.discard(worker)
                    continue
                self.lists.append(list(rows))
                report = self.hurt(rows)
                if report is None:
                    report = Report(row_count=len(rows), worker=worker)
                    self.build.units._mark(np.asarray(rows), WRITTEN)
                report.worker = worker
                yield report

        yield Pool(2, reports(), lambda worker, rows: sent.append((worker, rows)))


def run(engine):
    with contextlib.closing(engine):
        for _ in engine.reports():
            if engine.is_idle:
                engine.stop()


@pytest.fixture
def build(tmp_path):
    with claim(tmp_path / "s.mf") as root:
        yield Build.begin(root, SCHEMA, ROWS, None)


def plan(**options):
    return WritePlan(None, **options)


def test_each_row_is_sent_once(build):
    workers = Workers(build)
    run(RowEngine(build, plan(), workers.open, 1e-3))
    assert sorted(sum(workers.lists, [])) == list(range(ROWS))
    assert (build.presence() == WRITTEN).all()


def test_a_sample_is_skipped_after_two_deaths(build):
    def hurt(rows):
        if 7 in rows:
            raise WorkerDied("died", range(7, 8), "signal 9")

    workers = Workers(build, hurt)
    with pytest.warns(RuntimeWarning, match="sample 7 is left out: two worker processes died"):
        run(RowEngine(build, plan(skip_errors=True), workers.open, 1e-3))
    assert workers.pools == 3
    assert build.presence().tolist() == [SKIPPED if row == 7 else WRITTEN for row in range(ROWS)]


@pytest.mark.parametrize("reading", [None, range(7, 8)])
def test_a_death_is_an_error_where_no_sample_may_be_skipped(build, reading):
    def hurt(rows):
        raise WorkerDied("died", reading, "signal 9")

    with pytest.raises(WorkerDied):
        run(RowEngine(build, plan(skip_errors=reading is None), Workers(build, hurt).open, 1e-3))


def test_workers_start_again_once_a_column_is_promoted(build):
    promoted = []

    def hurt(rows):
        if 7 in rows and not promoted:
            return Report(drifts=[(0, (3,))])
        return None

    workers = Workers(build, hurt)
    engine = RowEngine(build, plan(), workers.open, 1e-3)
    engine._drifts.promote = lambda build: promoted.append(engine._drifts._shapes) or engine._drifts.__init__()
    run(engine)
    assert promoted[0] == {0: [(3,)]}
    assert workers.pools == 2
    assert not (build.presence() == ABSENT).any()


@pytest.mark.parametrize("is_read", [False, True])
def test_interrupted_workers_start_again_while_a_store_is_read(build, is_read, monkeypatch):
    monkeypatch.setattr("memfeed.convert.driver.INTERRUPT_SECONDS", 0.0)
    interrupts = iter([True])

    def hurt(rows):
        if next(interrupts, False):
            raise WorkerInterrupted("interrupted", range(1), "SIGINT")

    workers = Workers(build, hurt)
    engine = RowEngine(build, plan(is_read=is_read), workers.open, 1e-3)
    if is_read:
        run(engine)
        assert (build.presence() == WRITTEN).all()
    else:
        with pytest.raises(WorkerInterrupted):
            run(engine)


def test_the_last_sample_may_be_the_one_that_kills(build):
    build.units._mark(np.arange(1, ROWS), WRITTEN)

    def hurt(rows):
        raise WorkerDied("died", range(1), "signal 9")

    with pytest.warns(RuntimeWarning, match="sample 0 is left out"):
        run(RowEngine(build, plan(skip_errors=True), Workers(build, hurt).open, 1e-3))
    assert build.presence()[0] == SKIPPED
