"""Batches of ``batch_size=1``: tensors of varying shape as [1, *shape], as DataLoader gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfeed.loading.bind import Bound, UserTransform, is_keyed
from memfeed.loading.settings import Settings
from memfeed.schema.fields import Schema


def one_row_batches(schema: Schema, settings: Settings) -> Callable[[Any], Any] | None:
    """Return what makes the tensors of a batch of one row plain; None where batches have more rows, or are plain.

    It is for a loader whose every batch has one row. Where only the last batch has, that is a list or a nested tensor
    as the others are.
    """
    is_single = settings.batch_size == 1 and settings.batch_sampler is None and not settings.by_length
    schema = getattr(settings.transform, "schema", None) or schema
    if not is_single or settings.collates_samples or not any(field.kind in ("list", "jagged") for field in schema):
        return None
    from memfeed.transforms.batch_fields import mark_ragged, replace, tensors

    paths = schema.list_paths()

    def plain(batch: Any) -> Any:
        batch = mark_ragged(batch, 1, paths)
        for field in list(tensors(batch)):
            rows = field.tensor
            if isinstance(rows, torch.Tensor):
                if not rows.is_nested:
                    continue
                # of a jagged tensor without a look at its offsets, for which a GPU would wait
                row = rows.values() if rows.layout is torch.jagged else rows.unbind()[0]
            elif len(rows) == 1 and rows[0] is not None:
                row = rows[0]
            else:
                row = None  # a row without a value stays [None]
            batch = replace(batch, field, list(rows) if row is None else row.unsqueeze(0))
        return batch

    return plain


def plain_before_or_after(
    plain: Callable[[Any], Any] | None, bound: Bound | None, transform: UserTransform
) -> tuple[Callable[[Any], Any], Bound | None]:
    """Return what makes the gathered batch plain, and the transform ``bound``, of which one calls ``plain``.

    A transform of fields is called before it, because it sees a field of images as it does in larger batches: one by
    one if they differ in size. A function of the batch is called after it.
    """
    if plain is None:
        return same, bound
    if bound is None or not (is_keyed(transform) or isinstance(transform, Mapping)):
        return plain, bound
    made = bound
    return same, lambda batch, keys: plain(made(batch, keys))


def same(batch: Any) -> Any:
    """Return the batch."""
    return batch
