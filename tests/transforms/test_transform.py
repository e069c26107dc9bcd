"""What every transform has: draws by key, calls as a module, and errors."""

import copy

import pytest
import torch
from image_batches import keys, photos

from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.transforms import (
    CenterCrop,
    Compose,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomVerticalFlip,
    ToDtype,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


PINNED_CORNERS = [8, 93, 64, 12, 63]  # a change here changes what every resumed run sees


def augment(size=8, **options):
    return Compose([RandomCrop(size), RandomHorizontalFlip(), Normalize(MEAN, STD)], **options)


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


def test_parameters_are_pinned():
    positions = torch.arange(100).reshape(1, 1, 10, 10).expand(5, 1, 10, 10)
    result = Compose([RandomCrop(4), RandomHorizontalFlip(), RandomVerticalFlip()]).apply(positions, keys(5))
    assert result[:, 0, 0, 0].tolist() == PINNED_CORNERS


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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RandomCrop(0), ["size=0", "positive int", "e.g. 224"]),
        (lambda: CenterCrop((1, 2, 3, 4)), ["size=(1, 2, 3, 4)", "(height, width)"]),
        (lambda: RandomHorizontalFlip(1.5), ["p=1.5", "from 0 to 1"]),
        (lambda: RandomVerticalFlip(float("nan")), ["p=nan", "from 0 to 1"]),
        (lambda: ToDtype(torch.uint8, scale=True), ["torch.uint8", "float dtype", "leave scale out"]),
        (lambda: Normalize(MEAN, STD[:2]), ["mean has 3 values and std has 2", "one per channel"]),
        (lambda: Normalize([], []), ["mean has 0 values"]),
        (lambda: Normalize([0.0], [0.0]), ["std=(0.0,)", "no std of 0", "constant"]),
        (lambda: Normalize([float("inf")], [1.0]), ["mean=(inf,)", "finite"]),
        (lambda: Compose([3]), ["got a int", "memfeed.transforms", "{field: callable}"]),
    ],
)
def test_wrong_parameters(make, words):
    with pytest.raises(TransformError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("path", ["apply", "reference"])
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
        (RandomCrop((12, 11)), photos(), ["12 x 10 pixels", "12 x 11", "resize"]),
        (Normalize([0.5], [0.5]), [photos()], ["field 0", "3 channels", "mean and std 1 values"]),
        (RandomCrop(2), [torch.arange(6)], ["found 0 fields", "0 (int64 [6])", "with on="]),
        (RandomCrop(2), {}, ["found 0 fields", "no tensors, in a dict"]),
        (RandomCrop(2), {"x": photos(), "m": photos(c=1)}, ["found 2 fields", "'x'", "'m'", "with on="]),
        (RandomCrop(2, on="y"), {"x": photos(), "y": torch.zeros(6, 4)}, ["field 'y'", "rank 2", "[n, c, h, w]"]),
        (RandomCrop(2), {"x": photos() > 3}, ["torch.bool", "expected integers or floats"]),
        (RandomCrop(2), photos(5), ["5 samples for 6 keys", "one key per sample"]),
    ],
)
def test_wrong_batches(path, transform, batch, words):
    with pytest.raises(TransformError) as caught:
        getattr(transform, path)(batch, keys())
    for word in words:
        assert word in str(caught.value)


def test_wrong_calls():
    with pytest.raises(TransformError, match="was called with a dict; expected a tensor"):
        augment()({"x": photos()})
    with pytest.raises(TransformError, match="the tensor has rank 3; expected images"):
        augment()(photos()[0])
    with pytest.raises(TransformError, match="got a Tensor and no keys"):
        augment().apply(photos())
