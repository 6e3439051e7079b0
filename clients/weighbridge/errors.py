"""Errors, named by what the caller can do about them.

::

    WeighbridgeError
    |-- InvalidArgument         the request itself is wrong: change it
    |   `-- LayoutError         a layout contradicts the model or itself; names tensors and boxes
    |-- Unauthenticated         nobody knows who asks: show a token or a certificate that is known
    |-- PermissionDenied        whoever asks may not do this
    |-- NotFound                no such model, version, ref, file or job
    |-- AlreadyExists           someone else has that name, rank or number
    |-- FailedPrecondition      right request, wrong state (sealed, failed, not yet ready)
    |   `-- VersionFailed       the version failed; says why
    |-- Conflict                another writer was faster: read again and retry
    |-- ResourceExhausted       over a limit, or no room left: wait, or raise the limit
    |-- DataLoss                bytes arrived or lie other than they were sent or written
    |-- DeadlineExceeded        not in time; says what was being waited for
    `-- Unavailable             the service cannot be reached or is going down: try again

Each error has a sentence that says what is wrong, a `fix` that says what to do, and where tensors are concerned their
names and boxes in `details`. The same tree is used on both sides of the wire: handlers translate it into
``google.rpc`` status details and RFC 9457 problem documents, and the client translates it back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import ClassVar, Self

__all__ = [
    "AlreadyExists",
    "Conflict",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InvalidArgument",
    "LayoutError",
    "NotFound",
    "PermissionDenied",
    "ResourceExhausted",
    "Unauthenticated",
    "Unavailable",
    "VersionFailed",
    "WeighbridgeError",
]


class WeighbridgeError(Exception):
    """Base of all errors that Weighbridge raises on purpose.

    Attributes:
        message: what is wrong, in one sentence.
        fix: what the caller can do about it; may be empty.
        details: one line for each tensor or thing concerned, the first few of possibly many.
    """

    reason: ClassVar[str] = "INTERNAL"
    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, fix: str = "", details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.details = tuple(details)

    def __str__(self) -> str:
        text = self.message
        if self.details:
            text += "".join(f"\n  - {line}" for line in self.details)
        if self.fix:
            text += f"\n  What to do: {self.fix}"
        return text

    def anew(self) -> Self:
        """The same error without its traceback, which leads to all that was in use when it was raised, for another thread to raise."""
        return copy.copy(self)


class InvalidArgument(WeighbridgeError):
    """The request itself is wrong."""

    reason = "INVALID_ARGUMENT"
    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class LayoutError(InvalidArgument):
    """A layout contradicts the model or itself: a gap, an overlap, a wrong shape or dtype, an unknown tensor."""

    reason = "LAYOUT_INVALID"


class Unauthenticated(WeighbridgeError):
    """Who asks has shown nothing that says who it is, or something that is not known or has expired."""

    reason = "UNAUTHENTICATED"
    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(WeighbridgeError):
    """Who asks may not do this. The message names the scope that is missing."""

    reason = "PERMISSION_DENIED"
    grpc_code = "PERMISSION_DENIED"
    http_status = 403


class NotFound(WeighbridgeError):
    """No such model, version, ref, file or job."""

    reason = "NOT_FOUND"
    grpc_code = "NOT_FOUND"
    http_status = 404


class AlreadyExists(WeighbridgeError):
    """Someone else holds that name, rank or number."""

    reason = "ALREADY_EXISTS"
    grpc_code = "ALREADY_EXISTS"
    http_status = 409


class FailedPrecondition(WeighbridgeError):
    """The request is right, the state is not."""

    reason = "FAILED_PRECONDITION"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class VersionFailed(FailedPrecondition):
    """The version failed. `details` lists what was missing.

    One that could not be completed was never visible; one that could not be made durable was, while it was `live`.
    """

    reason = "VERSION_FAILED"


class Conflict(WeighbridgeError):
    """Another writer changed the same thing first."""

    reason = "CONFLICT"
    grpc_code = "ABORTED"
    http_status = 409


class ResourceExhausted(WeighbridgeError):
    """Over a limit, or no memory or disk left for it.

    Attributes:
        retry_after: seconds after which there may be room, if that is a matter of time; None if it is not. The client tries
            streams again by itself, not before that.
    """

    reason = "RESOURCE_EXHAUSTED"
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 507

    def __init__(
        self, message: str, *, fix: str = "", details: Sequence[str] = (), retry_after: float | None = None
    ) -> None:
        super().__init__(message, fix=fix, details=details)
        self.retry_after = retry_after


class DataLoss(WeighbridgeError):
    """A checksum or a length does not agree with the bytes.

    Attributes:
        worth_retrying: for how many seconds it may help to try again: not at all where what is stored is damaged.
    """

    reason = "DATA_LOSS"
    grpc_code = "DATA_LOSS"
    http_status = 500

    def __init__(
        self, message: str, *, fix: str = "", details: Sequence[str] = (), worth_retrying: float = math.inf
    ) -> None:
        super().__init__(message, fix=fix, details=details)
        self.worth_retrying = worth_retrying


class DeadlineExceeded(WeighbridgeError):
    """It did not happen in time."""

    reason = "DEADLINE_EXCEEDED"
    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class Unavailable(WeighbridgeError):
    """The service cannot be reached, or is going down.

    Attributes:
        worth_retrying: for how many seconds it may help to try again: not at all where what answers is another service.
    """

    reason = "UNAVAILABLE"
    grpc_code = "UNAVAILABLE"
    http_status = 503

    def __init__(
        self, message: str, *, fix: str = "", details: Sequence[str] = (), worth_retrying: float = math.inf
    ) -> None:
        super().__init__(message, fix=fix, details=details)
        self.worth_retrying = worth_retrying


BY_REASON: dict[str, type[WeighbridgeError]] = {
    cls.reason: cls
    for cls in (
        WeighbridgeError,
        InvalidArgument,
        LayoutError,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        AlreadyExists,
        FailedPrecondition,
        VersionFailed,
        Conflict,
        ResourceExhausted,
        DataLoss,
        DeadlineExceeded,
        Unavailable,
    )
}
