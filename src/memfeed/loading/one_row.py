"""Batches of one row: tensors of varying shape as [1, *shape], as DataLoader gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfeed.loading.bind import Bound, UserTransform, is_keyed
from memfeed.loading.sample_lists import finished_schema
from memfeed.schema.fields import Schema


class OneRow:
    """Makes the tensors of a batch of one row plain. Batches of more rows stay as they are.

    A transform of fields sees a field of images as it does in larger batches: one by one if they differ in size. So
    its batch is made plain after it. A function of the batch gets one that is plain.

    Args:
        schema: of the samples; that of a transform counts instead, if it makes samples of another structure.
        transform: what the batches go through.
        is_wanted: False for a loader whose batches of one row stay as they are.
    """

    def __init__(self, schema: Schema, transform: UserTransform, is_wanted: bool) -> None:
        made = finished_schema(transform, schema)
        is_ragged = any(field.kind in ("list", "jagged") for field in made)
        is_after = is_keyed(transform) or (isinstance(transform, Mapping) and bool(transform))
        self._paths = made.list_paths()
        self.is_before, self.is_after = (is_wanted and is_ragged and at for at in (not is_after, is_after))

    def before(self, assemble: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function of the leaves of a batch that calls ``assemble``, and makes the batch plain if due."""
        if not self.is_before:
            return assemble

        def assemble_plain(leaves: Any) -> Any:
            batch = assemble(leaves)
            return self.plain(batch) if len(leaves[0]) == 1 else batch

        return assemble_plain

    def after(self, bound: Bound | None) -> Bound | None:
        """Return a transform that makes plain what ``bound`` returns, if that is due."""
        if bound is None or not self.is_after:
            return bound
        transform = bound
        return lambda batch, keys: self.plain(transform(batch, keys))

    def plain(self, batch: Any) -> Any:
        """Return a batch with the tensors of its one row as [1, *shape]; one of more rows as it is."""
        from memfeed.transforms.batch_fields import mark_ragged, own_ragged, replace, tensors

        marked = mark_ragged(batch, 1, self._paths)
        rows = [field.tensor for field in tensors(marked)]
        if any(len(one) != 1 for one in rows if not isinstance(one, torch.Tensor) or one.is_nested):
            return batch
        for field in list(tensors(marked)):
            if (row := _only_row(field.tensor)) is not None:
                marked = replace(marked, field, row.unsqueeze(0))
        return own_ragged(marked)


def _only_row(rows: Any) -> torch.Tensor | None:
    """Return the row of a ragged field; None for a dense one, and for a row without a value, which stays [None]."""
    if isinstance(rows, list):
        row: torch.Tensor | None = rows[0]
        return row
    if not rows.is_nested:
        return None
    # of a jagged tensor without a look at its offsets, for which a GPU would wait
    found: torch.Tensor = rows.values() if rows.layout is torch.jagged else rows.unbind()[0]
    return found
