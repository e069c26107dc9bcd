"""The rows of a ``ray.data.Dataset`` as an iterable. Ray is not imported: who has such a dataset has done so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class RayRows:
    """The rows of a ``ray.data.Dataset``, dicts by column, in the order of its source.

    Ray Data yields blocks in the order in which its tasks end, unless the dataset's context says otherwise. So this
    sets ``preserve_order`` there, for this dataset only. What the pipeline itself draws each time (``random_shuffle``
    without a seed) is found by iterating twice, as for each iterable that can be.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        dataset.context.execution_options.preserve_order = True

    def __iter__(self) -> Iterator[Any]:
        yield from self._dataset.iter_rows()
