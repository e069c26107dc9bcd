"""What an idiom is, and the pixels, masks and labels that the idioms' datasets are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

ROWS, SIDE = 64, 32
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@dataclass(frozen=True)
class Idiom:
    """A way in which people write a dataset with random samples.

    Args:
        name: what is special, as a few words.
        make: returns the dataset, a new object each time.
        library: where its transforms come from.
        expected: "batched" or "sample" (one line, the random part batched or sample by sample), "refused", or "whole"
            (nothing is random, so it is stored whole).
        note: for people: why it is expected.
        levels: by how many levels of 8 bits images may differ, where a batched transform resizes or blends.
        invariant: what holds for each sample, whose numbers, arrays and images are tensors.
        is_slow: True leaves it to ``make test-long``.
    """

    name: str
    make: Callable[[], Any]
    library: str
    expected: str
    note: str = ""
    levels: float = 0.0
    invariant: Callable[[Any], Any] | None = None
    is_slow: bool = False

    def __str__(self) -> str:
        return self.name


class Table(list[Idiom]):
    """Idioms in the order in which they are written."""

    def add(self, name: str, library: str, expected: str, note: str = "", **options: Any) -> Callable[..., Any]:
        """Return a decorator that adds a function without arguments, which makes a dataset, as an idiom."""

        def adds(make: Callable[[], Any]) -> Callable[[], Any]:
            self.append(Idiom(name, make, library, expected, note, **options))
            return make

        return adds


def picture(index: int, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """Return an image uint8 [h, w, 3]: red says the column, green the row, blue the index of the sample."""
    rows, columns = np.mgrid[:height, :width]
    blue = (3 * index + 2 * ((rows + columns) % 8)) % 256
    return np.stack([columns * 7 % 256, rows * 7 % 256, blue], 2).astype(np.uint8)


def pictures(count: int = ROWS, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """Return images uint8 [count, h, w, 3], see `picture`."""
    return np.stack([picture(index, height, width) for index in range(count)])


def mask_of(image: np.ndarray) -> np.ndarray:
    """Return the classes 0 to 8 of an image's pixels, uint8 [h, w]: its columns in bands."""
    return (image[..., 0] // 28).astype(np.uint8)


def labels(count: int = ROWS) -> list[int]:
    """Return the class of each sample, 0 to 9."""
    return [index % 10 for index in range(count)]


class Rows(torch.utils.data.Dataset):
    """The usual dataset: images in memory, labels, and a transform. Subclasses write their own ``__getitem__``."""

    def __init__(self, transform: Any = None, count: int = ROWS, **others: Any) -> None:
        self.images, self.labels, self.transform = pictures(count), labels(count), transform
        self.__dict__.update(others)

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int) -> Any:
        """Return an image as PIL opens it."""
        return Image.fromarray(self.images[index])

    def __getitem__(self, index: int) -> Any:
        image = self.load(index)
        if self.transform is not None:
            image = self.transform(image)
        return image, self.labels[index]


class Tensors(Rows):
    """Images that are tensors from the beginning, uint8 [3, h, w]."""

    def load(self, index: int) -> torch.Tensor:
        """Return an image as a tensor."""
        return torch.from_numpy(self.images[index]).permute(2, 0, 1)
