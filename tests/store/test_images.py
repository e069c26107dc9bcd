"""Which fields are images, how they become pixels, and their thumbnails."""

import base64
import io

import numpy as np
import pytest
import torch

from memfeed.schema.fields import Field
from memfeed.store.store_html import may_hold_images, pixels, thumbnail


def field(dtype, shape, kind="fixed"):
    return Field(path=("x",), name="x", stem="x", kind=kind, dtype=dtype, shape=shape)


@pytest.mark.parametrize(
    ("dtype", "shape", "kind", "expected"),
    [
        ("uint8", (3, 4, 5), "fixed", True), ("uint8", (4, 5), "fixed", True), ("uint8", (2, 4, 5), "fixed", False),
        ("uint8", (None, None, None), "list", True), ("uint8", (1, None, 4), "jagged", True),
        ("uint8", (5, 4, 3), "fixed", True), ("uint8", (None, None, 3), "list", True),
        ("uint8", (3,), "fixed", False), ("int16", (3, 8, 8), "fixed", False), ("bool", (8, 8), "fixed", False),
        ("float32", (3, 8, 9), "fixed", True), ("bfloat16", (8, 9, 1), "fixed", True),
        ("float64", (8, 8), "fixed", True),
        ("float32", (3, 4, 5), "fixed", False), ("float32", (8, 4), "fixed", False),
        ("float32", (5, 8, 8), "fixed", False),
        ("float8_e5m2", (8, 8), "fixed", False),
        ("uint8", (), "str", False), ("uint8", (1, 3, 4, 5), "fixed", False),
    ],
)  # fmt: skip
def test_fields_of_images(dtype, shape, kind, expected):
    assert may_hold_images(field(dtype, shape, kind)) is expected


def bytes_of(*shape):
    return torch.arange(np.prod(shape)).reshape(shape).to(torch.uint8)


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (bytes_of(3, 4, 5), (4, 5, 3)), (bytes_of(1, 4, 5), (4, 5)), (bytes_of(4, 5), (4, 5)),
        (bytes_of(4, 5, 3), (5, 3, 4)), (bytes_of(5, 4, 3), (5, 4, 3)), (bytes_of(5, 4, 1), (5, 4)),
        (torch.rand(3, 8, 9), (8, 9, 3)), (torch.rand(8, 9).half(), (8, 9)),
        (torch.rand(3, 8, 7), None), (torch.rand(8, 8) + 0.5, None), (torch.rand(8, 8) - 0.5, None),
        (torch.full((8, 8), float("nan")), None), (torch.zeros(8, 8, dtype=torch.int64), None),
        (None, None), (bytes_of(2, 4, 5), None), (bytes_of(3, 0, 5), None), ("text", None), (bytes_of(7), None),
    ],
    ids=lambda one: str(getattr(one, "shape", one)),
)  # fmt: skip
def test_pixels(value, shape):
    found = pixels(value)
    assert (None if found is None else tuple(found.shape)) == shape


def test_pixels_keep_their_places():
    image = bytes_of(3, 6, 5)
    assert torch.equal(pixels(image), image.permute(1, 2, 0))
    assert torch.equal(pixels(image.permute(1, 2, 0)), image.permute(1, 2, 0))
    assert pixels(torch.tensor([0.0, 0.5, 1.0]).repeat(8, 3)).unique().tolist() == [0, 128, 255]


def test_pixels_of_a_large_image_are_left_out():
    found = pixels(bytes_of(3, 1000, 500), 100)
    assert found.shape == (100, 50, 3)
    assert pixels(bytes_of(3, 150, 50), 100).shape == (150, 50, 3)


@pytest.mark.parametrize(
    "value", [bytes_of(3, 300, 100), torch.rand(300, 100), bytes_of(4, 300, 100)], ids=["bytes", "floats", "rgba"]
)
def test_a_thumbnail_is_a_small_png(value):
    image = pytest.importorskip("PIL.Image")
    found = thumbnail(value, 96)
    head, _, data = found.uri.partition(",")
    assert head == "data:image/png;base64"
    with image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.format == "PNG"
        assert picture.size == (found.width, found.height) == (33, 96)


def test_no_image_and_no_pillow_give_no_thumbnail(monkeypatch):
    assert thumbnail(torch.zeros(7), 96) is None
    monkeypatch.setattr("memfeed.store.store_html.find_spec", lambda name: None)
    assert thumbnail(bytes_of(3, 4, 5), 96) is None
