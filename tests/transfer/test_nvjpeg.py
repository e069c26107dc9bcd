"""JPEG files decoded through torchcodec or torchvision. On the CPU they are a twin of the GPU's decoder."""

import io
import warnings

import numpy as np
import pytest
import torch

from memfeed.transfer import nvjpeg

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")


def file(mode, size=(16, 24)):
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3) if mode == "RGB" else size, np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels, mode=None).save(written, "JPEG", quality=90)
    return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)


def decoded(blobs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision's decoders are deprecated
        return nvjpeg.decode(blobs, torch.device("cpu"))


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_pixels_are_those_of_the_file(mode, channels):
    blob = file(mode)
    (image,) = decoded([blob])
    expected = np.asarray(Image.open(io.BytesIO(blob.numpy().tobytes())))
    assert image.shape == (channels, 16, 24)
    assert np.array_equal(image.numpy(), expected[None] if channels == 1 else expected.transpose(2, 0, 1))


def test_several_files_and_none():
    assert [tuple(one.shape) for one in decoded([file("RGB"), file("RGB", (8, 40))])] == [(3, 16, 24), (3, 8, 40)]
    assert nvjpeg.decode([], torch.device("cpu")) == []


def test_a_file_that_is_no_image():
    with pytest.raises(RuntimeError):
        decoded([torch.zeros(64, dtype=torch.uint8)])


def test_torchcodec_is_asked_first(monkeypatch):
    import sys
    import types

    module = types.ModuleType("torchcodec.decoders")
    module.decode_jpeg = lambda files, mode, device: [(len(files), mode, device)]
    monkeypatch.setitem(sys.modules, "torchcodec", types.ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
    nvjpeg.decoder.cache_clear()
    try:
        assert nvjpeg.decode([file("L")], torch.device("cpu")) == [(1, "UNCHANGED", torch.device("cpu"))]
    finally:
        nvjpeg.decoder.cache_clear()
