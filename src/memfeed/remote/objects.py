"""The objects below an address, by way of obstore: read, list, write, remove. What fails is tried again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from memfeed.errors import CorruptStoreError, MemfeedError, ObjectNotFoundError, ObjectReplacedError, RemoteError
from memfeed.remote import connections as retries
from memfeed.remote.connections import (
    Address,
    RequestFailure,
    Retry,
    WrongBytesError,
    classify,
    connect,
    has_no_links,
    is_unsupported,
    load_obstore,
    parse_address,
)
from memfeed.system import files

PART_BYTES = 8 << 20
MOST_PARTS = 10_000  # of one object, in S3
_PARTS_AT_ONCE = 4  # of one file; several files are sent at a time
_T = TypeVar("_T")


class ObjectInfo(NamedTuple):
    """The properties of an object: its size in bytes, its etag and its version (None if the store has none)."""

    size: int
    etag: str | None
    version: str | None = None


class Objects:
    """The objects below an address. Their names are relative to it, with ``/`` between the parts.

    Each method may be called by many threads at once; obstore waits without the GIL. A request that fails for a reason
    that may pass (no connection, a time limit, 5xx, a body cut short) is repeated as ``retry`` says; then, or at once
    for other reasons, RemoteError is raised. It names the address, and never shows credentials.

    The connections belong to a process: a forked child cannot use them, and gets RemoteError; a spawned one can.

    Example::

        objects = Objects("s3://bucket/ants.mf")
        info = objects.head("memfeed.json")
        data = objects.read("memfeed.json", 0, info.size, etag=info.etag)
    """

    def __init__(self, address: str | os.PathLike[str] | Address, retry: Retry | None = None) -> None:
        self.address = parse_address(address)
        self._retry = retry
        self._one: Any = None
        self._many: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"address": self.address, "_retry": self._retry, "_one": None, "_many": None}

    def __repr__(self) -> str:
        return f"Objects({self.address.shown!r})"

    @property
    def retry(self) -> Retry:
        """How often requests are repeated."""
        return self._retry or retries.DEFAULT

    def head(self, name: str) -> ObjectInfo:
        """Return size and etag of an object. Raises ObjectNotFoundError if there is none."""
        return self._tried(name, "asking for its size", lambda: _info(load_obstore().head(self._client, name)))

    def read(
        self,
        name: str,
        first: int,
        size: int,
        *,
        etag: str | None = None,
        accept: Callable[[memoryview], bool] | None = None,
    ) -> memoryview:
        """Return ``size`` bytes of an object from byte ``first``; they belong to the caller.

        ``accept`` is given the bytes, and returns False if they are wrong (a checksum differs); then they are asked for
        again, and in the end CorruptStoreError is raised.
        Raises ObjectReplacedError if the object has another etag than ``etag``, or ends earlier.
        """
        if size == 0:
            return memoryview(b"")
        options = {"range": (first, first + size), **({"if_match": etag} if etag is not None else {})}

        def attempt() -> memoryview:
            result = load_obstore().get(self._client, name, options=options)
            if etag is not None and result.meta.get("e_tag") not in (None, etag):
                raise _replaced(self._where(name), "another etag")
            data = memoryview(result.bytes())
            if len(data) != size:
                if result.meta["size"] < first + size:
                    raise _replaced(self._where(name), f"{result.meta['size']:,} bytes")
                raise WrongBytesError(f"{len(data):,} bytes of {size:,}")
            if accept is not None and not accept(data):
                raise WrongBytesError("bytes whose checksum differs")
            return data

        return self._tried(name, f"reading {size:,} bytes from {first:,}", attempt)

    def read_whole(self, name: str, *, most_bytes: int) -> tuple[bytes, ObjectInfo]:
        """Return all bytes of an object of at most ``most_bytes``, with its size and etag.

        Raises CorruptStoreError if it is larger.
        """

        def attempt() -> tuple[bytes, ObjectInfo]:
            result = load_obstore().get(self._client, name)
            info = _info(result.meta)
            if info.size > most_bytes:
                raise CorruptStoreError(
                    f"{self._where(name)}: found {info.size:,} bytes; expected at most {most_bytes:,}: this is not the "
                    "file of a store; push the store again"
                )
            data = bytes(result.bytes())
            if len(data) != info.size:
                raise WrongBytesError(f"{len(data):,} bytes of {info.size:,}")
            return data, info

        return self._tried(name, "reading it", attempt)

    def list(self, prefix: str = "") -> dict[str, ObjectInfo]:
        """Return the objects whose names begin with the directory ``prefix``, by name, sorted."""

        def attempt() -> dict[str, ObjectInfo]:
            if self.address.kind == "file" and not os.path.isdir(self.address.path):
                return {}
            found = load_obstore().list(self._client, prefix.rstrip("/") or None, chunk_size=1000)
            return {meta["path"]: _info(meta) for chunk in found for meta in chunk}

        return dict(sorted(self._tried(prefix, "listing its objects", attempt).items()))

    def put(self, name: str, data: bytes, *, replaces: ObjectInfo | Literal["nothing"] | None = None) -> str | None:
        """Write an object at once, and return its etag.

        With ``replaces`` it is written only in place of the object that was found so, or where there is "nothing"; else
        ObjectReplacedError is raised. A store that has no such condition, or a directory without hard links, is asked
        before, which two writers at the same moment can pass.
        """
        content = bytes(data)
        self._make_directory()
        mode: Any = "overwrite" if replaces is None else "create"
        if isinstance(replaces, ObjectInfo):
            known = {"e_tag": replaces.etag, "version": replaces.version}
            mode = {name: value for name, value in known.items() if value is not None}

        def attempt() -> str | None:
            try:
                result = load_obstore().put(self._client, name, content, mode=mode, use_multipart=False)
            except Exception as error:
                by_link = mode == "create" and self.address.kind == "file" and has_no_links(error)
                if mode == "overwrite" or not (by_link or is_unsupported(error)):
                    raise
                self._require(name, replaces)
                result = load_obstore().put(self._client, name, content, use_multipart=False)
            return result.get("e_tag")  # type: ignore[no-any-return]

        try:
            return self._tried(name, f"writing {len(content):,} bytes", attempt)
        except ObjectReplacedError:
            if replaces is None or not self._is_written(name, content):
                raise  # else an earlier attempt wrote it, and its answer was lost
            return self.head(name).etag

    def _require(self, name: str, expected: ObjectInfo | str | None) -> None:
        """Raise ObjectReplacedError unless the object is the expected one, or is not there if "nothing" is expected."""
        try:
            found = self.head(name)
        except ObjectNotFoundError:
            if expected == "nothing":
                return
            raise
        if found != expected:
            raise _replaced(self._where(name), "another object")

    def _is_written(self, name: str, data: bytes) -> bool:
        try:
            return self.read_whole(name, most_bytes=len(data))[0] == data
        except MemfeedError:
            return False

    def put_file(self, name: str, path: Path, size: int, *, sent: Callable[[bytes], None] | None = None) -> None:
        """Write an object with the ``size`` bytes of a file. It is there only when all of it has arrived.

        ``sent`` is given the bytes in order, in pieces of a multiple of 8 MiB but the last; ``sent(b"")`` says that
        the file is sent from its beginning (again). What it raises is raised here, and then the object is not written.
        """
        self._make_directory()
        if size <= PART_BYTES:

            def attempt() -> None:
                data = b"".join(_pieces(path, size, PART_BYTES, sent))
                load_obstore().put(self._client, name, data, use_multipart=False)

            self._tried(name, f"sending {size:,} bytes", attempt)
            return
        part = max(1, -(-size // (MOST_PARTS * PART_BYTES))) * PART_BYTES

        def send() -> None:
            refused: list[MemfeedError] = []
            pieces = _kept_error(_pieces(path, size, part, sent), refused)
            try:
                load_obstore().put(self._part_client, name, pieces, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)
            except Exception:
                if refused:  # obstore may raise what came of giving the upload up
                    raise refused[0] from None
                raise

        self._tried(name, f"sending {size:,} bytes", send, most_attempts=2)  # obstore repeats the parts

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; one that is not there is no error."""
        paths = list(names)
        for first in range(0, len(paths), 1000):
            some = paths[first : first + 1000]

            def attempt(some: list[str] = some) -> None:
                for name in some:
                    try:
                        load_obstore().delete(self._client, name)
                    except FileNotFoundError as error:
                        if "NoSuchBucket" in str(error):
                            raise

            self._tried(some[0], f"removing {len(some):,} objects", attempt)

    def _tried(self, name: str, action: str, attempt: Callable[[], _T], most_attempts: int | None = None) -> _T:
        """Return what ``attempt`` returns, after as many repetitions as the retry allows."""
        where, failures, reasons = self._where(name), 0, dict[str, int]()
        began = time.monotonic()
        failure: RequestFailure | None = None
        last: Exception | None = None
        try:
            while True:
                try:
                    return attempt()
                except (MemfeedError, ImportError):
                    raise
                except Exception as error:
                    failure, last = classify(error, action, where), error
                if failure.final is not None:
                    raise failure.final from None
                failures += 1
                reasons[failure.reason] = reasons.get(failure.reason, 0) + 1
                if failures >= (most_attempts or self.retry.attempts):
                    break
                time.sleep(self.retry.wait_seconds(failures))
            found = ", ".join(f"{reason} ({count} times)" if count > 1 else reason for reason, count in reasons.items())
            tried = f"in {failures} attempts and {time.monotonic() - began:.0f} s"
            if isinstance(last, WrongBytesError) and len(reasons) == 1:
                raise CorruptStoreError(
                    f"{where}: found {found} while {action}, {tried}; expected those that were pushed: push the store "
                    f"again, to {self.address} or another address"
                )
            advice = "check the network, the endpoint (AWS_ENDPOINT_URL) and the limits of the store"
            if self.address.kind == "file":
                advice = "check the disk and its permissions"
            raise RemoteError(
                f"{where}: found {found} while {action}, {tried}; expected an answer: {advice}, and run this again"
            )
        finally:
            failure = last = None  # an error and the frame that it came from would keep each other, and their callers

    def _make_directory(self) -> None:
        if self.address.kind == "file":
            files.make_directory(Path(self.address.path))

    def _where(self, name: str) -> str:
        return f"{self.address}/{name}" if name else str(self.address)

    @property
    def _client(self) -> Any:
        """obstore's store for an address. It never repeats a request, because `_tried` does."""
        if self._one is None:
            self._one = connect(self.address, self.retry, 0)
        return self._one

    @property
    def _part_client(self) -> Any:
        """The client for large files: it repeats each part, so that the file need not be sent again."""
        if self._many is None:
            self._many = connect(self.address, self.retry, self.retry.attempts - 1)
        return self._many


def _pieces(path: Path, size: int, piece: int, sent: Callable[[bytes], None] | None) -> Iterator[bytes]:
    """Yield the bytes of a file in order."""
    if sent:
        sent(b"")
    try:
        with open(path, "rb") as file:
            done = 0
            while done < size:
                data = file.read(min(piece, size - done))
                if len(data) < min(piece, size - done):
                    raise OSError("it ends early")
                if sent:
                    sent(data)
                done += len(data)
                yield data
    except OSError as error:
        raise CorruptStoreError(
            f"{path}: found bytes that cannot be read ({error.strerror or error}); expected {size:,}: restore the "
            "file from a copy"
        ) from None


def _kept_error(pieces: Iterator[bytes], refused: list[MemfeedError]) -> Iterator[bytes]:
    """Yield ``pieces``; add the error that ends them to ``refused``."""
    try:
        yield from pieces
    except MemfeedError as error:
        refused.append(error)
        raise


def _info(meta: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(meta["size"], meta.get("e_tag"), meta.get("version"))


def _replaced(where: str, found: str) -> ObjectReplacedError:
    return ObjectReplacedError(
        f"{where}: found {found}: the object was replaced meanwhile; expected the one that was there at the beginning: "
        "open the address again"
    )
