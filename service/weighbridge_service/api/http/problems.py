"""Problem documents (RFC 9457), for errors of the service and of the framework."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match, Route

from weighbridge.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    WeighbridgeError,
)

_MOST_FIELDS = 20
_HTTP_REASONS = {
    400: (InvalidArgument.reason, ""),
    404: (NotFound.reason, "/docs lists all endpoints"),
    405: ("METHOD_NOT_ALLOWED", "/docs lists all endpoints"),
    408: (DeadlineExceeded.reason, "send the body at once"),
    413: ("BODY_TOO_LARGE", "leave out what the request does not need"),
}
"""Reason and fix for errors of the framework, by HTTP status."""


class Problem(BaseModel):
    """A problem document (RFC 9457)."""

    type: str = Field(description="The kind of problem; the same for all problems of this kind.")
    title: str = Field(description="The kind in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What is wrong, in one sentence.")
    fix: str = Field(description="What the caller can do about it; may be empty.")
    details: list[str] = Field(description="One line for each affected field, tensor or other item.")


class ProblemResponse(Response):
    """A problem document as a response."""

    media_type = "application/problem+json"

    def __init__(
        self,
        reason: str,
        status: int,
        detail: str,
        *,
        fix: str = "",
        details: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        problem = Problem(
            type=f"urn:weighbridge:error:{reason.lower()}",
            title=reason.replace("_", " ").capitalize(),
            status=status,
            detail=detail,
            fix=fix,
            details=list(details),
        )
        # ASCII only, because quotes from a request may not be valid Unicode
        super().__init__(json.dumps(problem.model_dump()), status, headers)


def _allowed(request: Request) -> str:
    """The methods of all routes of a path; Starlette itself lists only those of the first route."""
    methods: set[str] = set()
    for route in _leaves(request.app.routes):
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


def _leaves(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    for route in routes:
        included = getattr(route, "original_router", None)  # where FastAPI keeps an included router
        if included is not None:
            yield from _leaves(included.routes)
        elif isinstance(route, Route):
            yield route


async def on_error(request: Request, error: Exception) -> Response:
    """The problem document for an error.

    For an unexpected exception, the document does not reveal internals of the service.
    """
    if isinstance(error, ClientDisconnect):
        error = Unavailable("the caller has gone")
    if isinstance(error, WeighbridgeError):
        headers: Mapping[str, str] | None = None
        status = error.http_status
        if isinstance(error, Unauthenticated):
            headers = {"WWW-Authenticate": "Bearer"}
        elif isinstance(error, ResourceExhausted) and error.retry_after is not None:
            status, headers = 429, {"Retry-After": str(math.ceil(error.retry_after))}
        return ProblemResponse(
            error.reason, status, error.message, fix=error.fix, details=error.details, headers=headers
        )
    if isinstance(error, RequestValidationError):
        lines = [
            f"{'.'.join(str(part)[:80] for part in each['loc'][:8])}: {each['msg'][:200]}" for each in error.errors()
        ]
        return ProblemResponse(
            InvalidArgument.reason,
            InvalidArgument.http_status,
            "the request is not valid for this endpoint",
            fix="/docs describes all requests",
            details=lines[:_MOST_FIELDS],
        )
    if isinstance(error, HTTPException):
        reason, fix = _HTTP_REASONS.get(error.status_code, ("HTTP_ERROR", ""))
        headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
        return ProblemResponse(reason, error.status_code, error.detail, fix=fix, headers=headers)
    return ProblemResponse(
        WeighbridgeError.reason,
        WeighbridgeError.http_status,
        "the service failed",
        fix="see the log of the service",
    )
