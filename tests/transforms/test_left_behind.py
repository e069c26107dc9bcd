"""Fields that a transform would leave behind when it moves the pixels of the images are an error."""

import re

import pytest
import torch

import memfeed
from memfeed import Loader
from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.transforms import ColorJitter, Compose, Normalize, PerSample, RandomCrop, RandomHorizontalFlip, Resize

N = 5
KEYS = Keys(0, 0, torch.arange(N))
IMAGES = torch.randint(0, 256, (N, 3, 12, 10), dtype=torch.uint8)
MASKS = torch.randint(0, 9, (N, 12, 10))


@pytest.mark.parametrize("transform", [RandomCrop(8), RandomHorizontalFlip(), Resize(6), PerSample(lambda x: x)])
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("mask", MASKS),
        ("depth", MASKS.float()),
        ("target", torch.rand(N, 4, 12, 10)[:, None].expand(N, 2, 4, 12, 10)),
        ("boxes", torch.rand(N, 2, 4)),
        ("gt_bboxes", torch.rand(N, 2, 4)),
        ("keypoints", torch.rand(N, 7, 2)),
        ("label_map", torch.rand(N, 3, 5)),
        ("landmarks", torch.rand(N, 5, 2)),
        ("box", torch.rand(N, 1, 4)),
        ("target", torch.randint(0, 9, (N, 3, 4))),
        ("points", torch.nested.as_nested_tensor([torch.rand(1 + i % 2, 2) for i in range(N)], layout=torch.jagged)),
    ],
)
def test_a_field_that_would_be_left_behind_is_an_error(transform, name, field):
    batch = {"image": IMAGES, name: field, "label": torch.arange(N)}
    with pytest.raises(TransformError) as caught:
        transform.apply(batch, KEYS)
    text = str(caught.value)
    assert f"on=['image', '{name}'] moves all of them, on='image' only the images" in text
    assert len(text) < 400
    alone = type(transform)(**_arguments(transform), on="image")
    assert alone.apply(batch, KEYS)[name] is field, "it was decided to leave it"


def jagged(make):
    return torch.nested.as_nested_tensor([make(i) for i in range(N)], layout=torch.jagged)


WIDE = jagged(lambda i: torch.randint(0, 256, (3, 12, 10 + i), dtype=torch.uint8))


@pytest.mark.parametrize(
    ("images", "field"),
    [
        (IMAGES, jagged(lambda i: torch.zeros(1 + i % 2, 12, 10))),  # instances of each image
        (WIDE, jagged(lambda i: torch.zeros(12, 10 + i))),
        (WIDE, jagged(lambda i: torch.zeros(5, 12, 10 + i))),
    ],
)
def test_rows_of_the_size_of_their_images_would_be_left_behind(images, field):
    with pytest.raises(TransformError, match="expected on= to say what follows"):
        RandomHorizontalFlip().apply({"image": images, "other": field}, KEYS)
    with pytest.raises(TransformError, match="expected on= to say what follows"):
        list(Loader(_store_of(images, field), 2, transform=RandomHorizontalFlip()))


def test_several_masks_of_an_image_cannot_follow_it():
    masks = jagged(lambda i: torch.zeros(1 + i % 2, 12, 10))
    with pytest.raises(TransformError, match="expected a mask of their height and width"):
        RandomHorizontalFlip(1.0, on=["image", "other"]).apply({"image": IMAGES, "other": masks}, KEYS)


def _store_of(images, field):
    return memfeed.cache([(one, other, 3) for one, other in zip(images.unbind(), field.unbind(), strict=True)])


@pytest.mark.parametrize(
    ("images", "field"),
    [
        (IMAGES, jagged(lambda i: torch.zeros(1 + i, 12, 9))),
        (IMAGES, jagged(lambda i: torch.zeros(12, 10 + i))),
        (WIDE, jagged(lambda i: torch.zeros(12, 11 + i))),
        (WIDE, torch.zeros(N, 12, 10)),
    ],
)
def test_rows_of_other_sizes_stay(images, field):
    assert RandomHorizontalFlip(p=1.0).apply({"image": images, "other": field}, KEYS)["other"] is field


@pytest.mark.parametrize("name", ["box", "landmarks", "points", "joints", "pose", "mask_2"])
def test_names_of_places(name):
    with pytest.raises(TransformError, match="expected on= to say what follows"):
        RandomHorizontalFlip().apply({"image": IMAGES, name: torch.rand(N, 4)}, KEYS)


def _arguments(transform):
    return (
        {"fn": transform.fn}
        if isinstance(transform, PerSample)
        else {"p": 0.5}
        if hasattr(transform, "p")
        else {"size": 6}
    )


def test_what_the_error_says_works():
    batch = {"image": IMAGES, "mask": MASKS}
    with pytest.raises(TransformError) as caught:
        RandomCrop(8).apply(batch, KEYS)
    on = eval(re.search(r"on=(\[[^\]]*\]) moves all", str(caught.value))[1])
    assert RandomCrop(8, on=on).apply(batch, KEYS)["mask"].shape == (N, 8, 8)


@pytest.mark.parametrize("field", [torch.rand(N, 4), torch.rand(N, 3, 3), torch.rand(N, 7, 2) > 0.5])
def test_what_is_no_place_in_an_image_stays(field):
    batch = RandomHorizontalFlip(p=1).apply({"image": IMAGES, "other": field}, KEYS)
    assert torch.equal(batch["other"], field)


def test_steps_of_a_window_are_no_points():
    batch = {"image": IMAGES, "action": torch.rand(N, 8, 2)}
    moved = RandomHorizontalFlip(p=1).apply(batch, KEYS, windows=[("action",)])
    assert torch.equal(moved["action"], batch["action"])


def test_what_moves_no_pixels_leaves_nothing_behind():
    batch = {"image": IMAGES, "mask": MASKS}
    moved = Compose([ColorJitter(0.3), Normalize([0.5] * 3, [0.5] * 3)]).apply(batch, KEYS)
    assert torch.equal(moved["mask"], MASKS)


def test_a_loader_says_it_too():
    with pytest.raises(TransformError, match="found 1 "):
        list(Loader((IMAGES, MASKS), 2, transform=RandomHorizontalFlip()))
    list(Loader((IMAGES, torch.arange(N)), 2, transform=RandomHorizontalFlip()))
