"""Responses to HEAD: the responses to GET without their content, unless a route has a HEAD handler (RFC 9110, section
9.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Heads:
    """Middleware that forwards HEAD as GET and drops the content of the response.

    It must be the outermost, because all inner ones share one scope.

    Args:
        app: the wrapped application.
        routes: routes of the application.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD" or self._has_own(scope):
            await self._app(scope, receive, send)
            return

        async def without_content(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                # the response is complete: an event stream ends as if its client had disconnected
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, without_content)

    def _has_own(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is Match.FULL for route in self._routes)
