"""Compare a dataset with what was stored of it. Where they differ, say which field and sample, and both values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from memfeed.convert.attributes import classes_of
from memfeed.convert.fingerprint import fingerprint_of, hash_packed
from memfeed.convert.inputs import ConvertOptions, Input, expected_length
from memfeed.convert.probe import ProbeResult, probe_input
from memfeed.errors import SchemaError, StaleStoreError, brief, listed
from memfeed.schema import codec, values
from memfeed.schema.fields import Field, Schema, display
from memfeed.schema.tree import Flattener
from memfeed.store.manifest import Fingerprint
from memfeed.store.store import Store

StoredValue = Callable[[int, int], Any]
"""(sample index, field index) -> the stored value."""

_DRAWN_IN_INIT = (
    ". If the dataset draws values when it is made (a random split, noise, a shuffle in __init__), each process draws "
    "other values: seed it there"
)

_ROUNDED = ("float16", "bfloat16")


def stale(path: Path, difference: str, hint: str = "") -> StaleStoreError:
    """Return the error for a store that differs from its dataset in this way."""
    return StaleStoreError(
        f"{path}: found that the dataset no longer matches what was stored: {difference}{hint}. Give "
        "this dataset a path of its own, or remove the store. With cache(), pass overwrite=True to write it again, or "
        "check=False to take it as it is"
    )


def compare_store(store: Store, given: Input, options: ConvertOptions) -> ProbeResult:
    """Return the samples that were compared with `store`. Raise StaleStoreError if one differs."""
    old = store.manifest.fingerprint if store.manifest else None
    if old is None:
        raise StaleStoreError(
            f"{store.path}: found a store that was not made from a dataset (Writer, or tensordict), so it cannot be "
            f"compared with this one; open it with memfeed.open({str(store.path)!r}), or pass check=False"
            + (" or overwrite=True" if store.manifest else "")
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
    result = probe_input(given, options, [probe.index for probe in old.probes], len(store))
    if given.kind == "iterable" and old.probes:
        found, probed = len(result.probed.samples), len(old.probes)
        if found < probed:
            raise stale(store.path, f"found an iterable of {found} samples, expected {len(store)}")
        if len(store) == probed < found:
            raise stale(store.path, f"found more than {probed} samples in the iterable, expected {probed}")
    require_equal(store.path, store.schema, old, fingerprint_of(given), result, store.stored_value)
    return result


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


def require_equal(
    path: Path, stored: Schema, old: Fingerprint, new: Fingerprint, result: ProbeResult, value: StoredValue | None
) -> None:
    """Raise StaleStoreError unless the samples in `result` are those that were stored. Warn of a changed class source.

    `value` returns stored values for the error message; without it the message has none.
    """
    if old.length != new.length:
        raise stale(path, f"found {new.length} samples, expected {old.length}")
    samples = _flatten(path, stored, result)
    expected = {probe.index: probe.hashes for probe in old.probes}
    for index, leaves in zip(result.probed.indices, samples, strict=True):
        if index not in expected:
            continue
        for field_index, (field, leaf) in enumerate(zip(stored.fields, leaves, strict=True)):
            try:
                packed = codec.pack(field, [leaf], cast=field_index in result.inferred.casts)
            except SchemaError as error:
                raise stale(path, f"field {field.name}, sample {index}: {error}") from None
            if hash_packed(field, packed) != expected[index][field_index]:
                difference = _difference(leaf, value(index, field_index) if value is not None else None)
                raise stale(path, f"field {field.name}, sample {index}: {difference}", _DRAWN_IN_INIT)
    for probe in new.probes:  # all probed rows of columns are hashed, but few of them are read as samples
        for field, found, hashed in zip(
            stored.fields, probe.hashes, expected.get(probe.index, probe.hashes), strict=True
        ):
            if found != hashed:
                raise stale(path, f"field {field.name}, sample {probe.index}: found another value than was stored")
    if old.source != new.source and old.source_name == new.source_name:
        warnings.warn(
            f"{path}: the source of {new.source_name} has changed since this store was made, but the samples compared "
            "are the same; if the change matters for others, write the store again with overwrite=True",
            stacklevel=7,  # the line that called cache()
        )


def _flatten(path: Path, stored: Schema, result: ProbeResult) -> list[list[Any]]:
    """Return the leaves of each sample. Raise StaleStoreError if their fields differ from those stored."""
    found = result.inferred
    # a few samples may have a simpler structure than the many that were stored, whose structure then decides
    flattener = Flattener(stored.structure if found.structure == found.schema.structure else found.structure)
    try:
        samples = [flattener(sample) for sample in result.probed.samples]
    except SchemaError as error:
        raise stale(path, schema_difference(found.schema, stored) or str(error)) from None
    if [field.path for field in found.schema] == [field.path for field in stored]:
        difference = schema_difference(found.schema, stored)
        if difference:
            raise stale(path, difference)
    return samples


def schema_difference(found: Schema, stored: Schema) -> str:
    """Return a sentence that says how the fields of samples differ from those stored, or an empty string."""
    have, want = [f.path for f in found.fields], [f.path for f in stored.fields]
    if have != want:
        if set(have) != set(want):
            new = listed([display(path) for path in have if path not in set(want)], 50)
            gone = listed([display(path) for path in want if path not in set(have)], 50)
            return (
                f"found {f'the fields {new}' if new else 'fewer fields'}; expected {gone or 'none beside the others'}"
            )
        return "found the fields in another order"
    for now, then in zip(found.fields, stored.fields, strict=True):
        if (now.dtype, now.form, now.rank) != (then.dtype, then.form, then.rank) or not _fits(now, then):
            is_rounded = then.dtype in _ROUNDED and now.dtype in ("float32", "float64")
            hint = f", as cache(..., floats=torch.{then.dtype}) gives" if is_rounded else ""
            return f"field {then.name}: found {now.describe()}, expected {then.describe()}{hint}"
    return ""


def _fits(now: Field, then: Field) -> bool:
    """Return True if samples of field `now` can be rows of column `then`."""
    if then.kind in ("str", "bytes", "json") or now.kind in ("str", "bytes", "json"):
        return now.kind == then.kind
    return all(dim is None or dim == have for have, dim in zip(now.shape, then.shape, strict=True))


def _difference(found: Any, expected: Any) -> str:
    """Return both values in short form; for tensors, the first elements that differ."""
    if expected is None:
        return f"found {_brief(found)}, expected another value"
    one, other = values.as_tensor(found), values.as_tensor(expected)
    if one is None or other is None or one.shape != other.shape:
        return f"found {_brief(found)}, expected {_brief(expected)}"
    if one.dtype != other.dtype:
        one = one.to(other.dtype)
    differs = (one != other) & ~((one != one) & (other != other))
    if not bool(differs.any()):
        return f"found other bytes in a value that is equal ({_brief(found)})"
    at = tuple(int(i) for i in torch.nonzero(differs)[0])
    return f"found {one[at].item()} at {list(at)}, expected {other[at].item()} ({int(differs.sum())} elements differ)"


def _brief(value: Any) -> str:
    tensor = values.as_tensor(value)
    if tensor is not None and tensor.ndim:
        return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"
    text = repr(tensor.item() if tensor is not None else value)
    return text if len(text) <= 60 else text[:57] + "..."
