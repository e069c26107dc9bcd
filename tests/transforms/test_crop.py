"""Windows that crops and flips draw: inside, equally likely, padded where asked, and checked arguments."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.errors import TransformError
from memfeed.transforms import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomVerticalFlip
from memfeed.transforms.ops.crop import check_size


def drawn(transform, shape, values=0.5):
    """Return the parameters for numbers that are drawn so."""
    return transform.make_params(torch.Size(shape), torch.uint8, lambda k: np.broadcast_to(values, (shape[0], k)))


@pytest.mark.parametrize(("size", "sizes"), [(4, (4, 4)), ((4, 5), (4, 5)), ([4, 5], (4, 5)), ((3, 4, 5), (3, 4, 5))])
def test_sizes(size, sizes):
    assert tuple(check_size(size, 3))[-len(sizes) :] == sizes


@pytest.mark.parametrize("size", [0, -1, (4, 0), (1, 2, 3, 4), "44", 4.0, None, (4.0, 4), True])
def test_what_is_no_size(size):
    with pytest.raises(TransformError):
        RandomCrop(size)


@pytest.mark.parametrize("padding", [-1, (1, 2, 3), (1, -1), "1", 1.5, (1, 2, 3, 4, 5)])
def test_what_is_no_padding(padding):
    with pytest.raises(TransformError):
        RandomCrop(4, padding=padding)


@settings(max_examples=60)
@given(
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    image=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    value=st.floats(0, 1, exclude_max=True),
)
def test_windows_lie_inside_the_padded_image(size, image, padding, value):
    left, top, right, bottom = padding
    crop = RandomCrop(size, padding=padding)
    if size[0] > image[0] + top + bottom or size[1] > image[1] + left + right:
        with pytest.raises(TransformError):
            drawn(crop, (2, 3, *image), value)
        crop = RandomCrop(size, padding=padding, pad_if_needed=True)
        window = drawn(crop, (2, 3, *image), value)
        assert (window.height, window.width) == size
        return
    window = drawn(crop, (2, 3, *image), value)
    assert -top <= window.top[0] <= image[0] + bottom - size[0]
    assert -left <= window.left[0] <= image[1] + right - size[1]


def test_each_window_is_equally_likely():
    tops = [int(drawn(RandomCrop(4), (1, 1, 6, 4), (i + 0.5) / 300).top[0]) for i in range(300)]
    assert [tops.count(top) for top in range(3)] == [100] * 3
    assert drawn(RandomCrop(4), (1, 1, 6, 4), 1 - 2**-53).top[0] == 2


@pytest.mark.parametrize("image", [(9, 9), (8, 8), (7, 6), (3, 3), (4, 10)])
@pytest.mark.parametrize("size", [(4, 4), (5, 3), (8, 9)])
def test_the_middle_is_that_of_torchvision(size, image):
    v2 = pytest.importorskip("torchvision.transforms.v2")
    given_image = torch.arange(image[0] * image[1]).view(1, 1, *image)
    window = drawn(CenterCrop(size), (1, 1, *image))
    assert torch.equal(window.all(given_image), v2.CenterCrop(size)(given_image))


@pytest.mark.parametrize(("flip", "axis"), [(RandomHorizontalFlip, -1), (RandomVerticalFlip, -2)])
def test_flips(flip, axis):
    images = torch.arange(24).view(2, 1, 3, 4)
    values = np.array([[0.1], [0.9]])
    window = flip(0.5).make_params(images.shape, images.dtype, lambda k: values)
    assert torch.equal(window.all(images), torch.stack([images[0].flip(axis), images[1]]))
    for p in (1.5, -0.1, float("nan"), "0.5", None):
        with pytest.raises(TransformError, match="expected a probability from 0 to 1"):
            flip(p)


def test_volumes():
    box = drawn(RandomCrop(2, padding=1), (1, 1, 2, 3, 4), 0.0)
    assert box.size == (2, 2, 2)
    assert box.begin.tolist() == [[-1, -1, -1]]
    with pytest.raises(TransformError, match="for volumes; expected one int for all sides"):
        drawn(RandomCrop(2, padding=(1, 2)), (1, 1, 4, 4, 4))
