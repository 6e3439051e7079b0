"""Routes for Hugging Face's clients, which find durable versions here if `HF_ENDPOINT` is set to the service.

Handlers parse the URL, call one function of `hub_documents` or one method of `hub_reading.Hub`, and build the response.

Clients request a file twice, for its ETag and for its content, and again to resume a download. So that all these
requests get the same version even if a ref moves, files are served by commit: any other revision is redirected to its
current commit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.responses import JSONResponse, RedirectResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from weighbridge._core.text.shortening import shown
from weighbridge.errors import InvalidArgument
from weighbridge_service.admission.identity_quotas import IdentityQuotas
from weighbridge_service.admission.piece_room import PieceReader, PieceRoom
from weighbridge_service.api.http import hub_documents as documents
from weighbridge_service.api.http.callers import CredentialsCheck, came_by_tls, peer_of
from weighbridge_service.api.http.hub_documents import (
    HubNotFound,
    HubVersion,
    RepoNotFound,
    RequestedFile,
    etag_of,
    is_commit,
)
from weighbridge_service.api.http.hub_reading import Hub
from weighbridge_service.api.http.problems import ProblemResponse
from weighbridge_service.api.http.ranges import ContentChanged, RangeNotSatisfiable, byte_range, is_unchanged
from weighbridge_service.api.http.threads import in_threads
from weighbridge_storage.threads import ThreadPool

_API = "/api/models/"
_LARGEST_PAGE = 1000
_MOST_PATHS = 10_000
_THREADS = 40
"""Maximum number of requests that may wait for the store at the same time."""


@dataclass(frozen=True, slots=True)
class HubSizes:
    """Sizes for these routes.

    Attributes:
        tree_page: number of files on a page, unless the client requests another number.
        read: maximum bytes of a piece, which is read from the store in one request. A download holds two pieces: the
            one that is being sent, and the
                next one, which is read meanwhile.
        room: maximum bytes of all pieces. With many concurrent downloads, pieces are smaller.
        send: bytes that are sent between two checks of the caller's credentials.
        redirect: minimum size, in bytes, of a file whose download is redirected to the store. The redirect costs the
            client one more request.
    """

    tree_page: int = _LARGEST_PAGE
    read: int = 4 << 20
    room: int = 256 << 20
    send: int = 1 << 20
    redirect: int = 8 << 20


DEFAULT_SIZES = HubSizes()


def hub_router(hub: Hub, quotas: IdentityQuotas, *, redirect: bool, sizes: HubSizes = DEFAULT_SIZES) -> APIRouter:
    """The routes for durable versions. They are not in the OpenAPI document, because the protocol is the Hub's.

    Args:
        hub: the versions.
        quotas: quotas of identities, in downloads and in bytes per second.
        redirect: whether downloads of large files are redirected to the store, if it can presign URLs.
        sizes: sizes for the routes.
    """
    router = APIRouter(include_in_schema=False)
    threaded = in_threads(ThreadPool("http-hub", _THREADS))
    room = PieceRoom(sizes.room, sizes.read)

    @router.get(_API + "{namespace}/{name}")
    @router.get(_API + "{namespace}/{name}/revision/{rest:path}")
    @threaded
    def model_info(asked: Annotated[RequestedFile, Depends(_asked_of_api)], blobs: bool = False) -> Response:
        """A version and the names of its files."""
        version = hub.version(asked.model, asked.revision)
        return _json(documents.model_info(version, sizes=blobs), version)

    @router.get(_API + "{namespace}/{name}/tree/{rest:path}")
    @threaded
    def tree(
        request: Request,
        asked: Annotated[RequestedFile, Depends(_asked_of_api)],
        cursor: str = "",
        expand: bool = False,
        recursive: bool = False,
        limit: Annotated[int | None, Query(ge=1, le=_LARGEST_PAGE)] = None,
    ) -> Response:
        """The files and folders of a version, page by page."""
        version = hub.version(asked.model, asked.revision)
        size = limit or sizes.tree_page
        page, behind = documents.tree_page(
            version, asked.path.strip("/"), cursor, size, expand=expand, recursive=recursive
        )
        answer = _json(page, version)
        if behind is not None:
            answer.headers["Link"] = f'<{_with_cursor(request, behind)}>; rel="next"'
        return answer

    @router.post(_API + "{namespace}/{name}/paths-info/{rest:path}")
    @threaded
    def paths_info(
        asked: Annotated[RequestedFile, Depends(_asked_of_api)], wanted: Annotated[_Paths, Depends(_paths)]
    ) -> Response:
        """The requested paths that exist in a version, as files and folders."""
        version = hub.version(asked.model, asked.revision)
        return _json(documents.paths_info(version, wanted.paths, expand=wanted.expand), version)

    @router.get(_API + "{namespace}/{name}/refs")
    @threaded
    def refs(asked: Annotated[RequestedFile, Depends(_asked_of_api)]) -> Response:
        """The refs of a model."""
        return JSONResponse(hub.refs(asked.model))

    @router.get("/api/whoami-v2")
    def whoami(request: Request) -> Response:
        """The caller's name."""
        return JSONResponse(documents.whoami(peer_of(request).identity.name))

    @router.head("/{namespace}/{name}/resolve/{rest:path}")
    @router.head("/{namespace}/{name}/raw/{rest:path}")
    @threaded
    def file_metadata(request: Request, asked: Annotated[RequestedFile, Depends(_asked_of_file)]) -> Response:
        """Size and identity of a file."""
        version = hub.version(asked.model, asked.revision)
        headers = _file_headers(version, asked.path)
        if not is_commit(asked.revision):
            return _to_commit(request, version, headers)
        return Response(headers=headers) if not _has_it(request, headers) else _not_modified(headers)

    @router.get("/{namespace}/{name}/resolve/{rest:path}")
    @router.get("/{namespace}/{name}/raw/{rest:path}")
    @threaded
    def file(request: Request, asked: Annotated[RequestedFile, Depends(_asked_of_file)]) -> Response:
        """A file, or a range of it."""
        version = hub.version(asked.model, asked.revision)
        headers = _file_headers(version, asked.path)
        if not is_commit(asked.revision):
            return _to_commit(request, version, headers)
        if _has_it(request, headers):
            return _not_modified(headers)
        size = version.file(asked.path).size
        condition = request.headers.get("if-range")
        wanted = byte_range(request.headers.get("range") if condition in (None, headers["ETag"]) else None, size)
        # the store uses other ETags, so conditional requests are not redirected
        if redirect and size >= sizes.redirect and not _CONDITIONS & set(request.headers.keys()):
            elsewhere = _elsewhere(request, hub.url(version, asked.path))
            if elsewhere is not None:
                return RedirectResponse(elsewhere, 302, _redirect_headers(headers))
        headers["Content-Length"] = str(wanted.end - wanted.start)
        if wanted.partial:
            headers["Content-Range"] = f"bytes {wanted.start}-{wanted.end - 1}/{size}"

        read = partial(hub.read, version, asked.path)
        with ExitStack() as stack:
            streaming = stack.enter_context(quotas.streaming(peer_of(request).identity))
            stack.enter_context(hub.begin(version))
            reader = stack.enter_context(room.reader())
            # read the first piece before the response starts, so that an unreadable file leads to a problem document
            # instead of a broken stream
            first = read(wanted.start, reader.take(wanted.end - wanted.start))
            pieces = _stream(
                threaded(read),
                reader,
                first,
                wanted.start,
                wanted.end,
                sizes.send,
                streaming.delay,
                CredentialsCheck(request),
            )
            return _Download(pieces, 206 if wanted.partial else 200, headers, stack.pop_all())

    # after all other routes, because a model may be named tests/resolve
    @router.get(_API + "{name}")
    @router.get(_API + "{name}/revision/{rest:path}")
    @router.get("/{name}/resolve/{rest:path}")
    @router.head("/{name}/resolve/{rest:path}")
    @router.get("/{name}/raw/{rest:path}")
    @router.head("/{name}/raw/{rest:path}")
    def no_namespace(name: str) -> Response:
        """Refuse names without a namespace, such as `gpt2`."""
        raise RepoNotFound(f"there is no model {shown(name)}", fix="model names have the form namespace/name")

    return router


async def on_hub_error(_: Request, error: Exception) -> Response:
    """A problem document, with the headers in which Hugging Face's clients look for the error."""
    if isinstance(error, RangeNotSatisfiable):
        headers = {"Content-Range": f"bytes */{error.size}"}
    elif isinstance(error, ContentChanged):
        headers = {"ETag": error.etag}
    elif isinstance(error, HubNotFound):
        said = error.message.encode("ascii", "backslashreplace").decode()
        headers = {"X-Error-Code": error.code, "X-Error-Message": said}
        if error.commit:
            headers["X-Repo-Commit"] = error.commit
    else:
        raise error
    return ProblemResponse(error.reason, error.http_status, error.message, fix=error.fix, headers=headers)


async def _asked_of_api(request: Request) -> RequestedFile:
    return _checked(request, RequestedFile.of(_raw_path(request), _API))


async def _asked_of_file(request: Request) -> RequestedFile:
    return _checked(request, RequestedFile.of(_raw_path(request)))


def _checked(request: Request, asked: RequestedFile) -> RequestedFile:
    """``asked``, if its model is the one for which the caller was authorized. Raises RepoNotFound otherwise."""
    there = request.path_params
    if asked.model != f"{there['namespace']}/{there['name']}":
        raise RepoNotFound(
            f"there is no model {shown(asked.model)}", fix="write the path without percent-encoded letters"
        )
    return asked


def _raw_path(request: Request) -> str:
    raw: bytes = request.scope["raw_path"]
    return raw.decode("latin-1")


def _with_cursor(request: Request, cursor: str) -> str:
    others = [(name, value) for name, value in request.query_params.multi_items() if name != "cursor"]
    path = quote(_raw_path(request), safe="/%")
    scheme = "https" if came_by_tls(request) else "http"  # a client sends its token there
    return f"{scheme}://{request.url.netloc}{path}?{urlencode([*others, ('cursor', cursor)])}"


@dataclass(frozen=True, slots=True)
class _Paths:
    """Body of a request for information on paths.

    Attributes:
        paths: paths of files and folders.
        expand: whether to add the last commit of each.
    """

    paths: list[str]
    expand: bool = False

    @staticmethod
    def of_form(body: bytes) -> _Paths:
        """Parse a form, which huggingface_hub sends. Raises ValueError."""
        form = parse_qs(body.decode(), max_num_fields=_MOST_PATHS)
        return _Paths(form.get("paths", []), form.get("expand", ["false"])[0].lower() in ("true", "1"))

    @staticmethod
    def of_json(body: bytes) -> _Paths:
        """Parse JSON, which the Hub's JavaScript client sends. Raises ValueError."""
        said = json.loads(body)
        paths = said.get("paths") if isinstance(said, dict) else None
        if not isinstance(paths, list) or len(paths) > _MOST_PATHS:
            raise ValueError("paths is not a list, or is too long")
        if not all(isinstance(path, str) for path in paths):
            raise ValueError("a path is not a string")
        return _Paths(paths, said.get("expand") is True)


async def _paths(request: Request) -> _Paths:
    body = await request.body()
    is_json = "json" in request.headers.get("content-type", "") or body.lstrip()[:1] in (b"{", b"[")
    try:
        return _Paths.of_json(body) if is_json else _Paths.of_form(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            "the body is neither a form nor JSON with the member `paths`, or has too many fields",
            fix=f"ask for at most {_MOST_PATHS} paths",
        ) from error


def _json(document: Any, version: HubVersion) -> Response:
    return JSONResponse(document, headers={"X-Repo-Commit": version.commit})


def _file_headers(version: HubVersion, path: str) -> dict[str, str]:
    file = version.file(path)
    return {
        "X-Repo-Commit": version.commit,
        "ETag": f'"{etag_of(file)}"',
        "Content-Length": str(file.size),
        "Accept-Ranges": "bytes",
    }


def _to_commit(request: Request, version: HubVersion, headers: dict[str, str]) -> Response:
    """Redirect to the same file by the version's commit. ``Location`` contains neither scheme nor host, because older
    clients follow only such redirects of a HEAD."""
    parts = _raw_path(request).split("/")
    parts[4] = version.commit
    query = request.scope["query_string"].decode("latin-1")
    location = quote("/".join(parts), safe="/%") + (f"?{query}" if query else "")
    return RedirectResponse(location, 307, _redirect_headers(headers))


_CONDITIONS = frozenset({"if-range", "if-match", "if-none-match"})


def _has_it(request: Request, headers: dict[str, str]) -> bool:
    match, none_match = (
        ", ".join(lines) if (lines := request.headers.getlist(name)) else None for name in ("if-match", "if-none-match")
    )
    return is_unchanged(headers["ETag"], match, none_match)


def _not_modified(headers: dict[str, str]) -> Response:
    return Response(status_code=304, headers={name: headers[name] for name in ("ETag", "X-Repo-Commit")})


def _elsewhere(request: Request, url: str | None) -> str | None:
    """``url`` if its host is not the service's, else None: clients do not follow a redirect to the same host."""
    return url if url is not None and urlsplit(url).netloc != request.url.netloc else None


def _redirect_headers(headers: dict[str, str]) -> dict[str, str]:
    """Headers of a redirect, with the size and ETag of the target file."""
    return {
        "X-Repo-Commit": headers["X-Repo-Commit"],
        "X-Linked-ETag": headers["ETag"],
        "X-Linked-Size": headers["Content-Length"],
        "Cache-Control": "no-store",  # a signed URL is valid for a while, and a ref moves
    }


class _Download(StreamingResponse):
    """Response with bytes of a file; releases ``held`` when the response ends for any reason."""

    def __init__(self, pieces: AsyncIterator[memoryview], status: int, headers: dict[str, str], held: ExitStack):
        super().__init__(pieces, status, headers, media_type="application/octet-stream")
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


async def _stream(
    read: Callable[[int, int], Awaitable[bytes]],
    reader: PieceReader,
    piece: bytes,
    start: int,
    end: int,
    part_bytes: int,
    delay: Callable[[int], float],
    standing: CredentialsCheck,
) -> AsyncIterator[memoryview]:
    """Yield the bytes from ``start`` up to ``end``.

    ``piece`` contains the first bytes; each further piece is read while the previous one is sent.

    ``delay`` counts the bytes of each part and returns how many seconds to wait before it is sent. If the caller's
    credentials become invalid, the stream ends before ``end``, which closes the connection.
    """
    while piece:
        start += len(piece)
        ahead = asyncio.ensure_future(read(start, reader.take(end - start))) if start < end else None
        try:
            view = memoryview(piece)
            for offset in range(0, len(view), part_bytes):
                if standing.ended:  # before each part: a rate limit may delay it for seconds
                    return
                part = view[offset : offset + part_bytes]
                for seconds in iter(partial(delay, len(part)), 0.0):
                    await asyncio.sleep(seconds)
                yield part
            reader.give_back(len(piece))
            piece = await ahead if ahead is not None else b""
        finally:
            if ahead is not None:
                ahead.cancel()
