"""Idioms with arrays: albumentations in all its forms, and NumPy before and after a pipeline."""

import random

import albumentations as A
import numpy as np
import torch
from albumentations.pytorch import ToTensorV2
from idiom import Rows, Table, mask_of
from torchvision import transforms as v1

TABLE = Table()
AFTER = "runs the pipeline, and what the dataset does after it, for each sample"


def flips():
    return [A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)]


def mask_follows(image, mask):
    """Return True if a mask has the bands of the red channel of an image [3, h, w]."""
    return torch.equal((image[0] // 28).long(), mask.long())


def left_edge(image, box):
    """Return True if the column at the left of a box (4, 8, 16, 20) is that of an image or of its mirror image."""
    return image[0, 8, int(box[0])] == (28 if box[0] == 4 else 105)


class Arrays(Rows):
    """The usual dataset of albumentations: {"image", "mask"}."""

    def __getitem__(self, index):
        return self.transform(image=self.images[index], mask=mask_of(self.images[index]))


@TABLE.add("image and mask, with ToTensorV2", "albumentations", "batched",
           invariant=lambda s: mask_follows(s["image"], s["mask"]))  # fmt: skip
def to_tensor():
    return Arrays(A.Compose([A.RandomCrop(24, 24), *flips(), ToTensorV2()]))


@TABLE.add("arrays [h, w, c] returned as they are", "albumentations", "batched",
           invariant=lambda s: mask_follows(s["image"].permute(2, 0, 1), s["mask"]))  # fmt: skip
def as_arrays():
    return Arrays(A.Compose([A.RandomCrop(24, 24), *flips()]))


@TABLE.add("mask.permute after ToTensorV2, and a view of it", "albumentations", "sample", AFTER,
           invariant=lambda s: torch.equal(s[1][0], s[2]) and mask_follows((s[0] * 255).round(), s[2]))  # fmt: skip
def permuted_mask():
    class Segmentation(Rows):
        def __init__(self, *args):
            super().__init__(*args)
            self.labels = [((torch.arange(1) + i) % 2, (torch.arange(5) * i) % 2) for i in range(64)]

        def __getitem__(self, index):
            image = self.images[index].astype(np.float32)
            mask = np.stack([mask_of(self.images[index])] * 3, 2).astype(np.float32)
            augs = self.transform(image=image, mask=mask)
            image, mask = augs["image"], augs["mask"]
            mask = mask.permute(2, 0, 1)
            mask_2d = mask[0, :, :]
            return image, mask, mask_2d, *self.labels[index]

    normalize = A.Normalize(mean=[0.0] * 3, std=[1.0] * 3, max_pixel_value=255)
    return Segmentation(A.Compose([normalize, A.Resize(32, 32), *flips(), ToTensorV2()], is_check_shapes=False))


@TABLE.add("t(mask=..., image=...)", "albumentations", "batched", "the order of the arguments does not matter",
           invariant=lambda s: mask_follows(s[0], s[1]))  # fmt: skip
def mask_first():
    class Segmentation(Rows):
        def __getitem__(self, index):
            out = self.transform(mask=mask_of(self.images[index]), image=self.images[index])
            return out["image"], out["mask"]

    return Segmentation(A.Compose([*flips(), ToTensorV2()]))


@TABLE.add('additional_targets={"image2": "image"}', "albumentations", "sample", "colours of both images",
           invariant=lambda s: torch.equal(s["image"], s["image2"]))  # fmt: skip
def additional_targets():
    class Two(Rows):
        def __getitem__(self, index):
            return self.transform(image=self.images[index], image2=self.images[index].copy())

    steps = [A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=0.8), ToTensorV2()]
    return Two(A.Compose(steps, additional_targets={"image2": "image"}))


@TABLE.add("boxes and labels", "albumentations", "sample",
           invariant=lambda s: left_edge(s["image"], s["boxes"][0]))  # fmt: skip
def boxes():
    class Detection(Rows):
        def __getitem__(self, index):
            out = self.transform(image=self.images[index], bboxes=[[4, 8, 16, 20]], labels=[self.labels[index]])
            return {"image": out["image"], "boxes": torch.tensor(np.array(out["bboxes"])), "labels": out["labels"]}

    params = A.BboxParams(format="pascal_voc", label_fields=["labels"])
    return Detection(A.Compose([A.HorizontalFlip(p=0.5), ToTensorV2()], bbox_params=params))


@TABLE.add("keypoints returned as the pipeline gives them", "albumentations", "sample",
           invariant=lambda s: abs(float(s["image"][0, 9, int(s["keypoints"][0][0])]) - 35) < 1)  # fmt: skip
def keypoints():
    class Points(Rows):
        def __getitem__(self, index):
            points = np.array([[5.0, 9.0], [20.0, 3.0]], np.float32)
            return self.transform(image=self.images[index], keypoints=points)

    return Points(A.Compose([*flips(), ToTensorV2()], keypoint_params=A.KeypointParams(format="xy")))


@TABLE.add("boxes in a list of lists", "albumentations", "refused")
def listed_boxes():
    class Detection(Rows):
        def __getitem__(self, index):
            out = self.transform(
                image=self.images[index], bboxes=[[4.0, 8.0, 16.0, 20.0, 1.0], [0.0, 0.0, 9.0, 9.0, 2.0]]
            )
            return out["image"], [list(map(float, box)) for box in out["bboxes"]]

    return Detection(A.Compose([A.HorizontalFlip(p=0.5), ToTensorV2()], bbox_params=A.BboxParams(format="pascal_voc")))


@TABLE.add("OneOf and SomeOf", "albumentations", "sample")
def one_of():
    one = A.OneOf([A.HorizontalFlip(p=1), A.VerticalFlip(p=1), A.Transpose(p=1)], p=0.8)
    return Arrays(A.Compose([one, A.SomeOf([A.InvertImg(p=1), A.Solarize(p=1), A.ToGray(p=1)], n=2), ToTensorV2()]))


@TABLE.add("steps with p=1 and fixed parameters", "albumentations", "whole")
def always():
    return Arrays(A.Compose([A.HorizontalFlip(p=1.0), A.Resize(24, 24), A.InvertImg(p=1.0), ToTensorV2()]))


@TABLE.add("ReplayCompose", "albumentations", "refused", "the sample says what was drawn, in another form each time")
def replay_compose():
    return Arrays(A.ReplayCompose([*flips()]))


@TABLE.add("ReplayCompose, of which the image is returned", "albumentations", "refused")
def replayed_image():
    class Images(Rows):
        def __getitem__(self, index):
            return self.transform(image=self.images[index])["image"], self.labels[index]

    return Images(A.ReplayCompose([A.RandomCrop(24, 24), *flips(), ToTensorV2()]))


@TABLE.add("Compose with p=0.5", "albumentations", "sample")
def sometimes():
    return Arrays(A.Compose([A.HorizontalFlip(p=1.0), A.InvertImg(p=1.0)], p=0.5))


@TABLE.add("a Compose with a seed", "albumentations", "refused", "each of its steps draws the same numbers")
def with_seed():
    return Arrays(A.Compose([A.RandomCrop(24, 24), *flips(), ToTensorV2()], seed=137))


@TABLE.add("a single transform without Compose", "albumentations", "batched")
def single():
    return Arrays(A.HorizontalFlip(p=0.5))


@TABLE.add("colour steps and noise", "albumentations", "sample")
def colours():
    steps = [A.RandomBrightnessContrast(p=0.5), A.HueSaturationValue(p=0.5), A.GaussNoise(p=0.5)]
    return Arrays(A.Compose([*steps, A.Normalize(), ToTensorV2()]))


@TABLE.add("CoarseDropout and ShiftScaleRotate", "albumentations", "sample")
def dropout():
    return Arrays(A.Compose([A.Affine(rotate=(-20, 20), p=0.7), A.CoarseDropout(p=0.5), ToTensorV2()]))


@TABLE.add("several masks in a list", "albumentations", "sample",
           invariant=lambda s: torch.equal(s["masks"][0], 8 - s["masks"][1]))  # fmt: skip
def several_masks():
    class Masks(Rows):
        def __getitem__(self, index):
            mask = mask_of(self.images[index])
            return self.transform(image=self.images[index], masks=[mask, 8 - mask])

    return Masks(A.Compose([*flips(), ToTensorV2()]))


class Numbers(Rows):
    """Images as arrays, through a function of arrays; ``after`` is what the dataset does then."""

    def __getitem__(self, index):
        return self.after(self.transform(image=self.images[index])["image"]), self.labels[index]


def numbers(after):
    return Numbers(A.Compose([A.RandomCrop(24, 24), *flips()]), after=after)


def flip_array(image):
    """Return an array or its mirror image, a view of the same memory."""
    return image[:, ::-1] if np.random.rand() < 0.5 else image


for _name, _after in {
    "x.transpose(2, 0, 1).copy() after the pipeline": lambda x: x.transpose(2, 0, 1).copy(),
    "astype(np.float32) / 255 after the pipeline": lambda x: x.astype(np.float32) / 255,
    "np.ascontiguousarray(np.moveaxis(x, -1, 0)) after the pipeline": lambda x: np.ascontiguousarray(
        np.moveaxis(x, -1, 0)
    ),
    "torch.from_numpy(x).permute(2, 0, 1) after the pipeline": lambda x: torch.from_numpy(x).permute(2, 0, 1),
    "torch.as_tensor(x) after the pipeline": torch.as_tensor,
    "torch.tensor(x.transpose(2, 0, 1)) / 255 after the pipeline": lambda x: torch.tensor(x.transpose(2, 0, 1)) / 255,
    "np.stack of two channels after the pipeline": lambda x: np.stack([x[..., 0], x[..., 2]]),
    "np.expand_dims(x[..., 0], 0) after the pipeline": lambda x: np.expand_dims(x[..., 0], 0),
}.items():
    TABLE.add(_name, "albumentations, NumPy", "batched", AFTER)(lambda after=_after: numbers(after))


@TABLE.add("a NumPy function as the transform, and a copy of its view", "NumPy", "sample", AFTER)
def array_function():
    class Images(Rows):
        def __getitem__(self, index):
            return torch.from_numpy(self.transform(self.images[index]).copy()), self.labels[index]

    return Images(flip_array)


@TABLE.add("a float that NumPy computes from the result", "NumPy", "refused", "a number computed from the result")
def array_number():
    class Images(Rows):
        def __getitem__(self, index):
            x = self.transform(self.images[index])
            return x, float(x[:, :4].mean())

    return Images(lambda x: np.roll(x, np.random.randint(8), 1))


@TABLE.add("CutOut in the dataset's own __getitem__", "NumPy", "refused", "draws outside the pipeline")
def cutout():
    class CutOut(Rows):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            top, left = np.random.randint(0, 24, 2)
            x[:, top : top + 8, left : left + 8] = 0
            return x, self.labels[index]

    return CutOut(v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor()]))


@TABLE.add("a mosaic of four: draws three other rows", "NumPy", "refused", "draws other rows")
def mosaic():
    class Mosaic(Rows):
        def __getitem__(self, index):
            rows = [index, *random.choices(range(len(self)), k=3)]
            a, b, c, d = (self.transform(image=self.images[row])["image"] for row in rows)
            return np.concatenate([np.concatenate([a, b], 1), np.concatenate([c, d], 1)]), self.labels[index]

    return Mosaic(A.Compose(flips()))


@TABLE.add("MixUp in __getitem__", "NumPy", "refused", "draws another row and a weight")
def mixup():
    class MixUp(Rows):
        def __getitem__(self, index):
            other, weight = np.random.randint(len(self)), np.random.beta(0.4, 0.4)
            image = weight * self.images[index] + (1 - weight) * self.images[other]
            return self.transform(image.astype(np.uint8)), weight

    return MixUp(v1.ToTensor())


@TABLE.add("a random crop written with NumPy in __getitem__, no pipeline", "NumPy", "refused", "no pipeline")
def no_pipeline():
    class Cropped(Rows):
        def __getitem__(self, index):
            top, left = np.random.randint(0, 8), np.random.randint(0, 8)
            return self.images[index, top : top + 24, left : left + 24].copy(), self.labels[index]

    return Cropped()
