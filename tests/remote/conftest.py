from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import memfeed
from fault_proxy import FaultProxy
from memfeed.remote import connections
from memfeed.remote.connections import Retry
from origin import make

FAST = Retry(attempts=6, first_wait_seconds=0.001, longest_wait_seconds=0.01, stall_seconds=30.0)


@pytest.fixture(autouse=True)
def _fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "DEFAULT", FAST)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> memfeed.Store:
    """Return a store of several chunks."""
    return make(tmp_path_factory.mktemp("origin") / "a.mf")


@pytest.fixture
def origin(local: memfeed.Store, tmp_path: Path) -> str:
    """Return the address of a copy of the store, in a directory."""
    shutil.copytree(local.path, tmp_path / "remote" / "a.mf")
    return f"file://{tmp_path}/remote/a.mf"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return a directory for a cache, which does not exist yet."""
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Return host and port of an S3 server on the loopback.

    It is moto's, in a thread of this process; or s3rver, the program that MEMFEED_S3RVER names (`make test-s3rver`).
    """
    pytest.importorskip("obstore")
    if "MEMFEED_S3RVER" in os.environ:
        with _s3rver(os.environ["MEMFEED_S3RVER"], tmp_path_factory.mktemp("s3rver")) as place:
            yield place
        return
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@contextlib.contextmanager
def _s3rver(program: str, directory: Path) -> Iterator[tuple[str, int]]:
    command = [program, "-d", str(directory), "-a", "127.0.0.1", "-p", "0", "--no-vhost-buckets"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        try:
            assert started.stdout is not None
            place = next(line for line in started.stdout if "listening on" in line).rsplit(" ", 1)[1].strip()
            threading.Thread(target=started.stdout.read, daemon=True).start()
            yield place.split(":")[0], int(place.split(":")[1])
        finally:
            started.kill()


@pytest.fixture
def s3_environment(s3_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> str:
    """Let obstore's environment name moto's server and a login; return the endpoint."""
    endpoint = f"http://{s3_server[0]}:{s3_server[1]}"
    is_s3rver = "MEMFEED_S3RVER" in os.environ  # which knows one login
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "S3RVER" if is_s3rver else "test-key-id",
        "AWS_SECRET_ACCESS_KEY": "S3RVER" if is_s3rver else "SECRET-of-the-test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return endpoint


def new_bucket(endpoint: str) -> str:
    """Create a bucket of a random name and return the name."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT"), timeout=60):
        return name


@pytest.fixture
def bucket(s3_environment: str) -> str:
    """Return the address of a new bucket: ``s3://bucket-...``."""
    return f"s3://{new_bucket(s3_environment)}"


@pytest.fixture
def proxy(s3_server: tuple[str, int], bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Return a fault proxy before the server of ``bucket``; requests of obstore go through it."""
    with FaultProxy(*s3_server) as started:
        monkeypatch.setenv("AWS_ENDPOINT_URL", started.url)
        yield started


@pytest.fixture(params=["s3", "file", "memory"])
def address(request: pytest.FixtureRequest, tmp_path) -> str:
    """Return an address where nothing is, of each kind that can be written here."""
    pytest.importorskip("obstore")
    kinds: dict[str, Callable[[], str]] = {
        "s3": lambda: f"{request.getfixturevalue('bucket')}/ants.mf",
        "file": lambda: f"file://{tmp_path}/remote/ants.mf",
        "memory": lambda: f"memory://{uuid.uuid4().hex}/ants.mf",
    }
    return kinds[request.param]()
