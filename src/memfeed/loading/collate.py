"""The ``collate_fn`` for users who keep their DataLoader: the same batches, transforms and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from memfeed.errors import LoaderError
from memfeed.loading.arrays import converter
from memfeed.loading.bind import UserTransform, bind
from memfeed.loading.clock import EpochClock, joined_world_size
from memfeed.loading.padding import PaddedField, pad_batch, padded_fields
from memfeed.loading.settings import Settings
from memfeed.loading.stages import with_extras
from memfeed.random import Keys
from memfeed.schema.fields import Schema
from memfeed.store.store import Samples
from memfeed.system.buffers import shared_number
from memfeed.transfer.devices import check_device
from memfeed.transfer.to_device import to_device


class Collate:
    """Collate samples of a store: ``DataLoader(store, batch_size, collate_fn=Collate(transform))``.

    The batch is the one that ``Loader`` gives for the same rows, epoch and seed, with and without workers. Samples of
    `Subset(store)` and `random_split(store)` work too. Call ``set_epoch(e)`` before each epoch: persistent workers see
    it as well.

    Args:
        transform: as for ``Loader``: None is the store's own.
        device: as for ``Loader``; a CUDA device only with ``num_workers=0``.
        seed: of keyed transforms.
        pad: as for ``Loader``.
    """

    def __init__(
        self,
        transform: UserTransform = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        pad: Mapping[Any, float] | None = None,
    ) -> None:
        self.transform, self.device, self.seed, self.pad = transform, device, seed, pad
        self._bound = bind(transform)  # raises for what is no transform
        self._padded: Sequence[PaddedField] = ()
        self._schema: Schema | None = None  # that of the samples that both are for
        self._epoch = shared_number(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that keyed transforms draw for, from the next batch on."""
        self._epoch.fill_(epoch)

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of these samples, on the device, transformed."""
        if not isinstance(samples, Samples):
            raise LoaderError(
                f"found a {type(samples).__name__} of samples; expected those of a memfeed store: pass the store "
                "itself (or a Subset of it) to DataLoader, with automatic batching"
            )
        if samples.schema is not self._schema:
            transform = samples.transform() if self.transform is None else self.transform
            self._bound = bind(transform, samples.schema, windows=samples.windows)
            self._schema = samples.schema
            self._padded = padded_fields(self.pad, samples.schema)
        batch, device = pad_batch(samples.batch, self._padded), check_device(self.device)
        if device is not None:
            batch = to_device(batch, device, non_blocking=False)
        if self._bound is not None:
            batch = self._bound(batch, Keys(self.seed, int(self._epoch), torch.from_numpy(samples.ids)))
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bound": None, "_schema": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class LoaderCollate(Collate):
    """The ``collate_fn`` of a loader, for frameworks that make a DataLoader of its parts.

    It carries what such a DataLoader would lose: transform, device, seed, epoch. A loader that is given one of another
    loader, as Lightning does when it makes a loader anew, takes the clock of that loader.
    """

    def __init__(self, settings: Settings, clock: EpochClock) -> None:
        super().__init__(settings.transform, settings.device, pad={one.path: one.value for one in settings.padded})
        self.settings, self.clock = settings, clock
        self._epoch = clock.share()

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of these samples, as the loader itself would give it."""
        settings = self.settings
        if settings.last == "pad":
            raise LoaderError(
                "found pad_last on a loader whose batches another component draws, without saying which rows fill up "
                "a batch: leave pad_last out there"
            )
        if not isinstance(samples, Samples):
            if self.transform is None and not settings.returns_rows and not self.pad:
                return default_collate(samples)
            return super().__call__(samples)  # raises
        self.seed = self.clock.resolve_seed(joined_world_size())
        batch = super().__call__(samples)
        if settings.returns_rows:
            batch = with_extras(batch, {"rows": torch.from_numpy(samples.rows.astype("int64"))})
        convert = converter(settings.as_)
        return batch if convert is None else convert(batch)
