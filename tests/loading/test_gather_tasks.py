"""The gathers of an epoch as data: rows, sizes, positions, visits and masks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from memfeed.errors import LoaderError, RowError
from memfeed.loading.gather_tasks import rows_of_run, tasks_of_order, tasks_of_sampler
from memfeed.order.orders import Sequential, Shuffled
from memfeed.order.pieces import RankShards


def same(rows):
    return rows


@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 4),
    last=st.sampled_from(["repeat", "drop", "pad", "uneven"]),
    at_once=st.sampled_from([1, 3]),
    seed=st.integers(0, 5),
    steps_before=st.integers(0, 2),
)
def test_tasks_are_the_rows_of_the_shard(n, batch_size, world_size, last, at_once, seed, steps_before):
    order = Shuffled(n, seed, 0)
    whole = order(0, n)
    begin = min(steps_before * batch_size * world_size, n)
    for rank in range(world_size):
        shards = RankShards(n, batch_size, rank, world_size, last)
        found = []
        for task in tasks_of_order(order, shards, begin, None, at_once, repeats=False):
            assert len(task.ids) == task.size * len(task.positions)
            assert task.rows is task.ids
            for at, position in enumerate(task.positions):
                part = slice(at * task.size, (at + 1) * task.size)
                found.append((position, task.ids[part].tolist(), None if task.valid is None else task.valid[part]))
        assert [position for position, _, _ in found] == sorted(position for position, _, _ in found)
        wanted = [run.start + run.stride * step for run in shards.runs(begin, 1) for step in range(run.steps)]
        assert len(found) == len(wanted)
        for (_, rows, valid), start in zip(found, wanted, strict=True):
            places = np.arange(start, start + len(rows))
            assert rows == whole[places % n].tolist()
            assert valid is None or valid.tolist() == (places < n).tolist()


def test_a_run_goes_on_at_the_beginning():
    order, shards = Sequential(10), RankShards(10, 4, 1, 2, "repeat")
    (_, run) = shards.runs(0, 1)
    assert rows_of_run(order, run, np.arange(run.start, run.start + run.size)).tolist() == [
        place % 10 for place in range(run.start, run.start + run.size)
    ]


def test_a_view_gives_the_rows_of_its_base():
    (task,) = tasks_of_order(
        Sequential(4), RankShards(4, 4, 0, 1, "repeat"), 0, lambda rows: rows * 10, 1, repeats=True
    )
    assert task.rows.tolist() == [0, 1, 2, 3]
    assert task.ids.tolist() == [0, 10, 20, 30]
    assert task.visits.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("last", "sizes", "valid"), [("keep", [3, 2], None), ("drop", [3], None), ("pad", [3, 3], [True, True, False])]
)
def test_the_last_batch_of_a_sampler(last, sizes, valid):
    tasks = list(tasks_of_sampler([5, 6, 7, 8, 9], 3, last, None, same))
    assert [len(task.ids) for task in tasks] == sizes
    assert [task.positions[0].row for task in tasks] == [3, 5][: len(tasks)]
    if valid is not None:
        assert tasks[-1].ids.tolist() == [8, 9, 8]
        assert tasks[-1].valid.tolist() == valid


@pytest.mark.parametrize("size", [2, None])
def test_a_sampler_goes_on_after_a_position(size):
    torch.manual_seed(4)
    rows = torch.utils.data.RandomSampler(range(9))
    sampler = rows if size else BatchSampler(rows, 2, False)
    tasks = list(tasks_of_sampler(sampler, size, "keep", None, same))
    torch.manual_seed(77)
    for at, task in enumerate(tasks[:-1]):
        rest = list(tasks_of_sampler(sampler, size, "keep", task.positions[0], same))
        assert [one.ids.tolist() for one in rest] == [one.ids.tolist() for one in tasks[at + 1 :]]
        assert [one.visits.tolist() for one in rest] == [one.visits.tolist() for one in tasks[at + 1 :]]


def test_a_sampler_that_draws_other_rows_cannot_go_on():
    class Counting:
        begin = 0

        def __iter__(self):
            self.begin += 1
            return iter(range(self.begin, self.begin + 4))

    sampler = Counting()
    first, _ = tasks_of_sampler(sampler, 2, "keep", None, same)
    with pytest.raises(LoaderError, match="draws other rows than before"):
        next(tasks_of_sampler(sampler, 2, "keep", first.positions[0], same))


@pytest.mark.parametrize("rows", [[[[0, 1]]], ["a"], [1.5], [2**70], [True]])
def test_what_is_no_row_number(rows):
    with pytest.raises(RowError, match="from a sampler; expected row numbers"):
        next(tasks_of_sampler(rows, 1, "keep", None, same))


@pytest.mark.parametrize("drawn", [None, 1, torch.tensor(1)])
def test_what_is_no_list_of_rows(drawn):
    """None was taken for the end of the epoch: the batches after it were missing, without a word."""
    sampler = [[0], drawn, [2]]
    with pytest.raises(RowError, match=r"found .* from a batch sampler; expected a list of row numbers"):
        list(tasks_of_sampler(sampler, None, "keep", None, same))
