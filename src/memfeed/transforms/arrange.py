"""The transforms Arrange and Assemble: from the fields of a store to those of a pipeline, and to finished batches.

They stand at the two ends of the rest of a pipeline that was cut (``cache(split=True)``) where finished samples have
another structure than what is stored of them: two views of one stored image, for example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.schema.assemble import assembler
from memfeed.schema.fields import Schema
from memfeed.schema.jagged import RaggedList, RowViews
from memfeed.schema.names import Path
from memfeed.transforms.batch_fields import On
from memfeed.transforms.transform import Transform

B = TypeVar("B")


class Arrange(Transform):
    """Return a dict of the fields of a batch under other names. One field may have several names.

    Args:
        fields: for each new name the path of a field in the batch. All other fields are left out.

    Raises:
        TransformError: the batch has no such field.
    """

    of_whole_batches = passes_views = True

    def __init__(self, fields: Mapping[str, Sequence[str | int]]) -> None:
        super().__init__()
        self.fields = {name: tuple(path) for name, path in fields.items()}
        self.paths_read = list(self.fields.values())

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Return the dict; see `Operation.change_batch`."""
        arranged: Any = {name: _at(batch, path) for name, path in self.fields.items()}
        return arranged  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the fields, for repr."""
        return ", ".join(f"{name} <- {'.'.join(map(str, path))}" for name, path in self.fields.items())


class Assemble(Transform):
    """Build the finished batch from a dict of its leaves.

    Args:
        leaves: for each leaf of the batch the key of a field, in the order of the fields of `schema`.
        channels_last: keys of the images that come out as [n, h, w, c].
        schema: of the finished samples.
        types: classes of their containers, as for `memfeed.open`.
    """

    of_whole_batches = passes_views = True

    def __init__(
        self, leaves: Sequence[str], channels_last: Iterable[str], schema: Schema, types: Iterable[type] = ()
    ) -> None:
        super().__init__()
        self.leaves, self.channels_last, self.schema = list(leaves), frozenset(channels_last), schema
        self._assemble = assembler(schema.structure, types, batched=True, forms=[field.form for field in schema.fields])

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Build the batch; see `Operation.change_batch`."""
        given: Any = batch
        counts = {key: self.leaves.count(key) for key in self.leaves}
        leaves, seen = [], set[str]()
        for key in self.leaves:
            leaf = _with_channels_last(given[key]) if key in self.channels_last else given[key]
            if counts[key] > 1 and key in seen:  # a leaf of a batch has memory of its own
                leaf = _copy(leaf)
            seen.add(key)
            leaves.append(leaf)
        return self._assemble(leaves)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the leaves, for repr."""
        return ", ".join(self.leaves)


def _at(batch: Any, path: Path) -> Any:
    value = batch
    for key in path:
        try:
            value = getattr(value, key) if isinstance(key, str) and hasattr(type(value), "_fields") else value[key]
        except (KeyError, IndexError, TypeError):
            raise TransformError(
                f"found no field {'.'.join(map(str, path))} in a batch; expected the fields of the store that the "
                "transform belongs to"
            ) from None
    return value


def _with_channels_last(images: Any) -> Any:
    if isinstance(images, RowViews):
        images = images.owned()
    if isinstance(images, list):
        rows = images.owned() if isinstance(images, RaggedList) else images
        return RaggedList(row.permute(1, 2, 0).contiguous() for row in rows)
    return images.permute(0, 2, 3, 1).contiguous()


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    if isinstance(leaf, RowViews):
        return leaf.owned()
    if isinstance(leaf, RaggedList):
        return RaggedList(None if row is None else row.clone() for row in leaf)
    return list(leaf) if isinstance(leaf, list) else leaf
