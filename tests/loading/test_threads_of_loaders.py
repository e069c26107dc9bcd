"""The threads of a Loader: how many gather, and what ``stats`` says about it."""

import threading

import pytest
import torch

import memfeed
from memfeed.loading.background import Background
from memfeed.store import copied_ranges
from memfeed.system import openmp


@pytest.fixture
def images():
    return torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 64 * 1024).contiguous()


@pytest.fixture
def torch_threads():
    """Return a function that sets how many threads torch may use; afterwards they are as before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.skipif(not openmp.can_limit(), reason="torch has no OpenMP here")
def test_one_thread_where_torch_may_use_one(images, torch_threads, monkeypatch):
    used, select = set(), torch.index_select

    def watched(*arguments, **options):
        used.add((threading.get_ident(), torch.get_num_threads()))
        return select(*arguments, **options)

    monkeypatch.setattr(copied_ranges.torch, "index_select", watched)
    torch_threads(1)
    loader = memfeed.Loader(images, 32, shuffle=True, seed=0)
    for _ in range(4):
        for batch in loader:
            assert torch.equal(batch[:, 0], batch[:, -1])
    assert {count for _, count in used} == {1}
    assert loader.stats()["plan"]["threads"] == {"most": 1}


@pytest.mark.skipif(not openmp.can_limit(), reason="torch has no OpenMP here")
def test_by_default_the_choice_is_measured_and_shown(images):
    loader = memfeed.Loader(images, 32, shuffle=True, seed=0)
    assert loader.stats()["plan"]["threads"] == {}
    assert sum(len(batch) for batch in loader) == 256
    threads = loader.stats()["plan"]["threads"]
    assert 1 <= threads["gather"] <= threads["most"] <= torch.get_num_threads()


def test_batches_are_the_same_on_any_number_of_threads(images, torch_threads):
    epochs = []
    for threads in (1, 2, 4):
        torch_threads(threads)
        epochs.append(list(memfeed.Loader(images, 50, shuffle=True, seed=1)))
    for other in epochs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(epochs[0], other, strict=True))


@pytest.mark.skipif(not openmp.can_limit(), reason="torch has no OpenMP here")
def test_the_loaders_thread_has_no_team_of_its_own(torch_threads):
    torch_threads(3)
    counts = list(Background(iter(torch.get_num_threads() for _ in range(3)), 2))
    assert counts == [1, 1, 1]
    assert torch.get_num_threads() == 3
