"""The GPU kernel in Triton's interpreter, on the CPU. Run by test_kernel in a process of its own: once imported, Triton
stays as it is, and the interpreter leaves traces in it."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kernel_cases import LAYOUTS, by_turns, cases, check, images
from memfeed.random import Keys
from memfeed.transforms import (
    Affine,
    CenterCrop,
    ColorJitter,
    Compose,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    ToDtype,
    Transform,
    Window,
)
from memfeed.transforms.backends import kernel

# Triton 3.2 with NumPy 2 warns in its interpreter
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@settings(max_examples=int(os.environ["EXAMPLES"]), deadline=None, derandomize=True)
@given(cases())
def test_the_kernel_gives_what_torch_gives(case):
    image, window, affine, layout = case
    before = image.clone()
    got = kernel.fused(image, [] if window is None else [window], affine, layout)
    assert torch.equal(image, before)
    if got is image:
        assert window is None
        assert affine == Affine(image.dtype)
    else:
        check(got, image, window, affine, layout if kernel.fits(image, window, affine) else None, truncates=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("c", [1, 3])
def test_several_tiles(c, layout):
    image = images(2, c, 140, 40, torch.uint8)
    turned = Window.whole(image.shape, hflip=image.numpy()[:, 0, 0, 0] >= 0, fill=3)
    check(kernel.launch(image, turned, None, layout), image, turned, None, layout)
    affine = Affine(torch.bfloat16, (0.5,) * c, tuple(range(c)))
    check(kernel.launch(image, turned, affine, layout), image, turned, affine, layout, truncates=True)


def test_offsets_beyond_32_bits():
    memory = torch.empty(2**31 + 64, dtype=torch.uint8)  # pages that nobody touches cost nothing
    image = memory.as_strided((3, 1, 2, 2), (2**30, 4, 2, 1))
    image[:] = torch.arange(12).view(3, 1, 2, 2)
    got = kernel.launch(image, None, Affine(torch.float32), torch.contiguous_format)
    assert got.flatten().tolist() == list(range(12))
    assert kernel.fits(image, None, None)
    assert not kernel.fits(memory.as_strided((1, 2, 2, 2), (0, 2**31 - 3, 2, 1)), None, None)


@pytest.mark.parametrize(
    ("dtype", "target", "fill", "fits"),
    [
        (torch.uint8, torch.float32, 255, True),
        (torch.int64, torch.float32, 2**24 + 1, False),
        (torch.float64, torch.float32, 0.5, True),
        (torch.uint8, torch.float64, 0, False),
        (torch.uint8, torch.int32, 0, False),
        (torch.float8_e5m2, torch.float32, 0, False),
    ],
)
def test_what_fits(dtype, target, fill, fits):
    image = torch.zeros(1, 1, 2, 2, dtype=dtype)
    assert kernel.fits(image, Window.whole(image.shape, fill=fill), Affine(target)) == fits


class Interpreted(Compose):
    """A Compose that takes the path of a GPU."""

    def _fused_pass(self, device, allocator):
        return lambda image, changes, affine: kernel.fused(image, changes, affine, self.memory_format)


class Negative(Transform):
    """A transform that no fused path knows."""

    def make_params(self, shape, dtype, uniform):
        return uniform(1)[:, 0] < 0.5

    def transform(self, image, params):
        return torch.where(torch.from_numpy(params)[:, None, None, None], image.flip(1), image)


NORMALIZE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


SEQUENCES = [
    [RandomCrop(20), RandomHorizontalFlip(), NORMALIZE],
    [RandomCrop(32, padding=9, fill=(1, 2, 3)), RandomVerticalFlip(), NORMALIZE, ToDtype(torch.float16)],
    [RandomCrop(32, padding=9), RandomCrop(36, padding=9, fill=7), NORMALIZE],
    [RandomResizedCrop(16), RandomHorizontalFlip(), ToDtype(torch.float32, scale=True)],
    [ToDtype(torch.float32, scale=True), ColorJitter(0.3, 0.3), NORMALIZE, RandomErasing(), RandomCrop(8)],
    [RandomHorizontalFlip(), CenterCrop((37, 21)), NORMALIZE],
    [RandomResizedCrop(16, (2, 3)), CenterCrop((19, 13)), NORMALIZE],
    [RandomCrop(20), NORMALIZE, RandomErasing(0.8, value=(1, 2, 3))],
    [RandomCrop(20), RandomHorizontalFlip(), NORMALIZE, RandomErasing(0.8, value="random")],
    [RandomErasing(0.8, value=9), RandomErasing(0.8), RandomCrop(20), NORMALIZE],
    [ToDtype(torch.float64, scale=True), RandomErasing(0.8, value="random")],
    [RandomRotation(20), Negative(), RandomHorizontalFlip(), NORMALIZE],
    [ToDtype(torch.float64, scale=True), RandomCrop(8), NORMALIZE],
    [ToDtype(torch.int32), RandomCrop(8)],
]


@pytest.mark.parametrize(("parts", "layout"), by_turns(SEQUENCES))
def test_sequences(parts, layout):
    batch, keys = images(4, 3, 32, 30, torch.uint8), Keys(0, 0, torch.arange(4))
    transform = Interpreted(parts, memory_format=layout)
    got, expected = transform.apply(batch, keys), transform.reference(batch, keys)
    assert got.is_contiguous(memory_format=layout)
    atol = 1e-5 if got.dtype != torch.float16 else 2e-3
    if isinstance(parts[0], RandomResizedCrop):  # bytes: the CPU rounds them between rows and columns
        atol = 1.01 / 255 / (0.224 if NORMALIZE in parts else 1)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("value", [0, (1, 2, 3), "random"])
def test_boxes_are_erased_in_the_same_run(monkeypatch, value):
    runs = []
    monkeypatch.setattr(kernel, "launch", lambda *args, launch=kernel.launch: runs.append(1) or launch(*args))
    batch, keys = images(4, 3, 32, 30, torch.uint8), Keys(0, 0, torch.arange(4))
    transform = Interpreted([RandomCrop(20), NORMALIZE, RandomErasing(1.0, value=value)])
    torch.testing.assert_close(transform.apply(batch, keys), transform.reference(batch, keys), rtol=1e-5, atol=1e-5)
    assert len(runs) == 1


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int64, torch.float8_e5m2]
)
def test_masks_of_any_dtype_take_the_kernel(monkeypatch, dtype):
    runs = []
    monkeypatch.setattr(kernel, "launch", lambda *args, launch=kernel.launch: runs.append(1) or launch(*args))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    mask = torch.randint(0, 2, (3, 1, 9, 11)).to(bits)
    window = Window.whole(mask.shape, top=np.array([0, -2, 3]), left=np.array([1, 4, -3]), height=7, width=8)
    got = kernel.fused(mask.view(dtype), [window], None, torch.contiguous_format)
    assert got.dtype is dtype
    assert torch.equal(got.view(bits), window.all(mask))
    assert len(runs) == 1
