"""The public face of loading: a store to batches, epoch by epoch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import torch

from memfeed.errors import LoaderError
from memfeed.loading import position, state
from memfeed.loading.bind import UserTransform, bind
from memfeed.loading.epoch import EpochProgress, run_epoch
from memfeed.loading.epoch_reader import EpochReader
from memfeed.loading.placement import PlacementOption, placement_requests
from memfeed.loading.position import Position, SamplerPosition
from memfeed.loading.prefetch_policy import PrefetchPolicy
from memfeed.loading.settings import Settings, as_int, check_arguments, check_rows, resolve_ranks
from memfeed.loading.sources import as_stores, join
from memfeed.loading.stats import stats
from memfeed.order.choice import Shuffle, default_block_rows, mixed_orders, orders_of
from memfeed.order.mixture import shares
from memfeed.order.shards import RankShards
from memfeed.transfer.devices import check_device


class Loader:
    """Batches of a store, as `torch.utils.data.DataLoader` would give them, at the speed of memory.

    A batch is what `default_collate` makes of its samples. Leaves of varying length are one jagged nested tensor,
    leaves of varying shape a list of tensors; str, bytes and JSON values are a list. The memory of a batch belongs to
    the caller for as long as any tensor shares it; after that it is used for another batch.

    Each ``iter()`` starts the next epoch (the first is 0); ``set_epoch(e)`` sets the number of the next one. The order
    is a pure function of (number of rows, seed, epoch). At step k all ranks together read the same rows for any number
    of ranks, if ``batch_size * world_size`` is the same.

    Args:
        source: a Store or a view of one, a `torch.utils.data.Subset` of one, a list of stores of one schema, or columns
            in memory: a tensor, a tuple or dict of tensors, a TensorDataset, a TensorDict (read in place, not copied).
        batch_size: rows per batch and rank; the last batch is smaller unless ``drop_last`` or ``pad_last``.
        shuffle: True for an exact uniform permutation of the rows, a new one in every epoch (8 bytes of memory a row, 4
            above a million rows). "blocks" for stores beyond memory or 10^8 rows: blocks of ``block_rows`` neighbouring
            rows in random order, the rows of 128 blocks at a time mixed; ``memfeed.order.orders.Blocks`` says how far
            that is from uniform.
        seed: the seed of the shuffling and of keyed transforms.
        drop_last: leave out the rows that make no whole batch for every rank.
        pad_last: fill the last batch with repeated rows, so that every rank gets the same number of batches, all of one
            shape, and say which rows count: a dict or TensorDict gets the key "valid", any other batch becomes
            ``(batch, valid)``; bool [batch_size].
        sampler: row numbers to visit instead, an iterable of ints (any of torch's samplers). If it has ``set_epoch``,
            that is called with each epoch's number.
        batch_sampler: an iterable of lists of row numbers; replaces batch_size, shuffle, sampler and drop_last.
        weights: for a list of stores, the share of the rows that comes from each; they sum to 1. An epoch has as many
            rows as the stores together. Without weights it has each row once.
        block_rows: rows of a block with ``shuffle="blocks"``; None takes as many as make 1 MiB, at most 1,024.
        device: the device to which batches go before the transform; None leaves them in CPU memory.
        transform: a ``memfeed.transforms`` transform, a callable ``batch -> batch``, or ``{field: callable}``.
        placement: where columns are kept: "device" (the memory of the device, which picks the rows itself), "pinned"
            (page-locked memory of the CPU, read by the device over the bus) or "mapped" (the files of the store, or the
            columns in memory as they are); or {field: one of these}. "auto" leaves half of the device's memory to the
            model, fills the other half, then up to half of the free RAM (divided by the number of GPUs), the largest
            columns first. Without a CUDA device "auto" leaves all columns mapped, and "device" and "pinned" are a copy
            in RAM. Columns are placed when the first epoch begins, so move the model to the device before. Columns
            whose rows differ in size stay mapped. If memory runs out later, columns fall back to the next placement
            that needs less, once, with a warning. See ``stats``.
        prefetch: how many batches are made ahead: by a thread if the device is a GPU, else by a thread if it is
            measured to be faster (see ``stats``). 0 for none.
        rank, world_size: which slice of each global batch this loader reads; both or neither. By default those of
            `torch.distributed` where it is initialised. A sampler decides itself which rows its rank reads. Without
            ``drop_last`` and ``pad_last`` the rows left at the end are shared out so that ranks differ by at most one
            row; with fewer rows than ranks there, some ranks get one batch less.

    Raises:
        LoaderError: arguments that do not fit together, or a source of another kind.
        RowError: during iteration, if a sampler yields a row out of range.

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
        shuffle: Shuffle = False,
        seed: int = 0,
        drop_last: bool = False,
        pad_last: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Iterable[int]] | None = None,
        weights: Sequence[float] | None = None,
        block_rows: int | None = None,
        device: torch.device | str | None = None,
        transform: UserTransform = None,
        placement: PlacementOption = "auto",
        prefetch: int = 2,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._source = source
        stores = as_stores(source)
        self.store = join(stores)
        self.batch_size = as_int("batch_size", batch_size, 1)
        self.shuffle, self.seed = shuffle, as_int("seed", seed)
        self.drop_last, self.pad_last = drop_last, pad_last
        self.sampler, self.batch_sampler, self.weights = sampler, batch_sampler, weights
        self.device, self.transform, self.placement = check_device(device), transform, placement
        self.prefetch = as_int("prefetch", prefetch, 0)
        self._given_ranks = {"rank": rank, "world_size": world_size}
        self.rank, self.world_size = resolve_ranks(rank, world_size, batch_sampler if sampler is None else sampler)
        check_arguments(
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            pad_last=pad_last,
            sampler=sampler,
            batch_sampler=batch_sampler,
            weights=weights,
            block_rows=block_rows,
        )
        sizes = [len(store) for store in stores]  # raises for a store without rows
        row_count = sum(sizes)
        check_rows(row_count, self.world_size, pad_last, self.store.schema.structure)
        bind(transform, self.store.schema)  # raises for what is no transform
        row_bytes = sum(column.field.row_bytes for column in self.store.columns if column.field.kind == "fixed")
        self.block_rows = default_block_rows(row_bytes) if block_rows is None else as_int("block_rows", block_rows, 1)
        counts = None if weights is None else shares(weights, len(stores), row_count)
        self._settings = Settings(
            batch_size=self.batch_size,
            shuffle=shuffle,
            seed=self.seed,
            drop_last=drop_last,
            pad_last=pad_last,
            sampler=sampler,
            batch_sampler=batch_sampler,
            shares=counts,
            block_rows=self.block_rows,
            device=self.device,
            transform=transform,
            placement_requests=placement_requests(placement, self.store.schema, self.device),
            prefetch=self.prefetch,
        )
        self._shards = RankShards(row_count, self.batch_size, self.rank, self.world_size, drop_last, pad_last)
        orders = (
            orders_of(row_count, shuffle, self.seed, self.block_rows)
            if counts is None
            else mixed_orders(sizes, counts, shuffle, self.seed, self.block_rows)
        )
        self._reader = EpochReader(self.store, self._settings, orders, self._shards)
        on_gpu = self.device is not None and self.device.type == "cuda"
        self._policy = PrefetchPolicy(allowed=self.prefetch > 0 and self._settings.has_own_order, always=on_gpu)
        self.epoch = -1
        self._resume: Position | None = None
        self._progress: EpochProgress | None = None
        self._running: weakref.ref[Iterator[Any]] | None = None
        self._gathered_before = 0

    # --- describe

    def __len__(self) -> int:
        """Batches in an epoch for this rank. Raises TypeError, as DataLoader does, for a sampler without a length."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        if self.sampler is None:
            return self._shards.count()
        rows = len(self.sampler)  # type: ignore[arg-type]
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __repr__(self) -> str:
        batches = "?" if not isinstance(self.batch_sampler or self.sampler or [], Sized) else f"{len(self):,}"
        ranks = "" if self.world_size == 1 else f"rank {self.rank} of {self.world_size}, "
        placement = self._reader.describe_placements() or repr(self.placement)
        return (
            f"Loader({len(self.store):,} rows, batch_size={self.batch_size}, {self._order_name()}, seed={self.seed}, "
            f"{ranks}{batches} batches an epoch, device={self.device or 'cpu'}, placement={placement})"
        )

    def _order_name(self) -> str:
        if not self._settings.has_own_order:
            return "sampler" if self.batch_sampler is None else "batch_sampler"
        blocks = f", block_rows={self.block_rows}" if self.shuffle == "blocks" else ""
        weights = "" if self.weights is None else f", weights={[float(weight) for weight in self.weights]}"
        return f"shuffle={self.shuffle!r}{blocks}{weights}"

    def stats(self) -> dict[str, Any]:
        """Return how the newest epoch goes, or went. JSON.

        ``epoch``; ``batches`` and ``samples`` given, ``bytes`` gathered; ``seconds`` since the first batch, and from it
        ``samples_per_second`` and ``bytes_per_second``; ``wait_share``, the part of that time the caller waited for
        data; ``columns``, where each is kept ("device", "pinned", "mapped", "memory", "files"), and ``placement``, why
        there; ``cold``, whether rows were missing in the page cache when the epoch began; ``plan``, how batches are
        made: when asked for or ahead in a thread, how many small batches by one gather, and whether rows are read
        ahead.
        """
        return stats(self._progress, self._gathered_before, self.store, self._reader, self._policy)

    # --- epochs

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        begin, self._resume = self._resume, None
        for sampler in (self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
        epoch, progress = self.epoch, EpochProgress(self.epoch, begin, begin)
        self._gathered_before = self._reader.prepare().maker.gather.bytes
        reader = self._reader
        running = run_epoch(progress, lambda at: reader.groups(epoch, at), self._policy, self.prefetch)
        self._progress, self._running = progress, weakref.ref(running)
        return running

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` start this epoch, at its beginning. Raises LoaderError for a negative number."""
        if epoch < 0:
            raise LoaderError(f"found epoch {epoch}; expected 0 or more")
        self.epoch, self._resume, self._progress = epoch - 1, None, None

    # --- resume and edit

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the newest iterator, after the last batch that ``next`` returned. Ints and strings.

        It is the same on every rank, and good for any number of ranks: it counts the rows that all of them have read.
        After the end of an epoch it is the beginning of the next.
        """
        return state.to_dict(*self._position(), self._identity())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next ``iter()`` continue where this state was taken; ``len`` stays that of a whole epoch.

        Raises LoaderError for the state of another store, view, order, length or seed, and says which differs.
        """
        last_row = self._shards.rows if self._settings.has_own_order else None
        epoch, self._resume = state.from_dict(state_dict, self._identity(), last_row)
        self.epoch, self._progress, self._running = epoch - 1, None, None

    def skip(self, n_batches: int) -> None:
        """Leave out the next batches of the epoch, for instance those of a loss spike.

        The running iterator continues after them; without one, they are left out at the beginning of the next epoch. On
        several ranks call it on each. Raises LoaderError if the epoch has fewer batches left.
        """
        self._move(as_int("n_batches", n_batches, 0))

    def rewind(self, n_batches: int) -> None:
        """Go back, so that the newest batches come again. Raises LoaderError beyond the beginning of the epoch."""
        self._move(-as_int("n_batches", n_batches, 0))

    def _identity(self) -> dict[str, Any]:
        """Return the settings that a saved state must share with the loader that restores it."""
        return {
            "store": self.store.digest,
            "rows": len(self.store),
            "seed": self.seed,
            "order": self._order_name(),
        }

    def _position(self) -> tuple[int, Position | None]:
        progress = self._progress
        if progress is None:
            return self.epoch + 1, self._resume
        return (progress.epoch + 1, None) if progress.finished else (progress.epoch, progress.position)

    def _move(self, batches: int) -> None:
        running = None if self._running is None else self._running()
        progress = self._progress
        if progress is not None and not progress.finished and running is None:
            raise LoaderError(
                f"found no running iterator: that of epoch {progress.epoch} is gone; expected skip and rewind within "
                "its loop; to continue that epoch, call load_state_dict(loader.state_dict()) and iterate again"
            )
        epoch, current = self._position()
        begin = 0 if progress is None or progress.finished or not isinstance(progress.begin, int) else progress.begin
        moved = self._moved(epoch, current, begin, batches)
        if progress is None or progress.finished:
            self._resume = moved
        else:
            progress.position, progress.moved = moved, True

    def _moved(self, epoch: int, current: Position | None, begin: int, batches: int) -> Position:
        """Return the position so many batches later; the steps of the epoch are counted from row ``begin``."""
        stride = 1 if self.batch_sampler is not None else self._shards.stride
        row = position.rows_before(current)
        target = position.target_row(epoch, row, begin, stride, batches)
        if not self._settings.has_own_order:
            return SamplerPosition(target, current.generators if isinstance(current, SamplerPosition) else "", "")
        left = position.step_of(self._shards.end(begin), row, stride)
        if batches > left:
            raise LoaderError(
                f"found skip({batches}) with {left} batches left in epoch {epoch}; expected at most {left}"
            )
        return min(target, self._shards.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        # small: where the store is and how it is read; the other process opens it itself, at the same position
        for store in as_stores(self._source):
            store.__reduce__()  # raises for columns in memory, which a pickle would copy
        options = {name: getattr(self, name) for name in _OPTIONS} | self._given_ranks
        options["block_rows"] = self.block_rows if self.shuffle == "blocks" else None
        return _remake, (self._source, options, self.state_dict())


_OPTIONS = (
    "batch_size", "shuffle", "seed", "drop_last", "pad_last", "sampler", "batch_sampler", "weights", "device",
    "transform", "placement", "prefetch",
)  # fmt: skip


def _remake(source: Any, options: dict[str, Any], state_dict: dict[str, Any]) -> Loader:
    loader = Loader(source, **options)
    loader.load_state_dict(state_dict)
    return loader
