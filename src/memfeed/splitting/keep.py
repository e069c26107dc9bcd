"""The stored form of images that a random step resizes: all pixels, a smaller image, or the bytes of its file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfeed.errors import SplitError, brief
from memfeed.schema.compare import describe_difference, equal
from memfeed.schema.names import display
from memfeed.schema.recipe import RecipeStep
from memfeed.schema.values import is_pil
from memfeed.splitting.cut import Cut
from memfeed.splitting.leaves import ORIENTATION, Kind, copied, from_stored, kind_of, take_apart
from memfeed.splitting.pattern import Pattern, Read
from memfeed.splitting.step_values import to_tensor
from memfeed.splitting.stored_layout import InPlace, Layout

ENCODED = Kind("encoded", "bytes")
_SEEDS = 2  # under which a sample of smaller images is compared


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


def require_only_images_differ(cut: Cut, read: Read, shrink: ShortSide, index: int) -> None:
    """Raise SplitError if smaller images change more of a finished sample than its images and masks.

    Boxes and points are in pixels of the original, and a size that a step returns is that of the image that it got.

    Args:
        cut: of the dataset.
        read: of the sample.
        shrink: makes its images smaller.
        index: of the sample.
    """
    number = cut.known(read)
    if number is None:
        return
    pattern = cut.patterns[number]
    small = shrink.leaves(pattern, read.leaves)
    if all(one is other for one, other in zip(small, read.leaves, strict=True)):
        return
    hint = f"forms={shrink.size} changes images and masks alone: choose forms='full', which stores all pixels"
    for seed in range(_SEEDS):
        made = []
        for leaves in (read.leaves, small):
            cut.generators.seed(index, seed)
            try:
                made.append(take_apart(cut.rebuild(pattern, leaves)))
            except Exception as error:
                if not made:
                    raise
                raise SplitError(
                    f"found that a random step refuses sample {index} with an image of a short side of {shrink.size}: "
                    f"{type(error).__name__}: {error}. {hint}"
                ) from error
        (whole, form), (found, _) = made
        sides = {_sides(leaf) for leaf in whole if kind_of(leaf).is_image and kind_of(leaf).rank > 2}
        for path, leaf, expected in zip(form.paths(), found, whole, strict=True):
            is_image = kind_of(expected).is_image and _sides(expected) in sides
            if not is_image and not equal(leaf, expected):
                raise SplitError(
                    f"found that field {display(path)} of sample {index} depends on the size of the image: "
                    f"{describe_difference(leaf, expected)}. {hint}"
                )


def _sides(image: Any) -> tuple[int, ...]:
    """Return the height and the width of an image or a mask."""
    if is_pil(image):
        return (image.height, image.width)
    return tuple(image.shape[:2] if kind_of(image).name == "array hwc" else image.shape[-2:])


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
