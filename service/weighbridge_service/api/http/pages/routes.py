"""Routes of pages.

A route reads facts, builds a view and renders it; an open page then receives changes as server-sent events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse

from weighbridge.errors import NotFound
from weighbridge_service.api.http.callers import CredentialsCheck, peer_of
from weighbridge_service.api.http.pages import index_view, model_view, version_view
from weighbridge_service.api.http.pages.actions import add_actions
from weighbridge_service.api.http.pages.distributions import Distributions
from weighbridge_service.api.http.pages.live import TROUBLE, Fragments, LiveViews, digest
from weighbridge_service.api.http.pages.login import Sessions
from weighbridge_service.api.http.pages.page_route import ModelInPath, page_route, viewer_of
from weighbridge_service.api.http.pages.reading import Reader
from weighbridge_service.api.http.pages.rendering import Renderer, assets
from weighbridge_service.api.http.pages.side_by_side.compare_view import compare_view
from weighbridge_service.api.http.pages.viewer import Viewer
from weighbridge_service.api.http.parameters import VersionOrRef
from weighbridge_service.api.http.threads import in_threads
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_service.service import Weighbridge
from weighbridge_storage.documents.names import MAX_VERSION, ModelName
from weighbridge_storage.threads import ThreadPool

_SEND_SECONDS = 30.0
"""Timeout for sending an event to a browser that does not read it."""
_LONGEST_QUERY = 300
_AT_ONCE = 8
"""Maximum number of pages that are built at the same time."""
_SAMPLED = 2
"""Maximum number of tensors that are sampled at the same time."""
_ANSWER_SECONDS = 10.0
"""Timeout for building a page, after which the response is an error."""
_PICTURE_SECONDS = 600
"""A browser caches a picture for this many seconds.

The time is limited because a new model of the same name may reuse the version's number.
"""

Before = Annotated[int, Query(ge=0, le=MAX_VERSION)]
Search = Annotated[str, Query(max_length=_LONGEST_QUERY)]
Seen = Annotated[str, Query(max_length=32)]
Compared = Annotated[str, Query(min_length=1, max_length=_LONGEST_QUERY)]
First = Annotated[int, Query(ge=0, le=10**9)]


def pages_router(service: Weighbridge, exports: Exports) -> APIRouter:
    """The pages of a service, with their forms, streams and files.

    Args:
        service: the service.
        exports: its export jobs.
    """
    sessions, renderer = Sessions(), Renderer()
    pages = _Pages(service, Reader(service, exports), renderer)
    router = APIRouter(route_class=page_route(sessions, renderer), include_in_schema=False)
    making = in_threads(ThreadPool("http-pages", _AT_ONCE), _ANSWER_SECONDS)
    distributions = Distributions(service)

    @router.get("/")
    @making
    def index_page(request: Request, q: Search = "", after: Search = "") -> Response:
        """All models."""
        viewer = viewer_of(request)
        return pages.answer("index", pages.index(viewer, q, after), viewer, "/events", q=q, after=after)

    @router.get("/events")
    async def index_events(
        request: Request, q: Search = "", after: Search = "", seen: Seen = ""
    ) -> EventSourceResponse:
        """Event stream of the page of all models."""
        viewer = viewer_of(request)
        key = ("index", viewer, q, after)
        return pages.follow(request, key, None, lambda: pages.index(viewer, q, after)[1], seen)

    @router.get("/models/{namespace}/{name}")
    @making
    def model_page(model: ModelInPath, request: Request, before: Before = 0) -> Response:
        """One model."""
        viewer = viewer_of(request)
        made = pages.model(viewer, model, before)
        return pages.answer("model", made, viewer, f"/models/{model}/events", model=model, before=before)

    @router.get("/models/{namespace}/{name}/events")
    async def model_events(
        model: ModelInPath, request: Request, before: Before = 0, seen: Seen = ""
    ) -> EventSourceResponse:
        """Event stream of a model's page."""
        viewer, named = viewer_of(request), ModelName.parse(model)
        key = ("model", viewer, named, before)
        return pages.follow(request, key, named, lambda: pages.model(viewer, model, before)[1], seen)

    @router.get("/models/{namespace}/{name}/retention")
    @making
    def retention_page(model: ModelInPath, request: Request) -> Response:
        """Preview of a collection of a model's versions."""
        found = service.collecting.collect(model, dry_run=True)
        return HTMLResponse(renderer.page("retention", viewer_of(request), model=model, found=found))

    @router.get("/models/{namespace}/{name}/compare")
    @making
    def compare_page(model: ModelInPath, request: Request, before: Compared, after: Compared) -> Response:
        """Two versions of a model side by side."""
        view = compare_view(pages.reader.side(model, before.strip()), pages.reader.side(model, after.strip()))
        return HTMLResponse(renderer.page("compare", viewer_of(request), model=model, view=view))

    @router.get("/models/{namespace}/{name}/versions/{version}")
    @making
    def version_page(
        model: ModelInPath,
        version: VersionOrRef,
        request: Request,
        q: Search = "",
        first: First = 0,
    ) -> Response:
        """One version."""
        viewer = viewer_of(request)
        made = pages.version(viewer, model, version, q, first)
        number = made[0].head.said.version.number
        events = f"/models/{model}/versions/{number}/events"
        return pages.answer("version", made, viewer, events, model=model, number=number, q=q, first=first)

    @router.get("/models/{namespace}/{name}/versions/{version}/events")
    async def version_events(
        model: ModelInPath,
        version: VersionOrRef,
        request: Request,
        q: Search = "",
        first: First = 0,
        seen: Seen = "",
    ) -> EventSourceResponse:
        """Event stream of a version's page."""
        viewer, named = viewer_of(request), ModelName.parse(model)
        key = ("version", viewer, named, version, q, first)
        return pages.follow(request, key, named, lambda: pages.version(viewer, model, version, q, first)[1], seen)

    @router.get("/models/{namespace}/{name}/versions/{version}/distribution.svg")
    @in_threads(ThreadPool("http-samples", _SAMPLED), _ANSWER_SECONDS)
    def distribution(
        model: ModelInPath,
        version: VersionOrRef,
        tensor: Annotated[str, Query(max_length=4096)],
    ) -> Response:
        """Histogram of a sample of a tensor's values, as SVG."""
        picture = distributions.picture(model, version, tensor)
        return Response(
            picture,
            media_type="image/svg+xml",
            headers={
                "Cache-Control": f"private, max-age={_PICTURE_SECONDS}",
                "Vary": "Authorization, Cookie",
            },
        )

    @router.get("/assets/{digest}/{file}")
    async def asset(digest: str, file: str) -> Response:
        """A file that pages link to. A URL from an older release returns this release's file."""
        found = assets().get(file)
        if found is None:
            raise NotFound("there is no such file")
        cached = "public, max-age=31536000, immutable" if f"/{digest}/" in found.url else "no-store"
        return Response(found.content, media_type=found.media_type, headers={"Cache-Control": cached})

    add_actions(router, service, exports, sessions, renderer)
    return router


class _Pages:
    """Builder of pages: as views, as fragments and as responses."""

    def __init__(self, service: Weighbridge, reader: Reader, renderer: Renderer) -> None:
        self.reader = reader
        self._renderer = renderer
        self._live = LiveViews((service.catalog.changes, service.engines.changes), service.catalog.stopping.is_set)

    def index(self, viewer: Viewer, query: str, after: str) -> tuple[index_view.IndexView, Fragments]:
        """The page of all models."""
        found = self.reader.models(viewer.sees, query, after)
        view = index_view.index_view(found.models, query=query, after=after, more=found.more)
        return view, self._fragments("index", view, busy=index_view.is_busy(view))

    def model(self, viewer: Viewer, model: str, before: int) -> tuple[model_view.ModelView, Fragments]:
        """The page of a model."""
        view = model_view.model_view(self.reader.model(model, before, viewer.sees), viewer, unix_ms())
        return view, self._fragments("model", view, busy=model_view.is_busy(view))

    def version(
        self, viewer: Viewer, model: str, version: str, query: str, first: int
    ) -> tuple[version_view.VersionView, Fragments]:
        """The page of a version."""
        facts = self.reader.version(model, version)
        view = version_view.version_view(facts, viewer, unix_ms(), query=query, first=first)
        return view, self._fragments("version", view, busy=version_view.is_busy(view))

    def _fragments(self, kind: str, view: Any, *, busy: bool) -> Fragments:
        return Fragments(self._renderer.fragments(kind, view), busy)

    def answer(
        self, kind: str, made: tuple[Any, Fragments], viewer: Viewer, events: str, **values: Any
    ) -> HTMLResponse:
        """The response with a page.

        The page follows its view at the path ``events``, whose query contains the `_FOLLOWED` values that are not
        empty.
        """
        view, fragments = made
        page = self._renderer.page(
            kind,
            viewer,
            view=view,
            f=fragments.html,
            events=events,
            asked={name: value for name, value in values.items() if name in _FOLLOWED and value},
            seen=digest(fragments.html),
            trouble=TROUBLE,
            **values,
        )
        return HTMLResponse(page)

    def follow(
        self,
        request: Request,
        key: Hashable,
        model: ModelName | None,
        make: Callable[[], Fragments],
        seen: str,
    ) -> EventSourceResponse:
        """The event stream of a view."""
        standing, peer = CredentialsCheck(request), peer_of(request)
        quota = peer.identity.name if peer.identity.proven else peer.host

        async def events() -> AsyncIterator[ServerSentEvent]:
            async for data in self._live.follow(key, model, make, seen, lambda: standing.ended, quota):
                yield ServerSentEvent(data, event="fragments")

        return EventSourceResponse(events(), send_timeout=_SEND_SECONDS)


_FOLLOWED = ("q", "after", "before", "first")
"""Query parameters of a page that its event stream accepts as well."""
