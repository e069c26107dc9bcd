"""What moves pixels: the road sample by sample against the plain one, against torchvision, masks, boxes, keypoints."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from memfeed.errors import FieldError, TransformError
from memfeed.random import Keys
from memfeed.transforms import (
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
    Warped,
)

DTYPES = [torch.uint8, torch.int16, torch.float32, torch.float64]


def pictures(n=6, c=3, h=24, w=20, dtype=torch.uint8, seed=0):
    """Smooth ones: where two roads round a place apart, values hardly differ."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, c, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (h, w), mode="bicubic", align_corners=False).clamp(0, 1)
    return smooth.to(dtype) if dtype.is_floating_point else (smooth * 255).round().to(dtype)


def keys(n=6, seed=0, epoch=0):
    return Keys(seed, epoch, torch.arange(n))


@pytest.fixture
def functional():
    pytest.importorskip("torchvision")
    from torchvision.transforms.v2 import functional

    return functional


# The road sample by sample against the plain one


@st.composite
def sequences(draw):
    n, c, h, w = (draw(st.integers(low, high)) for low, high in ((0, 4), (1, 4), (2, 12), (2, 12)))
    dtype = draw(st.sampled_from(DTYPES))
    parts = []
    kinds = ["padded", "pad", "hflip", "vflip", "resize", "rrc", "rotate", "affine", "cast", "norm"]
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=5)):
        fill = draw(st.sampled_from([0, 3, [1.0] * c]))
        mode = draw(st.sampled_from(["nearest", "bilinear"]))
        size = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
        parts.append(
            {
                "padded": lambda size=size, fill=fill: RandomCrop(size, padding=(9, 10, 8, 9), fill=fill),
                "pad": lambda size=size, fill=fill: RandomCrop(size, pad_if_needed=True, fill=fill),
                "hflip": RandomHorizontalFlip,
                "vflip": RandomVerticalFlip,
                "resize": lambda size=size, mode=mode: Resize(size, mode),
                "rrc": lambda size=size, mode=mode: RandomResizedCrop(size, interpolation=mode),
                "rotate": lambda mode=mode, fill=fill: RandomRotation(90, mode, fill=fill),
                "affine": lambda mode=mode, fill=fill: RandomAffine(30, (0.2, 0.1), (0.8, 1.2), 10, mode, fill),
                "cast": lambda: ToDtype(torch.float32, scale=True),
                "norm": lambda: Normalize([0.4] * c, [0.3] * c),
            }[kind]()
        )
    return Compose(parts), pictures(n, c, h, w, dtype)


@settings(max_examples=250, deadline=None)
@given(sequences(), st.integers(0, 2**32))
def test_sample_by_sample_equals_plain(sequence, seed):
    transform, images = sequence
    before, k = images.clone(), keys(len(images), seed)
    fast, slow = transform.apply(images, k), transform.reference(images, k)
    assert torch.equal(images, before)
    assert fast.dtype == slow.dtype
    atol = 1e-3 if fast.dtype.is_floating_point else 0
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=atol)


@settings(max_examples=60, deadline=None)
@given(sequences(), st.integers(0, 2**32))
def test_a_sample_is_moved_the_same_in_any_batch(sequence, seed):
    transform, images = sequence
    whole = transform.apply(images, keys(len(images), seed))
    for row in range(len(images)):
        alone = transform.apply(images[row : row + 1], Keys(seed, 0, torch.tensor([row])))
        assert torch.equal(alone[0], whole[row])


def test_neighbouring_maps_sample_once():
    images = pictures(4, 3, 40, 40, torch.float32)
    twice = Compose([RandomRotation((20, 20), "bilinear"), RandomRotation((-20, -20), "bilinear")])
    assert torch.allclose(twice.apply(images, keys(4)), images, atol=1e-5), "there and back is where it was"
    apart = images
    for part in twice.transforms:
        apart = part.apply(apart, keys(4))
    middle = (..., slice(14, 26), slice(14, 26))
    assert (apart - images)[middle].abs().max() > 1e-4, "sampled twice it is blurred"


def test_joined_maps_do_what_one_after_the_other_does():
    images, sample = pictures(6), torch.arange(6)
    xy = torch.rand(6, 2, dtype=torch.float64) * 20
    first = params(RandomAffine(40, (0.3, 0.3), (0.7, 1.4), 10), images)
    second = params(RandomRotation((70, 80), center=(3, 4)), images)
    joined = first.then(second)
    torch.testing.assert_close(joined.points(xy, sample), second.points(first.points(xy, sample), sample))
    assert first.then(params(RandomRotation(5, "bilinear"), images)) is None
    assert first.then(params(RandomRotation(5, fill=1), images)) is None


# Against torchvision


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest", "nearest-exact"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_resized_crops_are_torchvisions(functional, mode, dtype):
    from torchvision.transforms import InterpolationMode

    images = pictures(8, 3, 40, 33, dtype)
    transform = RandomResizedCrop((16, 24), interpolation=InterpolationMode(mode))
    drawn = params(transform, images)
    expected = [
        functional.resized_crop(
            image, int(top), int(left), int(h), int(w), [16, 24], InterpolationMode(mode), antialias=True
        )
        for image, top, left, h, w in zip(
            images, drawn.top, drawn.left, drawn.box_height, drawn.box_width, strict=True
        )
    ]  # fmt: skip
    assert torch.equal(transform.apply(images, keys(8)), torch.stack(expected))


@pytest.mark.parametrize("size", [7, (9, 30), [12]])
@pytest.mark.parametrize("max_size", [None, 15])
def test_resize_is_torchvisions(functional, size, max_size):
    images = pictures(2, 3, 40, 33)
    if max_size is not None and size != 7:
        size = 7
    expected = functional.resize(images, size if isinstance(size, int) else list(size), max_size=max_size)
    assert torch.equal(Resize(size, max_size=max_size).apply(images, keys(2)), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
@pytest.mark.parametrize("size", [(1, 1), (7, 1), (40, 1), (1, 7)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_resized_to_one_pixel(channels, size, dtype):
    """Against Pillow: torch itself raises, or mistakes the layout of what is one pixel wide (torch 2.6 to 2.15)."""
    image = pytest.importorskip("PIL.Image")
    images = pictures(2, channels)
    found = Resize(size).apply(images.to(dtype), keys(2))
    assert found.dtype == dtype
    for one, resized in zip(images.flatten(0, 1), found.flatten(0, 1), strict=True):
        expected = np.array(image.fromarray(one.numpy()).resize(size[::-1], image.Resampling.BILINEAR))
        assert abs(resized.double().numpy() - expected).max() <= 1
    layout = images.to(dtype).contiguous(memory_format=torch.channels_last)
    assert torch.equal(Resize(size).apply(layout, keys(2)), found)


@pytest.mark.parametrize("center", [None, (3.0, 8.5)])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_rotations_are_torchvisions(functional, mode, dtype, center):
    from torchvision.transforms import InterpolationMode

    images = pictures(1, 3, 24, 20, dtype)
    for angle in (-30, 0, 17, 180, 271):
        got = RandomRotation((angle, angle), mode, center).apply(images, keys(1))
        expected = functional.rotate(images, angle, InterpolationMode(mode), center=center, fill=None)
        close(got, expected)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_affine_maps_are_torchvisions(functional, mode):
    from torchvision.transforms import InterpolationMode

    images = pictures(1, 3, 24, 20, torch.float32)
    transform = RandomAffine((10, 10), (1.0, 1.0), (1.2, 1.2), (5, 5, -7, -7), mode, center=(4, 9))
    uniform = {1: 0.6, 2: 0.35}  # moves by 0.2 of the width and -0.3 of the height
    drawn = transform.make_params(
        images.shape, images.dtype, lambda draws: np.array([[uniform.get(j, 0.5) for j in range(draws)]])
    )
    expected = functional.affine(
        images, 10, [4, -7], 1.2, [5, -7], InterpolationMode(mode), fill=None, center=[4, 9]
    )  # fmt: skip
    close(drawn.all(images), expected)


@pytest.mark.parametrize("padding", [3, (1, 2), (1, 2, 3, 4)])
def test_padded_crops_are_torchvisions(functional, padding):
    images = pictures(16, 3, 11, 13)
    transform = RandomCrop(9, padding, fill=[7, 8, 9])
    drawn = params(transform, images)
    sides = [padding] if isinstance(padding, int) else list(padding)
    left, top = (sides * 2)[:2]
    expected = []
    for image, at_top, at_left in zip(images, drawn.top, drawn.left, strict=True):
        padded = functional.pad(image, sides, fill=[7, 8, 9])
        expected.append(functional.crop(padded, int(at_top) + top, int(at_left) + left, 9, 9))
    assert torch.equal(transform.apply(images, keys(16)), torch.stack(expected))
    corners = {(int(a), int(b)) for a, b in zip(drawn.top, drawn.left, strict=True)}
    assert len(corners) > 4


def close(got, expected):
    """Equal but for a few pixels where a coordinate lies between two and is rounded the other way."""
    assert got.dtype == expected.dtype
    differ = (got.double() - expected.double()).abs() > (1 if got.dtype == torch.uint8 else 1e-4)
    assert differ.double().mean() < 0.02


def params(transform, images):
    """What a single transform draws for images with keys()."""
    drawn = transform.params(range(len(images)), shape=images.shape[1:], dtype=images.dtype)
    return drawn[f"{type(transform).__name__}.0"]


# What is drawn


def test_boxes_of_resized_crops():
    drawn = params(RandomResizedCrop(8), pictures(500, 1, 64, 48))
    h, w = drawn.box_height.astype(float), drawn.box_width.astype(float)
    assert (drawn.top >= 0).all()
    assert (drawn.left >= 0).all()
    assert (drawn.top + h <= 64).all()
    assert (drawn.left + w <= 48).all()
    assert 0.07 < (h * w / (64 * 48)).min() < 0.1
    assert 0.72 < (w / h).min() < (w / h).max() < 1.38
    area = h * w / (64 * 48)
    assert 0.4 < np.median(area[w < 48]) < 0.6, "areas are uniform"
    wide = params(RandomResizedCrop(8, scale=(0.9, 1.0)), pictures(3, 1, 10, 100))
    assert (wide.box_height == 10).all()
    assert (wide.box_width == 13).all(), "the largest box in the middle whose ratio is allowed"


# Fields that follow


def scene(n=6, h=24, w=20, jagged=False):
    images = pictures(n, 3, h, w)
    boxes = torch.tensor([[2.0, 3.0, 9.0, 11.0], [10.0, 12.0, 18.0, 20.0]]).expand(n, 2, 4).clone()
    if jagged:
        boxes = torch.nested.nested_tensor([boxes[i, : i % 3] for i in range(n)], layout=torch.jagged)
    return {
        "image": images,
        "mask": (images[:, 0] > 128).long() * 300,
        "boxes": boxes,
        "label": torch.arange(n),
        "points": torch.tensor([[4, 5], [15, 16]]).expand(n, 2, 2).clone(),
    }


MOVES = [
    RandomCrop((20, 16)),
    RandomCrop((30, 30), padding=8),
    RandomHorizontalFlip(1.0),
    RandomVerticalFlip(1.0),
    Resize((12, 10)),
    RandomResizedCrop((24, 20), scale=(0.5, 1.0)),
    RandomRotation(25, "bilinear"),
    RandomAffine(10, (0.1, 0.1), (0.9, 1.1), interpolation="bilinear"),
]


@pytest.mark.parametrize("road", ["apply", "reference"])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: type(move).__name__)
def test_masks_follow_by_nearest_neighbour(road, move):
    batch = scene()
    out = getattr(Compose([move], on=("image", "mask", "label")), road)(batch, keys())
    assert torch.equal(out["label"], batch["label"])
    assert out["mask"].dtype == torch.int64
    assert set(out["mask"].unique().tolist()) <= {0, 300}, "values are never mixed"
    assert out["mask"].shape[1:] == out["image"].shape[2:]
    agree = ((out["image"][:, 0] > 128) == (out["mask"] > 0)).double().mean()
    assert agree > 0.93, "the mask still lies on what it marks"


@pytest.mark.parametrize("road", ["apply", "reference"])
def test_masks_are_filled_with_0(road):
    moves = [RandomRotation(45, fill=7), RandomCrop(30, padding=9, fill=7), RandomAffine(0, (0.5, 0.5), fill=7)]
    batch = {"image": torch.full((6, 1, 24, 20), 5.0), "mask": torch.full((6, 24, 20), 5)}
    out = getattr(Compose(moves, on=("image", "mask")), road)(batch, keys())
    assert out["image"].unique().tolist() == [5, 7]
    assert out["mask"].unique().tolist() == [0, 5]


@pytest.mark.parametrize("shape", ["hw", "1hw", "chw"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.int64])
def test_masks_of_any_shape_and_dtype(shape, dtype):
    batch = scene()
    mask = batch["mask"].to(dtype)
    batch["mask"] = {"hw": mask, "1hw": mask[:, None], "chw": mask[:, None].expand(-1, 5, -1, -1)}[shape]
    steps = [RandomResizedCrop(16), RandomHorizontalFlip(), RandomRotation(20), Normalize([0.5] * 3, [0.5] * 3)]
    out = Compose(steps, on=("image", "mask")).apply(batch, keys())
    assert out["image"].dtype == torch.float32
    assert out["mask"].dtype == dtype
    assert out["mask"].shape == (*batch["mask"].shape[:-2], 16, 16)
    assert set(out["mask"].unique().tolist()) <= set(mask.unique().tolist()) | {0}


@pytest.mark.parametrize("move", MOVES, ids=lambda move: type(move).__name__)
def test_boxes_and_points_follow(move):
    """Each point is drawn into an image of its own, whose brightest pixel must be where the point comes to lie."""
    n, h, w = 6, 24, 20
    batch = scene()
    spot = torch.zeros(n, 1, h, w)
    spot[:, :, 10:13, 8:11] = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]])
    batch = {"image": spot, "points": torch.tensor([[[9.0, 11.0]]]).expand(n, 1, 2).clone(), "boxes": batch["boxes"]}
    out = Compose([move], on=("image", "points", "boxes")).apply(batch, keys())
    height, width = out["image"].shape[2:]
    for image, point, boxes in zip(out["image"], out["points"], out["boxes"], strict=True):
        x, y = point[0].tolist()
        assert (boxes >= 0).all()
        assert (boxes[:, [0, 2]] <= width).all()
        assert (boxes[:, [1, 3]] <= height).all()
        if 1 <= x <= width - 2 and 1 <= y <= height - 2:
            row, column = divmod(int(image[0].argmax()), width)
            assert abs(column - x) <= 1.01
            assert abs(row - y) <= 1.01


def test_boxes_are_torchvisions(functional):
    boxes = torch.tensor([[2.0, 3.0, 9.0, 11.0], [10.0, 12.0, 18.0, 20.0]])
    batch = {"image": pictures(1), "boxes": boxes[None]}
    flipped = Compose([RandomHorizontalFlip(1.0)], on=("image", "boxes")).apply(batch, keys(1))["boxes"][0]
    form = functional.horizontal_flip_bounding_boxes(boxes, _xyxy(), (24, 20))
    assert torch.equal(flipped, form)
    resized = Compose([Resize((48, 10))], on=("image", "boxes")).apply(batch, keys(1))["boxes"][0]
    assert torch.equal(resized, functional.resize_bounding_boxes(boxes, (24, 20), [48, 10])[0])


def test_keypoints_are_those_of_pixels():
    points = torch.tensor([[[0, 0], [19, 23], [4, 7]]])
    batch = {"image": pictures(1), "points": points}
    flips = Compose([RandomHorizontalFlip(1.0), RandomVerticalFlip(1.0)], on=("image", "points"))
    expected = torch.tensor([[[19, 23], [0, 0], [15, 16]]])
    assert torch.equal(flips.apply(batch, keys(1))["points"], expected), "as torchvision's keypoints"
    larger = Compose([Resize((48, 40))], on=("image", "points")).apply({**batch, "points": points.double()}, keys(1))
    assert larger["points"][0, 0].tolist() == [0.5, 0.5], "the middle of the four pixels that it became"


def _xyxy():
    from torchvision.tv_tensors import BoundingBoxFormat

    return BoundingBoxFormat.XYXY


def test_ragged_boxes_follow():
    batch = scene(jagged=True)
    dense = scene()
    steps = [RandomResizedCrop(16), RandomHorizontalFlip()]
    got = Compose(steps, on=("image", "boxes")).apply(batch, keys())["boxes"]
    expected = Compose(steps, on=("image", "boxes")).apply(dense, keys())["boxes"]
    assert got.is_nested
    for row, (one, other) in enumerate(zip(got.unbind(), expected, strict=True)):
        assert torch.equal(one, other[: row % 3])


def test_integer_boxes_stay_integers():
    batch = {"image": pictures(2), "boxes": torch.tensor([[[2, 3, 9, 11]]]).expand(2, 1, 4)}
    out = Compose([RandomCrop((20, 16)), Resize(40)], on=("image", "boxes")).apply(batch, keys(2))
    assert out["boxes"].dtype == torch.int64


def test_fields_of_tensordicts_follow_and_nested_paths_still_name_one_field():
    batch = TensorDict(
        {"a": TensorDict({"image": pictures(), "mask": pictures()[:, 0]}, [6]), "y": torch.arange(6)}, [6]
    )
    steps = [RandomCrop(12), RandomVerticalFlip()]
    out = Compose(steps, on=(("a", "image"), ("a", "mask"))).apply(batch, keys())
    assert torch.equal(out["a", "image"][:, 0], out["a", "mask"])
    one = Compose(steps, on=("a", "image")).apply(batch, keys())
    assert torch.equal(one["a", "image"], out["a", "image"])
    assert torch.equal(one["a", "mask"], batch["a", "mask"])
    listed = Compose(steps, on=(0, 1)).apply([pictures(), pictures()[:, 0]], keys())
    assert torch.equal(listed[0][:, 0], listed[1])


def test_fields_that_cannot_follow():
    batch = {"image": pictures(), "odd": torch.zeros(6, 5, 7), "far": torch.zeros(6, 3, 9, 9)}
    for name in ("odd", "far"):
        with pytest.raises(TransformError, match=rf"'{name}' .*expected a mask of their height and width"):
            Compose([RandomCrop(8)], on=("image", name)).apply(batch, keys())
    with pytest.raises(FieldError, match="no field 'nothing'"):
        Compose([RandomCrop(8)], on=("image", "nothing")).apply(batch, keys())


# Wrong parameters


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RandomCrop(8, padding=-1), "padding=-1; expected an int that is not negative"),
        (lambda: RandomCrop(8, padding=(1, 2, 3)), "two or four"),
        (lambda: RandomResizedCrop(8, scale=(0.5, 0.1)), r"scale=\(0.5, 0.1\); expected two positive"),
        (lambda: RandomResizedCrop(8, ratio=(0, 1)), "ratio"),
        (lambda: Resize(8, "linear"), "interpolation='linear'; expected one of nearest"),
        (lambda: Resize((8, 9), max_size=10), "max_size=10"),
        (lambda: Resize(8, max_size=8), "larger than that"),
        (lambda: RandomRotation(-3), "degrees=-3"),
        (lambda: RandomRotation((1, 2, 3)), "degrees"),
        (lambda: RandomRotation(3, "bicubic"), "expected one of nearest, bilinear"),
        (lambda: RandomAffine(3, translate=(0.1, 1.5)), "expected two shares from 0 to 1"),
        (lambda: RandomAffine(3, scale=(0, 1)), "expected positive factors"),
        (lambda: RandomAffine(3, shear=(2, 1)), "shear"),
    ],
)
def test_wrong_parameters(make, words):
    with pytest.raises(TransformError, match=words):
        make()


def test_a_crop_larger_than_the_padded_image():
    with pytest.raises(TransformError, match="26 x 22 pixels .*, the crop is 27 x 27"):
        RandomCrop(27, padding=1).apply(pictures(), keys())


def test_parameters_in_the_open():
    assert isinstance(params(Resize(8), pictures()), Resampled)
    assert isinstance(params(RandomRotation(8), pictures()), Warped)
