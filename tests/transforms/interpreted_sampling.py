"""The kernels that resize and warp, in Triton's interpreter, on the CPU; see interpreted_kernel."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from image_batches import keys, pictures

from kernel_cases import by_turns
from memfeed.transforms import (
    CenterCrop,
    Compose,
    Normalize,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resampled,
    Resize,
    ToDtype,
)
from memfeed.transforms.backends import kernel, sampling, sampling_kernels
from resample_cases import LAYOUTS, MODES, sampled_cases, share_apart
from simulated_cuda import reference, simulated

# Triton 3.2 counts loops with arrays of one number
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
needs_simulation = pytest.mark.skipif(
    not hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="this torch cannot have tensors on a simulated GPU"
)
EXAMPLES = int(os.environ["EXAMPLES"]) * 2 // 3
SLOW = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, phases=[Phase.generate])


def check(case, allowed):
    image, sampled, _, affine, _ = case
    if sampling.fits(image, sampled, affine):
        before = image.clone()
        assert share_apart(sampling.launch(*case), *case) <= allowed
        assert torch.equal(image, before)


@SLOW
@given(sampled_cases(12, 14, 2, kinds=("resize",)))
def test_boxes_are_resized_as_torch_does(case):
    check(case, 0)


@SLOW
@given(sampled_cases(12, 14, 2, kinds=("warp",)))
def test_images_are_warped_as_torch_does(case):
    check(case, 0.05 if case[1].mode == "nearest" else 0)  # a point between two pixels may be rounded to either


@pytest.mark.parametrize(("mode", "antialias"), MODES)
def test_boxes_that_shrink_and_grow(mode, antialias):
    """Noise, whose edges show whether what lies beyond a box counts."""
    image = torch.rand(2, 3, 13, 11, generator=torch.Generator().manual_seed(0))
    top, left, height, width = np.array([[0, 2], [0, 1], [13, 9], [11, 4]])
    change = Resampled(top, left, height, width, 6, 8, mode, antialias)
    got = sampling.launch(image, change, None, None, torch.contiguous_format)
    torch.testing.assert_close(got, change.all(image), rtol=0, atol=2e-5)


class Queued:
    """A kernel whose runs are queued on the simulated device, as launches."""

    def __init__(self, kernel, machine):
        self.kernel, self.machine = kernel, machine

    def __getitem__(self, grid):
        def launch(*args, **options):
            assert torch.cuda.current_device() == args[0].device.index, "Triton launches on the current device"
            later = [reference(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            self.machine.launch(
                "Triton",
                self.machine.devices[args[0].device.index],
                lambda: self.kernel[grid](*[arg() if callable(arg) else arg for arg in later], **options),
            )

        return launch


NORMALIZE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


LAUNCHES = [
    ([RandomResizedCrop(9), RandomHorizontalFlip(), NORMALIZE], 2),
    ([RandomResizedCrop(9), RandomHorizontalFlip(), NORMALIZE, ToDtype(torch.bfloat16)], 2),
    ([Resize(12), CenterCrop(9), ToDtype(torch.float16, scale=True)], 2),
    ([Resize(12), RandomCrop(14, padding=2)], 4),
    ([RandomRotation(30), RandomVerticalFlip(), NORMALIZE], 2),
    ([RandomAffine(30, interpolation="bilinear", fill=3), RandomCrop(9)], 2),
]


@needs_simulation
@pytest.mark.parametrize(("case", "ways"), by_turns(LAUNCHES, [*zip(LAYOUTS, (None, 1), strict=True)]))
def test_launches(monkeypatch, case, ways):
    """The copy of the parameters, and one kernel, whatever the number of images; and nothing waits."""
    (parts, launches), (layout, seed) = case, ways
    transform = Compose(parts, memory_format=layout)
    for n in (1, 3):
        images = pictures(n, 3, 16, 14)
        with simulated(seed) as machine, monkeypatch.context() as patch:
            patch.setattr("memfeed.transforms.backends.passes.gpu_kernel", lambda device: kernel)
            for owner, name in ((sampling_kernels, "resize"), (sampling_kernels, "warp"), (kernel, "_kernel")):
                patch.setattr(owner, name, Queued(getattr(owner, name), machine))
            there = images.to("cuda")
            before, syncs = machine.devices[0].launches.copy(), machine.syncs.total()
            got = transform.apply(there, keys(n))
            assert (machine.devices[0].launches - before).total() == launches
            assert machine.syncs.total() == syncs, machine.syncs
            got = got.cpu()
            assert not machine.errors
        expected = transform.reference(images, keys(n))
        assert got.is_contiguous(memory_format=layout)
        assert got.dtype == expected.dtype
        steps = 1.01 if got.dtype == torch.uint8 else 1.01 / 255 / 0.224 + 4 * torch.finfo(got.dtype).eps
        assert ((got.double() - expected.double()).abs() <= steps).double().mean() > 0.98


@needs_simulation
@pytest.mark.parametrize("part", [RandomCrop(9), RandomResizedCrop(9), RandomRotation(30)], ids=repr)
def test_images_on_another_device_than_the_current_one(monkeypatch, part):
    images = pictures(3, 3, 16, 14)
    transform = Compose([part, NORMALIZE])
    with simulated() as machine, monkeypatch.context() as patch:
        patch.setattr("memfeed.transforms.backends.passes.gpu_kernel", lambda device: kernel)
        for owner, name in ((sampling_kernels, "resize"), (sampling_kernels, "warp"), (kernel, "_kernel")):
            patch.setattr(owner, name, Queued(getattr(owner, name), machine))
        got = transform.apply(images.to("cuda:1"), keys(3))
        assert got.device == torch.device("cuda:1")
        assert machine.contexts == {1}
        got = got.cpu()
    expected = transform.reference(images, keys(3))
    assert ((got - expected).abs() <= 1.01 / 255 / 0.224).float().mean() > 0.95


LAUNCHES_OF_LISTS = [
    ([RandomResizedCrop(9), RandomHorizontalFlip(), NORMALIZE], 2),
    ([Resize((9, 8)), NORMALIZE, ToDtype(torch.bfloat16)], 2),
    ([RandomResizedCrop(9), RandomRotation(10), RandomVerticalFlip()], 4),
]


@needs_simulation
@pytest.mark.parametrize(("case", "layout"), by_turns(LAUNCHES_OF_LISTS))
def test_launches_of_images_of_several_sizes(monkeypatch, case, layout):
    parts, launches = case
    transform = Compose(parts, memory_format=layout)
    images = [pictures(1, 3, 10 + n % 3, 14 - n % 4, seed=n)[0] for n in range(4)]
    with simulated() as machine, monkeypatch.context() as patch:
        patch.setattr("memfeed.transforms.backends.passes.gpu_kernel", lambda device: kernel)
        for name in ("resize", "warp"):
            patch.setattr(sampling_kernels, name, Queued(getattr(sampling_kernels, name), machine))
        there = [image.to("cuda") for image in images]
        before, syncs = machine.devices[0].launches.copy(), machine.syncs.total()
        got = transform.apply(there, keys(4))
        assert (machine.devices[0].launches - before).total() == launches
        assert machine.syncs.total() == syncs, machine.syncs
        got = got.cpu()
    expected = transform.reference(images, keys(4))
    assert got.is_contiguous(memory_format=layout)
    assert got.dtype == expected.dtype
    steps = 1.01 if got.dtype == torch.uint8 else 1.01 / 255 / 0.224 + 4 * torch.finfo(got.dtype).eps
    assert ((got.double() - expected.double()).abs() <= steps).double().mean() > 0.95


@needs_simulation
@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        *[
            (RandomHorizontalFlip(), dtype)
            for dtype in (torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int64)
        ],
        *[
            (part, dtype)
            for part in (RandomCrop(9), RandomResizedCrop(9), RandomRotation(30))
            for dtype in (torch.bool, torch.int64)
        ],
    ],
)
def test_masks_take_the_kernel(monkeypatch, part, dtype):
    transform, batch = Compose([part], on=["image", "mask"]), {"image": pictures(5, 3, 16, 14)}
    batch["mask"] = torch.randint(0, 2, (5, 16, 14)).to(dtype)
    with simulated() as machine, monkeypatch.context() as patch:
        patch.setattr("memfeed.transforms.backends.passes.gpu_kernel", lambda device: kernel)
        for owner, name in ((sampling_kernels, "resize"), (sampling_kernels, "warp"), (kernel, "_kernel")):
            patch.setattr(owner, name, Queued(getattr(owner, name), machine))
        there = {name: value.to("cuda") for name, value in batch.items()}
        before, syncs = machine.devices[0].launches.copy(), machine.syncs.total()
        got = transform.apply(there, keys(5))["mask"]
        launches = machine.devices[0].launches - before
        assert launches["Triton"] == 2, launches
        assert launches.total() == 4, launches  # and the copies of their parameters
        assert machine.syncs.total() == syncs
        got = got.cpu()
    expected = transform.reference(batch, keys(5))["mask"]
    assert got.dtype is dtype
    assert (got.to(torch.uint8) == expected.to(torch.uint8)).float().mean() > 0.98  # a place between two pixels
