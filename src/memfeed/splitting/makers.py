"""Functions that make arrays, NumPy scalars and PIL images, as the dataset returned them, of the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch

from memfeed.errors import SplitError
from memfeed.schema.fields import Schema
from memfeed.schema.infer import infer
from memfeed.schema.names import Path
from memfeed.schema.tree import Flattener
from memfeed.schema.values import Picture, is_pil, picture_of
from memfeed.splitting.leaves import NONE, Kind, from_stored, kind_of


def makers_of(samples: Sequence[Any], schema: Schema) -> dict[Path, Callable[[Any], Any]]:
    """Return what makes leaves of rows of a whole store, by path, where all samples have one of the same kind, or None.

    A PIL image that cannot be made again stays a tensor.
    """
    found = dict[Path, set[str | Picture | type]]()
    for sample in samples:
        for field, leaf in zip(schema, Flattener(schema.structure)(sample), strict=True):
            if leaf is not None:  # an optional leaf
                found.setdefault(field.path, set()).add(picture_of(leaf) if is_pil(leaf) else _name_of(leaf))
    makers = dict[Path, Callable[[Any], Any]]()
    for path, names in found.items():
        one = names.pop() if len(names) == 1 else Picture() if any(isinstance(it, Picture) for it in names) else ""
        if isinstance(one, Picture):
            palette = torch.tensor(list(one.palette), dtype=torch.uint8, device="cpu")
            kind = Kind(f"PIL {one.mode}" if one.mode else "tensor")
            makers[path] = partial(as_leaf, kind=kind, palette=palette)
        elif isinstance(one, type):
            makers[path] = partial(_member, enum=one)
        elif one:
            makers[path] = partial(as_leaf, kind=Kind(one))
    return makers


def is_kept_as_tensor(maker: Callable[[Any], Any] | None) -> bool:
    """Return True for the maker of PIL images that cannot be made again."""
    return isinstance(maker, partial) and maker.keywords.get("kind", NONE).name == "tensor"


def _member(value: Any, enum: Any) -> Any:
    """Return the member of an enum that a store keeps as a number or text; code may compare it with ``is``."""
    return None if value is None else enum._value2member_map_.get(value, value)


def _name_of(leaf: Any) -> str | type:
    if isinstance(leaf, Enum):
        return type(leaf)
    is_scalar = isinstance(leaf, np.number | np.bool_)
    return "array" if type(leaf) is np.ndarray else "numpy scalar" if is_scalar else ""


def as_leaf(row: Any, kind: Kind, palette: torch.Tensor | None = None) -> Any:
    """Return a row of a batch as the dataset returned it, if it is a tensor."""
    return from_stored([row, palette], kind) if isinstance(row, torch.Tensor) else row


def finished_makers_of(samples: Sequence[Any]) -> dict[Path, Callable[[Any], Any]]:
    """Return the functions that make leaves of rows of finished batches, by path: arrays, PIL images, tv_tensors."""
    schema, kinds = infer(samples).schema, dict[Path, Kind]()
    for sample in samples:
        for field, leaf in zip(schema, Flattener(schema.structure)(sample), strict=True):
            is_plain = not isinstance(leaf, torch.Tensor | np.ndarray | np.generic) and not is_pil(leaf)
            if is_plain or type(leaf) is torch.Tensor:
                continue
            name = kind_of(leaf).name
            if name == "PIL P":
                raise SplitError("its samples have images with a palette of their own")
            kind = Kind("array" if name == "array hwc" else name)  # channels are last in batches too
            if kinds.setdefault(field.path, kind) != kind:
                raise SplitError("its samples have leaves of several kinds")
    return {path: partial(as_leaf, kind=kind) for path, kind in kinds.items()}
