"""`memfeed.append` and `memfeed.concat`: more rows for a store, without copying those that are there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from memfeed.building import commit
from memfeed.building.build import Build
from memfeed.building.claim import clear, unwrap_missing
from memfeed.building.commit import claim_recovered
from memfeed.building.copy_rows import require_nothing_at
from memfeed.building.join import Part, join
from memfeed.convert.cache import cache_one
from memfeed.convert.options import options_of
from memfeed.convert.recode import shapes_in
from memfeed.convert.splits import keep_of
from memfeed.convert.staleness import require_forms
from memfeed.errors import BuildError, MemfeedError, StaleStoreError, StoreError
from memfeed.store import format
from memfeed.store.manifest import Manifest
from memfeed.store.opened import open_store
from memfeed.store.store import Store
from memfeed.system import files, locks
from memfeed.system.progress import SLOW_SECONDS, Progress, is_shown, write_line

SUFFIX = ".append"  # of the store of the new rows, beside the one that gets them
COMMITTED = "committed"  # in it: the digest of the manifest in which its rows are


def append(
    store: Store | str | os.PathLike[str],
    dataset: Any,
    *,
    forms: Any = None,
    types: type[Any] | Iterable[type[Any]] = (),
    split: bool | str = False,
    length: int | None = None,
    workers: int | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    allow: str | Collection[str] = (),
    progress: bool | None = None,
) -> Store:
    """Add every sample of a dataset to a store that exists, after its rows, and open the new generation of the store.

    The rows that are there are not copied: the new generation shares their bytes with the old one (reflinks, else hard
    links; a file system that has neither copies them, which a line on stderr says). The new generation takes the place
    of the old one in one step. Stores that are open keep the rows that they had. Each call adds its samples, also those
    that the store has already.

    Args:
        store: the store, or its path: a whole one, no view.
        dataset: as for `memfeed.cache`. Its samples must fit the fields of the store: the same structure and dtypes,
            and dims that vary only where they do in the store.
        forms, types, split, length, workers, worker_init_fn, on_error, allow, progress: as for `memfeed.cache`;
            what shapes the rows as it was passed there. Tasks of Ray cannot append, and mapped data is always copied.

    Returns:
        The new generation, open.

    Raises:
        SchemaError: samples that do not fit (the field and both forms), or other classes than the store's.
        StoreError: no store, a view, a store that is being filled, or of another user. StaleStoreError: an append of
        another dataset was interrupted. BuildError: a build of this store is unfinished. Also what `memfeed.cache`
        raises.

    After an error or a kill the store is as it was, the new rows are kept in ``NAME.append.build`` (or, all of them, in
    ``NAME.append``), and the same call goes on from there. Rows whose commit was done are not added again.
    """
    if not isinstance(store, Store | str | os.PathLike):
        raise TypeError(
            f"found {type(store).__name__} as the store to append to; expected a store or its path, and then the "
            "dataset: memfeed.append(path, dataset)"
        )
    options = options_of(
        dataset, forms=forms, types=types, split=split, length=length, workers=workers,
        worker_init_fn=worker_init_fn, on_error=on_error, allow=allow, progress=progress,
    )  # fmt: skip
    if options.on_ray:
        raise ValueError(f"found workers={workers!r}; expected a number: the processes of this machine append")
    given = _whole(store)
    target = format.resolve(given.path, to_write=True)
    place = target.with_name(target.name + SUFFIX)
    if not target.exists():
        _whole(target)  # the store that is open was moved or removed: an error that says so
    with claim_recovered(target) as root:
        _require_no_build(root)
        format.require_nothing_else(target)
        old = _whole(target)  # another process may have replaced it meanwhile
        manifest = old._view.manifest
        assert manifest is not None
        if old._view.recipe and not split:
            raise StoreError(
                f"{target}: found a store made with split=; expected the same here: append(store, dataset, split=True)"
            )
        is_committed = _is_committed(place, old._backing.digest)
        options = msgspec.structs.replace(
            options, copy_existing=True, keep=options.keep or keep_of(old), like=manifest.schema
        )
        if options.forms.has_codecs:  # the rows are stored in the forms of the store
            require_forms(target, manifest.schema, options.forms, shapes_in(old))
        try:
            new = cache_one(dataset, place, options)
        except StaleStoreError as error:
            if not is_committed:
                raise _of_another(place, error) from error
            files.remove_tree(place)
            is_committed = False
            new = cache_one(dataset, place, options)
        if is_committed:
            write_line(f"memfeed: {target}: the rows of this dataset were appended before the process ended")
            _remove(place, target)
        else:
            older = [*format.generations(target), old._backing.digest]
            manifest = _join(root, [old, new], older=older, progress=progress)
            files.write_atomically(place / COMMITTED, format.digest(format.encode(manifest)).encode())
            with locks.locked(place / COMMITTED):  # once published, the store can be claimed by another append
                commit.publish(root, target, overwrite=True)
                _remove(place, target)
    return open_store(target, types=(*given._view.types, *new._view.types), owner=given._backing.owner)


def concat(
    stores: Sequence[Store | str | os.PathLike[str]], path: str | os.PathLike[str], *, progress: bool | None = None
) -> Store:
    """Write the rows of several stores, one store's after the other, into a new store at ``path``, and open it.

    Bytes that the file system can share are not copied (reflinks); a line on stderr says what is written. The stores
    stay as they are. The first one decides names, metadata and attributes.

    Args:
        stores: one or more stores, or their paths: whole ones, no views, all of one schema.
        path: the directory of the new store; nothing may exist there yet.
        progress: as for `memfeed.cache`.

    Raises:
        SchemaError: the stores differ; the first difference is named. StoreError: something is at ``path``, or a store
        is a view, is being filled, or was replaced meanwhile. CorruptStoreError: a store is damaged. SpaceError: the
        disk has too little free space.

    After an error or a kill nothing is at ``path``, and the same call starts from the beginning.
    """
    is_shown(progress)  # raises for what has no meaning
    if isinstance(stores, str | bytes | os.PathLike | Store) or not isinstance(stores, Collection) or not stores:
        found = "nothing" if isinstance(stores, Collection) and not stores else f"an object of {type(stores).__name__}"
        raise ValueError(
            f"found {found} to concatenate; expected a list of one or more stores or their paths, and then a path: "
            "memfeed.concat([store, other], path)"
        )
    opened = [_whole(store) for store in stores]
    target = format.resolve(path, to_write=True)
    files.make_directory(target.parent)
    with claim_recovered(target) as root:
        require_nothing_at(target)
        _require_no_build(root)
        _join(root, opened, progress=progress)
        commit.publish(root, target, overwrite=False)
    return open_store(target, types=[cls for store in opened for cls in store._view.types])


def _join(root: Path, stores: Sequence[Store], *, older: Sequence[str] = (), progress: bool | None) -> Manifest:
    """Write the store of all rows into the build's directory, and seal it.

    ``older`` are the digests of the first store and of those before it, whose next generation this is.
    """
    parts = [Part(store.path, store._view.manifest) for store in stores if store._view.manifest is not None]

    what = f"{' + '.join(f'{part.manifest.rows:,}' for part in parts)} rows -> {root.with_suffix('')}"
    clear(root)
    try:
        try:
            with Progress(
                root.with_suffix("").name, None, unit="B", progress=progress, delay_seconds=SLOW_SECONDS
            ) as bar:
                manifest = join(root, parts, grow=bool(older), bar=bar, what=what)
        finally:
            for store in stores:
                store._backing.check()  # what was read, or is missing, may be that of a store that replaced this one
        if older:
            files.write_file(root / format.GENERATIONS, "\n".join(older).encode())
            files.chmod(root / format.GENERATIONS, 0o444)
        commit.seal(root, manifest)
    except BaseException:
        with contextlib.suppress(MemfeedError):  # the first error is the one to raise
            clear(root)
        raise
    return manifest


def _whole(given: Store | str | os.PathLike[str]) -> Store:
    """Return a whole store. Raise StoreError for a view, a store that is being filled, and other objects."""
    store = given if isinstance(given, Store) else open_store(given)
    if store._view.manifest is None:
        raise StoreError(
            f"{store.path}: found no store of memfeed's own; expected one: make it with memfeed.cache(data, path, "
            "allow='copy')"
        )
    store._view.require_filled("more rows")
    is_all = store._view.has_all_rows and store.schema == store._backing.schema and store._backing.remake is None
    if not is_all:
        raise StoreError(
            f"{store.path}: found a view of a store (rows, fields, windows); expected a whole one: open it with "
            f"memfeed.open({str(store.path)!r})"
        )
    return store


def _require_no_build(root: Path) -> None:
    if Build.is_begun(root):
        raise BuildError(
            f"{root}: found an unfinished build; expected none: finish it with the call that began it, or remove that "
            "directory"
        )


def _is_committed(place: Path, digest: str) -> bool:
    """Return True if the store with this manifest has the rows at ``place``. Wait for a process that removes them."""
    mark = place / COMMITTED
    try:
        with unwrap_missing(), locks.locked(mark) as fd:
            return mark.exists() and os.pread(fd, len(digest), 0) == digest.encode()
    except FileNotFoundError:
        return False


def _remove(place: Path, target: Path) -> None:
    """Remove the store of rows that are committed. In one step it is none that waits to be appended."""
    remains = commit.appended_path(target)
    files.remove_tree(remains)  # an append before this one may be removing them
    files.rename(place, remains)
    files.remove_tree(remains)


def _of_another(place: Path, error: StaleStoreError) -> StaleStoreError:
    build = format.build_path(place)
    found = place if place.exists() else build
    difference = str(error).partition("stored: ")[2].partition(". ")[0] or str(error)
    return StaleStoreError(
        f"{found}: found the rows of an append of another dataset that was interrupted ({difference:.100}); expected "
        "none, or the same dataset, which goes on with it: to drop those rows, remove that directory"
    )
