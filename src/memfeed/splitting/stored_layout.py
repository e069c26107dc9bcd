"""The fields for the stored part of a sample: in place of the leaves that are made of it, or beside them.

Images that a random step resizes are stored as all pixels, as a smaller image, or as the bytes of their file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from memfeed.errors import SplitError, brief
from memfeed.schema.compare import describe_difference, equal
from memfeed.schema.names import Path, display
from memfeed.schema.recipe import RecipeStep
from memfeed.schema.values import is_pil
from memfeed.splitting.cut import Cut
from memfeed.splitting.leaves import (
    META,
    ORIENTATION,
    Kind,
    copied,
    from_stored,
    is_numbers,
    is_sized,
    kind_of,
    stored_count,
    take_apart,
    to_stored,
    to_tensor,
)
from memfeed.splitting.pattern import Pattern, Read, from_parts, to_parts

PATTERN = "pattern"
"""The field with the number of a sample's pattern, where there are several."""


@dataclass(frozen=True, eq=False)
class InPlace:
    """Each stored leaf has the place of the leaf that is made of it: stored samples look like finished ones.

    Args:
        pattern: of all samples.
        source: for each leaf of a sample the number of the stored leaf.
    """

    pattern: Pattern
    source: tuple[int, ...]

    def stored(self, number: int, leaves: Sequence[Any]) -> Any:
        """Return the sample that a store keeps, of the leaves that were read."""
        # arguments of calls are taken apart; the others are as they are
        kept = [
            leaf
            if i >= self.pattern.given or leaf is None or is_sized(leaf) or is_numbers(leaf)
            else to_stored(leaf, self.pattern.kinds[i])[0]
            for i, leaf in enumerate(leaves)
        ]
        return self.pattern.form.build([kept[i] for i in self.source])

    def path(self, number: int, leaf: int) -> Path:
        """Return the path of a stored leaf in a stored sample."""
        return self.pattern.form.paths()[self.source.index(leaf)]


@dataclass(frozen=True, eq=False)
class Named:
    """Stored leaves are fields of a dict, with the name of the first leaf of a sample that is made of them.

    Args:
        patterns: of the samples.
        names: for each pattern the field of each part, see `to_parts`.
        empty: what a sample has in the fields of other patterns.
    """

    patterns: tuple[Pattern, ...]
    names: tuple[tuple[str, ...], ...]
    empty: dict[str, Any]

    def stored(self, number: int, leaves: Sequence[Any]) -> Any:
        """Return the sample that a store keeps, of the leaves that were read."""
        parts = to_parts(self.patterns[number], leaves)
        sample = {**self.empty, **dict(zip(self.names[number], parts, strict=True))}
        return {PATTERN: number, **sample} if len(self.patterns) > 1 else sample

    def loaded(self, sample: Any) -> tuple[Pattern, list[Any]]:
        """Return the leaves again of a stored sample."""
        number = int(sample[PATTERN]) if len(self.patterns) > 1 else 0
        pattern = self.patterns[number]
        return pattern, from_parts(pattern, [sample[name] for name in self.names[number]])

    def path(self, number: int, leaf: int) -> Path:
        """Return the path of a stored leaf in a stored sample."""
        pattern = self.patterns[number]
        leaf = pattern.same_as[leaf]
        before = sum(stored_count(kind) for i, kind in enumerate(pattern.kinds[:leaf]) if pattern.same_as[i] == i)
        return (self.names[number][before],)


Layout = InPlace | Named


def in_place(patterns: Sequence[Pattern], read: Read) -> InPlace | None:
    """Return a layout in which stored samples look like finished ones; None unless each leaf has one stored leaf."""
    pattern = patterns[0]
    has_operations, shares = len(pattern.calls) < len(pattern.tape), pattern.same_as != tuple(range(len(pattern.kinds)))
    if len(patterns) > 1 or has_operations or shares:
        return None
    stored_of: dict[tuple[int, int], int] = {}
    first = 0
    for number, entry in pattern.calls:
        count = len(entry.links)
        used = [link for link in pattern.links if link is not None and link[0] == number]
        if any(entry.links) or len(used) != count:
            return None
        stored_of.update({(number, i): first + i for i in range(count)})
        first += count
    source = []
    for link in pattern.links:
        if link is not None and link not in stored_of:
            return None
        source.append(first if link is None else stored_of[link])
        first += link is None
    if sorted(source) != list(range(len(pattern.kinds))):
        return None
    leaves = take_apart(read.sample)[0]
    for leaf, link, at in zip(leaves, pattern.links, source, strict=True):
        stored, made = pattern.kinds[at], kind_of(leaf)
        if stored_count(stored) > 1 and not (link is None and is_sized(leaf)):
            return None
        if link is not None and (
            (stored.rank or 3) != (made.rank or 3) or made.name == "array hwc" or stored.is_image != made.is_image
        ):
            return None
    return InPlace(pattern, tuple(source))


def named(patterns: Sequence[Pattern]) -> Named:
    """Return a layout of fields with names, for samples of these patterns."""
    kinds: dict[str, tuple[Any, ...]] = {}
    names, empty = [], dict[str, Any]()
    for pattern in patterns:
        found = []
        for base, form, value in _parts_of(pattern):
            name, number = base, 1
            while name in found or kinds.setdefault(name, form) != form:
                number += 1
                name = f"{base}_{number}"
            found.append(name)
            empty.setdefault(name, value)
        names.append(tuple(found))
    shared = set(names[0]).intersection(*names)
    return Named(tuple(patterns), tuple(names), {name: value for name, value in empty.items() if name not in shared})


def _parts_of(pattern: Pattern) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield for each part a name, what rows of one column must share, and an empty value."""
    paths, made_by = pattern.form.paths(), dict[int, Path]()
    first = 0
    for number, entry in pattern.calls:
        of_call = [
            path for path, link in zip(paths, pattern.links, strict=True) if link is not None and link[0] >= number
        ]
        given = [path for path, link in zip(entry.form.paths(), entry.links, strict=True) if link is None]
        for i, own in enumerate(given):
            # of a dict that steps hand on the keys are the sample's
            same = [path for path in of_call if isinstance(own[-1], str) and path[-1:] == own[-1:]]
            if of_call:
                made_by[first + i] = same[0] if same else of_call[min(i, len(of_call) - 1)]
        first += len(given)
    others = [path for path, link in zip(paths, pattern.links, strict=True) if link is None]
    made_by.update({first + i: path for i, path in enumerate(others)})
    for index, kind in enumerate(pattern.kinds):
        if pattern.same_as[index] != index:
            continue
        name = display(made_by[index]) if made_by.get(index) else "input"
        dtype = {"int": "int64", "float": "float64", "complex": "complex128"}.get(kind.dtype, kind.dtype)
        dtype = dtype.removeprefix("torch.") if kind.rank else kind.dtype
        if kind.name in ("value", "numpy scalar", "encoded"):
            yield name, (dtype,), {"str": "", "bytes": b"", "float": 0.0, "bool": False}.get(dtype, 0)
            continue
        yield name, (dtype, kind.rank), _no_elements(dtype, kind.rank)
        if kind.name == META:
            yield f"{name}_state", ("str",), ""
        elif stored_count(kind) == 2:
            extra = "palette" if kind.name == "PIL P" else "canvas"
            yield f"{name}_{extra}", (extra,), _no_elements("uint8" if extra == "palette" else "int64", 1)


def _no_elements(dtype: str, rank: int) -> Any:
    return torch.empty([0] * rank, dtype=getattr(torch, dtype, torch.uint8), device="cpu")


ENCODED = Kind("encoded", "bytes")
_SEEDS = 2  # under which a sample of smaller images is compared


@dataclass(frozen=True)
class ShortSide:
    """Shrink images so that their short side has at most `size` pixels. Masks keep their values."""

    size: int

    def leaves(self, pattern: Pattern, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves of a sample with smaller images: the first is the image, others are masks."""
        images = [i for i, kind in enumerate(pattern.kinds[: pattern.given]) if kind.is_image]
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

            if image.mode == "RGB" and not is_mask and min(target) > 1:  # torch takes half the time of Pillow
                pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
                return Image.fromarray(_resized(pixels[None], target)[0].permute(1, 2, 0).contiguous().numpy())
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
            shrunk = _resized(batch, target)[0]
        return from_stored([shrunk.reshape(*planes.shape[:-2], *target).contiguous()], kind)

    def target(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width that an image of this size gets."""
        short = min(height, width)
        if short <= self.size:
            return height, width
        return max(1, round(height * self.size / short)), max(1, round(width * self.size / short))


def _resized(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return images [n, c, h, w] in another size, (height, width)."""
    return torch.nn.functional.interpolate(images, size, mode="bilinear", antialias=True)


def require_only_images_differ(cut: Cut, read: Read, shrink: ShortSide, index: int) -> None:
    """Raise SplitError if smaller images change more of a finished sample than its images and masks.

    Boxes and points are in pixels of the original, and a size that a step returns is that of the image that it got.
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
    if is_pil(image):
        return (image.height, image.width)
    return tuple(image.shape[:2] if kind_of(image).name == "array hwc" else image.shape[-2:])


ALWAYS_CHECKED = 16  # the first images: of a store that exists only a few samples are read, of a small one all


class OpenedFiles:
    """Remember the files that a dataset's ``loader`` opens, and give their bytes in place of the images."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._opened: list[tuple[str, Any]] = []
        self._unchecked = ALWAYS_CHECKED

    def __call__(self, path: Any) -> Any:
        """Open a file, as the dataset's loader does."""
        image = self.loader(path)
        self._opened = [*self._opened[-3:], (path, copied(image) if hasattr(image, "getbands") else None)]
        return image

    def leaves(self, pattern: Pattern, leaves: Sequence[Any], *, is_checked: bool) -> list[Any]:
        """Return the leaves of a sample with the bytes of the files of its images.

        ``is_checked`` says to decode the file and compare, also where it is an RGB image that nothing says to be
        turned. Raises SplitError for an image that is not what its file decodes to.
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
            is_plain = not is_checked and not self._unchecked and _is_plain(data, leaves[i].size)
            self._unchecked = max(self._unchecked - 1, 0)
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
    kinds = pattern.kinds[: pattern.given]
    return [i for i, kind in enumerate(kinds) if kind.name == "PIL RGB" and pattern.same_as[i] == i]


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
