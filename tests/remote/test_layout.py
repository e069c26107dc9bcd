from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

import memfeed
from memfeed.errors import CorruptStoreError, MemfeedError, StoreError, StoreNotFoundError
from memfeed.remote.layout import POINTER, RANGES, expected_chunks, is_range_file, read_manifest
from memfeed.remote.objects import Objects
from memfeed.store import format
from memfeed.store.checksums import read_checksums


@pytest.fixture
def store(tmp_path: Path) -> memfeed.Store:
    dataset = [{"x": torch.full((4,), k), "text": "a" * k} for k in range(50)]
    return memfeed.cache(dataset, tmp_path / "local.mf", workers=0, progress=False)


def upload(store: memfeed.Store, address: str, prefix: str = "") -> Objects:
    """Copy a store's files as ``aws s3 sync`` does."""
    objects = Objects(address)
    for path in sorted(store.path.rglob("*")):
        if path.is_file():
            objects.put(prefix + str(path.relative_to(store.path)), path.read_bytes())
    return objects


def test_a_store_that_was_copied_file_by_file_is_read(store, address):
    upload(store, address)
    found = read_manifest(address)
    assert found.manifest == store._view.manifest
    assert found.manifest_bytes == (store.path / format.MANIFEST).read_bytes()
    assert set(found.files) == {*store._view.manifest.files, format.CHECKSUMS}
    checksums = read_checksums(store.path, store._view.manifest)
    assert [one for _, one in expected_chunks(found)] == [one for of_file in checksums.values() for one in of_file]
    name = "x.memmap"
    assert bytes(found.read(name, 8, 16)) == (store.path / name).read_bytes()[8:24]


def test_a_push_is_seen_by_its_manifest(store, address):
    digest = format.digest((store.path / format.MANIFEST).read_bytes())
    objects = upload(store, address, f"pushes/{digest}/")
    with pytest.raises(StoreNotFoundError, match="not complete"):
        read_manifest(address)
    objects.put(POINTER, b'{"format": "memfeed-address", "version": 1, "digest": "%s"}' % digest.encode())
    found = read_manifest(address)
    assert found.digest == digest
    assert found.directory == f"pushes/{digest}/"
    objects.delete([f"pushes/{digest}/x.memmap"])
    with pytest.raises(CorruptStoreError, match=r"x.memmap: found no such object"):
        read_manifest(address)
    objects.delete([f"pushes/{digest}/{format.MANIFEST}"])
    with pytest.raises(CorruptStoreError, match="is not there"):
        read_manifest(address)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "cannot be read"),
        (b'{"format": "other"}', "this is no store"),
        (b'{"format": "memfeed-address", "version": 2}', "upgrade memfeed"),
        (b'{"format": "memfeed-address", "version": 1, "digest": "../../x"}', "32 hex digits"),
    ],
)
def test_a_bad_pointer_is_one_clear_error(address, content, says):
    Objects(address).put(POINTER, content)
    with pytest.raises(StoreError, match=says):
        read_manifest(address)


def test_nothing_and_something_else_are_no_store(address):
    with pytest.raises(StoreNotFoundError, match="found nothing"):
        read_manifest(address)
    Objects(address).put("notes.txt", b"1")
    with pytest.raises(StoreNotFoundError, match="1 other objects"):
        read_manifest(address)


def test_a_newer_store_and_a_changed_size_are_refused(store, address):
    objects = upload(store, address)
    objects.put("x.memmap", b"1")
    with pytest.raises(CorruptStoreError, match="found 1 bytes; expected 1,600"):
        read_manifest(address)
    objects.put(format.MANIFEST, b'{"format": "memfeed", "version": 99}')
    with pytest.raises(StoreError, match="found format version 99"):
        read_manifest(address)


@pytest.mark.skipif("MEMFEED_S3RVER" in os.environ, reason="s3rver has another login")
def test_a_web_server_without_lists_is_read(store, bucket, proxy):
    proxy.login = "AWS4-HMAC-SHA256 Credential=x/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    upload(store, f"{bucket}/ants.mf")
    found = read_manifest(f"{proxy.url}/{bucket[5:]}/ants.mf")
    assert found.manifest == store._view.manifest
    assert found.files["x.memmap"].etag
    assert bytes(found.read("x.memmap", 0, 8)) == (store.path / "x.memmap").read_bytes()[:8]
    with pytest.raises(MemfeedError):
        Objects(found.address).list()


def test_a_manifest_takes_few_requests(store, bucket, proxy):
    upload(store, f"{bucket}/ants.mf")
    proxy.requests.clear()
    read_manifest(f"{bucket}/ants.mf")
    assert len(proxy.requests) == 3


def test_the_list_is_asked_for_beside_the_manifest(store, address, monkeypatch):
    upload(store, address)
    both = threading.Barrier(2, timeout=60)
    read_whole, listed = Objects.read_whole, Objects.list

    def read(self, name, **options):
        if name.endswith("memfeed.json"):
            both.wait()
        return read_whole(self, name, **options)

    def found(self, prefix=""):
        both.wait()
        return listed(self, prefix)

    monkeypatch.setattr(Objects, "read_whole", read)
    monkeypatch.setattr(Objects, "list", found)
    assert read_manifest(address).manifest.rows == len(store)


def test_a_push_has_checksums_of_chunks_of_whole_rows(store, tmp_path):
    pytest.importorskip("obstore")
    address = f"file://{tmp_path}/remote/a.mf"
    memfeed.push(store, address)
    remote = read_manifest(address)
    content = remote.read_range_file()
    damaged = content[:-1] + bytes([content[-1] ^ 1])
    assert is_range_file(content)
    assert not is_range_file(damaged)
    Path(address.removeprefix("file://"), remote.directory, RANGES).write_bytes(damaged)
    with pytest.raises(CorruptStoreError, match=r"ranges\.bin"):
        read_manifest(address).read_range_file()
