"""Fixtures for the tests of transforms."""

import importlib

import pytest


@pytest.fixture
def functional(monkeypatch):
    """The functions of torchvision's transforms, resizing uint8 as such on every CPU.

    torchvision 0.21 does so only where the CPU's capability is called AVX2. With AVX512 it resizes floats and rounds.
    """
    pytest.importorskip("torchvision")
    from torchvision.transforms.v2 import functional

    geometry = importlib.import_module("torchvision.transforms.v2.functional._geometry")
    if hasattr(geometry, "_do_native_uint8_resize_on_cpu"):
        smooth = ("bilinear", "bicubic")
        monkeypatch.setattr(geometry, "_do_native_uint8_resize_on_cpu", lambda mode: mode.value in smooth)
    return functional
