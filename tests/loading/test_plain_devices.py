"""Devices without streams of ours, on a fake: each batch is moved by the caller, with one call of ``to``."""

import threading

import pytest
import torch

import memfeed.transfer.to_device as to_device
from memfeed import Loader
from memfeed.transfer.streams import streams_of
from memfeed.transfer.transfer import Transfer


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_batches_are_moved_in_the_callers_thread_one_by_one(kind, monkeypatch):
    moved = []

    def fake(tree, device, *, non_blocking):
        moved.append((device.type, non_blocking, threading.current_thread()))
        return tree

    monkeypatch.setattr("memfeed.transfer.transfer.to_device", fake)
    monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: True)
    data = torch.arange(40).view(20, 2), torch.arange(20)
    loader = Loader(data, 4, device=kind)
    found = list(loader)
    assert streams_of(torch.device(kind)) is None
    assert type(loader._epochs.reader.prepare().maker.transfer) is Transfer
    assert moved == [(kind, False, threading.current_thread())] * 5
    assert torch.equal(torch.cat([y for _, y in found]), data[1])


def test_copies_to_mps_block():
    assert "mps" in to_device._BLOCKING_DEVICES
