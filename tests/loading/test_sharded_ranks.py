"""placement="sharded" in processes that gloo joins."""

import json

import pytest
import torch

import memfeed
import sharded_worker
from forked_programs import SCRIPT, run_program
from support import Made

N = 403
RANKS = (2, 3, 4)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank has found out, by the number of ranks."""
    out = tmp_path_factory.mktemp("sharded ranks")
    samples = [(torch.full((3,), i), i) for i in range(N)]
    paths = [out / "a.mf", out / "b.mf"]
    for path, count in zip(paths, (N, N - 1), strict=True):
        memfeed.cache(Made(samples[:count]), path, progress=False)
    for world_size in RANKS:
        (out / str(world_size)).mkdir()
    run_program(SCRIPT, sharded_worker.__file__, *paths, out, *RANKS, at=out)
    return {
        world_size: [json.loads((out / str(world_size) / f"found-{rank}").read_text()) for rank in range(world_size)]
        for world_size in RANKS
    }


@pytest.fixture(params=RANKS)
def ranks(request, found):
    return found[request.param]


@pytest.mark.long
def test_every_row_of_an_epoch_comes_to_one_rank(ranks):
    for epoch in range(2):
        batches = [batch for rank in ranks for batch in rank["epochs"][epoch]]
        assert sorted(row for batch in batches for row in batch) == [*range(N)]
        assert len({len(rank["epochs"][epoch]) for rank in ranks}) == 1
    assert all(rank["epochs"][0] != rank["epochs"][1] for rank in ranks)
    assert max(rank["kept"] for rank in ranks) <= N // len(ranks) + 1
    assert all(sorted(rank["given"]) == [*range(N)] for rank in ranks)


def test_what_differs_between_ranks_is_one_error_on_all(ranks):
    last = len(ranks) - 1
    assert {rank["other store"] for rank in ranks} == {ranks[0]["other store"]}
    assert f"on rank {last}, and " in ranks[0]["other store"]
    assert ranks[0]["other store"].startswith("found store ")
    assert {rank["other seed"] for rank in ranks} == {ranks[0]["other seed"]}
    assert "found seed 1 on rank 1, and 0 on rank 0" in ranks[0]["other seed"]


def test_too_little_memory_on_one_rank_stops_all(ranks):
    *others, last = [rank["no memory"] for rank in ranks]
    assert last.startswith("found placement 'sharded' for field 0, which needs")
    assert set(others) == {f"rank {len(ranks) - 1} cannot begin: {last}"}
    assert {rank["no memory for all"] for rank in ranks} == {ranks[0]["no memory for all"]}
    assert "whose ranks keep" in ranks[0]["no memory for all"]
    assert {rank["again"] for rank in ranks} == {""}


def test_a_rank_that_does_not_begin_is_named_on_the_others(ranks):
    *others, _ = [rank["missing"] for rank in ranks]
    assert len(set(others)) == 1
    assert f'placement="sharded" begun on rank {len(ranks) - 1} within 1.5 s' in others[0]
