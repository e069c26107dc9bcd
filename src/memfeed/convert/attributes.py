"""The names of classes and the targets that a dataset has, as torchvision and Hugging Face keep them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from memfeed.convert.forms import Rounded
from memfeed.convert.inputs import Input
from memfeed.convert.options import ConvertOptions
from memfeed.schema.codec import Int64Array
from memfeed.schema.containers import reads_as
from memfeed.store.dataset_attributes import Attributes, ClassName, Kept, Loss, Targets, TargetsForm


def kept_of(given: Input, metadata: Mapping[str, Any], options: ConvertOptions, losses: tuple[Loss, ...]) -> Kept:
    """Return what a store of this dataset keeps beside its columns; ``losses`` are those of its codecs."""
    classes, class_to_idx = classes_of(given.dataset)
    found = targets_of(given.dataset, given.length) if given.kind == "map" and given.length is not None else None
    targets, form = (None, None) if found is None else (found[0], Targets(form=found[1]))
    attributes = Attributes(
        classes=classes,
        class_to_idx=class_to_idx,
        targets=form,
        transform=options.recipe,
        keep=options.keep,
        losses=losses,
    )
    return Kept(metadata, attributes, targets)


def classes_of(dataset: Any) -> tuple[tuple[ClassName, ...] | None, dict[str, int] | None]:
    """Return the ``classes`` and ``class_to_idx`` of a dataset; None for what it does not have, or is no such thing."""
    if isinstance(dataset, Rounded) or reads_as(dataset, Subset):
        return classes_of(dataset.dataset)
    if reads_as(dataset, ConcatDataset):
        every_classes, every_numbers = zip(*map(classes_of, dataset.datasets), strict=True)
        return _shared(every_classes), _shared(every_numbers)
    label = _class_label(dataset)
    if label is not None:
        names = tuple(map(str, label[1]))
        return names, {name: index for index, name in enumerate(names)}
    found, numbers = _attribute(dataset, "classes"), _attribute(dataset, "class_to_idx")
    classes = tuple(map(_class_name, found)) if isinstance(found, list | tuple) else ()
    kept = tuple(name for name in classes if name is not None)
    is_map = isinstance(numbers, Mapping) and all(
        type(name) is str and type(index) is int and -(1 << 63) <= index < 1 << 63 for name, index in numbers.items()
    )
    return (kept if kept and len(kept) == len(classes) else None), (dict(numbers) if is_map else None)


def targets_of(dataset: Any, length: int) -> tuple[Int64Array, TargetsForm] | None:
    """Return the ``targets`` of all samples, int64 [length], and their form; None if there are no such numbers."""
    if isinstance(dataset, Rounded):
        return targets_of(dataset.dataset, length)
    if reads_as(dataset, Subset):
        base = targets_of(dataset.dataset, len(dataset.dataset))
        return None if base is None else (base[0][np.asarray(dataset.indices, np.int64)], base[1])
    if reads_as(dataset, ConcatDataset):
        parts = [targets_of(part, len(part)) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return (np.concatenate([part[0] for part in known]), known[0][1]) if len(known) == len(parts) else None
    label = _class_label(dataset)
    found = list(dataset.with_format(None)[label[0]]) if label is not None else _attribute(dataset, "targets")
    form: TargetsForm = "tensor" if isinstance(found, torch.Tensor | np.ndarray) else "list"
    if isinstance(found, torch.Tensor):
        found = found.detach().cpu().numpy() if found.layout == torch.strided and not found.is_nested else None
    elif isinstance(found, list | tuple) and all(isinstance(one, int | np.integer) for one in found[:1]):
        with contextlib.suppress(ValueError, OverflowError, TypeError):
            found = np.asarray(found)
    if not isinstance(found, np.ndarray) or found.shape != (length,) or found.dtype.kind not in "iu":
        return None
    numbers: Int64Array = found.astype(np.int64)
    return (numbers, form) if np.array_equal(numbers, found) else None


def _attribute(dataset: Any, name: str) -> Any:
    try:
        return getattr(dataset, name, None)
    except Exception:  # a property of the user's that raises is none that a store can keep
        return None


def _class_name(value: Any) -> ClassName | None:
    if isinstance(value, list | tuple) and all(type(name) is str for name in value):
        return tuple(value)  # ImageNet's classes have several names
    return value if type(value) in (str, int) and not (type(value) is int and abs(value) >> 63) else None


def _class_label(dataset: Any) -> tuple[str, Sequence[str]] | None:
    """Return the column and names of the only ClassLabel of a Hugging Face dataset; None for any other dataset."""
    features = getattr(dataset, "features", None) if type(dataset).__module__.startswith("datasets.") else None
    found = [(key, one.names) for key, one in (features or {}).items() if type(one).__name__ == "ClassLabel"]
    return found[0] if len(found) == 1 else None


def _shared(values: Sequence[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else None
