"""Problem documents (RFC 9457), for our own errors and for what the framework refuses."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weighbridge.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    WeighbridgeError,
)
from weighbridge_service.admission.quotas import HostQuota

MAX_BODY_BYTES = 1 << 20
_PENDING_BYTES = 64 << 20
_BODY_SECONDS = 30.0
_MOST_FIELDS = 20
_HTTP_REASONS = {
    400: (InvalidArgument.reason, ""),
    404: (NotFound.reason, "/docs lists all endpoints"),
    405: ("METHOD_NOT_ALLOWED", "/docs lists all endpoints"),
    408: (DeadlineExceeded.reason, "send the body at once"),
    413: ("BODY_TOO_LARGE", "leave out what the request does not need"),
}
"""Reason and fix for what the framework itself refuses."""


class Problem(BaseModel):
    """A problem document (RFC 9457)."""

    type: str = Field(description="What kind of problem; the same for all of its kind.")
    title: str = Field(description="The kind in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What is wrong, in one sentence.")
    fix: str = Field(description="What the caller can do about it; may be empty.")
    details: list[str] = Field(description="One line for each field, tensor or other thing concerned.")


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
        # ASCII only: what is quoted from a request need not be valid Unicode
        super().__init__(json.dumps(problem.model_dump()), status, headers)


def _allowed(request: Request) -> str:
    """The methods that a path has, over all of its routes: Starlette names those of the first one."""
    methods: set[str] = set()
    for route in _leaves(request.app.routes):
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


def _leaves(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    for route in routes:
        included = getattr(route, "original_router", None)  # as FastAPI keeps routers that were included
        if included is not None:
            yield from _leaves(included.routes)
        elif isinstance(route, Route):
            yield route


async def on_error(request: Request, error: Exception) -> Response:
    """What is raised on purpose says what is wrong; anything else says nothing of the service's inside."""
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
            f"{'.'.join(str(part)[:80] for part in each['loc'][:8])}: {each['msg'][:200]}"
            for each in error.errors()
        ]
        return ProblemResponse(
            InvalidArgument.reason,
            InvalidArgument.http_status,
            "the request is not what this endpoint takes",
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
        fix="its log says more",
    )


class BodyLimit:
    """Refuses requests whose bodies are too large, by what they announce or when they turn out to be, or that do not come.

    Args:
        app: what requests are passed on to.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._pending = HostQuota("bytes of incomplete HTTP requests", _PENDING_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        announced = Headers(scope=scope).get("content-length", "0") if scope["type"] == "http" else "0"
        if len(announced) > len(str(MAX_BODY_BYTES)) or int(announced) > MAX_BODY_BYTES:
            refusal = await on_error(Request(scope), _too_large())
            await refusal(scope, receive, send)
            return
        host = (scope.get("client") or ("",))[0]
        deadline = asyncio.get_running_loop().time() + _BODY_SECONDS
        count = 0
        complete = False

        async def limited() -> Message:
            nonlocal count, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body has not come within {_BODY_SECONDS:g} s") from None
            size = len(message.get("body", b""))
            if count + size > MAX_BODY_BYTES:
                raise _too_large()
            self._pending.take(host, size)
            count += size
            complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            if count:
                self._pending.give(host, count)


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
