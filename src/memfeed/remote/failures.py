"""The meaning of an error of obstore: whether to try again, and the error to raise if not.

The text of such an error is never shown as it is: it has the URL of the request, and may have a login or a signature
in it. Only the status and the error code of the server are taken from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memfeed.errors import ObjectNotFoundError, ObjectReplacedError, RemoteError

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
_RENEW = "renew the credentials in the environment (AWS_SESSION_TOKEN, `aws sso login`) and run this again"


@dataclass(frozen=True)
class RequestFailure:
    """Outcome of one failed request: the reason in a few words, and the error to raise if it must not be repeated."""

    reason: str
    final: RemoteError | None = None


class WrongBytesError(Exception):
    """The bytes of an answer are not the ones that were asked for; the attempt is repeated."""


def classify(error: BaseException, action: str, where: str) -> RequestFailure:
    """Return what ``error`` of obstore means, for ``action`` ("reading bytes 0 to 9") at ``where``, which is shown."""
    text, name = str(error), type(error).__name__
    code, status = _first(_CODE, text), int(_first(_STATUS, text) or 0)
    if isinstance(error, WrongBytesError):
        return RequestFailure(text)
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


def is_unsupported(error: BaseException) -> bool:
    """Return True if a store says that it has no such request."""
    unsupported = isinstance(error, NotImplementedError) or type(error).__name__ == "NotSupportedError"
    return unsupported or _first(_STATUS, str(error)) == "501"


def _local_reason(text: str) -> str:
    found = re.search(r"([A-Z][a-z ]{3,60}) \(os error \d+\)", text)
    return found[1] if found else ""


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return found[1] if found else None
