"""Affine maps of images: all as one by one, joined as in turn, and points where the pixels go."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.transforms.params.geometry import Warped

numbers = st.floats(-3, 3)


def turned(*angles, move=(0.0, 0.0), size=(8, 8), **options):
    matrix = [[[np.cos(a), -np.sin(a), move[0]], [np.sin(a), np.cos(a), move[1]]] for a in angles]
    return Warped(np.array(matrix), *size, **options)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int32, torch.float16])
@pytest.mark.parametrize("fill", [0, 3, [1, 2]])
def test_all_is_one_by_one(mode, dtype, fill):
    warp = turned(0.0, 0.7, -2.0, move=(1.5, -1), size=(5, 8), mode=mode, fill=fill)
    images = torch.arange(3 * 2 * 40).view(3, 2, 5, 8).remainder(200).to(dtype)
    every = warp.all(images)
    assert every.dtype is dtype
    assert torch.equal(every, torch.stack([warp.one(images[i], i) for i in range(3)]))
    assert warp.all(images[:, :, :0]).shape == (3, 2, 0, 8)


def test_quarter_turns_are_exact():
    image = torch.arange(64).view(1, 8, 8)
    assert torch.equal(turned(np.pi / 2).one(image, 0), image.rot90(1, (1, 2)))
    assert torch.equal(turned(np.pi).one(image, 0), image.rot90(2, (1, 2)))
    assert torch.equal(turned(0.0).one(image, 0), image)


def test_moves_show_the_fill():
    image = torch.ones(1, 4, 4, dtype=torch.uint8)
    moved = turned(0.0, move=(2, 0), size=(4, 4), fill=9).one(image, 0)
    assert moved[0, 0].tolist() == [1, 1, 9, 9]
    assert turned(0.0, move=(2, 0), size=(4, 4), fill=9, mode="bilinear").nearest().one(image, 0)[0, 0].tolist() == [
        1,
        1,
        0,
        0,
    ]


@settings(max_examples=40)
@given(numbers, numbers, st.tuples(numbers, numbers), st.tuples(numbers, numbers))
def test_joined_maps_move_points_as_both_in_turn(one, other, move, also):
    first, second = turned(one, move=move), turned(other, move=also)
    joined = first.then(second)
    points = torch.tensor([[0.0, 0.0], [3.0, 5.0], [8.0, 1.0]], dtype=torch.float64)
    sample = torch.zeros(3, dtype=torch.int64)
    in_turn = second.points(first.points(points, sample), sample)
    assert torch.allclose(joined.points(points, sample), in_turn, atol=1e-9)


def test_maps_that_sample_in_different_ways_are_not_joined():
    assert turned(1.0).then(turned(1.0, mode="bilinear")) is None
    assert turned(1.0).then(turned(1.0, fill=1)) is None


def test_a_point_goes_where_its_pixel_goes():
    image = torch.zeros(1, 8, 8)
    image[0, 2, 6] = 1
    warp = turned(np.pi / 2, move=(1.0, 0.0))
    row, column = np.argwhere(warp.one(image, 0)[0].numpy())[0]
    (point,) = warp.points(torch.tensor([[6.5, 2.5]], dtype=torch.float64), torch.zeros(1, dtype=torch.int64)).tolist()
    assert point == pytest.approx([column + 0.5, row + 0.5])
