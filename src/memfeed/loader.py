"""Store -> batches, epoch by epoch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from memfeed import columnar
from memfeed.augment import UserTransform, bind
from memfeed.buffers import Pool
from memfeed.columns import Ints
from memfeed.errors import LoaderError, RowError
from memfeed.gather import Gather
from memfeed.keyed import Keys
from memfeed.order import Sequential, Shuffled
from memfeed.source import Source
from memfeed.store import Store
from memfeed.transfer import check_device, to_device


class Loader:
    """Batches of a store, as `torch.utils.data.DataLoader` would give them, at the speed of memory.

    A batch is what `default_collate` makes of those samples; leaves of varying length are one jagged nested tensor,
    leaves of varying shape a list of tensors, str, bytes and JSON values a list. Its memory is the caller's for as long
    as any tensor shares it, and is used again after that.

    Each ``iter()`` starts the next epoch (the first is 0); ``set_epoch(e)`` chooses the next one's number. The order is
    a pure function of (number of rows, seed, epoch).

    Args:
        source: a Store or a view of one, a `torch.utils.data.Subset` of one, or columns in memory: a tensor, a tuple or
            dict of tensors, a TensorDataset, a TensorDict (read in place, never copied).
        batch_size: rows per batch; the last one is smaller unless ``drop_last``.
        shuffle: an exact uniform permutation of the rows, another in every epoch.
        seed: of the shuffling and of keyed transforms.
        sampler: row numbers to visit instead, an iterable of ints (any of torch's samplers).
        batch_sampler: an iterable of lists of row numbers; takes the place of batch_size, shuffle, sampler, drop_last.
        device: where batches go before the transform sees them; None leaves them in CPU memory.
        transform: a ``memfeed.transforms`` transform, a callable ``batch -> batch``, or ``{field: callable}``.

    Raises:
        LoaderError: arguments that do not fit together, or a source that is none of those.
        RowError: during iteration, for a sampler that yields a row out of range.

    Example::

        loader = memfeed.Loader(torch.arange(300_000), 300, shuffle=True)
        for batch in loader:  # int64 [300]
            ...
    """

    def __init__(
        self,
        source: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Iterable[int]] | None = None,
        device: torch.device | str | None = None,
        transform: UserTransform = None,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise LoaderError(f"found batch_size={batch_size!r}; expected an int of at least 1")
        if not isinstance(seed, int | np.integer):
            raise LoaderError(f"found seed={seed!r}; expected an int")
        if sampler is not None and shuffle:
            raise LoaderError("found a sampler and shuffle=True; a sampler has its own order: leave one of them out")
        if batch_sampler is not None and (batch_size != 1 or shuffle or drop_last or sampler is not None):
            raise LoaderError("found a batch_sampler; expected no batch_size, shuffle, sampler or drop_last beside it")
        self.store = _as_store(source)
        self.batch_size, self.shuffle, self.seed, self.drop_last = int(batch_size), shuffle, int(seed), drop_last
        self.sampler, self.batch_sampler = sampler, batch_sampler
        self.device, self.transform = check_device(device), transform
        self.epoch = -1
        self._rows = len(self.store)  # raises for a store without rows
        self._pools = [Pool() for _ in self.store.schema]
        self._gather: Gather | None = None
        self._transform = bind(transform, self.store.schema, Pool())

    def __len__(self) -> int:
        """Batches in an epoch. Raises TypeError, as DataLoader does, for a sampler without a length."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        rows = self._rows if self.sampler is None else len(self.sampler)  # type: ignore[arg-type]
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __repr__(self) -> str:
        batches = "?" if not isinstance(self.batch_sampler or self.sampler or [], Sized) else len(self)
        order = "sampler" if self.sampler is not None or self.batch_sampler is not None else f"shuffle={self.shuffle}"
        return (
            f"Loader({self._rows:,} rows, batch_size={self.batch_size}, {order}, seed={self.seed}, "
            f"{batches} batches an epoch, device={self.device or 'cpu'})"
        )

    def set_epoch(self, epoch: int) -> None:
        """The next ``iter()`` starts this epoch."""
        if epoch < 0:
            raise LoaderError(f"found epoch {epoch}; expected 0 or more")
        self.epoch = epoch - 1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return self._run(self.epoch)

    def _run(self, epoch: int) -> Iterator[Any]:
        if self._gather is None:
            self._gather = Gather(self.store.columns, self._pools)
        gather, assemble = self._gather, self.store.assemble_batch
        device, transform = self.device, self._transform
        position = 0
        own_order = self.sampler is None and self.batch_sampler is None
        for ids in self._batches(epoch):
            base = ids if own_order and self.store.whole else self.store.base_rows(ids)
            batch = assemble(gather(base))
            if device is not None:
                batch = to_device(batch, device, non_blocking=False)
            if transform is not None:
                # a sampler may repeat a row within an epoch: repeats must differ
                occurrence: Any = 0 if own_order else torch.arange(position, position + len(ids))
                batch = transform(batch, Keys(self.seed, epoch, torch.from_numpy(base), occurrence))
            position += len(ids)
            yield batch

    def _batches(self, epoch: int) -> Iterator[Ints]:
        """The row numbers of each batch of an epoch, int64 [k]."""
        size = self.batch_size
        if self.batch_sampler is not None:
            for rows in self.batch_sampler:
                yield _numbers(rows)
        elif self.sampler is not None:
            held: list[Any] = []
            for row in self.sampler:
                held.append(row)
                if len(held) == size:
                    yield _numbers(held)
                    held = []
            if held and not self.drop_last:
                yield _numbers(held)
        else:
            order = Shuffled(self._rows, self.seed, epoch) if self.shuffle else Sequential(self._rows)
            end = self._rows - self._rows % size if self.drop_last else self._rows
            for start in range(0, end, size):
                yield order(start, min(start + size, end))


def _numbers(rows: Any) -> Ints:
    """What a sampler yielded, as int64 [k]. Raises RowError for anything but ints."""
    try:
        return np.array([operator.index(row) for row in rows], np.int64)
    except (TypeError, OverflowError) as error:
        raise RowError(f"found {rows!r} from a sampler; expected row numbers ({error})") from None


def _as_store(source: Any) -> Store:
    """What a loader reads, as a store. Raises LoaderError."""
    if isinstance(source, Store):
        return source
    if isinstance(source, Subset):
        return _as_store(source.dataset).subset(list(source.indices))
    columns = columnar.as_columns(source)
    if columns is None:
        raise LoaderError(
            f"found {type(source).__name__}; expected a Store, a Subset of one, or columns in memory (a tensor, a "
            "tuple or dict of tensors, TensorDataset, TensorDict): make a store with memfeed.cache(dataset, path) first"
        )
    if not len(columns):
        raise LoaderError("found columns without rows; expected at least one row")
    schema, held = columns.in_memory()
    return Store(Source(None, schema, len(columns), "", held.__getitem__), types=columns.types)
