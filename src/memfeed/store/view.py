"""The fields and rows that a store shows of its backing, for code that reads rows of the base store."""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfeed.errors import RowError, StoreError, brief
from memfeed.schema.assemble import assembler
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Schema
from memfeed.schema.recipe import RecipeStep
from memfeed.schema.samples import SampleMaker
from memfeed.store.backing import Backing, open_backing
from memfeed.store.columns import Column
from memfeed.store.gather import Gather
from memfeed.store.manifest import Manifest
from memfeed.store.ragged import column_files
from memfeed.store.row_supply import FillProgress, ReadRequest, RowSupply
from memfeed.system.buffers import Fresh

_AT_ONCE = contextlib.nullcontext()


class View:
    """Some fields and rows of a backing.

    Args:
        backing: the columns of the base store.
        types: the record classes of samples and batches.
        fields: the fields that are shown, by index; None for all.
        rows: the rows of the base store that are shown, in order, int64 [n]; None for all.
    """

    def __init__(
        self,
        backing: Backing,
        types: tuple[type, ...] = (),
        fields: Sequence[int] | None = None,
        rows: Int64Array | None = None,
    ) -> None:
        self.backing, self.types, self.rows = backing, types, rows
        self.fields = list(range(len(backing.schema))) if fields is None else list(fields)
        self._has_all_fields = fields is None
        self.schema: Schema = backing.schema if fields is None else backing.schema.select(self.fields)
        backing.views[id(self)] = self

    def renew(self) -> None:
        """Read the columns that the backing has now."""
        self.schema = self.backing.schema if self._has_all_fields else self.backing.schema.select(self.fields)
        for name in ("columns", "window_paths", "sample_maker", "assemble_batch", "gather"):
            self.__dict__.pop(name, None)

    @property
    def path(self) -> Path:
        """The directory; "(memory)" for columns that a loader reads in place."""
        return self.backing.path or Path("(memory)")

    @property
    def manifest(self) -> Manifest | None:
        """The content of memfeed.json, or what is known of it while the store is filled.

        None for a directory that tensordict wrote.
        """
        return self.backing.manifest

    @property
    def recipe(self) -> tuple[RecipeStep, ...]:
        """The steps of `Store.transform` as the manifest describes them; () without one."""
        manifest = self.manifest
        return (manifest.attributes.transform or ()) if manifest is not None and manifest.attributes else ()

    @property
    def skipped(self) -> tuple[int, ...]:
        """The dataset indices of samples that were left out (``on_error="skip"``)."""
        return self.manifest.skipped if self.manifest else ()

    def check_dataset(self) -> None:
        """Raise StaleStoreError if the dataset that this store was made of for a `Loader` has changed since.

        Nothing is compared where that dataset is not at hand: for a store that was opened, and in another process.
        """
        self.backing.check_dataset(self.backing)

    # --- rows

    def __len__(self) -> int:
        if self.rows is not None:
            return len(self.rows)
        if self.backing.row_count is None:
            raise StoreError(
                f"{self.path}: found a TensorDict with batch_size [], which has no rows; "
                "expected rows to count or load: use column(), tensordict() or select(), or save it with a batch_size"
            )
        return self.backing.row_count

    @property
    def has_all_rows(self) -> bool:
        """True if this has every row, in order: its row numbers are those of the base store."""
        return self.rows is None

    @property
    def has_repeated_rows(self) -> bool:
        """True if this has a row of the base store more than once."""
        if self.rows is None or bool((np.diff(self.rows) > 0).all()):
            return False
        return len(np.unique(self.rows)) < len(self.rows)

    @property
    def base_length(self) -> int:
        """How many rows the base store has."""
        return len(self) if self.rows is None else self.backing.row_count or 0

    def base_rows(self, ids: Int64Array) -> Int64Array:
        """Convert rows of this view to rows of the base store. Raises RowError for one out of range."""
        check_range(ids, len(self))
        return ids if self.rows is None else self.rows[ids]

    def all_rows(self) -> Int64Array:
        """Return every row, by its number in the base store; an empty array for weights, which have no rows."""
        return np.empty(0, np.int64) if self.backing.row_count is None else self.base_rows(np.arange(len(self)))

    def digest(self) -> str:
        """Return the digest of the manifest and of the row numbers, in hexadecimal: it differs for every view.

        While the store is filled it is the ``source_digest``.
        """
        return self._with_rows(self.backing.digest)

    def source_digest(self) -> str:
        """Return a hash of the dataset and of the row numbers, in hexadecimal: the ``digest`` while it is filled.

        It is the same for every conversion of the dataset, whose bytes may be in another order, and for views of it.
        Where samples were skipped, a dash and a hash of their numbers follow. Where the dataset is not known, it is the
        ``digest``.
        """
        if self.backing.source is None:
            return self.digest()
        skipped = hashlib.blake2b(repr(self.skipped).encode(), digest_size=4).hexdigest() if self.skipped else ""
        return self._with_rows(self.backing.source) + (f"-{skipped}" if skipped else "")

    def _with_rows(self, digest: str) -> str:
        return f"{digest[:16]}:{self._rows_hash}" if self._rows_hash else digest[:16]

    @cached_property
    def _rows_hash(self) -> str:
        return "" if self.rows is None else hashlib.blake2b(self.rows.tobytes(), digest_size=8).hexdigest()

    # --- columns

    @cached_property
    def columns(self) -> list[Column]:
        """The selected columns, in the schema's order. A loader plans from them."""
        return [self.backing.column(index) for index in self.fields]

    @cached_property
    def window_paths(self) -> frozenset[tuple[str | int, ...]]:
        """The paths of the fields that are windows, [steps, *shape]."""
        return frozenset(column.field.path for column in self.columns if column.base is not column)

    @cached_property
    def sample_maker(self) -> SampleMaker:
        """Builds samples from one leaf per field, of one row or of a batch."""
        return SampleMaker(self.schema, self.types)

    @cached_property
    def assemble_batch(self) -> Callable[[Sequence[Any]], Any]:
        """A function that builds a batch from one leaf per field."""
        forms = [field.form for field in self.schema]
        return assembler(self.schema.structure, self.types, batched=True, forms=forms)

    @cached_property
    def gather(self) -> Gather:
        """Gathers rows of the base store into new memory."""
        return Gather(self.columns, [Fresh()] * len(self.columns))

    def field_bytes(self) -> list[int]:
        """Return the bytes on disk of every field, for all rows of the base store, in the order of the schema."""
        if self.manifest is None:
            return [column.nbytes for column in self.columns]
        # the mask of a window has no file
        stored = [column.stored.field for column in self.columns]
        return [sum(self.manifest.files.get(name, 0) for name in column_files(field, 0)) for field in stored]

    # --- rows that are not there yet

    @property
    def supply(self) -> RowSupply | None:
        """The source of the rows of a store that is being filled; None for a finished one."""
        return self.backing.supply

    def progress(self) -> FillProgress:
        """Return how many rows can be read, of how many, of the base store."""
        if self.supply is not None:
            return self.supply.progress()
        total = self.backing.row_count or 0
        return FillProgress(total, total)

    def require_filled(self, what: str) -> None:
        """Raise StoreError for what needs all rows while some are absent."""
        if self.supply is not None:
            found = self.progress()
            raise StoreError(
                f"{self.path}: found {what} of a store that is being filled ({found.present:,} of {found.total:,} rows "
                "are there); expected a finished one: call store.finish() first, which waits for it"
            )

    def reader(self) -> ReadRequest:
        """Return a new reader of the fields of this view, for its ``supply``; see ``ReadRequest``."""
        return ReadRequest(self.fields)

    def present(self, base_rows: Int64Array) -> contextlib.AbstractContextManager[None]:
        """Wait until rows are there; they stay within the block. Raises RowError for one that was skipped."""
        return _AT_ONCE if self.supply is None else self._supplied(self.supply, base_rows)

    @contextlib.contextmanager
    def present_now(self, base_rows: Int64Array) -> Iterator[npt.NDArray[np.bool_]]:
        """Say which rows are there, bool [k], without waiting for any; those stay within the block."""
        supply, reader = self.supply, self.reader()
        if supply is None:
            yield np.ones(len(base_rows), bool)
            return
        try:
            yield supply.ready(reader, base_rows)
        finally:
            supply.forget(reader)

    @contextlib.contextmanager
    def _supplied(self, supply: RowSupply, base_rows: Int64Array) -> Iterator[None]:
        reader = self.reader()
        try:
            present = supply.wait(reader, base_rows)
            if present is not None:
                raise RowError(
                    f"{self.path}: found row {int(base_rows[int(present.argmin())])}, for which the dataset raised; "
                    "expected a row that was written: a Loader masks such rows"
                )
            yield
        finally:
            supply.forget(reader)

    # --- in other processes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self.__reduce__() == other.__reduce__()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        # small: the path and the rows; the other process maps the files itself
        backing, rows = self.backing, None if self.rows is None else self.rows.tobytes()
        if backing.remake is None and backing.path is None:
            raise TypeError(
                "found columns in memory, which a pickle would copy; expected a store on disk: cache() them and send "
                "the store, or make the loader in the process that uses it"
            )
        remake = backing.remake or (_reopened, (str(backing.path), backing.digest))
        return _remade, (*remake, backing.transform, self.types, tuple(self.fields), rows)


def _reopened(path: str, digest: str) -> Backing:
    backing = open_backing(Path(path))
    if backing.digest != digest:
        raise StoreError(
            f"{path}: found another store than the one that was sent here (manifest {backing.digest[:8]}, "
            f"expected {digest[:8]}): it was rebuilt meanwhile; open it again"
        )
    return backing


def _remade(
    make: Callable[..., Backing],
    arguments: tuple[Any, ...],
    transform: Any,
    types: tuple[type, ...],
    fields: tuple[int, ...],
    rows: bytes | None,
) -> View:
    backing = make(*arguments)
    backing.transform = transform
    return View(backing, types, fields, None if rows is None else np.frombuffer(bytearray(rows), np.int64))


# --- row numbers from what a user gives: an index, a mask, the parts of a split


def one_row(which: Any, row_count: int) -> int:
    """Return the row that an int (perhaps negative) names. Raises RowError for anything else, or out of range."""
    try:
        row = operator.index(which)
    except TypeError:
        raise RowError(
            f"found {type(which).__name__} as an index; expected an int, a slice, or a list, tensor or array of "
            "ints or bools"
        ) from None
    if not -row_count <= row < row_count:
        raise RowError(f"found row {row}; expected {-row_count} to {row_count - 1} (the store has {row_count} rows)")
    return row % row_count


def many_rows(which: Any, row_count: int) -> Int64Array:
    """Return the rows that ints (perhaps negative) or a mask of bools name, int64 [k]. See ``check_range``."""
    try:
        array = np.asarray(which)
    except ValueError:
        raise RowError("found indices of unequal lengths; expected ints in one dimension") from None
    if array.dtype == np.bool_:
        if array.shape != (row_count,):
            raise RowError(f"found a mask of shape {array.shape}; expected ({row_count},), one bool per row")
        return np.flatnonzero(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RowError(f"found indices {array.dtype} {list(array.shape)}; expected ints in one dimension")
    if array.dtype == np.uint64 and len(array) and int(array.max()) > np.iinfo(np.int64).max:
        raise RowError(f"found row {int(array.max())}; expected {-row_count} to {row_count - 1}")
    if isinstance(which, list | tuple) and {bool, np.bool_} & set(map(type, which)):  # (flag, row), for example
        raise RowError(f"found {brief(which)}, bools among ints; expected ints alone, or a mask of one bool per row")
    array = array.astype(np.int64)
    low = int(array.min()) if len(array) else 0
    if low < -row_count:
        raise RowError(f"found row {low}; expected {-row_count} to {row_count - 1}")
    return np.where(array < 0, array + row_count, array)


def check_range(rows: Int64Array, row_count: int) -> None:
    """Raise RowError for a row that is not in range."""
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < row_count):
        bad = int(rows[int(((rows < 0) | (rows >= row_count)).argmax())])
        raise RowError(f"found row {bad}; expected 0 to {row_count - 1} (the store has {row_count} rows)")


def part_lengths(parts: Sequence[float], row_count: int) -> list[int]:
    """Return the length of each part of a split: of fractions that sum to 1, or counts that sum to ``row_count``.

    As in `torch.utils.data.random_split`, the rows left by rounding go to the first parts, one each.
    """
    try:
        parts = [getattr(part, "item", lambda part=part: part)() for part in parts]
        is_valid = bool(parts) and all(part >= 0 for part in parts)  # no NaN is
        total = sum(parts) if is_valid else 0
    except TypeError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"found parts {parts!r:.150}; expected a list of fractions or counts, none negative")
    if all(isinstance(part, int) for part in parts) and total == row_count:
        return [int(part) for part in parts]
    if abs(total - 1) >= 1e-6:
        raise ValueError(f"found parts that sum to {total}; expected fractions that sum to 1, or counts to {row_count}")
    lengths = [int(row_count * part) for part in parts]
    for i in range(row_count - sum(lengths)):
        lengths[i % len(lengths)] += 1
    return lengths
