"""Changes of colour: the factors of each image, and the functions that apply them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.transfer.packing import upload
from memfeed.transforms.params.geometry import Imagewise


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
    largest = 1.0 if image.dtype.is_floating_point else torch.iinfo(image.dtype).max
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
    largest = 1.0 if image.dtype.is_floating_point else torch.iinfo(image.dtype).max
    return values.clamp(0, largest).to(image.dtype)
