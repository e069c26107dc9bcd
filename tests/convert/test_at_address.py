"""A conversion to an address: what is pulled, built and pushed, and where it is built."""

import os

import pytest

import memfeed
from memfeed.convert.cache import build_directory, cache_at
from memfeed.errors import StaleStoreError, StoreError
from memfeed.remote.connections import parse_address
from support import Made, cache


@pytest.fixture
def address(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bucket").mkdir()
    return f"file://{tmp_path}/bucket/s.mf"


def builder(n=5, calls=None):
    def build(path):
        if calls is not None:
            calls.append((path, path.exists()))
        path.parent.mkdir(parents=True, exist_ok=True)
        return cache(Made(lambda i: {"x": i + n}, n), path, workers=0, overwrite=path.exists() and calls is None)

    return build


def test_a_store_is_built_here_and_pushed(address, tmp_path):
    store = cache_at(address, builder(), replace=False, progress=False)
    assert store.path == build_directory(parse_address(address))
    assert memfeed.open(address, cache_dir=tmp_path / "other")[3]["x"] == 8


def test_one_that_is_there_is_pulled_first(address):
    local = build_directory(parse_address(address))
    cache_at(address, builder(), replace=False, progress=False)
    for path in sorted(local.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    local.rmdir()
    calls = []
    cache_at(address, builder(calls=calls), replace=False, progress=False)
    assert calls == [(local, True)]


def test_another_store_at_the_address_is_replaced_only_on_request(address):
    cache_at(address, builder(), replace=False, progress=False)
    with pytest.raises(StaleStoreError, match="found another store than that of this dataset"):
        cache_at(address, builder(7), replace=False, progress=False)
    assert len(cache_at(address, builder(7), replace=True, progress=False)) == 7


def test_a_web_server_is_only_read():
    with pytest.raises(StoreError, match="found a web server, which memfeed only reads"):
        cache_at("https://example.com/s.mf", pytest.fail, replace=False, progress=False)


def test_directories(monkeypatch, tmp_path):
    one, other = parse_address("s3://a/name"), parse_address("s3://b/name")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build_directory(one).parent == tmp_path / "memfeed"
    assert build_directory(one) == build_directory(parse_address("s3://a/name"))
    assert build_directory(one) != build_directory(other)
    assert build_directory(one).name.endswith("-name")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert os.fspath(build_directory(one)).startswith(f"{tmp_path}/home/.cache/memfeed/")
