"""Batches of one row: tensors of varying shape as [1, *shape], as DataLoader gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memfeed.loading.bind import Bound, UserTransform, is_keyed
from memfeed.schema.fields import Schema


class OneRow:
    """Makes the tensors of a batch of one row plain. Batches of more rows stay as they are.

    A transform of fields sees a field of images as it does in larger batches: one by one if they differ in size. So
    its batch is made plain after it. A function of the batch gets one that is plain.

    Args:
        schema: of the stored samples; that of a transform counts for what it returns, if it makes other samples.
        transform: what the batches go through.
        is_wanted: False for a loader whose batches of one row stay as they are.
    """

    def __init__(self, schema: Schema, transform: UserTransform, is_wanted: bool) -> None:
        found = getattr(transform, "schema", None)
        made = found if isinstance(found, Schema) else schema
        is_ragged = any(field.kind in ("list", "jagged") for field in made)
        is_after = is_keyed(transform) or (isinstance(transform, Mapping) and bool(transform))
        self._paths = made.list_paths()
        # of a nested tensor the length takes 30 us, so that of another field is preferred
        self._counted = next((at for at, field in enumerate(schema) if field.kind != "jagged"), 0)
        self.is_before, self.is_after = (is_wanted and is_ragged and at for at in (not is_after, is_after))

    def before(self, assemble: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function of the leaves of a batch that calls ``assemble``, and makes the batch plain if due."""
        if not self.is_before:
            return assemble

        def assemble_plain(leaves: Sequence[Any]) -> Any:
            batch = assemble(leaves)
            return self.plain(batch) if _row_count(leaves[self._counted]) == 1 else batch

        return assemble_plain

    def after(self, bound: Bound | None) -> Bound | None:
        """Return a transform that makes plain what ``bound`` returns, if that is due."""
        if bound is None or not self.is_after:
            return bound
        transform = bound

        def transform_plain(batch: Any, keys: Any) -> Any:
            found = transform(batch, keys)
            return self.plain(found) if self._has_one_row(found, keys) else found

        return transform_plain

    def _has_one_row(self, batch: Any, keys: Any) -> bool:
        from memfeed.transforms.batch_fields import mark_ragged, tensors

        if keys is not None:
            return len(keys.rows) == 1
        field = next(tensors(mark_ragged(batch, 1, self._paths)), None)
        return field is not None and _row_count(field.tensor) == 1

    def plain(self, batch: Any) -> Any:
        """Return a batch of one row with its tensors as [1, *shape]. A row without a value stays [None]."""
        from memfeed.transforms.batch_fields import mark_ragged, replace, tensors

        batch = mark_ragged(batch, 1, self._paths)
        for field in list(tensors(batch)):
            rows = field.tensor
            if isinstance(rows, torch.Tensor):
                if not rows.is_nested:
                    continue
                # of a jagged tensor without a look at its offsets, for which a GPU would wait
                row = rows.values() if rows.layout is torch.jagged else rows.unbind()[0]
            else:
                row = rows[0]
            batch = replace(batch, field, list(rows) if row is None else row.unsqueeze(0))
        return batch


def _row_count(rows: Any) -> int:
    """Return the number of rows of a field of a batch."""
    if isinstance(rows, torch.Tensor) and type(rows) is not torch.Tensor and hasattr(rows, "offsets"):
        return len(rows.offsets()) - 1
    return len(rows)
