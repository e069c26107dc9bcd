"""Fields that are no images [n, c, h, w]: greyscale images without a channel dim, vectors, volumes."""

import numpy as np
import pytest
import torch
from image_batches import keys, photos

from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    Normalize,
    Pointwise,
    RandomCrop,
    RandomErasing,
    RandomFlip,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    ToDtype,
)

N = 6
MEAN, STD = (0.5, 0.4), (0.2, 0.3)


def volumes(dtype=torch.uint8, shape=(N, 2, 7, 12, 10)):
    made = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return made.to(dtype) / 255 if dtype.is_floating_point else made


# [n, h, w]


@pytest.mark.parametrize(
    "transform",
    [
        RandomHorizontalFlip(on="x"),
        RandomVerticalFlip(on="x"),
        RandomFlip((0, 1), on="x"),
        Normalize((0.5,), (0.2,), on="x"),
        ToDtype(torch.float32, scale=True, on="x"),
        Pointwise(lambda x: 255 - x, on="x"),
        RandomCrop(8, padding=1, on="x"),
        Compose([RandomResizedCrop(8), ColorJitter(0.3), RandomRotation(9), RandomErasing(1.0)], on="x"),
        Compose([Resize(9), CenterCrop(8), Normalize((0.5,), (0.2,))], on="x", memory_format=torch.channels_last),
    ],
    ids=str,
)
def test_images_without_channels_are_images_of_one(transform):
    with_channel = photos(c=1)
    for path in ("apply", "reference"):
        out = getattr(transform, path)({"x": with_channel[:, 0]}, keys())["x"]
        assert torch.equal(out, getattr(transform, path)({"x": with_channel}, keys())["x"][:, 0])


def test_they_follow_and_are_followed():
    batch = {"depth": photos(c=1)[:, 0], "mask": photos(c=1)[:, 0]}
    out = Compose([RandomCrop(8), RandomHorizontalFlip()], on=["depth", "mask"]).apply(batch, keys())
    assert torch.equal(out["depth"], out["mask"])
    assert out["depth"].shape == (N, 8, 8)


# [n, d]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_entries_of_a_vector_are_channels(dtype):
    vectors = torch.arange(8).view(4, 2).to(dtype)
    largest = 1 if dtype.is_floating_point else 255
    expected = (vectors.double() / largest - torch.tensor(MEAN)) / torch.tensor(STD)
    steps = [Normalize(MEAN, STD), Pointwise(torch.tanh)]
    for path in ("apply", "reference"):
        out = getattr(Compose(steps, on="x"), path)({"x": vectors}, keys(4))["x"]
        assert out.shape == (4, 2)
        torch.testing.assert_close(out.double(), expected.tanh(), rtol=1e-5, atol=1e-6)
    assert ToDtype(torch.float16, on="x").apply({"x": vectors}, keys(4))["x"].dtype == torch.float16
    per_entry = Pointwise(lambda x: x * torch.tensor([1, 2]), on="x")
    assert torch.equal(per_entry.apply({"x": vectors}, keys(4))["x"], vectors * torch.tensor([1, 2]))


def test_what_has_no_meaning_for_vectors():
    batch = {"x": torch.rand(4, 3)}
    for transform in (
        RandomHorizontalFlip(),
        RandomFlip(),
        RandomCrop(2),
        Resize(2),
        ColorJitter(0.1),
        RandomErasing(),
    ):
        with pytest.raises(TransformError, match=r"field 'x' .* has rank 2, vectors \[n, d\]; expected images"):
            Compose([transform], on="x").apply(batch, keys(4))
    with pytest.raises(TransformError, match="images have 3 channels, mean and std 2 values"):
        Normalize(MEAN, STD, on="x").apply(batch, keys(4))
    with pytest.raises(TransformError, match="made other values of a part"):
        Pointwise(lambda x: x - x.mean(), on="x").apply(batch, keys(4))
    with pytest.raises(TransformError, match="has rank 1"):
        Normalize(MEAN, STD, on="x").apply({"x": torch.rand(4)}, keys(4))


# [n, c, d, h, w]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    "steps",
    [
        [RandomCrop((4, 8, 6))],
        [RandomCrop(5), RandomHorizontalFlip(), RandomVerticalFlip(), RandomFlip()],
        [CenterCrop((5, 8, 7)), Normalize(MEAN, STD)],
        [Normalize(MEAN, STD), RandomFlip((0, 1, 2)), RandomCrop(9, padding=2, fill=(1, 2))],
        [RandomCrop((8, 14, 6), pad_if_needed=True), ToDtype(torch.float16), Pointwise(lambda x: x * 2)],
        [Pointwise(lambda x: x * torch.tensor([1, 2])[:, None, None, None]), RandomFlip(-1)],
    ],
    ids=str,
)
def test_volumes(steps, dtype):
    given = {"scan": volumes(dtype), "mask": volumes()[:, 0]}
    transform = Compose(steps, on=["scan", "mask"])
    out, plain = transform.apply(given, keys()), transform.reference(given, keys())
    torch.testing.assert_close(
        out["scan"], plain["scan"], rtol=0, atol=2e-3 if out["scan"].dtype.itemsize == 2 else 1e-5
    )
    assert torch.equal(out["mask"], plain["mask"])
    for row in range(N):
        one = transform.apply({k: v[row : row + 1] for k, v in given.items()}, Keys(0, 0, torch.tensor([row])))
        assert torch.equal(one["scan"][0], out["scan"][row])
    assert out["mask"].shape == (N, *out["scan"].shape[2:])


def test_crops_and_flips_of_volumes_by_hand():
    scans = volumes()
    drawn = RandomCrop((4, 8, 6)).params(range(N), shape=scans.shape[1:])["RandomCrop.0"]
    out = RandomCrop((4, 8, 6), on="x").apply({"x": scans}, keys())["x"]
    for row, (z, y, x) in enumerate(drawn.begin.tolist()):
        assert torch.equal(out[row], scans[row, :, z : z + 4, y : y + 8, x : x + 6])
    assert len(np.unique(drawn.begin, axis=0)) > 3
    padded = CenterCrop((10, 5, 13), on="x").apply({"x": scans}, keys())["x"]
    assert torch.equal(padded[:, :, 1:8, :, 1:11], scans[:, :, :, 4:9])
    assert padded.double().sum() == scans[:, :, :, 4:9].double().sum()
    assert torch.equal(CenterCrop((3, 8, 6), on="x").apply({"x": scans}, keys())["x"], scans[:, :, 2:5, 2:10, 2:8])
    for axis, dims in ((0, [2]), (1, [3]), (2, [4]), (-1, [4]), ((0, 2), [2, 4])):
        assert torch.equal(RandomFlip(axis, 1.0, on="x").apply({"x": scans}, keys())["x"], scans.flip(dims))
    assert torch.equal(RandomHorizontalFlip(1.0, on="x").apply({"x": scans}, keys())["x"], scans.flip(4))
    assert torch.equal(RandomVerticalFlip(1.0, on="x").apply({"x": scans}, keys())["x"], scans.flip(3))
    flips = RandomFlip((0, 1, 2)).params(range(400), shape=scans.shape[1:])["RandomFlip.0"].flips
    assert len(np.unique(flips, axis=0)) == 8, "each axis by itself"
    assert torch.equal(RandomFlip(0, 1.0).apply(photos(), keys()), photos().flip(2)), "of images 0 is the height"


def test_volumes_of_several_sizes():
    scans = [volumes(shape=(2, 6 + row % 3, 9 + row, 8)) for row in range(N)]
    out = Compose([RandomCrop(6), RandomFlip((0, 1, 2)), Normalize(MEAN, STD)], on="x").apply({"x": scans}, keys())
    assert out["x"].shape == (N, 2, 6, 6, 6)
    assert type(RandomFlip(on="x").apply({"x": scans}, keys())["x"]) is list
    last = Compose([CenterCrop(6), Normalize(MEAN, STD)], on="x", memory_format=torch.channels_last)
    assert last.apply({"x": scans}, keys())["x"].is_contiguous(memory_format=torch.channels_last_3d)


def test_what_has_no_meaning_for_volumes():
    batch = {"x": volumes(), "boxes": torch.rand(N, 2, 4)}
    for transform in (Resize(4), RandomResizedCrop(4), RandomRotation(9), ColorJitter(0.1)):
        with pytest.raises(TransformError, match=r"has volumes \[n, c, d, h, w\]; expected images"):
            Compose([transform], on="x").apply(batch, keys())
    for transform, words in (
        (RandomCrop((4, 4)), r"size=\(4, 4\) for \[6, 2, 7, 12, 10\]; expected \(depth, height, width\)"),
        (RandomCrop(4, padding=(1, 2)), "for volumes; expected one int for all sides"),
        (RandomCrop((9, 4, 4)), r"7 x 12 x 10 pixels \(depth x height x width\), the crop is 9 x 4 x 4"),
        (RandomFlip(3), r"axes=\(3,\).* from 0 to 2"),
        (RandomFlip((2, -1)), "expected each once"),
    ):
        with pytest.raises(TransformError, match=words):
            Compose([transform], on="x").apply(batch, keys())
    with pytest.raises(TransformError, match="size=\\(4, 4, 4\\).*expected \\(height, width\\) for images"):
        RandomCrop((4, 4, 4)).apply(photos(), keys())
    with pytest.raises(TransformError, match="boxes or keypoints beside volumes"):
        RandomFlip(on=["x", "boxes"]).apply(batch, keys())
    with pytest.raises(TransformError, match="axes=\\(\\)"):
        RandomFlip(())
    with pytest.raises(TransformError, match="p=2"):
        RandomFlip(0, 2)
