"""Forms of pages: signing in and out, tags, approvals and exports.

Each form does the same as its API endpoint, and redirects to its page.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from weighbridge._core.operations.verbs import Verb
from weighbridge._core.resources import REQUEST_DELETE
from weighbridge.errors import InvalidArgument
from weighbridge_service.access.identities import PresentedCredentials
from weighbridge_service.api.http.callers import SHOWN, ask, peer_of
from weighbridge_service.api.http.pages.login import Sessions, forget, keep, session_in
from weighbridge_service.api.http.pages.page_route import ModelInPath, viewer_of
from weighbridge_service.api.http.pages.rendering import Renderer
from weighbridge_service.api.http.parameters import JobId, Number, Ref, RequestId
from weighbridge_service.api.http.threads import in_threads
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.service import Weighbridge
from weighbridge_storage.threads import ThreadPool

_MOST_FIELDS = 20
_AT_ONCE = 8
_LONGEST_TOKEN = 16_384
_Form = Mapping[str, str]


async def _form(request: Request) -> _Form:
    """The fields of a form. If several fields have the same name, the last one is used."""
    body = await request.body()
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError as error:
        raise InvalidArgument("the body is not a form of a page", fix="use the service's own pages") from error


Form = Annotated[_Form, Depends(_form)]


def add_actions(
    router: APIRouter, service: Weighbridge, exports: Exports, sessions: Sessions, renderer: Renderer
) -> None:
    """Add the routes of the forms to the router of pages."""
    acting = in_threads(ThreadPool("http-actions", _AT_ONCE))
    _add_login(router, service, sessions, renderer)
    of_model = "/models/{namespace}/{name}"

    @router.post(of_model + "/versions/{version}/approve")
    @acting
    def approve_version_form(model: ModelInPath, version: Number, form: Form, request: Request) -> Response:
        """Approve a held version."""
        by = peer_of(request).called("")
        service.gates.approve_version(model, version, by=by, note=form.get("note", ""))
        return _back(model, f"/versions/{version}" if form.get("to") == "version" else "")

    def move(request: Request, model: str, ref: str, form: _Form) -> Response:
        note, version, named = form.get("note", ""), form.get("version", ""), uuid.uuid4().hex
        service.gates.move(model, ref, version, peer_of(request), request_id=named, note=note)
        return _back(model, "#refs")

    @router.post(of_model + "/refs")
    @acting
    def new_ref_form(model: ModelInPath, form: Form, request: Request) -> Response:
        """Give a version the tag that the form names."""
        ref = form.get("ref", "")
        ask(request, Verb.TAG, model, ref)
        return move(request, model, ref, form)

    @router.post(of_model + "/refs/{ref}/move")
    @acting
    def request_ref_form(model: ModelInPath, ref: Ref, form: Form, request: Request) -> Response:
        """Move a tag, or request the move if the tag needs approvals."""
        return move(request, model, ref, form)

    @router.post(of_model + "/refs/{ref}/delete")
    @acting
    def delete_ref_form(model: ModelInPath, ref: Ref, form: Form, request: Request) -> Response:
        """Delete a tag, or request its deletion if the tag needs approvals."""
        note, named = form.get("note", ""), uuid.uuid4().hex
        service.gates.ask(model, ref, REQUEST_DELETE, peer_of(request), request_id=named, note=note)
        return _back(model, "#refs")

    @router.post(of_model + "/refs/{ref}/requests/{request_id}/approve")
    @acting
    def approve_ref_form(model: ModelInPath, ref: Ref, request_id: RequestId, form: Form, request: Request) -> Response:
        """Approve another identity's request to change a ref."""
        service.gates.approve_ref(model, ref, request_id, peer_of(request), note=form.get("note", ""))
        return _back(model, "#refs")

    @router.post(of_model + "/refs/{ref}/requests/{request_id}/withdraw")
    @acting
    def withdraw_ref_form(model: ModelInPath, ref: Ref, request_id: RequestId, request: Request) -> Response:
        """Withdraw a request to change a ref."""
        service.gates.withdraw_ref(model, ref, request_id, peer_of(request))
        return _back(model, "#refs")

    @router.post(of_model + "/exports")
    @acting
    def start_export_form(model: ModelInPath, form: Form, request: Request) -> Response:
        """Start an export, which writes a version into a folder on the service's machine."""
        folder, dtype = form.get("folder") or None, form.get("dtype") or None
        exports.start(model, form.get("version", ""), folder=folder, dtype=dtype, peer=peer_of(request))
        return _back(model, "#exports")

    @router.post("/exports/{job_id}/cancel")
    @acting
    def cancel_export_form(job_id: JobId, request: Request) -> Response:
        """Cancel an export."""
        ask(request, Verb.LOOK)
        job = exports.get(job_id)
        if not peer_of(request).sees(job.model):  # the same response as for a job that does not exist
            raise exports.unknown(job_id)
        ask(request, Verb.MANAGE, job.model)
        exports.cancel(job_id)
        return _back(job.model, "#exports")


def _add_login(router: APIRouter, service: Weighbridge, sessions: Sessions, renderer: Renderer) -> None:
    @router.get("/login")
    async def sign_in_page(request: Request) -> Response:
        """The sign-in form, in which the user enters a token."""
        return HTMLResponse(renderer.page("login", viewer_of(request), problem="", next="/"))

    @router.post("/login")
    async def sign_in(form: Form, request: Request) -> Response:
        """Begin a session."""
        token, following = form.get("token", "").strip(), _own_path(form.get("next", ""))
        if not service.access.knows_tokens or not 0 < len(token) <= _LONGEST_TOKEN:
            raise InvalidArgument(
                "the form has no token that this service could know",
                fix="enter a token that the service's policy knows",
            )
        authorization = f"Bearer {token}"
        identity = service.access.identify(PresentedCredentials(authorization))
        if identity.problem:
            problem = identity.problem
            page = renderer.page("login", viewer_of(request), problem=problem, next=following)
            return HTMLResponse(page, 401, {"WWW-Authenticate": "Bearer"})
        sessions.end(session_in(request))
        response = RedirectResponse(following, 303)
        keep(request, response, sessions.begin(authorization, identity.name))
        return response

    @router.post("/logout")
    async def sign_out(request: Request) -> Response:
        """End the session."""
        sessions.end(session_in(request))
        request.scope[SHOWN] = ""
        response = RedirectResponse("/login", 303)
        forget(request, response)
        return response


def _own_path(text: str) -> str:
    """``text`` if it is a path on this service, else ``/``, so that a form cannot redirect to another host."""
    plain = text.isascii() and text.isprintable() and "\\" not in text
    return text if plain and text.startswith("/") and not text.startswith("//") else "/"


def _back(model: str, where: str) -> Response:
    return RedirectResponse(f"/models/{model}{where}", 303)
