"""Idioms of classification with torchvision: the usual recipes, steps of every kind, and pipelines of every form."""

import functools
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from idiom import MEAN, STD, Rows, Table, Tensors, picture
from PIL import Image
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder, VisionDataset
from torchvision.transforms import v2

TABLE = Table()
FLIP = [v1.RandomHorizontalFlip(), v1.ToTensor()]


def v1_rows(*steps):
    return Rows(v1.Compose([*steps]))


def v2_rows(*steps):
    return Rows(v2.Compose([v2.ToImage(), *steps, v2.ToDtype(torch.float32, scale=True)]))


@functools.cache
def photo_folder(sizes):
    """Return a folder of JPEG files in two classes, which lasts as long as the process."""
    folder = tempfile.TemporaryDirectory()
    for index in range(64):
        file = Path(folder.name) / "ab"[index % 2] / f"{index:03}.jpg"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(picture(index, *sizes[index % len(sizes)])).save(file, quality=95)
    return folder


@TABLE.add("CIFAR-10: crop with padding, flip", "torchvision v1", "batched")
def cifar():
    crop = v1.RandomCrop(32, padding=4)
    return v1_rows(crop, v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD))


@TABLE.add(
    "ImageNet's recipe on JPEG files of several sizes",
    "torchvision v1",
    "batched",
    "a line says what is stored",
    levels=2,
)
def imagenet():
    normalize = v1.Normalize(mean=MEAN, std=STD)
    steps = [v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor(), normalize]
    return ImageFolder(photo_folder(((40, 30), (30, 44), (36, 36))).name, v1.Compose(steps))


@TABLE.add("a resize, then crop and flip, on JPEG files of several sizes", "torchvision v1", "batched")
def resized_folder():
    steps = [v1.Resize((32, 32)), v1.RandomCrop(28), v1.RandomHorizontalFlip(), v1.ToTensor()]
    return ImageFolder(photo_folder(((40, 30), (30, 44), (36, 36))).name, v1.Compose(steps))


@TABLE.add("RandomResizedCrop on images of one size", "torchvision v1", "batched", levels=2.0)
def resized_crop():
    return v1_rows(v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD))


@TABLE.add("v2 with dtypes, crop, flip, jitter", "torchvision v2", "batched", levels=2.0)
def v2_recipe():
    return v2_rows(v2.RandomResizedCrop(24, antialias=True), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4))


@TABLE.add("ColorJitter and RandomGrayscale of PIL images", "torchvision v1", "sample")
def pil_jitter():
    return v1_rows(v1.ColorJitter(0.4, 0.4, 0.4, 0.1), v1.RandomGrayscale(0.2), v1.ToTensor())


@TABLE.add("RandomAffine and RandomRotation", "torchvision v1", "batched", levels=1.0)
def affine():
    return v1_rows(v1.RandomAffine(20, translate=(0.1, 0.1)), v1.ToTensor())


@TABLE.add("RandomPerspective", "torchvision v1", "sample")
def perspective():
    return v1_rows(v1.RandomPerspective(0.5, p=0.5), v1.ToTensor())


@TABLE.add("GaussianBlur", "torchvision v2", "sample")
def blur():
    return v2_rows(v2.GaussianBlur(3, sigma=(0.1, 2.0)))


@TABLE.add("ElasticTransform", "torchvision v2", "sample", is_slow=True)
def elastic():
    return v2_rows(v2.ElasticTransform(alpha=20.0, sigma=2.0))


@TABLE.add('RandomErasing(value="random")', "torchvision v1", "sample")
def erasing():
    return v1_rows(v1.ToTensor(), v1.RandomErasing(p=0.5, value="random"))


@TABLE.add("RandomApply, RandomChoice, RandomOrder", "torchvision v2", "sample")
def random_steps():
    colours = [v2.RandomInvert(1.0), v2.RandomSolarize(100, 1.0)]
    return v2_rows(
        v2.RandomApply([v2.ColorJitter(0.4)], p=0.5),
        v2.RandomChoice([v2.RandomRotation((90, 90)), v2.RandomVerticalFlip(1.0)]),
        v2.RandomOrder(colours),
    )


@TABLE.add("AutoAugment", "torchvision v1", "sample")
def auto_augment():
    return v1_rows(v1.AutoAugment(v1.AutoAugmentPolicy.CIFAR10), v1.ToTensor())


@TABLE.add("RandAugment after a flip", "torchvision v1", "sample")
def rand_augment():
    return v1_rows(v1.RandomHorizontalFlip(), v1.RandAugment(), v1.ToTensor())


@TABLE.add("TrivialAugmentWide", "torchvision v2", "sample")
def trivial_augment():
    return v2_rows(v2.TrivialAugmentWide())


@TABLE.add("AugMix", "torchvision v2", "sample", is_slow=True)
def aug_mix():
    return v2_rows(v2.AugMix())


@TABLE.add("a rare flip, p=0.02", "torchvision v1", "batched")
def rare_flip():
    return v1_rows(v1.RandomHorizontalFlip(0.02), v1.ToTensor())


@TABLE.add("a pipeline without a random step", "torchvision v1", "whole")
def fixed():
    return v1_rows(v1.Resize(24), v1.CenterCrop(20), v1.ToTensor(), v1.Normalize(MEAN, STD))


@TABLE.add("a random step that never applies", "torchvision v1", "batched", "it draws")
def never_applied():
    return v1_rows(v1.RandomHorizontalFlip(0.0), v1.ToTensor())


@TABLE.add("nn.Sequential of torchvision's steps", "torch", "batched")
def sequential():
    return Tensors(torch.nn.Sequential(v1.RandomHorizontalFlip(), v1.ConvertImageDtype(torch.float)))


@TABLE.add("a subclass of nn.Sequential with a forward of its own", "torch", "sample")
def own_forward():
    class Scaled(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x) * 2 - 1

    return Tensors(Scaled(v1.RandomHorizontalFlip(), v1.ConvertImageDtype(torch.float)))


@TABLE.add("nn.Sequential with a forward hook", "torch", "sample")
def forward_hook():
    steps = torch.nn.Sequential(v1.RandomHorizontalFlip(), v1.ConvertImageDtype(torch.float))
    steps.register_forward_hook(lambda module, args, result: result - 0.5)
    return Tensors(steps)


@TABLE.add("a list of functions that the dataset calls in turn", "torchvision v1", "batched")
def listed():
    class Listed(Rows):
        def __getitem__(self, index):
            image = self.load(index)
            for step in self.transform:
                image = step(image)
            return image, self.labels[index]

    return Listed([v1.RandomCrop(28), *FLIP])


@TABLE.add("a ModuleList that the dataset calls in turn", "torchvision v2", "batched")
def module_list():
    class Listed(Tensors):
        def __getitem__(self, index):
            image = self.load(index)
            for step in self.transform:
                image = step(image)
            return image, self.labels[index]

    return Listed(torch.nn.ModuleList([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]))


@TABLE.add("a list of steps that the dataset applies reversed", "torchvision v1", "batched")
def reversed_list():
    class Reversed(Rows):
        def __getitem__(self, index):
            image = self.load(index)
            for step in reversed(self.transform):
                image = step(image)
            return image, self.labels[index]

    return Reversed([v1.ToTensor(), v1.RandomHorizontalFlip(), v1.Pad((0, 0, 8, 0))])


@TABLE.add("a list of transforms of which random.choice takes one", "torchvision v1", "refused", "draws outside")
def chosen():
    class Chosen(Rows):
        def __getitem__(self, index):
            return random.choice(self.transform)(self.load(index)), self.labels[index]

    return Chosen([v1.Compose(FLIP), v1.Compose([v1.RandomVerticalFlip(), v1.ToTensor()])])


@TABLE.add("a list of transforms of which the index takes one", "torchvision v1", "sample", "rows of two kinds")
def chosen_by_index():
    class Chosen(Rows):
        def __getitem__(self, index):
            return self.transform[index % 2](self.load(index)), self.labels[index]

    return Chosen([v1.Compose(FLIP), v1.Compose([v1.RandomVerticalFlip(), v1.ToTensor()])])


@TABLE.add("a class called Compose of the user's, in random order", "own code", "sample")
def shuffling_compose():
    class Compose:
        def __init__(self, transforms):
            self.transforms = transforms

        def __call__(self, x):
            for step in random.sample(self.transforms, len(self.transforms)):
                x = step(x)
            return x

    return Tensors(Compose([lambda x: x / 2 + 10, lambda x: 255 - x, lambda x: x.clamp(30)]))


@TABLE.add("a class called Compose of the user's that skips steps", "own code", "sample")
def skipping_compose():
    class Compose:
        def __init__(self, transforms):
            self.transforms = transforms

        def __call__(self, x):
            for step in self.transforms:
                if random.random() < 0.5:
                    x = step(x)
            return x

    return Tensors(Compose([lambda x: x.flip(-1), lambda x: x.flip(-2), lambda x: 255 - x]))


@TABLE.add("functools.partial as the transform", "own code", "sample")
def partial():
    def noisy(image, sigma):
        image = np.asarray(image, np.float32) / 255
        return torch.from_numpy(image + np.random.normal(0, sigma, image.shape).astype(np.float32))

    return Rows(functools.partial(noisy, sigma=0.1))


@TABLE.add("a lambda as the transform", "own code", "sample")
def lambda_transform():
    return Tensors(lambda x: x.roll(int(torch.randint(8, ())), -1))


@TABLE.add("a bound method as the transform", "own code", "sample")
def bound_method():
    class Augmenter:
        def __init__(self, strength):
            self.strength = strength

        def augment(self, x):
            return (x * random.uniform(1 - self.strength, 1)).to(torch.uint8)

    return Tensors(Augmenter(0.5).augment)


@TABLE.add("transform, target_transform and transforms of VisionDataset", "torchvision v1", "batched")
def vision_dataset():
    class Photos(VisionDataset):
        def __getitem__(self, index):
            image, target = Image.fromarray(picture(index)), index % 10
            if self.transforms is not None:
                image, target = self.transforms(image, target)
            return image, target

        def __len__(self):
            return 64

    return Photos(".", transform=v1.Compose(FLIP), target_transform=lambda label: 9 - label)


@TABLE.add("a random target_transform", "torchvision v1", "sample", "draws outside the pipeline of images")
def random_target():
    class Photos(Rows):
        def __getitem__(self, index):
            return self.transform(self.load(index)), self.target_transform(self.labels[index])

    return Photos(v1.Compose(FLIP), target_transform=lambda label: random.choice([label, 0]))
