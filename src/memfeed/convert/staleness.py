"""Compare a dataset with what was stored of it. Where they differ, say which field and sample, and both values."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from memfeed.convert.changes import Watched, differences, shown
from memfeed.convert.digests import chosen
from memfeed.convert.fingerprint import (
    ROUNDING,
    classes_of,
    fingerprint_of,
    hash_packed,
    targets_of,
)
from memfeed.convert.forms import Forms, Shape, asked_codings, codings_of, lossy_before
from memfeed.convert.inputs import Input, expected_length, read_sample
from memfeed.convert.options import ConvertOptions
from memfeed.convert.probe import ProbeResult, probe_input, spread
from memfeed.convert.recode import shapes_in
from memfeed.convert.source_hash import is_changed_source
from memfeed.convert.watchdog import Watchdog
from memfeed.errors import SampleError, SchemaError, StaleStoreError, brief, listed
from memfeed.schema import codec
from memfeed.schema.compare import describe_difference, describe_value, leaves_like, rows_equal
from memfeed.schema.fields import Schema
from memfeed.schema.tree import Flattener
from memfeed.store.backing import Backing
from memfeed.store.manifest import Fingerprint
from memfeed.store.store import Store
from memfeed.store.view import View
from memfeed.system import random_state
from memfeed.system.messages import warn

COMPARE_SECONDS = 1.0  # of reading rows, where only settings of the dataset differ
CHECK_SECONDS = 0.05  # of reading rows when an epoch begins
MOST_CHECKED = 3
READ_SECONDS = 0.35  # of reading rows where an attribute has changed, to find out if reads change it
FEWEST_READS, MOST_READS = 8, 256

_DRAWN_IN_INIT = (
    ". If the dataset draws values when it is made (a random split, noise, a shuffle in __init__), each process draws "
    "other values: seed it there"
)


def stale(path: Path, difference: str, hint: str = "") -> StaleStoreError:
    """Return the error for a store that differs from its dataset in this way."""
    return StaleStoreError(
        f"{path}: found that the dataset no longer matches what was stored: {difference}{hint}. Give "
        "this dataset a path of its own, or remove the store. With cache(), pass overwrite=True to write it again, "
        "or take it as it is: memfeed.open(path)"
    )


def compare_store(store: Store, given: Input, options: ConvertOptions, *, is_damaged: bool = False) -> ProbeResult:
    """Return the samples that were compared with `store`. Raise StaleStoreError if one differs.

    They are compared by their hashes; of a store that `is_damaged` no row is read.
    """
    old = store._view.manifest.fingerprint if store._view.manifest else None
    if old is None:
        raise StaleStoreError(
            f"{store.path}: found a store that was not made from a dataset (Writer, or tensordict), so it cannot be "
            f"compared with this one; open it with memfeed.open({str(store.path)!r})"
            + (", or pass overwrite=True" if store._view.manifest else "")
        )
    if old.length != given.length:
        raise stale(store.path, f"found {given.length} samples, expected {old.length}")
    _require_equal_attributes(store, given, options)
    expected = expected_length(given, options.length)
    if given.kind == "iterable" and expected not in (None, len(store)):
        raise stale(store.path, f"found length={expected}, expected the {len(store)} samples of the store")
    names = [field.name for field in store.schema]
    if options.fields is not None and not isinstance(options.fields, Mapping) and list(options.fields) != names:
        raise stale(store.path, f"found fields={brief(list(options.fields), 60)}, expected {brief(names, 60)}")
    if store._view.manifest is not None and options.forms.has_codecs:
        require_forms(store.path, store._view.manifest.schema, options.forms, shapes_in(store))
        _require_no_loss(store, options.forms)
    result = probe_input(given, options, [probe.index for probe in old.probes], len(store))
    if given.kind == "iterable" and old.probes:
        found, probed = len(result.probed.samples), len(old.probes)
        if found < probed:
            raise stale(store.path, f"found an iterable of {found} samples, expected {len(store)}")
        if len(store) == probed < found:
            raise stale(store.path, f"found more than {probed} samples in the iterable, expected {probed}")
    require_equal(store.path, store.schema, old, fingerprint_of(given), result, store)
    require_equal_data(store.path, old, given, store, compares_rows=not is_damaged)
    return result


def require_forms(path: Path, stored: Schema, forms: Forms, shapes: Sequence[Shape] | None = None) -> None:
    """Raise StaleStoreError if ``forms`` says that fields are coded in another way than those of ``stored`` are.

    ``shapes`` are those of some rows, see `asked_codings`.
    """
    if not forms.has_codecs:
        return
    found, names = codings_of(stored), {field.path: field.name for field in stored}
    for at, asked in asked_codings(stored.decoded, forms, shapes).items():
        if asked == found[at]:
            continue
        raise StaleStoreError(
            f"{path}: found a store whose field {names[at]} is {found[at]}; expected {asked}, as forms= says: "
            "leave forms= out to take the store as it is, write another one with memfeed recode, or make it again with "
            "overwrite=True"
        )


def _require_no_loss(store: Store, forms: Forms) -> None:
    """Raise StaleStoreError if a form without loss was asked for, and a lossy one changed the rows before."""
    assert store._view.manifest is not None
    asked = asked_codings(store.schema, forms, shapes_in(store))
    for index in sorted(lossy_before(store._view.manifest)):
        if (at := store.schema.fields[index].path) in asked:
            raise StaleStoreError(
                f"{store.path}: found field {store.schema.fields[index].name} stored as {asked[at]} by memfeed.recode, "
                "after JPEG had changed its pixels; expected those of the dataset, as forms= says: leave forms= out to "
                "take the store as it is, or make it again with overwrite=True"
            )


def _require_equal_attributes(store: Store, given: Input, options: ConvertOptions) -> None:
    """Raise StaleStoreError if the dataset has other classes than were kept, or the user passes other metadata."""
    if options.metadata is not None and options.metadata != store.metadata:
        keys = {*options.metadata, *store.metadata}
        differing = sorted(key for key in keys if options.metadata.get(key, ...) != store.metadata.get(key, ...))
        raise StaleStoreError(
            f"{store.path}: found metadata= that differs from that of the store in {listed(differing)}; expected the "
            "same: leave metadata= out to open the store as it is, or pass overwrite=True to write it again"
        )
    for name, found in zip(("classes", "class_to_idx"), classes_of(given.dataset), strict=True):
        kept = getattr(store, name, None)
        if found is None or kept is None or found == (tuple(kept) if name == "classes" else kept):
            continue
        other = next((one for one in found if one not in kept), None)
        raise stale(
            store.path,
            f"found {name} of {len(found)} entries, expected the {len(kept)} that were kept, in their order"
            + (f" ({brief(other)} is new)" if other is not None else ""),
        )


def require_equal_data(
    path: Path, old: Fingerprint, given: Input, store: Store | None, *, compares_rows: bool = True
) -> None:
    """Raise StaleStoreError if the data in the dataset's attributes differ from those stored; see `digests`.

    Where only settings differ, rows of a store are compared for a second, and a warning is given if they agree. Those
    of a build, whose `store` is None, are compared before its commit, those of a damaged store while it is repaired.
    """
    if given.watched is None or old.digests is msgspec.UNSET:
        return
    data, settings = differences(old.digests, given.watched.digests())
    place = _differing_target(store, given) if store is not None and data else ""
    if data:
        raise stale(path, f"found other values in {listed([shown(one) for one in data])}{place}")
    if not settings or store is None or not compares_rows:
        return
    found = listed([shown(one) for one in settings])
    difference = None
    if given.kind == "map" and old.probes and given.length is not None:
        difference = _differing_row(store, given, spread(chosen(given.length)), time.monotonic() + COMPARE_SECONDS)
        given.watched.forget_what_reading_changes()  # a cache that was full of other samples
    if difference:
        raise stale(path, f"{difference} (and {found} differs from then)")
    warn(
        f"{path}: {found} differs from what the dataset had when this store was made, but the samples compared are the "
        "same; if the change matters for others, write the store again with overwrite=True"
    )


def _differing_target(store: Store, given: Input) -> str:
    """Return which of the targets that the store keeps is the first that differs; "" if that is not known."""
    kept = store._view.manifest.attributes if store._view.manifest else None
    found = targets_of(given.dataset, given.length or 0)
    if not kept or kept.targets is None or found is None:
        return ""
    indices = np.delete(np.arange(len(found[0])), np.array(store._view.skipped, np.int64))
    now, then = found[0][indices], np.asarray(store._kept_targets)
    differing = np.flatnonzero(now != then).tolist() if now.shape == then.shape else []
    if not differing:
        return ""
    row = differing[0]
    return (
        f": {len(differing):,} of {len(now):,} targets, the first of sample {indices[row]}: found {now[row]}, expected "
        f"{then[row]}"
    )


def _differing_row(store: Store, given: Input, indices: Sequence[int], end: float) -> str | None:
    """Return how the first of these samples differs from its row, floats up to rounding; None if none does until `end`.

    Reads the dataset in this thread, and keeps the global generators as they are. Skips samples that raise.
    """
    assert given.watched is not None
    inferred, schema, watchdog = given.watched.inferred, store.schema, Watchdog(0)
    flattener = Flattener(inferred.structure_like(schema))
    skipped, columns = set(store._view.skipped), store._view.columns
    lossy = lossy_before(store._view.manifest)
    changed = {at for at, field in enumerate(store._view.fields) if field in lossy}
    with random_state.preserved(), watchdog.watch():
        for index in indices:
            if index in skipped:
                continue
            with store._view.present_now(np.array([index])) as present:
                if not present[0]:  # of a store that is being filled
                    continue
            try:
                leaves = flattener(read_sample(given.dataset, index, watchdog))
                for field_index, (field, leaf) in enumerate(zip(schema, leaves, strict=True)):
                    if field_index in changed:
                        continue  # such a row is not the sample
                    stored, coded = stored_value(store, index, field_index), columns[field_index].stored.field
                    # a lossy codec changes the sample as it changed the row
                    found = codec.decoded_row(coded, codec.pack(coded, [leaf], cast=field_index in inferred.casts))
                    if not rows_equal(field, found, codec.pack(field, [stored]), ROUNDING):
                        return f"field {field.name}, sample {index}: {describe_difference(leaf, stored)}"
            except SampleError:
                continue
            except SchemaError as error:
                return f"sample {index}: {error}"
            if time.monotonic() > end:
                break
    return None


def stored_value(store: Store, source_index: int, field_index: int) -> Any:
    """Return the stored value of field ``field_index`` for the dataset's sample ``source_index``."""
    row = source_index - sum(skipped < source_index for skipped in store._view.skipped)
    return store._view.columns[field_index].read_row(row)


def require_unchanged(given: Input, options: ConvertOptions, is_cut: bool, backing: Backing) -> None:
    """Raise StaleStoreError if the dataset has changed since its loader was made. Called when an epoch begins.

    All attributes are compared, large ones by some of their values, the number of samples, and up to `MOST_CHECKED`
    samples with their rows, if they are read within `CHECK_SECONDS` or a hundredth of the time since the last epoch
    began. An attribute that another read of a sample changes too is no setting: steps keep there what they drew.
    ``is_cut`` says that the rest of the dataset's pipeline is applied to batches.
    """
    watched = given.watched
    assert watched is not None
    found = watched.changed(_reads(watched.dataset, given.length or 0) if given.kind == "map" else None)
    if found is None and given.kind == "map" and (length := len(watched.dataset)) != given.length:
        found = f"found {length} samples, expected {given.length}", False
    if found is None and given.kind == "map" and watched.inferred is not None and not options.allow_random:
        rows, is_first = _rows_to_check(given, watched), watched.checks == 1
        if is_first and backing.supply is not None and backing.supply.in_caller:
            _read_one(watched.dataset, rows[0])  # the epoch will read in this process too
        difference = _differing_row(Store(View(backing)), given, rows, math.inf)
        if rows:  # hashing once more takes as long as the first time
            watched.forget_what_reading_changes()
        watched.close_opened()  # the dataset may be sent to the workers of another loader
        found = None if difference is None else (difference, False)
    if found is None:
        if watched.filled:
            names = listed([shown(name) for name in watched.filled])
            warn(
                f"{backing.path}: {names} was None or empty when the loader was made, and has content now. If samples "
                "depend on it, as on new labels, the store gives what was read before: Loader(dataset, "
                "cache='NEW_PATH'). What reading fills, as a cache, may stay"
            )
        return
    difference, is_pipeline = found
    hint = (
        "Its random part was taken when the loader was made: make a new Loader, with a new path if the rest changed"
        if is_pipeline and is_cut
        else "Give the changed dataset a store of its own, Loader(dataset, cache='NEW_PATH'), or move what changes "
        "from epoch to epoch to Loader(..., transform=...), or read a dataset that changes in every epoch by a "
        "DataLoader. What no sample depends on, such as a counter of the collate_fn, belongs outside of the dataset, "
        "and in no variable that its methods read: collate_fn=Batches(), a class of its own with __call__"
    )
    raise StaleStoreError(
        f"{backing.path}: found that the dataset has changed since its loader was made: {difference}; expected the "
        f"same in every epoch, because the store gives what was read first. {hint}"
    )


def _reads(dataset: Any, length: int) -> Iterator[int]:
    """Read one sample after another, under other seeds, for a while. Yield the seed of each."""
    end = time.monotonic() + READ_SECONDS
    for seed in range(MOST_READS if length else 0):
        if seed < FEWEST_READS or time.monotonic() < end:
            _read_one(dataset, seed % length, seed)
            yield seed


def _read_one(dataset: Any, index: int, seed: int = 0) -> None:
    with random_state.seeded(seed), contextlib.suppress(SampleError, SchemaError):
        read_sample(dataset, index, Watchdog(0))


def _rows_to_check(given: Input, watched: Watched) -> list[int]:
    """Return other samples for each epoch, at first one at least."""
    assert given.length is not None
    now = time.monotonic()
    seconds = CHECK_SECONDS if watched.checked_at is None else max(CHECK_SECONDS, (now - watched.checked_at) / 100)
    count = min(MOST_CHECKED, int(seconds / max(watched.seconds, 1e-6)), given.length)
    if watched.checked_at is None:
        count = max(count, 1)
    watched.checked_at, watched.checks = now, watched.checks + 1
    names = (f"{watched.checks} {i}".encode() for i in range(count))
    return [xxhash.xxh3_64_intdigest(name) % given.length for name in names]


def require_equal(
    path: Path, stored: Schema, old: Fingerprint, new: Fingerprint, result: ProbeResult, store: Store | None
) -> None:
    """Raise StaleStoreError unless the samples in `result` are those that were stored. Warn of a changed class source.

    The error message has the value of `store` too, unless that is None.
    """
    if old.length != new.length:
        raise stale(path, f"found {new.length} samples, expected {old.length}")
    try:
        samples = leaves_like(result.probed.samples, result.inferred, stored)
    except SchemaError as error:
        raise stale(path, str(error)) from None
    expected = {probe.index: probe.hashes for probe in old.probes}
    for index, leaves in zip(result.probed.indices, samples, strict=True):
        if index not in expected:
            continue
        try:
            packed = codec.pack_sample(stored, leaves, result.inferred.casts, index)
        except SchemaError as error:
            raise stale(path, str(error)) from None
        for field_index, (field, leaf) in enumerate(zip(stored, leaves, strict=True)):
            if hash_packed(field, packed[field_index]) != expected[index][field_index]:
                difference = f"found {describe_value(leaf)}, expected another value"
                if store is not None:
                    difference = describe_difference(leaf, stored_value(store, index, field_index))
                raise stale(path, f"field {field.name}, sample {index}: {difference}", _DRAWN_IN_INIT)
    for probe in new.probes:  # all probed rows of columns are hashed, but few of them are read as samples
        hashes = zip(stored, probe.hashes, expected.get(probe.index, probe.hashes), strict=True)
        for field, found, hashed in hashes:
            if found != hashed:
                raise stale(path, f"field {field.name}, sample {probe.index}: found another value than was stored")
    if is_changed_source(old.source, new.source) and old.source_name == new.source_name:
        warn(
            f"{path}: the source of {new.source_name}, or of what it calls, has changed since this store was made, but "
            "the samples compared are the same; if the change matters for others, write the store again with "
            "overwrite=True"
        )
