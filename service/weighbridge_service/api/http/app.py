"""Application of the HTTP server: models, versions, refs, exports, health and metrics.

Handlers convert their request, call one method of the service or of its exports, and convert the result. The response
to every error is a problem document (RFC 9457).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from weighbridge._core.metadata import conditions
from weighbridge._core.operations.operation import LARGEST_PAGE
from weighbridge._core.operations.table import ENTRIES
from weighbridge._core.operations.verbs import Verb
from weighbridge._signing.bundle import MEDIA_TYPE as SIGNATURE_TYPE
from weighbridge._signing.bundle import Bundle
from weighbridge.errors import InvalidArgument, WeighbridgeError
from weighbridge_service.api.bodies import PAGE, Bodies
from weighbridge_service.api.http.bodies import BodyLimit
from weighbridge_service.api.http.callers import CredentialsCheck, Recorder, ask, peer_of
from weighbridge_service.api.http.derived.operation_routes import operations_routes
from weighbridge_service.api.http.engines import engines_router
from weighbridge_service.api.http.guard import Guard, HostNames
from weighbridge_service.api.http.heads import Heads
from weighbridge_service.api.http.hub_documents import HubNotFound
from weighbridge_service.api.http.hub_reading import Hub
from weighbridge_service.api.http.hub_routes import DEFAULT_SIZES, HubSizes, hub_router, on_hub_error
from weighbridge_service.api.http.metrics import Metrics
from weighbridge_service.api.http.operations import operations_router
from weighbridge_service.api.http.pages.routes import pages_router
from weighbridge_service.api.http.parameters import JobId, Name, Namespace, Number, SignatureId, VersionOrRef
from weighbridge_service.api.http.problems import Problem, on_error
from weighbridge_service.api.http.ranges import ContentChanged, RangeNotSatisfiable
from weighbridge_service.api.http.refs import refs_router
from weighbridge_service.api.http.resources import (
    COLLECTION,
    DELETED_MODEL,
    VERIFICATION,
    VERSION,
    VERSIONS,
    AdapterOut,
    AdaptersOut,
    CollectIn,
    ExportIn,
    ExportOut,
    ExportsOut,
    SignatureIn,
    SignatureOut,
    SignaturesOut,
)
from weighbridge_service.api.http.threads import in_threads
from weighbridge_service.exports.jobs import ExportJob, Exports
from weighbridge_service.health import Health
from weighbridge_service.service import Weighbridge
from weighbridge_storage.threads import ThreadPool

_DOCUMENTATION = "/docs"
_VERIFYING = 8
"""Maximum number of versions that are verified at the same time."""
VERBS = {each.name: each.verb for each in ENTRIES if each.http} | {
    "custom_swagger_ui_html": Verb.PROBE,
    "swagger_ui_redirect": Verb.PROBE,
    "liveness": Verb.PROBE,
    "readiness": Verb.PROBE,
    "readiness_of": Verb.PROBE,
    "get_memory": Verb.OBSERVE,
    "list_checks": Verb.OBSERVE,
    "read_metrics": Verb.OBSERVE,
    "list_adapters": Verb.LOOK,
    "get_signature": Verb.LOOK,
    "request_ref": Verb.TAG,
    "list_engines_of": Verb.LOOK,
    "list_exports": Verb.LOOK,
    "model_info": Verb.LOOK,
    "tree": Verb.LOOK,
    "paths_info": Verb.LOOK,
    "refs": Verb.LOOK,
    "whoami": Verb.LOOK,
    "file_metadata": Verb.PULL,
    "file": Verb.PULL,
    "no_namespace": Verb.LOOK,
    "asset": Verb.PROBE,
    "sign_in_page": Verb.PROBE,
    "sign_in": Verb.PROBE,
    "sign_out": Verb.PROBE,
    "index_page": Verb.LOOK,
    "index_events": Verb.LOOK,
    "model_page": Verb.LOOK,
    "model_events": Verb.LOOK,
    "version_page": Verb.LOOK,
    "version_events": Verb.LOOK,
    "distribution": Verb.PULL,
    "compare_page": Verb.LOOK,
    "retention_page": Verb.MANAGE,
    "approve_version_form": Verb.APPROVE,
    "request_ref_form": Verb.TAG,
    "delete_ref_form": Verb.TAG,
    "approve_ref_form": Verb.APPROVE,
    "withdraw_ref_form": Verb.TAG,
    "start_export_form": Verb.MANAGE,
}
"""Verb of each route by the route's name, for the operations in the table and for the routes that only HTTP has."""
ASKING = {
    "start_export": Verb.MANAGE,
    "get_export": Verb.LOOK,
    "cancel_export": Verb.MANAGE,
    "follow_export": Verb.LOOK,
    "new_ref_form": Verb.TAG,
    "cancel_export_form": Verb.MANAGE,
}
"""Verbs of the routes that authorize the caller themselves, because only their handlers know the model."""
_SEND_SECONDS = 30.0
"""Timeout for sending an event to a client that follows an export and does not read."""


def _models_router(service: Weighbridge) -> APIRouter:
    router = APIRouter(prefix="/v1/models")

    @router.get("/{namespace}/{name}/adapters", tags=["models"])
    def list_adapters(
        namespace: Namespace,
        name: Name,
        request: Request,
        version: Annotated[
            str, Query(description="A number or a ref: only the adapters on this version.", max_length=128)
        ] = "",
        after: Annotated[str, Query(description="Start after the adapter with this name.")] = "",
        limit: Annotated[int, Query(ge=1, le=LARGEST_PAGE, description="Maximum number of adapters.")] = PAGE,
    ) -> AdaptersOut:
        """Adapters on versions of a model that you may see, by name.

        Give the last name of a page as `after` to get the next one.
        """
        found = service.catalog.adapters(f"{namespace}/{name}", version, peer_of(request).sees)
        page = [AdapterOut(model=each, versions=list(on)) for each, on in found.items() if each > after]
        return AdaptersOut(adapters=page[:limit])

    @router.delete("/{namespace}/{name}", tags=["models"], response_model=DELETED_MODEL)
    def delete_model(
        namespace: Namespace,
        name: Name,
        request: Request,
        confirm: Annotated[
            str,
            Query(
                description=(
                    "The model's name, as in `acme/smol`. Required, because the whole model is deleted permanently."
                )
            ),
        ],
        force: Annotated[bool, Query(description="Delete the model even if adapters are on versions of it.")] = False,
    ) -> BaseModel:
        """Delete a model with all of its versions and refs. Collections delete its objects after the grace time."""
        model = f"{namespace}/{name}"
        if confirm != model:
            raise InvalidArgument(
                f"this deletes {model} with all of its versions, but {confirm[:200]!r} was confirmed",
                fix=f"to delete the model, pass ?confirm={model}",
            )
        deleted = service.collecting.delete_model(model, forced=force, sees=peer_of(request).sees)
        return DELETED_MODEL.model_validate(deleted)

    @router.get("/{namespace}/{name}/versions", tags=["versions"], response_model=VERSIONS)
    def list_versions(
        namespace: Namespace,
        name: Name,
        limit: Annotated[int, Query(ge=1, le=LARGEST_PAGE, description="Maximum number of versions.")] = PAGE,
        before: Annotated[
            int,
            Query(ge=0, le=10**12, description="Start below this number; 0 starts with the newest version."),
        ] = 0,
        include_invisible: Annotated[
            bool,
            Query(description="Include versions that are being received and versions that failed recently."),
        ] = False,
        where: Annotated[
            list[str] | None,
            Query(
                description="Comparisons of metadata, with = != < <= > or >=; all must be true.",
                examples=["reward>=0.7"],
            ),
        ] = None,
    ) -> BaseModel:
        """Versions, newest first. Give the last number of a page as `before` to get the next one."""
        found = service.catalog.list_versions(
            f"{namespace}/{name}",
            before=before,
            limit=limit,
            include_invisible=include_invisible,
            where=conditions(where or ()),
        )
        return VERSIONS.model_validate({"versions": found})

    @router.get("/{namespace}/{name}/versions/{version}", tags=["versions"], response_model=VERSION)
    def get_version(namespace: Namespace, name: Name, version: VersionOrRef) -> BaseModel:
        """One version. A number may also name a version that is being received or has failed."""
        return VERSION.model_validate(service.catalog.get_version(f"{namespace}/{name}", version))

    @router.post("/{namespace}/{name}/versions/{version}/verify", tags=["versions"], response_model=VERIFICATION)
    @in_threads(ThreadPool("http-verify", _VERIFYING))
    def verify_version(namespace: Namespace, name: Name, version: VersionOrRef) -> BaseModel:
        """Read all files of a durable version and compare them with the digests in its manifest."""
        return VERIFICATION.model_validate(service.catalog.verify(f"{namespace}/{name}", version))

    @router.get("/{namespace}/{name}/versions/{version}/signatures", tags=["signatures"])
    def list_signatures(namespace: Namespace, name: Name, version: VersionOrRef) -> SignaturesOut:
        """The signatures of a durable version. The service does not verify them, because it does not have the keys."""
        number, found = service.signatures.of_version(f"{namespace}/{name}", version)
        return SignaturesOut(number=number, signatures=[SignatureOut.of(each) for each in found])

    @router.get(
        "/{namespace}/{name}/versions/{version}/signatures/{signature}",
        tags=["signatures"],
        response_class=Response,
        responses={200: {"content": {SIGNATURE_TYPE: {}}, "description": "A bundle, as model_signing reads it."}},
    )
    def get_signature(namespace: Namespace, name: Name, version: VersionOrRef, signature: SignatureId) -> Response:
        """One signature, as the file that `model_signing verify` reads."""
        found = service.signatures.get(f"{namespace}/{name}", version, signature)
        return Response(found.content, media_type=SIGNATURE_TYPE)

    @router.post("/{namespace}/{name}/versions/{version}/signatures", tags=["signatures"])
    def add_signature(
        namespace: Namespace, name: Name, version: Number, body: SignatureIn, request: Request
    ) -> SignatureOut:
        """Add a signature to a durable version. It must sign this version's files. Adding it again changes nothing."""
        content = body.content.encode()
        service.signatures.add(f"{namespace}/{name}", version, content, peer_of(request).name)
        return SignatureOut.of(Bundle.read(content).as_signature)

    @router.post("/{namespace}/{name}/collect", tags=["retention"], response_model=COLLECTION)
    def collect_versions(namespace: Namespace, name: Name, body: CollectIn) -> BaseModel:
        """Delete the versions that retention does not require now, instead of waiting for the service's next
        collection.
        """
        return COLLECTION.model_validate(service.collecting.collect(f"{namespace}/{name}", dry_run=body.dry_run))

    return router


def _exports_router(exports: Exports) -> APIRouter:
    router = APIRouter(prefix="/v1/exports", tags=["exports"])

    def asked(request: Request, verb: Verb, job_id: str) -> ExportJob:
        """An export of a model for which the caller has the verb."""
        ask(request, Verb.LOOK)
        job = exports.get(job_id)
        if not peer_of(request).sees(job.model):  # the same response as for a job that does not exist
            raise exports.unknown(job_id)
        ask(request, verb, job.model)
        return job

    @router.post("", status_code=202)
    def start_export(body: ExportIn, request: Request, response: Response) -> ExportOut:
        """Start writing a version as a Hugging Face folder on the service's machine.

        The job runs in the background. `Location` is its URL; `/events` below that streams its progress.
        """
        ask(request, Verb.MANAGE, body.model, str(body.version))
        job = exports.start(
            body.model,
            body.version,
            folder=body.folder,
            dtype=body.dtype,
            max_shard_bytes=body.max_shard_bytes,
            peer=peer_of(request),
        )
        response.headers["Location"] = f"/v1/exports/{job.id}"
        return ExportOut.model_validate(job)

    @router.get("")
    def list_exports(request: Request) -> ExportsOut:
        """Exports that are waiting, running, or ended recently, newest first."""
        sees = peer_of(request).sees
        return ExportsOut.model_validate({"exports": [job for job in exports.list() if sees(job.model)]})

    @router.get("/{job_id}")
    def get_export(job_id: JobId, request: Request) -> ExportOut:
        """One export."""
        return ExportOut.model_validate(asked(request, Verb.LOOK, job_id))

    @router.delete("/{job_id}")
    def cancel_export(job_id: JobId, request: Request) -> ExportOut:
        """Cancel an export and remove its files. An export that has ended is not changed."""
        asked(request, Verb.MANAGE, job_id)
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
    async def follow_export(job_id: JobId, request: Request) -> EventSourceResponse:
        """Follow an export until it ends."""
        # before the stream begins, so that the response for a missing job is a problem document
        asked(request, Verb.LOOK, job_id)
        standing = CredentialsCheck(request)

        async def events() -> AsyncIterator[ServerSentEvent]:
            async for job in exports.changes(job_id, lambda: standing.ended):
                data = ExportOut.model_validate(job).model_dump_json()
                yield ServerSentEvent(data, event="end" if job.state.ended else "progress")

        return EventSourceResponse(events(), send_timeout=_SEND_SECONDS)

    return router


async def _ask(request: Request) -> None:
    """Authorize the caller. Dependency of every route; the routes in `ASKING` authorize in their handlers instead."""
    route = request.scope["route"].name
    if route in ASKING:
        return
    there = request.path_params
    model = f"{there['namespace']}/{there['name']}" if "namespace" in there and "name" in there else ""
    of_hub = str(there.get("rest", "")).partition("/")[0]
    ref = str(there.get("ref") or there.get("version") or there.get("number") or of_hub)
    ask(request, VERBS[route], model, ref)


def _operation_id(route: APIRoute) -> str:
    return route.name


def create_app(
    service: Weighbridge, exports: Exports, metrics: Metrics, health: Health, *, hub: HubSizes = DEFAULT_SIZES
) -> FastAPI:
    """The HTTP server of a service.

    Args:
        service: the service.
        exports: its export jobs.
        metrics: metrics for ``/metrics``.
        health: checks for ``/readyz``.
        hub: sizes for the routes for Hugging Face's clients.
    """
    problem: dict[str, Any] = {
        "description": "A problem document: what is wrong, and what to do about it.",
        "content": {"application/problem+json": {"schema": Problem.model_json_schema()}},
    }
    app = FastAPIOffline(
        docs_url=_DOCUMENTATION,
        redoc_url=None,
        title="Weighbridge",
        version="v1",
        description="Versions of model weights between training and inference. Weights themselves travel over gRPC.",
        responses={"default": problem},
        generate_unique_id_function=_operation_id,
        redirect_slashes=False,
        dependencies=[Depends(_ask)],
        exception_handlers={
            HubNotFound: on_hub_error,
            RangeNotSatisfiable: on_hub_error,
            ContentChanged: on_hub_error,
            WeighbridgeError: on_error,
            RequestValidationError: on_error,
            HTTPException: on_error,
            ClientDisconnect: on_error,
            Exception: on_error,
        },
    )
    app.state.access = service.access
    app.state.audit = service.audit
    app.add_middleware(Recorder, service.audit, metrics.requests.count)
    app.add_middleware(BodyLimit)
    app.add_middleware(Guard, HostNames.of(service.config.http_hosts), _DOCUMENTATION)
    app.add_middleware(Heads, app.router.routes)
    app.include_router(operations_routes(Bodies(service)))
    app.include_router(_models_router(service))
    app.include_router(refs_router(service))
    app.include_router(engines_router(service.engines))
    app.include_router(_exports_router(exports))
    app.include_router(operations_router(service, metrics, health))
    app.include_router(
        hub_router(
            Hub(service.catalog, service.store_readers),
            service.quotas.identities,
            redirect=service.config.redirect_downloads,
            sizes=hub,
        )
    )
    app.include_router(pages_router(service, exports))  # last, because a model's name may equal a part of their paths
    return app
