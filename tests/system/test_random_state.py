"""The global generators: saved, restored, seeded, and written as JSON."""

import itertools
import json
import random

import numpy as np
import pytest
import torch

from memfeed.system import random_state


def draw():
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_a_state_that_is_restored_draws_the_same():
    state = random_state.save()
    drawn = draw()
    assert random_state.save() != state
    random_state.restore(random_state.decode(json.loads(json.dumps(random_state.encode(state)))))
    assert random_state.save() == state
    assert draw() == drawn


def test_a_block_leaves_no_trace():
    before = random_state.save()
    with random_state.seeded(7):
        first = draw()
    with pytest.raises(ValueError, match="stop"), random_state.seeded(7):
        assert draw() == first
        raise ValueError("stop")
    assert random_state.save() == before


def draw_digits():
    return (
        torch.randint(4, (40,)).tolist(),
        np.random.randint(4, size=40).tolist(),
        [random.randrange(4) for _ in range(40)],
    )


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_each_generator_has_another_seed(seed):
    with random_state.seeded(seed):
        drawn = draw_digits()
    assert not any(one == other for one, other in itertools.combinations(drawn, 2))
    with random_state.seeded(seed):
        assert draw_digits() == drawn
    with random_state.seeded(seed ^ 1):
        assert not any(one == other for one, other in zip(draw_digits(), drawn, strict=True))


@pytest.mark.parametrize("encoded", [{}, {"torch": 1, "numpy": [], "python": []}])
def test_what_is_no_state_is_refused(encoded):
    with pytest.raises((KeyError, ValueError, TypeError)):
        random_state.decode(encoded)
