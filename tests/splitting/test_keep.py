"""Smaller images, and the bytes of files."""

import numpy as np
import pytest
import torch
from idiom import Rows, mask_of, picture
from PIL import Image, ImageOps
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import memfeed
from memfeed.errors import SplitError
from memfeed.splitting.leaves import kind_of
from memfeed.splitting.proof import prove
from memfeed.splitting.rest import rest_of
from memfeed.splitting.stored_layout import ENCODED, OpenedFiles, ShortSide, encoded
from memfeed.transforms.decode import decode

PIXELS = picture(5, 40, 60)
CLASSES = mask_of(PIXELS)


def test_images_of_all_kinds_shrink_to_the_same_size():
    shrink = ShortSide(20)
    planes = torch.from_numpy(PIXELS).permute(2, 0, 1)
    made = [shrink(one) for one in (Image.fromarray(PIXELS), PIXELS, planes, tv_tensors.Image(planes))]
    assert made[0].size == (30, 20)
    assert [tuple(one.shape) for one in made[1:]] == [(20, 30, 3), (3, 20, 30), (3, 20, 30)]
    assert [kind_of(one).name for one in made] == ["PIL RGB", "array hwc", "tensor", "Image"]
    assert torch.equal(made[2], torch.from_numpy(made[1]).permute(2, 0, 1))
    assert np.array_equal(np.asarray(made[0]), made[1])


@pytest.mark.parametrize("mask", [CLASSES, torch.from_numpy(CLASSES), Image.fromarray(CLASSES)])
def test_masks_keep_their_values(mask):
    small = np.asarray(ShortSide(20)(mask, is_mask=True))
    assert small.shape == (20, 30)
    assert set(np.unique(small)) <= set(np.unique(CLASSES))
    assert np.array_equal(np.asarray(ShortSide(20)(tv_tensors.Mask(torch.from_numpy(CLASSES)))), CLASSES[::2, ::2])


def test_no_image_grows():
    assert ShortSide(40)(PIXELS) is PIXELS
    assert ShortSide(20).target(2000, 21) == (1905, 20)


class Masked(Rows):
    def __getitem__(self, index):
        mask = Image.fromarray(mask_of(self.images[index]) * 30)
        return *self.transform(self.load(index), mask), index


def test_the_first_image_of_a_call_is_smoothed_and_the_others_are_masks():
    proof = prove(Masked(v2.RandomHorizontalFlip()), range(4))
    read = proof.reads[3]
    image, mask, label = ShortSide(16).leaves(proof.cut.patterns[0], read.leaves)
    assert (image.size, mask.size, label) == ((16, 16), (16, 16), 3)
    assert set(np.unique(mask)) <= set(np.unique(read.leaves[1]))


def files_of(folder, loader, orientation=1):
    exif = Image.Exif()
    exif[0x0112] = orientation
    (folder / "a").mkdir()
    for index in range(2):
        Image.fromarray(picture(index, 24, 36)).save(folder / "a" / f"{index}.jpg", exif=exif)
    files = OpenedFiles(loader)
    dataset = ImageFolder(str(folder), v2.Compose([v2.RandomHorizontalFlip()]), loader=files)
    return files, prove(dataset, range(2), whole=True)


def opened(path):
    return Image.open(path).convert("RGB")


def turned(path):
    return ImageOps.exif_transpose(Image.open(path)).convert("RGB")


def test_the_bytes_of_a_file_stand_in_place_of_its_image(tmp_path):
    files, proof = files_of(tmp_path, opened)
    pattern, read = proof.cut.patterns[0], proof.cut.read(1)
    for is_checked in (False, True):
        data, label = files.leaves(pattern, read.leaves, is_checked=is_checked)
        assert (data, label) == ((tmp_path / "a" / "1.jpg").read_bytes(), 0)
    assert np.array_equal(np.asarray(read.leaves[0]), decode(data).permute(1, 2, 0))
    assert encoded(pattern).kinds[0] == ENCODED
    assert rest_of(proof, is_encoded=True).recipe[0].name == "Decode"


def inverted(path):
    image = Image.open(path)
    return ImageOps.invert(image.convert("RGB")) if image.mode in ("CMYK", "L") else image.convert("RGB")


@pytest.mark.parametrize("mode", ["CMYK", "L"])
def test_a_file_of_another_mode_is_compared(mode, tmp_path):
    files, proof = files_of(tmp_path, inverted)
    Image.fromarray(picture(1, 24, 36)).convert(mode).save(tmp_path / "a" / "1.jpg")
    read = proof.cut.read(1)
    assert proof.cut.dataset[1] is not None  # remembers the file
    with pytest.raises(SplitError, match="decodes to another image"):
        files.leaves(proof.cut.patterns[0], read.leaves, is_checked=False)
    files.leaves(proof.cut.patterns[0], proof.cut.read(0).leaves, is_checked=False)


@pytest.mark.parametrize(("loader", "orientation", "is_checked"), [
    (turned, 6, False), (turned, 3, False), (lambda path: ImageOps.mirror(opened(path)), 1, True)])  # fmt: skip
def test_an_image_that_its_loader_turned_is_refused(loader, orientation, is_checked, tmp_path):
    files, proof = files_of(tmp_path, loader, orientation)
    read = proof.cut.read(1)
    with pytest.raises(SplitError, match="decodes to another image"):
        files.leaves(proof.cut.patterns[0], read.leaves, is_checked=is_checked)
    with pytest.raises(SplitError, match="not as the dataset's loader opened it"):
        OpenedFiles(loader).leaves(proof.cut.patterns[0], read.leaves, is_checked=is_checked)


def test_the_first_images_are_always_compared(tmp_path):
    """Of a store that exists only a few samples are read: a loader that was edited must show there."""
    files, proof = files_of(tmp_path, lambda path: ImageOps.mirror(opened(path)))
    read = proof.cut.read(1)
    with pytest.raises(SplitError, match="decodes to another image"):
        files.leaves(proof.cut.patterns[0], read.leaves, is_checked=False)


def cropped_with_boxes(image, boxes):
    """Crop an image and its boxes, as the references of torchvision do."""
    top, left, height, width = v2.RandomResizedCrop.get_params(image, (0.5, 1.0), (1.0, 1.0))
    moved = (boxes - torch.tensor([left, top] * 2)) * 16 / torch.tensor([width, height] * 2)
    return v2.functional.resized_crop(image, top, left, height, width, [16, 16]), moved


class Boxed(Rows):
    def __getitem__(self, index):
        boxes = torch.tensor([[8.0, 8.0, 24.0, 24.0]])
        if isinstance(self.transform, v2.Transform):
            boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(32, 32))
        return self.transform(self.load(index), boxes)


@pytest.mark.parametrize(("transform", "message"), [
    (cropped_with_boxes, "field 1 of sample .* depends on the size of the image"),
    (v2.RandomResizedCrop(16), "a random step refuses sample .*: ValueError: Found multiple HxW"),
])  # fmt: skip
def test_boxes_in_pixels_of_the_original_are_refused_beside_smaller_images(transform, message, tmp_path):
    dataset = Boxed(transform)
    with pytest.raises(SplitError, match=f"{message}(.|\n)*choose forms='full'"):
        memfeed.cache(dataset, tmp_path / "s.mf", split=True, forms=16, workers=0, progress=False)
    store = memfeed.cache(dataset, tmp_path / "s.mf", split=True, forms=32, workers=0, progress=False)
    assert len(store) == 64  # images of this size are not changed


def test_smaller_images_beside_masks_and_labels_are_accepted(tmp_path):
    dataset = Masked(v2.RandomResizedCrop(8))
    store = memfeed.cache(dataset, tmp_path / "s.mf", split=True, forms=16, workers=0, progress=False)
    image, mask, label = next(iter(memfeed.Loader(store, 8)))
    assert (image.shape[-2:], mask.shape[-2:], label.tolist()) == ((8, 8), (8, 8), list(range(8)))
