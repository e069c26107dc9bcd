"""`memfeed.cache(..., lazily=True)`: open a store that is filled while it is read, alone or with other processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from memfeed.building.build import Build
from memfeed.building.claim import ClaimedError, is_shared, require_no_import, share
from memfeed.building.commit import claim_recovered
from memfeed.convert.conversion import Conversion, open_or_convert, removed_on_error
from memfeed.convert.dataset_supply import DatasetSupply, backing_at
from memfeed.convert.inputs import Input
from memfeed.convert.options import ConvertOptions
from memfeed.convert.probe import ProbeResult, probe_input
from memfeed.convert.write_run import promote_column
from memfeed.errors import BuildError, SchemaError, StoreError, StoreNotFoundError, UnfitRowError
from memfeed.schema.fields import NO_VALUE, Field, shown_dims
from memfeed.store import format
from memfeed.store.backing import Backing, filling_backing, switch_columns
from memfeed.store.dataset_attributes import Attributes
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.opened import open_store
from memfeed.store.ragged import column_files
from memfeed.store.store import Store
from memfeed.store.view import View
from memfeed.system import files
from memfeed.system.locks import close_lock
from memfeed.system.progress import write_line
from memfeed.system.signals import Sigterm
from memfeed.system.temporary import TemporaryDirectory

WAIT_SECONDS = 0.1
JOIN_SECONDS = 10.0  # files of a build that is not being committed do not vanish for so long
REPORT_SECONDS = 5.0
SETTINGS = "filling.json"
UNFIT = "unfit-{}.json"  # the shape of a row that fits no column, by the process that has found it


class _UnfitShape(msgspec.Struct, frozen=True):
    """The shape of a row that its column does not take."""

    field_index: int
    dims: tuple[int, ...]


def open_or_fill(
    target: Path,
    given: Input,
    options: ConvertOptions,
    owner: TemporaryDirectory | None,
    stored: Store | None = None,
    *,
    unpickles: bool = False,
) -> Store:
    """Return the store at ``target``: the finished one, or one whose rows come while it is read.

    A process that starts ``unpickles`` its arguments as it imports the program, and may join the one that started it.
    Raises what `open_or_convert` raises, SchemaError for anything but a map-style dataset, and BuildError if other
    processes fill the store under other settings.
    """
    if given.kind != "map":
        what = "columns, which are copied as fast as the disk writes" if given.kind == "columns" else "an iterable"
        raise SchemaError(
            f"found {what}, and lazily=True; expected a map-style dataset (len and []), whose rows can be read in any "
            "order: leave lazily out"
        )
    files.make_directory(target.parent)
    waited, is_told = time.monotonic(), False
    with removed_on_error(owner):
        while not target.exists():
            with contextlib.ExitStack() as stack:
                try:
                    root = stack.enter_context(claim_recovered(target, wait=False))
                except ClaimedError:
                    if not unpickles:
                        require_no_import(format.build_path(target), target)
                    store = _join(target, given, options)
                    if store is not None:
                        return store
                    if not is_told and time.monotonic() - waited > REPORT_SECONDS:
                        is_told = True
                        write_line(f"memfeed: another process is building {target}; waiting for it")
                    time.sleep(WAIT_SECONDS)
                    continue
                if not target.exists():
                    return _lead(target, root, given, options, owner, stack)
        store = open_or_convert(target, given, options, owner, stored)
    store._backing.masks_rows = options.skips_errors
    return store


def _lead(
    target: Path,
    root: Path,
    given: Input,
    options: ConvertOptions,
    owner: TemporaryDirectory | None,
    stack: contextlib.ExitStack,
) -> Store:
    """Begin or resume the build that this process has claimed, and fill it."""
    conversion = Conversion(target, given, options, _probe(given, options), owner is not None)
    others = is_shared(root)  # whose leader has ended
    if others:
        build = Build.join(root)
        _require_same(conversion, build)
        build.units.lose_unsynced()
    else:
        build, message = conversion.resume_or_begin()
        if build.is_closing or not len(build.absent()):
            conversion.finish(build, message, Sigterm())  # only its commit is left
            stack.close()
            return open_store(target, types=conversion.result.types, owner=owner)
        _take_unfit_shapes(build, conversion)
        if options.says:
            write_line(f"memfeed: {message}, filled while it is read")
    try:
        files.write_file(root / WORK_DIRECTORY / SETTINGS, msgspec.json.encode(_settings(conversion)))
        if not options.allow_random and not others:
            conversion.write_probed(build, lambda report: None)
        shared = share(root)
    except BaseException as error:
        conversion.keep_or_remove(build, error)
        raise
    return _filled(conversion, build, stack.pop_all(), shared, owner)


def _join(target: Path, given: Input, options: ConvertOptions) -> Store | None:
    """Fill a store with the process that has claimed it; None if that one does not fill, or not yet."""
    root = format.build_path(target)
    if not is_shared(root):
        return None
    try:
        shared = share(root)
    except FileNotFoundError:  # it is committed now
        return None
    try:
        conversion = Conversion(target, given, options, _probe(given, options), False)
        build = _joined(target, root)
        if build is None:
            close_lock(shared)
            return None
        _require_same(conversion, build)
        return _filled(conversion, build, None, shared, None)
    except FileNotFoundError:
        close_lock(shared)
        if target.exists() or not Build.is_begun(root):  # it was committed meanwhile
            return None
        raise
    except BaseException:
        close_lock(shared)
        raise


def _joined(target: Path, root: Path) -> Build | None:
    """Return the build that others fill; None if it is committed, which removes files while they are checked here."""
    end = time.monotonic() + JOIN_SECONDS
    while Build.is_begun(root) and not target.exists():
        try:
            return Build.join(root)
        except (FileNotFoundError, StoreError):
            if time.monotonic() > end:
                raise
            time.sleep(WAIT_SECONDS)
    return None


def _probe(given: Input, options: ConvertOptions) -> ProbeResult:
    """Probe a dataset. Images of which only one side varies so far are lists: a portrait may come after landscapes.

    A column that is being read cannot change, and photographs of one short side are of both kinds. So are masks of
    the same sides.
    """
    result = probe_input(given, options)
    inferred, schema = result.inferred, result.inferred.schema
    is_cut = options.recipe is not None
    sides = {field.shape[1:] for field in schema if _is_of_one_side(field, is_cut)}
    fields = tuple(
        msgspec.structs.replace(field, kind="list", shape=(None,) * field.rank)
        if field.kind == "jagged" and index not in inferred.chosen_kinds and {field.shape[-2:], field.shape[:2]} & sides
        else field
        for index, field in enumerate(schema)
    )
    schema = msgspec.structs.replace(schema, fields=fields)
    return msgspec.structs.replace(result, inferred=inferred._replace(schema=schema))


def _is_of_one_side(field: Field, is_cut: bool) -> bool:
    """Return True for images of bytes, and before a cut for those of three or four channels of any dtype."""
    channels = (1, 3, 4) if field.dtype == "uint8" else (3, 4) if is_cut else ()
    return field.rank == 3 and field.kind == "jagged" and field.shape[0] in channels


def _settings(conversion: Conversion) -> dict[str, Any]:
    """Return the arguments that all processes must share that fill one store, beside its schema."""
    options = conversion.options
    return {
        "on_error": options.on_error,
        "allow_random": options.allow_random,
        "metadata": dict(conversion.kept.metadata),
        "split": [step.name for step in options.recipe or ()],
        "keep": options.keep,
    }


def keep_of_filling(target: Path) -> Any:
    """Return what is kept of images in the store at ``target`` that is not complete yet; None if there is none."""
    try:
        return _found_settings(format.build_path(target)).get("keep")
    except (OSError, msgspec.DecodeError):
        return None


def _found_settings(root: Path) -> dict[str, Any]:
    return msgspec.json.decode((root / WORK_DIRECTORY / SETTINGS).read_bytes(), type=dict[str, Any])


def _require_same(conversion: Conversion, build: Build) -> None:
    """Raise an error unless the build is of this dataset, and is filled under the same settings."""
    own, found = _settings(conversion), _found_settings(build.root)
    differing: list[tuple[str, Any, Any]]
    differing = [(name, found.get(name), own[name]) for name in own if found.get(name) != own[name]]
    if not differing:
        conversion.require_same(build)
        theirs, mine = ([field.name for field in one] for one in (build.schema, conversion.schema))
        differing = [("fields", theirs, mine)] if theirs != mine else []
    for name, theirs, mine in differing:
        raise BuildError(
            f"{build.root}: found other processes that fill this store with {name}={theirs!r:.80}; expected "
            f"{mine!r:.80}, as here: pass the same arguments in each"
        )


def _filled(
    conversion: Conversion, build: Build, lead: contextlib.ExitStack | None, shared: int, owner: object
) -> Store:
    target, options, kept = conversion.target, conversion.options, conversion.kept
    rows = build.row_count or 0
    attributes = msgspec.structs.replace(kept.attributes, targets=None)
    manifest = format.new_manifest(
        rows=rows,
        schema=build.schema,
        files={name: size or 0 for field in build.schema for name, size in column_files(field, rows).items()},
        checksums="",
        fingerprint=build.settings.fingerprint,
        attributes=msgspec.UNSET if attributes == Attributes() else attributes,
        metadata=dict(kept.metadata) or msgspec.UNSET,
    )
    supply = DatasetSupply(conversion, build, lead, shared, owner)
    remake = (joined_backing, (target.absolute(), msgspec.structs.replace(conversion.given, watched=None), options))
    backing = filling_backing(target, build.root, manifest, supply, owner, remake, masks_rows=options.skips_errors)
    backing.widen = partial(_widen, conversion)
    supply.begin(backing)
    return Store(View(backing, conversion.result.types))


def _widen(conversion: Conversion, backing: Backing, unfit: UnfitRowError) -> None:
    """Let the column that a row does not fit take rows of its shape too, and go on filling the store.

    All views of this process read the new columns. If other processes fill the store, which have the columns of before,
    this raises UnfitRowError, and the next run changes the column before it reads a row.
    """
    supply, target = backing.supply, conversion.target
    root = format.build_path(target)
    shape = _UnfitShape(field_index=unfit.field_index, dims=unfit.shape)
    files.write_file(root / WORK_DIRECTORY / UNFIT.format(os.getpid()), msgspec.json.encode(shape))
    backings = supply.withdraw() if isinstance(supply, DatasetSupply) else []
    if not backings or is_shared(root):
        raise UnfitRowError(
            unfit.what,
            "Other processes fill this store too, with the column as it is: run the program again, which changes the "
            "column before it is read, and keeps the rows that are written",
        ) from None
    owner = backing.owner if isinstance(backing.owner, TemporaryDirectory) else None
    other = open_or_fill(target, conversion.given, conversion.options, owner)._backing
    for each in backings:
        switch_columns(each, other)


def _take_unfit_shapes(build: Build, conversion: Conversion) -> None:
    """Let columns take the rows that were found to fit none, by this process or in a run before."""
    for path in sorted((build.root / WORK_DIRECTORY).glob(UNFIT.format("*"))):
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_UnfitShape)
            before = build.schema.fields[found.field_index].decoded
        except (msgspec.DecodeError, IndexError):  # of a process that was killed as it wrote it
            continue
        is_promotable = found.field_index not in conversion.plan.fixed
        differs = (
            before.kind in ("fixed", "jagged")
            and len(found.dims) == before.rank
            and any(own not in (None, dim) for own, dim in zip(before.shape, found.dims, strict=True))
        )
        lacks_none = found.dims == NO_VALUE and before.kind in ("str", "bytes", "list") and not before.optional
        if is_promotable and (differs or lacks_none):
            promote_column(build, found.field_index, [found.dims])
            after = build.schema.fields[found.field_index].decoded
            if conversion.options.says:
                write_line(
                    f"memfeed: {conversion.target}: found {shown_dims(found.dims)} in field {before.name}, which was "
                    f"{before.describe()}; it is {after.describe()} from now on"
                )
        files.remove(path)


def joined_backing(target: Path, given: Input, options: ConvertOptions) -> Backing:
    """Return the columns of a pickled store that was being filled. This process fills it too, with workers of its own.

    A process that cannot have children, as a worker of a DataLoader, computes the rows that it needs itself. A copy in
    the process that made the pickle shares its workers. Raises what `open_or_fill` raises, and StoreNotFoundError if
    neither the store nor its build is there.
    """
    here = backing_at(target)
    if here is not None:
        return here
    if not target.exists() and not Build.is_begun(format.build_path(target)):
        raise StoreNotFoundError(
            f"{target}: found neither the store nor its unfinished build; expected what the pickle was made from: keep "
            "it until it is unpickled, on the same machine"
        )
    if multiprocessing.current_process().daemon:
        options = msgspec.structs.replace(options, workers=0)
    options = msgspec.structs.replace(options, progress=False)
    return open_or_fill(target, given, options, None, unpickles=True)._backing
