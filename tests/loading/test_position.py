"""Positions in an epoch as data: steps, targets, and what a state keeps of them."""

import json

import pytest

from memfeed.errors import LoaderError
from memfeed.loading.position import FINISHED, SamplerPosition, from_state, moved, rows_before, step_of, to_state
from memfeed.order.pieces import RankShards

IDENTITY = {"store": "abc", "rows": 100, "order": "shuffle=True"}


@pytest.mark.parametrize(
    ("row", "begin", "stride", "steps"),
    [(0, 0, 10, 0), (10, 0, 10, 1), (11, 0, 10, 2), (100, 95, 10, 1), (5, 5, 10, 0)],
)
def test_steps_to_a_row_count_a_partial_last_one(row, begin, stride, steps):
    assert step_of(row, begin, stride) == steps


def test_moves_stay_within_the_epoch():
    shards = RankShards(100, 10, 0, 2, "repeat")  # 20 rows a step, 5 steps
    assert moved(0, None, 0, 2, shards=shards, stride=10) == 40
    assert moved(0, 40, 0, -1, shards=shards, stride=10) == 20
    assert moved(0, 40, 0, 3, shards=shards, stride=10) == 100
    with pytest.raises(LoaderError, match=r"found skip\(4\) with 3 batches left in epoch 7"):
        moved(7, 40, 0, 4, shards=shards, stride=10)
    with pytest.raises(LoaderError, match=r"found rewind\(3\) at batch 2 of epoch 7"):
        moved(7, 40, 0, -3, shards=shards, stride=10)


def test_a_move_in_the_epoch_of_a_sampler_keeps_its_generators():
    position = SamplerPosition(6, "states", "hash")
    assert moved(0, position, 0, 2, shards=None, stride=3) == SamplerPosition(12, "states", "")
    assert moved(0, None, 0, 2, shards=None, stride=1) == SamplerPosition(2, "", "")


@pytest.mark.parametrize("position", [None, 40, SamplerPosition(40, "states", "hash")])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_state_gives_the_position_back(position, seed):
    state = json.loads(json.dumps(to_state(2, position, seed, IDENTITY)))
    assert from_state(state, IDENTITY, 100) == (2, position)
    assert state["row"] == rows_before(position)
    assert state["seed"] == ("" if seed is None else seed)
    assert from_state({**state, FINISHED: True}, IDENTITY, 100) == (3, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "found a state of version 2; expected 1"),
        ({"store": "other"}, "found a state with store 'other'; this loader has store 'abc'"),
        ({"row": 101}, "found a state at epoch 2, row 101"),
        ({"row": -1}, "found a state at epoch 2, row -1"),
        ({"epoch": True}, "found a state at epoch True"),
        ({"sampler": "{"}, "found a state whose sampler cannot be read"),
    ],
)
def test_a_state_that_does_not_fit(change, message):
    with pytest.raises(LoaderError, match=message):
        from_state({**to_state(2, 40, 1, IDENTITY), **change}, IDENTITY, 100)


@pytest.mark.parametrize("state", [None, [], {}, {"epoch": 1}])
def test_what_is_no_state(state):
    with pytest.raises(LoaderError, match=r"expected the dict that state_dict\(\) gave"):
        from_state(state, IDENTITY, 100)
