"""The number of torch's threads, set for one thread alone."""

import threading

import pytest
import torch

from memfeed.system import openmp

pytestmark = pytest.mark.skipif(not openmp.can_limit(), reason="torch has no OpenMP here")


@pytest.fixture(autouse=True)
def three_threads_of_torch():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_a_limit_holds_in_the_block_and_in_its_thread():
    with openmp.at_most(1):
        assert torch.get_num_threads() == 1
        assert in_a_thread(torch.get_num_threads) == 3
    assert torch.get_num_threads() == 3


def test_a_limit_is_taken_back_after_an_exception():
    with pytest.raises(KeyError), openmp.at_most(2):
        raise KeyError
    assert torch.get_num_threads() == 3


def test_a_limit_gives_no_more_threads_than_there_were():
    with openmp.at_most(8):
        assert torch.get_num_threads() == 3


def test_one_thread_from_now_on_in_one_thread_alone():
    def call():
        openmp.use_one_thread()
        torch.ones(1 << 20).sum()  # the first use of torch in a thread sets the number
        return torch.get_num_threads()

    assert in_a_thread(call) == 1
    assert torch.get_num_threads() == 3


def test_without_openmp_nothing_is_limited(monkeypatch):
    monkeypatch.setattr(openmp, "_openmp", lambda: None)
    assert not openmp.can_limit()
    openmp.use_one_thread()
    with openmp.at_most(1):
        assert torch.get_num_threads() == 3
