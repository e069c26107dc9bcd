from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from disk.refusing import IS_POSSIBLE
from memfeed.errors import CorruptStoreError, ObjectNotFoundError, ObjectReplacedError, RemoteError
from memfeed.remote.connections import Retry
from memfeed.remote.objects import Objects


def test_objects_are_written_read_listed_and_removed(address):
    objects = Objects(address)
    etag = objects.put("a/one", b"0123456789")
    objects.put("a/b%2F c", b"")
    objects.put("other", b"1")
    assert objects.head("a/one")[:2] == (10, etag)
    assert bytes(objects.read("a/one", 3, 4, etag=etag)) == b"3456"
    assert bytes(objects.read("a/one", 0, 0)) == b""
    assert objects.read_whole("a/one", most_bytes=10) == (b"0123456789", objects.head("a/one"))
    assert {name: info.size for name, info in objects.list().items()} == {"a/b%2F c": 0, "a/one": 10, "other": 1}
    assert list(objects.list("a")) == ["a/b%2F c", "a/one"]
    objects.delete(["a/one", "missing"])
    assert list(objects.list()) == ["a/b%2F c", "other"]
    with pytest.raises(ObjectNotFoundError, match="no such object"):
        objects.head("a/one")


def test_an_object_that_was_replaced_is_not_read(address):
    objects = Objects(address)
    before = objects.put("one", b"0123456789")
    objects.put("one", b"9876543210!")
    with pytest.raises(ObjectReplacedError, match="replaced meanwhile"):
        objects.read("one", 0, 4, etag=before)
    with pytest.raises(ObjectReplacedError):
        objects.read("one", 8, 10)  # it ends earlier
    with pytest.raises(CorruptStoreError, match="at most 3"):
        objects.read_whole("one", most_bytes=3)


@pytest.mark.skipif("MEMFEED_S3RVER" in os.environ, reason="s3rver has no conditional writes")
def test_a_conditional_put_replaces_only_what_it_expects(address):
    objects = Objects(address)
    objects.put("one", b"1", replaces="nothing")
    first = objects.head("one")
    with pytest.raises(ObjectReplacedError):
        objects.put("one", b"2", replaces="nothing")
    assert objects.put("one", b"1", replaces="nothing") == first.etag  # as after an answer that was lost
    objects.put("one", b"22", replaces=first)
    second = objects.head("one")
    with pytest.raises(ObjectReplacedError):
        objects.put("one", b"333", replaces=first)
    assert objects.read_whole("one", most_bytes=9) == (b"22", second)


def test_a_store_without_conditional_writes_is_asked_before(bucket, monkeypatch):
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    objects = Objects(f"{bucket}/x")
    objects.put("one", b"1", replaces="nothing")
    with pytest.raises(ObjectReplacedError):
        objects.put("one", b"2", replaces="nothing")
    first = objects.head("one")
    objects.put("one", b"22", replaces=first)
    with pytest.raises(ObjectReplacedError):
        objects.put("one", b"333", replaces=first)
    assert bytes(objects.read("one", 0, 2)) == b"22"


@pytest.mark.parametrize("size", [0, 5, (8 << 20) + 1, 17 << 20])
def test_a_file_is_sent_in_parts(address, tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(data := os.urandom(size))
    pieces: list[bytes] = []
    Objects(address).put_file("one", path, size, sent=pieces.append)
    assert Objects(address).read_whole("one", most_bytes=size)[0] == data
    assert b"".join(pieces) == data


@pytest.mark.parametrize("size", [5, 9 << 20])
def test_a_file_is_not_written_if_a_check_refuses(address, tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(bytes(size))

    def refuse(data: bytes) -> None:
        if data:
            raise CorruptStoreError("damaged")

    with pytest.raises(CorruptStoreError, match="damaged"):
        Objects(address).put_file("one", path, size, sent=refuse)
    with pytest.raises(CorruptStoreError, match="cannot be read"):
        Objects(address).put_file("one", path, size + 1)
    with pytest.raises(ObjectNotFoundError):
        Objects(address).head("one")


def test_many_threads_share_one(bucket):
    objects = Objects(f"{bucket}/x")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: objects.put(f"{k}", str(k).encode()), range(40)))
        assert list(pool.map(lambda k: bytes(objects.read(f"{k}", 0, len(str(k)))), range(40))) == [
            str(k).encode() for k in range(40)
        ]
    again = pickle.loads(pickle.dumps(objects))
    assert bytes(again.read("7", 0, 1)) == b"7"


@pytest.mark.parametrize("kind", ["reset", "truncate", "slow_down", "wrong_bytes"])
def test_a_fault_that_passes_is_not_seen(bucket, proxy, kind):
    objects = Objects(f"{bucket}/x")
    etag = objects.put("one", b"0123456789")
    proxy.inject(kind, 3)
    found = objects.read("one", 2, 5, etag=etag, accept=lambda data: bytes(data) == b"23456")
    assert bytes(found) == b"23456"
    assert proxy.injected[kind] == 3


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("reset", RemoteError, "a connection that was reset"),
        ("truncate", RemoteError, "a body cut short"),
        ("slow_down", RemoteError, "503 SlowDown"),
        ("wrong_bytes", CorruptStoreError, "checksum differs"),
    ],
)
def test_a_fault_that_stays_is_an_error_after_the_retries(bucket, proxy, kind, error, says):
    objects = Objects(f"{bucket}/x")
    objects.put("one", b"0123456789")
    proxy.inject(kind)
    with pytest.raises(error, match=says) as raised:
        objects.read("one", 0, 10, accept=lambda data: bytes(data) == b"0123456789")
    assert proxy.injected[kind] == objects.retry.attempts
    text = str(raised.value)
    assert f"{bucket}/x/one" in text
    assert "6 attempts" in text
    assert "SECRET" not in text
    assert len(text) < 400


def test_a_silent_server_is_given_up(bucket, proxy):
    objects = Objects(f"{bucket}/x", Retry(2, 0.001, 0.001, stall_seconds=0.3))
    proxy.inject("stall")
    with pytest.raises(RemoteError, match="no answer in time"):
        objects.head("one")


def test_expired_credentials_are_not_tried_again(bucket, proxy):
    objects = Objects(f"{bucket}/x")
    objects.put("one", b"1")
    proxy.inject("expired")
    with pytest.raises(RemoteError, match="have expired") as raised:
        objects.read("one", 0, 1)
    assert proxy.injected["expired"] == 1
    assert "SECRET" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_what_is_not_allowed_is_not_tried_again(bucket, proxy):
    objects = Objects(f"{bucket}/x")
    objects.put("one", b"1")
    asks = (
        lambda: objects.read("one", 0, 1),
        lambda: objects.head("one"),
        lambda: objects.put("two", b"2"),
        objects.list,
    )
    for count, ask in enumerate(asks, 1):
        proxy.inject("denied", 1)
        with pytest.raises(RemoteError, match=r"no permission \(.*403.*expected permission to read") as raised:
            ask()
        assert proxy.injected["denied"] == count
        assert "SECRET" not in str(raised.value)


def test_no_bucket(s3_environment):
    objects = Objects("s3://no-such-bucket-of-memfeed/x")
    for ask in (lambda: objects.read_whole("a", most_bytes=9), objects.list, lambda: objects.put("a", b"1")):
        with pytest.raises(ObjectNotFoundError, match="no such bucket"):
            ask()


def test_no_credentials(s3_environment, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RemoteError, match=r"found no AWS_ACCESS_KEY_ID"):
        Objects("s3://bucket/x").head("a")
    monkeypatch.setenv("MEMFEED_TRUSTED_ENDPOINT", os.environ["AWS_ENDPOINT_URL"])
    with pytest.raises(RemoteError, match=r"no credentials.*AWS_ACCESS_KEY_ID"):
        Objects("s3://bucket/x").head("a")


def test_no_server(s3_environment, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(RemoteError, match=r"s3://bucket/x/a: found no connection \(6 times\).*AWS_ENDPOINT_URL"):
        Objects("s3://bucket/x").head("a")


def test_without_obstore_the_error_has_the_line_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'memfeed\[remote\]'"):
        Objects("s3://bucket/x").head("a")


def _head(objects: Objects) -> str:
    try:
        return str(objects.head("one"))
    except RemoteError as error:
        return str(error)


def test_a_forked_child_gets_an_error_and_no_hang(bucket):
    objects = Objects(f"{bucket}/x")
    objects.put("one", b"1")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert "forked" in pool.apply_async(_head, [objects]).get(60)


WITHOUT_LINKS = """
import errno, sys
from disk.refusing import refuse
from memfeed.errors import ObjectReplacedError
from memfeed.remote.objects import Objects

refuse(getattr(errno, sys.argv[2]), "link", "linkat")
objects = Objects(sys.argv[1])
objects.put("one", b"1", replaces="nothing")
first = objects.head("one")
for expected in ("nothing", first._replace(etag="x")):
    try:
        objects.put("one", b"2", replaces=expected)
    except ObjectReplacedError:
        print("refused")
objects.put("one", b"22", replaces=first)
print(bytes(objects.read("one", 0, 2)), list(objects.list()))
"""


@pytest.mark.skipif(not IS_POSSIBLE, reason="no filter of system calls")
@pytest.mark.parametrize("error", ["EPERM", "EOPNOTSUPP", "EMLINK"])
def test_a_directory_without_hard_links_is_asked_before(tmp_path, error):
    pytest.importorskip("obstore")
    command = [sys.executable, "-c", WITHOUT_LINKS, f"file://{tmp_path}/x", error]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == "refused\nrefused\nb'22' ['one']\n", done.stderr
