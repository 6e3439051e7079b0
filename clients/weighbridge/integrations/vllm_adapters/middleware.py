"""ASGI middleware of vLLM's API servers (``--middleware weighbridge.integrations.vllm_adapters.middleware.Adapters``).

If a request names an adapter, the middleware replaces the ``model`` in its body with one version of that adapter. vLLM
sees only this version, so its responses and its caches use it. The middleware runs after vLLM's own check of API keys:
a client without a key cannot make this server fetch anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from weighbridge.errors import FailedPrecondition, InvalidArgument, WeighbridgeError
from weighbridge.follow.vllm_adapters import ROUTE
from weighbridge.integrations.vllm_adapters.admission import Admission, Loaded
from weighbridge.integrations.vllm_adapters.names import Order
from weighbridge.integrations.vllm_adapters.settings import VARIABLE, AdapterSettings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_BEHIND = "AuthenticationMiddleware"
_HEADER = b"x-weighbridge-adapter"
_FAILED = (b'data: {"error"', b"event: error")
"""Prefixes of the event that reports the failure of a stream."""


class Adapters:
    """Resolves adapters, for the app behind it.

    Args:
        app: vLLM's app, with middleware that was added earlier.

    Raises:
        InvalidArgument: the adapters to serve are not configured.
    """

    def __init__(self, app: App) -> None:
        settings = AdapterSettings.of(os.environ)
        if settings is None:
            raise InvalidArgument(
                f"{VARIABLE} does not name the adapters that this server serves",
                fix=f"set it in the environment of vLLM, as in {VARIABLE}='acme/*'",
            )
        behind: Any = app
        while behind is not None and type(behind).__name__ != _BEHIND:
            behind = getattr(behind, "app", None)
        if behind is None:
            self.app: App = Resolving(app, settings)
        else:
            behind.app = Resolving(behind.app, settings)
            self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        await self.app(scope, receive, send)


class Resolving:
    """The middleware itself, in its final position.

    Args:
        app: the app that it wraps.
        settings: which adapters are served.
    """

    def __init__(self, app: App, settings: AdapterSettings) -> None:
        self.app = app
        self._settings = settings
        self._admission: Admission | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if _asks_route(scope):
            return await self._answer_route(scope, receive, send)
        if scope["type"] != "http" or scope.get("method") != "POST" or not _is_json(scope):
            return await self.app(scope, receive, send)
        body, more = await _read(receive)
        if body is None:  # the client has gone
            return None
        said = _parsed(body)
        name = said.get("model") if isinstance(said, dict) else None
        try:
            named = self._of(scope).names_adapter(name) if isinstance(name, str) and self._may_be(name) else None
            if named is None:
                return await self.app(scope, _Replay(body, more), send)
            async with self._of(scope).serving(named) as loaded:
                body = json.dumps({**said, "model": loaded.version.name}).encode()
                answer = _Answer(send, loaded, self._of(scope))
                await self.app(_with_length(scope, len(body)), _Replay(body, more), answer.send)
        except WeighbridgeError as error:
            await _refuse(send, error)
        return None

    async def _answer_route(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Load an adapter ahead of requests, unload one, or list the loaded ones."""
        body, _ = await _read(receive)
        if body is None:  # the client has gone
            return
        try:
            said = await (self._listed(scope) if scope["method"] == "GET" else self._ordered(scope, body))
        except WeighbridgeError as error:
            await _refuse(send, error)
        else:
            await _send_json(send, HTTPStatus.OK, json.dumps(said).encode())

    async def _listed(self, scope: MutableMapping[str, Any]) -> dict[str, Any]:
        admission = self._of(scope)
        state = await admission.engine_state()
        return {"base": state.base, "adapters": sorted(await admission.in_memory())}

    async def _ordered(self, scope: MutableMapping[str, Any], body: bytes) -> dict[str, Any]:
        said, admission = _parsed(body), self._of(scope)
        said = said if isinstance(said, dict) else {}
        name, unload = said.get("model"), said.get("unload", False)
        if not isinstance(name, str) or not isinstance(unload, bool):
            raise InvalidArgument(
                "the body is not a valid order",
                fix='send {"model": "acme/alice@live"}, or add "unload": true',
            )
        named = admission.names_adapter(name)
        if named is None:
            patterns = ", ".join(self._settings.patterns)
            raise InvalidArgument(
                f"{name} is not one of the adapters that this server serves",
                fix=f"name one of {patterns}, or change {VARIABLE} of the server",
            )
        if unload:
            gone, had = await admission.unload(named)
            return {"name": gone, "unloaded": had}
        loaded, had = await admission.load_ahead(named)
        version, nbytes = loaded.version, loaded.hold.nbytes
        return {
            "name": version.name,
            "base": version.base,
            "nbytes": nbytes,
            "way": "" if had else "files",
        }

    def _may_be(self, name: str) -> bool:
        return self._settings.serves(name.partition("@")[0])

    def _of(self, scope: MutableMapping[str, Any]) -> Admission:
        if self._admission is None:
            state = scope["app"].state
            self._admission = Admission(self._settings, state.engine_client, state.openai_serving_models, request_of())
        return self._admission


class _Answer:
    """A response of vLLM.

    Its beginning is held back until it is known that the engine did not refuse the adapter's base. If the engine ends a
    stream for that reason later, the last event of the stream reports it.
    """

    def __init__(self, send: Send, loaded: Loaded, admission: Admission) -> None:
        self._send, self._loaded, self._admission = send, loaded, admission
        self._start: Message | None = None
        self._replaced = False

    async def send(self, message: Message) -> None:
        if self._replaced:
            return
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", []), (_HEADER, self._loaded.version.name.encode())]
            self._start = {**message, "headers": headers}
            return
        start, self._start = self._start, None
        if start is not None:
            body = message.get("body", b"")
            if not body and message.get("more_body"):
                self._start = start
                return
            failed = start["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR or body.startswith(_FAILED)
            if failed and (refusal := await self._refusal()):
                self._replaced = True
                await _refuse(self._send, refusal)
                return
            await self._send(start)
        elif message.get("body", b"").startswith(_FAILED) and (refusal := await self._refusal()):
            message = {**message, "body": b"data: " + _said(refusal) + b"\n\n"}
        await self._send(message)

    async def _refusal(self) -> FailedPrecondition | None:
        """The error that replaces the engine's own; None if the engine's error is not about the base."""
        problem = await self._admission.base_changed(self._loaded)
        return FailedPrecondition(problem, fix="send the request again") if problem else None


class _Replay:
    """Replays a body that was already read, followed by later messages, such as a disconnect of the client."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            return await self._receive()
        return {"type": "http.request", "body": body, "more_body": False}


def request_of() -> Callable[[Order], Any]:
    """A function that converts an order to vLLM's request type."""
    from weighbridge.integrations.vllm_adapters.workers import lora_request

    return lora_request


async def _read(receive: Receive) -> tuple[bytes | None, Receive]:
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None, receive
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts), receive


def _asks_route(scope: MutableMapping[str, Any]) -> bool:
    if scope["type"] != "http" or scope.get("method") not in ("GET", "POST"):
        return False
    return bool(scope["path"].removeprefix(scope.get("root_path", "")) == ROUTE)


def _is_json(scope: MutableMapping[str, Any]) -> bool:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return bool(kinds) and b"json" in kinds[0].lower()


def _parsed(body: bytes) -> Any:
    """The body, if it is JSON that may name a model; vLLM decides whether it is valid."""
    if b'"model"' not in body:
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _with_length(scope: MutableMapping[str, Any], length: int) -> MutableMapping[str, Any]:
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


async def _refuse(send: Send, error: WeighbridgeError) -> None:
    """Respond with an error in vLLM's format."""
    await _send_json(send, error.http_status, _said(error))


async def _send_json(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _said(error: WeighbridgeError) -> bytes:
    said = {"message": str(error), "type": type(error).__name__, "param": "model", "code": error.http_status}
    return json.dumps({"error": said}).encode()
