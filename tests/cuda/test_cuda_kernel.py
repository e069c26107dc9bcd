"""The kernel on a GPU, and every transform there, against the plain road on the CPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import memfeed.transforms as T
from kernel_cases import LAYOUTS, cases, check, images
from memfeed.random import Keys
from memfeed.transforms.backends.passes import gpu_kernel
from resample_cases import sampled_cases, share_apart

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GPU = torch.device("cuda", 0)


def photos(dtype=torch.uint8, n=32):
    made = images(n, 3, 200, 180, torch.uint8)
    return made.to(dtype) / 255 if dtype.is_floating_point else made.to(dtype)


def keys(n=32):
    return Keys(0, 0, torch.arange(n))


@pytest.fixture
def kernel():
    pytest.importorskip("triton")
    return gpu_kernel(GPU)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(300))
def test_the_kernel_gives_what_torch_gives(kernel, case):
    image, window, affine, layout = case
    there = image.to(GPU)  # keeps the strides of dense images
    got = kernel.fused(there, [] if window is None else [window], affine, layout)
    assert got.device == GPU
    assert torch.equal(there.cpu(), image)
    if got is not there:
        check(got, image, window, affine, layout if kernel.fits(there, window, affine) else None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["contiguous", "channels_last", "part", "every other"])
def test_strides(kernel, kind, layout):
    image = images(4, 3, 200, 180, torch.uint8, kind)
    flips = torch.tensor([True, False, True, False]).numpy()
    window = T.Window.whole(image.shape, hflip=flips, vflip=~flips)
    affine = T.Affine(torch.bfloat16, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    there = torch.empty_strided(image.shape, image.stride(), dtype=image.dtype, device=GPU).copy_(image)
    check(kernel.launch(there, window, affine, layout), image, window, affine, layout)


def test_offsets_beyond_32_bits(kernel):
    image = torch.empty(3 * 2**30, dtype=torch.uint8, device=GPU).view(3, 1, 2**15, 2**15)
    image[2] = 7
    corner = torch.full((3,), 2**15 - 40).numpy()
    window = T.Window.whole(image.shape, top=corner, left=corner, height=40, width=40)
    got = kernel.launch(image, window, T.Affine(torch.float32), torch.contiguous_format)
    assert bool((got[2] == 7).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_usual_sequence(dtype, layout):
    transform = T.Compose([T.RandomCrop(176), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)], memory_format=layout)
    image = photos(dtype)
    got, expected = transform.apply(image.to(GPU), keys()), transform.reference(image, keys())
    assert got.device == GPU
    assert got.is_contiguous(memory_format=layout)
    atol = {torch.float16: 1e-2, torch.bfloat16: 6e-2}.get(dtype, 3e-6)
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_usual_sequence_with_resized_crops(kernel, dtype, layout):
    parts = [T.RandomResizedCrop(96), T.RandomHorizontalFlip(), T.ToDtype(dtype, scale=True), T.Normalize(MEAN, STD)]
    transform = T.Compose(parts, memory_format=layout)
    got, expected = transform.apply(photos().to(GPU), keys()), transform.reference(photos(), keys())
    assert got.is_contiguous(memory_format=layout)
    # the reference rounds to bfloat16 after each step, the kernel once. Half a step of the scaled value, of the
    # difference and of the mean, divided by the deviation; of both results; and of the deviation, for a value of 3
    rounding = (2**-9 + 2**-10 + 2**-10) / min(STD) + 2**-6 + 3 * 2**-9
    atol = 1.01 / 255 / min(STD) + (rounding if dtype is torch.bfloat16 else 0)
    torch.testing.assert_close(got.cpu().float(), expected.float(), rtol=0, atol=atol)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=sampled_cases(200, 150, 60))
def test_resizes_and_warps_are_those_of_torch(kernel, case):
    image, sampled, window, affine, layout = case
    there = image.to(GPU)
    if kernel.sampling.fits(there, sampled, affine):
        got = kernel.sampling.launch(there, sampled, window, affine, layout)
        assert share_apart(got, *case) <= (0.05 if sampled.mode == "nearest" else 0.001)


FLOATS = T.ToDtype(torch.float32, scale=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("parts", "atol"),
    [
        ([T.RandomCrop(150)], 0),
        ([T.CenterCrop(150)], 0),
        ([T.RandomCrop(190, padding=20, fill=(1, 2, 3)), T.RandomVerticalFlip()], 0),
        ([T.RandomHorizontalFlip(), T.ToDtype(torch.float16)], 0),
        ([T.ToDtype(torch.int32), T.RandomVerticalFlip()], 0),
        ([T.RandomErasing(value=9), T.RandomCrop(100)], 0),
        ([FLOATS], 1e-6),
        ([FLOATS, T.ToDtype(torch.bfloat16)], 4e-3),
        ([T.Normalize(MEAN, STD), T.RandomCrop(190, padding=20)], 3e-6),
        ([T.RandomErasing(), T.Normalize(MEAN, STD)], 3e-6),
        ([FLOATS, T.RandomErasing(value="random")], 1e-6),
        ([T.RandomCrop(100), FLOATS, T.Pointwise(torch.sin), T.RandomHorizontalFlip()], 1e-6),
        # those below compute: as far apart as float32 on two machines
        ([FLOATS, T.Resize(96), T.Normalize(MEAN, STD)], 1e-4),
        ([FLOATS, T.RandomResizedCrop(96), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)], 1e-4),
        ([FLOATS, T.RandomRotation(20, interpolation="bilinear")], 1e-3),
        ([FLOATS, T.RandomAffine(20, (0.1, 0.1), (0.8, 1.2), interpolation="bilinear")], 1e-3),
        ([FLOATS, T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandomGrayscale(0.5)], 1e-3),
        ([FLOATS, T.MixUp(num_classes=10)], 1e-5),
        ([FLOATS, T.CutMix(num_classes=10)], 1e-5),
    ],
    ids=lambda value: " ".join(type(part).__name__ for part in value) if isinstance(value, list) else "",
)
def test_every_transform(parts, atol, layout):
    transform = T.Compose(parts, on=0, memory_format=layout)
    image, label = photos(), torch.arange(32) % 10
    got = transform.apply([image.to(GPU), label.to(GPU)], keys())
    expected = transform.reference([image, label], keys())
    assert got[0].device == GPU
    if not any(part.of_whole_batches for part in parts):  # these work on the batch, before the layout is given
        assert got[0].is_contiguous(memory_format=layout)
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=0, atol=atol)


def test_rotation_by_nearest_neighbour():
    """A place between two pixels may round to either, on another machine."""
    transform = T.RandomRotation(20, fill=3)
    got, expected = transform.apply(photos().to(GPU), keys()).cpu(), transform.reference(photos(), keys())
    assert (got == expected).float().mean() > 0.999


def test_gradients_flow():
    transform = T.Compose([T.RandomCrop(100), T.Normalize(MEAN, STD)])
    image = photos(torch.float32).to(GPU).requires_grad_()
    transform.apply(image, keys()).sum().backward()
    assert image.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(transform.apply(image.detach(), keys()), transform.apply(image, keys()))


def test_as_a_module():
    transform = T.Compose([T.RandomCrop(100), T.Normalize(MEAN, STD)])
    torch.manual_seed(0)
    got = transform(photos().to(GPU))
    torch.manual_seed(0)
    torch.testing.assert_close(got.cpu(), transform(photos()), rtol=0, atol=3e-6)


def test_on_another_stream():
    transform = T.Compose([T.RandomCrop(100), T.RandomHorizontalFlip()])
    image = photos().to(GPU)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        made = [transform.apply(image, Keys(0, epoch, torch.arange(32))) for epoch in range(20)]
    stream.synchronize()
    for epoch, got in enumerate(made):  # their parameters crossed one after the other, and none was overwritten
        assert torch.equal(got.cpu(), transform.reference(photos(), Keys(0, epoch, torch.arange(32))))


@pytest.mark.parametrize("part", [T.Resize(48), T.RandomResizedCrop(48)], ids=repr)
def test_integers_are_resized(part):
    batch = {"image": photos()}
    keys = Keys(0, 0, torch.arange(len(photos())))
    expected = T.Compose([part], on="image").reference(batch, keys)["image"].int()
    got = T.Compose([part], on="image").apply({"image": photos().cuda()}, keys)["image"]
    assert got.dtype is torch.uint8
    assert (got.cpu().int() - expected).abs().max() <= 1  # the CPU's code for uint8 computes in fixed point


def test_a_function_of_single_values_is_compiled():
    transform = T.Pointwise(lambda x: x.clamp(0, 1) ** 2.2)
    images = photos().float().div(255)
    torch.testing.assert_close(transform(images.cuda()).cpu(), transform(images), rtol=1e-4, atol=1e-5)
    assert "on cuda" in repr(transform)
    assert "compiled on cuda" in repr(transform) or "compiling failed" in repr(transform)
