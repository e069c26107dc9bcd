"""Plans of transforms: the fused path gives what one transform after another gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_batches import RecordingLender, keys, photos

from memfeed.errors import TransformError
from memfeed.transforms import (
    CenterCrop,
    Compose,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomVerticalFlip,
    ToDtype,
    Transform,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def augment(size=8, **options):
    return Compose([RandomCrop(size), RandomHorizontalFlip(), Normalize(MEAN, STD)], **options)


@st.composite
def sequences(draw):
    """A Compose of up to six random transforms, and images for it."""
    n, c, h, w = (draw(st.integers(low, high)) for low, high in ((0, 5), (1, 4), (1, 9), (1, 9)))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.float64, torch.bfloat16]))
    images = photos(n, c, h, w, dtype)
    parts = []
    for kind in draw(st.lists(st.sampled_from(["crop", "center", "hflip", "vflip", "cast", "scale", "norm", "own"]))):
        if kind in ("crop", "center"):
            most = 0 if kind == "crop" else 3  # a crop from the middle pads
            h, w = draw(st.integers(1, h + most)), draw(st.integers(1, w + most))
            parts.append((RandomCrop if kind == "crop" else CenterCrop)((h, w)))
        elif kind in ("hflip", "vflip"):
            p = draw(st.sampled_from([0.0, 0.5, 1.0]))
            parts.append((RandomHorizontalFlip if kind == "hflip" else RandomVerticalFlip)(p))
        elif kind in ("cast", "scale"):
            parts.append(ToDtype(draw(st.sampled_from([torch.float32, torch.float64])), scale=kind == "scale"))
        elif kind == "norm":
            values = st.lists(st.floats(0.2, 1), min_size=c, max_size=c)
            parts.append(Normalize(draw(values), draw(values)))
        else:
            parts.append(Negative())
    return Compose(parts), images


class Negative(Transform):
    """Not known to the fused path."""

    def make_params(self, shape, dtype, uniform):
        return uniform(1)[:, 0] < 0.5

    def transform(self, image, params):
        chosen = torch.from_numpy(params).to(image.device)
        return torch.where(chosen[:, None, None, None], image.flip(1), image)


def rounding(transform, images):
    """How far two orders of the same arithmetic may differ: a few units in the last place of the largest value."""
    size, dtype = (float(images.abs().max()) if images.numel() else 0.0), images.dtype
    for part in transform.transforms:
        if isinstance(part, Normalize) or getattr(part, "scale", False):
            size /= 1 if dtype.is_floating_point else torch.iinfo(dtype).max
        if isinstance(part, Normalize):
            size = (size + max(part.mean)) / min(part.std)
            dtype = dtype if dtype.is_floating_point else torch.float32
        dtype = getattr(part, "dtype", dtype)
    return size * (2e-2 if images.dtype is torch.bfloat16 else 1e-6)


@settings(max_examples=300)
@given(sequences(), st.integers(0, 2**32))
def test_fused_equals_plain(sequence, seed):
    transform, images = sequence
    before = images.clone()
    k = keys(len(images), seed)
    fast, slow = transform.apply(images, k), transform.reference(images, k)
    assert torch.equal(images, before)
    assert fast.dtype == slow.dtype
    if any(isinstance(part, Normalize) or getattr(part, "scale", False) for part in transform.transforms):
        torch.testing.assert_close(fast, slow, rtol=0, atol=rounding(transform, images))
    else:
        assert torch.equal(fast, slow)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("source", "passes"), [(torch.uint8, 1), (torch.int16, 2), (torch.float32, 2)])
def test_a_cast_of_normalised_bytes_is_no_pass_of_its_own(source, passes, target):
    affines = []

    class Counted(Compose):
        def _fused_pass(self, image, allocator):
            fused_pass = super()._fused_pass(image, allocator)
            return lambda image, changes, affine: fused_pass(image, changes, affines.append(affine) or affine)

    transform = Counted([RandomCrop(8), Normalize(MEAN, STD), ToDtype(target)])
    images = photos(dtype=source)
    got = transform.apply(images, keys())
    assert len(affines) == passes
    assert got.dtype == target
    expected = transform.reference(images, keys())
    rtol = torch.finfo(target).eps  # what lies between two values may be rounded to either
    torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_usual_sequence(layout):
    images = photos(32, 3, 40, 36).contiguous(memory_format=layout)
    result = augment(24).apply(images, keys(32))
    assert result.shape == (32, 3, 24, 24)
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    torch.testing.assert_close(result, augment(24).reference(images, keys(32)), rtol=0, atol=2e-6)


@pytest.mark.parametrize("path", ["apply", "reference", "forward"])
@pytest.mark.parametrize("steps", [[ToDtype(torch.uint8)], [RandomCrop(8)], [RandomCrop(8), Normalize(MEAN, STD)]])
def test_channels_last(path, steps):
    images = photos()
    made = Compose(steps, memory_format=torch.channels_last)
    torch.manual_seed(0)
    got = made(images) if path == "forward" else getattr(made, path)(images, keys())
    torch.manual_seed(0)
    expected = Compose(steps)(images) if path == "forward" else getattr(Compose(steps), path)(images, keys())
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert expected.is_contiguous()
    torch.testing.assert_close(got, expected)
    with pytest.raises(TransformError, match=r"memory_format=torch.preserve_format; expected"):
        Compose(steps, memory_format=torch.preserve_format)


def test_read_only_and_overlapping_images():
    whole = photos(1).expand(6, 3, 12, 10)
    torch.testing.assert_close(augment().apply(whole, keys()), augment().reference(whole.clone(), keys()))


def test_subclasses_of_tensor():
    class Mine(torch.Tensor):
        pass

    images = photos()
    result = augment().apply({"x": images.as_subclass(Mine)}, keys())["x"]
    assert torch.equal(result, augment().apply(images, keys()))


def test_gradients_flow():
    images = photos(dtype=torch.float32).requires_grad_()
    augment().apply(images, keys()).sum().backward()
    assert images.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(augment().apply(images.detach(), keys()), augment().apply(images, keys()))


def test_a_lent_buffer_is_used():
    lent = torch.full((6, 3, 8, 8), float("nan"))
    lender = RecordingLender(lent)
    result = augment().apply(photos(), keys(), allocator=lender)
    assert lender.requests == [((6, 3, 8, 8), torch.float32)]
    assert result is lent
    assert torch.equal(result, augment().apply(photos(), keys()))


def test_results_share_no_memory_with_the_images():
    images = photos(h=8, w=8)
    for transform in (RandomCrop(8), CenterCrop(8), RandomHorizontalFlip(0.0)):
        result = transform.apply(images, keys())
        assert torch.equal(result, images)
        assert result.data_ptr() != images.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_rounded_once(dtype):
    steps = [RandomCrop(8), ToDtype(dtype, scale=True), Normalize(MEAN, STD)]
    exact = Compose([RandomCrop(8), Normalize(MEAN, STD)]).apply(photos(), keys())
    found = Compose(steps).apply(photos(), keys())
    assert found.dtype is dtype
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), exact, rtol=ulp, atol=ulp * 2**-4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_batch_in_huge_pages(layout):
    """From 4 MiB on, memory comes from another allocator."""
    steps = [RandomCrop(120), ToDtype(torch.bfloat16, scale=True), RandomHorizontalFlip()]
    transform, images = Compose(steps, memory_format=layout), photos(64, 3, 128, 128)
    got = transform.apply(images, keys(64))
    assert got.nbytes > 4 << 20
    assert got.is_contiguous(memory_format=layout)
    assert torch.equal(got, transform.reference(images, keys(64)))


@pytest.mark.parametrize(("count", "is_heavy"), [(2, False), (14, True)])
def test_a_transform_that_takes_milliseconds_takes_all_threads(count, is_heavy, monkeypatch):
    """Their number is not measured then: a comparison let one thread win where two took half the time."""
    parts = []
    monkeypatch.setattr(
        "memfeed.transforms.backends.passes.share",
        lambda rows, fill, **options: (fill(0, rows), parts.append((rows, options["is_heavy"]))),
    )
    augment(224).apply(photos(count, 3, 224, 224), keys(count))  # [3, 224, 224] of float32 are 0.6 MiB
    assert parts == [(count, is_heavy)]
