"""A conversion from the probe to the commit: open the store that exists, or write it, or resume writing it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from memfeed.building.build import Build
from memfeed.building.claim import clear, is_shared, refusal_at
from memfeed.building.commit import claim_and_remove_remains, claim_recovered
from memfeed.building.partial import ABSENT, DURABLE, SKIPPED, WRITTEN
from memfeed.convert.budget import describe_budget, mean_row_bytes, overlap_factor, stored_row_bytes
from memfeed.convert.driver import (
    OnReport,
    convert_columns,
    convert_map,
    convert_stream,
    convert_tables,
    default_workers,
)
from memfeed.convert.fingerprint import (
    fingerprint_of,
    hash_columns,
    hash_samples,
    kept_of,
    pack_samples,
    require_probed,
    require_reread,
)
from memfeed.convert.forms import coded_schema, losses_of, observed_shapes
from memfeed.convert.inputs import Input, expected_length
from memfeed.convert.options import ConvertOptions
from memfeed.convert.probe import ProbeResult, probe_input
from memfeed.convert.processes import open_processes
from memfeed.convert.ray_engine import TASK_SECONDS, connected, cpu_count, open_ray_tasks, pickle_dataset
from memfeed.convert.source_hash import is_changed_source
from memfeed.convert.staleness import compare_store, require_equal, require_equal_data, require_forms, stale
from memfeed.convert.write_run import Report, RunWriter, WritePlan, flatten_sample, mark_skipped, picture_fields
from memfeed.errors import BuildError, MemfeedError, RandomDataError, StaleStoreError, StoreError
from memfeed.schema.codec import Packed
from memfeed.schema.compare import schema_difference
from memfeed.schema.fields import Field, Schema
from memfeed.schema.tree import Flattener
from memfeed.store import format
from memfeed.store.dataset_attributes import Kept
from memfeed.store.manifest import Probe
from memfeed.store.opened import open_store
from memfeed.store.store import Store
from memfeed.store.view import View
from memfeed.system import files
from memfeed.system.machine import is_daemon
from memfeed.system.progress import Progress, write_line
from memfeed.system.signals import Sigterm, sigterm_unwinds
from memfeed.system.temporary import TemporaryDirectory
from memfeed.system.threads import has_no_thread


def open_or_convert(
    target: Path, given: Input, options: ConvertOptions, owner: TemporaryDirectory | None, stored: Store | None = None
) -> Store:
    """Return the store at `target`: the one that exists, compared with the dataset, or a new one.

    The store keeps `owner` alive. After an error `owner` is removed. ``stored`` is the one that exists, if it is open.
    """
    identity = format.identity(target)
    if target.exists() and not options.overwrite:
        claim_and_remove_remains(target)
        return _compared(target, given, options, stored)
    if target.exists() and not (target / format.MANIFEST).exists():
        raise StoreError(
            f"{target}: found something that is no memfeed store; expected a store, because overwrite=True replaces "
            "nothing else: choose another path, or remove it yourself"
        )
    format.require_nothing_else(target)
    files.make_directory(target.parent)
    with sigterm_unwinds() as sigterm, removed_on_error(owner), claim_recovered(target):
        # another process may have made the store while this one waited for the claim
        is_made = format.identity(target) != identity if options.overwrite else target.exists()
        if is_made and options.overwrite and isinstance(given.dataset, Iterator):
            is_made = False  # comparing would use up its samples
        if is_made:
            try:
                return _compared(target, given, options)
            except MemfeedError:
                if not options.overwrite:
                    raise
        conversion = Conversion(target, given, options, probe_input(given, options), owner is not None)
        conversion.run(sigterm)
        return open_store(target, types=conversion.result.types, owner=owner)


@contextlib.contextmanager
def removed_on_error(owner: TemporaryDirectory | None) -> Iterator[None]:
    """Remove a temporary directory if the block raises."""
    try:
        yield
    except BaseException:
        if owner is not None:
            owner.remove()
        raise


def _compared(target: Path, given: Input, options: ConvertOptions, stored: Store | None = None) -> Store:
    """Return the store at `target`, once it was compared with the dataset. Raise StaleStoreError if it differs."""
    try:
        if stored is not None:
            stored._backing.check()
    except StoreError:  # another process has replaced it meanwhile
        stored = None
    if stored is None:
        stored = open_store(target)
    return Store(View(stored._backing, compare_store(stored, given, options).types))


class Conversion:
    """Writes the store of a dataset that was probed. Claim `target` before ``run``.

    Everything that the probe decides is computed here, before the first byte is written: how samples become rows, the
    columns to copy whole, the fingerprint, the number of workers.
    """

    def __init__(
        self, target: Path, given: Input, options: ConvertOptions, result: ProbeResult, is_temporary: bool
    ) -> None:
        self.target, self.given, self.options, self.result = target, given, options, result
        self.is_temporary = is_temporary
        self._ray: Any = None  # the module, once connected
        inferred = result.inferred
        packed = pack_samples(result, inferred.schema)
        self.plan = WritePlan(
            flattener=Flattener(inferred.structure),
            casts=inferred.casts,
            fixed=inferred.chosen_kinds,
            pictures=picture_fields(
                inferred.schema, given.watched.leaf_makers if given.watched else {}, makes_all=options.is_watched
            ),
            row_bytes=mean_row_bytes(packed),
            skip_errors=options.skips_errors,
            refuse_random=not options.allow_random and given.kind == "map" and options.recipe is None,
            is_read=options.lazily,
            can_be_decoded=options.lazily and options.split == "auto",
        )
        self.schema = options.like or coded_schema(inferred.schema, options.forms, _shapes(inferred.schema, packed))
        self.length = expected_length(given, options.length)
        # columns that fields= makes ragged are written row by row
        is_columns = given.kind == "columns"
        is_copied = is_columns and given.dataset.is_plain and all(field.kind == "fixed" for field in self.schema)
        self.columns: list[Any] | None = given.dataset.leaves(inferred.structure) if is_copied else None
        self.tables = given.dataset.leaves_of_tables(inferred.structure) if is_columns and not is_copied else None
        hashes: tuple[Probe, ...] = ()
        if self.columns is not None:
            hashes = hash_columns(inferred.schema, self.columns, inferred.casts, len(given.dataset))
        elif not options.allow_random:
            hashes = hash_samples(inferred.schema, result.probed.indices, packed)
        self.fingerprint = fingerprint_of(given, hashes)
        metadata = options.metadata if options.metadata is not None else _metadata_at(target)
        losses = losses_of(self.schema, lambda at: _arrays(self.schema.fields[at].decoded, [row[at] for row in packed]))
        self.kept = kept_of(given, metadata, options, losses)
        self.pickled = pickle_dataset(given.dataset, options.worker_init_fn) if options.on_ray else None
        if is_columns and given.dataset.tables:
            self.worker_count = 0  # a forked process must not use their libraries, nor a file of HDF5
        elif options.workers is not None:
            self.worker_count = options.workers
        elif given.length is None or is_copied or options.on_ray:
            self.worker_count = 0
        else:
            self.worker_count = default_workers(given.length, result.probed.seconds, options.says)
        if self.worker_count and is_daemon() and not options.on_ray:
            self.worker_count = 0
            if options.says:
                write_line("memfeed: this process may start no processes (it is a worker of a pool): workers=0 is used")

    def run(self, sigterm: Sigterm) -> None:
        """Resume or begin the build, and finish it."""
        with contextlib.ExitStack() as stack:
            if self.pickled is not None:
                self._ray = stack.enter_context(connected())
                self.worker_count = self.worker_count or cpu_count(self._ray)
            self.finish(*self.resume_or_begin(), sigterm)

    def finish(self, build: Build, message: str, sigterm: Sigterm) -> None:
        """Write the rows that are absent, and commit the build. After an error the rows that were written are kept."""
        try:
            with Progress(
                self.target.name, self.length, unit=" rows", progress=self.options.progress, done=_count_written(build)
            ) as bar:
                bar.say(f"memfeed: {message}")
                self._fill(build, bar, sigterm)
            self._require_length(build)
            require_probed(build)
            if self.plan.refuse_random:
                require_reread(build, self.given.dataset, self.plan)
            build.commit(self.target, overwrite=self.options.overwrite, kept=self.kept_now())
        except BaseException as error:
            if has_no_thread(error):
                error = BuildError(
                    "found that the system gives no more threads; expected some: raise the limit (ulimit -u), or the "
                    "address space (ulimit -v)"
                )
            self.keep_or_remove(build, error)
            raise error

    def resume_or_begin(self) -> tuple[Build, str]:
        """Return the build of this dataset, and what to say of it: how much is there, or what it will take."""
        build = self.resume()
        if build is not None:
            return build, f"resuming {build.root}: {_count_written(build):,} rows are written already"
        overlap = overlap_factor(self.given, self.result) if self.options.says else 1.0  # where nobody is told
        row_seconds = self.result.probed.seconds / max(self.worker_count, 1)
        row_bytes = stored_row_bytes(self.schema, self.result, self.plan.row_bytes)
        budget = describe_budget(self.target, self.length, row_bytes, row_seconds, overlap, self.options.like is None)
        return self.begin(), f"{budget} -> {self.target}"

    def kept_now(self) -> Kept:
        """Return the attributes that the store keeps, with the number of samples that were proven until now."""
        proven = getattr(self.given.dataset, "proven_rows", None) if self.options.recipe is not None else None
        return self.kept._replace(attributes=msgspec.structs.replace(self.kept.attributes, proven=proven))

    def begin(self) -> Build:
        """Return a new build of this dataset."""
        shares = max(self.worker_count, 1) if self.given.kind == "iterable" else 1
        root = format.build_path(self.target)
        return Build.begin(root, self.schema, self.given.length, self.fingerprint, shares)

    def resume(self) -> Build | None:
        """Return the unfinished build of this dataset, None without one, or if overwrite=True discards another one.

        Raises StaleStoreError for the build of another dataset.
        """
        root = format.build_path(self.target)
        if is_shared(root):
            raise BuildError(
                f"{root}: found other processes that fill this store while they train; expected none: end them, or "
                "join them with lazily=True"
            )
        build = None if refusal_at(root).is_file() else Build.resume(root)  # its rows are of a cut that does not hold
        # where a row is depends on the number of workers, and length= counts the rows of one
        if build is None or (self.options.length is not None and build.settings.shares > 1):
            return None
        old = build.settings.fingerprint
        if self.options.overwrite and old is not None and is_changed_source(old.source, self.fingerprint.source):
            return None  # its rows may come from code that was faulty, which is a reason to pass overwrite=True
        try:
            self.require_same(build)
        except StaleStoreError:
            if self.options.overwrite:
                return None
            raise
        if build.row_count is not None and not build.is_closing:
            build.units.drop(np.flatnonzero(build.units.states == SKIPPED))  # the dataset may be fixed now
        return build

    def require_same(self, build: Build) -> None:
        """Raise StaleStoreError if ``build`` is of another dataset."""
        old, found, stored = build.settings.fingerprint, self.result.inferred.schema, build.schema.decoded
        if old is None:
            raise stale(build.root, "found the build of a Writer")
        if [field.path for field in found] != [field.path for field in stored]:  # or other fields= were given
            raise stale(build.root, schema_difference(found, stored))
        require_forms(build.root, build.schema, self.options.forms)
        require_equal(build.root, stored, old, self.fingerprint, self.result, None)
        require_equal_data(build.root, old, self.given, None)

    def _fill(self, build: Build, bar: Progress, sigterm: Sigterm) -> None:

        def on_report(report: Report) -> None:
            bar.advance(report.row_count + report.skipped_count, report.byte_count)
            sigterm.check()
            if sigterm.ignored():
                build.sync()

        if build.is_closing:
            bar.say(f"memfeed: {build.root} has all its rows; finishing its commit")
        elif self.columns is not None:
            convert_columns(build, self.columns, self.plan, on_report)
        elif self.tables is not None:
            convert_tables(build, self.tables, self.plan, on_report)
        elif self.given.kind == "iterable":
            dataset = self.result.probed.draws or self.given.dataset
            # where a row is depends on the number of shares, so that of an earlier run stays
            if build.settings.shares == 1:  # an iterator gives the probed samples only once
                dataset = itertools.chain(self.result.probed.samples, _remaining(self.result.probed.remaining))
            convert_stream(build, dataset, self.plan, self.options.length, on_report, self.options.worker_init_fn)
        else:
            workers, seconds = self.worker_count, self.result.probed.seconds
            if self.pickled is not None:
                if not self.options.allow_random:
                    self.write_probed(build, on_report)
                open_tasks = partial(open_ray_tasks, self._ray, build, self.pickled, self.plan, workers)
                convert_map(build, self.plan, open_tasks, on_report, seconds=seconds, list_seconds=TASK_SECONDS)
                return
            known = {} if self.options.allow_random else self._skip_failed(build, on_report)
            if all(row in known for row in build.absent()[: len(known) + 1].tolist()):
                workers = 0  # there is nothing to read
            init = self.options.worker_init_fn
            open_pool = partial(open_processes, self.given, build, self.plan, workers, init, known)
            most_rows = self.plan.rows_per_write  # a list is written at once, in its turn
            convert_map(build, self.plan, open_pool, on_report, seconds=seconds, most_rows=most_rows)

    def _require_length(self, build: Build) -> None:
        """Raise BuildError if an iterable gave more or fewer samples than its ``len``, or fewer than ``length=``."""
        if self.given.kind != "iterable" or self.length is None:
            return
        written = int(np.isin(build.presence(), (WRITTEN, DURABLE)).sum())
        if written != self.length:
            said = f"length={self.length}" if self.options.length else f"{self.length:,}, its len()"
            line = f"cache(dataset, path, length={written}{', workers=0' if build.settings.shares > 1 else ''})"
            raise BuildError(
                f"{self.target}: found {written:,} samples in the iterable; expected {said}: correct it, or store "
                f"those found with {line}"
            )

    def write_probed(self, build: Build, on_report: OnReport) -> None:
        """Write the probed samples, so that they are not decoded again."""
        presence = build.presence()
        writer = RunWriter(build, self.plan, may_promote=True)
        for index, sample in self._skip_failed(build, on_report).items():
            if presence[index] == ABSENT:
                report = Report()
                writer.write(index, [flatten_sample(self.plan, sample, index)], index, report)
                on_report(report)
        writer.rows.close()

    def _skip_failed(self, build: Build, on_report: OnReport) -> dict[int, Any]:
        """Mark the probed samples that raised as skipped, and return the others by their rows."""
        probed, presence = self.result.probed, build.presence()
        failed = [index for index in probed.failed if presence[index] == ABSENT]
        mark_skipped(build, failed)
        on_report(Report(skipped_count=len(failed)))
        return dict(zip(probed.indices, probed.samples, strict=True))

    def keep_or_remove(self, build: Build, error: BaseException) -> None:
        """Sync the rows that were written, and add to an error of ours that they are kept.

        A build without a row, or of a temporary store, is removed.
        """
        with contextlib.suppress(OSError, MemfeedError):  # the first error is the one to raise
            if not self.is_temporary:
                build.sync()
        try:
            written = _count_written(build)
        except (OSError, StoreError):  # it was the finished store already, or the disk cannot be read
            return
        # after a RandomDataError no row can be trusted
        if not written or self.is_temporary or isinstance(error, RandomDataError):
            with contextlib.suppress(OSError, MemfeedError):
                clear(build.root)
            return
        if not isinstance(error, MemfeedError):
            return
        kept = f" [{written:,} rows are kept in {build.root}; the same call resumes from there]"
        if isinstance(error, OSError):
            error.strerror = f"{error.strerror}{kept}"
        elif len(error.args) == 1:
            error.args = (f"{error.args[0]}{kept}",)


def _metadata_at(target: Path) -> dict[str, Any]:
    """Return the metadata of the store that will be replaced; {} if there is none, or it cannot be read."""
    with contextlib.suppress(MemfeedError, OSError):
        if target.exists():
            return open_store(target).metadata
    return {}


def _shapes(schema: Schema, packed: Sequence[Sequence[Packed]]) -> list[tuple[int | None, ...]]:
    """Return the shapes that the probed rows have in common."""
    dims = [[dims for row in packed if (dims := row[index].dims) is not None] for index in range(len(schema))]
    return observed_shapes(schema, [np.concatenate(column) if column else None for column in dims])


def _arrays(field: Field, packed: Sequence[Packed]) -> list[npt.NDArray[Any]]:
    """Return rows of a field of uint8 that are packed one by one; without those that are None."""
    shapes = [field.row_shape if one.dims is None else tuple(one.dims[0].tolist()) for one in packed]
    return [one.buffers[0].reshape(shape) for one, shape in zip(packed, shapes, strict=True) if one.buffers]


def _count_written(build: Build) -> int:
    return int((build.presence() > 0).sum())


def _remaining(iterator: Iterator[Any] | None) -> Iterator[Any]:
    """Yield the samples that are left of a running iterator. Only `next` is called: its `iter` may start it again."""
    while iterator is not None:
        try:
            yield next(iterator)
        except StopIteration:
            return
