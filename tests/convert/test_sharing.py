"""Samples that share memory are found, and others are not."""

import types

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from memfeed.convert.randomness import share_memory

BUFFER, ARRAY, LIST, DICT = torch.zeros(4), np.zeros(4), [1, 2], {"a": 1}
CYCLE = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: BUFFER, lambda i: ARRAY, lambda i: LIST, lambda i: DICT, lambda i: (i, BUFFER),
        lambda i: {"x": [ARRAY]},
        lambda i: BUFFER[:2], lambda i: BUFFER.view(2, 2), lambda i: BUFFER.numpy(), lambda i: torch.from_numpy(ARRAY),
        lambda i: TensorDict({"a": BUFFER}, []), lambda i: CYCLE, lambda i: types.SimpleNamespace,
        lambda i: ARRAY[None],
    ],
)  # fmt: skip
def test_shared(make):
    assert share_memory([make(0), make(1)])
    assert not share_memory([make(0)])


@pytest.mark.parametrize(
    "make",
    [
        lambda i: i, lambda i: None, lambda i: "text", lambda i: b"x", lambda i: (), lambda i: (1, "a"),
        lambda i: np.int64(1),
        lambda i: torch.zeros(4), lambda i: np.zeros(4), lambda i: [1, 2], lambda i: BUFFER[i : i + 1],
        lambda i: ARRAY[i:],
        lambda i: torch.zeros(0), lambda i: np.zeros(0), lambda i: BUFFER[:0], lambda i: torch.eye(2).to_sparse(),
        lambda i: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), lambda i: 1.5, lambda i: 1j,
    ],
)  # fmt: skip
def test_not_shared(make):
    assert not share_memory([make(0), make(1), make(2)])


def test_nothing():
    assert not share_memory([])
    same = torch.zeros(2)
    assert not share_memory([(same, same)])  # within one sample
    assert share_memory([(torch.zeros(2),), (torch.zeros(2), same), (same,)])
