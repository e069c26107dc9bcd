import pytest
import torch

import memfeed
from memfeed.errors import CorruptStoreError, StoreError
from memfeed.store import format
from support import Made, Point


@pytest.fixture
def store(path):
    samples = [{"a": torch.arange(3) + i, "p": Point(i, "x" * i), "r": torch.arange(i)} for i in range(5)]
    return memfeed.cache(Made(samples), path, progress=False)


def test_a_manifest_comes_back_the_same(store):
    data = (store.path / "memfeed.json").read_bytes()
    assert format.encode(format.decode(data, store.path)) == data


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "memfeed", "version": 1}', "\xff", "[" * 100_000])
def test_no_manifest_at_all(store, text):
    file = store.path / "memfeed.json"
    file.chmod(0o644)
    file.write_text(text, encoding="latin-1")
    with pytest.raises(StoreError, match="memfeed.json: found"):
        memfeed.open(store.path)


@pytest.mark.parametrize("name", ["a.memmap", "r/heap.bin", "r/start.memmap", "p/y/heap.bin", "checksums.bin"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_named(store, name, change):
    file = store.path / name
    file.chmod(0o644)
    size = file.stat().st_size
    with open(file, "r+b") as handle:
        handle.truncate(size + change)
    with pytest.raises(CorruptStoreError, match=rf"{name}: found {size + change:,} bytes; expected {size:,}"):
        memfeed.open(store.path)


def test_a_missing_file_is_named(store):
    (store.path / "a.memmap").unlink()
    with pytest.raises(CorruptStoreError, match="a.memmap: found no such file .*restore it from a copy"):
        memfeed.open(store.path)


@pytest.mark.parametrize("name", ["a.memmap", "r"])
def test_links_are_refused(store, tmp_path, name):
    (store.path / name).rename(tmp_path / "elsewhere")
    (store.path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptStoreError, match="found a symbolic link"):
        memfeed.open(store.path)


def test_a_store_without_its_manifest_is_not_read_as_tensordict_would(store):
    (store.path / "memfeed.json").unlink()
    with pytest.raises(CorruptStoreError, match=r"without its memfeed\.json"):
        memfeed.open(store.path)
