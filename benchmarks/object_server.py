"""An object store behind a limited link: 100 MB/s for all requests together, and 30 ms before each answer.

It answers what readers ask of a web server and of S3 with bucket names in paths: GET, also of a range, HEAD, and lists
of objects. It asks for no login and writes nothing. It runs in a process of its own, and sends files from the page
cache. (moto's server reads a whole object for each range.)
"""

from __future__ import annotations

import contextlib
import http.server
import json
import multiprocessing
import os
import re
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

BYTES_PER_SECOND, LATENCY_SECONDS = 100e6, 0.03
BUCKET = "bench"
_PIECE = 128 << 10
_LOG = "/log/"


class Answered(NamedTuple):
    """A request: when it began and ended, in seconds, and the bytes of the body."""

    began: float
    ended: float
    size: int


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    root: Path
    lock, free_at, log = threading.Lock(), 0.0, list[Answered]()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Answer with the size."""
        self._answer()

    def do_GET(self) -> None:
        """Answer with bytes."""
        if self.path == _LOG:
            with _Handler.lock:
                found, _Handler.log = _Handler.log, []
            self._send_text(json.dumps(found), "application/json")
        else:
            self._answer()

    def _answer(self) -> None:
        began = time.monotonic()
        time.sleep(LATENCY_SECONDS)
        place = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(place.query, keep_blank_values=True))
        path = self.root / urllib.parse.unquote(place.path).lstrip("/")
        sent = 0
        if "list-type" in query:
            self._send_text(listing(path, query.get("prefix", ""), query.get("delimiter", "")), "application/xml")
        elif not path.is_file():
            text = f"<Error><Code>NoSuchKey</Code><Key>{escape(place.path)}</Key></Error>"
            self._send_text(text, "application/xml", status=404)
        else:
            sent = self._send_object(path)
        with _Handler.lock:
            _Handler.log.append(Answered(began, time.monotonic(), sent))

    def _send_text(self, text: str, kind: str, status: int = 200) -> None:
        data = text.encode()
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send_object(self, path: Path) -> int:
        """Send the object or the range of it that is asked for; return the bytes of the body."""
        about = path.stat()
        first, stop = byte_range(self.headers.get("Range"), about.st_size)
        self.send_response_only(206 if self.headers.get("Range") else 200)
        self.send_header("Content-Length", str(stop - first))
        self.send_header("Last-Modified", self.date_time_string(about.st_mtime))
        self.send_header("ETag", etag(about))
        self.send_header("Accept-Ranges", "bytes")
        if self.headers.get("Range"):
            self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{about.st_size}")
        self.end_headers()
        if self.command == "HEAD":
            return 0
        self.wfile.flush()
        with open(path, "rb") as file:
            at = first
            while at < stop:
                with _Handler.lock:
                    size = min(_PIECE, stop - at)
                    _Handler.free_at = max(_Handler.free_at, time.monotonic()) + size / BYTES_PER_SECOND
                    wait = _Handler.free_at - time.monotonic()
                if wait > 0.002:
                    time.sleep(wait)
                end = at + size
                while at < end:
                    at += os.sendfile(self.connection.fileno(), file.fileno(), at, end - at)
        return stop - first


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""


def etag(about: os.stat_result) -> str:
    """Return the etag of a file."""
    return f'"{about.st_mtime_ns:x}-{about.st_size:x}"'


def byte_range(header: str | None, size: int) -> tuple[int, int]:
    """Return the first byte and the one after the last that a header Range asks for."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if found is None:
        return 0, size
    first, last = found.groups()
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


def listing(bucket: Path, prefix: str, delimiter: str) -> str:
    """Return S3's list of the objects of a bucket whose names begin with ``prefix``, all in one answer."""
    contents, prefixes = list[str](), dict[str, None]()
    for path in sorted(path for path in bucket.rglob("*") if path.is_file()):
        key = path.relative_to(bucket).as_posix()
        if not key.startswith(prefix):
            continue
        rest = key[len(prefix) :]
        if delimiter and delimiter in rest:
            prefixes[prefix + rest.split(delimiter)[0] + delimiter] = None
            continue
        about = path.stat()
        when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(about.st_mtime))
        contents.append(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified><ETag>{escape(etag(about))}</ETag>"
            f"<Size>{about.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )
    common = [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in prefixes]
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket.name}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(contents) + len(common)}</KeyCount>"
        f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(contents + common)}</ListBucketResult>"
    )


def _serve(root: Path, port: Any) -> None:
    _Handler.root = root
    server = _Server(("127.0.0.1", 0), _Handler)
    port.send(server.server_address[1])
    server.serve_forever()


@contextlib.contextmanager
def server(root: Path) -> Iterator[str]:
    """Yield the address of a server of the files below ``root``; its directories are buckets."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(root, sender), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{receiver.recv()}"
    finally:
        process.terminate()
        process.join()


def environment(address: str) -> dict[str, str]:
    """Return the environment in which S3 clients ask this server."""
    login = {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark"}
    region = {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    # the last is that of MosaicML Streaming
    return {**login, **region, "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true", "S3_ENDPOINT_URL": address}


def answered(address: str) -> list[Answered]:
    """Return the requests since the last call."""
    with urllib.request.urlopen(f"{address}{_LOG}", timeout=60) as answer:
        return [Answered(*one) for one in json.load(answer)]


def round_trips(found: list[Answered]) -> int:
    """Return how many requests came one after another, each begun after the one before it had ended."""
    ended, count = 0.0, 0
    for one in sorted(found, key=lambda one: one.ended):
        if one.began >= ended:
            ended, count = one.ended, count + 1
    return count
