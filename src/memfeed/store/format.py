"""The manifest of a store: what it says, and the check of all it says before anything is trusted.

docs/format.md is the specification; this is its one implementation for reading and writing.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from memfeed.errors import CorruptStoreError, MemfeedError, StoreError
from memfeed.schema.fields import DEEPEST, DTYPES, HEAP_OF_BYTES, Field, Node, Schema, display, is_stem
from memfeed.system.descriptors import open_read

VERSION = 1
MANIFEST = "memfeed.json"
CHECKSUMS = "checksums.bin"
CHUNK_BYTES = 4 << 20
BUILD_SUFFIX = ".build"
WORK = ".build"
_MEND = "restore it from a copy or make the store anew"

LARGEST_MANIFEST = 1 << 30
MOST_ROWS = 1 << 48
LARGEST_FILE = 1 << 62
MOST_EMPTY_ROWS = 1 << 24  # rows that take no byte: no file tells of how many there are


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one probe sample was: its index in the source, and the xxh3-64 of each field's bytes."""

    index: int
    hashes: tuple[str, ...]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What tells whether a store still says what its dataset says.

    ``length`` is the dataset's own (None where it has none), ``source`` the hash of its classes' source text.
    """

    kind: str
    length: int | None = None
    source: str = ""
    source_name: str = ""
    probes: tuple[Probe, ...] = ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of memfeed.json."""

    format: str
    version: int
    rows: int
    schema: Schema
    files: dict[str, int]
    checksums: str
    fingerprint: Fingerprint | None = None
    skipped: tuple[int, ...] = ()
    chunk_bytes: int = CHUNK_BYTES


class _Heading(msgspec.Struct):
    """The part of every version's manifest that says what it is."""

    format: str = ""
    version: int = 0


def column_files(field: Field, rows: int) -> dict[str, int | None]:
    """The files of a column with the bytes each must have (None: any)."""
    if field.kind == "fixed":
        return {f"{field.stem}.memmap": rows * field.row_bytes}
    return {
        f"{field.stem}/start.memmap": rows * 8,
        f"{field.stem}/dims.memmap": rows * 8 * max(field.rank, 1),
        f"{field.stem}/heap.bin": None,
    }


def encode(manifest: Manifest) -> bytes:
    """The bytes of memfeed.json."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def digest(data: bytes) -> str:
    """The xxh3-128 of some bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def decode(data: bytes, where: Path) -> Manifest:
    """A manifest from its bytes, wholly checked; raises StoreError naming ``where``."""
    try:
        heading = msgspec.json.decode(data, type=_Heading)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors, and so is that of bad UTF-8
        raise StoreError(f"{where}: found a manifest that cannot be read ({error}): {_MEND}") from None
    if heading.format != "memfeed":
        raise StoreError(f"{where}: found format {heading.format!r}; expected 'memfeed': this is no store of ours")
    if heading.version != VERSION:
        raise StoreError(
            f"{where}: found format version {heading.version}; this memfeed reads version {VERSION}: "
            "upgrade memfeed (pip install -U memfeed), or make the store anew with this one"
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where}: found a manifest that breaks the format ({error}): {_MEND}") from None
    problem = _problem(manifest)
    if problem:
        raise StoreError(f"{where}: found {problem}; the store is damaged or was made to deceive: do not use it")
    return manifest


def _problem(manifest: Manifest) -> str:
    """What is wrong with a manifest; empty when all of it holds together."""
    if not 0 <= manifest.rows <= MOST_ROWS:
        return f"{manifest.rows} rows"
    if manifest.chunk_bytes != CHUNK_BYTES:
        return f"checksum chunks of {manifest.chunk_bytes} bytes"
    problem = node_problem(manifest.schema.structure)
    if problem:
        return problem
    fields = manifest.schema.fields
    paths = list(manifest.schema.structure.leaves())
    if [field.path for field in fields] != paths:
        return "fields that are not the leaves of the structure"
    expected: dict[str, int | None] = {}
    lowered: set[str] = set()
    for number, field in enumerate(fields):
        problem = field_problem(field, number)
        if problem:
            return f"field {display(field.path)!r}: {problem}"
        if field.stem.lower() in lowered:
            return f"two fields with the file name {field.stem!r}"
        lowered.add(field.stem.lower())
        if math.prod(dim for dim in (manifest.rows, *field.shape) if dim) * field.itemsize > LARGEST_FILE:
            return f"{manifest.rows} rows of shape {field.shape}, too many to address"
        expected |= column_files(field, manifest.rows)
    if set(expected) != set(manifest.files):
        odd = sorted(set(expected) ^ set(manifest.files))
        return f"a list of files that is not that of its fields ({odd[0]!r})"
    inside = next((stem for stem in lowered for at in _above(stem) if at in lowered), None)
    if inside is not None:
        return f"a field with the file name {inside!r} inside another field's"
    for name, size in expected.items():
        have = manifest.files[name]
        if not 0 <= have <= LARGEST_FILE or (size is not None and have != size):
            return f"{have} bytes for {name}, where its shape gives {size}"
    if manifest.rows > MOST_EMPTY_ROWS and not any(manifest.files.values()):
        return f"{manifest.rows} rows in no byte at all"
    if not all(0 <= index <= MOST_ROWS for index in manifest.skipped):
        return "a skipped index out of range"
    if any(one >= other for one, other in pairwise(manifest.skipped)):
        return "skipped indices out of order"
    for probe in manifest.fingerprint.probes if manifest.fingerprint else ():
        if not 0 <= probe.index <= MOST_ROWS or len(probe.hashes) != len(fields):
            return f"a fingerprint that does not fit its fields (sample {probe.index})"
    return ""


def _above(stem: str) -> Iterator[str]:
    """The directories that a column's place is in."""
    parts = stem.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))


def node_problem(node: Node, depth: int = 0) -> str:
    """What is wrong with a structure; empty when nothing is."""
    if depth > DEEPEST:
        return f"a structure deeper than {DEEPEST}"
    if node.kind == "shared" or node.value is not None:
        return "a value in the structure"  # only directories of tensordict have those
    if node.kind in ("leaf", "none"):
        return "a leaf that holds something" if node.children or node.keys else ""
    named = node.kind not in ("tuple", "list")
    if (named != bool(node.keys) and node.children) or (node.keys and not named):
        return f"a {node.kind} {'without' if named else 'with'} keys"
    if named and (len(node.keys) != len(node.children) or len(set(node.keys)) != len(node.keys)):
        return f"a {node.kind} whose keys do not match its parts"
    if node.kind in ("namedtuple", "dataclass", "tensorclass"):
        bad = [name for name in (node.name, *node.keys) if not (isinstance(name, str) and name.isidentifier())]
        if bad:
            return f"{bad[0]!r} as a Python name"
    if node.kind == "tensordict" and not all(isinstance(key, str) for key in node.keys):
        return "a tensordict with keys that are no strings"
    if any(isinstance(key, int) and not -(1 << 63) <= key < 1 << 64 for key in node.keys):
        return "a key beyond 64 bits"
    if not 0 <= node.batch_dims <= DEEPEST:
        return f"{node.batch_dims} batch dims"
    return next((problem for child in node.children if (problem := node_problem(child, depth + 1))), "")


def field_problem(field: Field, number: int) -> str:
    """What is wrong with one field; empty when nothing is."""
    if not is_stem(field.stem) or field.stem.count("/") > DEEPEST:
        return f"the file name {field.stem!r}"
    if field.dtype not in DTYPES:
        return f"the dtype {field.dtype!r}"
    if field.kind in HEAP_OF_BYTES and (field.dtype != "uint8" or field.shape):
        return f"{field.kind} values with dtype {field.dtype} and shape {field.shape}"
    if len(field.shape) > DEEPEST or any(dim is not None and not 0 <= dim <= MOST_ROWS for dim in field.shape):
        return f"the shape {field.shape}"
    if math.prod(dim for dim in field.shape if dim) * field.itemsize > LARGEST_FILE:
        return f"rows of shape {field.shape}, too large to address"
    varying = [i for i, dim in enumerate(field.shape) if dim is None]
    wanted = {"fixed": [], "jagged": [0]}.get(field.kind, varying)
    if varying != wanted or (field.kind == "list" and len(varying) != len(field.shape)):
        return f"{field.kind} with shape {field.shape}"
    if field.optional and field.kind in ("fixed", "jagged"):
        return f"{field.kind} values that may be None"
    ranks = {"tensor": None, "scalar": 0, "list": 1}
    if field.form != "tensor" and (field.kind in HEAP_OF_BYTES or len(field.shape) != ranks[field.form]):
        return f"{field.kind} with shape {field.shape} in the form of a {field.form}"
    if field.lengths_of is not None and not (field.kind == "jagged" and 0 <= field.lengths_of <= number):
        return f"lengths of field {field.lengths_of}"
    return ""


def check_file(root: Path, name: str, size: int) -> None:
    """Raises CorruptStoreError unless the file is a plain one inside ``root`` with exactly ``size`` bytes."""
    path = root
    for part in name.split("/"):
        path = path / part
        try:
            found = os.lstat(path)
        except OSError as error:
            raise CorruptStoreError(f"{path}: found no such file ({error.strerror}): {_MEND}") from None
        if stat.S_ISLNK(found.st_mode):
            raise CorruptStoreError(f"{path}: found a symbolic link; expected a plain file inside the store")
    if not stat.S_ISREG(found.st_mode):
        raise CorruptStoreError(f"{path}: found no plain file: {_MEND}")
    if found.st_size != size:
        raise CorruptStoreError(
            f"{path}: found {found.st_size:,} bytes; expected {size:,}, as the manifest says: "
            f"the file was cut, grown or swapped; {_MEND}"
        )


Identity = tuple[int, int, int]


def identity(root: Path) -> Identity | None:
    """Which store is at ``root``: another one after it was replaced; None without one."""
    try:
        found = os.lstat(root / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def read_manifest(root: Path) -> tuple[Manifest, str, Identity] | None:
    """The manifest of the store at ``root``, checked against all files' sizes, its digest, and which store it is.

    None without one. If another process replaces the store meanwhile, it is the new one's.
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


def _read_manifest(root: Path) -> tuple[Manifest, str] | None:
    path = root / MANIFEST
    try:
        fd = open_read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CorruptStoreError(f"{path}: found a symbolic link; expected a plain file: put a copy there") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptStoreError(f"{path}: found no plain file: {_MEND}")
        if found.st_size > LARGEST_MANIFEST:
            raise StoreError(
                f"{path}: found {found.st_size:,} bytes; expected at most {LARGEST_MANIFEST:,} for a manifest"
            )
        with open(fd, "rb", closefd=False) as file:
            data = file.read(found.st_size)
    finally:
        os.close(fd)
    manifest = decode(data, path)
    for name, size in manifest.files.items():
        check_file(root, name, size)
    check_file(root, CHECKSUMS, checksum_bytes(manifest))
    return manifest, digest(data)


def checksum_bytes(manifest: Manifest) -> int:
    """The size of checksums.bin: 8 bytes for every chunk of every file."""
    return sum(8 * -(-size // manifest.chunk_bytes) for size in manifest.files.values())


class ChunkHasher:
    """The hashes of a file's chunks, taken from its bytes as they are written from the first to the last."""

    def __init__(self) -> None:
        self._hash, self._filled, self._done = xxhash.xxh3_64(), 0, list[int]()

    def update(self, data: Any) -> None:
        """The next bytes (a C-contiguous buffer)."""
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: CHUNK_BYTES - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == CHUNK_BYTES:
                self._done.append(self._hash.intdigest())
                self._hash, self._filled = xxhash.xxh3_64(), 0

    def hashes(self) -> list[int]:
        """One for each chunk of what has been given."""
        return [*self._done, self._hash.intdigest()] if self._filled else list(self._done)


_PIECE_BYTES = 256 << 10  # read and hashed while it is in the core's own cache
_local = threading.local()


def _buffer() -> memoryview:
    """Room for one piece, one per thread: new memory for each costs more than hashing it."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_PIECE_BYTES))
    buffer: memoryview = _local.buffer
    return buffer


def chunk_hash(path: Path, first: int, size: int) -> int:
    """The xxh3-64 of one chunk of a file."""
    hashed, buffer, done = xxhash.xxh3_64(), _buffer(), 0
    with open(path, "rb", buffering=0) as file:
        file.seek(first)
        while done < size:
            read = file.readinto(buffer[: size - done])
            if not read:
                raise OSError(f"{path}: ended at byte {first + done}")
            hashed.update(buffer[:read])
            done += read
    return hashed.intdigest()


def build_path(path: Path) -> Path:
    """Where the build of the store at ``path`` lives: ``NAME.build`` beside it."""
    return path.with_name(path.name + BUILD_SUFFIX)


def manifest_of(**values: Any) -> Manifest:
    """A manifest of the current version."""
    return Manifest(format="memfeed", version=VERSION, **values)
