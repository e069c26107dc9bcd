"""Dataset -> store: what ``memfeed.cache`` does, from the first look to the finished directory."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from torch.utils.data import IterableDataset

from memfeed.building.build import Build
from memfeed.building.claim import clear
from memfeed.building.recovery import claim_recovered, remove_remains
from memfeed.building.rows import ABSENT
from memfeed.convert import probe, staleness
from memfeed.convert import repair as mend
from memfeed.convert.budget import budget_of, row_bytes
from memfeed.convert.driver import OnReport, convert_columns, convert_map, convert_stream, default_workers, note_skips
from memfeed.convert.inputs import Input, classify_input, refuse_copy
from memfeed.convert.probe import Probed
from memfeed.convert.watchdog import Readers
from memfeed.convert.write_run import Report, WritePlan, write_run
from memfeed.errors import BuildError, CorruptStoreError, MemfeedError, SchemaError, StaleStoreError, StoreError
from memfeed.schema.fields import Kind
from memfeed.schema.infer import Inferred, infer
from memfeed.schema.tree import Flattener, types_of
from memfeed.store import format
from memfeed.store.manifest import Fingerprint, Probe
from memfeed.store.store import Store, open_store
from memfeed.system import files
from memfeed.system.progress import Progress
from memfeed.system.signals import Sigterm, sigterm_unwinds

RecordClass: TypeAlias = type[Any]


class ConvertOptions(msgspec.Struct, frozen=True):
    """The arguments that shape the schema."""

    fields: Sequence[str] | Mapping[Any, Kind] | None
    dtypes: Mapping[Any, torch.dtype] | None
    record: RecordClass | None
    allow_random: bool
    skip_errors: bool


class ProbeResult(msgspec.Struct, frozen=True):
    """What probing an input gave."""

    found: Inferred
    probed: Probed
    types: tuple[type, ...]
    rest: Any = None  # the iterator behind the samples probed


def cache(
    dataset: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    fields: Sequence[str] | Mapping[Any, Kind] | None = None,
    dtypes: Mapping[Any, torch.dtype] | None = None,
    type: RecordClass | None = None,
    workers: int | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    allow_random: bool = False,
    copy_existing: bool = False,
    check: bool = True,
    overwrite: bool = False,
    repair: bool = False,
    progress: bool = True,
) -> Store:
    """Writes every sample of a dataset once into a store at ``path`` and opens it; opens one that is there already.

    ``dataset`` is a map-style dataset (``len`` and ``[]``), an iterable of unknown length, or columns in memory: a
    tensor or array, a tuple or dict of them, a TensorDataset, a TensorDict, a tensorclass (copied in chunks).

    Args:
        path: the store's directory; None makes a temporary one, removed with the last store object that uses it.
        fields: names for the leaves of a tuple sample, in order; or ``{path: kind}`` to fix how a leaf is kept
            ("fixed", "jagged", "list", "json", ...), which also forbids its dims to vary otherwise.
        dtypes: ``{field: dtype}`` to cast; a cast that would change a value is refused.
        type: a tensorclass, dataclass or namedtuple class that samples and batches come back as.
        workers: processes that read and write rows; None chooses. An iterable is read in one process unless a number
            is given: then it must share itself out with ``torch.utils.data.get_worker_info``.
        on_error: "skip" leaves out samples for which a map-style dataset raises; ``store.skipped`` lists them.
        allow_random: keep one draw of random samples instead of refusing them.
        copy_existing: copy data that is memory-mapped on disk already instead of refusing to.
        check: compare a store that is there with samples of the dataset; False opens it unseen.
        overwrite: replace a store that is there. Its readers keep the columns they use, new opens get the new.
        repair: check every byte of the store that is there, and compute the rows again whose bytes have rotted (and
            no others). The mended store takes its place as with ``overwrite``.
        progress: the budget and a progress bar, on stderr.

    Raises:
        RandomDataError, StaleStoreError, CopyError: see above; each says what to do.
        SchemaError: a sample holds what no column can, or differs from the others (sample index, field).
        SampleError: the dataset raised; the cause is its exception. BuildError: a worker died.
        SpaceError: it will not fit on the disk. StoreError: ``path`` is something else. CorruptStoreError: damage that
        ``repair`` cannot mend.

    After an error the rows that were written stay in ``NAME.build``, and the same call goes on from there.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f'found on_error={on_error!r}; expected "raise" or "skip"')
    if workers is not None and (not isinstance(workers, int) or workers < 0):
        raise ValueError(f"found workers={workers!r}; expected 0 or more, or None to choose")
    if workers and isinstance(dataset, Iterator):
        raise ValueError(
            f"found workers={workers} for an iterator, which every worker would iterate for itself; expected 0, or an "
            "IterableDataset that shares itself out with torch.utils.data.get_worker_info"
        )
    if repair and (path is None or overwrite or not check):
        raise ValueError("found repair=True without a path, or with overwrite=True or check=False; expected it alone")
    owner = None
    if path is None:
        owner = _Temporary()
        path = owner.path / "store.mf"
    target = Path(path).resolve()
    refuse_copy(dataset, target, copy_existing)
    given = classify_input(dataset)
    wishes = ConvertOptions(fields, dtypes, type, allow_random, on_error == "skip")
    if repair:
        mended = _repair(target, given, wishes, progress)
        if mended is not None:
            return mended
    before = format.identity(target)
    if target.exists() and not overwrite:
        remove_remains(target)
        return _opened(target, given, wishes, check, owner)
    if target.exists():
        _require_store(target)
    files.make_directory(target.parent)
    with sigterm_unwinds() as sigterm, _dropped_on_error(owner), claim_recovered(target):
        made = format.identity(target) != before if overwrite else target.exists()  # another process was faster
        if not made or (overwrite and not _fits(target, given, wishes)):
            look = _look(given, wishes)
            _write(target, given, look, wishes, workers, overwrite, progress, owner is not None, sigterm)
            return open_store(target, types=look.types, owner=owner)
    return _opened(target, given, wishes, check, owner)


class _Temporary:
    """A directory that is removed with this object, or when the process that made it ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="memfeed-"))
        self.remove = weakref.finalize(self, _remove, str(self.path), os.getpid())


@contextlib.contextmanager
def _dropped_on_error(owner: _Temporary | None) -> Iterator[None]:
    """A process that a signal ends runs no finalizers."""
    try:
        yield
    except BaseException:
        if owner is not None:
            owner.remove()
        raise


def _remove(path: str, pid: int) -> None:
    if pid == os.getpid():  # a forked worker must not remove its parent's store
        shutil.rmtree(path, ignore_errors=True)


def _opened(target: Path, given: Input, wishes: ConvertOptions, check: bool, owner: object) -> Store:
    """The store that is there, compared with samples of the dataset if it shall be."""
    if not check:
        return open_store(target, types=_types_unseen(given, wishes), owner=owner)
    return _checked(open_store(target), given, wishes, owner)


def _fits(target: Path, given: Input, wishes: ConvertOptions) -> bool:
    """Whether the store that appeared while this process was to replace one is of this dataset."""
    if isinstance(given.dataset, Iterator):
        return False  # to compare would use up its samples
    try:
        _checked(open_store(target), given, wishes, None)
    except MemfeedError:
        return False
    return True


def _require_store(target: Path) -> None:
    """Raises StoreError unless a store of ours is at ``target``: nothing else is ever replaced."""
    if not (target / format.MANIFEST).exists():
        raise StoreError(
            f"{target}: found something that is no memfeed store; overwrite=True replaces stores only: "
            "choose another path, or remove it yourself"
        )


def _look(given: Input, wishes: ConvertOptions, indices: Sequence[int] | None = None, rows: int = 0) -> ProbeResult:
    """Reads samples and infers the schema; with ``indices``, those samples of a store of ``rows``, to compare."""
    rest = None
    random_ok = wishes.allow_random or indices is not None or given.kind == "columns"
    if given.kind == "iterable":
        if isinstance(given.dataset, IterableDataset) and not random_ok:
            probe.check_iterable(given.dataset)
        count = probe.SAMPLES if not indices else len(indices) + (rows == len(indices))  # one more tells if it grew
        probed, rest = probe.probe_iterable(given.dataset, count)
    else:
        assert given.length is not None
        wanted = [i for i in indices if i < given.length] if indices else probe.indices_of(given.length)
        if given.kind == "columns" and indices is None:
            wanted = wanted[:1]  # the rows of a column are all of one kind
        probed = probe.probe_map(given.dataset, wanted, allow_random=random_ok, skip_errors=wishes.skip_errors)
    if not probed.samples:
        raise SchemaError(
            "found no sample to look at: "
            + (f"all {len(probed.failed)} that were probed raised" if probed.failed else "the iterable is empty")
            + "; expected at least one"
        ) from next(iter(probed.failed.values()), None)
    found = infer(
        probed.samples, indices=probed.indices, fields=wishes.fields, dtypes=wishes.dtypes, record=wishes.record
    )
    types = types_of(probed.samples) + ((wishes.record,) if wishes.record else ())
    if isinstance(given.dataset, Store):
        types += given.dataset.types
    return ProbeResult(found, probed, types, rest)


def _types_unseen(given: Input, wishes: ConvertOptions) -> tuple[type, ...]:
    """The record classes of a dataset whose store is opened unchecked: one sample tells."""
    if given.kind == "iterable":
        return (wishes.record,) if wishes.record else ()
    try:
        first = [given.dataset[0]]
    except Exception:  # unseen is unseen: the store opens without its classes
        first = []
    return types_of(first) + ((wishes.record,) if wishes.record else ())


def _fingerprint(given: Input, look: ProbeResult, hashes: tuple[Probe, ...]) -> Fingerprint:
    # columns in memory come from no code of a dataset that could change
    source, name = ("", "") if given.kind == "columns" else probe.source_of(given.dataset)
    return Fingerprint(kind=given.kind, length=given.length, source=source, source_name=name, probes=hashes)


def _repair(target: Path, given: Input, wishes: ConvertOptions, progress: bool) -> Store | None:
    """Computes the rows of the store at ``target`` again whose bytes have rotted; None if there are none."""
    with sigterm_unwinds(), claim_recovered(target) as root:
        if not target.exists():
            raise StoreError(f"{target}: found nothing to repair; expected a store: leave out repair=True to make one")
        try:
            store = open_store(target)
        except StoreError as error:  # no manifest, or files that are missing or of another size
            hint = "repair=True mends rows only: overwrite=True makes it anew"
            raise CorruptStoreError(f"{error}; {hint}") from None
        if store.manifest is None or given.kind == "iterable" or not getattr(store.manifest.fingerprint, "probes", ()):
            raise StoreError(
                f"{target}: found a store whose rows cannot be computed again one by one; repair=True expects one that "
                "cache made of a map-style dataset or of columns, without allow_random: use overwrite=True"
            )
        if Build.is_begun(root):
            raise BuildError(f"{root}: found an unfinished build; finish it (overwrite=True) or remove it to repair")
        with Progress(target.name, store.nbytes, unit="B", shown=progress) as bar:
            seen = 0

            def advance(done: int, total: int) -> None:
                nonlocal seen
                bar.advance(done - seen)
                seen = done

            rot = mend.find_rot(target, store.manifest, advance)
            if not rot:
                bar.say(f"memfeed: {target} is whole: no row to repair")
                return None
            look = _compared(store, given, wishes)
            known = dict(zip(look.probed.indices, look.probed.samples, strict=True))
            flattener, readers = Flattener(look.found.structure), Readers(0)

            def leaves(index: int) -> list[Any]:
                return flattener(known[index] if index in known else probe.read(given.dataset, index, readers))

            with readers.watched():
                count = mend.repair(target, store.manifest, rot, leaves, look.found.casts)
            bar.say(f"memfeed: {target}: {count:,} of {len(store):,} rows repaired (bad chunks: {len(rot)})")
    return open_store(target, types=look.types)


def _checked(store: Store, given: Input, wishes: ConvertOptions, owner: object) -> Store:
    """The store that is there, once samples of the dataset have been compared with it."""
    return open_store(store.path, types=_compared(store, given, wishes).types, owner=owner)


def _compared(store: Store, given: Input, wishes: ConvertOptions) -> ProbeResult:
    """The samples of the dataset that were compared with a store; raises StaleStoreError where they differ."""
    old = store.manifest.fingerprint if store.manifest else None
    if old is None:
        raise StaleStoreError(
            f"{store.path}: found a store that was not made from a dataset (Writer, or tensordict), so it cannot be "
            f"compared with this one; open it with memfeed.open({str(store.path)!r}), or pass check=False"
            + (" or overwrite=True" if store.manifest else "")
        )
    if old.length != given.length:
        raise staleness.refuse(store.path, f"found {given.length} samples, expected {old.length}")
    names = [field.name for field in store.schema]
    if wishes.fields is not None and not isinstance(wishes.fields, Mapping) and list(wishes.fields) != names:
        raise staleness.refuse(store.path, f"found fields={list(wishes.fields)}, expected {names}")
    look = _look(given, wishes, [found.index for found in old.probes], len(store))
    if given.kind == "iterable" and old.probes:
        staleness.check_count(store.path, len(look.probed.samples), len(old.probes), len(store))
    staleness.check(
        store.path, store.schema, old, _fingerprint(given, look, ()), look.found, look.probed, store.stored_value
    )
    return look


def _write(
    target: Path,
    given: Input,
    look: ProbeResult,
    wishes: ConvertOptions,
    workers: int | None,
    overwrite: bool,
    progress: bool,
    temporary: bool,
    sigterm: Sigterm,
) -> None:
    """Builds the store at ``target``: from the start, or from where an earlier build of it stopped."""
    found, seconds = look.found, look.probed.seconds
    packed = probe.pack_samples(found, look.probed)
    plan = WritePlan(
        flattener=Flattener(found.structure),
        casts=found.casts,
        held=found.chosen_kinds,
        row_bytes=row_bytes(packed),
        skip_errors=wishes.skip_errors,
    )
    columns = _whole_columns(given, look)
    if columns is not None:
        hashes = probe.column_hashes(found.schema, columns, found.casts, len(given.dataset))
    else:
        hashes = () if wishes.allow_random else probe.probe_hashes(found.schema, look.probed.indices, packed)
    if workers is None:
        workers = 0 if given.length is None or columns is not None else default_workers(given.length, seconds)
    fingerprint = _fingerprint(given, look, hashes)
    build = _resumed(format.build_path(target), fingerprint, look, wishes, overwrite)
    if build is None:
        cost = budget_of(target, given.length, plan.row_bytes, seconds / max(workers, 1))
        shares = max(workers, 1) if given.kind == "iterable" else 1
        build = Build.begin(format.build_path(target), found.schema, given.length, fingerprint, shares)
        said, there = f"memfeed: {cost} -> {target}", 0
    else:
        there = int((build.presence() > 0).sum())
        said = f"memfeed: going on with {build.root}: {there:,} rows are there already"
    try:
        with Progress(target.name, given.length, unit=" rows", shown=progress, done=there) as bar:
            bar.say(said)

            def report(done: Report) -> None:
                bar.advance(done.rows + done.skipped, done.bytes)
                sigterm.check()
                if sigterm.passed():
                    build.sync()

            if build.is_closing:
                bar.say(f"memfeed: {build.root} has all its rows; its commit goes on")
            elif columns is not None:
                convert_columns(build, columns, plan, report)
            elif given.kind == "iterable":
                _convert_iterable(build, given, look, plan, report)
            else:
                if not wishes.allow_random:
                    _write_probed(build, plan, look, report)
                convert_map(build, given.dataset, plan, workers=workers, seconds=seconds, on_report=report)
        build.commit(target, overwrite=overwrite)
    except BaseException as error:
        _keep_or_drop(build, error, temporary)
        raise


def _whole_columns(given: Input, look: ProbeResult) -> list[Any] | None:
    """The columns to copy whole; None for samples, and for columns that fields= wants to be ragged."""
    if given.kind != "columns" or any(field.kind != "fixed" for field in look.found.schema):
        return None
    columns: list[Any] = given.dataset.leaves(look.found.structure)
    return columns


def _convert_iterable(build: Build, given: Input, look: ProbeResult, plan: WritePlan, report: OnReport) -> None:
    """In this process the samples probed come first: an iterator gives them only once."""
    shares = build.settings.shares  # where a row goes depends on it: an earlier build's number stays
    if shares > 1:
        convert_stream(build, given.dataset, plan, workers=shares, on_report=report)
    else:
        convert_stream(build, itertools.chain(look.probed.samples, look.rest), plan, workers=0, on_report=report)


def _write_probed(build: Build, plan: WritePlan, look: ProbeResult, report: OnReport) -> None:
    """The samples probed are rows already: nothing is decoded twice."""
    present = build.presence()
    rows = build.writer()
    for index, sample in zip(look.probed.indices, look.probed.samples, strict=True):
        if present[index] == ABSENT:
            done = write_run(rows, plan, index, [plan.flattener(sample)], index)
            report(Report(rows=1, bytes=done))
    rows.close()
    failed = [index for index in look.probed.failed if present[index] == ABSENT]
    note_skips(build, failed)
    report(Report(skipped=len(failed)))


def _resumed(
    root: Path, fingerprint: Fingerprint, look: ProbeResult, wishes: ConvertOptions, overwrite: bool
) -> Build | None:
    """The unfinished build at ``root``, to go on with; None without one, or if overwrite=True discards another's.

    Raises StaleStoreError for the build of another dataset.
    """
    build = Build.resume(root)
    if build is None:
        return None
    before = build.settings.fingerprint
    if overwrite and before is not None and before.source != fingerprint.source:
        return None  # its rows may be of code that was mended meanwhile: that is what overwrite=True is for
    try:
        if build.settings.fingerprint is None:
            raise staleness.refuse(root, "found the build of a Writer")
        if [field.path for field in look.found.schema] != [field.path for field in build.schema]:
            raise staleness.refuse(
                root, staleness.schema_difference(look.found.schema, build.schema)
            )  # or other wishes
        staleness.check(root, build.schema, build.settings.fingerprint, fingerprint, look.found, look.probed, None)
    except StaleStoreError:
        if overwrite:
            return None
        raise
    if build.row_count is not None and not build.is_closing:
        build.retry_skipped()  # the dataset may have been mended, or on_error changed
    return build


def _keep_or_drop(build: Build, error: BaseException, temporary: bool) -> None:
    """Syncs what was written, and says in an error of ours that it is kept; a build of no row or path is removed."""
    with contextlib.suppress(OSError, MemfeedError):  # the first error is the one to be told
        if not temporary:
            build.sync()
    try:
        there = int((build.presence() > 0).sum())
    except (OSError, StoreError):  # it had become the store already, or the disk cannot be read
        return
    if not there or temporary:
        with contextlib.suppress(OSError, MemfeedError):
            clear(build.root)
        return
    if not isinstance(error, MemfeedError):
        return
    kept = f" [{there:,} rows are kept in {build.root}; the same call goes on from there]"
    if isinstance(error, OSError):
        error.strerror = f"{error.strerror}{kept}"
    elif len(error.args) == 1:
        error.args = (f"{error.args[0]}{kept}",)
