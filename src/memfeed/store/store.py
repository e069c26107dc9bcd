"""An open store: rows, slices, columns, views. It returns copies, unless a docstring says otherwise."""

from __future__ import annotations

__lazy_modules__ = [  # Python 3.15 imports these at their first use (PEP 810)
    "memfeed.store.checksums",
    "memfeed.store.lengths",
    "memfeed.store.packed",
    "memfeed.store.torchrl_dir",
    "memfeed.store.window_view",
]

import contextlib
import copy
import dataclasses
import hashlib
import operator
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from memfeed.errors import FieldError, RowError, StoreError, listed
from memfeed.order.orders import permutation
from memfeed.schema.assemble import assembler
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Schema
from memfeed.schema.names import Name, Names
from memfeed.schema.recipe import RecipeStep
from memfeed.schema.stems import decode_key
from memfeed.schema.tensordicts import is_tensordict
from memfeed.schema.tree import as_types
from memfeed.store import bulk, indexing, tensordict_columns
from memfeed.store.attributes import in_form, targets_column
from memfeed.store.backing import Backing, open_backing, source_digest
from memfeed.store.checksums import verify
from memfeed.store.columns import Column, FixedColumn, JsonColumn, RaggedColumn
from memfeed.store.gather import Gather
from memfeed.store.lengths import row_lengths
from memfeed.store.manifest import Manifest
from memfeed.store.packed import Fill, packed_backing
from memfeed.store.ragged import column_files
from memfeed.store.row_views import RaggedView, read_row, sample_leaves
from memfeed.store.supply import FillProgress, Reader, RowSupply
from memfeed.store.torchrl_dir import filled_rows
from memfeed.store.window_view import complete_rows, window_backing
from memfeed.store.windows import WindowColumn
from memfeed.system.buffers import Fresh
from memfeed.system.files import local_path
from memfeed.system.forks import fork_safe
from memfeed.system.units import format_bytes, printable

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from memfeed.transforms import Transform


_AT_ONCE = contextlib.nullcontext()


def _no_transform() -> None:
    """Return None: samples without a transform of their store."""


class Samples(list[Any]):
    """A list of samples, with the batch that ``Collate`` returns.

    Methods of a TensorDict or tensorclass (``samples.to(device)``) are those of the batch, as tensordict's own
    ``__getitems__`` allows.

    Args:
        samples: one for each row.
        batch: the same rows as a batch.
        rows: their numbers in the store that was indexed, int64 [k].
        ids: their numbers in the base store, int64 [k].
        schema: that of the store; a ``Collate`` finds fields by their names in it.
        windows: the paths of the fields that are windows.
        transform: returns the `Store.transform` of the store, which a ``Collate`` without one of its own applies.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        batch: Any,
        rows: Int64Array,
        ids: Int64Array,
        schema: Schema,
        windows: Collection[tuple[str | int, ...]] = (),
        transform: Callable[[], Any] = _no_transform,
    ) -> None:
        super().__init__(samples)
        self.batch, self.rows, self.ids, self.schema, self.windows = batch, rows, ids, schema, windows
        self.transform = transform

    def __getattr__(self, name: str) -> Any:
        batch = self.__dict__.get("batch")
        if name.startswith("__") or not is_tensordict(batch):
            raise AttributeError(f"found no attribute {name!r} of a list of samples")
        return getattr(batch, name)


class Store(Dataset[Any]):
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
        backing: Backing,
        *,
        types: tuple[type, ...] = (),
        fields: Sequence[int] | None = None,
        rows: Int64Array | None = None,
    ) -> None:
        self._backing, self._types, self._rows = backing, types, rows
        self._fields = list(range(len(backing.schema))) if fields is None else list(fields)  # by index
        self.schema: Schema = backing.schema if fields is None else backing.schema.select(self._fields)

    # --- facts

    @property
    def path(self) -> Path:
        """The directory; "(memory)" for columns that a loader reads in place."""
        return self._backing.path or Path("(memory)")

    @property
    def has_all_rows(self) -> bool:
        """True if this has every row, in order: its row numbers are those of the base store."""
        return self._rows is None

    @property
    def base_length(self) -> int:
        """How many rows the base store has, of which this may be a view."""
        return len(self) if self._rows is None else self._backing.row_count or 0

    @property
    def digest(self) -> str:
        """A hash of the manifest and of the row numbers, in hexadecimal: it differs for every store and view.

        While the store is filled it is the ``source_digest``.
        """
        return self._with_view(self._backing.digest)

    def _with_view(self, digest: str) -> str:
        return f"{digest[:16]}:{self._view_hash}" if self._view_hash else digest[:16]

    @cached_property
    def _view_hash(self) -> str:
        return "" if self._rows is None else hashlib.blake2b(self._rows.tobytes(), digest_size=8).hexdigest()

    @property
    def types(self) -> tuple[type, ...]:
        """The record classes of samples and batches."""
        return self._types

    @property
    def manifest(self) -> Manifest | None:
        """The content of memfeed.json, or what is known of it while the store is filled.

        None for a directory that tensordict wrote.
        """
        return self._backing.manifest

    @property
    def source_digest(self) -> str | None:
        """A hash of the dataset and of the row numbers, in hexadecimal: the ``digest`` of the store while it is filled.

        None where the dataset is not known.
        """
        found = source_digest(self._backing.manifest)
        return None if found is None else self._with_view(found)

    @property
    def supply(self) -> RowSupply | None:
        """The source of the rows of a store that is being filled; None for a finished one."""
        return self._backing.supply

    @property
    def chunk_rows(self) -> int:
        """How many rows are fetched together, of a store that was opened from an address; 0 for any other."""
        return self._backing.chunk_rows

    @property
    def masks_rows(self) -> bool:
        """True if a loader masks rows: the store is filled with ``on_error="skip"``."""
        return self._backing.masks_rows

    def progress(self) -> FillProgress:
        """Return how many rows can be read, of how many: ``(present, total, skipped)``, of the base store.

        All of them, except while the store is filled (``memfeed.cache(..., lazily=True)``).
        """
        if self._backing.supply is not None:
            return self._backing.supply.progress()
        total = self._backing.row_count or 0
        return FillProgress(total, total)

    def finish(self) -> None:
        """Return once all rows are there and the store is committed; at once for a finished store.

        Raises what the dataset raised for a row, or what keeps rows from being written.
        """
        if self._backing.supply is not None:
            self._backing.supply.finish()

    def _require_filled(self, what: str) -> None:
        """Raise StoreError for what needs all rows while some are absent."""
        if self._backing.supply is not None:
            found = self.progress()
            raise StoreError(
                f"{self.path}: found {what} of a store that is being filled ({found.present:,} of {found.total:,} rows "
                "are there); expected a finished one: call store.finish() first, which waits for it"
            )

    def reader(self, spread: int = 0) -> Reader:
        """Return a new reader of the fields of this view, for its ``supply``; see ``Reader``."""
        return Reader(self._fields, spread)

    def _present(self, base_rows: Int64Array) -> contextlib.AbstractContextManager[None]:
        """Wait until rows are there; they stay within the block. Raises RowError for one that was skipped."""
        supply = self._backing.supply
        return _AT_ONCE if supply is None else self._supplied(supply, base_rows)

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

    @property
    def nbytes(self) -> int:
        """Bytes on disk of the selected columns, for all rows of the base store."""
        return sum(field_bytes(self))

    @property
    def skipped(self) -> tuple[int, ...]:
        """The dataset indices of samples that were left out (``on_error="skip"``)."""
        return self._backing.manifest.skipped if self._backing.manifest else ()

    @property
    def metadata(self) -> dict[str, Any]:
        """The JSON dict that was passed as ``metadata=``, a copy; {} without one."""
        manifest = self._backing.manifest
        return copy.deepcopy(manifest.metadata) if manifest is not None and manifest.metadata else {}

    @property
    def transform(self) -> Transform | None:
        """The steps that `cache(split=True)` left out of the pipeline, as one transform of batches; None without steps.

        A `Loader` without ``transform=`` applies it; ``store[i]`` is the sample before it. StoreError if steps of it
        are functions of the dataset's own, which a store cannot hold: `cache(dataset, path, split=True)` has them.
        """
        if self._backing.transform is not None:
            return self._backing.transform  # type: ignore[no-any-return]
        recipe = self.recipe
        if not recipe:
            return None
        from memfeed.transforms.recipe import make_pipeline  # most trainings need no transforms

        made = make_pipeline(recipe)
        if made is None:
            own = listed([step.shown for step in recipe if step.shown], 120)
            raise StoreError(
                f"{self.path}: found a store whose pipeline goes on with functions of its dataset ({own}), which a "
                "store cannot hold; expected them from the dataset: store = memfeed.cache(dataset, path, split=True), "
                "or another transform: Loader(store, transform=...), with {} for none"
            )
        return made

    @property
    def recipe(self) -> tuple[RecipeStep, ...]:
        """The steps of `transform` as the manifest describes them; () without one."""
        manifest = self._backing.manifest
        return (manifest.attributes.transform or ()) if manifest is not None and manifest.attributes else ()

    def with_transform(self, transform: Transform | None) -> Store:
        """Return this store with another `transform`; None gives that of the directory. Nothing is written."""
        backing = dataclasses.replace(self._backing, transform=transform)
        if backing.supply is not None:
            backing.supply.follow(backing)
        return Store(backing, types=self._types, fields=self._fields, rows=self._rows)

    @property
    def classes(self) -> list[Any]:
        """The names of the classes, as the dataset's own ``classes``. AttributeError if it had none."""
        return list(self._attribute("classes"))

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The number of each class, as the dataset's own ``class_to_idx``. AttributeError if it had none."""
        return dict(self._attribute("class_to_idx"))

    @cached_property
    def targets(self) -> list[int] | torch.Tensor:
        """The class number of each row of this view, as the dataset's own ``targets``. AttributeError if it had none.

        A list of ints if the dataset had a list, else an int64 tensor [n]. Made once, and shared by later uses.
        """
        self._require_filled("targets")
        targets = self._attribute("targets")
        assert self._backing.manifest is not None
        field, file = targets_column(self._backing.manifest.schema.fields, targets, self.path)
        numbers = FixedColumn(field, file, self._backing.row_count, self._backing.check).data
        return in_form(numbers if self._rows is None else numbers[torch.from_numpy(self._rows)], targets.form)

    def _attribute(self, name: str) -> Any:
        manifest = self._backing.manifest
        found = getattr(manifest.attributes, name) if manifest is not None and manifest.attributes else None
        if found is None:
            raise AttributeError(
                f"found no {name} in {self.path}: its dataset had none, or the store is older than this attribute; "
                f"expected a dataset with .{name}: write the store again with overwrite=True"
            )
        return found

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        if self._backing.row_count is None:
            raise StoreError(
                f"{self.path}: found a TensorDict with batch_size [], which has no rows; "
                "expected rows to count or load: use column(), tensordict() or select(), or save it with a batch_size"
            )
        return self._backing.row_count

    def __repr__(self) -> str:
        size = "no rows" if self._backing.row_count is None else f"{len(self):,} rows"
        shown = [f"  {printable(field.name)}: {field.describe()}" for field in self.schema.fields[:20]]
        more = [f"  ... and {len(self.schema) - 20} more"] if len(self.schema) > 20 else []
        made = [f"  ({self._backing.description})"] if self._backing.description else []
        return "\n".join([f"Store({str(self.path)!r}, {size}, {format_bytes(self.nbytes)})", *shown, *more, *made])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Store) or self._backing.supply is not None or other._backing.supply is not None:
            return self is other
        return self.__reduce__() == other.__reduce__()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        # small: the path and the view; the other process maps the files itself
        rows = None if self._rows is None else self._rows.tobytes()
        attached = () if self._backing.transform is None else (self._backing.transform,)
        if self._backing.remake is not None:
            return _remade, (self._backing.remake, tuple(self._fields), rows, self._types, *attached)
        if self._backing.path is None:
            raise TypeError(
                "found columns in memory, which a pickle would copy; expected a store on disk: cache() them and send "
                "the store, or make the loader in the process that uses it"
            )
        return _reopen, (str(self.path), self._backing.digest, tuple(self._fields), rows, self._types, *attached)

    # --- reading

    @cached_property
    def columns(self) -> list[Column]:
        """The selected columns, in the schema's order. A loader plans from them."""
        return [self._backing.column(index) for index in self._fields]

    @cached_property
    def window_paths(self) -> frozenset[tuple[str | int, ...]]:
        """The paths of the fields that are windows, [steps, *shape]."""
        return frozenset(column.field.path for column in self.columns if isinstance(column, WindowColumn))

    @cached_property
    def assemble_sample(self) -> Callable[[Sequence[Any]], Any]:
        """A function that builds a sample from one leaf per field."""
        return assembler(self.schema.structure, self._types, batched=False)

    @cached_property
    def assemble_batch(self) -> Callable[[Sequence[Any]], Any]:
        """A function that builds a batch from one leaf per field."""
        forms = [field.form for field in self.schema]
        return assembler(self.schema.structure, self._types, batched=True, forms=forms)

    @cached_property
    def _gather(self) -> Gather:
        return Gather(self.columns, [Fresh()] * len(self.columns))

    def base_rows(self, ids: Int64Array) -> Int64Array:
        """Convert rows of this view to rows of the base store. Raises RowError for one out of range."""
        indexing.check_range(ids, len(self))
        return ids if self._rows is None else self._rows[ids]

    def stored_value(self, source_index: int, field_index: int) -> Any:
        """Return the stored value of field ``field_index`` for the dataset's sample ``source_index``."""
        row = source_index - sum(skipped < source_index for skipped in self.skipped)
        return read_row(self.columns[field_index], row)

    @fork_safe
    def gather(self, ids: Int64Array) -> Any:
        """Return the batch of rows ``ids`` (int64 [k], not negative), in new memory that belongs to the caller."""
        rows = self.base_rows(ids)
        with self._present(rows):
            return self.assemble_batch(self._gather(rows))

    @fork_safe
    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return self.gather(np.arange(*which.indices(len(self)), dtype=np.int64))
        if isinstance(which, str):
            raise FieldError(f"found the index {which!r}; rows have numbers: for a field use column({which!r})")
        if isinstance(which, list | tuple | range | np.ndarray | torch.Tensor) and np.ndim(which) > 0:
            return self.gather(indexing.many_rows(which, len(self)))
        row = indexing.one_row(which, len(self))
        base_row = row if self._rows is None else int(self._rows[row])
        with self._present(np.array([base_row])):
            return self.assemble_sample([read_row(column, base_row) for column in self.columns])

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    @fork_safe
    def __getitems__(self, ids: Sequence[int]) -> Samples:
        """Return samples read together, which share one batch's memory; `torch.utils.data.DataLoader` calls this."""
        rows = indexing.many_rows(list(ids), len(self))
        base_rows = self.base_rows(rows)
        with self._present(base_rows):
            leaves = self._gather(base_rows)
        batch = self.assemble_batch(leaves)
        transform = partial(getattr, self, "transform")
        return Samples(self.samples_of(leaves), batch, rows, base_rows, self.schema, self.window_paths, transform)

    def samples_of(self, leaves: Sequence[Any]) -> Iterator[Any]:
        """Return the samples of a batch, given its leaves, one per field; they share the memory of the leaves."""
        columns = [sample_leaves(column, leaf) for column, leaf in zip(self.columns, leaves, strict=True)]
        return (self.assemble_sample(values) for values in zip(*columns, strict=True))

    @fork_safe
    def column(self, which: Name) -> Any:
        """Return one column without a copy: a tensor [n, *shape] over the private map (edits stay in this process).

        A ragged column is returned as a sequence of views (str, bytes and json: of values). A subset of consecutive
        rows is a view too; the rows of any other subset are copied.
        """
        self._require_filled("column(...)")
        column = self.columns[self.schema.field_index(which)]
        if isinstance(column, FixedColumn):
            if self._rows is None:
                return column.data
            rows = self._rows
            if len(rows) and (np.diff(rows) == 1).all():
                return column.data[int(rows[0]) : int(rows[-1]) + 1]
            return column.data[torch.from_numpy(rows)]
        if isinstance(column, JsonColumn) and self._rows is None:
            return column.values
        rows = np.arange(column.row_count, dtype=np.int64) if self._rows is None else self._rows
        return RaggedView(column, rows, self._backing)

    @fork_safe
    def tensordict(self) -> TensorDictBase:
        """Return a TensorDict of batch_size [n] over the private maps; ragged columns as their start and dims.

        The keys are those of `TensorDict.load_memmap(path)`. Rows of a subset are copied.
        """
        self._require_filled("tensordict()")
        if self.window_paths:
            raise StoreError(
                f"{self.path}: found a view whose rows are made when they are read ({self._backing.description}); "
                "expected rows that are on the disk: store[:] reads them all"
            )
        if self._backing.manifest is None:
            full: TensorDictBase = self.assemble_batch([tensordict_columns.all_rows(column) for column in self.columns])
            return full if self._rows is None else full[torch.from_numpy(self._rows)]
        from tensordict import TensorDict

        tree = TensorDict({}, batch_size=[self._backing.row_count])
        for field, column in zip(self.schema, self.columns, strict=True):
            keys = tuple(map(decode_key, field.stem.split("/")))
            if isinstance(column, FixedColumn):
                tree[keys] = column.data
            elif isinstance(column, RaggedColumn):
                tree[keys] = {"start": column.start, "dims": column.dims}
        return tree if self._rows is None else tree[torch.from_numpy(self._rows)]

    # --- all rows at once

    @fork_safe
    def to(self, device: torch.device | str, *, progress: bool = True) -> Any:
        """Return all rows on a device as one batch, equal to ``store[:]``. Needs no more than a chunk of RAM at a time.

        A TensorDict of weights has no rows and is returned as it is. The memory belongs to the caller. ``progress``
        shows a bar on stderr. Raises LoaderError for a device that does not exist, StoreError if the fields of fixed
        size do not fit into the free memory of a CUDA device.

        Example::

            images, labels = memfeed.open("ants.mf").to("cuda")
        """
        self._require_filled("to(...)")
        return self.assemble_batch(bulk.load(self.columns, self._all_rows(), device, self.path.name, progress=progress))

    @fork_safe
    def into(self, dest: Any, *, strict: bool = True) -> bulk.Unfilled:
        """Fill existing tensors, on any device, with all rows, chunk by chunk.

        Args:
            dest: tensors [n, *shape] (for weights [*shape]) of the store's dtypes, in a TensorDict, dict, list or any
                nesting of those, or a module's ``state_dict()``. A field goes to the tensor at its path, or to the one
                under its name, which is its path joined by dots.
            strict: both sides must have the same fields; if False, only the fields that both have are filled.

        Returns:
            ``(missing_keys, unexpected_keys)``: fields without a tensor in ``dest``, and tensors that were not filled.

        Raises:
            FieldError: fields on one side only, of another shape or dtype, or of varying length. Nothing was written.

        Example::

            memfeed.open("weights.mf").into(model.state_dict())
        """
        self._require_filled("into(...)")
        return bulk.into(self.columns, self._all_rows(), dest, str(self.path), strict=strict)

    def _all_rows(self) -> Int64Array:
        """Return every row, by its number in the base store; an empty array for weights, which have no rows."""
        return np.empty(0, np.int64) if self._backing.row_count is None else self.base_rows(np.arange(len(self)))

    # --- views

    def select(self, *which: Names) -> Store:
        """Return this store with only some fields. A tuple or record that loses some of its fields becomes a dict.

        A str or int names a field or a container of fields, a tuple is one path, a list is several of these.
        """
        if not which:
            raise FieldError(f"found select() without a field; expected at least one of: {self.schema.names()}")
        kept = sorted({index for name in which for index in self.schema.field_indices(name)})
        return self._view(fields=[self._fields[index] for index in kept])

    def subset(self, rows: Any) -> Store:
        """Return a store of the given rows (ints, or a mask of bools), in that order; nothing is copied."""
        return self._view(rows=self.base_rows(indexing.many_rows(rows, len(self))))

    def split(self, parts: Sequence[float], *, seed: int = 0) -> list[Store]:
        """Split into disjoint random subsets that cover every row: fractions that sum to 1, or counts that sum to n.

        As in `torch.utils.data.random_split`, the rows left by rounding go to the first parts, one each.
        """
        edges = np.cumsum([0, *indexing.part_lengths(parts, len(self))])
        rows = permutation(len(self), seed, 0)
        return [self.subset(rows[first:last]) for first, last in pairwise(edges)]

    def windows(self, offsets: Mapping[Any, Iterable[int]], *, within: Name | None, complete: bool = False) -> Store:
        """Return a store whose rows have, for some fields, the rows around them: [steps, *shape], in a batch [k, ...].

        Each row is kept once: windows are gathered when they are read. The view has the rows of this store, under the
        same numbers; its windows see only rows of this store, in its order. Fields without offsets are those of the row
        itself. Each field with offsets gets a mask beside it, ``"<field>_mask"``, bool [steps], True where the row
        exists; beyond the ends of an episode its first or last row is repeated. A record or named tuple that gets a
        mask becomes a dict.

        Args:
            offsets: for each field the rows to give, counted from the row itself: ``{"image": [-1, 0]}``.
            within: the field that says to which episode a row belongs: one int, the same in all its rows, which are
                neighbours in this store. None: all rows are one sequence.
            complete: leave out the rows whose windows are not complete, and the masks.

        Raises:
            FieldError: a field that does not exist, or whose rows differ in size, or without a place for its mask.
            RowError: offsets that are no ints, or an episode whose rows are not neighbours.

        Example::

            steps = store.windows({"image": [-1, 0], "action": range(16)}, within="episode")
            train = steps.subset(steps.column("episode") < 80)
        """
        self._require_filled("windows(...)")
        if self._backing.remake is not None:
            raise StoreError(
                f"{self.path}: found windows(...) of a view whose rows are made when they are read "
                f"({self._backing.description}); expected one call, with the offsets of all fields"
            )
        backing = window_backing(self, offsets, within, complete)
        backing.transform = self._backing.transform
        view = Store(backing, types=self._types, rows=self._rows)
        return Store(backing, types=self._types, rows=complete_rows(view.columns)) if complete else view

    def packed(
        self,
        which: Name | list[Name] | None,
        size: int,
        *,
        eos: Fill = None,
        pad: Fill = None,
    ) -> Store:
        """Return a store whose rows are blocks of ``size`` tokens: the documents, one after another, cut.

        A row is a dict: the tokens under the name of their field, [size]; "document_ids", int32 [size], the documents
        of the block from 0; "position_ids", int64 [size], from 0 at the first token of each document in the block. A
        document that goes on in the next block begins there again at 0, as attention over one block sees it. Nothing
        is copied. ``len`` is the number of blocks, the same in every epoch.

        Here the documents have the order of their rows. A `Loader` with ``shuffle=True`` draws another order of them in
        every epoch, cuts that into blocks, and shuffles the blocks. Rows of the result are blocks, and not documents:
        to split documents, call ``split`` or ``subset`` first. A view of some blocks keeps the stored order.

        Args:
            which: the field, whose rows are documents of varying length; None for the only one. A list of fields of the
                same lengths (tokens and labels) packs them alike.
            size: tokens of a block.
            eos: a token to put after each document; a mapping of one per field. None puts none.
            pad: the value that fills up the last block; a mapping of one per field. There is then a field
                "NAME_mask" (of the first field's name), bool [size], True for tokens of documents; document_ids are -1
                elsewhere. None leaves out the tokens that make no whole block, fewer than ``size``.

        Raises:
            FieldError: a field of another kind, or fewer tokens than one block.

        Example::

            blocks = memfeed.open("text.mf").packed("input_ids", 2048)
            for batch in memfeed.Loader(blocks, 8, shuffle=True):  # {"input_ids": [8, 2048], ...}
                ...
        """
        self._require_filled("packed(...)")
        names = tuple(which) if isinstance(which, list) else (which,)
        backing = packed_backing(self, names, operator.index(size), eos, pad)
        return Store(backing)

    def lengths(self, which: Name) -> torch.Tensor:
        """Return the length of each row of a field of which one dim varies, int64 [n]. Reads no value.

        Example::

            short = store.subset(store.lengths("input_ids") <= 2048)
        """
        self._require_filled("lengths(...)")
        column = self.columns[self.schema.field_index(which)]
        return torch.from_numpy(row_lengths(column, self.base_rows(np.arange(len(self)))))

    def _view(self, *, fields: Sequence[int] | None = None, rows: Int64Array | None = None) -> Store:
        return Store(
            self._backing,
            types=self._types,
            fields=self._fields if fields is None else fields,
            rows=self._rows if rows is None else rows,
        )

    # --- trust

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every byte and compare it with the checksums. Raises CorruptStoreError naming field, rows and file.

        ``progress`` is called with (bytes done, bytes in total).
        """
        self._require_filled("verify()")
        if isinstance(self._backing.owner, Store):
            self._backing.owner.verify(progress)  # the store of which this is a view
            return
        if self._backing.manifest is None:
            raise StoreError(
                f"{self.path}: found a directory that tensordict wrote, which has no checksums; "
                "its sizes were checked when it was opened: cache(..., copy_existing=True) makes a store that has them"
            )
        try:
            verify(self.path, self._backing.manifest, progress)
        finally:
            self._backing.check()  # the damage may be that of a store that replaced this one


def field_bytes(store: Store) -> list[int]:
    """Return the bytes on disk of every field, for all rows of the base store, in the order of the schema."""
    manifest = store.manifest
    if manifest is None:
        return [tensordict_columns.column_bytes(column) for column in store.columns]
    # the mask of a window has no file
    return [sum(manifest.files.get(name, 0) for name in column_files(field, 0)) for field in store.schema]


def open_store(path: str | os.PathLike[str], *, types: type | Iterable[type] = (), owner: object = None) -> Store:
    """Open a store, see ``memfeed.open``. ``owner`` lives as long as the store and all its views."""
    path = local_path(path)
    backing = open_backing(path, owner)
    if backing.left_out:
        warnings.warn(
            f"{path}: left out what is not read ({'; '.join(backing.left_out)[:200]}): a pickle can run code when it "
            "is read; save such values as JSON",
            stacklevel=3,
        )
    store = Store(backing, types=as_types(types))
    filled = None if backing.manifest is not None else filled_rows(path)
    if filled is None or backing.row_count is None or filled >= backing.row_count:
        return store
    return store.subset(np.arange(filled))  # a replay buffer that is not full yet


def open(path: str | os.PathLike[str], *, fields: Names | None = None, types: type | Iterable[type] = ()) -> Store:
    """Open a memfeed store, or any directory written by `TensorDict.memmap()`, in milliseconds for any size.

    The manifest and the size of every file are checked first; nothing is mapped and no class is imported by name.
    ``types`` are the namedtuple, dataclass and tensorclass classes of the samples, one or several, found by their
    names: without them a namedtuple is
    returned as an equal generated one, a dataclass as a dict, a tensorclass as a TensorDict. ``fields`` opens only
    some fields, named as for `Store.select`.

    Raises StoreError if ``path`` is not a store (or one of a newer format), CorruptStoreError if it is damaged,
    FieldError for a field that it does not have.
    """
    store = open_store(path, types=types)
    return store if fields is None else store.select(fields)


def _reopen(
    path: str,
    digest: str,
    fields: tuple[int, ...],
    rows: bytes | None,
    types: tuple[type, ...],
    transform: Transform | None = None,
) -> Store:
    backing = open_backing(Path(path))
    if backing.digest != digest:
        raise StoreError(
            f"{path}: found another store than the one that was sent here (manifest {backing.digest[:8]}, "
            f"expected {digest[:8]}): it was rebuilt meanwhile; open it again"
        )
    backing.transform = transform
    return Store(backing, types=types, fields=fields, rows=_row_ids(rows))


def _remade(
    remake: tuple[Callable[..., Backing], tuple[Any, ...]],
    fields: tuple[int, ...],
    rows: bytes | None,
    types: tuple[type, ...],
    transform: Transform | None = None,
) -> Store:
    make, arguments = remake
    backing = make(*arguments)
    backing.transform = transform
    return Store(backing, types=types, fields=fields, rows=_row_ids(rows))


def _row_ids(rows: bytes | None) -> Int64Array | None:
    return None if rows is None else np.frombuffer(bytearray(rows), np.int64)
