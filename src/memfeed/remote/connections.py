"""obstore's stores for addresses. obstore is imported here, when the first request is made."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from memfeed.errors import RemoteError
from memfeed.remote.address import Address
from memfeed.remote.retry import Retry
from memfeed.system import extras

_REQUEST_SECONDS = 600
_memories: dict[str, Any] = {}
_pid: int | None = None  # of the process that first used obstore


def connect(address: Address, retry: Retry, repetitions: int) -> Any:
    """Return obstore's store for an address. No request is made."""
    load_obstore()
    import obstore.store

    store: Any = obstore.store  # its types are those of each kind of store
    if address.kind == "memory":
        return _memories.setdefault(address.url, store.MemoryStore())
    if address.kind == "file":
        if not os.path.isdir(address.path):
            raise FileNotFoundError(address.path)
        return store.LocalStore(address.path)
    wait = {"init_backoff": timedelta(seconds=retry.first_wait_seconds),
            "max_backoff": timedelta(seconds=retry.longest_wait_seconds)}  # fmt: skip
    client = {
        "timeout": timedelta(seconds=_REQUEST_SECONDS),
        "read_timeout": timedelta(seconds=retry.stall_seconds),
        "allow_http": address.url.startswith("http:") or _endpoint().startswith("http:"),
    }
    return store.from_url(
        address.url,
        client_options=client,
        retry_config={"max_retries": repetitions, "backoff": wait},
    )


def _endpoint() -> str:
    """Return the S3 endpoint of the environment, as obstore reads it."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if name in os.environ), "")


def load_obstore() -> Any:
    """Import obstore. Raises ModuleNotFoundError with the line that installs it, and RemoteError in a forked child."""
    global _pid
    extras.require("remote", "obstore")
    import obstore

    _pid = _pid or os.getpid()
    if _pid != os.getpid():  # its threads are in the parent only: a request would wait for ever
        raise RemoteError(
            "found a request to an object store in a forked process whose parent has made one; expected a spawned "
            'process: multiprocessing_context="spawn" (or "forkserver")'
        )
    return obstore
