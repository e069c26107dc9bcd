"""The one builder of a store: it creates the files, promotes columns, syncs, and commits."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from memfeed.building import commit
from memfeed.building.claim import clear
from memfeed.building.partial import ABSENT, DURABLE, SKIPPED, Units, runs
from memfeed.building.rows import RowWriter
from memfeed.building.space import Extents, rewrite_gaps, take_back
from memfeed.errors import BuildError, MemfeedError, SchemaError, StoreError
from memfeed.schema.fields import Field, Schema
from memfeed.store import format, ragged
from memfeed.store.dataset_attributes import Kept
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.manifest import MOST_ROWS, Fingerprint, fingerprint_problem, schema_problem
from memfeed.system import files, machine, trust

SYNC_SECONDS = 30.0
QUIET_SECONDS = 1.0  # in which a worker of a dead builder ends its write, unless it is stopped
_RANGES_SHOWN = 5


class BuildSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The schema of a build, its source, and its builder; kept in the build, so that another process can resume it.

    ``rows`` is the count of rows, if known. The rows of an iterable are dealt to ``shares`` workers.
    """

    schema: Schema
    rows: int | None
    fingerprint: Fingerprint | None
    generation: int
    host: str
    shares: int = 1


def _read_settings(root: Path) -> BuildSettings:
    path = root / WORK_DIRECTORY / "settings.json"
    try:
        if path.stat().st_size > format.LARGEST_JSON:
            raise ValueError(f"{path.stat().st_size:,} bytes of settings")
        found = msgspec.json.decode(path.read_bytes(), type=BuildSettings)
        problem = settings_problem(found)
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        problem = str(error)
    if problem:
        raise StoreError(
            f"{root}: found a build that cannot be read ({problem}); expected one of memfeed's: remove that directory "
            "to start over"
        )
    return found


def settings_problem(settings: BuildSettings) -> str:
    """Return a phrase that says what is wrong with the settings of a build, or an empty string."""
    if settings.rows is not None and not 0 <= settings.rows <= MOST_ROWS:
        return f"{settings.rows} rows"
    if settings.generation not in range(1 << 48) or settings.shares not in range(1, 1 << 16):
        return f"generation {settings.generation} and {settings.shares} shares"
    problem = schema_problem(settings.schema, settings.rows or 0)
    return problem or fingerprint_problem(settings.fingerprint, settings.schema)


class Build:
    """An unfinished store. Get one from ``begin`` or ``resume`` while ``claim`` is held."""

    def __init__(self, root: Path, settings: BuildSettings) -> None:
        self.root, self.settings = root, settings
        self._work = root / WORK_DIRECTORY
        self._synced = time.monotonic()
        self.units = Units(self._work, settings.rows, when_lost=partial(_rewrite_gaps, root))
        self.rewrites = False  # True if writers may write rows that exist already
        self.hashes: dict[str, list[int]] = {}  # of files that were hashed as they were written

    @property
    def schema(self) -> Schema:
        """The current schema; ``promote`` changes it."""
        return self.settings.schema

    @property
    def row_count(self) -> int | None:
        """How many rows there will be, if known."""
        return self.settings.rows

    @classmethod
    def begin(
        cls, root: Path, schema: Schema, row_count: int | None, fingerprint: Fingerprint | None, shares: int = 1
    ) -> Build:
        """Begin a new build in the claimed directory ``root``: remove its contents, and reserve the fixed columns.

        Raises SpaceError if they do not fit on the disk, SchemaError for keys that are no valid text.
        """
        try:
            msgspec.json.encode(schema)
        except UnicodeEncodeError as error:
            raise SchemaError(
                f"found a key that is no valid text ({error.object!r}); expected keys that UTF-8 can encode: rename it"
            ) from None
        clear(root)
        here = machine.host_name()
        build = cls(
            root,
            BuildSettings(
                schema=schema, rows=row_count, fingerprint=fingerprint, generation=1, host=here, shares=shares
            ),
        )
        try:
            for field in schema:
                build._create_files(field, row_count or 0)
            files.write_file(build._work / "extents", b"")
            Units.create(build._work, row_count or 0)
            build._sync_directories(schema)  # rows will be called durable: their files must exist after a power loss
            files.sync_directory(root.parent)
            build._save()
        except BaseException:  # a full disk, or Ctrl-C
            with contextlib.suppress(MemfeedError):  # report the first error
                clear(root)
            raise
        return build

    def _sync_directories(self, fields: Iterable[Field]) -> None:
        """Wait until the names of the column files, and of the directories above them, are on the disk."""
        files.sync_directories(self.root, (name for field in fields for name in ragged.column_files(field, 0)))

    @staticmethod
    def is_begun(root: Path) -> bool:
        """Return True if there is a build to ``resume``."""
        return (root / WORK_DIRECTORY / "settings.json").exists()

    @classmethod
    def resume(cls, root: Path) -> Build | None:
        """Return the build in the claimed directory, ready for writers, or None if there is none.

        Rows that were not synced count only if they were written on this host since it last started, and if no process
        was killed while it synced them.
        """
        if not cls.is_begun(root):
            return None
        trust.require_own_files(root)
        old = _read_settings(root)
        build = cls(root, msgspec.structs.replace(old, generation=old.generation + 1, host=machine.host_name()))
        for field in old.schema:
            if field.kind != "fixed" and ragged.fixed_file(root, field).exists():  # a promotion was interrupted here
                files.rename(ragged.fixed_file(root, field), ragged.ragged_files(root, field).heap)
            for name in ragged.column_files(field, 0):
                if not os.access(root / name, os.W_OK):  # a commit was interrupted after it had made them read-only
                    files.chmod(root / name, 0o644)
        build._save()
        build.units.recover()
        build.take_back(wait_seconds=QUIET_SECONDS)
        return build

    @classmethod
    def join(cls, root: Path) -> Build:
        """Return the build that other processes fill now, to fill it with them; see ``claim.share``."""
        trust.require_own_files(root)
        return cls(root, _read_settings(root))

    def _create_files(self, field: Field, row_count: int) -> None:
        for name, size in ragged.column_files(field, row_count).items():
            path = self.root / name
            files.make_directory(path.parent)
            with files.opened(path, os.O_CREAT) as fd:
                files.preallocate(fd, size or 0)

    def _save(self) -> None:
        files.write_atomically(self._work / "settings.json", msgspec.json.encode(self.settings))
        files.write_atomically(self._work / "generation", self.settings.generation.to_bytes(8, "little"))

    def writer(self) -> RowWriter:
        """Return a writer of rows, one for each process. It pickles as a few small values."""
        return RowWriter(self.root, self.schema, self.settings.generation, self.units, rewrites=self.rewrites)

    def presence(self) -> npt.NDArray[np.uint8]:
        """Return the state of every row, in new memory."""
        return np.array(self.units.states)

    def promote(self, field_index: int, field: Field) -> None:
        """Make a fixed column ragged (its file becomes the heap), or a jagged one a list; no row is written again.

        No writer may be active. Make new writers afterwards.
        """
        old = self.schema.fields[field_index]
        if old.kind == "fixed":
            row_count = len(self.units.states)
            self._write_regular(old, field, row_count)
            if old.row_bytes:
                Extents(self.root).take_all(field_index, row_count * old.row_bytes, row_count)
                files.sync_data(self._work / "extents")
            self._sync_directories([field])
        fields = [*self.schema.fields]
        fields[field_index] = field
        schema = Schema(fields=tuple(fields), structure=self.schema.structure)
        self.settings = msgspec.structs.replace(self.settings, schema=schema)
        self._save()
        if old.kind == "fixed":
            files.rename(ragged.fixed_file(self.root, old), ragged.ragged_files(self.root, field).heap)
            self._sync_directories([field])
            self.take_back()

    def take_back(self, wait_seconds: float = 0.0) -> None:
        """Let heap space be granted again in which no row lies, unless a writer may still write there.

        No writer of this builder may be active. Make new writers afterwards.
        """
        if not self.is_closing and self.units.is_quiet(wait_seconds):
            take_back(self.root, self.schema, self.units.are_present())

    def _write_regular(self, old: Field, field: Field, row_count: int) -> None:
        """Write start and dims of the fixed column ``old`` as if it had been ragged from the first row."""
        paths = ragged.ragged_files(self.root, field)
        files.make_directory(paths.heap.parent)
        flags = os.O_CREAT | os.O_TRUNC
        with files.opened(paths.start, flags) as start, files.opened(paths.dims, flags) as dims:
            for first in range(0, row_count, ragged.ROWS_AT_ONCE):
                starts, shapes = ragged.regular_rows(old, first, min(row_count - first, ragged.ROWS_AT_ONCE))
                files.write_at(start, starts, first * ragged.INT64_BYTES)
                files.write_at(dims, shapes, first * ragged.INT64_BYTES * ragged.dims_width(field))
            files.sync(start)  # rows that they describe may be durable already
            files.sync(dims)

    def sync_if_due(self) -> None:
        """Sync if the last sync is older than ``SYNC_SECONDS``: a power loss costs no more than that."""
        if self.is_sync_due():
            self.sync()

    def is_sync_due(self) -> bool:
        """Return True if the last sync is older than ``SYNC_SECONDS``."""
        return time.monotonic() - self._synced > SYNC_SECONDS

    def sync(self) -> None:
        """Make all rows written so far durable."""
        self.units.sync(lambda written: self.sync_columns())
        self._synced = time.monotonic()

    def sync_columns(self) -> None:
        """Wait until all bytes of rows that this machine wrote are on the disk. Changes no presence."""
        for path in self.row_files():
            files.sync_data(path)

    def row_files(self) -> list[Path]:
        """Return the files that writers of rows write into, without the presence map."""
        columns = [self.root / name for field in self.schema for name in ragged.column_files(field, 0)]
        return [*columns, self._work / "extents"]  # without it the heap space of these rows would be granted again

    def bar_writers(self) -> None:
        """Begin another generation: no writer that was made before, on any machine, begins another write."""
        self.settings = msgspec.structs.replace(self.settings, generation=self.settings.generation + 1)
        self._save()

    @property
    def is_closing(self) -> bool:
        """True if a commit has begun to remove skipped rows: rows have other positions now, so none can be written."""
        return (self._work / commit.CLOSING).exists()

    def absent(self) -> npt.NDArray[np.int64]:
        """Return the rows that are not yet written."""
        return np.flatnonzero(self.units.states == ABSENT)

    def require_complete(self) -> None:
        """Raise BuildError naming the ranges of rows that were never written."""
        missing = runs(self.absent())
        if missing:
            shown = ", ".join(f"{first}:{first + count}" for first, count in missing[:_RANGES_SHOWN])
            more = f" and {len(missing) - _RANGES_SHOWN} more ranges" if len(missing) > _RANGES_SHOWN else ""
            raise BuildError(
                f"{self.root}: found rows {shown}{more} never written, of {self.row_count}; expected all of them: "
                'write them, or choose missing="zero"; the build is kept'
            )

    def commit(
        self, path: Path, *, overwrite: bool = False, kept: Kept | None = None, skipped: Sequence[int] = ()
    ) -> None:
        """Make the build the finished store at ``path``: all of it, or none of it.

        Skipped rows are removed. The store keeps ``kept`` beside its columns; ``skipped`` are the samples that have no
        row in the store that it is a copy of. Raises BuildError if a row is absent or the disk refuses, SpaceError if
        it is full.
        """
        self.units.lose_unsynced()
        self.require_complete()
        presence = self.presence()
        left_out = np.flatnonzero(presence == SKIPPED)
        row_count = len(presence) - len(left_out)
        if row_count == 0:
            raise BuildError(f"{self.root}: found no row to keep ({len(left_out)} were skipped); expected at least one")
        if len(left_out):
            self.sync()
            commit.remove_skipped(self.root, self.schema, presence != SKIPPED)
        with self.units.lost_if_unsynced():
            manifest = commit.finish_files(
                self.root,
                self.schema,
                row_count,
                self.settings.fingerprint,
                # of an iterable only positions that a worker left unused are skipped, not samples
                left_out.tolist() if self.row_count is not None else [],
                self.hashes,
                kept or Kept(),
                punch=self.units.is_quiet(),
            )
        if skipped:
            manifest = msgspec.structs.replace(manifest, skipped=tuple(skipped))
        commit.seal(self.root, manifest)
        commit.publish(self.root, path, overwrite=overwrite)


def _rewrite_gaps(root: Path, states: npt.NDArray[np.uint8]) -> None:
    """Write the heap bytes again that lie in no durable row, after rows were lost."""
    if not (root / WORK_DIRECTORY / commit.CLOSING).exists():  # else all rows are durable
        rewrite_gaps(root, _read_settings(root).schema, states == DURABLE)
