"""Split the pipeline of a dataset for a conversion, and give the rest of it to the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfeed.convert.inputs import ConvertOptions, Input
from memfeed.convert.probe import probe_indices, spread
from memfeed.convert.randomness import differing_leaf
from memfeed.errors import MemfeedError, RandomDataError, SchemaError, SplitError, StaleStoreError
from memfeed.schema import values
from memfeed.schema.containers import map_leaves
from memfeed.schema.recipe import PER_SAMPLE
from memfeed.store.attributes import Keep
from memfeed.store.store import Store, open_store
from memfeed.system import random_state
from memfeed.system.progress import write_line

if TYPE_CHECKING:
    from memfeed.splitting.cut import Split

PROBED = 4  # samples that are compared with the original pipeline
SMALLEST_SIDE = 8  # pixels; a smaller one is a mistake


def check_keep(keep: Any) -> None:
    """Raise ValueError for a ``keep=`` that has no meaning."""
    is_side = isinstance(keep, int) and not isinstance(keep, bool) and keep >= SMALLEST_SIDE
    if keep not in (None, "full", "encoded") and not is_side:
        raise ValueError(
            f'found keep={keep!r}; expected "full", "encoded", or the short side in pixels, {SMALLEST_SIDE} or more'
        )


def store_at(target: Path) -> Store | None:
    """Return the store at `target`; None without one, or if it cannot be opened: that is said later."""
    try:
        return open_store(target) if target.exists() else None
    except (MemfeedError, OSError):
        return None


def keep_of(store: Store | None) -> Keep | None:
    """Return the ``keep=`` that a store was made with."""
    attributes = None if store is None or store.manifest is None else store.manifest.attributes
    return attributes.keep if attributes else None


def split_input(
    given: Input, stored: Store | None, which: bool | str, options: ConvertOptions, *, lazily: bool
) -> Split | None:
    """Return the dataset of a conversion, cut as ``cache(split=which)`` says; None to leave it whole.

    Raises SplitError, and StaleStoreError if the store that exists was made with ``split`` where `which` is False.
    """
    has_rest = stored is not None and bool(stored.recipe)
    if not which:
        if stored is not None and has_rest:
            raise StaleStoreError(
                f"{stored.path}: found a store made with split=True; expected the same again: pass split=True, "
                "overwrite=True to write it anew, or open it with memfeed.open"
            )
        return None
    if given.kind != "map" or isinstance(given.dataset, Store):
        if which == "auto":
            return None
        raise SplitError(
            f"found split={which!r} for {type(given.dataset).__name__}; expected a map-style dataset (len and []) with "
            "a pipeline: leave split out"
        )
    from memfeed.splitting.cut import has_random_step, split  # most conversions split nothing

    indices = _indices_to_compare(given)
    if which == "auto" and not has_rest:
        try:
            if not has_random_step(given.dataset, indices):
                return None
        except (SplitError, SchemaError):  # if the samples are random, `not_split` says why they are not split
            return None
    name = which if isinstance(which, str) and which != "auto" else None
    how = "memfeed.cache(dataset, path, split=True, keep=256)"
    if lazily:
        workers = "" if options.worker_count is None else f", workers={options.worker_count}"
        how = f"Loader({how[:-1]}, lazily=True{workers}), ...)"
    return split(given.dataset, indices, name, options.keep, how)


def with_rest(store: Store, cut: Split) -> Store:
    """Return the store with the rest of the pipeline as its ``transform``, as the dataset has it now."""
    if store.recipe != cut.recipe:
        write_line(
            f"memfeed: the random part of the pipeline is not that of {store.path}, which memfeed.open gives: this "
            "store has the dataset's; overwrite=True writes it there too"
        )
        return store.with_transform(cut.transform)
    has_own = any(step.name == PER_SAMPLE for step in cut.recipe)
    return store.with_transform(cut.transform) if has_own else store


def still_random(error: RandomDataError, cut: Split) -> RandomDataError:
    """Return the error for samples that are random although their pipeline was cut before its first random step."""
    cause = "it depends on state that outlives a read: a counter, the time, a generator of its own"
    if not _differs_under_one_seed(cut.dataset):
        cause = "the dataset itself draws random numbers, outside of its pipeline"
    found = str(error).partition("; expected")[0].partition(" (its transform")[0].removeprefix("found random samples: ")
    return RandomDataError(
        f"found random samples although the pipeline was cut: {found[:120]}; {cause}. Expected what is left to be the "
        "same each time: move the draw into the pipeline, or pass allow_random=True to keep one draw for all epochs"
    )


def not_split(error: RandomDataError, given: Input, which: bool | str) -> RandomDataError:
    """Return the error for random samples that were not cut: with the reason, if ``split="auto"`` met one."""
    if which != "auto" or given.kind != "map" or isinstance(given.dataset, Store):
        return error
    from memfeed.splitting.cut import has_random_step

    try:
        has_random_step(given.dataset, _indices_to_compare(given))
    except (SplitError, SchemaError) as reason:
        found = str(error).partition("; expected")[0]
        return RandomDataError(f"{found}; and its pipeline cannot be split: {reason}")
    return error


def _indices_to_compare(given: Input) -> list[int]:
    assert given.length is not None
    return spread(probe_indices(given.length))[:PROBED]


def _differs_under_one_seed(dataset: Any) -> bool:
    with random_state.preserved():
        for index in range(min(len(dataset), PROBED)):
            random_state.seed(0)
            sample = map_leaves(values.copy_value, dataset[index])
            random_state.seed(0)
            if differing_leaf(sample, dataset[index]) is not None:
                return True
    return False
