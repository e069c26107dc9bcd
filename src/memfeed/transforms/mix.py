"""Mixing the samples of a batch with each other, labels included."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from memfeed.errors import TransformError
from memfeed.random import Keys, derive
from memfeed.transforms.batch_fields import BatchField, On, find_all, replace, tensors
from memfeed.transforms.transform import Transform

B = TypeVar("B")
Draw: TypeAlias = np.random.Generator


class Mix(Transform):
    """Mixes each sample with the one before it in the batch; a subclass says how the images are."""

    of_whole_batches = True

    def __init__(self, alpha: float = 1.0, num_classes: int | None = None, *, on: On = None) -> None:
        super().__init__(on=on)
        self.alpha, self.num_classes = float(alpha), num_classes
        if not 0 < self.alpha < float("inf"):
            raise TransformError(f"alpha={alpha!r}; expected a positive number; e.g. 1.0 for any share alike")
        if num_classes is not None and num_classes < 1:
            raise TransformError(f"num_classes={num_classes!r}; expected a positive int")

    def mix_images(self, image: torch.Tensor, share: float, draw: Draw) -> tuple[torch.Tensor, float]:
        """The images [n, c, h, w] mixed, and the share that each has of itself."""
        raise NotImplementedError

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """A batch with images and labels mixed. What is drawn depends on seed, epoch and the rows in the batch."""
        image, label = self._fields(batch, on)
        draw = np.random.Generator(np.random.SFC64(derive(keys.seed, keys.epoch, stream, *keys.rows.tolist())))
        mixed = self._mixed(image.tensor, label.tensor, draw, f"field {label}")
        result: B = replace(replace(batch, image, mixed[0]), label, mixed[1])
        return result

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Images [n, c, h, w] and labels (int64 [n], or float [n, classes]) mixed, drawn from torch's global generator.

        Returns:
            Images of the same shape, and float labels [n, classes].
        """
        seed = int(torch.randint(2**62, (), device="cpu"))
        return self._mixed(image, label, np.random.Generator(np.random.SFC64(seed)), "the labels")

    def extra_repr(self) -> str:
        """The parameters, for repr."""
        return f"alpha={self.alpha}, num_classes={self.num_classes}"

    def _mixed(
        self, image: torch.Tensor, label: torch.Tensor, draw: Draw, name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not len(image):
            return image, self._one_hot(label, name)
        images, share = self.mix_images(image, float(draw.beta(self.alpha, self.alpha)), draw)
        labels = self._one_hot(label, name)
        return images, labels * share + labels.roll(1, 0) * (1 - share)

    def _one_hot(self, label: torch.Tensor, name: str) -> torch.Tensor:
        if label.ndim == 2 and label.dtype.is_floating_point:
            return label  # mixed before, or smoothed
        if label.ndim != 1 or label.dtype.is_floating_point or label.dtype is torch.bool:
            raise TransformError(
                f"{name} is {label.dtype} {list(label.shape)}; expected class numbers [n], or their shares, float "
                "[n, classes]"
            )
        if self.num_classes is None:
            raise TransformError(f"{name} has class numbers; expected num_classes= to be given with them")
        if len(label) and not 0 <= int(label.min()) <= int(label.max()) < self.num_classes:
            raise TransformError(
                f"{name} has classes {int(label.min())} to {int(label.max())}; expected 0 to {self.num_classes - 1}, "
                f"as num_classes={self.num_classes} says"
            )
        return torch.nn.functional.one_hot(label.long(), self.num_classes).to(torch.float32)

    def _fields(self, batch: Any, on: On) -> tuple[BatchField, BatchField]:
        image, *named = find_all(batch, on)
        if len(named) == 1:
            return image, named[0]
        if named:
            raise TransformError(
                f"{type(self).__name__} works on {', '.join(map(str, [image, *named]))}; expected images and their "
                'labels: on=("image", "label"), with the names of your fields'
            )
        n = len(image.tensor)
        labels = [
            field
            for field in tensors(batch)
            if field.tensor.shape[:1] == (n,)
            and (
                (field.tensor.ndim == 1 and not field.tensor.dtype.is_floating_point)
                or (field.tensor.ndim == 2 and field.tensor.dtype.is_floating_point)
            )
        ]
        if len(labels) != 1:
            raise TransformError(
                f"found {len(labels)} fields that look like labels ({', '.join(map(str, labels))}); expected one; name "
                'images and labels with on=("image", "label")'
            )
        return image, labels[0]


class MixUp(Mix):
    """Blend each sample with another of the batch, and their labels alike (Zhang et al., arXiv:1710.09412).

    The share is one for the batch, from Beta(alpha, alpha). Labels become float [n, num_classes].

    Args:
        alpha: of the distribution; 1 makes any share as likely, less makes most batches hardly mixed.
        num_classes: of labels that are class numbers.
        on: images and labels, ("image", "label"). None: the one field that looks like images, and the one that looks
            like labels, integers [n] or floats [n, classes].

    Raises:
        TransformError: alpha is not positive; later, integer images, labels outside the classes, or no telling which
            fields are meant.
    """

    def mix_images(self, image: torch.Tensor, share: float, draw: Draw) -> tuple[torch.Tensor, float]:
        """Blend; whole numbers have no room for that."""
        if not image.dtype.is_floating_point:
            raise TransformError(
                f"images are {image.dtype}; expected floats to blend; put ToDtype or Normalize before it"
            )
        return torch.lerp(image.roll(1, 0), image, share), share


class CutMix(Mix):
    """Paste a box of another sample of the batch into each, labels by area (Yun et al., arXiv:1905.04899).

    Size and place of the box are one for the batch. Labels become float [n, num_classes].

    Args:
        alpha: of the distribution Beta(alpha, alpha) of the area; 1 makes any as likely.
        num_classes: of labels that are class numbers.
        on: images and labels, see `MixUp`.

    Raises:
        TransformError: as `MixUp`; images may be integers.
    """

    def mix_images(self, image: torch.Tensor, share: float, draw: Draw) -> tuple[torch.Tensor, float]:
        """Paste the box, cut off at the edges; the share is that of the pixels."""
        h, w = image.shape[2:]
        x, y = int(draw.integers(w)), int(draw.integers(h))
        half = 0.5 * (1 - share) ** 0.5
        left, right = max(x - int(half * w), 0), min(x + int(half * w), w)
        top, bottom = max(y - int(half * h), 0), min(y + int(half * h), h)
        mixed = image.clone()
        mixed[:, :, top:bottom, left:right] = image.roll(1, 0)[:, :, top:bottom, left:right]
        return mixed, 1 - (right - left) * (bottom - top) / (h * w)
