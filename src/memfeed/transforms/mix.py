"""Transforms that mix the samples of a batch, labels included: MixUp and CutMix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError, listed
from memfeed.random import Keys, derive
from memfeed.schema.names import Path
from memfeed.transforms.batch_fields import BatchField, On, find_all, replace, tensors
from memfeed.transforms.transform import Transform

B = TypeVar("B")
CheckLabels = Callable[[Path, int, str], bool]
_checked_by: ContextVar[tuple[Any, CheckLabels] | None] = ContextVar("checked_by", default=None)


@contextmanager
def labels_checked_by(batch: Any, check: CheckLabels) -> Iterator[None]:
    """Within the block check labels that ``batch`` has on a device by ``check``, and not there.

    ``check(path, num_classes, name)`` raises TransformError for labels that are no classes, as `require_classes` does.
    It returns False if it does not know the labels of the field at this path.
    """
    token = _checked_by.set((batch, check))
    try:
        yield
    finally:
        _checked_by.reset(token)


def require_classes(labels: torch.Tensor, num_classes: int, name: str, rows: NDArray[np.int64] | None) -> None:
    """Raise TransformError unless all ``labels``, int [n] on the CPU, are from 0 to ``num_classes`` - 1.

    ``rows`` are the numbers of their rows; without them the error has the position in the batch.
    """
    values = labels.numpy()
    if not len(values) or (values.min() >= 0 and values.max() < num_classes):
        return
    at = int(np.flatnonzero((values < 0) | (values >= num_classes))[0])
    where = f"at position {at} of the batch" if rows is None else f"in row {rows[at]}"
    raise TransformError(
        f"{name} has class {values[at]} {where}; expected classes from 0 to {num_classes - 1}, as "
        f"num_classes={num_classes} says; correct the label, or pass a larger num_classes"
    )


class Mix(Transform):
    """Mix each sample with the one before it in the batch. A subclass mixes the images.

    Labels that are no classes raise TransformError, also in a loader that gives batches on a GPU: it checks them on
    the CPU. Called by hand with labels on a GPU, it does not wait for them: the check is queued, and such labels fail
    there, as an assertion of the device, after which the process cannot use it any more.
    """

    _shown = ("alpha", "num_classes")

    of_whole_batches = True

    def __init__(self, alpha: float = 1.0, num_classes: int | None = None, *, on: On = None) -> None:
        super().__init__(on=on)
        self.alpha, self.num_classes = float(alpha), num_classes
        if not 0 < self.alpha < float("inf"):
            raise TransformError(f"alpha={alpha!r}; expected a positive number; e.g. 1.0 for any share alike")
        if num_classes is not None and num_classes < 1:
            raise TransformError(f"num_classes={num_classes!r}; expected a positive int")

    def mix_images(
        self, image: torch.Tensor, share: float, generator: np.random.Generator
    ) -> tuple[torch.Tensor, float]:
        """Return the mixed images [n, c, h, w], and the share that each keeps of itself."""
        raise NotImplementedError

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Return a batch with mixed images and labels. The draws depend on seed, epoch and the rows in the batch."""
        image, label = self._fields(batch, on)
        if not isinstance(image.tensor, torch.Tensor) or image.tensor.is_nested:
            raise TransformError(
                f"field {image}; {type(self).__name__} takes images of one size; put a crop or a resize before it, "
                "e.g. RandomResizedCrop(224)"
            )
        generator = np.random.Generator(np.random.SFC64(derive(keys.seed, keys.epoch, stream, *keys.rows.tolist())))
        self._check_field(label, keys)
        mixed = self._mix(image.tensor, label.tensor, generator, f"field {label}")
        result: B = replace(replace(batch, image, mixed[0]), label, mixed[1])
        return result

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Mix images [n, c, h, w] and labels (int64 [n], or float [n, classes]), with torch's global generator.

        Returns:
            Images of the same shape, and float labels [n, classes].
        """
        seed = int(torch.randint(2**62, (), device="cpu"))
        self._check_classes(label, "the labels", None)
        return self._mix(image, label, np.random.Generator(np.random.SFC64(seed)), "the labels")

    def _mix(
        self, image: torch.Tensor, label: torch.Tensor, generator: np.random.Generator, name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not len(image):
            return image, self._one_hot(label, name)
        images, share = self.mix_images(image, float(generator.beta(self.alpha, self.alpha)), generator)
        labels = self._one_hot(label, name)
        return images, labels * share + labels.roll(1, 0) * (1 - share)

    def _one_hot(self, label: torch.Tensor, name: str) -> torch.Tensor:
        if not self._has_classes(label, name):
            return label
        assert self.num_classes is not None
        return (label[:, None] == torch.arange(self.num_classes, device=label.device)).to(torch.float32)

    def _has_classes(self, label: torch.Tensor, name: str) -> bool:
        """Return True for class numbers, False for shares. Raise TransformError for neither and without num_classes."""
        if label.ndim == 2 and label.dtype.is_floating_point:
            return False  # mixed by an earlier transform, or smoothed
        if label.ndim != 1 or label.dtype.is_floating_point or label.dtype is torch.bool:
            raise TransformError(
                f"{name} is {label.dtype} {list(label.shape)}; expected class numbers [n], or their shares, float "
                "[n, classes]"
            )
        if self.num_classes is None:
            raise TransformError(f"{name} has class numbers; expected num_classes= to be given with them")
        return True

    def _check_field(self, label: BatchField, keys: Keys) -> None:
        """Check the labels of a field: where they came to a device with a loader, on the CPU."""
        name = f"field {label}"
        known = _checked_by.get()
        if known is not None and self._has_classes(label.tensor, name):
            assert self.num_classes is not None
            given, check = known
            # a transform before this one may have replaced the labels
            is_as_given = any(one.names == label.names and one.tensor is label.tensor for one in tensors(given))
            if is_as_given and check(label.names, self.num_classes, name):
                return
        self._check_classes(label.tensor, name, keys.rows.numpy())

    def _check_classes(self, label: torch.Tensor, name: str, rows: NDArray[np.int64] | None) -> None:
        """Raise TransformError for classes beyond num_classes. On a GPU the check is queued, and fails there."""
        if not self._has_classes(label, name):
            return
        assert self.num_classes is not None
        if label.device.type != "cuda":
            require_classes(label.cpu(), self.num_classes, name, rows)
            return
        is_known = ((label >= 0) & (label < self.num_classes)).all()
        torch._assert_async(is_known, f"{name} has other classes; expected 0 to {self.num_classes - 1}")

    def _fields(self, batch: Any, on: On) -> tuple[BatchField, BatchField]:
        image, *named = find_all(batch, on)
        if len(named) == 1:
            return image, named[0]
        if named:
            raise TransformError(
                f"{type(self).__name__} works on {listed([image, *named], 120)}; expected images and their "
                'labels: on=["image", "label"], with the names of your fields'
            )
        n = len(image.tensor)
        labels = [
            field
            for field in tensors(batch)
            if isinstance(field.tensor, torch.Tensor)
            and field.tensor.shape[:1] == (n,)
            and field.tensor.ndim == (2 if field.tensor.dtype.is_floating_point else 1)
        ]
        if len(labels) != 1:
            raise TransformError(
                f"found {len(labels)} fields that look like labels ({listed(labels, 120)}); expected one; name "
                'images and labels with on=["image", "label"]'
            )
        return image, labels[0]


class MixUp(Mix):
    """Blend each sample with another of the batch, and their labels by the same share (Zhang et al., arXiv:1710.09412).

    One share is drawn per batch, from Beta(alpha, alpha). Labels become float [n, num_classes].

    Args:
        alpha: of the distribution; with 1 any share is equally likely, with less most batches change little.
        num_classes: of labels that are class numbers. Labels beyond it are an error; called by hand with labels on a
            GPU, one that the device reports later, as a failed assertion, because it does not wait for them.
        on: images and labels, ["image", "label"]. None: the only field that looks like images, and the only one that
            looks like labels, integers [n] or floats [n, classes].

    Raises:
        TransformError: alpha is not positive; later, integer images, labels outside the classes, or several fields
            that can be meant.
    """

    def mix_images(
        self, image: torch.Tensor, share: float, generator: np.random.Generator
    ) -> tuple[torch.Tensor, float]:
        """Blend float images. Raise TransformError for integers, which have no values between."""
        if not image.dtype.is_floating_point:
            raise TransformError(
                f"images are {image.dtype}; expected floats to blend; put ToDtype or Normalize before it"
            )
        return torch.lerp(image.roll(1, 0), image, share), share


class CutMix(Mix):
    """Paste a box of another sample of the batch into each, and mix labels by area (Yun et al., arXiv:1905.04899).

    One box is drawn per batch. Labels become float [n, num_classes].

    Args:
        alpha: of the distribution Beta(alpha, alpha) of the area; with 1 any is equally likely.
        num_classes: of labels that are class numbers, see `MixUp`.
        on: images and labels, see `MixUp`.

    Raises:
        TransformError: as `MixUp`; images may be integers.
    """

    def mix_images(
        self, image: torch.Tensor, share: float, generator: np.random.Generator
    ) -> tuple[torch.Tensor, float]:
        """Paste the box, cut off at the edges. The share is that of the pixels."""
        h, w = image.shape[-2:]
        x, y = int(generator.integers(w)), int(generator.integers(h))
        half = 0.5 * (1 - share) ** 0.5
        left, right = max(x - int(half * w), 0), min(x + int(half * w), w)
        top, bottom = max(y - int(half * h), 0), min(y + int(half * h), h)
        mixed = image.clone()
        mixed[..., top:bottom, left:right] = image.roll(1, 0)[..., top:bottom, left:right]
        return mixed, 1 - (right - left) * (bottom - top) / (h * w)
