import pytest
import torch

from memfeed.testing import equal


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(1, 2)),
        ([torch.ones(1)], (torch.ones(1),)),
        (torch.zeros(1), -torch.zeros(1)),
        (torch.tensor([1.0], dtype=torch.float8_e4m3fn), torch.tensor([2.0], dtype=torch.float8_e4m3fn)),
    ],
)
def test_different_values_are_not_equal(a, b):
    assert not equal(a, b)
    assert equal(a, a)
    assert equal(b, b)
