"""Samples that were read together, and share the memory of one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memfeed.schema.codec import Int64Array
from memfeed.schema.samples import Canvases
from memfeed.schema.tensordicts import is_tensordict


class ReadSamples(list[Any]):
    """A list of samples, with the batch that ``Collate`` returns.

    Methods of a TensorDict or tensorclass (``samples.to(device)``) are those of the batch, as tensordict's own
    ``__getitems__`` allows.

    Args:
        samples: one for each row.
        batch: the same rows as a batch.
        rows: their numbers in the store that was indexed, int64 [k].
        ids: their numbers in the base store, int64 [k].
        store: the store that was indexed.
        canvases: the leaves that samples have and the batch has not.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        batch: Any,
        rows: Int64Array,
        ids: Int64Array,
        store: Any,
        canvases: Canvases,
    ) -> None:
        super().__init__(samples)
        self.batch, self.rows, self.ids, self.store, self.canvases = batch, rows, ids, store, canvases

    def __getattr__(self, name: str) -> Any:
        batch = self.__dict__.get("batch")
        if name.startswith("__") or not is_tensordict(batch):
            raise AttributeError(f"found no attribute {name!r} of a list of samples")
        return getattr(batch, name)
