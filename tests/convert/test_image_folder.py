"""A tree of image files as a dataset, and what is said where it is none."""

import pytest

from memfeed.convert.inputs import _size, image_folder, to_pixels

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")


@pytest.fixture
def tree(tmp_path):
    for name in ("dog", "cat"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 6), "red").save(tmp_path / name / "1.png")
    return tmp_path


def test_classes_are_sorted(tree):
    dataset = image_folder(tree)
    assert dataset.classes == ["cat", "dog"]
    assert [label for _, label in (dataset[0], dataset[1])] == [0, 1]
    assert image_folder(str(tree), transform=lambda image: image.size)[0] == ((8, 6), 0)


def test_a_file_that_is_no_image_is_named(tree):
    (tree / "cat" / "1.png").write_bytes(b"no image")
    with pytest.raises(OSError, match=r"cat/1\.png: found no image that can be decoded \(UnidentifiedImageError"):
        image_folder(tree)[0]


def test_a_tree_without_images(tmp_path):
    expected = r"expected one sub-folder of images per class, as .*cats/1\.jpg; found: "
    with pytest.raises(FileNotFoundError, match=expected + "No such file or directory"):
        image_folder(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=expected + "Not a directory"):
        image_folder(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    for root in (tmp_path, tmp_path / "empty"):
        with pytest.raises(FileNotFoundError, match=expected):
            image_folder(root)


@pytest.mark.parametrize(
    ("resize", "shape"), [(None, (3, 6, 8)), ("3", (3, 3, 4)), ("4x5", (3, 4, 5)), ("12", (3, 12, 16))]
)
def test_pixels(tree, resize, shape):
    pixels = image_folder(tree, to_pixels(resize))[0][0]
    assert tuple(pixels.shape) == shape
    assert pixels[0].min() > 250


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "256x", "x256", "256x256x3", "256 x 256", "123456", "a", "01"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"found the size .*; expected the short side in pixels"):
        to_pixels(text)


def test_sizes():
    assert (_size("1"), _size("99999"), _size("2x3")) == (1, 99999, (2, 3))
