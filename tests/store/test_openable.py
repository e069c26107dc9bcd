"""Paths where there is no store, and metadata that is far too large for what it describes."""

import errno
import json
import pickle
import tracemalloc

import pytest
import torch

import memfeed
from memfeed.errors import StoreError, StoreNotFoundError
from memfeed.store import format


def test_a_store_that_is_missing_is_also_a_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing: found nothing there; expected a store") as caught:
        memfeed.open(tmp_path / "missing")
    assert isinstance(caught.value, StoreError)
    assert caught.value.errno == errno.ENOENT
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (StoreNotFoundError, str(caught.value))
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError) as caught:
        memfeed.open(tmp_path / "empty")
    assert not isinstance(caught.value, OSError)


def bomb(path, size):
    """A manifest of ``size`` bytes, whose list of skipped samples takes more memory once decoded."""
    memfeed.cache({"x": torch.arange(3)}, path, progress=False)
    file = path / "memfeed.json"
    document = json.loads(file.read_bytes())
    document["skipped"] = [0]
    text = json.dumps(document).replace('"skipped": [0]', f'"skipped": [{"0," * (size // 2)}0]')
    file.unlink()
    file.write_text(text)


def test_a_huge_manifest_is_refused_before_it_is_read(path):
    bomb(path, 70 << 20)
    tracemalloc.start()
    with pytest.raises(StoreError, match=r"json: found 73,[\d,]+ bytes of metadata; expected at most 67,[\d,]+"):
        memfeed.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_many_files_justify_a_large_manifest(path, monkeypatch):
    monkeypatch.setattr(format, "LARGEST_JSON", 100)
    memfeed.cache({f"k{i}": torch.arange(3) for i in range(30)}, path, progress=False)
    assert len(memfeed.open(path).schema) == 30
    monkeypatch.setattr(format, "JSON_A_FILE", 10)
    with pytest.raises(StoreError, match="bytes of metadata"):
        memfeed.open(path)


def test_a_store_whose_manifest_nobody_could_open_is_not_committed(path, monkeypatch):
    monkeypatch.setattr(format, "LARGEST_JSON", 100)
    monkeypatch.setattr(format, "JSON_A_FILE", 10)
    with pytest.raises(StoreError, match="bytes of metadata"):
        memfeed.cache({f"k{i}": torch.arange(3) for i in range(30)}, path, progress=False)
    assert not path.exists()
