"""The ``collate_fn`` for users who keep their DataLoader: the same batches, transforms and devices."""

from __future__ import annotations

from typing import Any

import torch

from memfeed.errors import LoaderError
from memfeed.loading.bind import UserTransform, bind
from memfeed.random import Keys
from memfeed.store.store import Samples
from memfeed.transfer.devices import check_device
from memfeed.transfer.to_device import to_device


class Collate:
    """Collate samples of a store: ``DataLoader(store, batch_size, collate_fn=Collate(transform))``.

    The batch is the one that ``Loader`` gives for the same rows, epoch and seed, with and without workers. Samples of
    `Subset(store)` and `random_split(store)` work too. Call ``set_epoch(e)`` before each epoch: persistent workers see
    it as well.

    Args:
        transform: as for ``Loader``.
        device: as for ``Loader``; a CUDA device only with ``num_workers=0``.
        seed: of keyed transforms.
    """

    def __init__(
        self, transform: UserTransform = None, device: torch.device | str | None = None, seed: int = 0
    ) -> None:
        self.transform, self.device, self.seed = transform, device, seed
        self._bound = bind(transform)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

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
        batch, device = samples.batch, check_device(self.device)
        if device is not None:
            batch = to_device(batch, device, non_blocking=False)
        if self._bound is not None:
            batch = self._bound(batch, Keys(self.seed, int(self._epoch), torch.from_numpy(samples.ids)))
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bound": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bound = bind(self.transform)
