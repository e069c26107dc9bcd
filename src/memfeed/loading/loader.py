"""Store -> batches, epoch by epoch."""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
import torch.distributed

from memfeed.errors import LoaderError
from memfeed.loading import pipeline, plan, state, tasks
from memfeed.loading.bind import UserTransform, bind
from memfeed.loading.epoch import Place, run
from memfeed.loading.pipeline import Made
from memfeed.loading.placement import Placed, Placing, asked_of, is_out_of_memory, lowered
from memfeed.loading.plan import LoadPlan, first_places
from memfeed.loading.prefetch_policy import PrefetchPolicy
from memfeed.loading.readahead import ReadAhead
from memfeed.loading.sources import as_stores, join
from memfeed.loading.stats import stats
from memfeed.loading.tasks import Drawn, GatherTask, LastBatch, Mark
from memfeed.order.choice import Shuffle, default_block_rows, mixed_orders, orders_of
from memfeed.order.mixture import shares
from memfeed.order.orders import Blocks, Order, Sequential
from memfeed.order.shards import Steps
from memfeed.transfer.devices import check_device
from memfeed.transfer.streams import Streams, streams_of

NAMED = 4  # fields that repr names one by one


class Loader:
    """Batches of a store, as `torch.utils.data.DataLoader` would give them, at the speed of memory.

    A batch is what `default_collate` makes of those samples; leaves of varying length are one jagged nested tensor,
    leaves of varying shape a list of tensors, str, bytes and JSON values a list. Its memory is the caller's for as long
    as any tensor shares it, and is used again after that.

    Each ``iter()`` starts the next epoch (the first is 0); ``set_epoch(e)`` chooses the next one's number. The order is
    a pure function of (number of rows, seed, epoch): at step k the ranks together read the same rows, however many
    they are, if ``batch_size * world_size`` is the same.

    Args:
        source: a Store or a view of one, a `torch.utils.data.Subset` of one, a list of stores of one schema, or columns
            in memory: a tensor, a tuple or dict of tensors, a TensorDataset, a TensorDict (read in place, never
            copied).
        batch_size: rows per batch and rank; the last batch is smaller unless ``drop_last`` or ``pad_last``.
        shuffle: True for an exact uniform permutation of the rows, another in every epoch (8 bytes of memory a row, 4
            above a million rows). "blocks" for stores beyond memory or 10^8 rows: blocks of ``block_rows`` neighbouring
            rows in random order, the rows of 128 blocks at a time mixed; see ``memfeed.order.orders.Blocks`` for how far
            that is from uniform.
        seed: of the shuffling and of keyed transforms.
        drop_last: leaves out the rows that make no whole batch for every rank.
        pad_last: fills the last batch with repeated rows, so that every rank gets as many batches, all of one shape,
            and says which rows count: a dict or TensorDict gets the key "valid", any other batch becomes ``(batch,
            valid)``; bool [batch_size].
        sampler: row numbers to visit instead, an iterable of ints (any of torch's samplers). If it has ``set_epoch``,
            that is called with each epoch's number.
        batch_sampler: an iterable of lists of row numbers; takes the place of batch_size, shuffle, sampler, drop_last.
        weights: for a list of stores, the share of the rows that comes from each; they sum to 1. An epoch has as many
            rows as the stores together. Without weights it has each row once.
        block_rows: rows of a block under ``shuffle="blocks"``; None takes as many as make 1 MiB, at most 1,024.
        device: where batches go before the transform sees them; None leaves them in CPU memory.
        transform: a ``memfeed.transforms`` transform, a callable ``batch -> batch``, or ``{field: callable}``.
        placement: where columns live meanwhile: "device" (the device's memory, which picks the rows itself), "pinned"
            (page-locked memory of the CPU, read by the device over the bus) or "mapped" (the store's files, or where
            columns in memory lie); or {field: one of these}. "auto" leaves half of the device's memory to the model,
            fills the other half, then up to half of the free RAM (divided by the number of GPUs), the largest columns
            first; without a CUDA device it leaves all mapped, and both other places are a copy in RAM. Columns are
            placed when the first epoch begins, so move the model to the device before; those whose rows differ in size
            stay mapped. Where memory runs out later, the columns go a rung down, once, with a warning. See ``stats``.
        prefetch: how many batches are made ahead: by a thread where the device is a GPU, else by one if it is measured
            to be worth it (see ``stats``). 0 for none.
        rank, world_size: which slice of each global batch this loader reads; both or neither. By default those of
            `torch.distributed` where it is initialised. A sampler decides itself what its rank reads. Without
            ``drop_last`` and ``pad_last`` the rows left at the end are dealt so that ranks differ by a row at most;
            fewer rows than ranks then leave some ranks a batch short.

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
        placement: Placing = "auto",
        prefetch: int = 2,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._source = source
        stores = as_stores(source)
        self.store = join(stores)
        self.batch_size = _int("batch_size", batch_size, 1)
        self.shuffle, self.seed = shuffle, _int("seed", seed)
        self.drop_last, self.pad_last = drop_last, pad_last
        self.sampler, self.batch_sampler, self.weights = sampler, batch_sampler, weights
        self.device, self.transform = check_device(device), transform
        self.prefetch = _int("prefetch", prefetch, 0)
        self._given_ranks = {"rank": rank, "world_size": world_size}
        self.rank, self.world_size = _ranks(rank, world_size, batch_sampler if sampler is None else sampler)
        sizes = [len(store) for store in stores]  # raises for a store without rows
        self._counts = None if weights is None else shares(weights, len(stores), sum(sizes))
        self._check(block_rows)
        row_bytes = sum(column.field.row_bytes for column in self.store.columns if column.field.kind == "fixed")
        self.block_rows = default_block_rows(row_bytes) if block_rows is None else _int("block_rows", block_rows, 1)
        self._steps = Steps(sum(sizes), self.batch_size, self.rank, self.world_size, drop_last, pad_last)
        if self._counts is None:
            self._orders = orders_of(self._steps.rows, shuffle, self.seed, self.block_rows)
        else:
            self._orders = mixed_orders(sizes, self._counts, shuffle, self.seed, self.block_rows)
        bind(transform, self.store.schema)  # raises for what is none
        self.placement = placement
        self._asked = asked_of(placement, self.store.schema, self.device)
        streamed = self.device is not None and self.device.type == "cuda"
        self._pace = PrefetchPolicy(allowed=self.prefetch > 0 and self._own_order, always=streamed)
        self._streams: Streams | None = None
        self._plan: LoadPlan | None = None
        self._fell = False
        self.epoch = -1
        self._resume: Mark | None = None
        self._place: Place | None = None
        self._running: weakref.ref[Iterator[Any]] | None = None
        self._cold: bool | None = None
        self._gathered = 0

    def _check(self, block_rows: int | None) -> None:
        """Raises LoaderError for arguments that do not fit together."""
        sampler, batch_sampler = self.sampler, self.batch_sampler
        single = self.batch_size == 1 and not self.shuffle and not self.drop_last and not self.pad_last
        if batch_sampler is not None and not (single and sampler is None):
            raise LoaderError(
                "found a batch_sampler; expected no batch_size, shuffle, sampler, drop_last or pad_last beside it"
            )
        if sampler is not None and self.shuffle:
            raise LoaderError("found a sampler and shuffle=True; a sampler has its own order: leave one of them out")
        if (sampler is not None or batch_sampler is not None) and self._counts is not None:
            raise LoaderError("found a sampler and weights; a sampler has its own order: leave one of them out")
        if self.shuffle not in (False, True, "blocks"):
            raise LoaderError(f'found shuffle={self.shuffle!r}; expected False, True or "blocks"')
        if self.drop_last and self.pad_last:
            raise LoaderError("found drop_last and pad_last; expected one: the last batch is left out, or filled up")
        if block_rows is not None and self.shuffle != "blocks":
            raise LoaderError(f'found block_rows={block_rows!r}; expected shuffle="blocks" beside it')
        if len(self.store) < self.world_size and not self.pad_last:
            raise LoaderError(
                f"found {len(self.store)} rows for {self.world_size} ranks; expected a row for each at least, or "
                "pad_last=True, which gives every rank a batch and says which rows count"
            )
        structure = self.store.schema.structure
        if self.pad_last and structure.kind in ("dict", "tensordict") and "valid" in structure.keys:
            raise LoaderError('found a field "valid" and pad_last, which adds one; expected another name for the field')

    # --- what it is

    def __len__(self) -> int:
        """Batches in an epoch for this rank. Raises TypeError, as DataLoader does, for a sampler without a length."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        if self.sampler is None:
            return self._steps.count()
        rows = len(self.sampler)  # type: ignore[arg-type]
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __repr__(self) -> str:
        batches = "?" if not isinstance(self.batch_sampler or self.sampler or [], Sized) else f"{len(self):,}"
        ranks = "" if self.world_size == 1 else f"rank {self.rank} of {self.world_size}, "
        return (
            f"Loader({len(self.store):,} rows, batch_size={self.batch_size}, {self._order_name()}, seed={self.seed}, "
            f"{ranks}{batches} batches an epoch, device={self.device or 'cpu'}, placement={self._placement_name()})"
        )

    def _placement_name(self) -> str:
        if self._plan is None:
            return repr(self.placement)
        where = [placed.where for placed in self._plan.placement.placed]
        names = {one: [f.name for f, at in zip(self.store.schema, where, strict=True) if at == one] for one in where}
        return "; ".join(
            f"{one}: {', '.join(held) if len(held) <= NAMED else f'{len(held)} fields'}" for one, held in names.items()
        )

    def _order_name(self) -> str:
        if self.sampler is not None or self.batch_sampler is not None:
            return "sampler" if self.batch_sampler is None else "batch_sampler"
        blocks = f", block_rows={self.block_rows}" if self.shuffle == "blocks" else ""
        weights = "" if self._counts is None else f", weights={[float(weight) for weight in self.weights or ()]}"
        return f"shuffle={self.shuffle!r}{blocks}{weights}"

    def stats(self) -> dict[str, Any]:
        """How the newest epoch goes, or went.

        ``epoch``; ``batches`` and ``samples`` given, ``bytes`` gathered; ``seconds`` since the first batch, and from it
        ``samples_per_second`` and ``bytes_per_second``; ``wait_share``, the part of that time the caller waited for
        data; ``columns``, where each lies ("device", "pinned", "mapped", "memory", "files"), and ``placement``, why
        there; ``cold``, whether rows were missing in the page cache when the epoch began; ``plan``, how batches are
        made: asked for or ahead in a thread, how many small batches by one gather, and whether rows are read ahead.
        JSON.
        """
        return stats(self._place, self._gathered, self.store, self._plan, self._pace, self._cold)

    # --- epochs

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        begin, self._resume = self._resume, None
        for sampler in (self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
        epoch, place = self.epoch, Place(self.epoch, begin, begin)
        plan = self._prepared()
        self._gathered = plan.gather.bytes
        finish = self._finish if plan.pipeline.finishes else None
        running = run(place, lambda mark: self._start(epoch, mark), finish, self._pace, self.prefetch)
        self._place, self._running = place, weakref.ref(running)
        return running

    def set_epoch(self, epoch: int) -> None:
        """The next ``iter()`` starts this epoch, at its beginning."""
        if epoch < 0:
            raise LoaderError(f"found epoch {epoch}; expected 0 or more")
        self.epoch, self._resume, self._place = epoch - 1, None, None

    def _prepared(self) -> LoadPlan:
        """How it reads; columns are placed at the first call."""
        if self._plan is None:
            self._streams = streams_of(self.device)
            self._plan = self._make_plan(first_places(self.store, self._asked, self._streams))
        return self._plan

    def _make_plan(self, placed: Sequence[Placed]) -> LoadPlan:
        return plan.make(
            self.store,
            placed,
            self.batch_size,
            self._streams,
            self.device,
            self.transform,
            self.seed,
            self.pad_last,
        )

    def _finish(self, *made: Any) -> Any:
        return self._prepared().pipeline.finish(*made)

    def _start(self, epoch: int, mark: Mark | None) -> Iterator[Made]:
        """The batches of an epoch behind a mark; where memory runs out, the columns go a rung down, once."""
        while True:
            try:
                for made in self._made(epoch, mark):
                    yield made
                    mark = made.marks[-1]
                return
            except (RuntimeError, MemoryError) as error:
                below = lowered(self._prepared().placement.placed) if is_out_of_memory(error) else None
                if below is None or self._fell:
                    raise
            self._fell, self._plan = True, None  # what the columns took is free, before they are placed again
            self._plan = self._make_plan(below)
            warnings.warn(
                f"memory ran out in epoch {epoch}: the columns went a rung down, now {self._placement_name()}; leave "
                "more room with placement=, or a smaller batch",
                stacklevel=2,
            )

    def _made(self, epoch: int, mark: Mark | None) -> Iterator[Made]:
        plan = self._prepared()
        sampler = self.batch_sampler if self.sampler is None else self.sampler
        if sampler is not None:
            last: LastBatch = "drop" if self.drop_last else "pad" if self.pad_last else "keep"
            size = None if self.sampler is None else self.batch_size
            order: Order | None = None
            begin = 0
            coming = tasks.of_sampler(sampler, size, last, _drawn(mark), self.store.base_rows)
        else:
            order, begin = self._orders(epoch), 0 if mark is None else int(mark)  # type: ignore[arg-type]
            base_rows = None if self.store.whole else self.store.base_rows
            repeats = self._counts is not None
            coming = tasks.of_order(order, self._steps, begin, base_rows, plan.batches_a_task, repeats=repeats)
            coming = self._draw_ahead(coming, epoch + 1)
        made = plan.pipeline.made(self._read_ahead(coming, plan.reader, order, begin), epoch)
        # a sampler is the user's code: it runs in the caller's thread, ahead of a GPU too
        return made if self._streams is None or self._own_order else pipeline.ahead_here(made, self.prefetch)

    def _draw_ahead(self, coming: Iterator[GatherTask], epoch: int) -> Iterator[GatherTask]:
        """The tasks; the order of the next epoch is drawn meanwhile, but only once the first batch is on its way."""
        yield from itertools.islice(coming, 1)
        self._orders.draw_ahead(epoch)
        yield from coming

    def _read_ahead(
        self, coming: Iterator[GatherTask], reader: ReadAhead, order: object, begin: int
    ) -> Iterator[GatherTask]:
        """The tasks, with the disk at work for those to come, if rows are missing in the page cache."""
        n = len(self.store)
        self._cold = bool(reader.nbytes) and reader.begin(self.store.base_rows(np.arange(0, n, -(-n // 64))))
        if not self._cold:
            return coming
        threaded = order is not None and self.prefetch > 0
        coming = (pipeline.read_ahead if threaded else pipeline.read_ahead_here)(coming, reader)
        if reader.beyond_memory and order is not None and self._counts is None:
            # the runs that an order says it has passed are rows of the store only where the store is whole
            passed = order.passed if isinstance(order, Blocks | Sequential) and self.store.whole else None
            coming = pipeline.drop_behind(coming, reader, begin, passed)
        return coming

    # --- resume and edit

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator is: behind the last batch that ``next`` returned. Plain ints and strings.

        The same on every rank, and good for any number of ranks: it counts the rows that all of them have read. After
        the end of an epoch it is the beginning of the next.
        """
        return state.to_dict(*self._position(), self._identity())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next ``iter()`` goes on where this state was taken; ``len`` stays that of a whole epoch.

        Raises LoaderError for the state of another store, view, order, length or seed, and says which differs.
        """
        most = self._steps.rows if self._own_order else None
        epoch, self._resume = state.from_dict(state_dict, self._identity(), most)
        self.epoch, self._place, self._running = epoch - 1, None, None

    def skip(self, n_batches: int) -> None:
        """Leaves out the next batches of the epoch, to step around a loss spike; the running iterator goes on behind
        them.

        Without one, those at the beginning of the next epoch. On several ranks call it on each. Raises LoaderError if
        the epoch has fewer left.
        """
        self._move(_int("n_batches", n_batches, 0))

    def rewind(self, n_batches: int) -> None:
        """Goes back, so that the newest batches come again. Raises LoaderError beyond the beginning of the epoch."""
        self._move(-_int("n_batches", n_batches, 0))

    @property
    def _own_order(self) -> bool:
        return self.sampler is None and self.batch_sampler is None

    def _identity(self) -> dict[str, Any]:
        """What a state and the loader it is loaded into must have in common."""
        return {
            "store": self.store.digest,
            "rows": len(self.store),
            "seed": self.seed,
            "order": self._order_name(),
        }

    def _position(self) -> tuple[int, Mark | None]:
        place = self._place
        if place is None:
            return self.epoch + 1, self._resume
        return (place.epoch + 1, None) if place.finished else (place.epoch, place.mark)

    def _move(self, batches: int) -> None:
        running = None if self._running is None else self._running()
        place = self._place
        if place is not None and not place.finished and running is None:
            raise LoaderError(
                f"found no running iterator: that of epoch {place.epoch} is gone; expected skip and rewind within its "
                "loop; to go on in that epoch, call load_state_dict(loader.state_dict()) and iterate again"
            )
        epoch, mark = self._position()
        begin = 0 if place is None or place.finished or not isinstance(place.begin, int) else place.begin
        moved = self._moved(epoch, mark, begin, batches)
        if place is None or place.finished:
            self._resume = moved
        else:
            place.mark, place.moved = moved, True

    def _moved(self, epoch: int, mark: Mark | None, begin: int, batches: int) -> Mark:
        """The mark so many batches further on; the first step of the epoch that runs began at row ``begin``."""
        stride = 1 if self.batch_sampler is not None else self._steps.stride
        row = mark.row if isinstance(mark, Drawn) else mark or 0
        step = -((begin - row) // stride)
        target = begin + (step + batches) * stride
        if target < 0:
            raise LoaderError(
                f"found rewind({-batches}) at batch {row // stride} of epoch {epoch}; expected at most as many as "
                "there were: an epoch before is reached with set_epoch"
            )
        if not self._own_order:
            start = mark.start if isinstance(mark, Drawn) else ""
            return Drawn(target, start, "")
        left = -((row - self._steps.end(begin)) // stride)
        if batches > left:
            raise LoaderError(
                f"found skip({batches}) with {left} batches left in epoch {epoch}; expected at most {left}"
            )
        return min(target, self._steps.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        # small: where the store is and how it is read; the other process opens it itself, at the same place
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


def _drawn(mark: Mark | None) -> Drawn | None:
    return mark if isinstance(mark, Drawn) else None


def _int(name: str, value: Any, least: int | None = None) -> int:
    """``value`` as an int. Raises LoaderError, also for a bool."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        least_ = "" if least is None else f" of at least {least}"
        raise LoaderError(f"found {name}={value!r}; expected an int{least_}")
    return number


def _ranks(rank: int | None, world_size: int | None, sampler: object) -> tuple[int, int]:
    """Rank and world size: as given, else of torch.distributed where it is initialised. Raises LoaderError."""
    if (rank is None) != (world_size is None):
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise LoaderError(f"found {given} without {missing}; expected both, or neither (then torch.distributed's)")
    if rank is not None:
        if sampler is not None:
            raise LoaderError("found a sampler and rank; a sampler decides itself what its rank reads: leave rank out")
        size = _int("world_size", world_size, 1)
        number = _int("rank", rank)
        if not 0 <= number < size:
            raise LoaderError(f"found rank={number}; expected 0 to {size - 1} for world_size={size}")
        return number, size
    if sampler is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
