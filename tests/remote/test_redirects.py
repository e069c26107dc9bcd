"""Where credentials go when a server answers with a redirect to another host; a port of this machine is a host."""

from __future__ import annotations

import base64
import hashlib
import http.server
import threading
from collections.abc import Iterator

import pytest

from memfeed.errors import RemoteError
from memfeed.remote import connections
from memfeed.remote.objects import Objects

pytest.importorskip("obstore")
SECRETS = ("authorization", "cookie", "x-amz-security-token", "x-amz-server-side-encryption-customer-key")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def answer(self) -> None:
        self.server.requests.append((self.command, {key.lower(): value for key, value in self.headers.items()}))
        body = b"" if self.server.leads_to else b"content"
        self.send_response(307 if self.server.leads_to else 200)
        if self.server.leads_to:
            self.send_header("Location", self.server.leads_to + self.path)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = answer  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    """Keeps the headers of each request, and sends who asks to ``leads_to``."""

    def __init__(self, leads_to: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.leads_to, self.requests = leads_to, list[tuple[str, dict[str, str]]]()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def servers() -> Iterator[tuple[_Server, _Server]]:
    other = _Server()
    first = _Server(other.url)
    yield first, other
    for server in (first, other):
        server.shutdown()
        server.server_close()


@pytest.fixture
def with_secrets(servers: tuple[_Server, _Server], monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(32)
    for name, value in {
        "AWS_ENDPOINT_URL": servers[0].url,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "SECRET-of-the-test",
        "AWS_SESSION_TOKEN": "TOKEN-of-the-test",
        "AWS_REGION": "us-east-1",
        "AWS_SERVER_SIDE_ENCRYPTION": "sse-c",
        "AWS_SSE_CUSTOMER_KEY_BASE64": base64.b64encode(key).decode(),
        "AWS_SSE_CUSTOMER_KEY_MD5": base64.b64encode(hashlib.md5(key, usedforsecurity=False).digest()).decode(),
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3(with_secrets: None, servers: tuple[_Server, _Server], monkeypatch: pytest.MonkeyPatch) -> Objects:
    """Return the objects of an endpoint that the user trusts."""
    monkeypatch.setenv("MEMFEED_TRUSTED_ENDPOINT", servers[0].url)
    return Objects("s3://bucket/ants.mf")


@pytest.mark.parametrize("secret", ["AWS_SESSION_TOKEN", "AWS_SSE_CUSTOMER_KEY_BASE64", "a role"])
def test_secrets_that_a_redirect_takes_along_go_to_no_other_host(
    with_secrets: None, servers: tuple[_Server, _Server], monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    for name in ("AWS_SESSION_TOKEN", "AWS_SSE_CUSTOMER_KEY_BASE64"):
        if name != secret:
            monkeypatch.delenv(name)
    if secret == "a role":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    for trusted in "", servers[1].url:
        monkeypatch.setenv("MEMFEED_TRUSTED_ENDPOINT", trusted)
        with pytest.raises(RemoteError, match=f"found .*{secret}.*set MEMFEED_TRUSTED_ENDPOINT={servers[0].url}"):
            Objects("s3://bucket/ants.mf").head("memfeed.json")
    assert not servers[0].requests
    assert not servers[1].requests


def test_keys_without_a_token_and_hosts_of_aws_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "TOKEN")
    for endpoint in (
        "",
        "https://s3.eu-central-1.amazonaws.com",
        "https://bucket.vpce-1.s3.us-east-1.vpce.amazonaws.com",
    ):
        connections._require_trusted(endpoint)
    for endpoint in "https://amazonaws.com.evil.example", "https://evilamazonaws.com", "http://127.0.0.1:9":
        with pytest.raises(RemoteError):
            connections._require_trusted(endpoint)
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    connections._require_trusted("http://127.0.0.1:9")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    connections._require_trusted("http://127.0.0.1:9")


def sent(server: _Server) -> set[str]:
    return {name for _, headers in server.requests for name in headers} & set(SECRETS)


def test_what_a_redirect_to_another_host_takes_along(s3: Objects, servers: tuple[_Server, _Server]) -> None:
    """As docs/remote.md says. When obstore leaves these out, or can be told to refuse redirects, this changes."""
    first, other = servers
    s3.head("memfeed.json")
    assert s3.read_whole("memfeed.json", most_bytes=100)[0] == b"content"
    assert [command for command, _ in other.requests] == ["HEAD", "GET"]
    assert sent(first) >= {"authorization", "x-amz-security-token"}
    assert sent(other) == sent(first) - {"authorization"} == {"x-amz-security-token", SECRETS[-1]}
    shown = repr(other.requests)
    assert "SECRET-of-the-test" not in shown
    assert "AWS4-HMAC" not in shown


def test_a_write_follows_no_redirect(s3: Objects, servers: tuple[_Server, _Server]) -> None:
    with pytest.raises(RemoteError, match="307"):
        s3.put("memfeed.json", b"content")
    assert servers[1].requests == []


def test_a_login_in_an_address_goes_to_no_other_host(servers: tuple[_Server, _Server]) -> None:
    first, other = servers
    login = first.url.replace("http://", "http://user:password@")
    assert Objects(f"{login}/ants.mf").read_whole("memfeed.json", most_bytes=100)[0] == b"content"
    assert other.requests
    assert not sent(other)
