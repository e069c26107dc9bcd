"""Check on the CPU the labels of batches that go to a device: a check there would wait for it, or end its context.

MixUp and CutMix ask, see `memfeed.transforms.mix.labels_checked_by`. Labels that are gathered are kept until the
transform of their batch has run. Those of a column that the device picks rows from are checked once, as a column.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from memfeed.loading.bind import UserTransform, is_keyed
from memfeed.loading.placement import Placement
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Path, Schema
from memfeed.schema.values import is_integer
from memfeed.store.gather import Gather
from memfeed.system.buffers import Fresh

ROWS_AT_ONCE = 1 << 20
NO_ROWS: Int64Array = np.empty(0, np.int64)
KnownLabels = Mapping[Path, torch.Tensor]
"""Class numbers by the path of their field, int [k], on the CPU."""


class HostLabels:
    """The labels of a loader's batches, as the CPU has them.

    Args:
        fields: the index of each field that may hold class numbers, by its path.
        placement: where the columns are.
    """

    def __init__(self, fields: Mapping[Path, int], placement: Placement) -> None:
        self.fields, self._placement = fields, placement
        self.unknown_rows = cache(self._unknown_rows)

    def copied(self, leaves: Sequence[Any]) -> KnownLabels:
        """Return copies of the labels among gathered ``leaves``, whose memory may be used again."""
        fields = [(path, index) for path, index in self.fields.items() if index not in self._placement.tables]
        return {path: leaves[index].clone() for path, index in fields if isinstance(leaves[index], torch.Tensor)}

    def known_to_transforms(
        self, labels: KnownLabels, ids: Int64Array, rows: Int64Array, batch: Any
    ) -> AbstractContextManager[None]:
        """Return a context in which the transforms of ``batch``, on the device, have its labels checked here.

        ``labels`` are those that are known, ``ids`` its rows in the base store, ``rows`` as the loader counts them.
        """
        from memfeed.transforms.mix import labels_checked_by

        return labels_checked_by(batch, partial(self._check, labels, ids, rows))

    def _check(
        self, known: KnownLabels, ids: Int64Array, rows: Int64Array, path: Path, num_classes: int, name: str
    ) -> bool:
        """Return True if the labels of a field are known here and below ``num_classes``; False if not known.

        Raises TransformError for a label that is not a class.
        """
        from memfeed.transforms.mix import require_classes

        if path in known:
            require_classes(known[path], num_classes, name, rows)
            return True
        if self.fields.get(path) not in self._placement.tables:  # the device picks no rows of this field by itself
            return False
        unknown, labels = self.unknown_rows(path, num_classes)
        is_unknown = np.isin(ids, unknown) if len(unknown) else np.False_
        if is_unknown.any():
            found = labels[np.searchsorted(unknown, ids[is_unknown])]
            require_classes(torch.from_numpy(found), num_classes, name, rows[is_unknown])
        return True

    def _unknown_rows(self, path: Path, num_classes: int) -> tuple[Int64Array, Int64Array]:
        """Return the rows of a column with labels beyond ``num_classes``, ascending, and these labels."""
        index = self.fields[path]
        column, rows = self._placement.columns[index], self._placement.kept.get(index)
        rows = np.arange(column.row_count or 0) if rows is None else rows
        gather, found = Gather([column], [Fresh()]), []
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            labels = gather(some)[0].numpy()
            is_unknown = (labels < 0) | (labels >= num_classes)
            found.append((some[is_unknown], labels[is_unknown].astype(np.int64)))
        unknown, labels = (np.concatenate(parts) for parts in zip((NO_ROWS, NO_ROWS), *found, strict=True))
        return unknown, labels


def host_labels(transform: UserTransform, schema: Schema, placement: Placement) -> HostLabels | None:
    """Return the check of the labels that ``transform`` mixes; None if it mixes none."""
    mix = sys.modules.get("memfeed.transforms.mix")
    if mix is None or not is_keyed(transform) or not any(isinstance(part, mix.Mix) for part in transform.modules()):
        return None
    fields = {
        field.path: index
        for index, field in enumerate(schema.fields)
        if field.kind == "fixed" and not field.row_shape and is_integer(field.torch_dtype)
    }
    return HostLabels(fields, placement) if fields else None
