"""The one builder of a store: it makes the files, promotes columns, syncs, and commits."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from memfeed.building import commit
from memfeed.building.claim import clear
from memfeed.building.rows import ABSENT, DURABLE, SKIPPED, WRITTEN, Extents, Rows, heap_path
from memfeed.errors import BuildError, MemfeedError, StoreError
from memfeed.schema.fields import Field, Schema
from memfeed.store import format
from memfeed.store.format import WORK, Fingerprint, Manifest
from memfeed.system import files, machine

SYNC_SECONDS = 30.0
_RANGES_SHOWN = 5


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a build is of and who builds it; kept in the build, so that another process can go on.

    ``shares`` is over how many workers the rows of an iterable are dealt.
    """

    schema: Schema
    rows: int | None
    fingerprint: Fingerprint | None
    generation: int
    host: str
    boot_id: str
    shares: int = 1


def _read_settings(root: Path) -> Settings | None:
    try:
        return msgspec.json.decode((root / WORK / "settings.json").read_bytes(), type=Settings)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise StoreError(
            f"{root}: found a build that cannot be read ({error}); remove that directory to start over"
        ) from None


class Build:
    """An unfinished store. Get one from ``begin`` or ``resume`` while ``claim`` is held."""

    def __init__(self, root: Path, settings: Settings) -> None:
        self.root, self.settings = root, settings
        self._synced = time.monotonic()
        self._has_metadata = False
        self.rewrites = False  # whether its writers may write rows that are there already
        self.hashes: dict[str, list[int]] = {}  # of files that were hashed as they were written

    @property
    def schema(self) -> Schema:
        """The schema as it is now; ``promote`` changes it."""
        return self.settings.schema

    @property
    def rows(self) -> int | None:
        """How many rows there will be, where that is known."""
        return self.settings.rows

    @classmethod
    def begin(
        cls, root: Path, schema: Schema, rows: int | None, fingerprint: Fingerprint | None, shares: int = 1
    ) -> Build:
        """A new build in the claimed directory ``root``; what lay there is removed. Reserves the fixed columns.

        Raises SpaceError if they don't fit on the disk.
        """
        clear(root)
        build = cls(root, _settings(schema, rows, fingerprint, 1, shares))
        try:
            for field in schema:
                build._create(field, rows or 0)
            files.write_file(root / WORK / "extents", b"")
            files.write_file(root / WORK / "presence", b"")
            if rows:
                files.truncate(root / WORK / "presence", rows)
            # rows will be called durable: the files they are in have to be there after a power loss
            files.sync_data(root / WORK / "presence")
            build._sync_directories(schema)
            files.sync_directory(root.parent)
            build._save()
        except BaseException:  # a full disk, or Ctrl-C
            with contextlib.suppress(MemfeedError):  # the first error is the one to be told
                clear(root)
            raise
        return build

    def _sync_directories(self, schema: Schema) -> None:
        """Waits until the column files' names are on the disk, and those of the directories they are in."""
        made = {self.root}
        for field in schema:
            for name in format.column_files(field, 0):
                made |= {self.root / above for above in Path(name).parents}
        for directory in sorted(made, reverse=True):  # where a file was moved to goes before where it came from
            files.sync_directory(directory)

    @staticmethod
    def is_begun(root: Path) -> bool:
        """Whether there is a build to ``resume``."""
        return (root / WORK / "settings.json").exists()

    @classmethod
    def resume(cls, root: Path) -> Build | None:
        """The build that lies in the claimed directory, ready to go on; None if there is none.

        Rows that were not synced count only if they were written on this host since it last started.
        """
        old = _read_settings(root)
        if old is None:
            return None
        build = cls(root, _settings(old.schema, old.rows, old.fingerprint, old.generation + 1, old.shares))
        for field in old.schema:
            before = root / f"{field.stem}.memmap"
            if field.kind != "fixed" and before.exists():
                files.rename(before, heap_path(root, field))  # a promotion was cut short just before this step
            for name in format.column_files(field, 0):
                if not os.access(root / name, os.W_OK):  # a commit was cut short after it had closed them
                    files.chmod(root / name, 0o644)
        here = build.settings
        if not here.boot_id or (old.host, old.boot_id) != (here.host, here.boot_id):
            presence = build.presence()
            presence[presence == WRITTEN] = ABSENT
            build._set_presence(presence)
        build._save()
        return build

    def _create(self, field: Field, rows: int) -> None:
        for name, size in format.column_files(field, rows).items():
            path = self.root / name
            files.make_directory(path.parent)
            fd = files.open_write(path, os.O_CREAT)
            try:
                files.preallocate(fd, size or 0)
            finally:
                os.close(fd)

    def _save(self) -> None:
        files.write_atomically(self.root / WORK / "settings.json", msgspec.json.encode(self.settings))
        files.write_atomically(self.root / WORK / "generation", self.settings.generation.to_bytes(8, "little"))

    def writer(self) -> Rows:
        """What writes rows: one for each process (it is made from small values, so it travels to workers)."""
        return Rows(self.root, self.schema, self.settings.generation, rewrites=self.rewrites)

    def presence(self) -> npt.NDArray[np.uint8]:
        """The state of every row, in memory of its own."""
        found = np.frombuffer(bytearray((self.root / WORK / "presence").read_bytes()), np.uint8)
        if self.rows is not None and len(found) != self.rows:  # else the rows beyond it would count as written
            raise StoreError(
                f"{self.root / WORK / 'presence'}: found {len(found):,} bytes; expected {self.rows:,}, one a row: "
                f"the build is damaged; remove {self.root} to start over"
            )
        return found

    def _set_presence(self, presence: npt.NDArray[np.uint8]) -> None:
        files.write_atomically(self.root / WORK / "presence", presence)

    def promote(self, number: int, field: Field) -> None:
        """Makes a fixed column ragged (its file becomes the heap), or a jagged one a list; no row is written again.

        No writer may be at work: make new ones afterwards.
        """
        old = self.schema.fields[number]
        if old.kind == "fixed":
            rows = self.rows if self.rows is not None else len(self.presence())
            self._write_regular(old, rows)
            if old.row_bytes:
                Extents(self.root).grant(number, rows * old.row_bytes)
                files.sync_data(self.root / WORK / "extents")
            self._sync_directories(Schema(fields=(field,), structure=self.schema.structure))
        fields = [*self.schema.fields]
        fields[number] = field
        schema = Schema(fields=tuple(fields), structure=self.schema.structure)
        self.settings = msgspec.structs.replace(self.settings, schema=schema)
        self._save()
        if old.kind == "fixed":
            files.rename(self.root / f"{old.stem}.memmap", heap_path(self.root, field))
            self._sync_directories(Schema(fields=(field,), structure=self.schema.structure))

    def _write_regular(self, field: Field, rows: int) -> None:
        """start and dims of a fixed column, as if it had been ragged from the first row."""
        directory = self.root / field.stem
        files.make_directory(directory)
        shape = np.array(field.row_shape or (1,), np.int64)
        starts = files.open_write(directory / "start.memmap", os.O_CREAT | os.O_TRUNC)
        dims = files.open_write(directory / "dims.memmap", os.O_CREAT | os.O_TRUNC)
        try:
            for first in range(0, rows, 1 << 20):
                count = min(rows - first, 1 << 20)
                places = np.arange(first, first + count, dtype=np.int64) * field.row_elements
                files.write_at(starts, places, first * 8)
                files.write_at(dims, np.tile(shape, count), first * shape.nbytes)
            for fd in (starts, dims):
                files.sync(fd)  # they speak of rows that may be durable already
        finally:
            os.close(starts)
            os.close(dims)

    def write_metadata(self) -> None:
        """tensordict's metadata before the commit: for a schema that is final and rows of which none is skipped."""
        commit.write_metadata(self.root, self.schema, self.rows or 0)
        self._has_metadata = True

    def sync_if_due(self) -> None:
        """A sync point if the last is ``SYNC_SECONDS`` old: what a power loss can cost."""
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """A sync point: rows that were written before it are on the disk after it."""
        presence = self.presence()
        written = np.flatnonzero(presence == WRITTEN)
        with self._distrusting():
            for field in self.schema:
                for name in format.column_files(field, 0):
                    files.sync_data(self.root / name)
            files.sync_data(self.root / WORK / "extents")  # else the heap space of these rows would be granted again
        self._mark(written, DURABLE)
        self._synced = time.monotonic()

    def _mark(self, rows: npt.NDArray[np.int64], state: int) -> None:
        """Sets the presence of rows, on the disk too."""
        fd = files.open_write(self.root / WORK / "presence")
        try:
            for first, count in runs(rows):
                files.write_at(fd, bytes([state]) * count, first)
            files.sync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _distrusting(self) -> Iterator[None]:
        """A sync that fails may be the last that one hears of rows that were lost: those not durable yet are absent."""
        try:
            yield
        except MemfeedError as error:
            if getattr(error, "unsynced", False):
                with contextlib.suppress(MemfeedError):  # the first error is the one to be told
                    self._mark(np.flatnonzero(self.presence() == WRITTEN), ABSENT)
            raise

    @property
    def is_closing(self) -> bool:
        """Whether a commit has begun to take skipped rows out: rows have other places now, so none can be written."""
        return (self.root / WORK / commit.CLOSING).exists()

    def keep_until_absent(self) -> None:
        """Rows behind the first absent one are absent too: for rows that are written in turn."""
        presence = self.presence()
        if (presence == ABSENT).any():
            presence[int((presence == ABSENT).argmax()) :] = ABSENT
            self._set_presence(presence)

    def retry_skipped(self) -> None:
        """Rows that were skipped are absent again; not for a build that ``is_closing``."""
        presence = self.presence()
        presence[presence == SKIPPED] = ABSENT
        self._set_presence(presence)

    def absent(self) -> npt.NDArray[np.int64]:
        """The rows that are still to be written."""
        return np.flatnonzero(self.presence() == ABSENT)

    def require_complete(self) -> None:
        """Raises BuildError naming the ranges of rows that were never written."""
        missing = runs(self.absent())
        if missing:
            shown = ", ".join(f"{a}:{a + k}" for a, k in missing[:_RANGES_SHOWN])
            more = f" and {len(missing) - _RANGES_SHOWN} more ranges" if len(missing) > _RANGES_SHOWN else ""
            raise BuildError(
                f"{self.root}: found rows {shown}{more} never written, of {self.rows}; expected all of them: "
                'write them, or choose missing="zero"; the build is kept'
            )

    def commit(self, path: Path, *, overwrite: bool = False) -> Manifest:
        """Makes the build the finished store at ``path``: all of it, or none of it.

        Skipped rows are taken out. Raises BuildError while a row is absent or where the disk refuses, SpaceError.
        """
        self.require_complete()
        presence = self.presence()
        skipped = np.flatnonzero(presence == SKIPPED)
        rows = len(presence) - len(skipped)
        if rows == 0:
            raise BuildError(f"{self.root}: found no row to keep ({len(skipped)} were skipped); expected at least one")
        if len(skipped):
            self.sync()
            commit.close_holes(self.root, self.schema, presence != SKIPPED)
        # of an iterable only the place that a worker left free is skipped, not a sample
        left_out = skipped.tolist() if self.rows is not None else []
        with self._distrusting():
            manifest = commit.finish_files(
                self.root, self.schema, rows, self.settings.fingerprint, left_out, self.hashes, self._has_metadata
            )
        commit.seal(self.root, manifest)
        commit.publish(self.root, path, overwrite=overwrite)
        return manifest


def _settings(
    schema: Schema, rows: int | None, fingerprint: Fingerprint | None, generation: int, shares: int
) -> Settings:
    return Settings(
        schema=schema,
        rows=rows,
        fingerprint=fingerprint,
        generation=generation,
        host=machine.host_name(),
        boot_id=machine.boot_id(),
        shares=shares,
    )


def runs(numbers: npt.NDArray[np.int64] | Sequence[int]) -> list[tuple[int, int]]:
    """Sorted numbers as (first, count) of each unbroken run."""
    array = np.asarray(numbers, np.int64)
    if not len(array):
        return []
    cuts = np.flatnonzero(np.diff(array) != 1) + 1
    firsts = array[np.concatenate([[0], cuts])]
    counts = np.diff(np.concatenate([[0], cuts, [len(array)]]))
    return list(zip(firsts.tolist(), counts.tolist(), strict=True))
