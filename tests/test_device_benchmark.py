"""The GPU's benchmark in its short form on a simulated device, so that the first run on a GPU meets no slip."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import device as benchmark
import memfeed
from simulated_cuda import simulated

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: the simulation would replace it"),
    pytest.mark.skipif(
        not hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="this torch cannot have tensors on a simulated GPU"
    ),
]
SCRIPT = Path(benchmark.__file__)


@pytest.fixture(autouse=True)
def _no_thread_left():
    """Replace the fixture of all tests: torch keeps its threads for page-locked memory."""


class Model(torch.nn.Module):
    """In the place of a ResNet-50, whose parameters the simulated device cannot have."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def to(self, device, memory_format):
        assert memory_format is torch.channels_last
        return self

    def forward(self, images):
        assert images.shape[1:] == (3, 224, 224)
        assert images.dtype is torch.bfloat16
        return images.float().mean((1, 2, 3))[:, None] * torch.ones(1000, device=images.device)


def run(path, monkeypatch, *arguments):
    """Run the benchmark as from the command line and return its result."""
    monkeypatch.setattr("memfeed.transforms.backends.passes.gpu_kernel", lambda device: None)  # Triton needs a device
    # autograd's threads ask the driver for the device
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)
    monkeypatch.setattr("torchvision.models.resnet50", Model)
    # a store on the disk has tensors of a class that the simulation does not know
    monkeypatch.setattr(memfeed, "cache", lambda columns, path, progress: memfeed.Loader(columns, 1).store)
    monkeypatch.setattr(sys, "argv", ["device", "--quick", "--device", "cuda", "--json", str(path), *arguments])
    with simulated():
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return json.loads(path.read_text())


def test_every_part_runs_on_a_device(tmp_path, monkeypatch):
    # the others need stores of JPEG rows, which the simulation has not: tests/test_benchmarks.py runs them on the CPU
    parts = ",".join(part for part in benchmark.PARTS if part not in ("decoding", "photo_epochs"))
    result = run(tmp_path / "device-cuda.json", monkeypatch, "--parts", parts)
    assert result["failed"] == {}
    assert result["input"]["device"] == "a simulated GPU"
    assert {"pinned", "mapped", "device", "bare gather over the bus"} <= {*result["gigabytes_per_second"]["images 32"]}
    assert "one copy a row" in result["gigabytes_per_second"]["images 256"]
    assert "one copy a row" not in result["gigabytes_per_second"]["images 32"]
    assert {"memfeed", "tutorial", "torchvision v2, one crop for all"} <= {*result["median_seconds"]["augmentation"]}
    assert any("ResNet-50" in name for name in result["median_seconds"])
    assert len(result["gap_shares"]) == 1
    assert set(result["skipped"]) >= {"FFCV", "DALI"}
    limits = {check["what"]: check["limit"] for check in result["checks"]}
    assert {limits[what] for what in limits if ", mapped: of the bare" in what} == {0.9}
    assert limits["training: one batch reused / fed"] == 0.99
    assert limits["resident, of the copy's rate"] == limits["augmentation, of copy bandwidth"] == 0.6


def test_a_part_that_fails_is_written_down_and_the_others_follow(tmp_path, monkeypatch):
    def fails(*args):
        raise RuntimeError("no device")

    monkeypatch.setattr("memfeed.random.Keys.__post_init__", fails)
    with pytest.raises(SystemExit):
        run(tmp_path / "a.json", monkeypatch, "--parts", "augmenting,resident")
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["failed"] == {"augmenting": "RuntimeError: no device"}
    assert any(name.startswith("resident") for name in result["median_seconds"])


def test_a_full_run_is_as_large_as_it_says():
    sizes = benchmark.sizes_of(torch.device("cuda"), quick=False)
    rows, epochs = sizes.resident
    assert rows * 3 * 64 * 64 >= 20 * 10**9
    assert epochs >= 64
    assert sizes.augmented >= (4096, 50)
    # the turns of all parts, with as much again for what they prepare
    assert 2 * sizes.seconds * (len(benchmark.PARTS) + 2) <= 10 * 60
