"""Errors. Their names tell the caller what to do.

::

    WeighbridgeError
    |-- InvalidArgument         the request itself is wrong: change it
    |   `-- LayoutError         a layout contradicts the model or itself; names tensors and boxes
    |-- Unauthenticated         the caller is not identified: use a known token or certificate
    |-- PermissionDenied        the caller may not do this
    |-- NotFound                the model, version, ref, file or job does not exist
    |-- AlreadyExists           the name, rank or number is taken
    |-- FailedPrecondition      the request is valid, but not in this state (sealed, failed, not yet ready)
    |   `-- VersionFailed       the version failed; the message says why
    |-- Conflict                another writer was faster: read again and retry
    |-- ResourceExhausted       a limit is exceeded, or capacity is used up: wait, or raise the limit
    |-- DataLoss                bytes differ from those that were sent or written
    |-- DeadlineExceeded        the operation did not end in time; the message says what it waited for
    `-- Unavailable             the service cannot be reached or is shutting down: try again

Each error has a message that says what is wrong, a `fix` that says what to do, and for errors about tensors their names
and boxes in `details`. Both sides of the wire use the same tree: handlers translate it into ``google.rpc`` status
details and RFC 9457 problem documents, and the client translates it back.
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
    """Base class of all errors that Weighbridge raises deliberately.

    Attributes:
        message: what is wrong, in one sentence.
        fix: what the caller can do about it; may be empty.
        details: one line for each tensor or object concerned; if there are many, only for the first few.
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
        """Return a copy of the error for another thread to raise. The copy has no traceback, because a traceback
        references all variables that were in use.
        """
        return copy.copy(self)


class InvalidArgument(WeighbridgeError):
    """The request itself is wrong."""

    reason = "INVALID_ARGUMENT"
    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class LayoutError(InvalidArgument):
    """A layout contradicts the model or itself: it has a gap, an overlap, a wrong shape or dtype, or an unknown
    tensor.
    """

    reason = "LAYOUT_INVALID"


class Unauthenticated(WeighbridgeError):
    """The caller has not authenticated, or its token or certificate is unknown or has expired."""

    reason = "UNAUTHENTICATED"
    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(WeighbridgeError):
    """The caller may not do this. The message names the missing scope."""

    reason = "PERMISSION_DENIED"
    grpc_code = "PERMISSION_DENIED"
    http_status = 403


class NotFound(WeighbridgeError):
    """The model, version, ref, file or job does not exist."""

    reason = "NOT_FOUND"
    grpc_code = "NOT_FOUND"
    http_status = 404


class AlreadyExists(WeighbridgeError):
    """Another object or writer has this name, rank or number."""

    reason = "ALREADY_EXISTS"
    grpc_code = "ALREADY_EXISTS"
    http_status = 409


class FailedPrecondition(WeighbridgeError):
    """The request is valid, but not in the current state."""

    reason = "FAILED_PRECONDITION"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class VersionFailed(FailedPrecondition):
    """The version failed. `details` lists what was missing.

    If the version could not be completed, it was never visible. If it could not be made durable, it was visible while
    it was `live`.
    """

    reason = "VERSION_FAILED"


class Conflict(WeighbridgeError):
    """Another writer changed the same object first."""

    reason = "CONFLICT"
    grpc_code = "ABORTED"
    http_status = 409


class ResourceExhausted(WeighbridgeError):
    """A limit is exceeded, or the service has no memory or disk space left.

    Attributes:
        retry_after: seconds after which capacity may be available; None if waiting does not help. The client retries
            streams itself, but not before that time.
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
    """Bytes do not match their checksum or length.

    Attributes:
        worth_retrying: seconds for which retries may help; 0 if stored bytes are damaged.
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
    """The operation did not end in time."""

    reason = "DEADLINE_EXCEEDED"
    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class Unavailable(WeighbridgeError):
    """The service cannot be reached, or is shutting down.

    Attributes:
        worth_retrying: seconds for which retries may help; 0 if another service responds at the address.
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
