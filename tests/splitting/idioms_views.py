"""Idioms of several views of an image, and of several images in a sample."""

import random

import numpy as np
import torch
from idiom import MEAN, STD, Rows, Table, mask_of
from PIL import Image, ImageFilter
from torchvision import transforms as v1
from torchvision.transforms.functional import rotate

TABLE = Table()
AFTER = "runs the pipeline, and what the dataset does after it, for each sample"


def pipeline():
    return v1.Compose([v1.RandomCrop(28), v1.RandomHorizontalFlip(), v1.ToTensor()])


class TwoCropsTransform:
    """Take two random crops of one image as the query and key, as MoCo does."""

    def __init__(self, base_transform):
        self.base_transform = base_transform

    def __call__(self, x):
        return [self.base_transform(x), self.base_transform(x)]


def simclr(size=24):
    jitter = v1.ColorJitter(0.4, 0.4, 0.4, 0.1)
    steps = [v1.RandomResizedCrop(size, scale=(0.2, 1.0)), v1.RandomHorizontalFlip(), v1.RandomApply([jitter], p=0.8)]
    return v1.Compose([*steps, v1.RandomGrayscale(p=0.2), v1.ToTensor(), v1.Normalize(MEAN, STD)])


@TABLE.add("RotNet: the label says the random rotation", "torchvision v1", "refused", "draws outside the pipeline")
def rotnet():
    class RotNet(Rows):
        def __getitem__(self, index):
            image = self.transform(self.load(index))
            label = random.randint(0, 3)
            return rotate(image, 90 * label), label

    return RotNet(pipeline())


@TABLE.add("RotNet: all four rotations of one crop", "torchvision v1", "batched", AFTER,
           invariant=lambda s: torch.equal(s[0][2], s[0][0].flip(-1, -2)))  # fmt: skip
def four_rotations():
    class RotNet(Rows):
        def __getitem__(self, index):
            image = self.transform(self.load(index))
            views = [torch.rot90(image, k, (1, 2)) for k in range(4)]
            return torch.stack(views), torch.arange(4)

    return RotNet(pipeline())


@TABLE.add("cat of the views of two calls", "torchvision v1", "batched", AFTER)
def cat_of_views():
    class TwoViews(Rows):
        def __getitem__(self, index):
            image = self.load(index)
            return torch.cat([self.transform(image), self.transform(image)]), self.labels[index]

    return TwoViews(pipeline())


@TABLE.add("SimCLR: a transform that returns two crops", "torchvision v1", "sample")
def two_crops():
    return Rows(TwoCropsTransform(simclr()))


@TABLE.add("BYOL: two pipelines of one image", "torchvision v1", "sample", "both pipelines run for each sample")
def byol():
    class Byol(Rows):
        def __getitem__(self, index):
            image = self.load(index)
            return self.transform(image), self.transform_prime(image)

    blur = v1.Lambda(lambda image: image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0))))
    return Byol(simclr(), transform_prime=v1.Compose([blur, *simclr().transforms]))


@TABLE.add("DINO: crops of two sizes in a list", "torchvision v1", "sample")
def dino():
    class MultiCrop:
        def __init__(self):
            self.large, self.small = simclr(24), simclr(12)

        def __call__(self, image):
            return [self.large(image) for _ in range(2)] + [self.small(image) for _ in range(4)]

    return Rows(MultiCrop())


@TABLE.add("the original beside its random view", "torchvision v1", "batched", "the original is stored")
def original_and_view():
    class Both(Rows):
        def __getitem__(self, index):
            image = self.load(index)
            return {"plain": self.to_tensor(image), "view": self.transform(image), "label": self.labels[index]}

    return Both(pipeline(), to_tensor=v1.ToTensor())


@TABLE.add(
    "CycleGAN, paired: one pipeline, two images", "torchvision v1", "batched", "two calls with draws of their own"
)
def cyclegan():
    class Pairs(Rows):
        def __getitem__(self, index):
            a, b = self.load(index), self.load(len(self) - 1 - index)
            return {"A": self.transform(a), "B": self.transform(b)}

    return Pairs(pipeline())


@TABLE.add("CycleGAN, unpaired: random.randint takes B", "torchvision v1", "refused", "draws another row")
def unpaired():
    class Unpaired(Rows):
        def __getitem__(self, index):
            a, b = self.load(index), self.load(random.randint(0, len(self) - 1))
            return {"A": self.transform(a), "B": self.transform(b)}

    return Unpaired(pipeline())


@TABLE.add(
    "the same seed for image and mask: torch.manual_seed(s) twice",
    "torchvision v1",
    "refused",
    "a draw of the dataset seeds the pipeline",
    invariant=lambda s: torch.equal((s[0][0] * 255).long() // 28, s[1][0]),
)
def seeded_twice():
    class Segmentation(Rows):
        def __getitem__(self, index):
            image, mask = self.load(index), Image.fromarray(mask_of(self.images[index]))
            seed = np.random.randint(2147483647)
            torch.manual_seed(seed)
            image = self.transform(image)
            torch.manual_seed(seed)
            return image, (self.transform(mask) * 255).round().long()

    return Segmentation(pipeline())


@TABLE.add(
    "a dataset that seeds itself by index",
    "torchvision v1",
    "whole",
    "the same in every epoch",
    invariant=lambda s: torch.equal((s[0][0] * 255).round().long() // 28, s[1][0]),
)
def seeded_by_index():
    class Segmentation(Rows):
        def __getitem__(self, index):
            image, mask = self.load(index), Image.fromarray(mask_of(self.images[index]))
            torch.manual_seed(index)
            image = self.transform(image)
            torch.manual_seed(index)
            return image, (self.transform(mask) * 255).round().long()

    return Segmentation(pipeline())
