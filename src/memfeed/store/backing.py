"""The columns behind a store: of a memfeed directory, of one that tensordict wrote, or in memory.

The columns of a store that is still being filled are mapped at once, because its files get another path at the commit.
These maps are private to the process, as those of finished stores are. A page that was not edited here shows what other
processes write to the file, and nobody can edit one: `Store.column` waits for the finished store.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from memfeed.errors import CorruptStoreError, LoaderError, StoreError, StoreNotFoundError, UnfitRowError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Schema
from memfeed.schema.recipe import PER_SAMPLE
from memfeed.store import format, memo_format
from memfeed.store.coded_columns import decoded_column
from memfeed.store.columns import Column, FixedColumn
from memfeed.store.format import Identity
from memfeed.store.manifest import Manifest
from memfeed.store.ragged import Located, RaggedFiles, column_files, fixed_file, ragged_files
from memfeed.store.ragged_columns import RaggedColumn
from memfeed.store.row_supply import RowSupply
from memfeed.system.descriptors import open_read
from memfeed.system.mapped_memory import ORDINARY, map_descriptor

_mapping = threading.Lock()  # else an older, shorter map of a heap could take the place of a newer one
os.register_at_fork(before=_mapping.acquire, after_in_parent=_mapping.release, after_in_child=_mapping.release)


class GrowingColumn(RaggedColumn):
    """A ragged column of a build. Its heap is mapped again when a row lies behind what was mapped so far."""

    def __init__(self, field: Field, files: RaggedFiles, row_count: int) -> None:
        self._fd = open_read(files.heap)
        weakref.finalize(self, os.close, self._fd)
        super().__init__(field, files, row_count, 0)
        self._map_heap()
        _ = self._arrays  # maps start and dims

    def locate(self, rows: Int64Array) -> Located:
        """See ``RaggedRows.locate``. The rows must be present."""
        mapped = self.heap_bytes
        try:
            return super().locate(rows)
        except CorruptStoreError:  # the thread that commits may have mapped the heap again since
            if max(os.fstat(self._fd).st_size, self.heap_bytes) <= mapped:
                raise
        self._map_heap()
        return super().locate(rows)

    @ORDINARY
    def _map_heap(self) -> None:
        with _mapping:
            while True:
                size = os.fstat(self._fd).st_size
                try:
                    heap = map_descriptor(self._fd, self.path, size)
                    break
                except CorruptStoreError:  # a commit may cut it meanwhile, behind its last row
                    if os.fstat(self._fd).st_size >= size:
                        raise
            self.__dict__["heap"] = heap
            if "_arrays" in self.__dict__:
                self.__dict__["_arrays"] = (*self._arrays[:2], heap.numpy())
            self.heap_bytes = size  # last: another thread may locate rows meanwhile

    def switch_to_committed(self, root: Path, check: Callable[[], None]) -> None:
        """See ``FixedColumn.switch_to_committed``: the files are the same under other names."""
        self._map_heap()
        files = ragged_files(root, self.field)
        self.path, self._files, self._check = files.heap, files, check


@dataclass(frozen=True)
class PartTransforms:
    """The transform of several stores that are read as one, and of the views of that."""

    stores: Sequence[Any]

    def one(self) -> Any:
        """Return it; None if they have none. LoaderError if they have different ones, or functions that may differ."""
        first, *others = [(store._view.recipe, store.transform) for store in self.stores]
        # it says all of the transform if no step of it is a function of the user's
        has_all = bool(first[0]) and all(step.name != PER_SAMPLE for step in first[0])
        for other in others:
            if other[0] != first[0] or not (has_all or _is_equal(first[1], other[1])):
                raise LoaderError(
                    "found stores with different transforms of their own (cache(split=True)), or with functions in "
                    "them that are not known to be equal; expected one transform for a loader: pass transform=, for "
                    "example transform=stores[0].transform, or {} for none"
                )
        return first[1]


def _is_equal(one: Any, other: Any) -> bool:
    """Return True for the same transform, or for two whose classes and attributes are equal, as their pickles say."""
    try:
        return one is other or pickle.dumps(one) == pickle.dumps(other)
    except Exception:  # of any kind: a function that cannot be pickled
        return False


@dataclass(eq=False)
class Backing:
    """The parts that all views of one store share: its path, schema, and columns (mapped on first use).

    ``digest`` differs for every store, ``source`` only for every dataset: see ``View.source_digest``. ``owner`` lives
    as long as this object. ``check`` raises StoreError if another store is at the path now. ``remake``
    is a function and its arguments that make this backing in another process; None opens ``path`` there.
    ``description`` says for people what was made. ``transform`` takes the place of the one that the manifest describes
    (a `PartTransforms` of several stores).
    ``left_out`` says for each entry of a tensordict directory that is not read where it is and why. ``supply`` brings
    the rows of a store that is not complete; None for any other. ``masks_rows`` says that a loader must mask rows,
    because the dataset may raise for some. ``chunk_rows`` is how many rows are fetched together, of a store that was
    opened from an address; 0 for any other. ``dataset`` is the one that the rows are read from, where it is at hand,
    ``device`` that of its tensors, if it is not the CPU, ``leaf_makers`` make its arrays and PIL images of rows, and
    ``check_dataset`` raises StaleStoreError if it has changed since. ``verify`` compares the rows of memoized results
    with their hashes, as `Store.verify` does with those of a store. ``widen`` changes a column of a store that is being
    filled, so that it takes a row, or raises the error of that row. ``views`` are those that read these columns, by
    their `id`.
    """

    path: Path | None
    schema: Schema
    row_count: int | None
    digest: str
    open_column: Callable[[int], Column]
    manifest: Manifest | None = None
    owner: object = None
    check: Callable[[], None] = lambda: None
    left_out: tuple[str, ...] = ()
    remake: tuple[Callable[..., Backing], tuple[Any, ...]] | None = field(default=None, repr=False)  # may have a login
    description: str = ""
    transform: Any = None
    supply: RowSupply | None = None
    masks_rows: bool = False
    chunk_rows: int = 0
    check_dataset: Callable[[Backing], None] = lambda backing: None
    dataset: Any = None
    device: torch.device | None = None
    leaf_makers: Mapping[tuple[Any, ...], Callable[[Any], Any]] = field(default_factory=dict)
    source: str | None = None
    verify: Callable[[Callable[[int, int], None] | None], None] | None = None
    widen: Callable[[Backing, UnfitRowError], None] | None = None
    views: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary, repr=False)
    _columns: dict[int, Column] = field(default_factory=dict)

    def column(self, field_index: int) -> Column:
        """Return the column of a field of the whole schema."""
        if field_index not in self._columns:
            self._columns[field_index] = self.open_column(field_index)
        return self._columns[field_index]


def _checker(path: Path, identity: Identity, digest: str | None = None) -> Callable[[], None]:
    """Return ``check``; with the ``digest`` of its manifest, a store to which rows were appended is the same."""

    def check() -> None:
        found = format.identity(path)
        if found is None:
            raise StoreError(
                f"{path}: found nothing there any more; expected the store that was opened: it was removed, or moved; "
                "columns that were in use are kept, others cannot be read any more: open it again where it is now, or "
                "make it again"
            )
        if found != identity and digest not in format.generations(path):
            raise StoreError(
                f"{path}: found another store there than the one that was opened, which was replaced; "
                "columns that were in use are kept, others cannot be read any more: open it again with memfeed.open"
            )

    return check


def _memfeed_backing(path: Path, manifest: Manifest, digest: str, identity: Identity, owner: object) -> Backing:
    checker = _checker(path, identity, digest)

    def open_column(field_index: int) -> Column:
        column: Column = decoded_column(store_column(path, manifest, field_index, checker))
        return column

    check = _checker(path, identity)
    source = source_digest(manifest)
    return Backing(
        path, manifest.schema.decoded, manifest.rows, digest, open_column, manifest, owner, check, source=source
    )


def store_column(
    path: Path, manifest: Manifest, field_index: int, check: Callable[[], None] = lambda: None
) -> FixedColumn | RaggedColumn:
    """Return a column of the store at ``path`` as it is stored. Its files are there in their sizes."""
    one = manifest.schema.fields[field_index]
    if one.kind == "fixed":
        return FixedColumn(one, fixed_file(path, one), manifest.rows, check)
    heap_bytes = next(manifest.files[name] for name, size in column_files(one, 0).items() if size is None)
    return RaggedColumn(one, ragged_files(path, one), manifest.rows, heap_bytes, check)


def filling_backing(
    path: Path,
    build: Path,
    manifest: Manifest,
    supply: RowSupply,
    owner: object,
    remake: tuple[Callable[..., Backing], tuple[Any, ...]],
    *,
    masks_rows: bool,
) -> Backing:
    """Return the columns of a build that becomes the store at ``path``; ``manifest`` says what is known of it so far.

    ``digest`` is that of the source, the same for every process that fills it, now and after an interruption.
    """
    columns: list[Column] = []
    for each in manifest.schema:
        if each.kind == "fixed":
            columns.append(FixedColumn(each, fixed_file(build, each), manifest.rows))
            _ = columns[-1].whole  # maps it
        else:
            columns.append(decoded_column(GrowingColumn(each, ragged_files(build, each), manifest.rows)))
    source = source_digest(manifest)
    return Backing(
        path,
        manifest.schema.decoded,
        manifest.rows,
        source or "",
        columns.__getitem__,
        manifest,
        owner,
        remake=remake,
        supply=supply,
        masks_rows=masks_rows,
        source=source,
    )


def switch_to_committed(backing: Backing) -> bool:
    """Let a backing that was filled read the finished store at its path. Return False if that store has other rows."""
    assert backing.path is not None
    found = format.read_manifest(backing.path)
    if found is None or found[0].rows != backing.row_count or source_digest(found[0]) != backing.digest:
        return False
    manifest, digest, identity = found
    columns: Any = [backing.column(index) for index in range(len(manifest.schema))]
    for column in columns:
        column.switch_to_committed(backing.path, _checker(backing.path, identity, digest))
    backing.manifest, backing.digest, backing.supply, backing.remake = manifest, digest, None, None
    backing.check = _checker(backing.path, identity)
    return True


def switch_columns(backing: Backing, other: Backing) -> None:
    """Let a backing, and all views of it, read the columns of another one, which has the same rows."""
    if other.supply is not None:
        other.supply.follow(backing)
    backing.schema, backing.manifest, backing.digest = other.schema, other.manifest, other.digest
    backing.open_column, backing._columns = other.open_column, {}
    backing.remake, backing.check, backing.widen = other.remake, other.check, other.widen
    backing.supply = other.supply
    for view in list(backing.views.values()):
        view.renew()


def source_digest(manifest: Manifest | None) -> str | None:
    """Return a hash of the dataset that a store was made from, in hexadecimal; None where that is not known."""
    if manifest is None or manifest.fingerprint is None:
        return None
    # a file that was touched, or data that could not be hashed in time, makes no other source
    known = msgspec.structs.replace(manifest.fingerprint, digests=msgspec.UNSET)
    return format.digest(msgspec.json.encode(known))


def open_backing(root: Path, owner: object = None) -> Backing:
    """Open the columns at ``root``; ``owner`` lives as long as they do. Raises StoreError, CorruptStoreError."""
    found = format.read_manifest(root)
    if found is not None:
        return _memfeed_backing(root.absolute(), *found, owner)
    if memo_format.is_memo(root):
        return memo_backing(root.absolute())
    if (root / format.CHECKSUMS).is_file():  # else it would be read as tensordict does, with start and dims as fields
        raise CorruptStoreError(
            f"{root}: found the files of a store without its {format.MANIFEST}; expected it: copy the whole directory "
            "again, or remove it and write the store again"
        )
    from memfeed.store import foreign, tensordict_dir  # a store of memfeed needs none of this

    is_archive = foreign.is_archive(root)
    if is_archive or (root / "meta.json").exists() or any(root.glob("*meta.pt")):
        unpacked = tensordict_dir.unpack(root) if is_archive else None
        contents, digest = tensordict_dir.read(root if unpacked is None else unpacked.path)
        return Backing(
            root.absolute(),
            contents.schema,
            contents.row_count,
            digest,
            contents.columns.__getitem__,
            owner=unpacked,
            left_out=contents.left_out,
        )
    if not root.exists():
        raise StoreNotFoundError(_nothing(root))
    raise StoreError(_not_a_store(root))


def memo_backing(root: Path, numbers: Int64Array | None = None) -> Backing:
    """Return the memoized results at ``root``: those that are there now, or the rows with these ``numbers`` [n]."""
    from memfeed.store import memo_dir  # a store of memfeed needs none of this

    contents = memo_dir.read(root, memo_dir.present_rows(root) if numbers is None else numbers)
    return Backing(
        root,
        contents.schema,
        len(contents.rows.numbers),
        contents.digest,
        contents.columns.__getitem__,
        remake=(memo_backing, (root, contents.rows.numbers)),
        description="memoized results",
        verify=partial(memo_dir.verify, root, contents.rows),
    )


def _nothing(root: Path) -> str:
    build = format.build_path(root)
    hint = f"{build} is an unfinished build: call cache() again to resume it"
    if (build / format.WORK_DIRECTORY / format.CACHE_SETTINGS).exists():
        hint = f"{build} is an unfinished pull: the same memfeed.pull() resumes it"
    return (
        f"{root}: found nothing there; expected a store"
        f"{'; ' + hint if build.exists() else ': make one with memfeed.cache(dataset, path)'}"
    )


def _not_a_store(root: Path) -> str:
    if (root / "storage" / "meta.json").exists():
        return f"{root}: found the dump of a TorchRL replay buffer; expected its storage: open {root / 'storage'}"
    from memfeed.store.foreign import conversion  # a store of memfeed needs none of this

    if line := conversion(root):
        return line
    stores = sorted(path.parent.name for path in root.glob(f"*/{format.MANIFEST}"))
    if stores:  # of the splits of a DatasetDict, for example
        return (
            f"{root}: found a folder of stores ({', '.join(stores)}), which is no store itself; expected one of them: "
            f"memfeed.open({str(root / stores[0])!r})"
        )
    what, expected = "a directory" if root.is_dir() else "a file", "a directory of TensorDict.memmap()"
    with contextlib.suppress(OSError):
        if not os.listdir(root):
            expected += ". It is empty: to make a store, remove it, or choose a path in it"
    return f"{root}: found {what} that is no store; expected memfeed.json in it, or {expected}"
