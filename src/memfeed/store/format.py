"""The files of a store: their names, the manifest's bytes, and the checks made at opening.

docs/format.md is the specification.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import stat
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from memfeed.errors import CorruptStoreError, MemfeedError, StoreError
from memfeed.store.manifest import CHUNK_BYTES, Manifest, manifest_problem, required_version
from memfeed.system import files, trust
from memfeed.system.descriptors import open_read

VERSION = 3
MANIFEST = "memfeed.json"
CHECKSUMS = "checksums.bin"
APPEND_BEGUN = "append.begun"  # an empty file: column files may be longer than the manifest says
GENERATIONS = "generations.txt"  # digests of the manifests whose rows are the first ones of the same files, a line each
BUILD_SUFFIX = ".build"
APPENDED_SUFFIX = f"{BUILD_SUFFIX}.appended"  # the longest of the suffixes that are put beside a store
WORK_DIRECTORY = ".build"  # inside a build, for the files that its store will not have
LARGEST_JSON = 64 << 20  # bytes of JSON; more only beside as many files
JSON_A_FILE = 4096
_READABLE = "give yourself the permission to read it, or check the disk"
CACHE_SETTINGS = "remote.json"  # in the work directory of a cache of a store at an address
_REMEDY = "restore it from a copy, or make the store again"

Identity = tuple[int, int, int]
"""Device, inode and modification time of a manifest: they differ after the store was replaced."""


class _Heading(msgspec.Struct):
    """The keys that a manifest of every version has."""

    format: str = ""
    version: int = 0


def new_manifest(**values: Any) -> Manifest:
    """Return a manifest of the lowest version that has all of its features, so that older readers can read it."""
    manifest = Manifest(format="memfeed", version=1, **values)
    return msgspec.structs.replace(manifest, version=required_version(manifest))


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of memfeed.json."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def digest(data: bytes) -> str:
    """Return the xxh3-128 of ``data`` in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def decode(data: bytes, where: object) -> Manifest:
    """Decode a manifest and check all it claims. Raises StoreError, which names ``where``."""
    try:
        heading = msgspec.json.decode(data, type=_Heading)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors, and so is that of bad UTF-8
        raise StoreError(f"{where}: found a manifest that cannot be read ({error}): {_REMEDY}") from None
    if heading.format != "memfeed":
        raise StoreError(f"{where}: found format {heading.format!r}; expected 'memfeed': this is not a memfeed store")
    if not 1 <= heading.version <= VERSION:
        raise StoreError(
            f"{where}: found format version {heading.version}; this memfeed reads versions 1 to {VERSION}: "
            "upgrade memfeed (pip install -U memfeed), or make the store again with this one"
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where}: found a manifest that breaks the format ({error}): {_REMEDY}") from None
    problem = manifest_problem(manifest)
    if problem:
        raise StoreError(f"{where}: found {problem}; the store is damaged or was made to deceive: do not use it")
    return manifest


def remedy(root: Path) -> str:
    """Return what to do about a damaged file of the store at ``root``."""
    if (root / WORK_DIRECTORY / CACHE_SETTINGS).exists():
        return (
            "remove this cache of a store at an address, whose rows are then fetched again: "
            f"rm -r {shlex.quote(str(root))}"
        )
    return _REMEDY


def check_file(root: Path, name: str, size: int, *, may_be_longer: bool = False) -> None:
    """Raise CorruptStoreError unless the file is a plain one inside ``root`` with ``size`` bytes, or perhaps more."""
    path = root
    for part in name.split("/"):
        path = path / part
        try:
            found = os.lstat(path)
        except OSError as error:
            raise CorruptStoreError(f"{path}: found no such file ({error.strerror}): {remedy(root)}") from None
        if stat.S_ISLNK(found.st_mode):
            raise CorruptStoreError(f"{path}: found a symbolic link; expected a plain file inside the store")
    if not stat.S_ISREG(found.st_mode):
        raise CorruptStoreError(f"{path}: found no plain file: {remedy(root)}")
    if found.st_size < size or (found.st_size > size and not may_be_longer):
        raise CorruptStoreError(
            f"{path}: found {found.st_size:,} bytes; expected {size:,}, as the manifest says: "
            f"the file was cut, grown or swapped; {remedy(root)}"
        )


def identity(root: Path) -> Identity | None:
    """Return the identity of the store at ``root``, or None if there is no store."""
    try:
        found = os.lstat(root / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{root}: found a path that cannot be followed ({error}); expected that of a store") from None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def read_manifest(root: Path) -> tuple[Manifest, str, Identity] | None:
    """Read the manifest of the store at ``root`` and check the size of every file.

    Returns the manifest, its digest, and the store's identity; None if there is no manifest. If another process
    replaces the store meanwhile, the new store is read.
    """
    while True:
        before = identity(root)
        try:
            found = _read_manifest(root)
        except MemfeedError:
            if identity(root) == before:
                raise
            continue
        if before is not None and found is not None and identity(root) == before:
            return *found, before
        if before is None and found is None:
            return None


def check_columns(root: Path, manifest: Manifest) -> None:
    """Raise CorruptStoreError unless each column file has the size that the manifest says.

    Files may be longer where an append began: they are shared with the next generation, which has more rows.
    """
    may_be_longer = (root / APPEND_BEGUN).exists()
    for name, size in manifest.files.items():
        check_file(root, name, size, may_be_longer=may_be_longer)


def generations(root: Path) -> list[str]:
    """Return the digests of the manifests of the store before rows were appended, the oldest first."""
    try:
        with os.fdopen(open_read(root / GENERATIONS), "rb") as file:
            return file.read(LARGEST_JSON).decode("ascii", "replace").split()
    except OSError:
        return []


def _read_manifest(root: Path) -> tuple[Manifest, str] | None:
    path = root / MANIFEST
    try:
        fd = open_read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if isinstance(error, PermissionError):
            raise StoreError(f"{path}: found a file that cannot be opened ({error.strerror}): {_READABLE}") from None
        if error.errno != errno.ELOOP:
            raise
        raise CorruptStoreError(f"{path}: found a symbolic link; expected a plain file: put a copy there") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptStoreError(f"{path}: found no plain file: {_REMEDY}")
        require_bounded(root, found.st_size)
        with open(fd, "rb", closefd=False) as file:
            data = file.read(found.st_size)
    finally:
        os.close(fd)
    manifest = decode(data, path)
    check_columns(root, manifest)
    check_file(root, CHECKSUMS, checksum_bytes(manifest))
    return manifest, digest(data)


def require_bounded(root: Path, size: int) -> None:
    """Raise StoreError if ``size`` bytes are too many for the manifest of the store at ``root``."""
    limit = metadata_limit(root, size)
    if size > limit:
        raise StoreError(
            f"{root / MANIFEST}: found {size:,} bytes of metadata; expected at most {limit:,}, which is "
            f"{LARGEST_JSON:,} and {JSON_A_FILE:,} more for each file beside it: {_REMEDY}"
        )


def metadata_limit(root: Path, size: int) -> int:
    """Return how many bytes of JSON a directory may have: no less than 64 MiB, and more if its files justify ``size``.

    To decode 1 byte can take 25 bytes of memory.
    """
    limit = LARGEST_JSON
    for _, _, names in os.walk(root) if size > limit else ():
        limit += JSON_A_FILE * len(names)
        if limit >= size:
            break
    return limit


def checksum_bytes(manifest: Manifest) -> int:
    """Return the size of checksums.bin: 8 bytes for every chunk of every file."""
    return sum(8 * -(-size // CHUNK_BYTES) for size in manifest.files.values())


def resolve(path: str | os.PathLike[str], *, to_write: bool = False) -> Path:
    """Return the absolute path of a store, without links. Raises StoreError for a path that cannot be followed.

    With ``to_write`` also for a link that another user made, who would decide what is replaced.
    """
    given = files.local_path(path)
    try:
        found = given.resolve()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(found)  # since Python 3.13 neither resolve nor exists raises for a circle of links
        is_link = given.is_symlink()
    except (OSError, RuntimeError, ValueError) as error:  # of a circle of links, or a name that no file can have
        raise StoreError(f"{given}: found a path that cannot be followed ({error}); expected that of a store") from None
    outer = next((one for one in found.parents if (one / MANIFEST).exists()), None) if to_write else None
    if outer is not None:
        raise StoreError(
            f"{given}: found a path inside the store {outer}, whose next append or repair would remove it; expected "
            f"one beside it, such as {outer.with_name(found.name)}"
        )
    if to_write and re.search("[\ud800-\udfff]", str(found)):  # so Python shows bytes that are no text
        raise StoreError(f"{given}: found a path that is not UTF-8; expected one that is: torch can write to no other")
    if to_write and is_link:
        trust.require_own_link(given, found)
    return found


def require_nothing_else(root: Path) -> None:
    """Raise StoreError if there are files in the directory of a store that are not its own.

    For a store that will be removed: another one takes its place. Names that begin with a dot do not count. Nothing is
    known of a store whose manifest is damaged.
    """
    try:
        found = read_manifest(root)
    except MemfeedError:
        return
    if found is None:
        return
    known = {*found[0].files, MANIFEST, CHECKSUMS, GENERATIONS, APPEND_BEGUN}
    for directory, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name[0] != "."]
        for name in names:
            path = Path(directory, name)
            if name[0] != "." and name != "meta.json" and path.relative_to(root).as_posix() not in known:
                raise StoreError(
                    f"{root}: found {path.relative_to(root)}, which is no file of the store, and would be removed, "
                    "because another directory takes its place; expected only its own files: move it to another place"
                )


def build_path(path: Path) -> Path:
    """Return the directory of the build of the store at ``path``: ``NAME.build`` beside it."""
    if not path.name:
        raise StoreError(f"{path}: found a path without a name; expected a store's, such as {path / 'data.mf'}")
    return path.with_name(path.name + BUILD_SUFFIX)
