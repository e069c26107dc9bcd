"""The tests of tests/cuda/test_cuda_loader.py on a simulated device, under a late schedule and several random ones.

A test's random schedule has a seed of its own, so the tests together see many schedules.
"""

import zlib

import pytest
import torch

from simulated_cuda import simulated
from test_cuda_loader import *  # noqa: F403
from test_cuda_loader import _few_batches_at_a_time, sources  # noqa: F401

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/cuda runs on it")


@pytest.fixture(autouse=True, params=["late", "random"])
def machine(request, monkeypatch):
    if "backward" in request.node.name:
        pytest.skip("autograd's threads ask the driver for the device, which is not simulated")
    name = request.node.name.replace("late", "").replace("random", "")
    seed = zlib.crc32(name.encode())
    if "TestPlacements" in request.node.nodeid and (seed % 2 == 1) != (request.param == "random"):
        pytest.skip("each of these many combinations runs under one of the schedules")
    monkeypatch.setattr("memfeed.transforms.transform.gpu_kernel", lambda device: None)  # Triton needs a real device
    with simulated(seed if request.param == "random" else None) as made:
        yield made
