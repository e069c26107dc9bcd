"""Idioms in which leaves come from one image together, or in which the dataset changes its pipeline's result."""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from idiom import Rows, Table, Tensors
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.functional import hflip, rotate

TABLE = Table()
AFTER = "runs the pipeline, and what the dataset does after it, for each sample"


def pipeline():
    return v1.Compose([v1.RandomCrop(28), v1.RandomHorizontalFlip(), v1.ToTensor()])


def pair(sample):
    return torch.equal(sample[0], sample[1])


@TABLE.add("autoencoder: x, x", "torchvision v1", "batched", AFTER, invariant=pair)
def autoencoder():
    class Autoencoder(Rows):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            return x, x

    return Autoencoder(pipeline())


@TABLE.add("autoencoder: x, x.clone()", "torchvision v1", "batched", AFTER, invariant=pair)
def cloned():
    class Autoencoder(Rows):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            return x, x.clone()

    return Autoencoder(pipeline())


def smaller(x):
    return F.interpolate(x[None], scale_factor=0.5, mode="bilinear", antialias=True)[0]


@TABLE.add(
    "super-resolution: downscaled(x), x", "torchvision v1", "batched", AFTER,
    invariant=lambda s: torch.allclose(s[0], smaller(s[1]), atol=1e-5),
)  # fmt: skip
def super_resolution():
    class SuperResolution(Rows):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            return smaller(x), x

    return SuperResolution(pipeline())


@TABLE.add(
    "super-resolution of PIL images: the small one is resized before ToTensor", "torchvision v1", "refused", AFTER
)
def pil_super_resolution():
    class SuperResolution(Rows):
        def __getitem__(self, index):
            high = self.transform(self.load(index))
            low = high.resize((14, 14), Image.BICUBIC)
            return {"low": self.to_tensor(low), "high": self.to_tensor(high)}

    crop = v1.Compose([v1.RandomCrop(28), v1.RandomHorizontalFlip()])
    return SuperResolution(crop, to_tensor=v1.ToTensor())


@TABLE.add("x, x[0] > 0.5", "torchvision v1", "batched", AFTER, invariant=lambda s: torch.equal(s[0][0] > 0.5, s[1]))
def threshold():
    class Threshold(Rows):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            return x, x[0] > 0.5

    return Threshold(pipeline())


@TABLE.add(
    "a number computed from x: x.mean().item()", "torchvision v1", "refused", "a number leaves torch",
    invariant=lambda s: abs(float(s[0].mean()) - float(s[1])) < 1e-5,
)  # fmt: skip
def computed_number():
    class Brightness(Rows):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            return x, x.mean().item()

    return Brightness(pipeline())


@TABLE.add("a label computed from x: int(x.mean() > 0.4)", "torchvision v1", "refused", "a number leaves torch",
           invariant=lambda s: int(s[0].mean() > 0.4) == int(s[1]))  # fmt: skip
def computed_label():
    class Bright(Rows):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            return x, int(x.mean() > 0.4)

    return Bright(v1.Compose([v1.RandomCrop(16), v1.ToTensor()]))


@TABLE.add("a wrapper's own code: self.transforms(x) * 2 - 1", "torchvision v1", "batched", AFTER)
def own_code():
    class Scaled(Rows):
        def __getitem__(self, index):
            return self.transforms(self.load(index)) * 2 - 1, self.labels[index]

    return Scaled(transforms=pipeline())


@TABLE.add("torch after the pipeline: permute, float, / 255, [None], .to(dtype)", "torchvision v2", "batched", AFTER)
def torch_after():
    class After(Tensors):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            return {"image": x.float() / 255, "half": x[None].to(torch.float16), "last": x.permute(1, 2, 0)}

    return After(v2.Compose([v2.RandomCrop(28), v2.RandomHorizontalFlip()]))


@TABLE.add("in place after the pipeline: x[:, :4] = 0; x.mul_(2)", "torchvision v1", "batched", AFTER)
def in_place():
    class Blanked(Rows):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            x[:, :4] = 0
            return x.mul_(2), self.labels[index]

    return Blanked(pipeline())


class Pair(NamedTuple):
    """What a pipeline returns."""

    image: torch.Tensor
    flipped: torch.Tensor


@TABLE.add(
    "a pipeline that returns a namedtuple",
    "own code",
    "sample",
    invariant=lambda s: torch.equal(s[0].image, s[0].flipped.flip(-1)),
)
def namedtuple_result():
    steps = pipeline()

    def transform(image):
        x = steps(image)
        return Pair(x, hflip(x))

    return Rows(transform)


@dataclass
class View:
    """What a pipeline returns."""

    image: torch.Tensor
    is_flipped: bool


@TABLE.add("a pipeline that returns a dataclass", "own code", "sample")
def dataclass_result():
    class Views(Rows):
        def __getitem__(self, index):
            return self.transform(self.load(index))

    def transform(image):
        is_flipped = random.random() < 0.5
        x = v1.functional.to_tensor(image)
        return View(x.flip(-1) if is_flipped else x, is_flipped)

    return Views(transform)


@TABLE.add("a pipeline that returns a dict with what it drew", "own code", "sample")
def dict_result():
    def transform(image):
        x, angle = v1.functional.to_tensor(image), random.choice([0, 90, 180, 270])
        return {"image": rotate(x, angle), "angle": angle}

    return Rows(transform)


@TABLE.add("text, bytes and a path beside the image", "torchvision v1", "batched")
def text_beside():
    class Captions(Rows):
        def __getitem__(self, index):
            image = self.transform(self.load(index))
            return {"image": image, "caption": f"row {index}", "id": f"{index}".encode(), "score": index / 7}

    return Captions(pipeline())


@TABLE.add("None beside the image", "torchvision v1", "batched", "a leaf that no DataLoader collates")
def none_beside():
    class Unlabelled(Rows):
        def __getitem__(self, index):
            return {"image": self.transform(self.load(index)), "label": None}

    return Unlabelled(pipeline())


@TABLE.add(
    "a v2 pipeline gets image, mask and label together",
    "torchvision v2",
    "batched",
    levels=1.0,
    invariant=lambda s: torch.equal(s["mask"], (s["image"][:1] // 28)),
)
def v2_dict():
    class Segmentation(Tensors):
        def __getitem__(self, index):
            image = tv_tensors.Image(self.load(index))
            sample = {"image": image, "mask": tv_tensors.Mask(image[:1] // 28), "label": self.labels[index]}
            return self.transform(sample)

    return Segmentation(v2.Compose([v2.RandomCrop(28), v2.RandomHorizontalFlip()]))


@TABLE.add(
    "a plain tensor beside a v2 Image: it is not flipped",
    "torchvision v2",
    "sample",
    invariant=lambda s: bool((s["depth"][:, 1:] >= s["depth"][:, :-1]).all()),
)
def v2_plain_tensor():
    class Depth(Tensors):
        def __getitem__(self, index):
            image = self.load(index)
            return self.transform({"image": tv_tensors.Image(image), "depth": image[0].clone()})

    return Depth(v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]))


@TABLE.add(
    "two plain tensors in v2: only the first is an image",
    "torchvision v2",
    "sample",
    invariant=lambda s: bool((s[1][0, :, 1:] >= s[1][0, :, :-1]).all()),
)
def v2_two_tensors():
    class Two(Tensors):
        def __getitem__(self, index):
            image = self.load(index)
            return self.transform(image, image.clone())

    return Two(v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]))


@TABLE.add("a step that looks at the label", "own code", "sample")
def label_aware():
    def transform(image, label):
        x = v1.functional.to_tensor(image)
        return (x.flip(-1) if label < 5 and random.random() < 0.5 else x), label

    class Labelled(Rows):
        def __getitem__(self, index):
            return self.transform(self.load(index), self.labels[index])

    return Labelled(transform)


@TABLE.add(
    "a second step that changes the result of the first one in place",
    "torchvision v1",
    "sample",
    invariant=lambda s: torch.equal(s[0], s[1]),
)
def second_step_in_place():
    class Erased(Rows):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            return x, self.erase(x)

    return Erased(pipeline(), erase=v1.RandomErasing(1.0, inplace=True))


@TABLE.add("a step that returns what it decided, as a bool", "own code", "sample")
def decided():
    def transform(image):
        x, is_flipped = v1.functional.to_tensor(image), random.random() < 0.5
        return (x.flip(-1) if is_flipped else x), is_flipped

    class Decided(Rows):
        def __getitem__(self, index):
            x, is_flipped = self.transform(self.load(index))
            return x, is_flipped, self.labels[index]

    return Decided(transform)
