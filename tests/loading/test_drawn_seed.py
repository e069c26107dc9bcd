"""The seed of loaders that were given none, where several ranks have to draw the same."""

import json
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import memfeed
import memfeed.transforms as T
import seed_worker
from memfeed import Loader
from memfeed.loading import ranks as loading_ranks
from memfeed.loading.ranks import LoaderName, agreed_seed, next_name
from memfeed.system.messages import say_once

ROWS = torch.arange(40)
NAME = LoaderName("40 rows", 2)


# --- two ranks of torch.distributed, whose generators differ


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, seed_worker.__file__]
    running = [
        subprocess.Popen([*command, str(rank), str(out)], stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        for one in running:
            _, errors = one.communicate(timeout=120)
            assert one.returncode == 0, errors
    finally:
        for one in running:
            one.kill()
    return [json.loads((out / f"found-{rank}").read_text()) for rank in range(2)]


SHARED = ["early", "later", "given ranks", "generator", "assigned"]


@pytest.mark.parametrize("name", SHARED)
def test_ranks_read_one_order(ranks, name):
    first, second = (found[name] for found in ranks)
    assert first["seed"] == second["seed"]
    assert sorted(first["rows"] + second["rows"]) == list(range(40))


def test_samplers_of_ranks_draw_one_order(ranks):
    assert ranks[0]["sampler"] == ranks[1]["sampler"]


def test_loaders_differ(ranks):
    seeds = [ranks[0][name]["seed"] for name in [*SHARED, "sampler", "evaluation", "alone", "smaller"]]
    assert len(set(seeds)) == len(seeds)


def test_rank_0_may_read_alone(ranks):
    assert len(ranks[0]["evaluation"]["rows"]) == 20
    assert sorted(ranks[0]["alone"]["rows"]) == list(range(40))


def test_a_loader_that_rank_0_does_not_read_is_an_error(ranks):
    assert "found no seed from rank 0 for a loader of 40 rows, batch_size=7, shuffle=True" in ranks[1]["missing"]
    assert "else pass seed=" in ranks[1]["missing"]


# --- in one process


def test_others_wait_for_rank_0():
    store, found = torch.distributed.HashStore(), []
    waiting = threading.Thread(target=lambda: found.append(agreed_seed(store, 1, NAME, 0, 5)))
    waiting.start()
    assert agreed_seed(store, 0, NAME, 0, 2**62) == 2**62
    waiting.join(20)
    assert found == [2**62]
    assert agreed_seed(store, 0, NAME, 1, 8) == 8, "a second draw of the same loader"
    assert agreed_seed(store, 1, NAME, 1, 9) == 8


def test_names_follow_the_order_in_which_loaders_are_made():
    reads = "names of this test"
    assert [next_name(reads, rank).number for rank in (None, 0, 1, 0, None)] == [0, 0, 0, 1, 1]
    assert next_name(reads, 0).reads == reads, "the rank is no part of what ranks share"


def test_ranks_without_torch_distributed_take_a_number(capfd):
    say_once.cache_clear()
    rows = torch.arange(41)
    found = []
    for rank in range(2):
        torch.manual_seed(rank)
        loaders = [Loader(rows, 5, shuffle=True, ranks=(rank, 2), last="uneven") for _ in range(2)]
        found.append([torch.cat(list(loader)).tolist() for loader in loaders])
    for first, second in zip(*found, strict=True):
        assert sorted(first + second) == list(range(41))
    assert found[0][0] != found[0][1]
    assert capfd.readouterr().err.count("takes the number of like loaders made before it as its seed") == 1


def test_a_worker_of_dataloader_is_no_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert loading_ranks.joined_world_size() == 2
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: object())
    assert loading_ranks.joined_world_size() == 1


def test_workers_share_a_seed_that_was_not_drawn_before(tmp_path):
    """Two rows in two workers: the same crop as both have in one process under the base seed of DataLoader."""
    images = torch.arange(2 * 3 * 16 * 16).remainder(251).to(torch.uint8).view(2, 3, 16, 16)
    store = memfeed.cache(images, tmp_path / "s.mf", progress=False)
    transform = T.RandomCrop(4)
    loader = Loader(store, 1, transform=transform)
    torch.manual_seed(3)
    base = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(3)
    theirs = DataLoader(store, 1, sampler=loader.sampler, num_workers=2, collate_fn=loader.collate_fn)
    found = torch.cat(list(theirs))
    assert torch.equal(found, torch.cat(list(Loader(store, 1, seed=base, transform=transform))))


def test_a_loader_whose_first_epoch_is_a_later_one_says_that_it_goes_on_with_none(capfd):
    for epoch in (0, 1, 5):
        loader = Loader(torch.arange(11), 4, shuffle=True)
        loader.set_epoch(epoch)
        list(loader)
    assert capfd.readouterr().err.count("its order is not that of an earlier run") == 1


def test_an_order_that_is_not_drawn_is_that_of_every_run(capfd):
    """Lightning sets the epoch of the loaders of `predict` to that at which the fit ended."""
    loader = Loader(torch.arange(6), 2)
    loader.set_epoch(2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    shuffled = Loader(torch.arange(6), 2, shuffle=True)
    sampler = DistributedSampler(shuffled.dataset, 1, 0)
    divided = Loader(shuffled.dataset, 2, sampler=sampler, collate_fn=shuffled.collate_fn)
    divided.set_epoch(2)
    assert sorted(torch.cat(list(divided)).tolist()) == [*range(6)]
    assert "earlier run" not in capfd.readouterr().err
    given, resumed = (Loader(torch.arange(11), 4, shuffle=True, seed=seed) for seed in (3, None))
    given.set_epoch(6)
    list(given)
    resumed.load_state_dict(given.state_dict())
    list(resumed)
    assert "earlier run" not in capfd.readouterr().err
