"""Changes of colour: all as one by one, each as torchvision's, and factors that change nothing."""

import numpy as np
import pytest
import torch

from memfeed.transforms.params.value_changes import CHANGES, Gray, Jitter

IMAGES = torch.randint(0, 256, (5, 3, 4, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
FACTORS = {name: np.linspace(0.2, 1.8, 5, dtype=np.float32) for name in ("brightness", "contrast", "saturation")}
FACTORS["hue"] = np.linspace(-0.5, 0.5, 5, dtype=np.float32)


def orders(count):
    return np.stack([np.random.RandomState(i).permutation(count) for i in range(5)])


@pytest.mark.parametrize("form", ["bytes", "floats", "gray"])
def test_all_is_one_by_one(form):
    images = IMAGES if form == "bytes" else IMAGES.float() / 255
    names = list(FACTORS)
    if form == "gray":
        images, names = images[:, :1], names[:2]
    jitter = Jitter({name: FACTORS[name] for name in names}, orders(len(names)))
    every = jitter.all(images)
    each = torch.stack([jitter.one(image, i) for i, image in enumerate(images)])
    assert every.dtype is images.dtype
    assert torch.allclose(every.float(), each.float(), atol=1e-5 if form != "bytes" else 0)


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_that_of_torchvision(name):
    functions = pytest.importorskip("torchvision.transforms.v2.functional")
    for i, factor in enumerate(FACTORS[name]):
        own = CHANGES[name](IMAGES[i : i + 1], torch.full((1, 1, 1, 1), float(factor)))[0]
        theirs = getattr(functions, f"adjust_{name}")(IMAGES[i], float(factor))
        assert (own.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize(("name", "factor"), [("brightness", 1), ("contrast", 1), ("saturation", 1)])
def test_a_factor_of_one_changes_nothing(name, factor):
    assert torch.equal(CHANGES[name](IMAGES, torch.full((5, 1, 1, 1), float(factor))), IMAGES)


def test_black_and_white_have_no_hue():
    image = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    assert torch.equal(CHANGES["hue"](image, torch.full((1, 1, 1, 1), 0.3)), image)


def test_nothing_to_do():
    assert Jitter({}, np.zeros((5, 0), np.int64)).all(IMAGES) is IMAGES
    none = Jitter({"brightness": np.zeros(0, np.float32)}, np.zeros((0, 1), np.int64))
    assert none.all(IMAGES[:0]).shape == (0, 3, 4, 6)


def test_gray():
    gray = Gray(np.array([True, False, True, False, False]))
    every = gray.all(IMAGES)
    for i, image in enumerate(IMAGES):
        assert torch.equal(every[i], gray.one(image, i))
        assert torch.equal(every[i], image) == (not gray.chosen[i])
    assert torch.equal(every[0, 0], every[0, 1])
    single = IMAGES[:, :1]
    assert torch.equal(gray.all(single), single)
