"""A small HTTP proxy on the loopback, in front of one server, that makes the faults of a network and of a store.

Example::

    with FaultProxy("127.0.0.1", port) as proxy:
        proxy.inject("slow_down", 3)              # the next three requests
        proxy.inject("truncate", 2, method="GET", path="image.memmap")
        proxy.latency_seconds, proxy.bytes_per_second = 0.03, 100e6
        environ["AWS_ENDPOINT_URL"] = proxy.url
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

KINDS = ("reset", "lost_answer", "truncate", "slow_down", "wrong_bytes", "expired", "stall")
_HOP = {"connection", "keep-alive", "transfer-encoding"}
_PIECE = 64 << 10
_AFTER = {"lost_answer", "truncate", "wrong_bytes"}  # once the server has done what was asked
_ERRORS = {"slow_down": (503, "SlowDown"), "expired": (403, "ExpiredToken"), "denied": (403, "AccessDenied")}


class Request(NamedTuple):
    """One request that the proxy has seen; ``range`` is its header, or an empty string."""

    method: str
    path: str
    range: str


@dataclass
class _Fault:
    kind: str
    left: int  # -1 for ever
    method: str
    path: str
    every: int
    seen: int = 0


class FaultProxy:
    """The proxy; a context manager. ``injected`` counts the faults by kind, ``requests`` lists what was asked for.

    ``latency_seconds`` are waited before each answer, ``bytes_per_second`` limits all answers together (None: not).
    A body of "wrong_bytes" has one byte changed; only answers with a body get it, and "truncate". "reset" closes the
    connection before the server is asked, "lost_answer" after; "stall" says nothing for a minute.
    """

    def __init__(self, host: str, port: int) -> None:
        self.latency_seconds = 0.0
        self.bytes_per_second: float | None = None
        self.injected: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.body_bytes = 0
        self.login = ""  # a header Authorization for requests that have none, as a web server that is open to all
        self._upstream = (host, port)
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """The address of the proxy, for AWS_ENDPOINT_URL."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def inject(self, kind: str, count: int = -1, *, method: str = "", path: str = "", every: int = 1) -> None:
        """Give ``count`` requests the fault (-1: until `clear`): of those with this method and this part of the path,
        the first and then each ``every``-th.
        """
        assert kind in KINDS or kind in _ERRORS, kind
        with self._lock:
            self._faults.append(_Fault(kind, count, method, path, every))

    def clear(self) -> None:
        """Inject no more faults."""
        with self._lock:
            self._faults.clear()

    def _pick(self, method: str, path: str, has_body: bool, *, before: bool) -> str | None:
        """Return the fault for a request, and count it; ``before`` it is sent on, or after the answer is there."""
        with self._lock:
            for fault in self._faults:
                if (fault.kind not in _AFTER) != before or not fault.left or (fault.method and fault.method != method):
                    continue
                if fault.path not in path or not (has_body or fault.kind not in ("truncate", "wrong_bytes")):
                    continue
                fault.seen += 1
                if (fault.seen - 1) % fault.every:
                    continue
                fault.left -= fault.left > 0
                self.injected[fault.kind] += 1
                return fault.kind
        return None

    def _wait_for_bandwidth(self, size: int) -> None:
        if self.bytes_per_second is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self.bytes_per_second
            wait = self._free_at - now
        time.sleep(max(wait, 0.0))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    _local = threading.local()

    def do_GET(self) -> None:
        self._forward()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass

    def _forward(self) -> None:
        proxy = self.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy.requests.append(Request(self.command, self.path, self.headers.get("Range", "")))
        if proxy.latency_seconds:
            time.sleep(proxy.latency_seconds)
        fault = proxy._pick(self.command, self.path, False, before=True)
        if fault == "reset":
            self._reset()
            return
        if fault == "stall":
            proxy._closing.wait(60)
            self._reset()
            return
        if fault in _ERRORS:
            status, code = _ERRORS[fault]
            text = f"<Error><Code>{code}</Code><Message>no</Message><Token>SECRET</Token></Error>".encode()
            self._answer(status, [("Content-Type", "application/xml")], b"" if self.command == "HEAD" else text)
            return
        status, headers, data = self._ask(body)
        fault = proxy._pick(self.command, self.path, bool(data) and status in (200, 206), before=False)
        if fault == "lost_answer":
            self._reset()
            return
        if fault == "wrong_bytes":
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
        self._answer(status, headers, data, cut=fault == "truncate")

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        if self.proxy.login:
            headers.setdefault("Authorization", self.proxy.login)
        for attempt in range(2):  # a kept connection may have been closed meanwhile
            connection = self._connection()
            try:
                connection.request(self.command, self.path, body=body or None, headers=headers)
                answer = connection.getresponse()
                data = answer.read()
                return answer.status, answer.getheaders(), data
            except (OSError, http.client.HTTPException):
                connection.close()
                if attempt:
                    raise
        raise AssertionError

    def _connection(self) -> http.client.HTTPConnection:
        known = getattr(self._local, "connection", None)
        if known is None or (known.host, known.port) != self.proxy._upstream:
            known = self._local.connection = http.client.HTTPConnection(*self.proxy._upstream, timeout=60)
        return known

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOP and name.lower() != "content-length":
                self.send_header(name, value)
        length = next((value for name, value in headers if name.lower() == "content-length"), None)
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(data)))
        self.end_headers()
        for first in range(0, len(data) // 2 if cut else len(data), _PIECE):
            piece = data[first : min(first + _PIECE, len(data) // 2 if cut else len(data))]
            self.proxy._wait_for_bandwidth(len(piece))
            self.wfile.write(piece)
            self.proxy.body_bytes += len(piece)
        if cut:
            self.wfile.flush()
            self.close_connection = True

    def _reset(self) -> None:
        """Close the connection with RST."""
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
        self.close_connection = True

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            del self._local.connection
