"""Images of several sizes: the sizes in a list of images, and parameters that differ with the size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.transfer.packing import upload
from memfeed.transforms.params.geometry import Geometry, Imagewise

Images: TypeAlias = "torch.Tensor | list[torch.Tensor]"
"""Images [n, c, h, w], or a list of n images [c, h, w] of several sizes. RowViews come in place of a tensor as far as
the first pass."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """The shapes of n images in groups, each of images of one shape.

    Args:
        shapes: [m, c, h, w] of each group.
        samples: the indices in the list of each group's images, int64 [m].
    """

    shapes: tuple[torch.Size, ...]
    samples: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(cls, images: Sequence[torch.Tensor]) -> Sizes:
        """Return the sizes of these images."""
        groups: dict[torch.Size, list[int]] = {}
        for sample, image in enumerate(images):
            groups.setdefault(image.shape, []).append(sample)
        return cls(
            tuple(torch.Size((len(samples), *shape)) for shape, samples in groups.items()),
            tuple(np.array(samples, np.int64) for samples in groups.values()),
        )

    def __len__(self) -> int:
        return sum(map(len, self.samples))

    def each(
        self, images: Sequence[torch.Tensor], change: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the images that `change` makes of each group: of its number and its images [m, c, h, w], copied."""
        changed: list[Any] = [None] * len(images)
        for group, samples in enumerate(self.samples):
            results = change(group, torch.stack([images[sample] for sample in samples]))
            for sample, result in zip(samples, results, strict=True):
                changed[sample] = result
        return changed


ImageShape: TypeAlias = "torch.Size | Sizes"


@dataclass(frozen=True, eq=False)
class BySize:
    """Parameters of images of several sizes.

    Args:
        parts: what `make_params` returned for each group of `sizes`.
        sizes: of the images that they are for.
        makes_one_size: the outputs have one size, whatever the sizes of the images, and so become one batch.
    """

    parts: tuple[Any, ...]
    sizes: Sizes
    makes_one_size: bool

    @classmethod
    def joined(cls, parts: Sequence[Any], sizes: Sizes, *, makes_one_size: bool) -> BySize:
        """Return the parameters of all groups as one, of the kind that all parts have."""
        kinds = [kind for kind in (GeometryBySize, ImagewiseBySize) if all(isinstance(p, kind.part) for p in parts)]
        return (kinds[0] if kinds else cls)(tuple(parts), sizes, makes_one_size)

    def after(self, shapes: Sequence[torch.Size]) -> ImageShape:
        """Return the shape of the images if those of each group have these shapes [m, c, h, w] now."""
        if not self.makes_one_size:
            return Sizes(tuple(shapes), self.sizes.samples)
        found = {shape[1:] for shape in shapes}
        if len(found) > 1:
            listing = " and ".join(str(list(shape)) for shape in sorted(found, key=tuple)[:2])
            raise TransformError(f"found images {listing} for one batch; expected one size, and as many channels")
        return torch.Size((len(self.sizes), *shapes[0][1:]))


@dataclass(frozen=True, eq=False)
class ImagewiseBySize(BySize, Imagewise):
    """A change of a list of images, each by itself, with parameters of its size."""

    part = Imagewise

    @cached_property
    def _places(self) -> list[tuple[Any, int]]:
        """Return the parameters of each image, and its index in its group."""
        places: list[Any] = [None] * len(self.sizes)
        for part, samples in zip(self.parts, self.sizes.samples, strict=True):
            for at, sample in enumerate(samples.tolist()):
                places[sample] = part, at
        return places

    def output_shape(self, shape: ImageShape) -> Any:
        """Return the shape of the outputs, for images of `shape`, a Sizes with the groups of these parameters."""
        assert isinstance(shape, Sizes)
        return self.after([part.output_shape(one) for part, one in zip(self.parts, shape.shapes, strict=True)])

    def output_size(self, sample: int, size: torch.Size) -> torch.Size:
        """Return the shape [c, height, width] that image `sample`, of shape [c, h, w], gets."""
        shape: torch.Size = self._places[sample][0].output_shape(torch.Size((1, *size)))
        return shape[1:]

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that images of `dtype` get."""
        output: torch.dtype = self.parts[0].output_dtype(dtype)
        return output

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Change one image [c, h, w], at index `sample` of the list."""
        part, at = self._places[sample]
        changed: torch.Tensor = part.one(image, at)
        return changed

    def all(self, image: Images) -> Any:
        """Change a list of images, on any device. Return a batch [n, c, h, w] if they have one size then."""
        assert isinstance(image, list)
        changed = self.sizes.each(image, lambda group, images: self.parts[group].all(images))
        return torch.stack(changed) if self.makes_one_size else changed


@dataclass(frozen=True, eq=False)
class GeometryBySize(ImagewiseBySize, Geometry):
    """An ImagewiseBySize that only moves pixels."""

    part = Geometry

    def nearest(self) -> GeometryBySize:
        """Return this change for masks: see `Geometry`."""
        return replace(self, parts=tuple(part.nearest() for part in self.parts))

    def points(self, xy: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Map points; see `Geometry`."""
        moved = torch.empty_like(xy)
        places = np.empty((2, len(self.sizes)), np.int64)  # of each image: its group, and its index there
        for group, samples in enumerate(self.sizes.samples):
            places[:, samples] = [[group] * len(samples), range(len(samples))]
        group_of, at = upload(torch.from_numpy(places), sample.device)[:, sample]
        for group, part in enumerate(self.parts):  # all points: how many belong to a group, only a device may know
            is_here = group_of == group
            moved = torch.where(is_here[:, None], part.points(xy, torch.where(is_here, at, 0)), moved)
        return moved
