"""Changes of values: casts and normalisation as one description, functions of single values, colours, painted boxes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.random import DRAW_STEP_SIGNED, mix_signed
from memfeed.transfer.packing import upload
from memfeed.transforms.params.geometry import Fill, Imagewise, filled

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Affine:
    """Cast to `dtype`, then multiply each channel by its `scale` and add its `shift`.

    Args:
        dtype: of the output.
        scale: one float per channel; None for a cast alone.
        shift: one float per channel; None exactly if `scale` is.
    """

    dtype: torch.dtype
    scale: tuple[float, ...] | None = None
    shift: tuple[float, ...] | None = None

    @property
    def is_half(self) -> bool:
        """True if it computes values of 16 bits. These are computed in float32 and rounded once."""
        return self.scale is not None and self.dtype in HALVES

    def then(self, after: Affine) -> Affine:
        """Join this one and `after`, of the same dtype, into one."""
        if self.scale is None or self.shift is None:
            return after
        if after.scale is None or after.shift is None:
            return self
        return Affine(
            dtype=self.dtype,
            scale=tuple(a * b for a, b in zip(self.scale, after.scale, strict=True)),
            shift=tuple(a * b + c for a, b, c in zip(self.shift, after.scale, after.shift, strict=True)),
        )


@dataclass(frozen=True, eq=False)
class Scaled(Imagewise):
    """An Affine applied to each image by itself, because a later change computes with its values."""

    affine: Affine

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the Affine."""
        return self.affine.dtype

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Scale one image [c, h, w]."""
        if self.affine.scale is None or self.affine.shift is None:
            return image.to(self.affine.dtype)
        cast = image.to(self._computed)
        output = torch.empty_like(cast) if cast is image else cast
        scale_and_shift(cast[None], self.affine.scale, self.affine.shift, output[None])
        return output.to(self.affine.dtype)

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """Scale all images [n, c, h, w], on any device."""
        if self.affine.scale is None or self.affine.shift is None:
            return image.to(self.affine.dtype)
        values = (self.affine.scale, self.affine.shift)
        ones = [1] * (image.ndim - 2)
        both = upload(torch.tensor(values, dtype=self._computed, device="cpu"), image.device)
        scale, shift = (one.view(-1, *ones) for one in both)
        changed: torch.Tensor = (image.to(self._computed) * scale + shift).to(self.affine.dtype)
        return changed

    @property
    def _computed(self) -> torch.dtype:
        """Return the dtype to compute in. bfloat16 would round three times: an error of 0.02 instead of 0.005."""
        return torch.float32 if self.affine.is_half else self.affine.dtype


@dataclass(frozen=True, eq=False)
class Mapped(Imagewise):
    """A function applied to each value of n images.

    Args:
        fn: takes images and returns a tensor of the same shape.
        dtype: of the tensors that `fn` returns.
    """

    fn: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that `fn` returns."""
        return self.dtype

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Call the function with one image [c, h, w]."""
        return self.fn(image)

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """Call the function with all images [n, c, h, w], on any device."""
        return self.fn(image)


def scale_and_shift(
    source: torch.Tensor, scale: tuple[float, ...], shift: tuple[float, ...], output: torch.Tensor
) -> None:
    """Write source * scale + shift per channel [n, c, ...], in one pass.

    A scalar add with alpha took 0.6 ms for [64, 3, 224, 224], mul_ then add_ 1.4 ms, a broadcast addcmul 2.6 ms.
    """
    values = zip(_numbers(shift, output.dtype), source.unbind(1), scale, output.unbind(1), strict=True)
    for offset, channel, factor, target in values:
        torch.add(offset, channel, alpha=factor, out=target)


@lru_cache(64)
@torch.inference_mode(False)  # they outlive the caller's block
def _numbers(values: tuple[float, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value, dtype=dtype, device="cpu") for value in values)


@dataclass(frozen=True, eq=False)
class Jitter(Imagewise):
    """Changes of colour of n images, each with its own factors in its own order.

    Args:
        factors: by the name of the change ("brightness", "contrast", "saturation", "hue"), float32 [n].
        order: the indices in `factors` of the first change, the second, ..., int64 [n, number of changes].
    """

    factors: dict[str, NDArray[np.float32]]
    order: NDArray[np.int64]

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Change the colours of one image [c, h, w]."""
        batch, changes = image[None], list(self.factors.items())
        for index in self.order[sample].tolist():
            name, factors = changes[index]
            batch = CHANGES[name](batch, torch.from_numpy(factors[sample : sample + 1]).view(1, 1, 1, 1))
        return batch[0]

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """Change the colours of all images [n, c, h, w]. Images with the same next change are changed together."""
        if not self.factors or not len(image):
            return image
        turns = self.order.T
        places = np.argsort(turns, 1, kind="stable")  # the images by their change, in each turn
        sorted_samples, back = upload(torch.from_numpy(np.stack([places, np.argsort(places, 1)])), image.device)
        factors = upload(torch.from_numpy(np.stack(list(self.factors.values()))), image.device)
        for number, turn in enumerate(turns):
            groups = sorted_samples[number].split(np.bincount(turn, minlength=len(factors)).tolist())
            changed = [
                CHANGES[name](image[at], factors[index][at].view(-1, 1, 1, 1))
                for index, (name, at) in enumerate(zip(self.factors, groups, strict=True))
                if len(at)
            ]
            image = torch.cat(changed)[back[number]]
        return image


@dataclass(frozen=True, eq=False)
class Gray(Imagewise):
    """Turn some of n images gray: those with True in `chosen`, bool [n]."""

    chosen: NDArray[np.bool_]

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Turn one image [c, h, w] gray, or return it."""
        return _like(_gray(image), image).expand_as(image) if self.chosen[sample] else image

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """Turn the chosen images of [n, c, h, w] gray, on any device."""
        chosen = upload(torch.from_numpy(self.chosen), image.device)[:, None, None, None]
        return torch.where(chosen, _like(_gray(image), image), image)


def _brightness(image: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return _like(image * factor, image)


def _contrast(image: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    gray = _gray(image).mean(dim=(-3, -2, -1), keepdim=True)
    return _like((image * factor).add_(gray * (1 - factor)), image)


def _saturation(image: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return _like((image * factor).add_(_gray(image) * (1 - factor)), image)


def _hue(image: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Turn the hue, with hue, saturation and value (https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative)."""
    largest = largest_value(image.dtype)
    rgb = image.to(torch.float32) / largest
    value, least = rgb.amax(-3, keepdim=True), rgb.amin(-3, keepdim=True)
    chroma = value - least
    safe = torch.where(chroma == 0, 1.0, chroma)
    r, g, b = _channels(rgb)
    hue = torch.where(
        value == r, ((g - b) / safe) % 6, torch.where(value == g, (b - r) / safe + 2, (r - g) / safe + 4)
    )  # in sixths of the circle
    offsets = upload(torch.tensor([5.0, 3.0, 1.0], device="cpu"), image.device).view(3, 1, 1)
    k = (offsets + hue + 6 * factor) % 6
    turned = value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)
    if image.dtype.is_floating_point:
        return turned.to(image.dtype)
    return (turned * (largest + 1 - 1e-3)).to(image.dtype)  # as torchvision converts floats to integers


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
    "hue": _hue,
}
"""Functions of images [k, c, h, w] and a factor for each, [k, 1, 1, 1]."""


def _channels(image: torch.Tensor) -> list[torch.Tensor]:
    return [image[..., channel : channel + 1, :, :] for channel in range(3)]


def _gray(image: torch.Tensor) -> torch.Tensor:
    """Return the luma of ITU-R BT.601, floats [..., 1, h, w]; whole numbers for integer images."""
    if image.shape[-3] == 1:
        return image if image.dtype.is_floating_point else image.to(torch.float32)
    r, g, b = _channels(image)
    gray: torch.Tensor = (r * 0.2989).add_(g * 0.587).add_(b * 0.114)
    return gray if image.dtype.is_floating_point else gray.floor_()


def _like(values: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Clip `values` to the range of the image's dtype, and cast them to it."""
    return values.clamp(0, largest_value(image.dtype)).to(image.dtype)


def largest_value(dtype: torch.dtype) -> int:
    """Return the divisor that maps images of `dtype` to [0, 1]; 1 for floats, which are expected there."""
    return 1 if dtype.is_floating_point else torch.iinfo(dtype).max


@dataclass(frozen=True, eq=False)
class Erased(Imagewise):
    """A box in each of n images, painted over.

    Args:
        top: first row of each box, int64 [n], in pixels.
        left: first column, likewise.
        box_height: pixel rows of each box, int64 [n]; 0 if nothing is painted.
        box_width: pixel columns, likewise.
        fill: one number, or one per channel; None for noise.
        seeds: of the noise, int64 [n].
    """

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    box_height: NDArray[np.int64]
    box_width: NDArray[np.int64]
    fill: Fill | None
    seeds: NDArray[np.int64]

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Paint over the box of one image [c, h, w]. Return the image itself if its box is empty."""
        height, width = int(self.box_height[sample]), int(self.box_width[sample])
        if not height or not width:
            return image
        top, left = int(self.top[sample]), int(self.left[sample])
        painted = image.clone()
        painted[:, top : top + height, left : left + width] = self._paint(image, sample, top, left, height, width)
        return painted

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """Paint over the boxes of all images [n, c, h, w], on any device."""
        _, c, h, w = image.shape
        boxes = np.stack([self.top, self.left, self.top + self.box_height, self.left + self.box_width, self.seeds])
        top, left, bottom, right, seeds = upload(torch.from_numpy(boxes), image.device)[..., None, None, None]
        row = torch.arange(h, device=image.device)[:, None]
        column = torch.arange(w, device=image.device)
        is_inside = (row >= top) & (row < bottom) & (column >= left) & (column < right)
        if self.fill is not None:
            return torch.where(is_inside, filled(self.fill, (c, 1, 1), image), image)
        position = torch.arange(c * h * w, device=image.device).view(c, h, w)
        return torch.where(is_inside, normal(seeds, position).to(image.dtype), image)

    def _paint(self, image: torch.Tensor, sample: int, top: int, left: int, height: int, width: int) -> torch.Tensor:
        if self.fill is not None:
            return filled(self.fill, (len(image), 1, 1), image)
        c, h, w = image.shape
        position = torch.arange(c * h * w, device=image.device).view(c, h, w)
        seeds = torch.tensor(int(self.seeds[sample]), device="cpu")
        return normal(seeds, position[:, top : top + height, left : left + width]).to(image.dtype)


def normal(seeds: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return numbers of the standard normal distribution, float32, each a function of a seed and a position alone.

    The seed plus a step for each position, hashed as in `memfeed.random`, gives two numbers of 24 bits; these give one
    of the normal distribution (Box and Muller, https://doi.org/10.1214/aoms/1177706645). The GPU kernel does the same.

    Args:
        seeds: int64 of any shape.
        position: of the value in its image, int64 of a shape that broadcasts with it.
    """
    bits = mix_signed(position * DRAW_STEP_SIGNED + seeds)
    first, second = (bits >> 40) & 0xFFFFFF, (bits >> 16) & 0xFFFFFF
    radius = ((first + 1).to(torch.float32) * 2.0**-24).log().mul_(-2).sqrt_()
    return (second.to(torch.float32) * (2 * math.pi * 2.0**-24)).cos_().mul_(radius)
