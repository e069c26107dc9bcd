"""Usual pipelines with their randomness on or off, over images whose pixels say where they were in the original."""

import functools

import albumentations as A
import numpy as np
import torch
from albumentations.pytorch import ToTensorV2
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import transforms as v1

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
COUNT, SIDE = 150, 64


@functools.cache
def _picture(height, width):
    rows, columns = np.mgrid[:height, :width]
    return np.stack([columns * 3, rows * 3, (rows + columns) % 256], 2).astype(np.uint8)


def picture(height=SIDE, width=SIDE):
    """Return an image whose red is the column and whose green is the row of each pixel, times four."""
    return _picture(height, width).copy()


class Photos(torch.utils.data.Dataset):
    """(image, label): a PIL image through ``transform``."""

    def __init__(self, transform=None, sizes=((SIDE, SIDE),), count=COUNT):
        self.transform, self.sizes, self.count = transform, sizes, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        image = Image.fromarray(picture(*self.sizes[index % len(self.sizes)]))
        return self.transform(image), index


class Scenes(torch.utils.data.Dataset):
    """(image, mask) through ``transforms``, as torchvision's datasets of masks."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        image = tv_tensors.Image(torch.from_numpy(picture()).permute(2, 0, 1))
        return self.transforms(image, tv_tensors.Mask(image[0] // 16))


class Arrays(torch.utils.data.Dataset):
    """{"image", "mask"}: arrays through an albumentations ``transform``."""

    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return self.transform(image=picture(), mask=picture()[:, :, 0] // 16)


def resized_crop(library, size, off, **options):
    scale, ratio = ((1.0, 1.0), (1.0, 1.0)) if off else ((0.08, 1.0), (3 / 4, 4 / 3))
    return library.RandomResizedCrop(size, scale=scale, ratio=ratio, **options)


def chance(off):
    return 0.0 if off else 0.5


def reference_train(off):
    """torchvision's references/classification/presets.py, ClassificationPresetTrain, backend "pil"."""
    return Photos(
        v1.Compose(
            [
                v1.Resize((SIDE, SIDE)),
                resized_crop(v1, 24, off, interpolation=InterpolationMode.BILINEAR, antialias=True),
                v1.RandomHorizontalFlip(chance(off)),
                v1.PILToTensor(),
                v1.ConvertImageDtype(torch.float),
                v1.Normalize(MEAN, STD),
                v1.RandomErasing(0.0 if off else 0.1),
            ]
        )
    )


def reference_eval(off):
    """torchvision's references/classification/presets.py, ClassificationPresetEval."""
    return Photos(
        v1.Compose(
            [
                v1.Resize(40, interpolation=InterpolationMode.BILINEAR, antialias=True),
                v1.CenterCrop(32),
                v1.PILToTensor(),
                v1.ConvertImageDtype(torch.float),
                v1.Normalize(MEAN, STD),
            ]
        ),
        sizes=((48, 64), (64, 50)),
    )


def cifar(off):
    crop = v1.RandomCrop(SIDE) if off else v1.RandomCrop(SIDE, padding=4)
    return Photos(v1.Compose([crop, v1.RandomHorizontalFlip(chance(off)), v1.ToTensor(), v1.Normalize(MEAN, STD)]))


def segmentation(off):
    return Scenes(
        v2.Compose(
            [
                resized_crop(v2, 24, off, antialias=True),
                v2.RandomHorizontalFlip(chance(off)),
                v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )
    )


def albumentations(off):
    crop = A.RandomCrop(SIDE, SIDE) if off else A.RandomCrop(48, 48)
    brightness = A.RandomBrightnessContrast(p=0.0 if off else 0.2)
    return Arrays(A.Compose([crop, A.HorizontalFlip(p=chance(off)), brightness, A.Normalize(), ToTensorV2()]))


def v2_dtypes(off):
    jitter = v2.ColorJitter() if off else v2.ColorJitter(0.4, 0.4, 0.4)
    return Photos(
        v2.Compose(
            [
                v2.ToImage(),
                v2.ToDtype(torch.uint8, scale=True),
                resized_crop(v2, 24, off, antialias=True),
                v2.RandomHorizontalFlip(chance(off)),
                jitter,
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
                v2.ToPureTensor(),
            ]
        )
    )


RECIPES = [reference_train, reference_eval, cifar, segmentation, albumentations, v2_dtypes]
