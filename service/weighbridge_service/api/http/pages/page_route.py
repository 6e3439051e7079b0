"""Route class of pages.

It identifies the sender by header or session, sets the content security policy, and renders errors as pages.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from weighbridge.errors import InvalidArgument, PermissionDenied, Unauthenticated, WeighbridgeError
from weighbridge_service.api.http.callers import SHOWN, peer_of
from weighbridge_service.api.http.guard import PAGE
from weighbridge_service.api.http.pages.login import Sessions, session_in
from weighbridge_service.api.http.pages.rendering import Renderer
from weighbridge_service.api.http.pages.viewer import Viewer
from weighbridge_service.api.http.parameters import Name, Namespace

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


async def _model(namespace: Namespace, name: Name) -> str:
    return f"{namespace}/{name}"


ModelInPath = Annotated[str, Depends(_model)]


def viewer_of(request: Request) -> Viewer:
    """The viewer who sent a request for a page."""
    return Viewer.of(
        peer_of(request),
        signed_in=bool(request.scope.get(SHOWN)),
        can_sign_in=request.app.state.access.knows_tokens,
    )


def page_route(sessions: Sessions, renderer: Renderer) -> type[APIRoute]:
    """The class of the pages' routes.

    Args:
        sessions: the browser sessions.
        renderer: renders the pages of errors.
    """

    class PageRoute(APIRoute):
        """A route of a page."""

        def get_route_handler(self) -> _Handler:
            """The handler of requests, which adds the session, the check of forms, and pages of errors."""
            answer = super().get_route_handler()

            async def handle(request: Request) -> Response:
                request.scope[PAGE] = True
                request.scope[SHOWN] = sessions.authorization(session_in(request))
                try:
                    if request.method == "POST":
                        _check_own(request)
                    response = await answer(request)
                except (WeighbridgeError, RequestValidationError, HTTPException) as error:
                    response = _page_of(request, error, renderer)
                response.headers.setdefault("Cache-Control", "no-store")
                return response

            return handle

    return PageRoute


def _check_own(request: Request) -> None:
    """Refuse forms without ``Origin``; the guard has already compared the origin with the service's name.

    Raises:
        PermissionDenied: the request has no ``Origin``.
    """
    if "origin" not in request.headers:
        raise PermissionDenied(
            "the form does not name the page that sent it",
            fix="use the service's own pages, or its API: /docs",
        )


def _page_of(request: Request, error: Exception, renderer: Renderer) -> Response:
    viewer = viewer_of(request)
    if isinstance(error, Unauthenticated):
        page = renderer.page("login", viewer, problem=error.message if _has_shown(request) else "", next=_path(request))
        return HTMLResponse(page, 401, {"WWW-Authenticate": "Bearer"})
    if isinstance(error, WeighbridgeError):
        status, message, fix, details = error.http_status, error.message, error.fix, tuple(error.details)
    elif isinstance(error, HTTPException):
        status, message, fix, details = error.status_code, str(error.detail), "", ()
    else:
        status, message, fix, details = (
            InvalidArgument.http_status,
            "the address is not that of a page",
            "",
            (),
        )
    page = renderer.page("error", viewer, status=status, message=message, fix=fix, details=details)
    return HTMLResponse(page, status)


def _has_shown(request: Request) -> bool:
    return bool(request.scope.get(SHOWN)) or "authorization" in request.headers


def _path(request: Request) -> str:
    """The path to open after signing in: that of the request, or ``/`` after a form."""
    query = request.url.query
    return request.url.path + (f"?{query}" if query else "") if request.method == "GET" else "/"
