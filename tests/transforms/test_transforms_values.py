"""Normalize and ToDtype against torchvision."""

import pytest
import torch
from image_batches import keys, photos

from memfeed.transforms import Normalize, ToDtype

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_normalize_is_torchvisions(functional):
    scaled = functional.to_dtype(photos(), torch.float32, scale=True)
    expected = functional.normalize(scaled, MEAN, STD)
    torch.testing.assert_close(Normalize(MEAN, STD).apply(photos(), keys()), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(Normalize(MEAN, STD).apply(scaled, keys()), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("source", [torch.uint8, torch.int16, torch.float64])
def test_to_dtype_is_torchvisions(functional, source, scale):
    images = photos(dtype=source)
    expected = functional.to_dtype(images, torch.float32, scale=scale)
    result = ToDtype(torch.float32, scale=scale).apply(images, keys())
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
