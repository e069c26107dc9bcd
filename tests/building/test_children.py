"""What forked children ask their parent for."""

from __future__ import annotations

import os

import numpy as np
import pytest

from memfeed.building.service import ChildRequests
from memfeed.errors import BuildError, RemoteError, StoreError


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


def test_a_child_asks_and_sees_the_error_of_its_parent():
    requests = ChildRequests()
    child = os.fork()
    if not child:
        try:
            requests.ask(np.array([5]))
            while not requests.error_count():
                pass
            try:
                requests.raise_new(0)
            except RemoteError as error:
                os._exit(0 if str(error) == "s3://b/x: found no such object" else 1)
        finally:
            os._exit(2)
    while not len(found := requests.receive(1.0)):
        pass
    assert found.tolist() == [5]
    requests.report(RemoteError("s3://b/x: found no such object"))
    assert os.waitpid(child, 0)[1] == 0


def test_a_long_error_is_cut():
    requests = ChildRequests()
    requests.report(ValueError("x" * 10_000))
    requests.raise_new(1)
    with pytest.raises(BuildError, match="^x+$"):
        requests.raise_new(0)
    assert requests.error_count() == 1


def test_who_asks_after_the_end_gets_its_error():
    requests = ChildRequests()
    requests.report(RemoteError("found no connection"))
    requests.ask(np.array([1]))  # tried again
    requests.report(RemoteError("found that it was stopped"), is_last=True)
    with pytest.raises(RemoteError, match="was stopped"):
        requests.ask(np.array([1]))


def test_whoever_receives_can_be_woken():
    requests = ChildRequests()
    requests.wake()
    requests.ask(np.array([4]))
    assert requests.receive(60.0).tolist() == [4]


def test_a_process_that_has_ended_is_an_error(monkeypatch):
    requests = ChildRequests()
    monkeypatch.setattr(requests, "_pid", 2**22 + 1)  # above the largest id of a process
    with pytest.raises(StoreError, match="has ended"):
        requests.ask(np.array([1]))
