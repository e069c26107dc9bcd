"""obstore's stores for addresses. obstore is imported here, when the first request is made."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from memfeed.errors import RemoteError
from memfeed.remote.address import Address
from memfeed.remote.retry import Retry
from memfeed.system import extras

_REQUEST_SECONDS = 600
TRUSTED = "MEMFEED_TRUSTED_ENDPOINT"
_OF_AWS = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")
_SECRETS = {"AWS_SESSION_TOKEN", "AWS_TOKEN", "AWS_SSE_CUSTOMER_KEY_BASE64"}
_memories: dict[str, Any] = {}
_pid: int | None = None  # of the process that first used obstore


def connect(address: Address, retry: Retry, repetitions: int) -> Any:
    """Return obstore's store for an address. No request is made.

    Raises RemoteError where a redirect could take credentials to another host.
    """
    load_obstore()
    import obstore.store

    store: Any = obstore.store  # its types are those of each kind of store
    if address.kind == "memory":
        return _memories.setdefault(address.url, store.MemoryStore())
    if address.kind == "file":
        if not os.path.isdir(address.path):
            raise FileNotFoundError(address.path)
        return store.LocalStore(address.path)
    if address.kind == "s3":
        _require_trusted(_endpoint())
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


def _require_trusted(endpoint: str) -> None:
    """Raise RemoteError for secrets in headers that obstore would send on with a redirect, unless the user trusts it.

    obstore follows the redirects of an endpoint, also to another host, and leaves out ``Authorization`` alone. Hosts of
    AWS lead to no others.
    """
    host = urlsplit(endpoint).hostname or ""
    if not endpoint or host.endswith(_OF_AWS) or os.environ.get(TRUSTED) == endpoint:
        return
    given = os.environ.keys() & _SECRETS
    is_of_role = not (os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE", "").lower() == "true")
    if given or is_of_role:
        what = (
            ", ".join(sorted(given))
            or "no AWS_ACCESS_KEY_ID, so that a role of the machine is used, with a session token"
        )
        raise RemoteError(
            f"found {what}, and an endpoint that is not of AWS ({endpoint}): if it answered with a redirect to another "
            f"host, the token or key would be sent there too; expected AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            f"alone. If you trust this endpoint, set {TRUSTED}={endpoint}"
        )


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
