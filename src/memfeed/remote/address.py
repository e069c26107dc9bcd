"""Addresses of stores: which scheme, which place, and how they are shown without credentials."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from memfeed.errors import StoreError
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
