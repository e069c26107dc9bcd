"""Decode: files of images in a batch, and bytes that are none."""

import io
import sys

import numpy as np
import pytest
import torch

from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.transforms import Decode

Image = pytest.importorskip("PIL.Image")


def file(height, width, mode="RGB", kind="PNG"):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    pixels = np.random.default_rng(height).integers(0, 256, shape, dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels, mode).save(written, kind)
    return written.getvalue(), pixels


def keys(n):
    return Keys(0, 0, torch.arange(n) + 70)


def test_images_of_any_size_come_back_in_order():
    files = [file(5 + number, 9) for number in range(8)]
    batch = {"image": [data for data, _ in files], "label": torch.arange(8)}
    found = Decode().apply(batch, keys(8))
    assert torch.equal(found["label"], batch["label"])
    for image, (_, pixels) in zip(found["image"], files, strict=True):
        assert torch.equal(image, torch.from_numpy(pixels).permute(2, 0, 1))


def test_grey_images_get_three_channels():
    data, pixels = file(4, 6, "L")
    (found,) = Decode(on="image").apply({"image": [data]}, keys(1))["image"]
    assert torch.equal(found, torch.from_numpy(pixels).expand(3, 4, 6))


def test_a_jpeg_is_what_pillow_decodes():
    data, _ = file(16, 24, kind="JPEG")
    (found,) = Decode().apply({"image": [data]}, keys(1))["image"]
    with Image.open(io.BytesIO(data)) as image:
        assert torch.equal(found, torch.from_numpy(np.array(image)).permute(2, 0, 1))


def test_bytes_that_are_no_image_are_an_error_with_the_row():
    with pytest.raises(TransformError, match="no image that can be decoded in row 71"):
        Decode().apply({"image": [file(3, 3)[0], b"no image"]}, keys(2))


@pytest.mark.parametrize(
    ("on", "batch", "words"),
    [
        (None, {"label": torch.zeros(1)}, "found 0 fields of bytes; expected one list"),
        (None, {"a": [b"x"], "b": [b"y"]}, "found 2 fields of bytes; expected one list"),
        ("label", {"image": [b"x"], "label": torch.zeros(1)}, "found 0 fields of bytes named 'label'"),
    ],
)
def test_one_field_of_bytes_is_expected(on, batch, words):
    with pytest.raises(TransformError, match=words):
        Decode(on=on).apply(batch, keys(1))


def test_without_pillow_the_error_is_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'memfeed\[vision\]'"):
        Decode().apply({"image": [b"\x89PNG"]}, keys(1))
