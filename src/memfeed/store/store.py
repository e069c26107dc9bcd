"""An open store: rows, slices, columns, views. What it hands out are copies, except what says it is not."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from memfeed.errors import FieldError, RowError, StoreError
from memfeed.order.orders import permutation
from memfeed.schema.assemble import assembler
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Path as FieldPath
from memfeed.schema.fields import Schema
from memfeed.store import bulk, format, tensordict_dir
from memfeed.store.backing import Backing, open_backing
from memfeed.store.columns import Column, FixedColumn, RaggedColumn, Values
from memfeed.store.format import Manifest
from memfeed.store.gather import Gather, read_row
from memfeed.store.verify import verify
from memfeed.store.views import RaggedView, rows_of
from memfeed.system.buffers import Fresh
from memfeed.system.units import format_bytes


class Samples(list[Any]):
    """A list of samples that knows their row numbers (``ids``) and carries the batch that ``Collate`` would make."""

    ids: Int64Array
    batch: Any


class Store:
    """Rows of samples on disk, memory-mapped. Get one from ``memfeed.open`` or ``memfeed.cache``.

    ``store[3]`` is the sample as the dataset returned it; ``store[2:9]`` and ``store[[4, 1]]`` are batches as
    `default_collate` gives them. Both are copies that belong to the caller. Opening maps nothing; a column is mapped
    when it is first used. If the store is replaced, columns in use keep the old data; the first use of another raises
    StoreError.

    Example::

        store = memfeed.open("ants.mf")
        image, label = store[0]
        train, val = store.split([0.9, 0.1], seed=0)
    """

    def __init__(
        self,
        source: Backing,
        *,
        types: tuple[type, ...] = (),
        numbers: Sequence[int] | None = None,
        rows: Int64Array | None = None,
    ) -> None:
        self._source, self._types, self._rows = source, types, rows
        self._numbers = list(range(len(source.schema))) if numbers is None else list(numbers)
        self.schema: Schema = source.schema if numbers is None else source.schema.select(self._numbers)

    # --- what it is

    @property
    def path(self) -> Path:
        """The directory; "(memory)" for columns that a loader reads in place."""
        return self._source.path or Path("(memory)")

    @property
    def whole(self) -> bool:
        """Whether this is every row, in order: its row numbers are the base store's."""
        return self._rows is None

    @property
    def base_length(self) -> int:
        """Rows of the whole store, of which this may be a view."""
        return len(self) if self._rows is None else self._source.rows or 0

    @cached_property
    def digest(self) -> str:
        """Tells this store and view from others: a hash of the manifest and of which rows these are, in hexadecimal."""
        view = "" if self._rows is None else hashlib.blake2b(self._rows.tobytes(), digest_size=8).hexdigest()
        return f"{self._source.digest[:16]}:{view}" if view else self._source.digest[:16]

    @property
    def types(self) -> tuple[type, ...]:
        """The record classes that samples and batches come back in."""
        return self._types

    @property
    def manifest(self) -> Manifest | None:
        """What memfeed.json says; None for a directory that tensordict wrote."""
        return self._source.manifest

    @property
    def nbytes(self) -> int:
        """Bytes on disk of the selected columns, for all rows of the store."""
        manifest = self._source.manifest
        if manifest is None:
            return sum(tensordict_dir.column_bytes(column) for column in self.columns)
        names = (name for field in self.schema for name in format.column_files(field, 0))
        return sum(manifest.files[name] for name in names)

    @property
    def skipped(self) -> tuple[int, ...]:
        """The dataset's indices that were left out (``on_error="skip"``)."""
        return self._source.manifest.skipped if self._source.manifest else ()

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        if self._source.rows is None:
            raise StoreError(
                f"{self.path}: found a TensorDict with batch_size [], which has no rows; "
                "expected rows to count or load: use column(), tensordict() or select(), or save it with a batch_size"
            )
        return self._source.rows

    def __repr__(self) -> str:
        size = "no rows" if self._source.rows is None else f"{len(self):,} rows"
        shown = [f"  {field.name}: {field.describe()}" for field in self.schema.fields[:20]]
        more = [f"  ... and {len(self.schema) - 20} more"] if len(self.schema) > 20 else []
        return "\n".join([f"Store({str(self.path)!r}, {size}, {format_bytes(self.nbytes)})", *shown, *more])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self.__reduce__() == other.__reduce__()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        # small: where it is and which view; the other process maps the files itself
        if self._source.path is None:
            raise TypeError(
                "found columns in memory, which a pickle would copy; make the loader in the process that uses it, or "
                "cache() them and send the store"
            )
        rows = None if self._rows is None else self._rows.tobytes()
        return _reopen, (str(self.path), self._source.digest, tuple(self._numbers), rows, self._types)

    # --- reading

    @cached_property
    def columns(self) -> list[Column]:
        """The selected columns, in the schema's order: what a loader plans from."""
        return [self._source.column(number) for number in self._numbers]

    @cached_property
    def assemble_sample(self) -> Callable[[Sequence[Any]], Any]:
        """Puts one leaf per field together as a sample."""
        return assembler(self.schema.structure, self._types, batched=False)

    @cached_property
    def assemble_batch(self) -> Callable[[Sequence[Any]], Any]:
        """Puts one leaf per field together as a batch."""
        return assembler(self.schema.structure, self._types, batched=True)

    @cached_property
    def _gather(self) -> Gather:
        return Gather(self.columns, [Fresh()] * len(self.columns))

    def base_rows(self, ids: Int64Array) -> Int64Array:
        """Rows of this view as rows of the whole store. Raises RowError for one out of range."""
        n = len(self)
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < n):
            bad = int(ids[int(((ids < 0) | (ids >= n)).argmax())])
            raise RowError(f"found row {bad}; expected 0 to {n - 1} (the store has {n} rows)")
        return ids if self._rows is None else self._rows[ids]

    def stored_value(self, index: int, number: int) -> Any:
        """What was stored of the dataset's sample ``index`` in field ``number``."""
        row = index - sum(skipped < index for skipped in self.skipped)
        return read_row(self.columns[number], row)

    def gather(self, ids: Int64Array) -> Any:
        """The batch of the rows ``ids`` (int64 [k], not negative), in new memory that belongs to the caller."""
        return self.assemble_batch(self._gather(self.base_rows(ids)))

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return self.gather(np.arange(*which.indices(len(self)), dtype=np.int64))
        if isinstance(which, str):
            raise FieldError(f"found the index {which!r}; rows have numbers: for a field use column({which!r})")
        if isinstance(which, list | tuple | range | np.ndarray | torch.Tensor) and np.ndim(which) > 0:
            return self.gather(self._ids(which))
        try:
            row = operator.index(which)
        except TypeError:
            raise RowError(
                f"found {type(which).__name__} as an index; expected an int, a slice, or a list, tensor or array of "
                "ints or bools"
            ) from None
        n = len(self)
        if not -n <= row < n:
            raise RowError(f"found row {row}; expected {-n} to {n - 1} (the store has {n} rows)")
        base = self.base_rows(np.array([row % n], np.int64))
        return self.assemble_sample([read_row(column, int(base[0])) for column in self.columns])

    def _ids(self, which: Any) -> Int64Array:
        try:
            array = np.asarray(which)
        except ValueError:
            raise RowError("found indices of unequal lengths; expected ints in one dimension") from None
        if array.dtype == np.bool_:
            if array.shape != (len(self),):
                raise RowError(f"found a mask of shape {array.shape}; expected ({len(self)},), one bool per row")
            return np.flatnonzero(array)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise RowError(f"found indices {array.dtype} {list(array.shape)}; expected ints in one dimension")
        array = array.astype(np.int64)
        low = int(array.min()) if len(array) else 0
        if low < -len(self):
            raise RowError(f"found row {low}; expected {-len(self)} to {len(self) - 1}")
        return np.where(array < 0, array + len(self), array)

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __getitems__(self, ids: Sequence[int]) -> Samples:
        """What `torch.utils.data.DataLoader` calls: the samples, read in one go; they share one batch's memory."""
        rows = self._ids(list(ids))
        base = self.base_rows(rows)
        leaves = self._gather(base)
        columns = [rows_of(column, leaf) for column, leaf in zip(self.columns, leaves, strict=True)]
        samples = Samples(self.assemble_sample(row) for row in zip(*columns, strict=True))
        samples.ids, samples.batch = base, self.assemble_batch(leaves)
        return samples

    def column(self, which: str | int | FieldPath) -> Any:
        """One column without a copy: a tensor [n, *shape] over the private map (edits stay in this process).

        A ragged column comes as a sequence of views (str, bytes and json: of values). A subset that is one run of rows
        is a view too; the rows of any other subset are copied.
        """
        number = self.schema.field_index(which)
        column = self.columns[number]
        if isinstance(column, FixedColumn):
            if self._rows is None:
                return column.data
            rows = self._rows
            if len(rows) and (np.diff(rows) == 1).all():
                return column.data[int(rows[0]) : int(rows[-1]) + 1]
            return column.data[torch.from_numpy(rows)]
        if isinstance(column, Values) and self._rows is None:
            return column.values
        rows = np.arange(column.rows, dtype=np.int64) if self._rows is None else self._rows
        return RaggedView(column, rows, self._source)

    def tensordict(self) -> TensorDictBase:
        """The store as a TensorDict of batch_size [n] over the private maps; ragged columns as their start and dims.

        The keys are those of `TensorDict.load_memmap(path)`. Rows of a subset are copied.
        """
        if self._source.manifest is None:
            whole: TensorDictBase = self.assemble_batch(
                [tensordict_dir.whole_column(column) for column in self.columns]
            )
            return whole if self._rows is None else whole[torch.from_numpy(self._rows)]
        tree = TensorDict({}, batch_size=[self._source.rows])
        for field, column in zip(self.schema, self.columns, strict=True):
            keys = tuple(field.stem.split("/"))
            if isinstance(column, FixedColumn):
                tree[keys] = column.data
            elif isinstance(column, RaggedColumn):
                tree[keys] = {"start": column.start, "dims": column.dims}
        return tree if self._rows is None else tree[torch.from_numpy(self._rows)]

    # --- elsewhere

    def to(self, device: torch.device | str, *, progress: bool = True) -> Any:
        """All rows on a device, as one batch: what ``store[:]`` gives, but never through more than a chunk of RAM.

        A TensorDict of weights, which has no rows, comes as it is. The memory is the caller's. ``progress`` shows a bar
        on stderr. Raises LoaderError for a device that is not there, StoreError where the fields of fixed size do not
        fit into what a CUDA device has free.

        Example::

            images, labels = memfeed.open("ants.mf").to("cuda")
        """
        return self.assemble_batch(bulk.load(self.columns, self._all(), device, self.path.name, progress=progress))

    def into(self, dest: Any, *, strict: bool = True) -> bulk.Unfilled:
        """Fills tensors that are there already, on any device, with all rows, chunk by chunk.

        Args:
            dest: tensors [n, *shape] (for weights [*shape]) of the store's dtypes, in a TensorDict, dict, list or any
                nesting of those, or a module's ``state_dict()``: a field belongs where its path leads, or under its
                name, which is its path joined by dots.
            strict: both sides must have the same fields; otherwise those that both have are filled.

        Returns:
            ``(missing_keys, unexpected_keys)``: fields that ``dest`` has no place for, and tensors left as they were.

        Raises:
            FieldError: fields on one side only, of another shape or dtype, or of varying length; nothing was written.

        Example::

            memfeed.open("weights.mf").into(model.state_dict())
        """
        return bulk.into(self.columns, self._all(), dest, str(self.path), strict=strict)

    def _all(self) -> Int64Array:
        """Every row, by its number in the whole store; none where there are no rows to tell apart."""
        return np.empty(0, np.int64) if self._source.rows is None else self.base_rows(np.arange(len(self)))

    # --- views

    def select(self, *which: str | int | FieldPath) -> Store:
        """This store with only some fields; containers stay, a tuple or record that misses some becomes a dict."""
        if not which:
            raise FieldError(f"select() was given no field; this store has: {self.schema.names()}")
        kept = sorted({number for name in which for number in self.schema.field_indices(name)})
        return self._view(numbers=[self._numbers[number] for number in kept])

    def subset(self, rows: Any) -> Store:
        """The rows given (ints, or a mask of bools), in that order, as a store of its own; nothing is copied."""
        return self._view(rows=self.base_rows(self._ids(rows)))

    def split(self, parts: Sequence[float], *, seed: int = 0) -> list[Store]:
        """Disjoint random subsets that cover every row: fractions that sum to 1, or counts that sum to n.

        As `torch.utils.data.random_split`: a remainder of rounding goes to the first parts, one row each.
        """
        n, parts = len(self), [getattr(part, "item", lambda part=part: part)() for part in parts]
        total = sum(parts)
        if not parts or min(parts) < 0:
            raise ValueError(f"found parts {list(parts)}; expected fractions or counts, none negative")
        if all(isinstance(part, int) for part in parts) and total == n:
            counts = [int(part) for part in parts]
        elif abs(total - 1) < 1e-6:
            counts = [int(n * part) for part in parts]
            for i in range(n - sum(counts)):
                counts[i % len(counts)] += 1
        else:
            raise ValueError(f"found parts that sum to {total}; expected fractions that sum to 1, or counts to {n}")
        drawn = permutation(n, seed, 0)
        edges = np.cumsum([0, *counts])
        return [self.subset(drawn[a:b]) for a, b in pairwise(edges)]

    def _view(self, *, numbers: Sequence[int] | None = None, rows: Int64Array | None = None) -> Store:
        return Store(
            self._source,
            types=self._types,
            numbers=self._numbers if numbers is None else numbers,
            rows=self._rows if rows is None else rows,
        )

    # --- trust

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Reads every byte and compares it with the checksums; raises CorruptStoreError naming field, rows and file.

        ``progress`` is called with (bytes done, bytes in all).
        """
        if self._source.manifest is None:
            raise StoreError(
                f"{self.path}: found a directory that tensordict wrote, which has no checksums; "
                "its sizes were checked when it was opened: cache(..., copy_existing=True) makes a store that has them"
            )
        try:
            verify(self.path, self._source.manifest, progress)
        finally:
            self._source.check()  # else what was found may be of a store that has taken its place


def open_store(path: str | os.PathLike[str], *, types: Iterable[type] = (), owner: object = None) -> Store:
    """See ``memfeed.open``; ``owner`` lives as long as the store and all its views do."""
    return Store(open_backing(Path(path), owner), types=(types,) if isinstance(types, type) else tuple(types))


def open(
    path: str | os.PathLike[str],
    *,
    fields: Iterable[str | int | FieldPath] | None = None,
    types: Iterable[type] = (),
) -> Store:
    """Opens a memfeed store, or any directory written by `TensorDict.memmap()`, in milliseconds whatever its size.

    The manifest and the size of every file are checked first; nothing is mapped and no class is imported by name.
    ``types`` are the namedtuple, dataclass and tensorclass classes to give samples back in: without them a
    namedtuple comes back as an equal generated one, a dataclass as a dict, a tensorclass as a TensorDict. ``fields``
    opens only some.

    Raises StoreError for what is no store (or one of a newer format), CorruptStoreError for a damaged one, FieldError
    for a field that is not there.
    """
    store = open_store(path, types=types)
    return store if fields is None else store.select(*([fields] if isinstance(fields, str) else fields))


def _reopen(path: str, digest: str, numbers: tuple[int, ...], rows: bytes | None, types: tuple[type, ...]) -> Store:
    store = open_store(path, types=types)
    if store._source.digest != digest:
        raise StoreError(
            f"{path}: found another store than the one that was sent here (manifest {store._source.digest[:8]}, "
            f"expected {digest[:8]}): it was rebuilt meanwhile; open it again"
        )
    ids = None if rows is None else np.frombuffer(bytearray(rows), np.int64)
    return Store(store._source, types=types, numbers=numbers, rows=ids)
