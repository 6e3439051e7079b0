"""Routes of refs and of requests to change those that are protected, with their bodies."""

from __future__ import annotations

import uuid
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, create_model

from weighbridge._core.resources import REQUEST_DELETE, REQUEST_UNPROTECT, Protection, RefRequest
from weighbridge_service.api.http.callers import peer_of
from weighbridge_service.api.http.derived.schemas import In, Out, answer_of
from weighbridge_service.api.http.parameters import Name, Namespace, Ref, RequestId
from weighbridge_service.api.http.resources import VERSION, VersionField
from weighbridge_service.service import Weighbridge
from weighbridge_storage.documents.entries import MAX_APPROVALS, MAX_TEXT
from weighbridge_storage.documents.names import REQUEST_PATTERN

PROTECTION, REQUEST = answer_of(Protection), answer_of(RefRequest)
REFS = create_model(
    "RefsOut",
    __base__=Out,
    __doc__="The refs of a model.",
    refs=(
        dict[str, int],
        Field(
            description="Version number by ref. `live` and `latest` move by themselves; the others are tags.",
            examples=[{"latest": 17, "live": 18, "prod": 12}],
        ),
    ),
    protections=(list[PROTECTION], Field(description="Protected refs.")),  # type: ignore[valid-type]
    requests=(
        list[REQUEST],  # type: ignore[valid-type]
        Field(
            description="To change protected refs: those that are pending, and the last ones that have ended, in the order of asking."
        ),
    ),
)
PROTECTIONS = create_model(
    "ProtectionsOut",
    __base__=Out,
    __doc__="The protected refs of a model.",
    protections=(list[PROTECTION], Field(description="By name.")),  # type: ignore[valid-type]
)


class SetRefIn(In):
    """Which version a tag shall name."""

    version: VersionField


class RequestRefIn(In):
    """What a ref shall become."""

    action: Literal["move", "delete"] = Field("move", description="Whether it shall name a version, or go.")
    version: VersionField = Field("latest", description="That it shall name, if it shall name one.")
    note: str = Field("", description="Kept with the request.", max_length=MAX_TEXT)
    request_id: str = Field(
        default_factory=lambda: uuid.uuid4().hex,
        description="Names the call; the same in each repetition. The request has another name, which the answer says.",
        pattern=REQUEST_PATTERN,
    )


class ApproveRefIn(In):
    """What is noted with an approval."""

    note: str = Field("", description="Kept with the approval.", max_length=MAX_TEXT)


class ProtectRefIn(In):
    """What it takes to change a ref, beside a scope that names it."""

    approvals: int = Field(
        0,
        description="Of how many identities besides the one that asks.",
        ge=0,
        le=MAX_APPROVALS,
        strict=True,
    )


def refs_router(service: Weighbridge) -> APIRouter:
    """The routes.

    Args:
        service: whose refs they are.
    """
    router = APIRouter(prefix="/v1/models/{namespace}/{name}/refs", tags=["refs"])
    gates = service.gates

    @router.get("", response_model=REFS)
    def list_refs(namespace: Namespace, name: Name) -> BaseModel:
        """All refs of a model, which of them are protected, and what is asked for these."""
        model = f"{namespace}/{name}"
        return REFS.model_validate(
            {
                "refs": service.catalog.refs(model),
                "protections": gates.protections(model),
                "requests": gates.ref_requests(model),
            }
        )

    @router.put("/{ref}", response_model=VERSION)
    def set_ref(namespace: Namespace, name: Name, ref: Ref, body: SetRefIn, request: Request) -> BaseModel:
        """Let a tag name a durable version; answers with that version. One that takes approvals is refused: `/requests` asks for it."""
        version, _ = gates.move(f"{namespace}/{name}", ref, body.version, peer_of(request))
        return VERSION.model_validate(version)

    @router.delete("/{ref}", status_code=204)
    def delete_ref(namespace: Namespace, name: Name, ref: Ref, request: Request) -> None:
        """Take a tag away. One that takes approvals is refused: `/requests` asks for it."""
        gates.ask(f"{namespace}/{name}", ref, REQUEST_DELETE, peer_of(request))

    @router.post("/{ref}/requests", response_model=REQUEST)
    def request_ref(
        namespace: Namespace, name: Name, ref: Ref, body: RequestRefIn, request: Request, response: Response
    ) -> BaseModel:
        """Change a tag, or ask for it if that takes the approval of other identities: 200 if it is done, 202 if it is pending."""
        model, peer, named = f"{namespace}/{name}", peer_of(request), body.request_id
        if body.action == REQUEST_DELETE:
            found = gates.ask(model, ref, REQUEST_DELETE, peer, request_id=named, note=body.note)
        else:
            _, found = gates.move(model, ref, body.version, peer, request_id=named, note=body.note)
        return _answer(found, response)

    @router.post("/{ref}/requests/{request_id}/approve", response_model=REQUEST)
    def approve_ref(
        namespace: Namespace,
        name: Name,
        ref: Ref,
        request_id: RequestId,
        body: ApproveRefIn,
        request: Request,
        response: Response,
    ) -> BaseModel:
        """Approve a change that another identity has asked for: 200 if it is done with that, 202 if it takes more approvals."""
        model, peer = f"{namespace}/{name}", peer_of(request)
        return _answer(gates.approve_ref(model, ref, request_id, peer, note=body.note), response)

    @router.put("/{ref}/protection", response_model=PROTECTIONS)
    def protect_ref(
        namespace: Namespace, name: Name, ref: Ref, body: ProtectRefIn, request: Request
    ) -> BaseModel:
        """Protect a ref, whether it exists or not, or raise what its changes take."""
        found = gates.protect(f"{namespace}/{name}", ref, body.approvals, peer_of(request))
        return PROTECTIONS.model_validate({"protections": found})

    @router.delete("/{ref}/protection", response_model=REQUEST)
    def unprotect_ref(
        namespace: Namespace, name: Name, ref: Ref, request: Request, response: Response
    ) -> BaseModel:
        """Protect a ref no longer, or ask for it: it takes what it takes to move the ref. 200 if it is done, 202 if it is pending."""
        model, peer = f"{namespace}/{name}", peer_of(request)
        return _answer(gates.ask(model, ref, REQUEST_UNPROTECT, peer, request_id=uuid.uuid4().hex), response)

    return router


def _answer(found: RefRequest, response: Response) -> BaseModel:
    response.status_code = 202 if found.pending else 200
    return REQUEST.model_validate(found)
