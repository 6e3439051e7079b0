"""The HTTP face, for people and programs that look on: models, versions, refs, exports, health and metrics.

Handlers translate their request, call one method of the service or of its exports, and translate back. Whatever goes
wrong is answered with a problem document (RFC 9457).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weighbridge.errors import InvalidArgument, NotFound, Unavailable, WeighbridgeError
from weighbridge.resources import VersionState
from weighbridge_service.exports import Exports, ExportState
from weighbridge_service.metrics import Metrics
from weighbridge_service.service import Weighbridge

MAX_BODY_BYTES = 1 << 20
_PAGE = 100
_LARGEST_PAGE = 1000
_MOST_FIELDS = 20
_HTTP_REASONS = {
    400: (InvalidArgument.reason, ""),
    404: (NotFound.reason, "/docs lists all endpoints"),
    405: ("METHOD_NOT_ALLOWED", "/docs lists all endpoints"),
    413: ("BODY_TOO_LARGE", "leave out what the request does not need"),
}
"""Reason and fix for what the framework itself refuses."""
_SEND_SECONDS = 30.0
"""How long a client that follows an export may leave an event unread."""


# -- what is sent and received ---------------------------------------------------------------------------------------


class _Out(BaseModel):
    model_config = ConfigDict(from_attributes=True, protected_namespaces=())


class _In(BaseModel):
    # a member that does not exist is a slip that should be seen
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


VersionField = Annotated[
    str, Field(description="A number or a ref.", max_length=128, coerce_numbers_to_str=True, examples=["17"])
]


class ModelOut(_Out):
    """A registered model."""

    name: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    model_type: str = Field(description="Of the Hugging Face config.", examples=["llama"])
    dtype: str = Field(description="Of the weights, in safetensors' name.", examples=["BF16"])
    tensor_count: int = Field(description="Number of tensors.")
    tensor_bytes: int = Field(description="Bytes of all tensors together.")
    files: list[str] = Field(description="Files that belong to the model besides its weights.")
    refs: dict[str, int] = Field(description="Version number by ref.", examples=[{"latest": 17, "live": 18}])


class ModelsOut(_Out):
    """A page of models."""

    models: list[ModelOut] = Field(description="Models, by name.")


class VersionOut(_Out):
    """A version of a model."""

    model: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    number: int = Field(description="Unique and increasing within the model.", examples=[17])
    state: VersionState = Field(description="Engines can pull versions that are `ready` or `durable`.")
    step: int = Field(description="The trainer's step.")
    run: str = Field(description="The trainer's run.")
    ranks: int = Field(description="Trainer ranks that push it; 0 where that is no longer known.")
    sealed_ranks: int = Field(description="Ranks that have pushed all they hold.")
    tensor_bytes: int = Field(description="Bytes of all tensors together.")
    received_bytes: int = Field(description="Bytes of them that have arrived.")
    create_time_ms: int = Field(description="Unix time in milliseconds.")
    ready_time_ms: int = Field(description="Unix time in milliseconds; 0 if not yet, or no longer known.")
    durable_time_ms: int = Field(description="Unix time in milliseconds; 0 if not yet, or no longer known.")
    error: str = Field(description="Why it failed, or is not durable yet; empty if all is well.")
    error_details: list[str] = Field(description="One line for each tensor, box or rank concerned.")


class VersionsOut(_Out):
    """A page of versions."""

    versions: list[VersionOut] = Field(description="Versions, newest first.")


class RefsOut(_Out):
    """The refs of a model."""

    refs: dict[str, int] = Field(
        description="Version number by ref. `live` and `latest` move by themselves; the others are tags.",
        examples=[{"latest": 17, "live": 18, "prod": 12}],
    )


class SetRefIn(_In):
    """Which version a tag shall name."""

    version: VersionField


class VerificationOut(_Out):
    """What comparing a version's files with its manifest gave."""

    number: int = Field(description="The version.")
    tensors_checked: int = Field(description="Tensors whose digests were compared.")
    bytes_checked: int = Field(description="Bytes read.")
    problems: list[str] = Field(
        description="One line for each file or tensor that differs; empty if all is well."
    )


class ExportIn(_In):
    """Which version to write as a Hugging Face folder, and how."""

    model: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    version: VersionField = "latest"
    folder: str | None = Field(
        None,
        description="Where, relative to the service's folder for exports; by default a new folder named after the "
        "model and the version.",
        examples=["smol-bf16"],
    )
    dtype: str | None = Field(
        None, description="Cast floating-point tensors; by default they stay as they are.", examples=["bf16"]
    )
    max_shard_bytes: int | None = Field(
        None, description="Largest safetensors file, in bytes; by default 5 GB.", ge=1, le=1 << 62
    )


class ExportOut(_Out):
    """An export as it stands."""

    id: str = Field(description="Names the job.")
    model: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    number: int = Field(description="The version that is written.", examples=[17])
    folder: str = Field(
        description="Where the service writes it. It is there once the job is done, and not before."
    )
    state: ExportState = Field(description="The last three are final.")
    bytes_done: int = Field(description="Bytes of weights written so far.")
    bytes_total: int = Field(description="Bytes of weights to write; 0 until it runs.")
    error: str = Field(description="Why it failed; empty otherwise.")
    create_time_ms: int = Field(description="Unix time in milliseconds.")
    end_time_ms: int = Field(description="Unix time in milliseconds; 0 if it has not ended.")


class ExportsOut(_Out):
    """The exports that are remembered."""

    exports: list[ExportOut] = Field(description="Exports, newest first.")


class StatusOut(_Out):
    """An answer to a probe."""

    status: str = Field(examples=["ok"])


class Problem(BaseModel):
    """A problem document (RFC 9457)."""

    type: str = Field(description="What kind of problem; the same for all of its kind.")
    title: str = Field(description="The kind in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What is wrong, in one sentence.")
    fix: str = Field(description="What the caller can do about it; may be empty.")
    details: list[str] = Field(description="One line for each field, tensor or other thing concerned.")


# -- problems --------------------------------------------------------------------------------------------------------


class _ProblemResponse(Response):
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


async def _on_error(_: Request, error: Exception) -> Response:
    """What is raised on purpose says what is wrong; anything else says nothing of the service's inside."""
    if isinstance(error, WeighbridgeError):
        return _ProblemResponse(
            error.reason, error.http_status, error.message, fix=error.fix, details=error.details
        )
    if isinstance(error, RequestValidationError):
        lines = [
            f"{'.'.join(str(part)[:80] for part in each['loc'][:8])}: {each['msg'][:200]}"
            for each in error.errors()
        ]
        return _ProblemResponse(
            InvalidArgument.reason,
            InvalidArgument.http_status,
            "the request is not what this endpoint takes",
            fix="/docs describes all requests",
            details=lines[:_MOST_FIELDS],
        )
    if isinstance(error, HTTPException):
        reason, fix = _HTTP_REASONS.get(error.status_code, ("HTTP_ERROR", ""))
        return _ProblemResponse(reason, error.status_code, error.detail, fix=fix, headers=error.headers)
    return _ProblemResponse(
        WeighbridgeError.reason,
        WeighbridgeError.http_status,
        "the service failed",
        fix="its log says more",
    )


class _BodyLimit:
    """Refuses requests whose bodies are too large: by what they announce, or when they turn out to be."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        announced = Headers(scope=scope).get("content-length", "0") if scope["type"] == "http" else "0"
        if len(announced) > len(str(MAX_BODY_BYTES)) or int(announced) > MAX_BODY_BYTES:
            refusal = await _on_error(Request(scope), _too_large())
            await refusal(scope, receive, send)
            return
        count = 0

        async def limited() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > MAX_BODY_BYTES:
                raise _too_large()
            return message

        await self._app(scope, limited, send)


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")


# -- endpoints -------------------------------------------------------------------------------------------------------

Namespace = Annotated[str, Path(description="First half of the model's name.", examples=["acme"])]
Name = Annotated[str, Path(description="Second half of the model's name.", examples=["smol"])]
VersionOrRef = Annotated[str, Path(description="A number or a ref.", examples=["latest"])]
Ref = Annotated[str, Path(description="Name of the ref.", examples=["prod"])]
JobId = Annotated[str, Path(description="The `id` that starting the export gave.")]


def _models_router(service: Weighbridge) -> APIRouter:
    router = APIRouter(prefix="/v1/models")

    @router.get("", tags=["models"])
    def list_models(
        after: Annotated[str, Query(description="Begin behind the model of this name.")] = "",
        limit: Annotated[int, Query(ge=1, le=_LARGEST_PAGE, description="Largest number of models.")] = _PAGE,
    ) -> ModelsOut:
        """Models by name. Give the last name of a page as `after` to get the next one."""
        return ModelsOut.model_validate({"models": service.catalog.list_models(after, limit)})

    @router.get("/{namespace}/{name}", tags=["models"])
    def get_model(namespace: Namespace, name: Name) -> ModelOut:
        """One model."""
        return ModelOut.model_validate(service.catalog.get_model(f"{namespace}/{name}"))

    @router.get("/{namespace}/{name}/versions", tags=["versions"])
    def list_versions(
        namespace: Namespace,
        name: Name,
        limit: Annotated[
            int, Query(ge=1, le=_LARGEST_PAGE, description="Largest number of versions.")
        ] = _PAGE,
        before: Annotated[
            int, Query(ge=0, le=10**12, description="Begin below this number; 0 with the newest.")
        ] = 0,
        include_invisible: Annotated[
            bool,
            Query(description="Also those being received, and those that failed since the service started."),
        ] = False,
    ) -> VersionsOut:
        """Versions, newest first. Give the last number of a page as `before` to get the next one."""
        found = service.catalog.list_versions(
            f"{namespace}/{name}", before=before, limit=limit, include_invisible=include_invisible
        )
        return VersionsOut.model_validate({"versions": found})

    @router.get("/{namespace}/{name}/versions/{version}", tags=["versions"])
    def get_version(namespace: Namespace, name: Name, version: VersionOrRef) -> VersionOut:
        """One version; by number also one that is being received or has failed."""
        return VersionOut.model_validate(service.catalog.get_version(f"{namespace}/{name}", version))

    @router.post("/{namespace}/{name}/versions/{version}/verify", tags=["versions"])
    def verify_version(namespace: Namespace, name: Name, version: VersionOrRef) -> VerificationOut:
        """Read all files of a durable version and compare them with the digests in its manifest."""
        return VerificationOut.model_validate(service.catalog.verify(f"{namespace}/{name}", version))

    @router.get("/{namespace}/{name}/refs", tags=["refs"])
    def list_refs(namespace: Namespace, name: Name) -> RefsOut:
        """All refs of a model."""
        return RefsOut(refs=service.catalog.refs(f"{namespace}/{name}"))

    @router.put("/{namespace}/{name}/refs/{ref}", tags=["refs"])
    def set_ref(namespace: Namespace, name: Name, ref: Ref, body: SetRefIn) -> VersionOut:
        """Let a tag name a durable version; answers with that version."""
        return VersionOut.model_validate(service.catalog.set_ref(f"{namespace}/{name}", ref, body.version))

    @router.delete("/{namespace}/{name}/refs/{ref}", tags=["refs"], status_code=204)
    def delete_ref(namespace: Namespace, name: Name, ref: Ref) -> None:
        """Take a tag away."""
        service.catalog.delete_ref(f"{namespace}/{name}", ref)

    return router


def _exports_router(exports: Exports) -> APIRouter:
    router = APIRouter(prefix="/v1/exports", tags=["exports"])

    @router.post("", status_code=202)
    def start_export(body: ExportIn, response: Response) -> ExportOut:
        """Begin to write a version as a Hugging Face folder on the service's side.

        The job runs in the background: `Location` says where to look at it, and `/events` there how to follow it.
        """
        job = exports.start(
            body.model,
            body.version,
            folder=body.folder,
            dtype=body.dtype,
            max_shard_bytes=body.max_shard_bytes,
        )
        response.headers["Location"] = f"/v1/exports/{job.id}"
        return ExportOut.model_validate(job)

    @router.get("")
    def list_exports() -> ExportsOut:
        """Exports that wait, run, or ended not long ago, newest first."""
        return ExportsOut.model_validate({"exports": exports.list()})

    @router.get("/{job_id}")
    def get_export(job_id: JobId) -> ExportOut:
        """One export."""
        return ExportOut.model_validate(exports.get(job_id))

    @router.delete("/{job_id}")
    def cancel_export(job_id: JobId) -> ExportOut:
        """Stop an export and remove what it has written. One that has ended stays as it is."""
        return ExportOut.model_validate(exports.cancel(job_id))

    @router.get(
        "/{job_id}/events",
        response_class=EventSourceResponse,
        responses={
            200: {
                "description": "Server-sent events: `progress` a few times a second while something changes, then one "
                "`end`. The data of each is the export as JSON.",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            }
        },
    )
    async def follow_export(job_id: JobId) -> EventSourceResponse:
        """Follow an export until it ends."""
        exports.get(job_id)  # not found is a problem document, not a stream that breaks

        async def events() -> AsyncIterator[ServerSentEvent]:
            async for job in exports.changes(job_id):
                data = ExportOut.model_validate(job).model_dump_json()
                yield ServerSentEvent(data, event="end" if job.state.ended else "progress")

        return EventSourceResponse(events(), send_timeout=_SEND_SECONDS)

    return router


def _operations_router(service: Weighbridge, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/healthz")
    def health() -> StatusOut:
        """Whether the process lives."""
        return StatusOut(status="ok")

    @router.get("/readyz")
    def readiness() -> StatusOut:
        """Whether new work should be sent here."""
        if service.draining:
            raise Unavailable("the service is shutting down", fix="send new work to another one")
        return StatusOut(status="ready")

    @router.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {
                "description": "Figures in Prometheus' text format.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            }
        },
    )
    def read_metrics() -> Response:
        """What the service tells Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


def _operation_id(route: APIRoute) -> str:
    return route.name


def create_app(service: Weighbridge, exports: Exports, metrics: Metrics) -> FastAPI:
    """The HTTP face of a service.

    Args:
        service: what it is the face of.
        exports: its export jobs.
        metrics: what ``/metrics`` shows.
    """
    problem: dict[str, Any] = {
        "description": "A problem document: what is wrong, and what to do about it.",
        "content": {"application/problem+json": {"schema": Problem.model_json_schema()}},
    }
    app = FastAPI(
        title="Weighbridge",
        version="v1",
        description="Versions of model weights between training and inference. Weights themselves travel over gRPC.",
        responses={"default": problem},
        generate_unique_id_function=_operation_id,
        redirect_slashes=False,
        exception_handlers={
            WeighbridgeError: _on_error,
            RequestValidationError: _on_error,
            HTTPException: _on_error,
            Exception: _on_error,
        },
    )
    app.add_middleware(_BodyLimit)
    app.include_router(_models_router(service))
    app.include_router(_exports_router(exports))
    app.include_router(_operations_router(service, metrics))
    return app
