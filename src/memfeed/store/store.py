"""An open store: rows, slices, columns, views. It returns copies, unless a docstring says otherwise."""

from __future__ import annotations

__lazy_modules__ = ["memfeed.store.lengths"]  # Python 3.15 imports it at its first use (PEP 810)

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memfeed.errors import FieldError, StoreError
from memfeed.order.orders import permutation
from memfeed.schema.codec import Int64Array
from memfeed.schema.names import Name, Names, decode_key
from memfeed.store import bulk
from memfeed.store.facts import Facts
from memfeed.store.gather import ReadSamples, all_rows
from memfeed.store.lengths import Fill, row_lengths
from memfeed.store.ragged_gather import RaggedView
from memfeed.store.view import View, many_rows, one_row, part_lengths
from memfeed.system.messages import say_once
from memfeed.system.openmp import fork_safe
from memfeed.system.progress import SLOW_SECONDS, Progress

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from memfeed.store.backing import Backing


class Store(Facts):
    """Rows of samples on disk, memory-mapped. Get one from ``memfeed.open`` or ``memfeed.cache``.

    ``store[3]`` is the sample that the dataset returned, with tensors in place of arrays and PIL images; ``store[2:9]``
    and ``store[[4, 1]]`` are batches, as a `Loader` gives them. Both are copies that belong to the caller. Opening maps
    nothing; a column is mapped when it is first used. If the store is replaced, columns in use keep the old data; the
    first use of another raises StoreError.

    Example::

        store = memfeed.open("ants.mf")
        image, label = store[0]
        train, val = store.split([0.9, 0.1], seed=0)
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = any(name in vars(cls).get("__annotations__", {}) for cls in type(self).__mro__)
        is_public = not (is_own or name.startswith("_"))
        if is_public and hasattr(type(self), name) and hasattr(self._view.backing.dataset, name):
            setattr(self._view.backing.dataset, name, value)  # the program means its dataset's `split`, say
            return
        if is_public and not hasattr(type(self), name):
            if name not in vars(self) and hasattr(self, name):
                setattr(self._view.backing.dataset, name, value)  # where the next epoch finds it
                return
            say_once(
                f"memfeed: the attribute {name!r}, which the program sets on a store, changes no sample: set it on the "
                "dataset, and make a new Loader of that, with another cache="
            )
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # a type checker is to find names that do not exist

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the dataset, if it is at hand: a program finds it in ``loader.dataset``."""
            if name.startswith("_") or hasattr(type(self), name):
                return self.__getattribute__(name)  # raises its own error
            view = self._view
            if view.backing.dataset is None or not view.has_all_rows or len(view.fields) < len(view.backing.schema):
                raise AttributeError(
                    f"{self.path}: found no attribute {name!r} of a store; expected one of the dataset from the dataset"
                )
            return getattr(view.backing.dataset, name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Store) or self._backing.supply is not None or other._backing.supply is not None:
            return self is other
        return self.__reduce__() == other.__reduce__()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self._view,)

    @fork_safe
    def _repr_html_(self) -> str:
        from memfeed.store.store_html import parts  # a training shows no page
        from memfeed.system.html_parts import fragment

        return fragment(parts(self._view))

    # --- reading

    def _batch(self, ids: Int64Array) -> Any:
        rows = self._view.base_rows(ids)
        with self._view.present(rows):
            return self._view.assemble_batch(self._view.gather(rows))

    @fork_safe
    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return self._batch(np.arange(*which.indices(len(self)), dtype=np.int64))
        if isinstance(which, str):
            raise FieldError(f"found the index {which!r}; rows have numbers: for a field use column({which!r})")
        if isinstance(which, list | tuple | range | np.ndarray | torch.Tensor) and np.ndim(which) > 0:
            return self._batch(many_rows(which, len(self)))
        row = one_row(which, len(self))
        base_row = row if self._view.rows is None else int(self._view.rows[row])
        with self._view.present(np.array([base_row])):
            return self._view.sample_maker.assemble([column.read_row(base_row) for column in self._view.columns])

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    @fork_safe
    def __getitems__(self, ids: Sequence[int] | Sequence[Sequence[int]]) -> ReadSamples | list[Any]:
        """Return samples read together, which share one batch's memory; `torch.utils.data.DataLoader` calls this.

        Of lists of rows, which a batch sampler of lists of lists draws, it returns a batch for each.
        """
        if len(ids) and all(isinstance(one, list | tuple) for one in ids):
            return [self[one] for one in ids]
        rows = many_rows(list(ids), len(self))
        base_rows = self._view.base_rows(rows)
        with self._view.present(base_rows):
            leaves = self._view.gather(base_rows)
        batch, maker = self._view.assemble_batch(leaves), self._view.sample_maker
        return ReadSamples(maker.samples_of_leaves(leaves), batch, rows, base_rows, self, maker.canvases(leaves))

    @fork_safe
    def column(self, which: Name) -> Any:
        """Return one column without a copy: a tensor [n, *shape] over the private map (edits stay in this process).

        A ragged column is returned as a sequence of views (str, bytes and json: of values). A subset of consecutive
        rows is a view too; the rows of any other subset are copied.
        """
        self._view.require_filled("column(...)")
        column = self._view.columns[self.schema.field_index(which)]
        whole = column.whole
        if self._view.rows is None and whole is not None:
            return whole
        rows = np.arange(column.row_count or 0, dtype=np.int64) if self._view.rows is None else self._view.rows
        if isinstance(whole, torch.Tensor):
            is_run = len(rows) and (np.diff(rows) == 1).all()
            return whole[int(rows[0]) : int(rows[-1]) + 1] if is_run else whole[torch.from_numpy(rows)]
        return RaggedView(column, rows, self._backing)

    @fork_safe
    def tensordict(self) -> TensorDictBase:
        """Return a TensorDict of batch_size [n] over the private maps; ragged columns as their start and dims.

        The keys are those of `TensorDict.load_memmap(path)`. Rows of a subset are copied.
        """
        self._view.require_filled("tensordict()")
        if self._view.window_paths:
            raise StoreError(
                f"{self.path}: found a view whose rows are made when they are read ({self._backing.description}); "
                "expected rows that are on the disk: store[:] reads them all"
            )
        if self._backing.manifest is None:
            full: TensorDictBase = self._view.assemble_batch([all_rows(column) for column in self._view.columns])
            return full if self._view.rows is None else full[torch.from_numpy(self._view.rows)]
        from tensordict import TensorDict

        tree = TensorDict({}, batch_size=[self._backing.row_count])
        columns: list[Any] = self._view.columns
        for field, column in zip(self.schema, columns, strict=True):
            keys = tuple(map(decode_key, field.stem.split("/")))
            stored = column.stored
            tree[keys] = stored.data if stored.field.kind == "fixed" else {"start": stored.start, "dims": stored.dims}
        return tree if self._view.rows is None else tree[torch.from_numpy(self._view.rows)]

    # --- all rows at once

    @fork_safe
    def to(self, device: torch.device | str, *, progress: bool | None = None) -> Any:
        """Return all rows on a device as one batch, equal to ``store[:]``. Needs no more than a chunk of RAM at a time.

        A TensorDict of weights has no rows and is returned as it is. The memory belongs to the caller. ``progress``
        is that of `memfeed.cache`; with None only copies that take seconds show a bar. Raises LoaderError for a device
        that does not exist, StoreError if the fields of fixed size do not fit into the free memory of a CUDA device.

        Example::

            images, labels = memfeed.open("ants.mf").to("cuda")
        """
        self._view.require_filled("to(...)")
        return bulk.load(self._view, device, progress=progress)

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
        self._view.require_filled("into(...)")
        return bulk.into(self._view, dest, strict=strict)

    # --- views

    def select(self, *which: Names) -> Store:
        """Return this store with only some fields. A tuple or record that loses some of its fields becomes a dict.

        A str or int names a field or a container of fields, a tuple is one path, a list is several of these.
        """
        if not which:
            raise FieldError(f"found select() without a field; expected at least one of: {self.schema.names()}")
        kept = sorted({index for name in which for index in self.schema.field_indices(name)})
        view = self._view
        return Store(View(view.backing, view.types, [view.fields[index] for index in kept], view.rows))

    def subset(self, rows: Any) -> Store:
        """Return a store of the given rows (ints, or a mask of bools), in that order; nothing is copied."""
        view = self._view
        return Store(View(view.backing, view.types, view.fields, view.base_rows(many_rows(rows, len(self)))))

    def split(self, parts: Sequence[float], *, seed: int = 0) -> list[Store]:
        """Split into disjoint random subsets that cover every row: fractions that sum to 1, or counts that sum to n.

        As in `torch.utils.data.random_split`, the rows left by rounding go to the first parts, one each.
        """
        edges = np.cumsum([0, *part_lengths(parts, len(self))])
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
        from memfeed.store.window_view import complete_rows, window_backing  # most stores are read as they are

        self._view.require_filled("windows(...)")
        if self._backing.description:
            raise StoreError(
                f"{self.path}: found windows(...) of a view whose rows are made when they are read "
                f"({self._backing.description}); expected one call, with the offsets of all fields"
            )
        backing = window_backing(self._view, offsets, within, complete)
        backing.transform = self._backing.transform
        view = View(backing, self._view.types, rows=self._view.rows)
        return Store(View(backing, view.types, rows=complete_rows(view.columns)) if complete else view)

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
            eos: a token to put after each document of all fields, or one for each field by its name. None puts none.
            pad: the value that fills up the last block of all fields, or one for each by name. There is then a field
                "NAME_mask" (of the first field's name), bool [size], True for tokens of documents; document_ids are -1
                elsewhere. None leaves out the tokens that make no whole block, fewer than ``size``.

        Raises:
            FieldError: a field of another kind, or fewer tokens than one block.

        Example::

            blocks = memfeed.open("text.mf").packed("input_ids", 2048)
            for batch in memfeed.Loader(blocks, 8, shuffle=True):  # {"input_ids": [8, 2048], ...}
                ...
        """
        self._view.require_filled("packed(...)")
        from memfeed.store.packed import packed_backing  # most stores are read as they are

        names = tuple(which) if isinstance(which, list) else (which,)
        backing = packed_backing(self._view, names, size, eos, pad)
        return Store(View(backing))

    def lengths(self, which: Name) -> torch.Tensor:
        """Return the length of each row of a field of which one dim varies, int64 [n]. Reads no value.

        Example::

            short = store.subset(store.lengths("input_ids") <= 2048)
        """
        self._view.require_filled("lengths(...)")
        column = self._view.columns[self.schema.field_index(which)]
        return torch.from_numpy(row_lengths(column, self._view.base_rows(np.arange(len(self)))))

    # --- trust

    def verify(self, *, progress: bool | None = None) -> None:
        """Read every byte and compare it with the checksums. Raises CorruptStoreError naming field, rows and file.

        ``progress`` is that of `memfeed.cache`; with None only stores that take seconds show a bar.
        """
        self._view.require_filled("verify()")
        check, backing = self._check()
        if check is None:
            raise StoreError(
                f"{self.path}: found a directory that tensordict wrote, which has no checksums; "
                "its sizes were checked when it was opened: cache(..., allow='copy') makes a store that has them"
            )
        with Progress(self.path.name, None, unit="B", progress=progress, delay_seconds=SLOW_SECONDS) as bar:
            try:
                check(bar.advance_to)
            finally:
                backing.check()  # the damage may be that of a store that replaced this one

    @property
    def _has_checksums(self) -> bool:
        """True if `verify` has something to compare: not of tensordict's directories, nor while rows are missing."""
        return self._view.supply is None and self._check()[0] is not None

    def _check(self) -> tuple[Callable[..., None] | None, Backing]:
        """Return what compares every byte with its checksum, None where there are none, and the files' backing."""
        from memfeed.store.checksums import verify  # a training verifies nothing

        backing = self._backing
        while isinstance(backing.owner, View):  # rows that are made of another store's
            backing = backing.owner.backing
        check, path, manifest = backing.verify, backing.path, backing.manifest
        if check is None and path is not None and manifest is not None:
            check = partial(verify, path, manifest)
        return check, backing


def with_parts(store: Store, **parts: Any) -> Store:
    """Return ``store`` with other parts of its `Backing`, by name. Nothing is written."""
    view = store._view
    backing = dataclasses.replace(view.backing, **parts)
    if backing.supply is not None:
        backing.supply.follow(backing)
    return Store(View(backing, view.types, view.fields, view.rows))
