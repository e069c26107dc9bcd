"""Which fields are images, how they become pixels, and the names of their files."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memfeed
from memfeed.cli.pictures import (
    _file_names,
    _sheet_pixels,
    write_contact_sheet,
    write_pictures,
)
from memfeed.errors import SchemaError, TransformError

Image = pytest.importorskip("PIL.Image")


@given(st.lists(st.text("ab_-2./é ", max_size=4), max_size=8))
def test_file_names_are_safe_and_differ(fields):
    names = _file_names(fields)
    assert len({*names}) == len(fields)
    assert all(name and "/" not in name and not name.startswith(".") and name.isascii() for name in names)


def test_floats_are_scaled_alike():
    image = torch.tensor([[[-1.0, 0.0, 1.0]]])
    assert _sheet_pixels(image, -1.0, 1.0).tolist() == [[0, 128, 255]]
    assert _sheet_pixels(image, 0.0, 0.0).tolist() == [[0, 0, 255]]
    assert _sheet_pixels(torch.full((2, 1, 1), 7, dtype=torch.uint8), 0, 1).tolist() == [[7]]
    assert _sheet_pixels(torch.zeros(4, 2, 2, dtype=torch.uint8), 0, 1).shape == (2, 2, 3)


@pytest.fixture
def store(tmp_path):
    rows = [{"a/b": torch.full((3, 300, 10), i, dtype=torch.uint8), "label": i} for i in range(3)]
    return memfeed.cache(rows, tmp_path / "s.mf", workers=0, progress=False)


def test_pictures_are_written_small(store, tmp_path):
    paths = list(write_pictures(store, [0, 2], tmp_path / "out"))
    assert [path.name for path in paths] == ["a_b-0.png", "a_b-2.png"]
    with Image.open(paths[1]) as image:
        assert max(image.size) == 256
        assert np.asarray(image).max() == 2


def test_no_images(store, tmp_path):
    with pytest.raises(SchemaError, match="found no image-like field among label"):
        next(write_pictures(store.select("label"), [0], tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_fields_that_hold_no_image_after_all(tmp_path):
    rows = [{"scores": torch.full((8, 8), 7.0)}]
    store = memfeed.cache(rows, tmp_path / "s.mf", workers=0, progress=False)
    with pytest.raises(SchemaError, match="found no image in these rows of scores"):
        list(write_pictures(store, [0], tmp_path / "out"))


def test_a_contact_sheet_has_a_line_for_each_row(store, tmp_path):
    path = tmp_path / "new" / "sheet.png"
    write_contact_sheet(store, [0, 1], {"a/b": lambda image: image.float()}, 2, path)
    with Image.open(path) as sheet:
        assert sheet.size == (64 + 3 * 176, 22 + 2 * 176)
    with pytest.raises(TransformError):
        write_contact_sheet(store, [0], {"a/b": lambda image: image.sum((1, 2))}, 1, path)
