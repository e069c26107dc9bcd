"""The stored form of images that a random step resizes: all pixels, a smaller image, or the bytes of its file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfeed.errors import SplitError, brief
from memfeed.schema.compare import equal
from memfeed.schema.recipe import RecipeStep
from memfeed.splitting.leaves import ORIENTATION, Kind, copied, from_stored, kind_of
from memfeed.splitting.pattern import Pattern
from memfeed.splitting.step_values import to_tensor
from memfeed.splitting.stored_layout import InPlace, Layout

ENCODED = Kind("encoded", "bytes")


@dataclass(frozen=True)
class ShortSide:
    """Shrink images so that their short side has at most `size` pixels. Masks keep their values."""

    size: int

    def leaves(self, pattern: Pattern, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves of a sample with smaller images: the first is the image, others are masks."""
        given = sum(entry.links.count(None) for _, entry in pattern.calls)
        images = [i for i, kind in enumerate(pattern.kinds[:given]) if kind.is_image]
        small = list(leaves)
        for i in images:
            small[i] = self(leaves[i], is_mask=i > images[0] and pattern.same_as[i] != images[0])
        return small

    def __call__(self, image: Any, *, is_mask: bool = False) -> Any:
        """Return a smaller image of the same kind."""
        kind = kind_of(image)
        if kind.name.startswith("PIL"):
            width, height = image.size
            target = self.target(height, width)
            if target == (height, width):
                return image
            from PIL import Image

            mode = Image.Resampling.NEAREST if is_mask else Image.Resampling.BILINEAR
            return image.resize(target[::-1], mode)
        tensor = to_tensor(copied(image))
        planes = tensor.permute(2, 0, 1) if kind.name == "array hwc" else tensor
        target = self.target(*planes.shape[-2:])
        if target == tuple(planes.shape[-2:]):
            return image
        batch = planes.reshape(1, -1, *planes.shape[-2:])
        if is_mask or kind.name == "Mask":
            rows, columns = (
                torch.arange(t, device="cpu") * s // t for s, t in zip(planes.shape[-2:], target, strict=True)
            )
            shrunk = batch[0][:, rows[:, None], columns]
        else:
            shrunk = torch.nn.functional.interpolate(batch, target, mode="bilinear", antialias=True)[0]
        return from_stored([shrunk.reshape(*planes.shape[:-2], *target).contiguous()], kind)

    def target(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width that an image of this size gets."""
        short = min(height, width)
        if short <= self.size:
            return height, width
        return max(1, round(height * self.size / short)), max(1, round(width * self.size / short))


class OpenedFiles:
    """Remember the files that a dataset's ``loader`` opens, and give their bytes in place of the images.

    Args:
        loader: opens a file, as that of torchvision's ImageFolder.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._opened: list[tuple[str, Any]] = []

    def __call__(self, path: Any) -> Any:
        """Open a file, as the dataset's loader does."""
        image = self.loader(path)
        self._opened = [*self._opened[-3:], (path, copied(image) if hasattr(image, "getbands") else None)]
        return image

    def leaves(self, pattern: Pattern, leaves: Sequence[Any], *, is_checked: bool) -> list[Any]:
        """Return the leaves of a sample with the bytes of the files of its images.

        Args:
            pattern: of the sample.
            leaves: of the sample.
            is_checked: decode the file and compare, also where it is an RGB image that nothing says to be turned.

        Raises:
            SplitError: an image is not what its file decodes to.
        """
        from memfeed.transforms.decode import decode

        found = list(leaves)
        for i in images_of(pattern):
            path = next(
                (path for path, image in reversed(self._opened) if image is not None and equal(image, leaves[i])),
                None,
            )
            if path is None:
                raise SplitError(
                    "found an image that is not as the dataset's loader opened it; expected the image of a file, "
                    "whose bytes can be stored: choose forms=256 or forms='full'"
                )
            with open(path, "rb") as file:
                data = file.read()
            is_plain = not is_checked and _is_plain(data, leaves[i].size)
            if not is_plain and not equal(from_stored([decode(data)], Kind("PIL RGB")), leaves[i]):
                raise SplitError(
                    f"found that {brief(path, 80)} decodes to another image than the dataset gives (it may be turned "
                    "as its Exif data say); expected the same: choose forms=256 or forms='full'"
                )
            found[i] = data
        return found


def _is_plain(data: bytes, size: tuple[int, int]) -> bool:
    """Return True if a file has an RGB image of this size, and no Exif data that turn it, nor a colour profile.

    Loaders treat other files in ways of their own: they turn them, or invert the colours of CMYK images.
    """
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        is_usual = image.mode == "RGB" and "icc_profile" not in image.info
        return bool(is_usual and image.size == size and image.getexif().get(ORIENTATION, 1) == 1)


def images_of(pattern: Pattern) -> list[int]:
    """Return the numbers of the stored leaves that are images which a pipeline gets."""
    given = sum(entry.links.count(None) for _, entry in pattern.calls)
    return [i for i, kind in enumerate(pattern.kinds[:given]) if kind.name == "PIL RGB" and pattern.same_as[i] == i]


def encoded(pattern: Pattern) -> Pattern:
    """Return a pattern with the bytes of files in place of images."""
    images = images_of(pattern)
    return replace(pattern, kinds=tuple(ENCODED if i in images else kind for i, kind in enumerate(pattern.kinds)))


def decoding_steps(layout: Layout) -> list[RecipeStep]:
    """Return the steps that decode what `encoded` stores."""
    pattern = layout.pattern if isinstance(layout, InPlace) else layout.patterns[0]
    return [
        RecipeStep(name="Decode", on=(layout.path(0, i),)) for i, kind in enumerate(pattern.kinds) if kind == ENCODED
    ]
