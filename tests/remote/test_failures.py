"""What errors of obstore mean: data, without a network."""

from __future__ import annotations

import pytest

from memfeed.errors import ObjectNotFoundError, ObjectReplacedError, RemoteError, SpaceError
from memfeed.remote.connections import WrongBytesError, classify, is_unsupported

SECRET = "https://host/bucket?X-Amz-Signature=hunter2"


def named(name, text=""):
    """Return an error of a class of obstore, by its name: its classes cannot be made without obstore."""
    return type(name, (Exception,), {})(f"{text} {SECRET}")


def answer(status, code=""):
    return named("GenericError", f"status code: {status} <Code>{code}</Code>")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (answer(503, "SlowDown"), "503 SlowDown"),
        (answer(500), "status 500"),
        (answer(429), "status 429"),
        (named("GenericError", "kind: Connect,"), "no connection"),
        (named("GenericError", "kind: Timeout,"), "no answer in time"),
        (named("GenericError", "kind: Request, IncompleteBody"), "a body cut short"),
        (named("GenericError", "kind: Request,"), "a connection that was reset"),
        (named("GenericError", "Input output error (os error 5)"), "Input output error"),
        (named("TimeoutError"), "an answer that cannot be read"),
        (WrongBytesError("bytes whose checksum differs"), "bytes whose checksum differs"),
    ],
)
def test_what_may_pass_is_repeated(error, reason):
    found = classify(error, "reading it", "s3://bucket/name")
    assert found.final is None
    assert found.reason == reason


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (answer(403, "AccessDenied"), RemoteError, r"no permission \(403 AccessDenied\)"),
        (answer(400, "ExpiredToken"), RemoteError, "credentials that have expired"),
        (answer(403, "InvalidAccessKeyId"), RemoteError, "does not accept"),
        (named("UnauthenticatedError"), RemoteError, "does not accept"),
        (named("GenericError", "http://169.254.169.254/latest"), RemoteError, "no credentials"),
        (answer(404, "NoSuchBucket"), ObjectNotFoundError, "no such bucket"),
        (FileNotFoundError(SECRET), ObjectNotFoundError, "no such object"),
        (named("PreconditionError"), ObjectReplacedError, "replaced meanwhile"),
        (answer(412), ObjectReplacedError, "replaced meanwhile"),
        (answer(501), RemoteError, "cannot do so"),
        (answer(302), RemoteError, "an answer that means a failure"),
        (named("StrangeError"), RemoteError, "StrangeError"),
    ],
)
def test_what_stays_is_an_error_that_shows_no_secret(error, kind, says):
    found = classify(error, "reading it", "s3://bucket/name").final
    assert type(found) is kind
    with pytest.raises(kind, match=f"s3://bucket/name: found .*{says}.* while reading it"):
        raise found
    assert "hunter2" not in str(found)


def test_an_unknown_request_is_not_supported():
    assert is_unsupported(NotImplementedError())
    assert is_unsupported(answer(501))
    assert not is_unsupported(answer(500))


def test_a_web_server_without_ranges_is_named():
    error = classify(named("NotSupportedError"), "reading 80 bytes from 0", "http://host/a.mf/x").final
    assert "found a web server that ignores requests for ranges of bytes while reading 80 bytes" in str(error)
    assert "python -m http.server does not" in str(error)


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (28, SpaceError, "found no room on the disk while sending it .*free some space and run this again"),
        (122, SpaceError, "found your disk quota used up while sending it .*quota -s"),
        (30, RemoteError, "found that the disk refused while sending it .*check the disk and its permissions"),
    ],
)
def test_a_directory_that_refuses_is_an_error_at_once(number, kind, says):
    error = named("GenericError", f"Unable to rename file: Some text (os error {number})")
    found = classify(error, "sending it", "file:///data/ants.mf/x").final
    assert type(found) is kind
    with pytest.raises(kind, match=f"/data/ants.mf/x: {says}"):
        raise found
    assert "network" not in str(found)


def test_a_directory_that_may_answer_later_is_asked_again():
    found = classify(named("GenericError", "Stale file handle (os error 116)"), "reading it", "file:///data/x")
    assert found.final is None
    assert found.reason == "Stale file handle"
