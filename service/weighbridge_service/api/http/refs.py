"""Handwritten routes of requests to change protected refs, with their bodies; the other routes of refs are derived."""

from __future__ import annotations

import uuid
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from weighbridge._core.resources import REQUEST_DELETE, REQUEST_UNPROTECT, RefRequest
from weighbridge_service.api.http.callers import peer_of
from weighbridge_service.api.http.derived.schemas import In, answer_of
from weighbridge_service.api.http.parameters import Name, Namespace, Ref, VersionField
from weighbridge_service.service import Weighbridge
from weighbridge_storage.documents.entries import MAX_TEXT
from weighbridge_storage.documents.names import REQUEST_PATTERN

REQUEST = answer_of(RefRequest)


class RequestRefIn(In):
    """The requested change of a ref."""

    action: Literal["move", "delete"] = Field(
        "move", description="Whether to move the ref to a version or to delete it."
    )
    version: VersionField = Field("latest", description="The version that the ref is moved to.")
    note: str = Field("", description="A note that is kept with the request.", max_length=MAX_TEXT)
    request_id: str = Field(
        default_factory=lambda: uuid.uuid4().hex,
        description=(
            "Identifies the call; the same in each retry. The request has a different id, which the response contains."
        ),
        pattern=REQUEST_PATTERN,
    )


def refs_router(service: Weighbridge) -> APIRouter:
    """The routes.

    Args:
        service: the service.
    """
    router = APIRouter(prefix="/v1/models/{namespace}/{name}/refs", tags=["refs"])
    gates = service.gates

    @router.post("/{ref}/requests", response_model=REQUEST)
    def request_ref(
        namespace: Namespace, name: Name, ref: Ref, body: RequestRefIn, request: Request, response: Response
    ) -> BaseModel:
        """Change a tag, or request the change if it requires approval by other identities: 200 if it is done, 202 if it
        is pending.
        """
        model, peer, named = f"{namespace}/{name}", peer_of(request), body.request_id
        if body.action == REQUEST_DELETE:
            found = gates.ask(model, ref, REQUEST_DELETE, peer, request_id=named, note=body.note)
        else:
            _, found = gates.move(model, ref, body.version, peer, request_id=named, note=body.note)
        return _answer(found, response)

    @router.delete("/{ref}/protection", response_model=REQUEST)
    def unprotect_ref(namespace: Namespace, name: Name, ref: Ref, request: Request, response: Response) -> BaseModel:
        """Remove a ref's protection, or request its removal.

        It requires the same approvals as moving the ref: 200 if it is done, 202 if it is pending.
        """
        model, peer = f"{namespace}/{name}", peer_of(request)
        return _answer(gates.ask(model, ref, REQUEST_UNPROTECT, peer, request_id=uuid.uuid4().hex), response)

    return router


def _answer(found: RefRequest, response: Response) -> BaseModel:
    response.status_code = 202 if found.pending else 200
    return REQUEST.model_validate(found)
