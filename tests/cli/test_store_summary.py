"""The values of a store in a few characters, the fields of its table, and its images as files."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memfeed
from memfeed.cli.store_summary import (
    _dtype_and_shape,
    _file_names,
    _kept_lines,
    _sheet_pixels,
    summarise,
    write_contact_sheet,
    write_pictures,
)
from memfeed.errors import SchemaError, TransformError
from memfeed.schema.fields import Field
from support import Made, cache


@pytest.mark.parametrize(
    ("kind", "shape", "found"),
    [
        ("fixed", (2, 3), ("int8", "[2, 3]")),
        ("fixed", (), ("int8", "[]")),
        ("list", (None, 3), ("int8", "[*, 3]")),
        ("str", (), ("", "")),
    ],
)
def test_dtypes_and_shapes(kind, shape, found):
    assert _dtype_and_shape(Field(path=("x",), name="x", stem="x", kind=kind, dtype="int8", shape=shape)) == found


def test_a_store(tmp_path, capsys):
    class Labelled(Made):
        classes, targets = ("a", "b"), (0, 1)

    store = cache(
        Labelled(lambda i: {"[red]x": i, "r": torch.arange(i)}, 2), tmp_path / "s.mf", workers=0, metadata={"m": 1}
    )
    lines = _kept_lines(store)
    assert "metadata m: 1" in lines
    summarise(store.path, 5, None, None, 1)
    out = capsys.readouterr().out
    assert "2 rows, 2 fields" in out
    assert "[red]x" in out  # no markup
    assert "row 1" in out


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
    pytest.importorskip("PIL.Image")
    rows = [{"a/b": torch.full((3, 300, 10), i, dtype=torch.uint8), "label": i} for i in range(3)]
    return memfeed.cache(rows, tmp_path / "s.mf", workers=0, progress=False)


def test_pictures_are_written_small(store, tmp_path):
    paths = list(write_pictures(store, [0, 2], tmp_path / "out"))
    assert [path.name for path in paths] == ["a_b-0.png", "a_b-2.png"]
    from PIL import Image

    with Image.open(paths[1]) as image:
        assert max(image.size) == 256
        assert np.asarray(image).max() == 2


def test_no_images(store, tmp_path):
    with pytest.raises(SchemaError, match="found no image-like field among label"):
        next(write_pictures(store.select("label"), [0], tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_fields_that_hold_no_image_after_all(tmp_path):
    pytest.importorskip("PIL.Image")
    rows = [{"scores": torch.full((8, 8), 7.0)}]
    store = memfeed.cache(rows, tmp_path / "s.mf", workers=0, progress=False)
    with pytest.raises(SchemaError, match="found no image in these rows of scores"):
        list(write_pictures(store, [0], tmp_path / "out"))


def test_a_contact_sheet_has_a_line_for_each_row(store, tmp_path):
    path = tmp_path / "new" / "sheet.png"
    write_contact_sheet(store, [0, 1], {"a/b": lambda image: image.float()}, 2, path)
    from PIL import Image

    with Image.open(path) as sheet:
        assert sheet.size == (64 + 3 * 176, 22 + 2 * 176)
    with pytest.raises(TransformError):
        write_contact_sheet(store, [0], {"a/b": lambda image: image.sum((1, 2))}, 1, path)
