"""The public face of loading: a store to batches, epoch by epoch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from typing_extensions import TypeVar

from memfeed.loading.arguments import resolve
from memfeed.loading.bind import UserTransform
from memfeed.loading.collate import LoaderCollate, user_collate
from memfeed.loading.epoch import EpochProgress, Start
from memfeed.loading.epochs import Epochs
from memfeed.loading.index_samplers import LengthBatchSampler, make_sampler
from memfeed.loading.open_source import CannotCacheError, check_required, forget_record, open_source
from memfeed.loading.placement import PlacementOption
from memfeed.loading.ranks import joined_world_size
from memfeed.loading.settings import Arguments, ArrayKind, Require, Settings, as_int, check_settings, reduced
from memfeed.order.choice import Shuffle
from memfeed.order.pieces import LastRows
from memfeed.store.lengths import Fill
from memfeed.store.store import Store
from memfeed.system.messages import say_once
from memfeed.system.torch_loader import DataLoader

T_co = TypeVar("T_co", covariant=True, default=Any)
READ_ONLY = (
    "shuffle", "seed", "last", "bucket_by", "device", "transform", "placement", "ranks", "return_rows",
    "as_", "pad", "cache", "forms", "budget", "decoders", "require",
)  # fmt: skip


class Loader(DataLoader[T_co]):
    """Batches of a store, as `torch.utils.data.DataLoader` would give them, at the speed of memory.

    A batch is what `default_collate` makes of its samples; a list of numbers inside a sample is one leaf. Leaves of
    varying length are one jagged nested tensor, leaves of varying shape a list of tensors; in a batch of one row both
    are tensors [1, *shape], except with ``bucket_by``. str, bytes and JSON values are a list. The memory of a batch
    belongs to the caller for as long as any tensor shares it; after that it is used for another batch.

    It is a DataLoader, with its arguments and attributes, but needs no worker processes. Trainers may take it, replace
    its sampler, or make a DataLoader of its parts: order, transform, device and seed stay.

    Each pass is the next epoch (the first is 0), from the moment its first batch is asked for; ``set_epoch(e)`` sets
    the number of the next one. The order is a pure function of (number of rows, seed, epoch). At step k all ranks
    together read the same rows for any number of ranks, if ``batch_size * world_size`` is the same.

    Args:
        dataset: a Store or a view of one, a `torch.utils.data.Subset` of one, a list or ConcatDataset of stores of one
            schema, or columns in memory: a tensor, a tuple or dict of tensors, a TensorDataset, a TensorDict (read in
            place, not copied). A list of pairs, ``[(store, 0.7), (other, 0.3)]``, gives the share of the rows that
            comes from each store; the shares sum to 1, and an epoch has as many rows as the stores together. Any other
            map-style dataset (``len`` and ``[]``), as DataLoader takes it: it becomes a store at ``cache`` that is
            filled while it is read, as by ``memfeed.cache(..., split="auto", lazily=True)``.
        batch_size: rows per batch and rank; the last batch is smaller unless ``last`` is "drop" or "pad". None gives
            single samples, through `default_convert`.
        shuffle: True for an exact uniform permutation of the rows, a new one in every epoch (8 bytes of memory a row, 4
            above a million rows). `memfeed.Blocks` for stores beyond memory or 10^8 rows: blocks of neighbouring rows
            in random order, the rows of 128 blocks at a time mixed.
        seed: the seed of the shuffling and of keyed transforms. None draws one when the first pass starts, from
            ``generator`` or torch's default generator, and keeps it: `torch.manual_seed` decides, and two loaders
            differ. Several ranks take the one that rank 0 draws: make the same loaders in the same order on each.
        drop_last: the same as ``last="drop"``.
        last: what becomes of the rows at the end of an epoch that make no whole batch for every rank.
            "repeat", as None: with several ranks the last batches are filled up with rows from the beginning of the
            epoch's order, as `DistributedSampler` does, so that every rank gets the same number of batches.
            "drop": these rows are left out.
            "pad": the last batch is filled with repeated rows, so that all batches have one shape, and it says which
            rows count: a dict or TensorDict gets the key "valid", any other batch becomes ``(batch, valid)``;
            bool [batch_size].
            "uneven": each row comes once; ranks differ by at most one row, and some may get one batch less.
        sampler: row numbers to visit instead, an iterable of ints (any of torch's samplers). If it has ``set_epoch``,
            that is called with each epoch's number, until somebody else calls it. The first pass is the epoch that the
            sampler shows as ``epoch``.
        batch_sampler: an iterable of lists of row numbers; replaces batch_size, shuffle, sampler and drop_last.
        bucket_by: the field of varying length by which batches are made of rows of like length: the rows of 128
            batches, in the epoch's order, are sorted by length and cut into batches, which are shuffled.
            ``memfeed.Tokens(4096, "field")`` cuts batches of at most so many tokens, in place of ``batch_size``. Every
            epoch has the same number of batches. Ranks read whole batches, the same number each, unless ``last`` says
            otherwise; with "pad" no row of a batch that fills up is valid.
        device: the device to which batches go before the transform; None leaves them in CPU memory. The batches of
            a TensorDict that is read in place have its device.
        transform: a ``memfeed.transforms`` transform, a callable ``batch -> batch``, or ``{field: callable}``. None:
            the store's own, see `Store.transform`; {} for none at all. For its place beside a collate_fn see there.
        placement: where columns are kept: "device" (the memory of the device, which picks the rows itself), "pinned"
            (page-locked memory of the CPU, read by the device over the bus) or "mapped" (the files of the store, or the
            columns in memory as they are); or {field: one of these}. "auto" leaves half of the device's memory to the
            model, fills the other half, then up to half of the free RAM (divided by the number of GPUs), the largest
            columns first. Without a CUDA device "auto" leaves all columns mapped, and "device" and "pinned" are a copy
            in RAM. Columns are placed when the first epoch begins, so move the model to the device before. Columns
            whose rows differ in size stay mapped. If memory runs out later, columns fall back to the next placement
            that needs less, once, with a warning. See ``stats``. "nvjpeg" (for JPEG fields): the GPU decodes the rows
            of each batch, docs/forms.md. "sharded" (for all fields, or beside "mapped"): as "device", but each rank
            keeps only the rows that it reads in an epoch, one ``world_size``-th of all. The order is then another one:
            in every epoch other random blocks of neighbouring rows come to each rank, and are shuffled there;
            see `memfeed.order.pieces.RankPieces`. Before the first epoch the ranks compare their stores, settings and
            memory. A store at an address stays mapped: a rank fetches the chunks of its rows; nothing is compared.
        prefetch_factor: how many batches are made ahead, 2 by default: by a thread if the device is a GPU, else by a
            thread if it is measured to be faster (see ``stats``). 0 for none. The attribute is None, as in a DataLoader
            without workers.
        ranks: ``(rank, world_size)``, which slice of each global batch this loader reads. By default those of
            `torch.distributed` when an epoch starts, else of the launcher (RANK and WORLD_SIZE). A sampler decides
            itself which rows its rank reads. If each rank of `torch.distributed` has a store of its own, each reads all
            its rows, as with ``ranks=(0, 1)``; ``len`` is that of a part before the first epoch.
        collate_fn: called with the list of samples of a batch, in the form in which the dataset returned them, but with
            tensors in place of NumPy arrays and PIL images if the loader was made of a store; slow, because samples are
            Python objects. If the store was cut (``memfeed.cache(..., split=True)``, or ``cache=``), its own transform
            runs first, on the gathered batch on the CPU, and the samples are views of what it returns; ``device`` then
            gets what the collate_fn returns. A ``transform=`` that you give takes what the collate_fn returns, on the
            device, and the samples are the stored ones. With ``last="pad"`` and ``return_rows`` the mask and the rows
            are those of the list, in its order. With ``batch_size=None`` it gets the one sample.
        generator: the generator from which a missing seed is drawn.
        num_workers, worker_init_fn, multiprocessing_context: without effect, except for a ``dataset`` (see ``cache``).
        pin_memory, timeout, persistent_workers, pin_memory_device, in_order: without effect. The attributes read as in
            a DataLoader without workers, and so do those of the line before.
        snapshot_every_n_steps: of StatefulDataLoader, without effect: a state is exact after every batch.
        return_rows: say the row numbers of a batch: a dict or TensorDict gets the key "rows", any other batch becomes
            ``(batch, rows)``, with ``last="pad"`` ``(batch, valid, rows)``; int64 [k], rows of ``dataset``.
        as_: "torch" for tensors, "numpy" or "jax" for arrays that share their memory where they can.
        pad: the value that fills up rows to the longest of the batch: a number for all fields of varying length, or
            one for each by name. ``pad={"tokens": 0}`` gives "tokens" [k, longest, ...] and beside it "tokens_mask",
            bool [k, longest], True where values are real. The fields must be in a dict or TensorDict.
        cache: where the store of a map-style ``dataset`` is kept; None for a temporary store, which is removed with the
            loader. ``num_workers`` processes read the dataset while the store is filled, each after ``worker_init_fn``;
            0 reads it in this process, as DataLoader does. They start as `torch.multiprocessing` says; a message tells
            if ``multiprocessing_context`` is another way. An IterableDataset is written to it as a whole first.
        forms, budget: beside ``cache``, the forms of fields, and the most bytes, "60GB"; see `memfeed.cache`. 256
            shrinks images to that short side, ``(256, "jpeg:95")`` also compresses them. None: as the store has them;
            images of a new one "full" if they fit in half of the free disk and RAM, else "encoded".
        require: the least that is made of a dataset: "batched", all random steps run on whole batches; "samples", it
            becomes a store. None: where no store can be made, this loader becomes a `DataLoader` over the dataset as it
            is, and a line says so. With ``cache`` decoded files are kept there. See docs/memoize.md.
        decoders: functions of your own whose results are kept then, beside known decoders of libraries. (): none are.
        follow_batch, exclude_keys: of graphs, as PyTorch Geometric's DataLoader has them: attributes for which the
            batch also says the graph of each entry, and attributes that are left out.

    Batches are gathered by as many threads as are measured to be worthwhile, at most `torch.get_num_threads()` and 8.

    Raises:
        LoaderError: arguments that do not fit together, or a source of another kind. For a dataset also what
            `memfeed.cache` raises. During iteration, if rank 0 does not draw the seed that ranks share, and if ranks
            with stores of their own have different numbers of batches (not with ``last="uneven"``).
        RowError: during iteration, if a sampler yields a row out of range.
        StaleStoreError: when an epoch begins, if the dataset has changed, the indices of a Subset, or which tensors
            are read in place.

    Example::

        loader = memfeed.Loader(torch.arange(300_000), 300, shuffle=True)
        first = next(iter(loader))  # int64 [300]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: Shuffle | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Iterable[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
        seed: int | None = None,
        last: LastRows | None = None,
        bucket_by: Any = None,
        device: torch.device | str | None = None,
        transform: UserTransform = None,
        placement: PlacementOption = "auto",
        ranks: tuple[int, int] | None = None,
        return_rows: bool = False,
        as_: ArrayKind = "torch",
        pad: Fill = None,
        cache: str | os.PathLike[str] | None = None,
        forms: Any = None,
        budget: int | str | None = None,
        decoders: Sequence[Callable[..., Any]] | None = None,
        require: Require | None = None,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
    ) -> None:
        given = Arguments(
            as_=as_, pad=pad, last=last, seed=seed, ranks=ranks, device=device, shuffle=shuffle, sampler=sampler,
            timeout=timeout, in_order=in_order, drop_last=drop_last, bucket_by=bucket_by, generator=generator,
            transform=transform, placement=placement, batch_size=batch_size, collate_fn=collate_fn,
            pin_memory=pin_memory, return_rows=return_rows, num_workers=num_workers, follow_batch=follow_batch,
            exclude_keys=exclude_keys, batch_sampler=batch_sampler, worker_init_fn=worker_init_fn,
            prefetch_factor=prefetch_factor, pin_memory_device=pin_memory_device, persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context, cache=cache, forms=forms, budget=budget, decoders=decoders,
            require=require,
        )  # fmt: skip
        check_required(dataset, given)
        is_recorded = "__pl_saved_args" in vars(self)  # by Lightning
        try:
            source = open_source(dataset, given)
        except CannotCacheError as refused:
            from memfeed.loading.decoded import become_decoded  # loaders of stores need no decoders

            become_decoded(self, Loader, dataset, refused, given)
            forget_record(self)  # the arguments of another class
            return
        reading = resolve(source, given)
        store, clock = reading.store, reading.clock
        shown_batches = batch_sampler if reading.batches is None else LengthBatchSampler(reading.batches, clock)
        super().__init__(
            store,
            1 if shown_batches is not None else reading.settings.batch_size,
            sampler=make_sampler(store, reading.rows, clock) if shown_batches is None and sampler is None else sampler,
            batch_sampler=shown_batches,  # type: ignore[arg-type]
            collate_fn=LoaderCollate(reading.settings, clock),
            drop_last=reading.settings.last == "drop" and shown_batches is None,
            generator=generator,
        )
        if not is_recorded:
            forget_record(self)
        self.shuffle, self.seed, self.last, self.bucket_by, self.ranks = shuffle, seed, last, bucket_by, ranks
        self.device, self.transform, self.placement = device, transform, placement
        self.return_rows, self.as_, self.pad, self.follow_batch = return_rows, as_, pad, follow_batch
        self.cache = None if cache is None else os.path.abspath(cache)  # also for the loaders that are made of this one
        self.exclude_keys, self.snapshot_every_n_steps = exclude_keys, snapshot_every_n_steps
        self.forms, self.budget, self.decoders, self.require = forms, budget, decoders, require
        self._clock, self._settings, self._name = clock, reading.settings, reading.name
        self._own_parts = (self.sampler, self.batch_sampler, self.collate_fn)
        self._epochs = Epochs(reading)
        self._locked = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in READ_ONLY and self.__dict__.get("_locked"):
            raise ValueError(f"{name} attribute should not be set after {type(self).__name__} is initialized")
        if name == "collate_fn" and self.__dict__.get("_locked") and not isinstance(value, LoaderCollate):
            # what takes the parts of this loader later must find the transform there too
            settings = dataclasses.replace(self._settings, collate_fn=user_collate(value))
            check_settings(settings)
            value = LoaderCollate(settings, self._clock)
        if name == "generator" and self.__dict__.get("_locked") and self.seed is None:
            self._clock.generator = value
        super().__setattr__(name, value)

    def _effective_settings(self) -> Settings:
        """Return the settings, with the sampler and the collate_fn that another component may have put in."""
        sampler, batch_sampler, collate_fn = self._own_parts
        settings = self._settings
        if self.collate_fn is not collate_fn:
            settings = dataclasses.replace(settings, collate_fn=user_collate(self.collate_fn))
        if self.sampler is sampler and self.batch_sampler is batch_sampler and self._holds_own_sampler():
            return settings
        say_once("memfeed: another component has replaced the sampler of a loader: it decides which rows are read")
        return settings.drawn_by(self.sampler, self.batch_sampler)

    def _holds_own_sampler(self) -> bool:
        """Return True unless the batch sampler that torch made for our order was changed in place."""
        batches: Any = self.batch_sampler
        if batches is None or not self._settings.has_own_order or self._settings.by_length:
            return True
        same_batches = batches.batch_size == self.batch_size and batches.drop_last == self.drop_last
        return batches.sampler is self.sampler and same_batches

    @property
    def store(self) -> Store:
        """The rows of the loader as one store; the same object as ``dataset``."""
        return self.dataset  # type: ignore[return-value]

    def __len__(self) -> int:
        """Batches in an epoch for this rank. Raises TypeError, as DataLoader does, for a sampler without a length."""
        settings = self._effective_settings()
        if settings.batch_sampler is not None:
            return len(settings.batch_sampler)  # type: ignore[arg-type]
        if settings.sampler is None:
            return self._epochs.shards(settings).count()
        rows, size = len(settings.sampler), settings.rows_a_batch  # type: ignore[arg-type]
        return rows // size if self.drop_last else -(-rows // size)

    def __repr__(self) -> str:
        from memfeed.loading.loader_html import loader_text  # a training shows no loader

        return loader_text(self)

    def _repr_html_(self) -> str:
        from memfeed.loading.loader_html import loader_html  # a training shows no page

        return loader_html(self)

    def stats(self) -> dict[str, Any]:
        """Return how the newest epoch goes, or went. JSON.

        ``epoch``; ``batches`` and ``samples`` given, ``bytes`` gathered; ``seconds`` since the first batch, and from it
        ``samples_per_second`` and ``bytes_per_second``; ``wait_share``, the part of that time the caller waited for
        data; ``columns``, where each is kept ("device", "pinned", "mapped", "memory"), and ``placement``, why
        there; ``cold``, whether rows were missing in the page cache when the epoch began; ``plan``, how batches are
        made: when asked for or ahead in a thread, how many small batches by one gather, whether rows are read ahead,
        and ``threads``: the ``most`` there may be, and how many gather and transform at present. A notebook shows the
        dict as bars and a table.
        """
        return self._epochs.stats()

    @property
    def epoch(self) -> int:
        """The epoch of the newest pass, or the one that ``set_epoch`` was given after it started; at first 0."""
        return self._clock.epoch

    def _get_iterator(self) -> Iterator[Any]:  # type: ignore[override]
        return self._epochs.iterate(self._begin, self.__len__)

    def _begin(self, progress: EpochProgress) -> Start:
        """Start an epoch at its first batch; return what makes its batches."""
        self.store._view.check_dataset()
        self._compare_ranks()
        return self._epochs.begin(progress, self._effective_settings())

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass start this epoch, at its beginning, or at a position that was loaded for this epoch.

        Raises LoaderError for a negative number.
        """
        self._epochs.set_epoch(epoch)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which the loader's threads do nothing: no call to the device, no reading.

        Capture a CUDA graph in it, if the loader has a device and its loop runs. It waits until the batch that is being
        made is done. Within the block ``next`` gives batches that are ready; without one it raises LoaderError.

        Example::

            with loader.paused(), torch.cuda.graph(graph):
                loss = step(static_batch)
        """
        return self._epochs.pause.paused()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the newest iterator, after the last batch that ``next`` returned. Ints and strings.

        It is the same on every rank, and good for any number of ranks: it counts the rows that all of them have read.
        After the end of an epoch it is the beginning of the next. It holds the seed.
        """
        return self._epochs.state(self._effective_settings())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass continue where this state was taken, with its seed; ``len`` stays that of a whole epoch.

        An empty state changes nothing. Raises LoaderError for the state of another store, view, order or length, or of
        another seed than this loader was given, and says which differs.
        """
        if state_dict != {}:
            self._epochs.load(state_dict, self._effective_settings(), self.seed)

    def skip(self, n_batches: int) -> None:
        """Leave out the next batches of the epoch, for instance those of a loss spike.

        The running iterator continues after them; without one, they are left out at the beginning of the next epoch. On
        several ranks call it on each. Raises LoaderError if the epoch has fewer batches left.
        """
        self._move(as_int("n_batches", n_batches, 0))

    def rewind(self, n_batches: int) -> None:
        """Go back, so that the newest batches come again. Raises LoaderError beyond the beginning of the epoch."""
        self._move(-as_int("n_batches", n_batches, 0))

    def _compare_ranks(self) -> None:
        """Read all rows from now on, as with ``ranks=(0, 1)``, if each rank has a store of its own."""
        settings = self._effective_settings()
        is_divided = settings.rank is None and settings.has_own_order and not self._epochs.is_cut
        if self._epochs.has_compared or not is_divided or joined_world_size() == 1:
            return
        from memfeed.loading.own_rows import has_own_rows  # a plain training run does without it

        undivided = dataclasses.replace(self._settings, rank=0, world_size=1)
        batches = self._epochs.shards(undivided).count()
        if has_own_rows(self._name, self.store, batches, may_differ=settings.last == "uneven"):
            self._settings = undivided
        self._epochs.has_compared = True

    def _move(self, batches: int) -> None:
        self._compare_ranks()  # a batch of all ranks is larger
        self._epochs.move(batches, self._effective_settings())

    def __reduce__(self) -> tuple[Any, ...]:
        options = {name: getattr(self, name) for name in READ_ONLY}
        return reduced(self, self.store, options, self._settings, user_collate(self.collate_fn))
