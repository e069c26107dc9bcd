"""The tests of tests/cuda/test_cuda_loader.py on a simulated device, under a late schedule and several random ones."""

import pytest
import torch

from simulated_cuda import simulated
from test_cuda_loader import *  # noqa: F403
from test_cuda_loader import _few_batches_at_a_time  # noqa: F401

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/cuda runs on it")


@pytest.fixture(autouse=True, params=[None, 0, 1], ids=["late", "seed0", "seed1"])
def machine(request, monkeypatch):
    monkeypatch.setattr("memfeed.transforms.transform.gpu_kernel", lambda device: None)  # Triton needs a real device
    with simulated(request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def _skips(request):
    if "backward" in request.node.name:
        pytest.skip("autograd's threads ask the driver for the device")
