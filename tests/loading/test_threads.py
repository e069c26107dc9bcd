"""The ``threads`` of a Loader: how many gather, and what ``stats`` says about it."""

import threading

import pytest
import torch

import memfeed
from memfeed.errors import LoaderError
from memfeed.loading.background import Background
from memfeed.store import copied_rows
from memfeed.system import openmp


@pytest.fixture
def images():
    return torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 64 * 1024).contiguous()


@pytest.mark.skipif(not openmp.can_limit(), reason="torch has no OpenMP here")
@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_threads_as_given(images, threads, monkeypatch):
    used, select = set(), torch.index_select

    def watched(*arguments, **options):
        used.add((threading.get_ident(), torch.get_num_threads()))
        return select(*arguments, **options)

    monkeypatch.setattr(copied_rows.torch, "index_select", watched)
    loader = memfeed.Loader(images, 32, shuffle=True, seed=0, threads=threads)
    for _ in range(4):
        for batch in loader:
            assert torch.equal(batch[:, 0], batch[:, -1])
    assert (len({ident for ident, _ in used}) > 1) == (threads > 1)
    assert {count for _, count in used} == {1}
    assert loader.threads == threads
    assert loader.stats()["plan"]["threads"] == {"most": threads}


@pytest.mark.skipif(not openmp.can_limit(), reason="torch has no OpenMP here")
def test_by_default_the_choice_is_measured_and_shown(images):
    loader = memfeed.Loader(images, 32, shuffle=True, seed=0)
    assert loader.stats()["plan"]["threads"] == {}
    assert sum(len(batch) for batch in loader) == 256
    threads = loader.stats()["plan"]["threads"]
    assert 1 <= threads["gather"] <= threads["most"] <= torch.get_num_threads()


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, "2"])
def test_what_is_no_number_of_threads(threads):
    with pytest.raises(LoaderError, match=r"found threads=.*; expected an int"):
        memfeed.Loader(torch.arange(8), 2, threads=threads)


def test_batches_are_the_same_on_any_number_of_threads(images):
    epochs = [list(memfeed.Loader(images, 50, shuffle=True, seed=1, threads=threads)) for threads in (None, 1, 4)]
    for other in epochs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(epochs[0], other, strict=True))


@pytest.mark.skipif(not openmp.can_limit(), reason="torch has no OpenMP here")
def test_the_loaders_thread_has_no_team_of_its_own():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        counts = list(Background(iter(torch.get_num_threads() for _ in range(3)), 2))
        assert counts == [1, 1, 1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
