"""Pixels that Pillow decodes are kept: images are those of Pillow itself, and what is left to it."""

import io
from types import SimpleNamespace

import numpy as np
import pytest

from memfeed.memoizing.pillow import PillowDecoder

Image = pytest.importorskip("PIL.Image")
ImageFile = pytest.importorskip("PIL.ImageFile")


@pytest.fixture
def kept():
    """A decoder that keeps pixels in a dict; ``calls`` counts what Pillow decoded."""
    own, rows = ImageFile.ImageFile.load, {}
    decoder = PillowDecoder(lambda image: found.calls.append(1) or own(image), "load", "d")

    def result(name, digest, key, compute):
        if key.text not in rows:
            rows[key.text] = np.array(compute())
        return rows[key.text].copy()

    found = SimpleNamespace(load=lambda image: decoder.load(image, result), calls=[], rows=rows)
    return found


def saved(path, form, mode="RGB", **options):
    pixels = np.random.RandomState(0).randint(0, 256, (11, 7, 4), np.uint8)
    Image.fromarray(pixels, "RGBA").convert(mode).save(path, form, **options)
    return path


def loaded(path, load):
    with Image.open(path) as image:
        load(image)
        return image.mode, image.size, image.tobytes(), dict(image.info), image.tile


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        ("JPEG", "RGB"),
        ("JPEG", "L"),
        ("JPEG", "CMYK"),
        ("PNG", "RGB"),
        ("PNG", "RGBA"),
        ("PNG", "P"),
        ("PNG", "L"),
        ("PNG", "1"),
        ("PNG", "LA"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kept_pixels_are_those_of_pillow(tmp_path, kept, form, mode):
    path = saved(tmp_path / "a", form, mode)
    expected = loaded(path, lambda image: image.load())
    for _ in range(3):
        assert loaded(path, kept.load) == expected
    assert len(kept.calls) == len(kept.rows) == 1
    data = io.BytesIO(path.read_bytes())
    assert loaded(data, kept.load) == expected
    assert loaded(io.BytesIO(path.read_bytes()), kept.load) == expected
    assert len(kept.calls) == len(kept.rows) == 2  # bytes in memory are another source


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_left_to_pillow(tmp_path, kept, monkeypatch):
    path = saved(tmp_path / "a", "JPEG")
    for form in ("BMP", "PPM"):
        loaded(saved(tmp_path / form, form), kept.load)
    with Image.open(path) as image:
        image.draft("L", (4, 4))
        kept.load(image)
    with Image.open(path) as image:
        image.load()
        kept.load(image)  # there is nothing to decode any more
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    loaded(path, kept.load)
    assert kept.rows == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_that_changes_has_another_key(tmp_path, kept):
    path = saved(tmp_path / "a", "PNG")
    loaded(path, kept.load)
    saved(path, "PNG", "L")
    loaded(path, kept.load)
    assert len(kept.rows) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_file_is_left_where_pillow_leaves_it(tmp_path, kept):
    path = saved(tmp_path / "a", "PNG")
    with open(path, "rb") as file:
        ends = []
        for load in (ImageFile.ImageFile.load, kept.load, kept.load):
            file.seek(0)
            load(Image.open(file))
            ends.append(file.tell())
    assert len({*ends}) == 1
