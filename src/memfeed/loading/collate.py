"""The ``collate_fn`` for users who keep their DataLoader: the same batches, transforms and devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert, get_worker_info

from memfeed.errors import LoaderError
from memfeed.loading.batch_forms import (
    CollateSamples,
    OneRow,
    PaddedField,
    collate_finished,
    converter,
    giving_samples,
    pad_batch,
    padded_fields,
    padding_beside_collate,
)
from memfeed.loading.bind import Bound, UserTransform, bind, transform_of
from memfeed.loading.position import NO_EPOCH, EpochClock
from memfeed.loading.ranks import draw_seed
from memfeed.loading.settings import Settings
from memfeed.loading.stages import with_extras
from memfeed.random import Keys
from memfeed.store.gather import ReadSamples
from memfeed.store.lengths import Fill
from memfeed.store.store import Store
from memfeed.system.buffers import shared_number
from memfeed.system.messages import say_once
from memfeed.transfer.to_device import check_device, to_device


class Collate:
    """Collate samples of a store: ``DataLoader(store, batch_size, collate_fn=Collate(transform))``.

    The batch is the one that ``Loader`` gives for the same rows, epoch and seed, with and without workers. Samples of
    `Subset(store)` and `random_split(store)` work too.

    With ``seed=``, call ``set_epoch(e)`` before each epoch: what keyed transforms draw for a row depends on the seed,
    the epoch and the row; persistent workers see the epoch as well. Without both, each batch draws from torch's default
    generator, as random transforms in a dataset do: `torch.manual_seed` decides, and workers have seeds of their own.

    Args:
        transform: as for ``Loader``: None is the store's own.
        device: as for ``Loader``; a CUDA device only with ``num_workers=0``.
        seed: of keyed transforms; None draws for each batch, or is 0 once ``set_epoch`` was called.
        pad: as for ``Loader``.
        collate_fn: as for ``Loader``: it gets samples that the store's own transform has finished; a ``transform`` of
            yours takes what it returns.

    Raises:
        LoaderError: ``pad`` and ``collate_fn``; later, samples that are not those of a store.
    """

    def __init__(
        self,
        transform: UserTransform = None,
        device: torch.device | str | None = None,
        seed: int | None = None,
        pad: Fill = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        self.transform, self.device, self.seed, self.pad, self.collate_fn = transform, device, seed, pad, collate_fn
        self._has_own_transform, self._is_by_length = transform is None, False
        if pad is not None and collate_fn is not None:
            raise padding_beside_collate()
        self._bound = bind(transform)  # raises for what is no transform
        self._has_transform = self._bound is not None
        self._finish: CollateSamples | None = None
        self._one_row: OneRow | None = None
        self._padded: Sequence[PaddedField] = ()
        self._store: Store | None = None  # that of the samples that all of these are for
        self._epoch = shared_number(NO_EPOCH)
        self._first: tuple[int, int] | None = None  # the first row of an epoch, with the epoch
        self._has_repeated = False  # that row came again, in one batch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that keyed transforms draw for, from the next batch on."""
        self._epoch.fill_(epoch)

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of these samples, on the device, transformed."""
        if not isinstance(samples, ReadSamples):
            raise LoaderError(
                f"found a {type(samples).__name__} of samples; expected those of a memfeed store: pass the store "
                "itself (or a Subset of it) to DataLoader, with automatic batching"
            )
        if samples.store is not self._store:
            self._plan(samples.store)
        keys, device = self._keys(torch.from_numpy(samples.ids)), check_device(self.device)
        bound: Bound = self._bound or (lambda batch, _: batch)
        if self._finish is not None:
            batch = self._finish(bound(samples.batch, keys), samples.canvases)
        elif self.collate_fn is not None:
            batch = self.collate_fn(samples)
        else:
            batch = pad_batch(samples.batch, self._padded)
            if len(samples) == 1 and self._one_row is not None and self._one_row.is_before:
                batch = self._one_row.plain(batch)
        if device is not None:
            batch = to_device(batch, device, non_blocking=False)
        if self._finish is None:
            batch = bound(batch, keys)
        self._report_repeats(keys)
        return batch

    def _keys(self, rows: torch.Tensor) -> Keys:
        """Return the keys of a batch. Without seed and epoch its seed is drawn: nobody says which epoch it is of.

        Where no transform needs keys, torch's generator stays as the training left it.
        """
        seed = self._seed() if self._has_transform else 0
        return Keys(draw_seed(None), NO_EPOCH, rows) if seed is None else Keys(seed, max(0, int(self._epoch)), rows)

    def _seed(self) -> int | None:
        """Return the seed of all batches of the epoch; None if each batch draws one."""
        return self.seed if self.seed is not None or int(self._epoch) == NO_EPOCH else 0

    def _report_repeats(self, keys: Keys) -> None:
        """Say that the numbers of an epoch come again, if a transform has drawn any and its first row comes again.

        Not of the last batch: samplers that divide the rows among ranks fill it with the first rows of the epoch.
        """
        if keys.epoch == NO_EPOCH or not keys.has_drawn or not len(keys.rows):
            return
        if self._first is None or self._first[0] != keys.epoch:
            self._first, self._has_repeated = (keys.epoch, int(keys.rows[0])), False
        elif not self._has_repeated:
            self._has_repeated = bool((keys.rows == self._first[1]).any())
        else:
            say_once(
                f"memfeed: row {self._first[1]} comes a second time in epoch {keys.epoch}, and random transforms draw "
                "the same for it: call set_epoch(e) before each epoch, or leave seed= and set_epoch out, so that each "
                "batch draws other numbers"
            )

    def _plan(self, store: Store) -> None:
        """Prepare for samples of a store."""
        transform = transform_of(None, store) if self._has_own_transform else self.transform
        is_finishing = self.collate_fn is not None and self._has_own_transform and transform is not None
        bound = bind(
            giving_samples(transform) if is_finishing else transform, store.schema, windows=store._view.window_paths
        )
        self._has_transform = bound is not None
        self._one_row = OneRow(store.schema, transform, self.collate_fn is None and not self._is_by_length)
        self._bound = self._one_row.after(bound)
        self._finish = None
        if self.collate_fn is not None and is_finishing:
            self._finish = collate_finished(self.collate_fn, transform, store, single=False)
        self._padded = padded_fields(self.pad, store.schema)
        self._store = store

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bound": None, "_one_row": None, "_finish": None, "_store": None}


class LoaderCollate(Collate):
    """The ``collate_fn`` of a loader, for frameworks that make a DataLoader of its parts.

    It carries what such a DataLoader would lose: transform, device, seed, epoch, beside the user's collate_fn, if there
    is one. If other code draws the rows, and sets no epoch of the loader, nobody knows the epoch: then each batch draws
    from torch's default generator, see `Collate`. A loader that is given one of another loader, as when Lightning makes
    a new loader, takes the clock of that loader.
    """

    def __init__(self, settings: Settings, clock: EpochClock) -> None:
        pad = {one.path: one.value for one in settings.padded} or None
        super().__init__(settings.transform, settings.device, pad=pad, collate_fn=settings.collate_fn)
        self._has_own_transform, self._is_by_length = settings.has_own_transform, settings.by_length
        self.settings, self.clock = settings, clock
        self._epoch = clock.share()

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of these samples, as the loader itself would give it."""
        settings = self.settings
        if settings.last == "pad":
            raise LoaderError(
                'found last="pad" on a loader whose batches another component draws, without saying which rows fill up '
                'a batch: leave last="pad" out there'
            )
        if settings.batch_size is None:  # one sample, or what the store gives for a list of rows
            changes = bind(self.transform) or self.device or self.pad is not None
            if changes or settings.returns_rows or settings.as_ != "torch":
                raise LoaderError(
                    "found batch_size=None on a loader whose rows another component draws, and a transform, device, "
                    "pad=, return_rows or as_; expected batches beside them: pass batch_size= or batch_sampler="
                )
            return default_convert(samples)  # type: ignore[no-untyped-call]
        if not isinstance(samples, ReadSamples):
            if self.transform is None and not settings.returns_rows and self.pad is None:
                return (self.collate_fn or default_collate)(samples)
            return super().__call__(samples)  # raises
        batch = super().__call__(samples)
        if settings.returns_rows:
            batch = with_extras(batch, {"rows": torch.from_numpy(samples.rows.astype("int64"))})
        convert = converter(settings.as_)
        return batch if convert is None else convert(batch)

    def _seed(self) -> int | None:
        if int(self._epoch) == NO_EPOCH:
            return None
        worker = get_worker_info()
        if worker is None or self.clock.seed is not None:
            return self.clock.resolve_seed(1)  # ranks share a seed where they share an order of ours
        return worker.seed - worker.id  # the base seed that DataLoader has drawn: the same in all workers


def user_collate(collate_fn: Any) -> Any:
    """Return the user's collate_fn; None where there is none beside ours. Raises LoaderError for a `Collate`."""
    if isinstance(collate_fn, LoaderCollate):
        return collate_fn.settings.collate_fn
    if isinstance(collate_fn, Collate):
        raise LoaderError(
            "found a Collate as the collate_fn of a Loader; expected its arguments: Loader(dataset, transform=..., "
            "collate_fn=...); a Collate is for torch's DataLoader"
        )
    if collate_fn is not None:
        say_once("memfeed: a collate_fn makes a batch from a list of samples, which is slow; a transform takes batches")
    return collate_fn
