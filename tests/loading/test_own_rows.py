"""Ranks that have rows of their own, in processes of torch.multiprocessing that gloo joins."""

import json

import pytest
import torch

import memfeed
import own_rows_worker
from forked_programs import SCRIPT, Program

ROWS = 20  # of the store of each rank


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    out = tmp_path_factory.mktemp("stores")
    rows = [torch.arange(ROWS) + 100 * rank for rank in range(2)]
    return [memfeed.cache(own, out / f"{rank}.mf", progress=False).path for rank, own in enumerate(rows)]


def run(scenario, paths, out):
    program = Program(SCRIPT, own_rows_worker.__file__, scenario, out, *paths, at=out)
    assert program.wait(120) == 0, program.err.read_text()
    return [json.loads((out / f"found-{rank}").read_text()) for rank in range(2)], program.err.read_text()


@pytest.fixture(scope="module")
def own(paths, tmp_path_factory):
    return run("own stores", paths, tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_reads_all_rows_of_its_own(own, rank):
    found, rows = own[0][rank], [100 * rank + row for row in range(ROWS)]
    assert sorted(found["epoch"]) == rows
    assert found["epoch"] != rows, "it shuffles"
    assert (found["before"], found["after"]) == (3, 5)
    assert sorted(found["begun"] + found["left"]) == rows
    assert found["resumed"] == found["left"]
    assert found["skipped"] == rows[8:]
    assert found["view"] == [4 * rank + row for row in range(4)]
    assert found["memory"] == [4 * rank + row for row in range(4)]


def test_one_message_says_so(own):
    assert own[1].count("so each reads all its rows: 5 batches on rank 0") == own[1].count("memfeed:") == 1
    assert "pass ranks=(0, 1)" in own[1]


def test_a_store_that_all_ranks_have_is_divided(own):
    first, second = (found["shared"] for found in own[0])
    assert len(first) == len(second) == ROWS // 2
    assert sorted(first + second) == list(range(ROWS))


def test_given_ranks_are_obeyed(own):
    assert [len(found["given"]) for found in own[0]] == [ROWS // 2] * 2


def test_other_numbers_of_batches_are_an_error_on_each_rank(own):
    errors = {found["unequal"] for found in own[0]}
    assert len(errors) == 1
    assert "with 4 batches on rank 1 and 2 on rank 0; expected the same number" in errors.pop()
    assert [len(found["allowed"]) for found in own[0]] == [10, 20]


@pytest.mark.long
def test_a_rank_that_comes_too_late_is_told(paths, tmp_path):
    (first, second), errors = run("late", paths, tmp_path)
    assert len(first["rows"]) == ROWS // 2
    assert "rank 1 has not begun a loader with batch_size=4, shuffle=True within 0 s" in errors
    assert "found another store on rank 1 than on rank 0, which did not wait longer" in second["error"]


@pytest.fixture(scope="module")
def one_store(paths, tmp_path_factory):
    return run("one store", paths, tmp_path_factory.mktemp("one"))


@pytest.mark.long
def test_loaders_that_all_ranks_begin_are_divided(one_store):
    first, second = one_store[0]
    for number, (mine, theirs) in enumerate(zip(first["folds"], second["folds"], strict=True)):
        assert sorted(mine + theirs) == [100 * number + row for row in range(ROWS)]
    assert len(first["alone"]) == ROWS // 2


def test_a_chunk_of_each_rank_is_not_divided_after_a_store_that_all_have(one_store):
    ranks, errors = one_store
    assert sorted(row for found in ranks for row in found["chunk"]) == list(range(ROWS))
    assert errors.count("memfeed:") == errors.count("each of the 2 ranks has a store of its own") == 1
