"""Archives that tensordict writes, which are unpacked, and files of other kinds, for which the error has a line."""

from __future__ import annotations

import gc
import inspect
import pickle
import re
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

import memfeed
from memfeed.errors import CorruptStoreError, StoreError
from memfeed.testing import equal
from tensordicts import KINDS, numbers, plain

needs_archives = pytest.mark.skipif(
    "archive" not in inspect.signature(TensorDict.memmap).parameters, reason="this tensordict writes no archives"
)


def _save(td: Any, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        td.memmap(path)
    return path


@needs_archives
@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_has_the_rows_of_the_directory(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind]()
    archive, directory = _save(made, tmp_path / "td.tdz"), _save(made, tmp_path / "td")
    assert archive.is_file()
    ours, theirs = memfeed.open(archive), memfeed.open(directory)
    n = len(theirs)
    assert ours.schema == theirs.schema
    assert ours.nbytes == theirs.nbytes
    assert [equal(ours[i], theirs[i]) for i in range(n)] == [True] * n
    for one, other in zip(memfeed.Loader(ours, 2, seed=1), memfeed.Loader(theirs, 2, seed=1), strict=True):
        assert plain(one) == plain(other)
    again = pickle.loads(pickle.dumps(ours.subset([n - 1, 0])))
    assert equal(again[0], theirs[n - 1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["td", "td.tdz"]


@needs_archives
def test_edits_of_a_column_never_reach_the_archive(tmp_path: Path) -> None:
    archive = _save(TensorDict({"a": numbers(5000, 3), "b": numbers(5000)}, [5000]), tmp_path / "td.tdz")
    before = archive.read_bytes()
    store = memfeed.open(archive)
    assert torch.equal(store.column("a"), numbers(5000, 3))
    store.column("a").zero_()
    assert archive.read_bytes() == before
    assert torch.equal(memfeed.open(archive).column("a"), numbers(5000, 3))
    assert torch.equal(store.column("b"), numbers(5000))
    loader = memfeed.Loader(memfeed.open(archive), 100, shuffle=True)
    assert sum(len(batch) for batch in loader) == 5000


@needs_archives
def test_archives_that_are_not_as_tensordict_writes_them(tmp_path: Path) -> None:
    directory = _save(TensorDict({"x": numbers(100, 3)}, [100]), tmp_path / "td")

    def packed(name: str, **options: Any) -> Path:
        path = tmp_path / name
        with zipfile.ZipFile(path, "w", **options) as archive:
            for file in sorted(directory.iterdir()):
                archive.write(file, file.name)
        return path

    compressed = packed("a.tdz", compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(StoreError, match=r"a\.tdz: found compressed files in it; expected .* unzip it"):
        memfeed.open(compressed)
    assert torch.equal(memfeed.open(packed("b.tdz"))[:]["x"], numbers(100, 3))
    good = _save(TensorDict({"x": numbers(100, 3)}, [100]), tmp_path / "good.tdz")
    data = good.read_bytes()
    for number, cut in enumerate((1, 100, len(data) // 2)):
        short = tmp_path / f"short{number}.tdz"
        short.write_bytes(data[:-cut])
        with pytest.raises(StoreError):
            memfeed.open(short)
    swapped = tmp_path / "swapped.tdz"
    swapped.write_bytes(data.replace(b"PK\x03\x04", b"PK\x03\x05"))
    with pytest.raises(CorruptStoreError, match=r"swapped\.tdz: found an archive that cannot be read"):
        memfeed.open(swapped)
    small = tmp_path / "small.tdz"
    with zipfile.ZipFile(small, "w") as archive:
        archive.write(directory / "meta.json", "meta.json")
        archive.writestr("x.memmap", b"1234")
    with pytest.raises(CorruptStoreError, match=r"x\.memmap: found 4 bytes; expected 1,200"):
        memfeed.open(small)


@needs_archives
def test_the_copy_of_an_archive_is_removed_with_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = _save(TensorDict({"x": numbers(50, 3)}, [50]), tmp_path / "td.tdz")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    view = memfeed.open(archive).subset([3, 1])
    archive.unlink()
    assert torch.equal(view[:]["x"], numbers(50, 3)[[3, 1]])
    del view
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())


@needs_archives
@pytest.mark.parametrize("name", ["../out.memmap", "/out.memmap", "a/../../out.memmap"])
def test_nothing_of_an_archive_leaves_its_directory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = _save(TensorDict({"x": numbers(50)}, [50]), tmp_path / "td.tdz")
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr(name, b"")
    (tmp_path / "a" / "temporary").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a" / "temporary"))
    store = memfeed.open(archive)
    assert len(store) == 50
    assert not Path("/out.memmap").exists()
    (inside,) = (tmp_path / "a" / "temporary").iterdir()
    assert all(inside in path.parents for path in tmp_path.rglob("out.memmap"))


@needs_archives
def test_a_uint16_and_a_value_as_long_as_the_rows(tmp_path: Path) -> None:
    td = TensorDict({"x": numbers(3).to(torch.uint16), "s": NonTensorData([1, 2, 3], batch_size=[3])}, [3])
    store = memfeed.open(_save(td, tmp_path / "td.tdz"))
    assert store[1]["x"].dtype is torch.uint16
    assert store[:]["x"].tolist() == [0, 1, 2]
    assert store[:]["s"] == [1, 2, 3]
    assert store[0]["s"] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["h5", "zarr", "consolidated"])
def test_the_line_for_another_file_works(kind: str, tmp_path: Path) -> None:
    td = TensorDict({"x": numbers(4, 3), "deep": TensorDict({"y": numbers(4)}, [4])}, [4])
    path = tmp_path / f"saved.{kind}"
    if kind == "h5":
        pytest.importorskip("h5py")
        td.to_h5(path)
    elif kind == "zarr":
        pytest.importorskip("zarr")
        if not hasattr(td, "to_zarr"):
            pytest.skip("this tensordict does not write zarr")
        td.to_zarr(path)
    else:
        td.consolidate(path)
    with pytest.raises(StoreError) as raised:
        memfeed.open(path)
    message = str(raised.value)
    assert len(message) < 400
    line = re.search(r"memfeed\.cache\(.*\)(?= makes one)", message)
    assert line is not None, message
    if not hasattr(TensorDict, f"from_{kind}"):
        pytest.skip(f"this tensordict has no from_{kind}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = eval(line[0], {"memfeed": memfeed, "TensorDict": TensorDict})
    assert equal(store[:], td)
    assert memfeed.open(tmp_path / "saved.mf")[3]["deep", "y"] == 3


def test_other_files_get_no_such_line(tmp_path: Path) -> None:
    for number, data in enumerate((b"", b"PK", b"PK\x03\x04" + b"x" * 50, b"\x00" * 100, b"\xff" * 16)):
        path = tmp_path / f"file{number}"
        path.write_bytes(data)
        with pytest.raises(StoreError, match="found a file that is no store; expected memfeed.json"):
            memfeed.open(path)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "text")
    with pytest.raises(StoreError, match="found a file that is no store"):
        memfeed.open(tmp_path / "other.zip")
