"""Addresses of stores, and obstore's stores for them. obstore is imported here, when the first request is made.

An error of obstore means either to try again, after a while, or an error of ours. The text of such an error is never
shown as it is: it has the URL of the request, and may have a login or a signature in it. Only the status and the error
code of the server are taken from it.
"""

from __future__ import annotations

import errno
import os
import random
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from memfeed.errors import MemfeedError, ObjectNotFoundError, ObjectReplacedError, RemoteError, SpaceError, StoreError
from memfeed.system import files, messages
from memfeed.system.messages import path_text

_SCHEMES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "az": "az",
    "azure": "az",
    "http": "http",
    "https": "http",
    "file": "file",
    "memory": "memory",
}
SCHEMES = "s3://, gs://, az://, http://, https://, file:// or memory://"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # as in `local_path`: Path("s3://x") is "s3:/x"


@dataclass(frozen=True)
class Address:
    """The place of a store. ``str()`` of it has no credentials: only ``url`` has, and it is never shown.

    ``kind`` is "s3", "gs", "az", "http", "file" or "memory"; ``name`` the last part of the path.
    """

    kind: str
    url: str
    shown: str

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"

    @property
    def name(self) -> str:
        """The last part of the path, such as ``imagenet.mf``; the bucket, if there is no path."""
        return unquote(self.shown.partition("?")[0].rstrip("/").rpartition("/")[2])

    @property
    def path(self) -> str:
        """The path on this machine, of a file:// address."""
        return unquote(urlsplit(self.url).path)


def is_address(path: Any) -> bool:
    """Return True if ``path`` is an address, or a text that has a scheme; also if the scheme is unknown."""
    return isinstance(path, Address) or (isinstance(path, str | os.PathLike) and _scheme(os.fspath(path)) is not None)


def parse_address(text: str | os.PathLike[str] | Address) -> Address:
    """Return the address that a text is.

    Raises StoreError for an unknown scheme, an address without a bucket or host, and for credentials in the address of
    a bucket. The message does not show them.
    """
    if isinstance(text, Address):
        return text
    given = path_text(text, "an address, as 's3://bucket/ants.mf'")
    scheme = _scheme(given)
    if scheme is None:
        local = f"; of a directory of this machine: {f'file://{os.path.abspath(given)}'!r:.150}"
        raise StoreError(f"found {given!r:.150}, a path; expected an address that begins with {SCHEMES}{local}")
    if not given[len(scheme) + 1 :].startswith("//"):
        given = given.replace(":/", ":///" if scheme == "file" else "://", 1)  # what pathlib.Path made of it
    try:
        parts = urlsplit(given)
        host, has_login = parts.netloc.rpartition("@")[2], "@" in parts.netloc
        _ = parts.port
    except ValueError:
        raise StoreError(
            f"found an address of {scheme}:// that is none; expected one such as s3://bucket/name"
        ) from None
    shown = urlunsplit((scheme, host, parts.path.rstrip("/"), "", "")) + ("?..." if parts.query else "")
    if scheme == "file" and not host:
        shown = f"file://{parts.path.rstrip('/')}"
    kind = _SCHEMES.get(scheme)
    if kind is None:
        raise StoreError(f"found {shown!r:.150}, of an unknown scheme; expected {SCHEMES}, or a path of this machine")
    if kind in ("s3", "gs", "az") and (has_login or parts.query or parts.fragment):
        raise StoreError(
            f"found {shown!r:.150} with a login, a query or a fragment; expected the bucket and a name: credentials "
            "come from the environment, such as AWS_ACCESS_KEY_ID"
        )
    if kind == "file" and (host not in ("", "localhost") or not parts.path.strip("/") or parts.query):
        raise StoreError(f"found {shown!r:.150}; expected the absolute path of a directory: file:///data/ants.mf")
    if kind not in ("file", "memory") and not host:
        raise StoreError(f"found {shown!r:.150}, without a bucket or host; expected {scheme}://bucket/name")
    return Address(kind, urlunsplit((scheme, parts.netloc, parts.path.rstrip("/"), parts.query, "")), shown)


def _scheme(text: str) -> str | None:
    """Return the scheme of a text in lower case; None if it is a path."""
    found = _SCHEME.match(text) if isinstance(text, str) else None
    return None if found is None else found[1].lower()


_random = random.Random()  # not the global generator, which is the user's


@dataclass(frozen=True)
class Retry:
    """Exponential backoff with jitter. Times in seconds.

    Before attempt k + 1 it waits ``first_wait_seconds * 2 ** (k - 1)``, at most ``longest_wait_seconds``, of which half
    is random: many ranks that were refused at the same moment do not come back at the same moment.
    ``stall_seconds`` is how long a server may send nothing before the attempt has failed.
    """

    attempts: int = 8
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 8.0
    stall_seconds: float = 30.0

    def wait_seconds(self, failures: int) -> float:
        """Return how long to wait after so many failures."""
        longest = min(self.first_wait_seconds * 2.0 ** (failures - 1), self.longest_wait_seconds)
        return longest * (0.5 + 0.5 * _random.random())


DEFAULT = Retry()


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
    messages.require("remote", "obstore")
    import obstore

    _pid = _pid or os.getpid()
    if _pid != os.getpid():  # its threads are in the parent only: a request would wait for ever
        raise RemoteError(
            "found a request to an object store in a forked process whose parent has made one; expected a spawned "
            'process: multiprocessing_context="spawn" (or "forkserver")'
        )
    return obstore


_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_KIND = re.compile(r"kind: (Connect|Request|Timeout|Interrupted|Decode|Body)\b")
_NO_CREDENTIALS = ("/latest/api/token", "/latest/meta-data", "169.254.169.254", "metadata.google.internal")
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired", "InvalidToken"}
_UNKNOWN_LOGIN = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed", "InvalidAuthenticationInfo"}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"}
_FAILED = {"Connect": "no connection", "Timeout": "no answer in time", "Decode": "a body cut short",
           "Body": "a body cut short", "Interrupted": "a connection that was reset",
           "Request": "a connection that was reset"}  # fmt: skip
_RETRIED_STATUS = {408, 409, 425, 429}
_OF_SYSTEM = re.compile(r"\(os error (\d+)\)")
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.EMLINK, errno.EXDEV, *files.NO_SUPPORT}
_PASSING = {errno.EINTR, errno.EAGAIN, errno.EIO, errno.EBUSY, errno.ENOMEM, errno.EMFILE, errno.ENFILE,
            errno.ESTALE, errno.ETIMEDOUT}  # fmt: skip
_RENEW = "renew the credentials in the environment (AWS_SESSION_TOKEN, `aws sso login`) and run this again"


@dataclass(frozen=True)
class RequestFailure:
    """Outcome of one failed request: the reason in a few words, and the error to raise if it must not be repeated."""

    reason: str
    final: MemfeedError | None = None


class WrongBytesError(Exception):
    """The bytes of an answer are not the ones that were asked for; the attempt is repeated."""


def classify(error: BaseException, action: str, where: str) -> RequestFailure:
    """Return what ``error`` of obstore means, for ``action`` ("reading bytes 0 to 9") at ``where``, which is shown."""
    text, name = str(error), type(error).__name__
    code, status = _first(_CODE, text), int(_first(_STATUS, text) or 0)
    if isinstance(error, WrongBytesError):
        return RequestFailure(text)
    if where.startswith("file:") and (number := _system_error(error)) not in (0, errno.ENOENT, errno.EEXIST):
        return _of_directory(number, action, where)
    said = f"{status} {code}".strip() if code else (f"status {status}" if status else "")

    def final(found: str, next_step: str, kind: type[RemoteError] = RemoteError) -> RequestFailure:
        answer = f" ({said})" if said else ""
        return RequestFailure(found, kind(f"{where}: found {found}{answer} while {action}; {next_step}"))

    if any(sign in text for sign in _NO_CREDENTIALS) or name == "CredentialsError":
        return final(
            "no credentials",
            "expected them in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role); for a public "
            "bucket: export AWS_SKIP_SIGNATURE=true",
        )
    if code in _EXPIRED:
        return final("credentials that have expired", f"expected valid ones: {_RENEW}")
    if code in _UNKNOWN_LOGIN or status == 401 or name == "UnauthenticatedError":
        return final("credentials that the store does not accept", f"expected valid ones: {_RENEW}")
    if status == 403 or name == "PermissionDeniedError" or isinstance(error, PermissionError):
        return final(
            "no permission",
            "expected permission to read, list and (for a push) write: ask the owner of the bucket, or use other "
            "credentials. Where listing is not allowed, a name that does not exist gets the same answer",
        )
    if code in _NO_BUCKET:
        return final("no such bucket", "expected a bucket that exists: create it, or correct the address",
                     ObjectNotFoundError)  # fmt: skip
    if isinstance(error, FileNotFoundError):
        return final("no such object", "expected one: correct the address, or push the store again",
                     ObjectNotFoundError)  # fmt: skip
    if name in ("PreconditionError", "AlreadyExistsError", "NotModifiedError") or status in (412, 416):
        return final(
            "that the object was replaced meanwhile",
            "expected the one that was there at the beginning: open the address again",
            ObjectReplacedError,
        )
    if is_unsupported(error) and where.startswith("http") and not status:
        return final(
            "a web server that ignores requests for ranges of bytes",
            "expected one that answers them, such as nginx, Apache or Caddy (python -m http.server does not)",
        )
    if is_unsupported(error):
        return final("that this kind of store cannot do so", "expected one that can, such as s3://")
    kind = _first(_KIND, text)
    if status >= 500 or status in _RETRIED_STATUS:
        return RequestFailure(said)
    if kind is not None and not status:
        return RequestFailure(_FAILED["Body" if "IncompleteBody" in text else kind])
    if status:
        return final("an answer that means a failure", "correct the address, or the settings of the store")
    if name in ("GenericError", "JoinError", "TimeoutError", "ConnectionError", "OSError"):
        return RequestFailure(_local_reason(text) or "an answer that cannot be read")
    return final(f"{name}", "correct the address, or the settings of the store in the environment")


def _of_directory(number: int, action: str, where: str) -> RequestFailure:
    """Return what an error of the system means for an object in a directory: only some pass with time."""
    error = OSError(number, os.strerror(number))
    raised = files.refused(error, where.removeprefix("file://"), action)
    final = raised if isinstance(raised, SpaceError) else RemoteError(str(raised))
    return RequestFailure(os.strerror(number), None if number in _PASSING else final)


def is_unsupported(error: BaseException) -> bool:
    """Return True if a store says that it has no such request."""
    unsupported = isinstance(error, NotImplementedError) or type(error).__name__ == "NotSupportedError"
    return unsupported or _first(_STATUS, str(error)) == "501"


def has_no_links(error: BaseException) -> bool:
    """Return True if a directory may have refused a second name of a file, by which obstore creates an object."""
    return _system_error(error) in _NO_LINKS


def _system_error(error: BaseException) -> int:
    """Return the number of the system's error that obstore reports; 0 if there is none."""
    return int(_first(_OF_SYSTEM, str(error)) or 0)


def _local_reason(text: str) -> str:
    found = re.search(r"([A-Z][a-z ]{3,60}) \(os error \d+\)", text)
    return found[1] if found else ""


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return found[1] if found else None
