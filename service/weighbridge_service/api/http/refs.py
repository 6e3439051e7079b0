"""Routes of refs and of requests to change those that are protected, with their bodies."""

from __future__ import annotations

import uuid
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from weighbridge._core.resources import REQUEST_DELETE, REQUEST_UNPROTECT, RefRequest
from weighbridge_service.api.http.callers import peer_of
from weighbridge_service.api.http.parameters import Name, Namespace, Ref, RequestId
from weighbridge_service.api.http.resources import In, Out, VersionField, VersionOut
from weighbridge_service.service import Weighbridge
from weighbridge_storage.documents.entries import MAX_APPROVALS, MAX_TEXT
from weighbridge_storage.documents.names import REQUEST_PATTERN


class ProtectionOut(Out):
    """What it takes to change a protected ref: a scope that names it, and the approval of others."""

    ref: str = Field(description="The ref, whether it exists or not.", examples=["prod"])
    approvals: int = Field(description="Of how many identities besides the one that asks.")


class RefApprovalOut(Out):
    """The approval of a request by one identity."""

    by: str = Field(description="Which one.")
    time_ms: int = Field(description="Unix time in milliseconds.")
    note: str = Field(description="What they noted.")


class RefRequestOut(Out):
    """A change of a ref that was asked for, and what has become of it."""

    model: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    ref: str = Field(description="The ref.", examples=["prod"])
    action: str = Field(
        description="`move`, `delete`, `protect` or `unprotect`, or what a later release adds."
    )
    state: str = Field(
        description="`pending`, `done`, `withdrawn`, `superseded` by a newer one for the ref, `expired`, or what a later release adds."
    )
    version: int = Field(description="The number that the ref shall name; 0 if none.", examples=[17])
    request_id: str = Field(description="Who approves it names it by this.")
    by: str = Field(description="The identity that asks.")
    note: str = Field(description="What it noted.")
    ask_time_ms: int = Field(description="Unix time in milliseconds.")
    expire_time_ms: int = Field(description="Unix time in milliseconds.")
    close_time_ms: int = Field(description="When it ended; Unix time in milliseconds, 0 if it has not.")
    closed_by: str = Field(description="Whose call ended it; empty if that was time.")
    previous: int = Field(description="The number that the ref named before it was carried out; 0 if none.")
    approvals: list[RefApprovalOut] = Field(description="Those given so far.")
    missing: int = Field(description="How many more it takes.")


class RefsOut(Out):
    """The refs of a model."""

    refs: dict[str, int] = Field(
        description="Version number by ref. `live` and `latest` move by themselves; the others are tags.",
        examples=[{"latest": 17, "live": 18, "prod": 12}],
    )
    protections: list[ProtectionOut] = Field(description="Protected refs.")
    requests: list[RefRequestOut] = Field(
        description="To change protected refs: those that are pending, and the last ones that have ended, in the order of asking."
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


class ProtectionsOut(Out):
    """The protected refs of a model."""

    protections: list[ProtectionOut] = Field(description="By name.")


def refs_router(service: Weighbridge) -> APIRouter:
    """The routes.

    Args:
        service: whose refs they are.
    """
    router = APIRouter(prefix="/v1/models/{namespace}/{name}/refs", tags=["refs"])
    gates = service.gates

    @router.get("")
    def list_refs(namespace: Namespace, name: Name) -> RefsOut:
        """All refs of a model, which of them are protected, and what is asked for these."""
        model = f"{namespace}/{name}"
        return RefsOut.model_validate(
            {
                "refs": service.catalog.refs(model),
                "protections": gates.protections(model),
                "requests": gates.ref_requests(model),
            }
        )

    @router.put("/{ref}")
    def set_ref(namespace: Namespace, name: Name, ref: Ref, body: SetRefIn, request: Request) -> VersionOut:
        """Let a tag name a durable version; answers with that version. One that takes approvals is refused: `/requests` asks for it."""
        version, _ = gates.move(f"{namespace}/{name}", ref, body.version, peer_of(request))
        return VersionOut.model_validate(version)

    @router.delete("/{ref}", status_code=204)
    def delete_ref(namespace: Namespace, name: Name, ref: Ref, request: Request) -> None:
        """Take a tag away. One that takes approvals is refused: `/requests` asks for it."""
        gates.ask(f"{namespace}/{name}", ref, REQUEST_DELETE, peer_of(request))

    @router.post("/{ref}/requests")
    def request_ref(
        namespace: Namespace, name: Name, ref: Ref, body: RequestRefIn, request: Request, response: Response
    ) -> RefRequestOut:
        """Change a tag, or ask for it if that takes the approval of other identities: 200 if it is done, 202 if it is pending."""
        model, peer, named = f"{namespace}/{name}", peer_of(request), body.request_id
        if body.action == REQUEST_DELETE:
            found = gates.ask(model, ref, REQUEST_DELETE, peer, request_id=named, note=body.note)
        else:
            _, found = gates.move(model, ref, body.version, peer, request_id=named, note=body.note)
        return _answer(found, response)

    @router.post("/{ref}/requests/{request_id}/approve")
    def approve_ref(
        namespace: Namespace,
        name: Name,
        ref: Ref,
        request_id: RequestId,
        body: ApproveRefIn,
        request: Request,
        response: Response,
    ) -> RefRequestOut:
        """Approve a change that another identity has asked for: 200 if it is done with that, 202 if it takes more approvals."""
        model, peer = f"{namespace}/{name}", peer_of(request)
        return _answer(gates.approve_ref(model, ref, request_id, peer, note=body.note), response)

    @router.delete("/{ref}/requests/{request_id}")
    def withdraw_ref(
        namespace: Namespace, name: Name, ref: Ref, request_id: RequestId, request: Request
    ) -> RefRequestOut:
        """End a request without carrying it out."""
        found = gates.withdraw_ref(f"{namespace}/{name}", ref, request_id, peer_of(request))
        return RefRequestOut.model_validate(found)

    @router.put("/{ref}/protection")
    def protect_ref(
        namespace: Namespace, name: Name, ref: Ref, body: ProtectRefIn, request: Request
    ) -> ProtectionsOut:
        """Protect a ref, whether it exists or not, or raise what its changes take."""
        found = gates.protect(f"{namespace}/{name}", ref, body.approvals, peer_of(request))
        return ProtectionsOut.model_validate({"protections": found})

    @router.delete("/{ref}/protection")
    def unprotect_ref(
        namespace: Namespace, name: Name, ref: Ref, request: Request, response: Response
    ) -> RefRequestOut:
        """Protect a ref no longer, or ask for it: it takes what it takes to move the ref. 200 if it is done, 202 if it is pending."""
        model, peer = f"{namespace}/{name}", peer_of(request)
        return _answer(gates.ask(model, ref, REQUEST_UNPROTECT, peer, request_id=uuid.uuid4().hex), response)

    return router


def _answer(found: RefRequest, response: Response) -> RefRequestOut:
    response.status_code = 202 if found.pending else 200
    return RefRequestOut.model_validate(found)
