"""Pickle a loader: its store, its arguments, and its position."""

from __future__ import annotations

from typing import Any, Protocol

from memfeed.loading.settings import Settings
from memfeed.store.store import Store


class _Resumable(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def reduced(
    loader: _Resumable, store: Store, options: dict[str, Any], settings: Settings, collate_fn: Any
) -> tuple[Any, ...]:
    """Return the tuple of `Loader.__reduce__`. ``options`` are arguments that are attributes of the loader.

    Raises TypeError for columns in memory, which a pickle would copy.
    """
    store.__reduce__()
    options = options | {
        "drop_last": settings.last == "drop",
        "prefetch_factor": settings.prefetch,
        "sampler": settings.sampler,
        "batch_sampler": settings.batch_sampler,
        "batch_size": 1 if settings.batch_sampler is not None else settings.batch_size,
        "collate_fn": collate_fn,
    }
    if settings.takes_lists:
        options |= {"sampler": settings.batch_sampler, "batch_sampler": None, "batch_size": None}
    return _remake, (type(loader), store, options, loader.state_dict())


def _remake(cls: Any, dataset: Any, options: dict[str, Any], state_dict: dict[str, Any]) -> Any:
    loader = cls(dataset, **options)
    loader.load_state_dict(state_dict)
    return loader
