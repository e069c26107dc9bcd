"""The settings of a loader: what kind of batches it gives, and which ranks it reads for."""

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from memfeed.errors import LoaderError
from memfeed.loading.ranks import present_ranks
from memfeed.loading.settings import Settings, as_int, row_and_list_samplers, warn_about_ranks
from memfeed.order.pieces import RankShards

LISTS = BatchSampler(SequentialSampler(range(4)), 2, False)


def made(**options):
    defaults = {
        "batch_size": 4, "last": "repeat", "sampler": None, "batch_sampler": None, "has_repeats": False, "device": None,
        "transform": None, "has_own_transform": False, "placement_requests": [], "prefetch": 2, "collate_fn": None,
        "returns_rows": False, "as_": "torch", "rank": None, "world_size": None,
    }  # fmt: skip
    return Settings(**(defaults | options))


@pytest.mark.parametrize(
    ("options", "true"),
    [
        ({}, {"has_own_order"}),
        ({"sampler": [1]}, set()),
        ({"batch_sampler": [[1]]}, set()),
        ({"batch_size": None}, {"has_own_order", "gives_samples"}),
        ({"batch_size": None, "batch_sampler": LISTS}, {"takes_lists"}),
        ({"collate_fn": list}, {"has_own_order", "collates_samples"}),
        ({"collate_fn": list, "has_own_transform": True}, {"has_own_order", "collates_samples", "finishes_samples"}),
        (
            {"batch_size": None, "has_own_transform": True},
            {"has_own_order", "gives_samples", "collates_samples", "finishes_samples"},
        ),
        ({"has_own_transform": True}, {"has_own_order"}),
    ],
)
def test_the_kind_of_batches(options, true):
    names = ("has_own_order", "takes_lists", "gives_samples", "collates_samples", "finishes_samples")
    settings = made(**options)
    assert {name for name in names if getattr(settings, name)} == true
    assert settings.rows_a_batch == (options.get("batch_size", 4) or 1)


def test_samplers_of_rows_and_of_lists():
    assert row_and_list_samplers(4, [1], None) == ([1], None)
    assert row_and_list_samplers(1, None, [[1]]) == (None, [[1]])
    assert row_and_list_samplers(None, LISTS, None) == (None, LISTS)
    assert row_and_list_samplers(None, [1], None) == ([1], None)


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (0, 1)),  # of no launcher
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, (1, 4)),
        ({"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}, (1, 4)),
        ({"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, (0, 1)),
        ({"RANK": "one", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, (0, 1)),
    ],
)
def test_the_ranks_of_a_launcher(environment, ranks, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert present_ranks() == made().ranks() == ranks
    assert made(rank=2, world_size=3).ranks() == (2, 3)
    assert made(sampler=[1]).ranks() == (0, 1)
    shards = made(rank=2, world_size=3).shards(100)
    assert (shards.rank, shards.world_size, shards.batch_size) == (2, 3, 4)
    assert made(by_length=True).shards(100).batch_size == 1


def test_ranks_that_change_are_reported():
    with pytest.warns(UserWarning, match="found 2 ranks where this loader gave its last epoch to 1"):
        warn_about_ranks(RankShards(8, 2, 1, 2, "repeat"), 1, "rows")
    with pytest.warns(
        UserWarning, match="found 9 rows for 2 ranks: 1 rows from the beginning of the order are repeated"
    ):
        warn_about_ranks(RankShards(9, 2, 0, 2, "repeat"), None, "rows")
    warn_about_ranks(RankShards(8, 2, 0, 2, "repeat"), 2, "rows")


def test_ranks_that_drop_all_rows_warn():
    """A DistributedSampler divides the rows first, so a DataLoader has a batch here; a training had no step."""
    with pytest.warns(UserWarning, match="found 10 rows for 3 ranks with drop_last=True; expected 12 for a batch"):
        warn_about_ranks(RankShards(10, 4, 0, 3, "drop"), None, "rows")
    warn_about_ranks(RankShards(10, 4, 0, 3, "drop"), 3, "rows")
    warn_about_ranks(RankShards(10, 4, 1, 3, "drop"), None, "rows")
    warn_about_ranks(RankShards(12, 4, 0, 3, "drop"), None, "rows")
    warn_about_ranks(RankShards(3, 4, 0, 1, "drop"), None, "rows")


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1])
def test_what_is_no_int(value):
    with pytest.raises(LoaderError, match="found n=.*; expected an int of at least 0"):
        as_int("n", value, 0)


def test_an_int_that_is_too_large():
    with pytest.raises(LoaderError, match="found n=11; expected at most 10"):
        as_int("n", 11, 0, 10)
    assert as_int("n", 10, 0, 10) == 10
