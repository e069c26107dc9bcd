"""Fixtures for the tests of transforms."""

import pytest


@pytest.fixture
def functional():
    """The functions of torchvision's transforms."""
    pytest.importorskip("torchvision")
    from torchvision.transforms.v2 import functional

    return functional
