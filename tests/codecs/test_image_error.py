"""The error of decoded images: mean, largest and PSNR, against a formula in floats."""

import math

import numpy as np
import pytest
from skimage.metrics import peak_signal_noise_ratio

from memfeed.codecs.image_error import ErrorSum


def measure_error(original, decoded):
    errors = ErrorSum()
    errors.add(original, decoded)
    return errors.error()


def test_the_error_is_that_of_the_formula():
    rng = np.random.default_rng(0)
    original, decoded = rng.integers(0, 256, (2, 5, 3, 8, 8), dtype=np.uint8)
    mean, largest, psnr = measure_error(original, decoded)
    difference = np.abs(original.astype(float) - decoded)
    assert mean == pytest.approx(difference.mean())
    assert largest == difference.max()
    assert psnr == pytest.approx(peak_signal_noise_ratio(original, decoded, data_range=255))
    one_by_one = ErrorSum()
    for pair in zip(original, decoded, strict=True):
        one_by_one.add(*pair)
    assert one_by_one.error() == (mean, largest, psnr)


def test_equal_images_have_no_error():
    image = np.full((3, 4, 4), 7, np.uint8)
    assert measure_error(image, image.copy()) == (0, 0, math.inf)
    assert measure_error(image[:0], image[:0]) == (0, 0, math.inf)
    assert measure_error(image, image + 255) == pytest.approx((1, 1, 48.1308), rel=1e-4)
    assert measure_error(np.zeros(4, np.uint8), np.full(4, 255, np.uint8)) == (255, 255, 0)


def test_other_arrays_are_refused():
    for other in (np.zeros((3, 4)), np.zeros((4, 3), np.uint8)):
        with pytest.raises(ValueError, match="expected uint8 of one shape"):
            measure_error(np.zeros((3, 4), np.uint8), other)
