"""The tests of tests/cuda/test_cuda_loader.py on a simulated device, under a late schedule and several random ones.

The first run of each test is under the late schedule. A random one follows, whose seed is the test's own, so that the
many combinations of placements and stores see many schedules.
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
    if "TestPlacements" in request.node.nodeid and zlib.crc32(request.node.name.encode()) % 2:
        pytest.skip("one schedule is enough for each of these combinations")
    monkeypatch.setattr("memfeed.transforms.transform.gpu_kernel", lambda device: None)  # Triton needs a real device
    with simulated(None if request.param == "late" else zlib.crc32(request.node.name.encode())) as made:
        yield made
