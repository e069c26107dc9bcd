"""Transforms: the fused road against the plain one, against torchvision, on every kind of batch, and their errors."""

import copy
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_batches import RecordingLender
from tensordict import TensorDict, tensorclass

from memfeed.errors import FieldError, TransformError
from memfeed.random import Keys
from memfeed.transforms import (
    CenterCrop,
    Compose,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomVerticalFlip,
    ToDtype,
    Transform,
    Window,
)
from memfeed.transforms.backends.cpu import fused

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PINNED_CORNERS = [8, 93, 64, 12, 63]  # a change here changes what every resumed run sees
Pair = namedtuple("Pair", "image label")


@tensorclass
class Inner:
    image: torch.Tensor


@tensorclass
class Photos:
    image: torch.Tensor
    label: torch.Tensor


def photos(n=6, c=3, h=12, w=10, dtype=torch.uint8):
    images = torch.randint(0, 256, (n, c, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return images.to(dtype) / 255 if dtype.is_floating_point else images.to(dtype)


def keys(n=6, seed=0, epoch=0):
    return Keys(seed, epoch, torch.arange(n))


def augment(size=8, **options):
    return Compose([RandomCrop(size), RandomHorizontalFlip(), Normalize(MEAN, STD)], **options)


# The fused road against the plain one


@st.composite
def sequences(draw):
    """A Compose of up to six random transforms, and images for it."""
    n, c, h, w = (draw(st.integers(low, high)) for low, high in ((0, 5), (1, 4), (1, 9), (1, 9)))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.float64, torch.bfloat16]))
    images = photos(n, c, h, w, dtype)
    parts = []
    for kind in draw(st.lists(st.sampled_from(["crop", "center", "hflip", "vflip", "cast", "scale", "norm", "own"]))):
        if kind in ("crop", "center"):
            h, w = draw(st.integers(1, h)), draw(st.integers(1, w))
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
    """Not known to the fused road."""

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


@settings(max_examples=300, deadline=None)
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


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_usual_sequence(layout):
    images = photos(32, 3, 40, 36).contiguous(memory_format=layout)
    result = augment(24).apply(images, keys(32))
    assert result.shape == (32, 3, 24, 24)
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    torch.testing.assert_close(result, augment(24).reference(images, keys(32)), rtol=0, atol=2e-6)


@pytest.mark.parametrize("road", ["apply", "reference", "forward"])
@pytest.mark.parametrize("steps", [[ToDtype(torch.uint8)], [RandomCrop(8)], [RandomCrop(8), Normalize(MEAN, STD)]])
def test_channels_last(road, steps):
    images = photos()
    made = Compose(steps, memory_format=torch.channels_last)
    torch.manual_seed(0)
    got = made(images) if road == "forward" else getattr(made, road)(images, keys())
    torch.manual_seed(0)
    expected = Compose(steps)(images) if road == "forward" else getattr(Compose(steps), road)(images, keys())
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


# Parameters


def test_a_sample_is_transformed_the_same_in_any_batch():
    images, k = photos(), keys()
    together = augment().apply(images, k)
    for i in range(6):
        alone = augment().apply(images[i : i + 1], Keys(0, 0, torch.tensor([i])))
        assert torch.equal(alone[0], together[i])
    shuffled = torch.tensor([4, 1, 5])
    assert torch.equal(augment().apply(images[shuffled], Keys(0, 0, shuffled)), together[shuffled])


def test_epochs_and_seeds_differ():
    images, crop = photos(64, 3, 40, 40), RandomCrop(8)
    first = crop.apply(images, keys(64))
    assert not torch.equal(first, crop.apply(images, keys(64, epoch=1)))
    assert not torch.equal(first, crop.apply(images, keys(64, seed=1)))


def test_two_of_a_kind_draw_apart():
    images = photos(64)
    twice = Compose([RandomHorizontalFlip(), RandomHorizontalFlip()]).apply(images, keys(64))
    unchanged = (twice == images).flatten(1).all(1).float().mean()
    assert 0.2 < unchanged < 0.8


def test_parameters_do_not_depend_on_other_transforms():
    images = photos(16)
    alone = RandomHorizontalFlip().apply(images, keys(16))
    assert torch.equal(Compose([RandomHorizontalFlip()]).apply(images, keys(16)), alone)
    assert torch.equal(Compose([ToDtype(torch.uint8), RandomHorizontalFlip()]).apply(images, keys(16)), alone)
    nested = Compose([Compose([RandomCrop(8), RandomHorizontalFlip()]), RandomHorizontalFlip()])
    flat = Compose([RandomCrop(8), RandomHorizontalFlip(), RandomHorizontalFlip()])
    assert torch.equal(nested.apply(images, keys(16)), flat.apply(images, keys(16)))


def test_every_window_is_drawn_as_often():
    positions = torch.arange(9).reshape(1, 1, 3, 3).expand(4096, 1, 3, 3)
    corners = RandomCrop(2).apply(positions, keys(4096))[:, 0, 0, 0]
    counts = torch.bincount(corners, minlength=9)
    assert counts.count_nonzero() == 4
    assert counts[[0, 1, 3, 4]].min() > 1024 - 5 * 28


def test_flip_probability():
    images = torch.tensor([0, 1]).expand(4096, 1, 1, 2)
    flipped = RandomHorizontalFlip(0.25).apply(images, keys(4096))[:, 0, 0, 0].float().mean()
    assert abs(flipped - 0.25) < 5 * 0.007


def test_parameters_are_pinned():
    positions = torch.arange(100).reshape(1, 1, 10, 10).expand(5, 1, 10, 10)
    result = Compose([RandomCrop(4), RandomHorizontalFlip(), RandomVerticalFlip()]).apply(positions, keys(5))
    assert result[:, 0, 0, 0].tolist() == PINNED_CORNERS


# Against torchvision


@pytest.fixture
def functional():
    pytest.importorskip("torchvision")
    from torchvision.transforms.v2 import functional

    return functional


def test_crops_and_flips_are_torchvisions(functional):
    images = photos(16, 3, 13, 11)
    transform = Compose([RandomCrop((7, 5)), RandomHorizontalFlip(), RandomVerticalFlip()])
    drawn = []

    def uniform(draws):
        drawn.append(torch.rand(16, draws, dtype=torch.float64).numpy())
        return drawn[-1]

    window = None
    for part in transform.transforms:
        shape = images.shape if window is None else window.output_shape(images.shape)
        params = part.make_params(shape, images.dtype, uniform)
        window = params if window is None else window.then(params)
    expected = []
    for i, image in enumerate(images):
        image = functional.crop(image, int(drawn[0][i, 0] * 7), int(drawn[0][i, 1] * 7), 7, 5)
        image = functional.horizontal_flip(image) if drawn[1][i, 0] < 0.5 else image
        expected.append(functional.vertical_flip(image) if drawn[2][i, 0] < 0.5 else image)
    assert torch.equal(fused(images, [window], None), torch.stack(expected))


@pytest.mark.parametrize("size", [1, 4, 5, (9, 6), (8, 7), (13, 11)])
def test_center_crop_is_torchvisions(functional, size):
    sides = (size, size) if isinstance(size, int) else size
    assert torch.equal(
        CenterCrop(size).apply(photos(2, 3, 13, 11), keys(2)),
        functional.center_crop(photos(2, 3, 13, 11), list(sides)),
    )


def test_normalize_is_torchvisions(functional):
    scaled = functional.to_dtype(photos(), torch.float32, scale=True)
    expected = functional.normalize(scaled, MEAN, STD)
    torch.testing.assert_close(Normalize(MEAN, STD).apply(photos(), keys()), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(Normalize(MEAN, STD).apply(scaled, keys()), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("source", [torch.uint8, torch.int16, torch.float64])
def test_to_dtype_is_torchvisions(functional, source, scale):
    images = photos(dtype=source)
    expected = functional.to_dtype(images, torch.float32, scale=scale)
    result = ToDtype(torch.float32, scale=scale).apply(images, keys())
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)


# Batches of every kind


def batches():
    """(name, batch, how to take the image out, on)"""
    image, label = photos(), torch.arange(6)
    mask = photos(c=1)
    return [
        ("tensor", image, lambda b: b, None),
        ("list", [image, label], lambda b: b[0], None),
        ("list by position", [mask, image], lambda b: b[1], 1),
        ("tuple", (label, image), lambda b: b[1], None),
        ("dict", {"x": image, 1: label, "none": None, "names": ["a"] * 6}, lambda b: b["x"], None),
        ("dict by key", {"x": image, "mask": mask}, lambda b: b["x"], "x"),
        ("nested", {"a": [label, {"x": image}], "mask": mask}, lambda b: b["a"][1]["x"], ("a", 1, "x")),
        ("namedtuple", Pair(image, label), lambda b: b.image, "image"),
        ("namedtuple by position", Pair(image, label), lambda b: b[0], 0),
        ("tensordict", TensorDict({"x": image, "y": label}, [6]), lambda b: b["x"], None),
        ("tensordict nested", TensorDict({"a": {"x": image}, "m": mask}, [6]), lambda b: b["a", "x"], ("a", "x")),
        ("locked tensordict", TensorDict({"a": {"x": image}}, [6]).lock_(), lambda b: b["a", "x"], None),
        ("tensordict in a list", [label, TensorDict({"x": image}, [6])], lambda b: b[1]["x"], (1, "x")),
        ("tensorclass", Photos(image=image, label=label, batch_size=[6]), lambda b: b.image, None),
        (
            "tensorclass in a tensordict",
            TensorDict({"a": Inner(image=image, batch_size=[6]), "m": mask}, [6]),
            lambda b: b["a"].image,
            ("a", "image"),
        ),
    ]


@pytest.mark.parametrize(("batch", "get", "on"), [b[1:] for b in batches()], ids=[b[0] for b in batches()])
def test_batches_keep_their_structure(batch, get, on):
    before = get(batch).clone()
    result = augment(on=on).apply(batch, keys())
    assert type(result) is type(batch)
    assert torch.equal(get(result), augment().apply(photos(), keys()))
    assert torch.equal(get(batch), before)
    assert torch.equal(get(augment(on=on).reference(batch, keys())), augment().reference(photos(), keys()))


def test_other_fields_are_passed_on():
    batch = {"x": photos(), "y": torch.arange(6), "none": None, "names": ["a"]}
    result = augment().apply(batch, keys())
    assert list(result) == list(batch)
    assert result["y"] is batch["y"]
    assert result["none"] is None
    assert result["names"] == ["a"]
    batch = TensorDict({"x": photos(), "a": {"y": torch.arange(6)}}, [6])
    result = augment().apply(batch, keys())
    assert result.batch_size == (6,)
    assert result["a", "y"].data_ptr() == batch["a", "y"].data_ptr()


def test_parts_on_fields_of_their_own():
    batch = {"x": photos(), "mask": photos(c=1)}
    transform = Compose([RandomHorizontalFlip(1.0, on="mask"), Normalize(MEAN, STD), CenterCrop(4, on="mask")], on="x")
    result = transform.apply(batch, keys())
    assert torch.equal(result["mask"], CenterCrop(4).apply(photos(c=1).flip(-1), keys()))
    assert torch.equal(result["x"], Normalize(MEAN, STD).apply(photos(), keys()))
    with pytest.raises(TransformError, match=r"works on the fields \['mask', 'x'\]; expected one field"):
        transform(photos())


# As a module


def test_in_front_of_a_model():
    model = torch.nn.Sequential(augment(), torch.nn.Conv2d(3, 2, 3))
    assert model(photos()).shape == (6, 2, 6, 6)
    assert set(model.state_dict()) == {"1.weight", "1.bias"}
    torch.manual_seed(3)
    first = augment()(photos())
    assert not torch.equal(augment()(photos()), first)
    torch.manual_seed(3)
    assert torch.equal(augment()(photos()), first)


def test_module_apply_still_works():
    seen = []
    transform = augment()
    assert transform.apply(seen.append) is transform
    assert seen == [*transform.transforms, transform.transforms, transform]
    model = torch.nn.Sequential(transform, torch.nn.Linear(2, 2))
    model.apply(lambda module: torch.nn.init.zeros_(module.weight) if hasattr(module, "weight") else None)
    assert model[1].weight.count_nonzero() == 0
    assert transform.apply(fn=seen.append) is transform


def test_copies_and_repr():
    transform = augment()
    assert torch.equal(copy.deepcopy(transform).apply(photos(), keys()), transform.apply(photos(), keys()))
    assert "RandomCrop(size=(8, 8))" in repr(transform)
    assert "p=0.5" in repr(transform)
    assert "mean=(0.485" in repr(transform)
    assert repr(ToDtype(torch.float32)) == "ToDtype(torch.float32, scale=False)"


def test_results_share_no_memory_with_the_images():
    images = photos(h=8, w=8)
    for transform in (RandomCrop(8), CenterCrop(8), RandomHorizontalFlip(0.0)):
        result = transform.apply(images, keys())
        assert torch.equal(result, images)
        assert result.data_ptr() != images.data_ptr()


def test_windows_compose():
    images = photos(1, 1, 9, 9)
    rng = np.random.default_rng(0)
    for _ in range(50):
        window, whole = Window.whole(images.shape), images
        for _ in range(4):
            height, width = rng.integers(1, whole.shape[2] + 1), rng.integers(1, whole.shape[3] + 1)
            top, left = rng.integers(0, whole.shape[2] - height + 1), rng.integers(0, whole.shape[3] - width + 1)
            flips = rng.random(2) < 0.5
            window = window.then(
                Window(np.array([top]), np.array([left]), int(height), int(width), flips[:1], flips[1:])
            )
            whole = whole[:, :, top : top + height, left : left + width]
            whole = whole.flip([dim for dim, flip in zip((-1, -2), flips, strict=True) if flip])
        top, left = int(window.top[0]), int(window.left[0])
        direct = images[:, :, top : top + window.height, left : left + window.width]
        direct = direct.flip([-1]) if window.hflip[0] else direct
        assert torch.equal(direct.flip([-2]) if window.vflip[0] else direct, whole)


# Errors: found, expected, next step


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RandomCrop(0), ["size=0", "positive int", "e.g. 224"]),
        (lambda: CenterCrop((1, 2, 3)), ["size=(1, 2, 3)", "(height, width)"]),
        (lambda: RandomHorizontalFlip(1.5), ["p=1.5", "from 0 to 1"]),
        (lambda: RandomVerticalFlip(float("nan")), ["p=nan", "from 0 to 1"]),
        (lambda: ToDtype(torch.uint8, scale=True), ["torch.uint8", "float dtype", "leave scale out"]),
        (lambda: Normalize(MEAN, STD[:2]), ["mean has 3 values and std has 2", "one per channel"]),
        (lambda: Normalize([], []), ["mean has 0 values"]),
        (lambda: Normalize([0.0], [0.0]), ["std=(0.0,)", "no std of 0", "constant"]),
        (lambda: Normalize([float("inf")], [1.0]), ["mean=(inf,)", "finite"]),
        (lambda: Compose([torch.nn.ReLU()]), ["got a ReLU", "memfeed transforms", "derive from"]),
    ],
)
def test_wrong_parameters(make, words):
    with pytest.raises(TransformError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("road", ["apply", "reference"])
@pytest.mark.parametrize(
    ("transform", "batch", "words"),
    [
        (
            RandomCrop(16),
            {"x": photos()},
            [
                "field 'x' (uint8 [6, 3, 12, 10])",
                "RandomCrop(size=(16, 16))",
                "12 x 10 pixels",
                "16 x 16",
                "smaller crop",
            ],
        ),
        (CenterCrop((12, 11)), photos(), ["12 x 10 pixels", "12 x 11", "resize"]),
        (Normalize([0.5], [0.5]), [photos()], ["field 0", "3 channels", "mean and std 1 values"]),
        (RandomCrop(2), [torch.arange(6)], ["found 0 fields", "0 (int64 [6])", "with on="]),
        (RandomCrop(2), {}, ["found 0 fields", "no tensors, in a dict"]),
        (RandomCrop(2), {"x": photos(), "m": photos(c=1)}, ["found 2 fields", "'x'", "'m'", "with on="]),
        (RandomCrop(2, on="y"), {"x": photos(), "y": torch.zeros(6, 4)}, ["field 'y'", "rank 2", "[n, c, h, w]"]),
        (RandomCrop(2), {"x": photos() > 3}, ["torch.bool", "expected integers or floats"]),
        (RandomCrop(2), photos(5), ["5 samples for 6 keys", "one key per sample"]),
    ],
)
def test_wrong_batches(road, transform, batch, words):
    with pytest.raises(TransformError) as caught:
        getattr(transform, road)(batch, keys())
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("on", ["images", 0, ("a", 2), ("a",), ()])
def test_no_such_field(on):
    batch = {"a": [photos(), {"deep": photos()}], "y": torch.arange(6)}
    with pytest.raises(FieldError) as caught:
        RandomCrop(2, on=on).apply(batch, keys())
    assert str(caught.value) == (
        f"no field {on!r} in the batch; found ('a', 0) (uint8 [6, 3, 12, 10]), "
        "('a', 1, 'deep') (uint8 [6, 3, 12, 10]), 'y' (int64 [6]); name one of these with on="
    )


def test_wrong_calls():
    with pytest.raises(TransformError, match="was called with a dict; expected a tensor"):
        augment()({"x": photos()})
    with pytest.raises(TransformError, match="the tensor has rank 3; expected images"):
        augment()(photos()[0])
    with pytest.raises(TransformError, match="got a Tensor and no keys"):
        augment().apply(photos())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_rounded_once(dtype):
    steps = [RandomCrop(8), ToDtype(dtype, scale=True), Normalize(MEAN, STD)]
    exact = Compose([RandomCrop(8), Normalize(MEAN, STD)]).apply(photos(), keys())
    found = Compose(steps).apply(photos(), keys())
    assert found.dtype is dtype
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), exact, rtol=ulp, atol=ulp * 2**-4)
