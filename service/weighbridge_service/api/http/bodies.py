"""Limits on request bodies: their size, and the time in which they must arrive."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weighbridge_service.admission.quotas import HostQuota
from weighbridge_service.api.http.problems import on_error

MAX_BODY_BYTES = 1 << 20
_PENDING_BYTES = 64 << 20
_BODY_SECONDS = 30.0


class BodyLimit:
    """Middleware that refuses requests whose bodies are too large or do not arrive in time. It checks the size in
    ``Content-Length`` and while it receives the body.

    Args:
        app: the wrapped application.
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
                raise HTTPException(408, f"the body has not arrived within {_BODY_SECONDS:g} s") from None
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
