"""Changes that move pixels: image by image against the plain form, in any batch, and wrong parameters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_batches import keys, params, pictures

from memfeed.errors import TransformError
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


@settings(max_examples=250)
@given(sequences(), st.integers(0, 2**32))
def test_sample_by_sample_equals_plain(sequence, seed):
    transform, images = sequence
    before, k = images.clone(), keys(len(images), seed)
    fast, slow = transform.apply(images, k), transform.reference(images, k)
    assert torch.equal(images, before)
    assert fast.dtype == slow.dtype
    atol = 1e-3 if fast.dtype.is_floating_point else 0
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=atol)


@settings(max_examples=60)
@given(sequences(), st.integers(0, 2**32))
def test_a_sample_is_moved_the_same_in_any_batch(sequence, seed):
    transform, images = sequence
    whole = transform.apply(images, keys(len(images), seed))
    for row in range(len(images)):
        alone = transform.apply(images[row : row + 1], Keys(seed, 0, torch.tensor([row])))
        assert torch.equal(alone[0], whole[row])


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


def test_parameters_in_the_open():
    assert isinstance(params(Resize(8), pictures()), Resampled)
    assert isinstance(params(RandomRotation(8), pictures()), Warped)
