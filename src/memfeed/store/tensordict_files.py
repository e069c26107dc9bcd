"""The files that tensordict wrote: in a directory, or in one archive (``.tdz``, a zip file of the same files).

Links are not followed, pipes and devices are not opened, and a name never leads out of the directory or archive.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
from pathlib import Path
from typing import Protocol

from memfeed.errors import CorruptStoreError, StoreError
from memfeed.store.mapping import FilePosition

_LOCAL_HEADER = struct.Struct("<4s22s2H")  # of a zip entry: signature, facts, lengths of the name and of the extra part
_ENCRYPTED = 1  # a bit of ZipInfo.flag_bits
_UNZIP = "unzip the archive and open the directory, or save it again with TensorDict.save"


class Files(Protocol):
    """Files of a directory, or of an archive. Paths begin with the path of the directory or archive."""

    def size(self, path: Path) -> int | None:
        """Return the bytes of a file, None if nothing is there. Raises CorruptStoreError for anything but a file."""

    def is_directory(self, path: Path) -> bool:
        """Return True for a directory. Raises CorruptStoreError for a link."""

    def names(self, path: Path) -> list[str]:
        """Return the names in a directory."""

    def read(self, path: Path) -> bytes:
        """Return the bytes of a file."""

    def place(self, path: Path, size: int) -> FilePosition:
        """Return where the bytes of a file begin; it has ``size`` bytes or more."""


class Directory:
    """A directory, as `TensorDict.memmap` writes it. The path of the directory itself may be a link."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def _status(self, path: Path) -> os.stat_result | None:
        try:
            found = path.stat() if path == self._root else os.lstat(path)
        except (OSError, ValueError):  # nothing there, or a name that no file can have
            return None
        if stat.S_ISLNK(found.st_mode):
            raise CorruptStoreError(
                f"{path}: found a symbolic link; expected a plain file or directory: put a copy there"
            )
        return found

    def size(self, path: Path) -> int | None:
        """See ``Files.size``."""
        found = self._status(path)
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise CorruptStoreError(f"{path}: found no plain file there; expected a file: save it again")
        return None if found is None else found.st_size

    def is_directory(self, path: Path) -> bool:
        """See ``Files.is_directory``."""
        found = self._status(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def names(self, path: Path) -> list[str]:
        """See ``Files.names``."""
        return sorted(os.listdir(path))

    def read(self, path: Path) -> bytes:
        """See ``Files.read``."""
        return path.read_bytes()

    def place(self, path: Path, size: int) -> FilePosition:
        """See ``Files.place``."""
        return FilePosition(path)


class Archive:
    """A ``.tdz`` archive, as `TensorDict.save` writes it: tensors are stored without compression, and aligned."""

    def __init__(self, root: Path) -> None:
        self._root = root
        try:
            self._zip = zipfile.ZipFile(root)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, EOFError) as error:
            raise CorruptStoreError(f"{root}: found no zip archive that can be read ({error}): save it again") from None
        self._entries = {name: entry for entry in self._zip.infolist() if not (name := entry.filename).endswith("/")}
        self._directories: dict[str, set[str]] = {"": set()}
        for name in self._entries:
            parts = name.split("/")
            for depth, part in enumerate(parts):
                self._directories.setdefault("/".join(parts[:depth]), set()).add(part)

    def _entry(self, path: Path) -> zipfile.ZipInfo | None:
        return self._entries.get(path.relative_to(self._root).as_posix())

    def size(self, path: Path) -> int | None:
        """See ``Files.size``."""
        entry = self._entry(path)
        return None if entry is None else entry.file_size

    def is_directory(self, path: Path) -> bool:
        """See ``Files.is_directory``."""
        name = path.relative_to(self._root).as_posix()
        return ("" if name == "." else name) in self._directories

    def names(self, path: Path) -> list[str]:
        """See ``Files.names``."""
        name = path.relative_to(self._root).as_posix()
        return sorted(self._directories["" if name == "." else name])

    def read(self, path: Path) -> bytes:
        """See ``Files.read``. Raises CorruptStoreError for an entry of another size than the archive says."""
        entry = self._entry(path)
        assert entry is not None
        try:
            with self._zip.open(entry) as file:
                data = file.read(entry.file_size + 1)
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError, EOFError, ValueError) as error:
            raise CorruptStoreError(f"{path}: found bytes that cannot be read ({error}): save it again") from None
        if len(data) != entry.file_size:
            raise CorruptStoreError(f"{path}: found {len(data):,} bytes; expected {entry.file_size:,}: save it again")
        return data

    def place(self, path: Path, size: int) -> FilePosition:
        """See ``Files.place``. Raises StoreError for an entry that is compressed, which cannot be mapped."""
        entry = self._entry(path)
        assert entry is not None
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _ENCRYPTED:
            raise StoreError(f"{path}: found a compressed entry; expected a stored one, which can be mapped: {_UNZIP}")
        with open(self._root, "rb") as file:
            file.seek(entry.header_offset)
            header = file.read(_LOCAL_HEADER.size)
        signature, _, name, extra = _LOCAL_HEADER.unpack(header.ljust(_LOCAL_HEADER.size, b"\0"))
        begin = entry.header_offset + _LOCAL_HEADER.size + name + extra
        if signature != b"PK\x03\x04" or begin + size > self._root.stat().st_size:
            raise CorruptStoreError(f"{path}: found an entry that is not inside the archive: save it again")
        return FilePosition(self._root, begin)


def files_at(root: Path) -> Files:
    """Return the files at ``root``, which is a directory or an archive."""
    return Archive(root) if root.is_file() else Directory(root)
