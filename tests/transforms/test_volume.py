"""Boxes of volumes: one by one, all at once, and as slices of NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.errors import TransformError
from memfeed.transforms.params.window import VolumeWindow


def sliced(volume, begin, size, flips, fill):
    """Return the box of a volume [c, d, h, w], voxel by voxel."""
    out = np.full((len(volume), *size), fill, volume.dtype)
    for index in np.ndindex(*size):
        at = [
            first + (length - 1 - i if flip else i)
            for first, length, flip, i in zip(begin, size, flips, index, strict=True)
        ]
        if all(0 <= place < side for place, side in zip(at, volume.shape[1:], strict=True)):
            out[(slice(None), *index)] = volume[(slice(None), *at)]
    return out


@settings(max_examples=60)
@given(
    begin=st.lists(st.tuples(*[st.integers(-3, 4)] * 3), min_size=1, max_size=3),
    size=st.tuples(*[st.integers(1, 4)] * 3),
    fill=st.sampled_from([0, 7]),
    data=st.data(),
)
def test_voxels(begin, size, fill, data):
    n, sides = len(begin), (3, 4, 2)
    # a box lies at least one voxel inside
    begin = [[min(max(b, 1 - s), side - 1) for b, s, side in zip(one, size, sides, strict=True)] for one in begin]
    flips = np.array(data.draw(st.lists(st.tuples(*[st.booleans()] * 3), min_size=n, max_size=n)), np.bool_)
    window = VolumeWindow(np.array(begin, np.int64), size, flips, fill)
    volumes = torch.arange(n * 2 * 24, dtype=torch.int32).view(n, 2, *sides)
    expected = [sliced(volumes[i].numpy(), begin[i], size, flips[i], fill) for i in range(n)]
    assert window.output_shape(volumes.shape) == (n, 2, *size)
    assert window.all(volumes).numpy().tolist() == np.stack(expected).tolist()
    for i in range(n):
        assert window.one(volumes[i], i).numpy().tolist() == expected[i].tolist()


def test_the_whole_is_a_view():
    volume = torch.zeros(2, 3, 4, 5)
    window = VolumeWindow.whole(torch.Size((1, 2, 3, 4, 5)))
    assert window.one(volume, 0).data_ptr() == volume.data_ptr()
    assert VolumeWindow.whole(torch.Size((1, 2, 3, 4, 5)), fill=3).nearest().fill == 0


def test_a_fill_for_each_channel():
    window = VolumeWindow(np.array([[-1, 0, 0]]), (2, 1, 1), np.zeros((1, 3), np.bool_), [5, 6])
    assert window.all(torch.zeros(1, 2, 1, 1, 1)).flatten().tolist() == [5, 0, 6, 0]


def test_points_have_no_depth():
    with pytest.raises(TransformError, match="found boxes or keypoints beside volumes"):
        VolumeWindow.whole(torch.Size((1, 1, 1, 1, 1))).points(torch.zeros(1, 2), torch.zeros(1))
