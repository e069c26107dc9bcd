"""ImageNet's recipe, reproduced: photographs keep their proportions, and every epoch crops them anew.

The store has each photograph once, at short side 256, uint8 [3, h, w]. RandomResizedCrop sees the proportions of each;
the evaluation resizes and crops the middle, as torchvision's reference does. Give a folder of images with one
sub-folder per class; without one, the program makes its own.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import memfeed
import memfeed.transforms as T

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TRAIN = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)])
EVALUATE = T.Compose([T.Resize(256), T.CenterCrop(224), T.Normalize(MEAN, STD)])  # Resize(256) changes nothing here


def made(folder):
    """Write a few photographs of two classes, in several sizes."""
    for row in range(12):
        path = Path(folder, ("ants", "bees")[row % 2], f"{row}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(row).integers(0, 256, (260 + 20 * (row % 3), 400 - 30 * (row % 5), 3), np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else made("photos")
    keep = v2.Compose([v2.PILToTensor(), v2.Resize(256, antialias=True)])  # the short side, once; no crop yet
    store = memfeed.cache(ImageFolder(folder, keep), "photos.mf", progress=False)
    print(store)  # list uint8 [*, *, *]: rows of several sizes

    model = torch.nn.Sequential(torch.nn.AvgPool2d(32), torch.nn.Flatten(), torch.nn.Linear(147, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for images, labels in memfeed.Loader(store, 4, shuffle=True, seed=0, transform=TRAIN):  # float32 [4, 3, 224, 224]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    rows = 0
    for images, labels in memfeed.Loader(store, 4, transform=EVALUATE):
        for image, label in zip(images, labels.tolist(), strict=True):  # what torchvision makes of the same photograph
            middle = v2.functional.center_crop(store[rows][0], [224]).float() / 255
            torch.testing.assert_close(image, v2.functional.normalize(middle, MEAN, STD))
            assert label == store[rows][1]
            rows += 1
    assert rows == len(store)
    print(f"{rows} images, as torchvision evaluates them")
