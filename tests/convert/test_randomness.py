"""Random samples are refused, unless the user asks for one draw of them."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from memfeed.errors import (
    RandomDataError,
)
from support import Made, cache


class Flipped(Made):
    transform = "RandomFlip(p=0.1)"

    def __init__(self, draw):
        super().__init__(None, 50)
        self.draw = draw

    def __getitem__(self, index):
        return {"image": torch.arange(4) + index, "drawn": self.draw(index)}


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda i: torch.rand(()), "gave different values in field drawn"),
        (lambda i: np.random.rand(), "gave different values in field drawn"),
        (lambda i: random.random(), "gave different values in field drawn"),
        (lambda i: int(torch.rand(()) < 0), "drew from the global generator of torch"),
        (lambda i: int(np.random.rand() < 0), "drew from the global generator of numpy"),
        (lambda i: int(random.random() < 0), "drew from the global generator of random"),
        (lambda i: np.random.default_rng().random(), "gave different values in field drawn"),
    ],
)
def test_random_samples_are_caught(path, draw, found):
    with pytest.raises(RandomDataError, match=found) as caught:
        cache(Flipped(draw), path)
    assert "RandomFlip(p=0.1)" in str(caught.value)
    assert "Loader(..., transform=...)" in str(caught.value)
    assert not path.with_name("a.mf.build").exists()
    assert len(cache(Flipped(draw), path, allow_random=True)) == 50
    assert len(cache(Flipped(draw), path, allow_random=True)) == 50


def seeded(i):
    torch.manual_seed(i)
    return torch.rand(3)


@pytest.mark.parametrize("draw", [seeded, lambda i: float("nan"), lambda i: np.random.default_rng(i).random(3)])
def test_samples_that_seed_themselves_are_not_random(path, draw):
    assert len(cache(Flipped(draw), path)) == 50


def test_generators_are_left_as_they_were(path):
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    want = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    cache(Flipped(lambda i: i), path, workers=2)
    cache(Flipped(lambda i: i), path)
    assert (torch.rand(1), np.random.rand(), random.random()) == want


class RandomStream(IterableDataset):
    def __iter__(self):
        return (torch.rand(2) for _ in range(10))


def test_a_random_stream_is_caught(path):
    with pytest.raises(RandomDataError, match="iterating twice gave different values"):
        cache(RandomStream(), path)
    assert len(cache(RandomStream(), path, allow_random=True)) == 10
