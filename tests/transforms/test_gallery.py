"""docs/gallery.md and its pictures are drawn from the transforms, and none of these is missing."""

import runpy

import numpy as np
import pytest
from PIL import Image

import memfeed.transforms as T
from test_readme import ROOT

pytest.importorskip("skimage", reason="it has the photographs")
GALLERY = runpy.run_path(str(ROOT / "docs" / "draw_gallery.py"))
ENTRIES = {shown.name: shown for entries in GALLERY["GALLERY"].values() for shown in entries}


def test_the_page_is_up_to_date():
    page = GALLERY["PAGE"].read_text()
    assert GALLERY["drawn_page"](page) == page, "run make gallery"


def test_every_public_transform_is_there():
    classes = {name: getattr(T, name) for name in T.__all__}
    transforms = {name for name, it in classes.items() if isinstance(it, type) and issubclass(it, T.Transform)}
    assert set(ENTRIES) == transforms - {"Transform", "ImageTransform"}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_picture_shows_what_the_transform_does(name):
    drawn = np.array(GALLERY["draw"](ENTRIES[name])).astype(int)
    kept = np.array(Image.open(GALLERY["FOLDER"] / f"{name}.jpg")).astype(int)
    assert drawn.shape == kept.shape, "run make gallery"
    # JPEG changes pixels by about 5; another seed by 11 to 45
    assert np.abs(drawn - kept).mean() < 9, "run make gallery"


def test_mask_and_box_follow():
    before, after = GALLERY["changed"](ENTRIES["RandomHorizontalFlip"])
    mirrored = [bool((before["mask"][row] != after["mask"][row]).any()) for row in range(3)]
    assert mirrored == [bool((before["boxes"][row] != after["boxes"][row]).any()) for row in range(3)]
    assert any(mirrored)
    assert not all(mirrored)
