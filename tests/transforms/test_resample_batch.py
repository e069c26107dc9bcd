"""Resizing a whole batch in torch, without a loop over its images: against the images one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_batches import keys, pictures

from memfeed.transforms import (
    CenterCrop,
    Compose,
    Normalize,
    RandomAffine,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    Resampled,
    Resize,
)
from memfeed.transforms.params.resample import resample
from resample_cases import batches, resized, tolerance
from simulated_cuda import simulated

needs_simulation = pytest.mark.skipif(
    not hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="this torch cannot have tensors on a simulated GPU"
)


@st.composite
def cases(draw):
    image = draw(batches(least=1, dtypes=(torch.uint8, torch.int16, torch.float32, torch.float64)))
    return image, draw(resized(image.shape))


@settings(max_examples=150, derandomize=True)
@given(cases())
def test_a_batch_is_resized_as_its_images_are(case):
    image, change = case
    got = resample(image, *change.axes, change.mode, antialias=change.antialias)
    expected = change.all(image)
    assert got.dtype == expected.dtype
    atol = 0 if change.mode.startswith("nearest") else tolerance(image.dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_what_leaves_the_range_of_integers_is_cut_off():
    image = torch.tensor([0, 0, 255, 255], dtype=torch.uint8).expand(2, 1, 4, 4)
    zero = np.zeros(2, np.int64)
    change = Resampled(zero, zero, zero + 4, zero + 4, 9, 9, "bicubic")
    got = resample(image, *change.axes, "bicubic", antialias=True)
    assert int((got.int() - change.all(image).int()).abs().max()) <= 1
    assert set(got[0, 0, 0].tolist()) >= {0, 255}


def test_gradients_flow():
    image = pictures(2, 3, 9, 8, torch.float64).requires_grad_()
    change = RandomResizedCrop(5).make_params(image.shape, image.dtype, lambda draws, _=None: np.full((2, draws), 0.4))
    weights = torch.rand(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad((change.all(image) * weights).sum(), image)
    (got,) = torch.autograd.grad((resample(image, *change.axes, "bilinear", antialias=True) * weights).sum(), image)
    torch.testing.assert_close(got, expected)


NORMALIZE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@needs_simulation
@pytest.mark.parametrize(
    ("parts", "most"),
    [
        ([RandomResizedCrop(9), RandomHorizontalFlip(), NORMALIZE], 80),
        ([RandomResizedCrop(9, antialias=False)], 80),
        ([RandomResizedCrop(9, interpolation="bicubic")], 80),
        ([RandomResizedCrop(9, interpolation="nearest")], 3),
        ([Resize(12), CenterCrop(9), NORMALIZE], 80),
        ([RandomRotation(30)], 40),
        ([RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 5, "bilinear", fill=3)], 40),
    ],
    ids=lambda value: " ".join(type(part).__name__ for part in value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("seed", [None, 1])
def test_launches_do_not_depend_on_the_batch(monkeypatch, parts, most, seed):
    monkeypatch.setattr("memfeed.transforms.backends.passes.gpu_kernel", lambda device: None)
    transform, launches = Compose(parts), []
    for n in (2, 13, 24):
        images = pictures(n, 3, 24, 20)
        with simulated(seed) as machine:
            there = images.to("cuda")
            before, syncs = machine.devices[0].launches.total(), machine.syncs.total()
            got = transform.apply(there, keys(n))
            launches.append(machine.devices[0].launches.total() - before)
            assert machine.syncs.total() == syncs, machine.syncs
            got = got.cpu()
            assert not machine.errors
        expected = transform.reference(images, keys(n))
        near = (got.double() - expected.double()).abs() <= (1.01 if got.dtype == torch.uint8 else 1.01 / 255 / 0.224)
        assert near.double().mean() > 0.99
    assert launches[0] <= launches[1] == launches[2] <= most, launches
