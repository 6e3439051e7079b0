"""Translation of errors of an S3 server and of the connection to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError

from weighbridge.errors import (
    Conflict,
    DataLoss,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    WeighbridgeError,
)

S3_ERRORS = (BotoCoreError, ClientError, ResponseParserError)
"""All errors that boto3 raises for a request."""

# Expired credentials are fetched again before each attempt, so a failure to fetch them may follow an earlier attempt.
_NO_ANSWER = (
    HTTPClientError,
    NoConnection,
    IncompleteReadError,
    ResponseParserError,
    CredentialRetrievalError,
)
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
_DAMAGED = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
_NO_ROOM = {
    "InsufficientCapacity", "InsufficientStorage", "NotEnoughStorage", "QuotaExceeded", "StorageFull",
    "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded",
}  # fmt: skip
_CREDENTIALS = {
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_WRONG_PLACE = {
    "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect", "TemporaryRedirect",
}  # fmt: skip
_GRANT = (
    "let these credentials do s3:GetObject, s3:PutObject, s3:DeleteObject, "
    "s3:AbortMultipartUpload and s3:ListMultipartUploadParts on the "
    "store's objects, and s3:ListBucket and s3:ListBucketMultipartUploads on its bucket"
)
_LATER = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
_LONGEST_REASON = 200


def status_of(error: Exception) -> int:
    """HTTP status of the server's response; 0 without a response."""
    if not isinstance(error, ClientError):
        return 0
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status if isinstance(status, int) else 0


def code_of(error: Exception) -> str:
    """S3's name for an error, e.g. ``NoSuchKey``. For a HEAD, whose response has no body, the status. May be empty."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def was_retried(error: Exception) -> bool:
    """Whether the response belongs to a retry: an earlier attempt may have been carried out although its response was
    lost.
    """
    if not isinstance(error, ClientError):
        return False
    return bool(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


def is_missing(error: Exception) -> bool:
    """Whether the error means that the object does not exist, as opposed to its bucket or an upload."""
    return status_of(error) == 404 and code_of(error) not in ("NoSuchBucket", "NoSuchUpload")


def is_unanswered(error: Exception) -> bool:
    """Whether the server may still carry out the request: it did not respond, its response was unreadable, or it
    reported a server error.
    """
    status = status_of(error)
    return isinstance(error, _NO_ANSWER) or status >= 500 or status in (408, 429) or code_of(error) in _LATER


def s3_error(error: Exception, what: str) -> WeighbridgeError:
    """The error to raise to a caller for an error of boto3.

    Args:
        error: one of `S3_ERRORS`.
        what: the operation, e.g. ``writing models/acme/smol/head.json``.

    Returns:
        One of Weighbridge's errors, without credentials, to be raised from ``error``.
    """
    status, code, reason = status_of(error), code_of(error), _reason(error)
    failed = f"{what} failed: {reason}"
    if is_missing(error):
        return NotFound(f"{what} failed: there is no such object")
    if code == "NoSuchBucket":
        return Unavailable(
            f"{what} failed: the bucket does not exist", fix="create the bucket, or name a different one"
        )
    if code == "NoSuchUpload":
        return Unavailable(f"{what} failed: its upload was aborted in the meantime", fix="try again")
    if status in (409, 412):
        return Conflict(f"{what} failed: another writer changed it first", fix="read it again, then decide")
    if code in _DAMAGED or isinstance(error, FlexibleChecksumError):
        return DataLoss(f"{what} failed: the bytes were corrupted in transit", fix="try again; check the network")
    if status == 507 or code in _NO_ROOM:
        return ResourceExhausted(failed, fix="make room in the store, or raise its quota, then try again")
    if isinstance(error, _NO_CREDENTIALS):
        return Unavailable(failed, fix="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile")
    if code == "AccessDenied" or (status == 403 and not code.isalpha()):
        return Unavailable(failed, fix=_GRANT)
    if status in (401, 403) or code in _CREDENTIALS:
        return Unavailable(failed, fix="check the credentials, their permissions, and this machine's clock")
    if 300 <= status < 400 or code in _WRONG_PLACE:
        return Unavailable(failed, fix="name the bucket's own region and endpoint")
    if is_unanswered(error):
        return Unavailable(failed, fix="check the endpoint and the network, then try again")
    if isinstance(error, ParamValidationError) or 400 <= status < 500:
        return InvalidArgument(failed, fix="check the key and the store's settings")
    return Unavailable(failed, fix="check the store's settings")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Translate errors of boto3. Errors of the caller's stream pass through unchanged."""
    try:
        yield
    except S3_ERRORS as error:
        raise s3_error(error, what) from error


def _reason(error: Exception) -> str:
    """Cause of an error in a few words. It cannot contain a secret."""
    if isinstance(error, ClientError):
        text = f"{code_of(error)} ({status_of(error)}): {error.response.get('Error', {}).get('Message', '')}"
    elif isinstance(error, HTTPClientError | NoConnection | NoCredentialsError | PartialCredentialsError):
        text = str(error)
    else:
        text = type(error).__name__
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "..."
