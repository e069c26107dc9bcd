"""The tests of tests/cuda/test_cuda_loader.py on a simulated device, under a late schedule and several random ones.

A random schedule has the seed of its test, so the tests together see many schedules.
"""

import zlib

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import test_cuda_loader
import test_placement
from memfeed.building import commit
from memfeed.schema import values
from simulated_cuda import DeviceTensor, simulated
from test_cuda_loader import *  # noqa: F403
from test_cuda_loader import _few_batches_at_a_time, sources  # noqa: F401

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/cuda runs on it"),
    pytest.mark.skipif(
        not hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="this torch cannot have tensors on a simulated GPU"
    ),
]


@pytest.fixture(autouse=True)
def _cannot_be_simulated(request, monkeypatch):
    if "backward" in request.node.name:
        pytest.skip("autograd's threads ask the driver for the device, which is not simulated")
    monkeypatch.setattr(
        "memfeed.transforms.backends.passes.gpu_kernel", lambda device: None
    )  # Triton needs a real device
    write = commit.write_metadata

    def write_on_the_cpu(*arguments):
        with _disable_current_modes():  # tensordict makes tensors of its own class from memory
            write(*arguments)

    monkeypatch.setattr(commit, "write_metadata", write_on_the_cpu)
    check = values.check_class
    monkeypatch.setattr(
        values, "check_class", lambda value, *where: isinstance(value, DeviceTensor) or check(value, *where)
    )


def seed_of(test):
    return zlib.crc32(test.name.encode())


@pytest.fixture(autouse=True, params=["late", "random"])
def machine(request):
    with simulated(seed_of(request.node) if request.param == "random" else None) as made:
        yield made


# every two of a source, options and a placement meet in a test that is not long
COMBINATIONS = [
    pytest.param(source, options, placement, marks=() if (i + j + k) % 3 == 0 else pytest.mark.long)
    for i, source in enumerate(test_placement.SOURCES)
    for j, options in enumerate(test_placement.OPTIONS)
    for k, placement in enumerate(test_placement.PLACEMENTS)
]


class TestTransfer(test_cuda_loader.TestTransfer):
    steps = 10  # the staging buffers go round three times


class TestPlacements(test_cuda_loader.TestPlacements):
    @pytest.mark.parametrize(("source", "options", "placement"), COMBINATIONS, ids=str)
    def test_the_same_batches(self, sources, source, options, device, placement):  # noqa: F811
        super().test_the_same_batches(sources, source, options, device, placement)

    @pytest.fixture(autouse=True)
    def machine(self, request):
        """Run each of the many combinations under one schedule: half of them late."""
        seed = seed_of(request.node)
        with simulated(seed if seed % 2 else None) as made:
            yield made
