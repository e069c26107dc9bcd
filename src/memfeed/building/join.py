"""Put the rows of several stores one after the other, without copying what the file system can share.

A file of the new store begins as the same file of the first store: a clone of it (a reflink), a second name of it (a
hard link), or a copy. The rows of the other stores are written after it.

A linked file belongs to two generations of one store until the new one takes the place of the old one. Three rules
keep the old one as it is, wherever a process dies: bytes that a file has are never changed, a file never becomes
shorter, and one that has a second name already (in a copy of the store by hard links) is not linked but copied. The old
store is marked before its files become longer (`format.APPEND_BEGUN`); its manifest says how many of the bytes are its
own. Bytes after the end that are the ones to be written (of an append that was killed) are taken; if they are others,
the file is copied instead.

Each file of the new generation begins with the bytes of the old one's. So a store that was opened before reads its rows
from the files of the new one (`format.GENERATIONS`).

The manifests are merged: fields, attributes, fingerprint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from memfeed.building import commit
from memfeed.errors import CorruptStoreError, SchemaError
from memfeed.schema.codec import Int64Array
from memfeed.schema.compare import common_schema
from memfeed.schema.fields import Schema
from memfeed.store import format, ragged
from memfeed.store.checksums import ChunkHasher, compute_checksums, read_checksums
from memfeed.store.dataset_attributes import TARGETS_FILE, Attributes, Targets, targets_column
from memfeed.store.manifest import CHUNK_BYTES, Fingerprint, Manifest, Probe
from memfeed.system import file_copies, files
from memfeed.system.messages import format_bytes
from memfeed.system.progress import Progress, write_line

MOST_PROBES = 64  # of a fingerprint: each append adds some, and cache() reads their samples again


class Part(NamedTuple):
    """A finished store whose rows become rows of another one."""

    path: Path
    manifest: Manifest

    @property
    def attributes(self) -> Attributes:
        """The attributes; empty ones if there are none."""
        return self.manifest.attributes or Attributes()

    @property
    def sample_count(self) -> int:
        """How many samples its dataset had: also those that were skipped."""
        return self.manifest.rows + len(self.manifest.skipped)


def merged_schema(parts: Sequence[Part]) -> Schema:
    """Return the schema of the rows of all parts. Raise SchemaError that names the first difference."""
    try:
        return common_schema([(part.path, part.manifest.schema) for part in parts])
    except SchemaError as error:
        raise SchemaError(
            f"{error}. Write one of them again with memfeed.cache (forms= and fields= choose how a field is stored), "
            "or with memfeed.recode if only the codecs differ"
        ) from None


def merged_attributes(parts: Sequence[Part]) -> tuple[Attributes, Int64Array | None]:
    """Return the attributes of the rows of all parts, and the targets that are to be written beside the columns.

    Those of the first part, with which the others must agree if they have them. Raises SchemaError if they do not.
    """
    first = parts[0]
    for part in parts[1:]:
        for name in ("classes", "class_to_idx", "transform"):
            one, other = getattr(first.attributes, name), getattr(part.attributes, name)
            if one != other and (name == "transform" or (one is not None and other is not None)):
                raise SchemaError(
                    f"{part.path}: found another {name} than that of {first.path}; expected the same"
                    + (": pass the same split= for both" if name == "transform" else ", in the same order")
                )
    own = [part.attributes.targets for part in parts]
    kept = msgspec.structs.replace(first.attributes, targets=None)
    if own[0] is None:
        return kept, None
    fields = {one.field for one in own if one is not None}
    if len(fields) == 1 and None not in fields:  # the column has the targets of all rows
        return msgspec.structs.replace(kept, targets=own[0]), None
    numbers = [_targets(part, one) for part, one in zip(parts, own, strict=True)]
    return msgspec.structs.replace(kept, targets=Targets(form=own[0].form)), np.concatenate(numbers)


def _targets(part: Part, targets: Targets | None) -> Int64Array:
    if targets is None:
        raise SchemaError(
            f"{part.path}: found a dataset without targets; expected them, as the other rows have targets that are no "
            "field of theirs: give the dataset an attribute `targets`, one int per sample"
        )
    field, file = targets_column(part.manifest.schema.fields, targets, part.path)
    return np.fromfile(file, field.dtype, part.manifest.rows).astype(np.int64)


def merged_skipped(parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the indices of skipped samples in the datasets of all parts, one after the other."""
    found, before = list[int](), 0
    for part in parts:
        found += [before + index for index in part.manifest.skipped]
        before += part.sample_count
    return tuple(found)


def merged_fingerprint(parts: Sequence[Part]) -> Fingerprint | None:
    """Return the fingerprint of the datasets of all parts, one after the other; None if one is not known.

    `cache` compares it with a ConcatDataset, or a dataset that has grown by the new samples.
    """
    found = [part.manifest.fingerprint for part in parts]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    if any(one.kind == "iterable" for one in known):
        return msgspec.structs.replace(known[0], length=None) if known[0].kind == "iterable" else None
    probes, before = list[Probe](), 0
    for part, one in zip(parts, known, strict=True):
        probes += [msgspec.structs.replace(probe, index=before + probe.index) for probe in one.probes]
        before += part.sample_count
    return Fingerprint(
        kind="columns" if all(one.kind == "columns" for one in known) else "map",
        length=before,
        source=known[0].source,
        source_name=known[0].source_name,
        # rows of random samples cannot be compared
        probes=tuple(probes[:: -(-len(probes) // MOST_PROBES)]) if all(one.probes for one in known) else (),
    )


class FilePart(NamedTuple):
    """A column file of a part, and the byte ``at`` of the new file where it goes; ``shift`` is added to its numbers."""

    path: Path
    size: int
    hashes: Sequence[int]
    at: int
    shift: int = 0

    @property
    def end(self) -> int:
        """The byte of the new file after its last one."""
        return self.at + self.size


class _TakenError(Exception):
    """The bytes after the end of a linked file belong to another append."""


def join(root: Path, parts: Sequence[Part], *, grow: bool, bar: Progress, what: str) -> Manifest:
    """Write the store of the rows of all ``parts`` into the claimed directory ``root``; return its manifest.

    With ``grow`` the files of the first part may get a second name and become longer. ``bar`` counts the bytes that
    are read; before, it gets a line that says ``what`` is written, and how many bytes. Raises SchemaError if the parts
    differ, CorruptStoreError for bytes that are not those that were written, SpaceError if the disk has too little
    room.
    """
    schema = merged_schema(parts)
    attributes, targets = merged_attributes(parts)
    pieces = _plan(parts, schema)
    advice = "free some space" if grow else "free some space, or choose another path"
    grow = grow and os.access(parts[0].path, os.W_OK)
    begun = {name: _begin(of_file[0], root / name, grow=grow) for name, of_file in pieces.items()}
    size = sum(_bytes_to_write(of_file, begun[name]) for name, of_file in pieces.items())
    files.check_room(root, size, f"the rows of {parts[-1].path}", advice)
    bar.say(f"memfeed: {what}: {_cost(pieces, begun, size)}")
    bar.advance_to(0, sum(piece.size for name, of_file in pieces.items() for piece in of_file[bool(begun[name]) :]))
    if "linked" in begun.values():
        files.write_file(parts[0].path / format.APPEND_BEGUN, b"")
        files.sync_directory(parts[0].path)
    hashes = {name: _write(root / name, of_file, begun[name], bar) for name, of_file in pieces.items()}
    rows = sum(part.manifest.rows for part in parts)
    sizes = {name: max(piece.end for piece in of_file) for name, of_file in pieces.items()}
    if targets is not None:
        files.write_file(root / TARGETS_FILE, targets.astype("<i8").tobytes())
        files.sync_data(root / TARGETS_FILE)
        sizes[TARGETS_FILE] = 8 * rows
    commit.write_metadata(root, schema, rows)
    metadata = parts[0].manifest.metadata or {}
    return commit.describe(
        root,
        commit.share_lengths(root, schema, rows),
        rows,
        sizes,
        compute_checksums(root, sizes, hashes),
        merged_fingerprint(parts),
        merged_skipped(parts),
        attributes,
        metadata,
    )


def _plan(parts: Sequence[Part], schema: Schema) -> dict[str, list[FilePart]]:
    """Return where each column file of each part goes, by the name of the new file."""
    sums = [read_checksums(part.path, part.manifest) for part in parts]
    plan = {}
    for index, field in enumerate(schema.fields):
        own = [list(ragged.column_files(part.manifest.schema.fields[index], 0)) for part in parts]
        sizes = [
            [part.manifest.files[name] for part, name in zip(parts, names, strict=True)]
            for names in zip(*own, strict=True)
        ]
        # clones begin at whole blocks
        heaps = [] if field.kind == "fixed" else _offsets(sizes[-1], files.BLOCK_BYTES)
        for k, (name, record) in enumerate(ragged.record_sizes(field).items()):
            offsets = heaps if record is None else _offsets(sizes[k], 1)
            is_start = field.kind != "fixed" and name == f"{field.stem}/start.memmap"
            plan[name] = [
                FilePart(
                    part.path / own[p][k],
                    sizes[k][p],
                    sums[p][own[p][k]],
                    offsets[p],
                    heaps[p] // field.itemsize if is_start else 0,
                )
                for p, part in enumerate(parts)
            ]
    return plan


def _offsets(sizes: Sequence[int], unit: int) -> list[int]:
    """Return where files of these sizes begin, one after the other, at multiples of ``unit``; 0 for an empty one."""
    end, found = 0, []
    for size in sizes:
        found.append(-(-end // unit) * unit if size else 0)
        end = max(end, found[-1] + size)
    return found


# --- what the new files begin with


def _begin(piece: FilePart, path: Path, *, grow: bool) -> str:
    """Make the new file at ``path`` with the bytes of ``piece``: "cloned" or "linked"; "" if they are to be copied."""
    files.make_directory(path.parent)
    if piece.size:
        with files.opened(path, os.O_CREAT) as fd:
            if file_copies.clone(piece.path, fd):
                if os.fstat(fd).st_size > piece.size:
                    files.truncate(path, piece.size)
                return "cloned"
        files.remove(path)
        found = os.lstat(piece.path)
        is_ours_alone = found.st_uid == os.geteuid() and found.st_nlink == 1
        if grow and is_ours_alone and file_copies.link(piece.path, path):
            return "linked"
    return ""


def _may_clone(piece: FilePart) -> bool:
    return not piece.shift and piece.at % files.BLOCK_BYTES == 0


def _bytes_to_write(of_file: Sequence[FilePart], begun: str) -> int:
    first, *others = of_file
    cloned = [piece for piece in others if begun == "cloned" and _may_clone(piece)]
    return (0 if begun else first.size) + sum(piece.size for piece in others if piece not in cloned)


def _cost(pieces: dict[str, list[FilePart]], begun: dict[str, str], size: int) -> str:
    total = sum(piece.size for of_file in pieces.values() for piece in of_file)
    copied = sum(of_file[0].size for name, of_file in pieces.items() if not begun[name])
    ways = [f"{format_bytes(size)} of {format_bytes(total)} are written"]
    if "cloned" in begun.values():
        ways.append("the others are shared with their stores (reflinks)")
    if "linked" in begun.values():
        ways.append("the old rows stay where they are (hard links)")
    if copied:
        ways.append(f"{format_bytes(copied)} of that are copied, because they cannot be shared here")
    return "; ".join(ways)


# --- the bytes


def _write(path: Path, of_file: Sequence[FilePart], begun: str, bar: Progress) -> list[int]:
    """Write a file, synced; return the hashes of its chunks."""
    first = of_file[0]
    if begun:
        try:
            return _extend(path, of_file, bar)
        except _TakenError:
            files.remove(path)
            write_line(
                f"memfeed: {first.path}: an append of other rows was interrupted and left bytes after its end, so its "
                f"{format_bytes(first.size)} are copied"
            )
    with files.opened(path, os.O_CREAT | os.O_TRUNC) as fd:
        return _fill(fd, of_file, ChunkHasher(), 0, bar)


def _extend(path: Path, of_file: Sequence[FilePart], bar: Progress) -> list[int]:
    """Write the pieces after the first one, which is there. Raise _TakenError if the bytes after it are others."""
    first, *others = of_file
    end = max(piece.end for piece in of_file)
    if end == first.size and path.stat().st_size == end:
        return list(first.hashes)
    if not os.access(path, os.W_OK):
        files.chmod(path, 0o644)
    with files.opened(path) as fd:
        files.chmod(path, 0o444)  # the old store has this file too
        if os.fstat(fd).st_size > end:
            raise _TakenError
        whole = first.size // CHUNK_BYTES
        hasher = ChunkHasher(first.hashes[:whole])
        for block in _blocks(first, whole):  # the last chunk gets another hash: it must be right before
            hasher.update(block)
        return _fill(fd, others, hasher, first.size, bar)


def _fill(fd: int, pieces: Sequence[FilePart], hasher: ChunkHasher, end: int, bar: Progress) -> list[int]:
    """Write pieces into an open file from byte ``end`` on, and sync it; return the hashes of its chunks."""
    for piece in pieces:
        if not piece.size:
            continue
        end = _put(fd, bytes(piece.at - end), end, hasher)
        can_clone = _may_clone(piece) and os.fstat(fd).st_size == end and piece.path.stat().st_size == piece.size
        is_cloned = can_clone and file_copies.clone(piece.path, fd, piece.at)  # what is there is compared below
        for block in _blocks(piece):
            shifted = (np.frombuffer(block, "<i8") + piece.shift).tobytes() if piece.shift else block
            end = _put(fd, shifted, end, hasher, is_cloned=is_cloned)
            bar.advance(len(block))
    files.sync(fd)
    return hasher.hashes()


def _put(fd: int, data: bytes, at: int, hasher: ChunkHasher, *, is_cloned: bool = False) -> int:
    """Write ``data`` at byte ``at``; bytes that are there must be the same. Return the byte after it.

    The same bytes are written once more, unless they are shared with a store: a sync of the append that left them may
    have failed, and then they are in memory only.
    """
    there = max(min(os.fstat(fd).st_size - at, len(data)), 0)
    view: Any = memoryview(data)
    if there and os.pread(fd, there, at) != view[:there]:
        raise _TakenError
    skipped = there if is_cloned else 0
    files.write_at(fd, view[skipped:], at + skipped)
    hasher.update(data)
    return at + len(data)


def _blocks(piece: FilePart, first_chunk: int = 0) -> Iterator[bytes]:
    """Yield the chunks of a part's file. Raise CorruptStoreError for one that is not what was written."""
    with open(piece.path, "rb") as file:
        for number in range(first_chunk, len(piece.hashes)):
            at = number * CHUNK_BYTES
            file.seek(at)
            block = file.read(min(CHUNK_BYTES, piece.size - at))
            if xxhash.xxh3_64_intdigest(block) != piece.hashes[number]:
                raise CorruptStoreError(
                    f"{piece.path}: found other bytes than were written, in {len(block):,} bytes from {at:,}; expected "
                    "a store without damage: restore the file from a copy, or repair the store: "
                    "memfeed.repair(dataset, path)"
                )
            yield block
