"""The values of a store in a few characters."""

import numpy as np
import pytest
import torch

from memfeed.store.store_html import CELL_WIDTH, shape_text, summary


def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"), ("a", "'a'"), (None, "None"), (torch.tensor([1, 2]), "[1, 2]"), (torch.tensor(2.5), "2.5"),
        (b"ab", "b'ab' (2 B)"),
        (torch.zeros(0, 5), "[0, 5] empty"), (torch.arange(7), "[7] 0 to 6, mean 3"),
        (np.ones((2, 4)), "[2, 4] 1 to 1, mean 1"),
        (torch.ones(7, dtype=torch.bool), "[7] 7 true"), (torch.ones(7, dtype=torch.complex64), "[7]"),
        ("\x1b[0m", "'\\x1b[0m'"),
        ({"a": [1]}, "{'a': [1]}"),
    ],
    ids=lambda value: f"{value!r:.20}",
)  # fmt: skip
def test_values(value, text):
    assert summary(value) == text


@pytest.mark.parametrize("value", ["x" * 1000, b"x" * 1000, list(range(1000)), torch.rand(6) * 1e30, {"k" * 90: 1}])
def test_values_are_cut(value):
    assert len(summary(value)) <= CELL_WIDTH + len(" (1.0 KB)")


def test_nesting_without_end():
    assert summary(deep()) == "a deeply nested list"


def test_shapes():
    assert shape_text(torch.zeros(2, 0)) == "[2, 0]"
    assert shape_text(torch.zeros(())) == "[]"
