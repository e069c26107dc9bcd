"""The random numbers of a pipeline: drawn in one pass from the second batch on, and the same as one by one."""

import numpy as np
import pytest
import torch
from image_batches import keys, photos

from memfeed import transforms as T
from memfeed.random import Keys, uniform, uniform_streams
from memfeed.transforms import operation
from memfeed.transforms.operation import KeyedDraws
from memfeed.transforms.ops.rotate import inverse_matrix

STEPS = [T.RandomCrop(8), T.RandomHorizontalFlip(), T.ColorJitter(0.4), T.RandomGrayscale(0.3)]


@pytest.mark.parametrize("occurrence", [0, torch.arange(9) * 5])
def test_streams_in_one_pass_are_those_of_each(occurrence):
    k = Keys(3, -1, torch.arange(9) - 4, occurrence)
    found = uniform_streams(k, (("a", 2), (7, 5), ("7", 1)))
    assert list(found) == ["a", 7, "7"]
    for stream, draws in (("a", 2), (7, 5), ("7", 1)):
        assert (found[stream] == uniform(k, stream, draws)).all()
    some = np.array([8, 3, 3])
    assert (uniform(k, "a", 4, some) == uniform(k.part(some), "a", 4)).all()


def test_later_batches_draw_in_one_pass(monkeypatch):
    passes = []
    for name in ("uniform", "uniform_streams"):
        original = getattr(operation, name)
        monkeypatch.setattr(
            operation, name, lambda *args, name=name, original=original: (passes.append(name), original(*args))[1]
        )
    transform = T.Compose(STEPS)
    for epoch in range(3):
        passes.clear()
        found = transform.apply(photos(), keys(epoch=epoch))
        assert passes == (["uniform"] * len(STEPS) if epoch == 0 else ["uniform_streams"])
        assert torch.equal(found, T.Compose(STEPS).apply(photos(), keys(epoch=epoch)))


def test_a_transform_that_asks_for_more_or_writes_to_its_numbers():
    asked = {"a": 2, "b": 1}
    draws = KeyedDraws(keys(), asked)
    expected = uniform(keys(), "a", 4)
    draws("a", 2, None)[:] = 9
    assert (draws("a", 2, None) == expected[:, :2]).all()
    assert (draws("a", 4, None) == expected).all()
    assert asked == {"a": 4, "b": 1}
    assert (KeyedDraws(keys(), asked)("a", 3, None) == expected[:, :3]).all()


@pytest.mark.parametrize("center", [None, (3.0, 9.5)])
def test_rotations_are_affine_maps_without_the_rest(center):
    rotation = T.RandomRotation((-170, 100), center=center)
    found = rotation.params(range(50), shape=(3, 12, 10))["RandomRotation.0"].matrix
    angle = -170 + uniform(keys(50), "RandomRotation.0")[:, 0] * 270
    zero = np.zeros(50)
    middle = (0.0, 0.0) if center is None else (3.0 - 5, 9.5 - 6)
    assert np.array_equal(found, inverse_matrix(-angle, np.zeros((50, 2)), zero + 1, (zero, zero), middle))
