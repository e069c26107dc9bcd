"""Split the pipeline of a dataset for a conversion, and give the rest of it to the store."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memfeed.building.build import Build
from memfeed.building.claim import refusal_at
from memfeed.convert.fingerprint import targets_of
from memfeed.convert.inputs import Input, read_sample
from memfeed.convert.options import ConvertOptions
from memfeed.convert.randomness import as_worker, require_same_together
from memfeed.convert.source_hash import hash_source, is_changed_source
from memfeed.convert.watchdog import Watchdog
from memfeed.errors import MemfeedError, RandomDataError, SampleError, SplitError, StaleStoreError
from memfeed.errors import cut as cut_text
from memfeed.schema.codec import Int64Array
from memfeed.schema.recipe import PER_SAMPLE
from memfeed.splitting.unread import attributes_inside
from memfeed.store.dataset_attributes import Keep
from memfeed.store.format import build_path
from memfeed.store.opened import open_store
from memfeed.store.store import Store, with_parts
from memfeed.system import random_state
from memfeed.system.progress import write_line
from memfeed.system.signals import is_of_handler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memfeed.splitting.split import Split

ROWS = 16  # that a cut is proven on
_MOST_CLASSES = 2_000_000  # samples whose classes are looked at
_TRIED_AS_WORKER = 4  # samples
_FAILED = 4  # samples that raise, before a dataset counts as not ready


def store_at(target: Path) -> Store | None:
    """Return the store at `target`; None without one, or if it cannot be opened: that is said later."""
    try:
        return open_store(target) if target.exists() else None
    except (MemfeedError, OSError):
        return None


def keep_of(store: Store | None) -> Keep | None:
    """Return what was kept of images, see ``Forms.keep``, when a store was made with."""
    attributes = None if store is None or store._view.manifest is None else store._view.manifest.attributes
    return attributes.keep if attributes else None


def split_input(given: Input, stored: Store | None, options: ConvertOptions, target: Path) -> Split | None:
    """Return the dataset of a conversion, cut as ``options.split`` says; None to leave it whole.

    `target` is where the store will be. Raises SplitError, RandomDataError for ``split="auto"``, and StaleStoreError if
    the store that exists was made with ``split`` and this one is not.
    """
    which, has_rest = options.split, stored is not None and bool(stored._view.recipe)
    if not which:
        if stored is not None and has_rest:
            raise StaleStoreError(
                f"{stored.path}: found a store made with split=True; expected the same again: pass split=True, "
                "overwrite=True to write it again, or open it with memfeed.open"
            )
        return None
    if given.kind != "map" or isinstance(given.dataset, Store):
        if which == "auto":
            return None
        raise SplitError(
            f"found split={which!r} for {type(given.dataset).__name__}; expected a map-style dataset (len and []) with "
            "a pipeline: leave split out"
        )
    from memfeed.splitting.cut import StatefulError  # most conversions split nothing
    from memfeed.splitting.split import split

    assert given.length is not None
    name = which if isinstance(which, str) and which != "auto" else None
    targets = targets_of(given.dataset, given.length) if given.length <= _MOST_CLASSES else None
    rows = _readable(given, options, rows_to_prove(given.length, None if targets is None else targets[0]))
    folder = str(target.parent)
    try:
        cut = split(given.dataset, rows, name, options.keep, folder, cuts_fixed=which != "auto" or has_rest)
        if which == "auto" and stored is None:
            _require_not_refused(given, build_path(target), cut)
        if cut is not None:  # else the probe does this
            require_same_together(given.dataset, rows)
            if options.workers and not has_rest:  # a store that exists was made where it could be
                _require_cut_in_workers(cut, rows[:_TRIED_AS_WORKER], options.workers)
        return cut
    except StatefulError:
        if which != "auto" or has_rest:
            raise
        return None  # the probe finds out what has changed
    except SplitError as error:
        if which != "auto" or has_rest:
            raise
        raise _not_cut(error) from None
    except MemfeedError:
        raise
    except Exception as error:  # of the user's code: of the dataset, or of a step that was called by itself
        if is_of_handler(error):
            raise
        with random_state.preserved():
            for row in rows:
                read_sample(given.dataset, row, Watchdog(0))
        if which != "auto" or has_rest:
            raise
        what = cut_text(f"{type(error).__name__}: {error}", 200)
        raise _not_cut(f"it raises while its steps are watched ({what}), though its samples can be read") from error


def _require_not_refused(given: Input, root: Path, cut: Split | None) -> None:
    """Raise SplitError if a sample of this dataset has ended the build at ``root``.

    That of a dataset of another length or source, or cut where this one is not, does not count.
    """
    refusal = refusal_at(root)
    old = Build.join(root).settings.fingerprint if refusal.is_file() and Build.is_begun(root) else None
    if old is None or old.length != given.length:
        return
    source, why = hash_source(given.dataset, cut.steps_after if cut else ())[0], refusal.read_text("utf-8")
    if is_changed_source(old.source, source) or why.startswith(SplitError.__name__) != (cut is not None):
        return
    raise SplitError(
        f"a store is tried again after an edit of the dataset's source, or without {root}, which is of no use now; an "
        f"earlier run was ended by {why}"
    )


def _not_cut(why: Any) -> RandomDataError:
    return RandomDataError(
        f"found random samples, and the random steps of the dataset cannot be cut off: {why}. A store keeps what "
        "the dataset returns once, for every epoch: move the random part to Loader(..., transform=...), which "
        "draws again for every sample and epoch; or keep this one draw for all epochs, with "
        "memfeed.cache(dataset, path, allow='random')"
    )


def _require_cut_in_workers(cut: Split, rows: list[int], workers: int) -> None:
    """Raise SplitError if a worker process could not read the cut dataset, which seeds generators there, say."""
    from memfeed.splitting.cut import DrawsOutsideError  # most conversions split nothing

    made = cut.dataset.cut
    kept = [(owner, dict(owner)) for one in (made.dataset, made.marked) for owner in attributes_inside(one)]
    try:
        with made.generators.preserved(), as_worker(0, workers, 0, made.dataset):
            for row in rows:
                made.read(row)
    except DrawsOutsideError as error:
        asked = "in worker processes, where torch.utils.data.get_worker_info() is not None"
        raise SplitError(f"{error}, {asked}") from None
    except Exception as error:  # of a dataset that worker_init_fn prepares: the workers find out
        if is_of_handler(error):
            raise
    finally:
        for owner, before in kept:  # workers are to find the dataset as it was
            owner.clear()
            owner.update(before)


def places_in_turn(dataset: Any) -> dict[tuple[int, str], int]:
    """Return the ints of a dataset, and the lengths of its lists: they change if it gives its samples in turn."""
    return {
        (id(inner), name): value if isinstance(value, int) else len(value)
        for inner in attributes_inside(dataset)
        for name, value in inner.items()
        if type(value) in (int, list, deque)
    }


def moved_in_turn(dataset: Any, places: Mapping[tuple[int, str], int]) -> bool:
    """Return True if one of the ``places_in_turn`` of a dataset differs now."""
    now = places_in_turn(dataset)
    return any(now.get(key, at) != at for key, at in places.items())


class NotReadyError(SampleError, SplitError):
    """No sample can be read yet; the first original exception is the cause."""


def rows_to_prove(length: int, classes: Int64Array | None = None) -> list[int]:
    """Return the indices of randomly chosen samples, the same in each run.

    ``classes`` are those of all samples, if they are known: every other index is of one of the rarest classes, because
    a pipeline may have steps for these.
    """
    rows = random.Random(length).sample(range(length), min(length, ROWS))
    if classes is None:
        return rows
    _, first, counts = np.unique(classes, return_index=True, return_counts=True)
    rare = first[np.argsort(counts, kind="stable")[: len(rows)]].tolist()
    return list(dict.fromkeys(chain(*zip(rows, rare, strict=False), rows)))[: len(rows)]


def _readable(given: Input, options: ConvertOptions, rows: list[int]) -> list[int]:
    """Return the rows whose samples can be read. Raise SampleError for others, unless they are skipped.

    With ``split="auto"`` it is a NotReadyError if the first few all raise.
    """
    found, failed = list[int](), list[SampleError]()
    opened = None if given.watched is None else given.watched.opened
    with random_state.preserved():
        for row in rows:
            try:
                # the first read may open a file that the dataset keeps open
                with contextlib.nullcontext() if opened is None else opened.noticed(row):
                    read_sample(given.dataset, row, Watchdog(0))
            except SampleError as error:
                if options.skips_errors:
                    continue
                failed.append(error)
                if options.split == "auto" and len(failed) == min(_FAILED, len(rows)):
                    raise NotReadyError(
                        f"found that each of the {len(failed)} samples that were read raises ({failed[0]}); expected a "
                        "dataset that is ready when its Loader is made: call what prepares it (sampling negatives, "
                        "opening files) before"
                    ) from failed[0].__cause__
                if options.split == "auto":
                    continue
            else:
                found.append(row)
            if failed:
                raise failed[0]
            if len(found) == 1 and not options.skips_errors:
                return rows  # others are read by the proof
    return found


def with_rest(store: Store, cut: Split) -> Store:
    """Return the store with the rest of the pipeline as its ``transform``, as the dataset has it now."""
    if store._view.recipe != cut.recipe:
        write_line(
            f"memfeed: the random part of the pipeline is not that of {store.path}, which memfeed.open gives: this "
            "store has the dataset's; overwrite=True writes it there too"
        )
        return with_parts(store, transform=cut.transform)
    is_needed = cut.transform.leaf_makers or any(step.name == PER_SAMPLE for step in cut.recipe)
    return with_parts(store, transform=cut.transform) if is_needed else store
