"""Read a tree of image files, one sub-directory per class, as a dataset. Needs the extra [vision]."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from memfeed.system.files import local_path
from memfeed.system.messages import require

FIELDS = ("image", "label")
"""The names of the fields of a sample."""


def image_folder(root: str | os.PathLike[str], transform: Callable[[Any], Any] | None = None) -> Any:
    """Return torchvision's `ImageFolder`: (image, label) samples, classes numbered in the order of their sorted names.

    A file that cannot be decoded raises an OSError that names it. Raises ModuleNotFoundError without [vision],
    FileNotFoundError or NotADirectoryError for a tree without images.
    """
    require("vision", "torchvision", "PIL")
    from torchvision.datasets import ImageFolder

    return ImageFolder(str(local_path(root)), transform=transform, loader=_load)


def to_pixels(resize: str | None = None) -> Callable[[Any], Any]:
    """Return a function that converts a PIL image to a uint8 tensor [3, h, w].

    Args:
        resize: "256" scales the short side to 256 pixels and keeps the aspect ratio, "256x192" scales to that height
            and width, None keeps the size.

    Raises:
        ValueError: ``resize`` has another form.
    """
    size = None if resize is None else _size(resize)
    require("vision", "torchvision", "PIL")
    from torchvision import transforms

    steps = [] if size is None else [transforms.Resize(size)]
    composed: Callable[[Any], Any] = transforms.Compose([*steps, transforms.PILToTensor()])
    return composed


def _size(text: str) -> int | tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text)
    if match is None:
        raise ValueError(
            f"found the size {text!r}; expected the short side in pixels, as 256, or height x width, as 256x256"
        )
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))


def _load(path: str) -> Any:
    from torchvision.datasets.folder import default_loader

    try:
        return default_loader(path)
    except Exception as error:  # Pillow raises SyntaxError, ValueError and others of its own for bad files
        raise OSError(f"{path}: found no image that can be decoded ({type(error).__name__}: {error})") from error
