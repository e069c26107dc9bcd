"""Rows that are read and written: reports, failures, samples read together, and buffers that are used again."""

import numpy as np
import pytest
import torch

from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.building.partial import ABSENT, SKIPPED, WRITTEN
from memfeed.building.space import Extents
from memfeed.convert.row_worker import REREAD, RowWorker
from memfeed.convert.watchdog import Watchdog
from memfeed.convert.write_run import WritePlan
from memfeed.errors import SampleError, SchemaError
from memfeed.schema.infer import infer
from memfeed.schema.tree import Flattener
from memfeed.store import ragged
from support import Made

N = 12
FOUND = infer([{"x": torch.zeros(2), "s": "a"}])


def sample(i):
    return {"x": torch.full((2,), float(i)), "s": f"n{i}"}


@pytest.fixture
def build(tmp_path):
    with claim(tmp_path / "s.mf") as root:
        yield Build.begin(root, FOUND.schema, N, None)


def worker_of(build, dataset, *, known=None, number=None, **plan):
    return RowWorker(dataset, build, WritePlan(Flattener(FOUND.structure), **plan), Watchdog(2), number, known)


def values(build, rows):
    return [ragged.read_row(build.root, FOUND.schema.fields[1], row).buffers[0].tobytes().decode() for row in rows]


def bad_at(*bad):
    def make(i):
        if i in bad:
            raise OSError("unreadable")
        return sample(i)

    return Made(make, N)


@pytest.mark.parametrize("row_bytes", [1.0, 1e9])
def test_rows_are_written_and_reported(build, row_bytes):
    worker = worker_of(build, Made(sample, N), row_bytes=row_bytes)
    report = worker.write([2, 3, 7])
    assert (report.row_count, report.failed, report.skipped_count) == (3, [], 0)
    assert np.flatnonzero(build.presence() == WRITTEN).tolist() == [2, 3, 7]
    assert values(build, [2, 3, 7]) == ["n2", "n3", "n7"]
    worker.close()


def test_nothing_is_read_after_a_row_that_fails(build):
    report = worker_of(build, bad_at(3)).write([1, 3, 5])
    ((row, failure),) = report.failed
    assert (row, type(failure.error), type(failure.cause)) == (3, SampleError, OSError)
    assert np.flatnonzero(build.presence()).tolist() == [1]


def test_a_store_that_is_read_gets_the_rows_around_it(build):
    report = worker_of(build, bad_at(3), is_read=True).write([5, 1, 3])
    assert [row for row, _ in report.failed] == [3]
    assert np.flatnonzero(build.presence() == WRITTEN).tolist() == [1, 5]
    again = worker_of(build, Made(sample, N), is_read=True).write([1, 3, 5])
    assert again.row_count == 1  # the others are there


def test_rows_are_left_out_on_request(build):
    report = worker_of(build, bad_at(3, 5), skip_errors=True).write([1, 3, 5, 7])
    assert (report.row_count, report.skipped_count, report.failed) == (2, 2, [])
    assert build.presence()[[1, 3, 5, 7]].tolist() == [WRITTEN, SKIPPED, SKIPPED, WRITTEN]


def test_a_sample_of_another_structure_names_its_row(build):
    dataset = Made(lambda i: sample(i) if i != 3 else {"x": torch.zeros(2)}, N)
    ((row, failure),) = worker_of(build, dataset, skip_errors=True).write([1, 3]).failed
    assert row == 3
    assert isinstance(failure.error, SchemaError)


def test_samples_that_are_known_are_not_read(build):
    read = []
    worker = worker_of(build, Made(lambda i: read.append(i) or sample(i), N), known={2: sample(2)})
    worker.write([1, 2])
    assert read == [1]
    assert values(build, [2]) == ["n2"]


class Together(Made):
    def __init__(self, get, n=N):
        super().__init__(sample, n)
        self.get, self.asked = get, []

    def __getitems__(self, rows):
        self.asked.append(list(rows))
        return self.get(rows)


BUFFER = {"x": torch.zeros(2), "s": "n0"}


@pytest.mark.parametrize(
    "get",
    [
        lambda rows: [sample(i) for i in rows],
        lambda rows: [sample(i) for i in rows][:-1],
        lambda rows: [BUFFER for _ in rows],
        lambda rows: 1 / 0,
    ],
    ids=["right", "too few", "one buffer", "raises"],
)
def test_samples_are_read_together_where_that_gives_each(build, get):
    dataset = Together(get)
    worker = worker_of(build, dataset)
    worker.write([1, 2, 3])
    worker.write([4, 5])
    assert values(build, [1, 2, 3, 4, 5]) == ["n1", "n2", "n3", "n4", "n5"]
    assert len(dataset.asked) == (1 if dataset.asked[1:] == [] else 2)


def test_a_list_is_read_now_and_written_later(build):
    first = Extents(build.root).begin_lists()
    worker = worker_of(build, Made(sample, N), number=0)
    seen = []
    one = worker.read(first, [3, 1], lambda: seen.append(1))
    assert (one.rows, len(seen)) == ([1, 3], 2)
    assert (build.presence() == ABSENT).all()
    assert worker.extents.is_placed(first)
    report = worker.write_list(one)
    assert report.row_count == 2
    assert values(build, [1, 3]) == ["n1", "n3"]


def test_no_list_is_written_after_one_that_failed(build):
    first = Extents(build.root).begin_lists()
    worker, other = worker_of(build, bad_at(3), number=0), worker_of(build, Made(sample, N), number=1)
    one = worker.read(first, [1, 3, 4], int)
    assert one.rows == [1]
    assert [row for row, _ in one.report.failed] == [3]
    other.read(first + 1, [5], int)
    assert other.extents.is_left_out(first + 1)


def test_a_list_of_which_no_row_can_be_read(build):
    first = Extents(build.root).begin_lists()
    worker = worker_of(build, bad_at(3, 4), number=0, skip_errors=True)
    other = worker_of(build, Made(sample, N), number=1)
    one = worker.read(first, [3, 4], int)
    assert (one.rows, one.report.skipped_count, one.report.failed) == ([], 2, [])
    two = other.read(first + 1, [5], int)
    assert worker.extents.is_placed(first)
    assert other.extents.is_placed(first + 1)
    assert worker.write_list(one).row_count == 0
    assert other.write_list(two).row_count == 1
    failing = worker_of(build, bad_at(7), number=0)
    failed = failing.read(first + 2, [7, 8], int)
    assert [row for row, _ in failed.report.failed] == [7]
    assert values(build, [5]) == ["n5"]


def test_a_comparison_on_request(build):
    assert worker_of(build, Made(sample, N), number=1).do(REREAD).worker == 1
    assert worker_of(build, Made(sample, N)).do([0]).row_count == 1
