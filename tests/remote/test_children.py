"""What forked children ask their parent for."""

from __future__ import annotations

import os

import numpy as np
import pytest

from memfeed.errors import RemoteError
from memfeed.remote.children import ChildRequests


def test_chunks_that_are_asked_for_are_received_once():
    requests = ChildRequests()
    requests.ask(np.array([7, 3]))
    requests.ask(np.array([3, 9]))
    assert requests.receive(0.0).tolist() == [3, 7, 9]
    assert requests.receive(0.0).tolist() == []


def test_a_full_pipe_does_not_block():
    requests = ChildRequests()
    requests.ask(np.arange(100_000))
    assert 0 < len(requests.receive(0.0)) < 100_000


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_asks_and_sees_the_error_of_its_parent():
    requests = ChildRequests()
    child = os.fork()
    if not child:
        try:
            requests.ask(np.array([5]))
            while not requests.error_count():
                pass
            os._exit(0 if str(requests.last_error()) == "s3://b/x: found no such object" else 1)
        finally:
            os._exit(2)
    while not len(found := requests.receive(1.0)):
        pass
    assert found.tolist() == [5]
    requests.report(RemoteError("s3://b/x: found no such object"))
    assert os.waitpid(child, 0)[1] == 0


def test_a_long_error_is_cut():
    requests = ChildRequests()
    requests.report(RemoteError("x" * 10_000))
    assert set(str(requests.last_error())) == {"x"}
    assert requests.error_count() == 1


def test_a_process_that_has_ended_is_an_error(monkeypatch):
    requests = ChildRequests()
    monkeypatch.setattr(requests, "_pid", 2**22 + 1)  # above the largest id of a process
    with pytest.raises(RemoteError, match="has ended"):
        requests.ask(np.array([1]))
