"""Images of several sizes: a list of tensors, which some transforms make one batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from image_batches import RecordingLender

from memfeed.errors import FieldError, TransformError
from memfeed.random import Keys
from memfeed.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    MixUp,
    Normalize,
    PerSample,
    Pointwise,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    ToDtype,
    Transform,
)

_HYMENOPTERA = "shared/data/hymenoptera_data/val/ants"
PHOTOS = next((above / _HYMENOPTERA for above in Path(__file__).parents if (above / _HYMENOPTERA).is_dir()), None)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(20, 31), (24, 24), (31, 20), (24, 24), (20, 27), (22, 20), (20, 31)]
N = len(SIZES)


def images(dtype=torch.uint8, channels=3):
    """Noise; three of the seven share a size with another."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(0, 256, (channels, h, w), dtype=torch.uint8, generator=generator) for h, w in SIZES]
    return [image.to(dtype) / 255 if dtype.is_floating_point else image for image in made]


def keys(n=N, epoch=0):
    return Keys(0, epoch, torch.arange(n) * 3)


def alone(transform, image, row):
    """What a batch of this one image, of one size, gives."""
    return transform.apply(image[None], Keys(0, 0, torch.tensor([row * 3])))[0]


TO_ONE_SIZE = [
    RandomResizedCrop(16),
    RandomResizedCrop((12, 18), interpolation="bicubic"),
    Resize((16, 12)),
    CenterCrop(16),
    CenterCrop((41, 18)),
    RandomCrop(16),
    RandomCrop(28, padding=4, fill=7),
    RandomCrop((40, 22), padding=(1, 2), pad_if_needed=True, fill=(1, 2, 3)),
    Compose([RandomResizedCrop(16), RandomHorizontalFlip(), Normalize(MEAN, STD)]),
    Compose([Resize(20), CenterCrop(16), Normalize(MEAN, STD)]),
    Compose([Resize(20), CenterCrop((16, 35)), RandomCrop(15), Normalize(MEAN, STD)]),
    Compose([Normalize(MEAN, STD), RandomHorizontalFlip(), RandomCrop(16), RandomVerticalFlip()]),
    Compose([RandomRotation(20), RandomAffine(10), ColorJitter(0.3), RandomCrop(18), ToDtype(torch.float16)]),
    Compose([ToDtype(torch.float32, scale=True), ToDtype(torch.float64), RandomErasing(0.9), CenterCrop(20)]),
]
TO_A_LIST = [
    Resize(16),
    Resize(16, max_size=20, interpolation="nearest"),
    RandomHorizontalFlip(),
    RandomVerticalFlip(),
    Normalize(MEAN, STD),
    ToDtype(torch.float32, scale=True),
    Pointwise(lambda x: 255 - x),
    ColorJitter(0.3, 0.3, 0.3, 0.1),
    RandomGrayscale(0.5),
    RandomErasing(0.9),
    RandomRotation(30, "bilinear", fill=3),
    Compose([RandomRotation(20), RandomAffine(10, scale=(0.8, 1.2))]),
    Compose([RandomHorizontalFlip(), ColorJitter(0.3), Normalize(MEAN, STD), Pointwise(torch.tanh)]),
]


@pytest.mark.parametrize("path", ["apply", "reference"])
@pytest.mark.parametrize("transform", [*TO_ONE_SIZE, *TO_A_LIST], ids=str)
def test_each_image_gets_what_it_gets_alone(transform, path):
    given = images()
    out = getattr(transform, path)({"image": given, "label": torch.arange(N)}, keys())["image"]
    assert type(out) is (torch.Tensor if transform in TO_ONE_SIZE else list)
    assert len(out) == N
    for row, (image, expected) in enumerate(zip(out, given, strict=True)):
        torch.testing.assert_close(image, alone(transform, expected, row), rtol=0, atol=2e-6)
    assert all(torch.equal(a, b) for a, b in zip(given, images(), strict=True)), "the images are only read"


@pytest.mark.parametrize("transform", [TO_ONE_SIZE[7], TO_A_LIST[-1], Resize(16)], ids=str)
def test_any_split_of_a_batch_gives_the_same(transform):
    whole = transform.apply(images(), keys())
    for part in ([3], [6, 0], [1, 3, 4]):
        some = transform.apply([images()[row] for row in part], Keys(0, 0, torch.tensor(part) * 3))
        assert type(some) is type(whole)
        assert all(torch.equal(image, whole[row]) for image, row in zip(some, part, strict=True))
    other = transform.apply(images(), keys(epoch=1))
    assert isinstance(transform, Resize) or not all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))


def test_images_that_happen_to_have_one_size_stay_a_list():
    same = [torch.zeros(3, 12, 12, dtype=torch.uint8) for _ in range(4)]
    assert type(Resize(8).apply(same, keys(4))) is list
    assert type(RandomHorizontalFlip().apply({"x": same}, keys(4))["x"]) is list
    assert CenterCrop(8).apply(same, keys(4)).shape == (4, 3, 8, 8)
    assert CenterCrop(8).apply(same[:1], keys(1)).shape == (1, 3, 8, 8)


def test_called_with_a_list_it_draws_from_torchs_generator():
    transform = Compose([RandomResizedCrop(16), RandomHorizontalFlip()])
    torch.manual_seed(0)
    first, second = transform(images()), transform(images())
    torch.manual_seed(0)
    assert torch.equal(transform(images()), first)
    assert not torch.equal(first, second)
    assert [tuple(image.shape) for image in Resize(10)(images())][:2] == [(3, 10, 15), (3, 10, 10)]
    assert RandomErasing(1.0, (0.5, 1.0))(images()[:1])[0].shape == (3, 20, 31), "draws again for boxes that do not fit"


def test_gradients_and_other_memory_formats():
    given = [image.requires_grad_() for image in images(torch.float32)]
    Compose([RandomResizedCrop(8), Normalize(MEAN, STD)]).apply(given, keys()).sum().backward()
    assert all(image.grad.abs().sum() > 0 for image in given)
    last = Compose([CenterCrop(8), Normalize(MEAN, STD)], memory_format=torch.channels_last).apply(images(), keys())
    assert last.is_contiguous(memory_format=torch.channels_last)
    listed = Compose([Normalize(MEAN, STD)], memory_format=torch.channels_last)
    for path in (listed.apply, listed.reference):
        assert all(image.permute(1, 2, 0).is_contiguous() for image in path(images(), keys()))


def test_the_memory_comes_from_the_allocator():
    lender = RecordingLender()
    Compose([RandomResizedCrop(8), Normalize(MEAN, STD)]).apply(images(), keys(), allocator=lender)
    assert lender.requests == [((N, 3, 8, 8), torch.float32)]
    lender = RecordingLender()
    out = RandomHorizontalFlip().apply(images(), keys(), allocator=lender)
    assert lender.requests == [((sum(image.numel() for image in out),), torch.uint8)]


class Inverted(Transform):
    """A transform of a user's own, which knows nothing of lists."""

    def make_params(self, shape, dtype, uniform):
        assert len(shape) == 4
        return uniform(1)[:, 0]

    def transform(self, image, params):
        return image * torch.from_numpy(params < 0.5)[:, None, None, None]


class Upper(Inverted):
    """Another one, whose outputs have one size."""

    makes_one_size = True

    def transform(self, image, params):
        return image[:, :, :6, :5]


def test_transforms_of_ones_own():
    for transform in (Inverted(), Compose([RandomHorizontalFlip(), Inverted(), Normalize(MEAN, STD)])):
        out = transform.apply(images(), keys())
        for row, image in enumerate(images()):
            torch.testing.assert_close(out[row], alone(transform, image, row), rtol=0, atol=1e-6)
    assert Compose([Upper(), RandomHorizontalFlip()]).apply(images(), keys()).shape == (N, 3, 6, 5)
    wrong = Inverted()
    wrong.makes_one_size = True
    with pytest.raises(TransformError, match=r"found images \[3, 20, 27\] and \[3, 20, 31\] for one batch"):
        wrong.apply(images(), keys())


# followers


FOLLOWING = ["image", "mask", "plane", "boxes", "points", "label"]


def scene():
    given = images()
    generator = torch.Generator().manual_seed(1)
    masks = [torch.randint(0, 5, size, generator=generator) for size in SIZES]
    boxes = torch.tensor([[2.0, 3.0, 15.0, 12.0], [4.0, 4.0, 19.0, 19.0]]).expand(N, 2, 4)
    points = [torch.rand(row % 3, 2, generator=generator) * 18 for row in range(N)]
    return {
        "image": given,
        "mask": masks,
        "plane": [mask[None].expand(2, *mask.shape) for mask in masks],
        "boxes": boxes,
        "points": torch.nested.nested_tensor(points, layout=torch.jagged),
        "label": torch.arange(N),
    }


@pytest.mark.parametrize(
    "steps",
    [
        [RandomResizedCrop(16), RandomHorizontalFlip()],
        [Resize(17), RandomVerticalFlip(), CenterCrop(16)],
        [RandomRotation(20), RandomCrop(24, pad_if_needed=True)],
        [RandomHorizontalFlip(), Resize(14)],
        [Normalize(MEAN, STD)],
    ],
    ids=str,
)
def test_masks_boxes_and_points_follow(steps):
    transform = Compose(steps, on=FOLLOWING)
    out = transform.apply(scene(), keys())
    for row in range(N):
        one = {name: scene()[name][row][None] for name in FOLLOWING}
        expected = transform.apply(one, Keys(0, 0, torch.tensor([row * 3])))
        for name in FOLLOWING:
            torch.testing.assert_close(out[name][row], expected[name][0], rtol=0, atol=1e-5)
    assert type(out["mask"]) is type(out["plane"]) is type(out["image"])


def test_what_would_be_left_behind_is_named():
    with pytest.raises(
        TransformError, match=r"'mask' \(list of 7 int64 \[\*, \*\]\).* beside 'image' \(list of 7 uint8"
    ):
        CenterCrop(8).apply({"image": images(), "mask": scene()["mask"]}, keys())
    other = {"image": images(), "depth": scene()["mask"]}
    with pytest.raises(TransformError, match="'depth'"):
        CenterCrop(8).apply(other, keys())
    with pytest.raises(TransformError, match="follows images of several sizes; expected a mask"):
        CenterCrop(8, on=["image", "far"]).apply({"image": images(), "far": images()[::-1]}, keys())


# every kind of field


def test_greyscale_lists_and_jagged_images():
    grey = [image[0] for image in images()]
    out = Compose([RandomResizedCrop(8), Normalize((0.5,), (0.5,))], on="x").apply({"x": grey}, keys())
    assert out["x"].shape == (N, 8, 8)
    assert [row.ndim for row in RandomHorizontalFlip(on="x").apply({"x": grey}, keys())["x"]] == [2] * N
    wide = [image[:, :20] for image in images()]
    jagged = torch.nested.nested_tensor(wide, layout=torch.jagged) if _can_be_jagged(wide) else None
    if jagged is not None:
        expected = RandomResizedCrop(8).apply(wide, keys())
        assert torch.equal(RandomResizedCrop(8).apply({"x": jagged}, keys())["x"], expected)
        assert type(Resize(8).apply({"x": jagged}, keys())["x"]) is list


def _can_be_jagged(rows):
    try:
        return torch.nested.nested_tensor(rows, layout=torch.jagged).ndim == 4
    except RuntimeError:  # torch 2.6 takes rows whose first dim varies only
        return False


def test_lists_that_are_containers_stay_containers():
    fields = [torch.zeros(2, 3, 8, 8), torch.ones(2, 3, 8, 8)]
    first, second = RandomCrop(4, on=0).apply(fields, keys(2))
    assert first.shape == (2, 3, 4, 4)
    assert torch.equal(second, fields[1])
    masks = [torch.zeros(3, 8, 8), torch.ones(3, 8, 8), torch.ones(3, 8, 8)]  # three fields of three rows
    assert RandomCrop(4, on=1).apply(masks, keys(3))[1].shape == (3, 4, 4)


def test_wrong_lists():
    with pytest.raises(TransformError, match="field 'x' .*rows without a value"):
        Compose([CenterCrop(4)], on="x").apply({"x": [images()[0], None]}, keys(2), ragged={("x",)})
    with pytest.raises(TransformError, match=r"rows of torch.float32 of 3 dims and torch.uint8 of 3 dims"):
        CenterCrop(4, on="x").apply({"x": [images()[0], images(torch.float32)[1]]}, keys(2), ragged={("x",)})
    with pytest.raises(TransformError, match="different numbers of channels"):
        ToDtype(torch.float32, scale=True).apply([images()[0], images(channels=1)[1]], keys(2))
    with pytest.raises(TransformError, match="images are 20 x 31 pixels"):
        RandomCrop(22).apply(images(), keys())
    with pytest.raises(TransformError, match="has 7 samples for 3 keys"):
        CenterCrop(2, on="x").apply({"x": images()}, keys(3), ragged={("x",)})
    with pytest.raises(FieldError, match="list of 7 uint8"):
        CenterCrop(2, on="y").apply({"x": images()}, keys())
    for mix in (MixUp(num_classes=9), CutMix(num_classes=9)):
        with pytest.raises(TransformError, match="takes images of one size"):
            mix.apply({"x": images(), "y": torch.arange(N)}, keys())


def test_functions_of_one_sample():
    both = PerSample(lambda image, mask: (image[:, :8, :9], mask[:8, :9]), on=["image", "mask"])
    out = both.apply(scene(), keys())
    assert out["image"].shape == (N, 3, 8, 9)
    assert torch.equal(out["mask"], torch.stack([mask[:8, :9] for mask in scene()["mask"]]))
    with pytest.raises(TransformError, match="expected one shape .*one_size=False"):
        PerSample(lambda image: image.flip(-1)).apply(images(), keys())
    flips = PerSample(lambda image: image.flip(-1), one_size=False)
    listed = Compose([flips, RandomHorizontalFlip(1.0)]).apply(images(), keys())
    assert all(torch.equal(a, b) for a, b in zip(listed, images(), strict=True))
    assert type(flips.apply(torch.stack(images()[1:4:2]), keys(2))) is list
    noisy = PerSample(lambda image: torch.rand(2) + float(np.random.rand()))
    assert torch.equal(noisy.apply(images(), keys())[3:4], noisy.apply(images()[3:4], Keys(0, 0, torch.tensor([9]))))


# torchvision's ImageNet recipe


def photos():
    """Real photographs at short side 256, or made ones where there are none."""
    if PHOTOS is None:
        return [torch.randint(0, 256, (3, h * 9, w * 9), dtype=torch.uint8) for h, w in SIZES]
    image, v2 = pytest.importorskip("PIL.Image"), pytest.importorskip("torchvision.transforms.v2.functional")
    return [
        v2.resize(v2.pil_to_tensor(image.open(path).convert("RGB")), [256], antialias=True)
        for path in sorted(PHOTOS.glob("*.jpg"))[:8]
    ]


def test_training_recipe_is_torchvisions(functional):
    given = photos()
    recipe = Compose([RandomResizedCrop(224), RandomHorizontalFlip(), Normalize(MEAN, STD)])
    n = len(given)
    out = recipe.apply(given, keys(n))
    for row, image in enumerate(given):
        drawn = recipe.params([row * 3], shape=image.shape)
        box, flip = drawn["RandomResizedCrop.0"], drawn["RandomHorizontalFlip.0"]
        place = [int(a[0]) for a in (box.top, box.left, box.box_height, box.box_width)]
        assert place[0] + place[2] <= image.shape[1]
        assert place[1] + place[3] <= image.shape[2]
        expected = functional.resized_crop(image, *place, [224, 224], antialias=True)
        expected = functional.horizontal_flip(expected) if flip.hflip[0] else expected
        uint8 = Compose([RandomResizedCrop(224), RandomHorizontalFlip()]).apply(given, keys(n))[row]
        assert torch.equal(uint8, expected)
        expected = functional.normalize(functional.to_dtype(expected, torch.float32, scale=True), MEAN, STD)
        torch.testing.assert_close(out[row], expected, rtol=0, atol=2e-6)


def test_evaluation_recipe_is_torchvisions(functional):
    given = photos()
    for side, crop in ((256, 224), (232, 224)):
        out = Compose([Resize(side), CenterCrop(crop), Normalize(MEAN, STD)]).apply(given, keys(len(given)))
        uint8 = Compose([Resize(side), CenterCrop(crop)]).apply(given, keys(len(given)))
        for row, image in enumerate(given):
            expected = functional.center_crop(functional.resize(image, [side], antialias=True), [crop])
            assert torch.equal(uint8[row], expected)
            expected = functional.normalize(functional.to_dtype(expected, torch.float32, scale=True), MEAN, STD)
            torch.testing.assert_close(out[row], expected, rtol=0, atol=2e-6)


def test_padded_crops_are_torchvisions(functional):
    crop = RandomCrop(26, padding=(1, 2), pad_if_needed=True, fill=9)
    out = crop.apply(images(), keys())
    for row, image in enumerate(images()):
        drawn = crop.params([row * 3], shape=image.shape)["RandomCrop.0"]
        padded = functional.pad(image, [1, 2], fill=9)
        down, across = (max(0, 26 - side) for side in padded.shape[1:])
        padded = functional.pad(padded, [across, down], fill=9)
        top, left = int(drawn.top[0]) + 2 + down, int(drawn.left[0]) + 1 + across
        assert torch.equal(out[row], functional.crop(padded, top, left, 26, 26))
