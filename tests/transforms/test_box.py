"""The noise of RandomErasing: a function of seed and position, the same in torch, NumPy and on every device."""

import numpy as np
import torch

from memfeed.random import _DRAW_STEP, mix, mix_signed
from memfeed.transforms.params.value_changes import normal


def test_the_hash_in_torch_is_that_of_numpy():
    bits = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    got = mix_signed(torch.from_numpy(bits.view(np.int64).copy())).numpy().view(np.uint64)
    assert np.array_equal(got, mix(bits.copy()))


def test_it_is_what_box_and_muller_make_of_the_hash():
    seeds, position = np.arange(5, dtype=np.uint64) * np.uint64(2**50), np.arange(7, dtype=np.uint64)
    bits = mix(position * np.uint64(_DRAW_STEP) + seeds[:, None])
    first, second = bits >> np.uint64(40), bits >> np.uint64(16) & np.uint64(0xFFFFFF)
    expected = np.sqrt(-2 * np.log((first + 1) / 2**24)) * np.cos(2 * np.pi * second / 2**24)
    got = normal(torch.from_numpy(seeds.astype(np.int64))[:, None], torch.arange(7))
    torch.testing.assert_close(got.double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


def test_it_is_normal_and_finite():
    noise = normal(torch.arange(40)[:, None], torch.arange(50_000))
    assert noise.isfinite().all()
    assert abs(noise.mean()) < 0.003
    assert abs(noise.std() - 1) < 0.003
    assert abs((noise**4).mean() - 3) < 0.05
    assert abs((noise[:, 1:] * noise[:, :-1]).mean()) < 0.003, "neighbours have nothing in common"
    assert abs((noise[1:] * noise[:-1]).mean()) < 0.003, "nor do images"
