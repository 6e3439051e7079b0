"""Routes of Hugging Face's clients: with `HF_ENDPOINT` set to the service, they find durable versions here.

Handlers say what the URL names, call one function of `hub_documents` or one method of `hub_reading.Hub`, and put the answer into HTTP.

Clients ask for a file twice, for its ETag and for its content, and again where a download broke. So that all of these are about one version
though a ref moves, files are served by commit: any other revision is answered by a redirect to the commit that it names now.
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
from weighbridge_service.api.http.callers import Standing, came_by_tls, peer_of
from weighbridge_service.api.http.hub_documents import (
    Asked,
    HubNotFound,
    HubVersion,
    RepoNotFound,
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
"""Requests that may wait for the store at one time."""


@dataclass(frozen=True, slots=True)
class HubSizes:
    """How much of something these routes handle at a time.

    Attributes:
        tree_page: files of a page, unless its client names a number.
        read: bytes that are read from the store at a time, at most. A file on its way holds two such pieces: one being sent, and the next one
            being read.
        room: bytes of all such pieces. Where many files are on their way, pieces are smaller.
        send: bytes that are sent between two questions whether the caller may go on.
        redirect: bytes of a file from which on a way round the service is worth one more request.
    """

    tree_page: int = _LARGEST_PAGE
    read: int = 4 << 20
    room: int = 256 << 20
    send: int = 1 << 20
    redirect: int = 8 << 20


DEFAULT_SIZES = HubSizes()


def hub_router(
    hub: Hub, quotas: IdentityQuotas, *, redirect: bool, sizes: HubSizes = DEFAULT_SIZES
) -> APIRouter:
    """The routes over durable versions. They are not in the OpenAPI document: the protocol is not ours.

    Args:
        hub: the versions.
        quotas: of identities, in downloads and in bytes a second.
        redirect: whether large files are fetched from the store itself, where it can sign URLs.
        sizes: how much is handled at a time.
    """
    router = APIRouter(include_in_schema=False)
    threaded = in_threads(ThreadPool("http-hub", _THREADS))
    room = PieceRoom(sizes.room, sizes.read)

    @router.get(_API + "{namespace}/{name}")
    @router.get(_API + "{namespace}/{name}/revision/{rest:path}")
    @threaded
    def model_info(asked: Annotated[Asked, Depends(_asked_of_api)], blobs: bool = False) -> Response:
        """A version and the names of its files."""
        version = hub.version(asked.model, asked.revision)
        return _json(documents.model_info(version, sizes=blobs), version)

    @router.get(_API + "{namespace}/{name}/tree/{rest:path}")
    @threaded
    def tree(
        request: Request,
        asked: Annotated[Asked, Depends(_asked_of_api)],
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
        asked: Annotated[Asked, Depends(_asked_of_api)], wanted: Annotated[_Paths, Depends(_paths)]
    ) -> Response:
        """Those of some files that a version has."""
        version = hub.version(asked.model, asked.revision)
        return _json(documents.paths_info(version, wanted.paths, expand=wanted.expand), version)

    @router.get(_API + "{namespace}/{name}/refs")
    @threaded
    def refs(asked: Annotated[Asked, Depends(_asked_of_api)]) -> Response:
        """The refs of a model."""
        return JSONResponse(hub.refs(asked.model))

    @router.get("/api/whoami-v2")
    def whoami(request: Request) -> Response:
        """Who asks."""
        return JSONResponse(documents.whoami(peer_of(request).identity.name))

    @router.head("/{namespace}/{name}/resolve/{rest:path}")
    @router.head("/{namespace}/{name}/raw/{rest:path}")
    @threaded
    def file_metadata(request: Request, asked: Annotated[Asked, Depends(_asked_of_file)]) -> Response:
        """Size and identity of a file."""
        version = hub.version(asked.model, asked.revision)
        headers = _file_headers(version, asked.path)
        if not is_commit(asked.revision):
            return _to_commit(request, version, headers)
        return Response(headers=headers) if not _has_it(request, headers) else _not_modified(headers)

    @router.get("/{namespace}/{name}/resolve/{rest:path}")
    @router.get("/{namespace}/{name}/raw/{rest:path}")
    @threaded
    def file(request: Request, asked: Annotated[Asked, Depends(_asked_of_file)]) -> Response:
        """A file, or a range of it."""
        version = hub.version(asked.model, asked.revision)
        headers = _file_headers(version, asked.path)
        if not is_commit(asked.revision):
            return _to_commit(request, version, headers)
        if _has_it(request, headers):
            return _not_modified(headers)
        size = version.file(asked.path).size
        condition = request.headers.get("if-range")
        wanted = byte_range(
            request.headers.get("range") if condition in (None, headers["ETag"]) else None, size
        )
        # a store does not know our ETags
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
            # a file that cannot be read is a problem document, not a stream that breaks
            first = read(wanted.start, reader.take(wanted.end - wanted.start))
            pieces = _stream(
                threaded(read),
                reader,
                first,
                wanted.start,
                wanted.end,
                sizes.send,
                streaming.delay,
                Standing(request),
            )
            return _Download(pieces, 206 if wanted.partial else 200, headers, stack.pop_all())

    # behind all others: a model may be called tests/resolve
    @router.get(_API + "{name}")
    @router.get(_API + "{name}/revision/{rest:path}")
    @router.get("/{name}/resolve/{rest:path}")
    @router.head("/{name}/resolve/{rest:path}")
    @router.get("/{name}/raw/{rest:path}")
    @router.head("/{name}/raw/{rest:path}")
    def no_namespace(name: str) -> Response:
        """Names of one part, such as `gpt2`, are no models here."""
        raise RepoNotFound(f"there is no model {shown(name)}", fix="models are called namespace/name")

    return router


async def on_hub_error(_: Request, error: Exception) -> Response:
    """A problem document, with the headers by which Hugging Face's clients tell what is wrong."""
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


async def _asked_of_api(request: Request) -> Asked:
    return _checked(request, Asked.of(_raw_path(request), _API))


async def _asked_of_file(request: Request) -> Asked:
    return _checked(request, Asked.of(_raw_path(request)))


def _checked(request: Request, asked: Asked) -> Asked:
    """What a URL names, if that is the model by which the route was found and for which the caller was let in. Raises RepoNotFound."""
    there = request.path_params
    if asked.model != f"{there['namespace']}/{there['name']}":
        raise RepoNotFound(
            f"there is no model {shown(asked.model)}", fix="write the path as it is, without quoting letters"
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
    """What a client asks of some paths.

    Attributes:
        paths: the files' names.
        expand: whether their commit is asked for.
    """

    paths: list[str]
    expand: bool = False

    @staticmethod
    def of_form(body: bytes) -> _Paths:
        """Of a form, as huggingface_hub sends it. Raises ValueError."""
        form = parse_qs(body.decode(), max_num_fields=_MOST_PATHS)
        return _Paths(form.get("paths", []), form.get("expand", ["false"])[0].lower() in ("true", "1"))

    @staticmethod
    def of_json(body: bytes) -> _Paths:
        """Of JSON, as the Hub's JavaScript client sends it. Raises ValueError."""
        said = json.loads(body)
        paths = said.get("paths") if isinstance(said, dict) else None
        if not isinstance(paths, list) or len(paths) > _MOST_PATHS:
            raise ValueError("paths is no list, or too long")
        if not all(isinstance(path, str) for path in paths):
            raise ValueError("a path is no text")
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
    """The same file by the version's commit. The path alone, without scheme and host: older clients follow no other redirect of a HEAD."""
    parts = _raw_path(request).split("/")
    parts[4] = version.commit
    query = request.scope["query_string"].decode("latin-1")
    location = quote("/".join(parts), safe="/%") + (f"?{query}" if query else "")
    return RedirectResponse(location, 307, _redirect_headers(headers))


_CONDITIONS = frozenset({"if-range", "if-match", "if-none-match"})


def _has_it(request: Request, headers: dict[str, str]) -> bool:
    match, none_match = (
        ", ".join(lines) if (lines := request.headers.getlist(name)) else None
        for name in ("if-match", "if-none-match")
    )
    return is_unchanged(headers["ETag"], match, none_match)


def _not_modified(headers: dict[str, str]) -> Response:
    return Response(status_code=304, headers={name: headers[name] for name in ("ETag", "X-Repo-Commit")})


def _elsewhere(request: Request, url: str | None) -> str | None:
    """``url``, if it is of another origin: clients take no redirect that leads back to where they are."""
    return url if url is not None and urlsplit(url).netloc != request.url.netloc else None


def _redirect_headers(headers: dict[str, str]) -> dict[str, str]:
    """What goes with a redirect, where the size and the ETag are those of the file behind it."""
    return {
        "X-Repo-Commit": headers["X-Repo-Commit"],
        "X-Linked-ETag": headers["ETag"],
        "X-Linked-Size": headers["Content-Length"],
        "Cache-Control": "no-store",  # a signed URL is valid for a while, and a ref moves
    }


class _Download(StreamingResponse):
    """Bytes of a file; the reading of it ends with the response, however that comes about."""

    def __init__(
        self, pieces: AsyncIterator[memoryview], status: int, headers: dict[str, str], held: ExitStack
    ):
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
    standing: Standing,
) -> AsyncIterator[memoryview]:
    """Pieces from ``start`` up to ``end``, the first of which is there already; each is read while the one before is sent.

    What is to be sent is counted by ``delay``, which says for how many seconds it has to wait first. Pieces end before ``end``, and the connection
    with them, once the caller may not go on.
    """
    while piece:
        start += len(piece)
        ahead = asyncio.ensure_future(read(start, reader.take(end - start))) if start < end else None
        try:
            view = memoryview(piece)
            for offset in range(0, len(view), part_bytes):
                if standing.ended:  # asked before each part: one that is slowed may take seconds
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
