"""RandomErasing: which boxes are painted over, with what, and wrong arguments."""

import pytest
import torch
from image_batches import keys, photos

from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.transforms import RandomErasing


def test_erased_boxes():
    images = torch.full((400, 3, 40, 30), 2.0)
    transform = RandomErasing(0.5, value=[0.25, 0.5, 0.75])
    out = transform.apply(images, keys(400))
    drawn = transform.params(range(400))["RandomErasing.0"]
    erased = (out != images).any(1)
    areas = erased.flatten(1).sum(1)
    assert 150 < (areas > 0).sum() < 250
    assert torch.equal(areas, torch.from_numpy(drawn.box_height * drawn.box_width))
    shares = areas[areas > 0] / 1200
    assert 0.015 < shares.min() < shares.max() < 0.35
    for row in range(20):
        values = out[row][:, erased[row]]
        assert torch.equal(values, torch.tensor([0.25, 0.5, 0.75])[:, None].expand_as(values))


def test_noise_depends_on_the_key_alone():
    images = torch.zeros(6, 3, 20, 20)
    transform = RandomErasing(1.0, value="random")
    whole = transform.apply(images, keys())
    alone = transform.apply(images[4:5], Keys(0, 0, torch.tensor([4])))
    assert torch.equal(alone[0], whole[4])
    noise = whole[whole != 0]
    assert abs(noise.mean()) < 0.15
    assert 0.85 < noise.std() < 1.15


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RandomErasing(float("nan")), "p=nan"),
        (lambda: RandomErasing(scale=(0.5, 0.1)), "scale"),
        (lambda: RandomErasing(ratio=(0, 1)), "ratio"),
        (lambda: RandomErasing(value="noise"), "value='noise'"),
        (lambda: RandomErasing(1.0, value="random").apply(photos(), keys()), "images are torch.uint8; expected floats"),
    ],
)
def test_wrong_parameters(make, words):
    with pytest.raises(TransformError, match=words):
        make()
