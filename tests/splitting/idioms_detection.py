"""Idioms of detection and keypoints with torchvision: boxes and labels of varying number that follow the image."""

import random

import torch
from idiom import Rows, Table, Tensors
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.functional import hflip, to_tensor

TABLE = Table()


def target_of(index, side=32):
    """Return boxes (one to three), labels and an id, as torchvision's datasets of detection give them."""
    boxes = torch.tensor([[4.0, 8.0, 16.0, 20.0], [2.0, 2.0, 30.0, 12.0], [10.0, 15.0, 20.0, 31.0]])[: 1 + index % 3]
    return {
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(side, side)),
        "labels": torch.arange(len(boxes)) + 1,
        "image_id": index,
    }


class Detection(Tensors):
    """(image, target) through ``transforms``."""

    def __getitem__(self, index):
        return self.transforms(tv_tensors.Image(self.load(index)), target_of(index))


def flipped_box(sample):
    """Return True if the first box of a sample is where it is in an image or in its mirror image."""
    image, target = sample
    left, is_mirrored = float(target["boxes"][0, 0]), bool(image[0, 0, 0] > image[0, 0, -1])
    return left == (16.0 if is_mirrored else 4.0)


@TABLE.add("boxes follow a flip", "torchvision v2", "sample", invariant=flipped_box)
def boxes():
    return Detection(transforms=v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]))


@TABLE.add("detection training: RandomZoomOut, RandomIoUCrop, SanitizeBoundingBoxes", "torchvision v2", "sample")
def ssd():
    steps = [v2.RandomZoomOut(fill={tv_tensors.Image: 90, "others": 0}), v2.RandomIoUCrop(), v2.RandomHorizontalFlip()]
    return Detection(transforms=v2.Compose([*steps, v2.Resize((24, 24)), v2.SanitizeBoundingBoxes()]))


@TABLE.add("boxes of one number in each sample", "torchvision v2", "sample", invariant=flipped_box)
def one_box():
    class One(Detection):
        def __getitem__(self, index):
            return self.transforms(tv_tensors.Image(self.load(index)), target_of(0))

    return One(transforms=v2.Compose([v2.RandomHorizontalFlip(), v2.ClampBoundingBoxes()]))


@TABLE.add("masks of instances and boxes", "torchvision v2", "sample")
def instances():
    class Instances(Detection):
        def __getitem__(self, index):
            image, target = self.load(index), target_of(index)
            masks = torch.stack([(image[0] // 28 == label) for label in target["labels"]])
            return self.transforms(tv_tensors.Image(image), {**target, "masks": tv_tensors.Mask(masks)})

    return Instances(transforms=v2.Compose([v2.RandomCrop(28), v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes()]))


@TABLE.add(
    "the references' own transforms of (image, target)", "torchvision references", "sample", invariant=flipped_box
)
def references():
    class RandomHorizontalFlip:
        def __call__(self, image, target):
            if random.random() < 0.5:
                image, target = hflip(image), dict(target)
                boxes = target["boxes"].clone()
                boxes[:, [0, 2]] = 32 - boxes[:, [2, 0]]
                target["boxes"] = boxes
            return image, target

    class ToTensor:
        def __call__(self, image, target):
            return to_tensor(image), target

    class Compose:
        def __init__(self, transforms):
            self.transforms = transforms

        def __call__(self, image, target):
            for step in self.transforms:
                image, target = step(image, target)
            return image, target

    class Penn(Rows):
        def __getitem__(self, index):
            target = {**target_of(index), "boxes": target_of(index)["boxes"].as_subclass(torch.Tensor)}
            return self.transforms(self.load(index), target)

    return Penn(transforms=Compose([RandomHorizontalFlip(), ToTensor()]))


@TABLE.add("a step that looks at the label: flips only class 1", "torchvision v2", "sample")
def label_step():
    class FlipFirst(torch.nn.Module):
        def forward(self, image, target):
            is_flipped = target["labels"][0] == 1 and len(target["labels"]) == 1 and torch.rand(()) < 0.5
            return (image.flip(-1) if is_flipped else image), target

    return Detection(transforms=v2.Compose([FlipFirst(), v2.RandomVerticalFlip()]))


@TABLE.add(
    "boxes of the flipped image computed in __getitem__", "torchvision v2", "refused", "draws outside the pipeline"
)
def own_boxes():
    class Own(Tensors):
        def __getitem__(self, index):
            image, target = self.load(index), dict(target_of(index))
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
                target["boxes"] = 32 - target["boxes"].as_subclass(torch.Tensor)[:, [2, 1, 0, 3]]
            return self.transform(image), target

    return Own(v2.ToDtype(torch.float32, scale=True))


@TABLE.add("heat maps of keypoints drawn after the pipeline", "torch", "sample", "what the dataset does after it")
def heat_maps():
    class Pose(Tensors):
        def __getitem__(self, index):
            points = tv_tensors.BoundingBoxes([[5, 9, 6, 10]], format="XYXY", canvas_size=(32, 32))
            image, points = self.transform(tv_tensors.Image(self.load(index)), points)
            x, y = points[0, 0], points[0, 1]
            columns, rows = torch.arange(32)[None], torch.arange(32)[:, None]
            return image, torch.exp(-((columns - x) ** 2 + (rows - y) ** 2) / 8.0)

    return Pose(v2.Compose([v2.RandomHorizontalFlip()]))


@TABLE.add("RandomShortestSize and padding to one size", "torchvision v2", "sample")
def shortest_size():
    class Padded(Dataset):
        def __init__(self, transform):
            self.images, self.transform = Tensors(), transform

        def __len__(self):
            return 64

        def __getitem__(self, index):
            return self.transform(self.images.load(index)), index

    class Pad(torch.nn.Module):
        def forward(self, image):
            height, width = image.shape[-2:]
            return torch.nn.functional.pad(image, (0, 40 - width, 0, 40 - height))

    return Padded(v2.Compose([v2.RandomShortestSize([24, 28, 32, 36, 40], max_size=40), Pad()]))


@TABLE.add("video clips: a random clip of frames, then flips", "torchvision v2", "sample")
def video():
    class Clips(Tensors):
        def __getitem__(self, index):
            frames = torch.stack([self.load((index + k) % 64) for k in range(6)])
            return self.transform(frames), self.labels[index]

    class TemporalCrop:
        def __call__(self, frames):
            first = random.randint(0, 2)
            return frames[first : first + 4]

    return Clips(v2.Compose([TemporalCrop(), v2.RandomHorizontalFlip()]))
