"""Recognise files that tensordict writes and that are no directory of tensors, by their first and last bytes."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

_HDF5 = b"\x89HDF\r\n\x1a\n"
_ZARR = ("zarr.json", ".zgroup")
_CONSOLIDATED = b'{"cls"'  # how the metadata of a consolidated file begins


def is_archive(path: Path) -> bool:
    """Return True for a zip file with a meta.json at its top, as `TensorDict.save("x.tdz")` writes."""
    try:
        if not path.is_file() or not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            return "meta.json" in archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
        return False


def conversion(path: Path) -> str:
    """Return an error with the line that makes a store of an h5, zarr or consolidated file; "" for anything else."""
    is_hdf5 = path.is_file() and _bytes(path, 0, len(_HDF5)) == _HDF5
    is_zarr = path.is_dir() and any((path / name).is_file() for name in _ZARR)
    for kind, call, matches in (
        ("an h5 file", "from_h5({!r})", is_hdf5),
        ("a zarr group", "from_zarr({!r})", is_zarr),
        ("a consolidated TensorDict", "from_consolidated({!r}).clone()", _is_consolidated(path)),  # it is mapped
    ):
        if matches:
            store = str(path.with_suffix(".mf"))
            return (
                f"{path}: found {kind}; expected a store: "
                f"memfeed.cache(TensorDict.{call.format(str(path))}, {store!r}) makes one"
            )
    return ""


def _is_consolidated(path: Path) -> bool:
    """Return True if the last 8 bytes are the length of the JSON before them, which has the class of the TensorDict."""
    size = path.stat().st_size if path.is_file() else 0
    if size < 8:
        return False
    begin = size - 8 - struct.unpack("<Q", _bytes(path, size - 8, 8))[0]
    return begin >= 0 and _bytes(path, begin, len(_CONSOLIDATED)) == _CONSOLIDATED


def _bytes(path: Path, begin: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(size)
