"""Changes of colour: image by image against the plain form, against torchvision, and their draws."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_batches import keys

from memfeed.errors import TransformError
from memfeed.transforms import (
    ColorJitter,
    Compose,
    Normalize,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToDtype,
)
from memfeed.transforms.params.value_changes import CHANGES

NAMES = list(CHANGES)


def photos(n=6, c=3, h=12, w=10, dtype=torch.uint8):
    images = torch.randint(0, 256, (n, c, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[:, :, :3] = images[:, :1, :3]  # gray ones too, which have no hue
    return images.to(dtype) / 255 if dtype.is_floating_point else images.to(dtype)


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(["jitter", "gray", "erase", "noise", "flip", "rrc", "float", "norm"]), max_size=5),
    st.sampled_from([1, 3]),
    st.sampled_from([torch.uint8, torch.float32, torch.float64]),
    st.integers(0, 2**32),
)
def test_image_by_image_equals_plain(kinds, c, dtype, seed):
    made = {
        "jitter": lambda: ColorJitter(0.5, 0.5, 0.5, 0.2),
        "gray": lambda: RandomGrayscale(0.5),
        "erase": lambda: RandomErasing(0.7, value=[0.5] * c),
        "noise": lambda: Compose([ToDtype(torch.float32, scale=True), RandomErasing(0.7, value="random")]),
        "flip": RandomHorizontalFlip,
        "rrc": lambda: RandomResizedCrop(9),
        "float": lambda: ToDtype(torch.float32, scale=True),
        "norm": lambda: Normalize([0.4] * c, [0.3] * c),
    }
    transform, images = Compose([made[kind]() for kind in kinds]), photos(5, c, dtype=dtype)
    before, k = images.clone(), keys(5, seed)
    fast, slow = transform.apply(images, k), transform.reference(images, k)
    assert torch.equal(images, before)
    # a mean is summed in another order for one image than for several, and a whole number may lie at an edge
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-3 if fast.dtype.is_floating_point else 1)


@pytest.mark.parametrize("c", [1, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_changes_are_torchvisions(functional, name, dtype, c):
    adjust = getattr(functional, f"adjust_{name}")
    for amount in (-0.4, 0.0, 0.3) if name == "hue" else (0.0, 0.6, 1.0, 1.7):
        image = photos(2, c, dtype=dtype)
        got = ColorJitter(**{name: (amount, amount)}).apply(image, keys(2))
        expected = adjust(image, amount)
        assert got.dtype == dtype
        atol = 1e-4 if dtype.is_floating_point else 1
        torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_changes_come_in_the_order_drawn(functional):
    images = photos(30)
    transform = ColorJitter(0.4, 0.4, 0.4, 0.1)
    got = transform.apply(images, keys(30))
    drawn = transform.params(range(30))["ColorJitter.0"]
    for row, image in enumerate(images):
        for number in drawn.order[row]:
            name = NAMES[number]
            image = getattr(functional, f"adjust_{name}")(image, float(drawn.factors[name][row]))
        assert (got[row].int() - image.int()).abs().max() <= 6, "each change rounds once"
    assert len({tuple(order) for order in drawn.order}) > 10
    assert all(0.6 <= f.min() < f.max() <= 1.4 for name, f in drawn.factors.items() if name != "hue")


def test_gray_is_torchvisions(functional):
    images = photos(40)
    got = RandomGrayscale(0.5).apply(images, keys(40))
    gray = functional.rgb_to_grayscale(images, 3)
    changed = [not torch.equal(a, b) for a, b in zip(got, images, strict=True)]
    assert 10 < sum(changed) < 30
    for row, is_gray in enumerate(changed):
        torch.testing.assert_close(got[row], gray[row] if is_gray else images[row], rtol=0, atol=1)


# params


def test_params_are_those_of_the_batch():
    images = photos(6, 3, 20, 20)
    transform = Compose(
        [RandomResizedCrop(8), RandomHorizontalFlip(), ColorJitter(0.2), RandomErasing(), RandomErasing()]
    )
    with pytest.raises(TransformError, match=r"expected shape=\(c, h, w\)"):
        transform.params([0], 0)
    out = transform.apply(images, keys(6, seed=5, epoch=3))
    drawn = transform.params([4, 2], 3, seed=5)
    assert list(drawn) == [
        "RandomResizedCrop.0", "RandomHorizontalFlip.0", "ColorJitter.0", "RandomErasing.0", "RandomErasing.1",
    ]  # fmt: skip
    for place, row in enumerate((4, 2)):
        image = images[row]
        for made in drawn.values():
            image = made.one(image, place)
        assert torch.equal(image, out[row])
    assert not np.array_equal(transform.params([4, 2], 4, seed=5)["RandomErasing.0"].top, drawn["RandomErasing.0"].top)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ColorJitter(-0.1), "brightness=-0.1; expected a number that is not negative"),
        (lambda: ColorJitter(hue=0.6), "hue=0.6"),
        (lambda: ColorJitter(contrast=(0.5, 0.2)), "contrast"),
        (lambda: ColorJitter(saturation=float("nan")), "saturation=nan"),
        (lambda: RandomGrayscale(1.5), "p=1.5"),
        (lambda: ColorJitter(0.1).apply(photos(c=4), keys()), "images have 4 channels; expected 1 or 3"),
        (lambda: RandomGrayscale(0.1).apply(photos(c=2), keys()), "images have 2 channels"),
    ],
)
def test_wrong_parameters(make, words):
    with pytest.raises(TransformError, match=words):
        make()
