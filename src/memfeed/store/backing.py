"""Where the columns of a store come from: a directory of ours, one that tensordict wrote, or memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memfeed.errors import StoreError
from memfeed.schema.fields import Schema
from memfeed.store import format, tensordict_dir
from memfeed.store.columns import Column, FixedColumn, RaggedColumn
from memfeed.store.format import Identity, Manifest


class Backing:
    """What the views of one store share: where it lies, its schema, its columns (mapped on first use)."""

    def __init__(
        self,
        path: Path | None,
        schema: Schema,
        rows: int | None,
        digest: str,
        make: Callable[[int], Column],
        manifest: Manifest | None = None,
        owner: object = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.schema, self.rows, self.digest = path, schema, rows, digest
        self.manifest, self.owner = manifest, owner
        self.check = check  # raises StoreError if another store is at the path now
        self._make = make
        self._columns: dict[int, Column] = {}

    def column(self, number: int) -> Column:
        """The column of a field of the whole schema."""
        if number not in self._columns:
            self._columns[number] = self._make(number)
        return self._columns[number]


def _own(path: Path, manifest: Manifest, digest: str, identity: Identity, owner: object) -> Backing:
    def check() -> None:
        if format.identity(path) != identity:
            raise StoreError(
                f"{path}: found another store there than the one that was opened, which was replaced or removed; "
                "columns that were in use are kept, others cannot be read any more: open it again with memfeed.open"
            )

    def make(number: int) -> Column:
        field = manifest.schema.fields[number]
        if field.kind == "fixed":
            return FixedColumn(field, path / f"{field.stem}.memmap", manifest.rows, check)
        return RaggedColumn(field, path / field.stem, manifest.rows, manifest.files[f"{field.stem}/heap.bin"], check)

    return Backing(path, manifest.schema, manifest.rows, digest, make, manifest, owner, check)


def open_backing(root: Path, owner: object = None) -> Backing:
    """The columns at ``root``; ``owner`` lives as long as they do. Raises StoreError, CorruptStoreError."""
    found = format.read_manifest(root)
    if found is not None:
        return _own(root.absolute(), *found, owner)
    if (root / "meta.json").exists() or any(root.glob("*meta.pt")):
        foreign = tensordict_dir.read(root)
        return Backing(root.absolute(), foreign.schema, foreign.rows, foreign.digest, foreign.column)
    raise StoreError(_not_a_store(root))


def _not_a_store(root: Path) -> str:
    if not root.exists():
        build = format.build_path(root)
        hint = f"; {build} is an unfinished build: call cache() again to go on with it" if build.exists() else ""
        return f"{root}: found nothing there; expected a store{hint or ': make one with memfeed.cache(dataset, path)'}"
    what = "a directory" if root.is_dir() else "a file"
    return f"{root}: found {what} that is no store; expected memfeed.json in it, or a directory of TensorDict.memmap()"
