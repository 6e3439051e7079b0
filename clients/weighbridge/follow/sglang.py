"""An SGLang server, over its own HTTP API. What it serves is what its ranks say, not what was asked of it."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weighbridge._transport.proxies import opener
from weighbridge.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from weighbridge.follow.engines import Prepared, Serving, serving_of, wait_prepared
from weighbridge.follow.status import Status
from weighbridge.follow.wanted import DISCARD, LOAD_FORMAT, PREPARE, REPORTED, STATUS, Wanted

PAUSE_MODES = ("retract", "in_place", "abort")


class _NoRoute(FailedPrecondition):
    """The server has no such route."""


class SglangServer:
    """A running SGLang server with weighbridge installed next to it.

    Args:
        url: of its HTTP API, such as ``http://127.0.0.1:30000``.
        service: ``host:port`` of the service's gRPC face, as the engine reaches it.
        model: ``namespace/name``.
        api_key: the server's admin key, if it wants one.
        lane: how weights travel to the engine's ranks, as for `weighbridge.Client`; None leaves it to their environment.
        pause_mode: what happens to requests under way. ``retract`` lets them wait, and computes what they have so far again, by the new
            weights; ``in_place`` lets them go on from what the old weights have computed; ``abort`` ends them.
        timeout: seconds for each call; for `prepare`, for all of it.
        reported: whether the agent reports to the service what the engine serves, which then does not report it itself.
    """

    def __init__(
        self,
        url: str,
        service: str,
        model: str,
        *,
        api_key: str = "",
        lane: str | None = None,
        pause_mode: str = "retract",
        timeout: float = 600.0,
        reported: bool = False,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidArgument(f"{url!r} is no HTTP address", fix="as in http://127.0.0.1:30000")
        if pause_mode not in PAUSE_MODES:
            raise InvalidArgument(
                f"there is no pause mode {pause_mode!r}", fix=f"one of {', '.join(PAUSE_MODES)}"
            )
        self.url = url.rstrip("/")
        self.model = model
        self.pause_mode = pause_mode
        self.timeout = timeout
        self._status = f"{STATUS} {REPORTED}" if reported else STATUS
        self._requests: dict[int, dict[str, Any]] = {}
        self._wanted = Wanted(service, model, lane=lane)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def connect(self) -> None:
        """Nothing has to be told before an update; raises `FailedPrecondition` if the server has no plug-in."""
        self._ranks()

    def serving(self) -> Serving:
        """What all ranks say they have.

        Raises:
            FailedPrecondition: the server has no plug-in.
            Unavailable: it cannot be reached.
        """
        return serving_of(self._ranks(), self.model)

    def prepare(self, version: int) -> Prepared:
        """Bring a version to the engine's machines while it serves; returns when it is there.

        Raises:
            FailedPrecondition: a rank cannot take it, or its bytes did not come; says why.
            DeadlineExceeded: not in time.
            Unavailable: the server cannot be reached.
        """
        self._request(version)
        self._control(f"{PREPARE} {self._order(version)}")
        return wait_prepared(self._ranks, self.model, version, self.timeout)

    def discard(self) -> None:
        """Let the engine forget what has been prepared."""
        self._control(DISCARD)

    def pause(self) -> None:
        """Stop generating. Requests that come meanwhile wait."""
        self._call("/pause_generation", {"mode": self.pause_mode})

    def apply(self, version: int, label: str) -> None:
        """Put a version into the parameters of all ranks, best while the engine is paused. Answers name it from then on, as their
        ``weight_version``, and prefixes that the old weights have computed are forgotten.

        Raises:
            FailedPrecondition: the engine refused, and keeps what it has; or another update is under way.
            Unavailable: the server cannot be reached.
        """
        request = {**self._request(version), "weight_version": label}
        with self._session():
            self._call("/update_weights_from_tensor", request)

    def resume(self) -> None:
        """Go on generating."""
        self._call("/continue_generation", {"torch_empty_cache": False})

    def label(self, label: str) -> None:
        """Set SGLang's ``weight_version``; what is being answered goes on."""
        self._call("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    @contextmanager
    def _session(self) -> Iterator[None]:
        """SGLang's own session around an update, for as long as it lasts. Releases up to 0.5.15 have none."""
        try:
            self._call("/begin_weight_update", {"selector": "target"})
        except _NoRoute:
            yield
            return
        try:
            yield
        finally:
            self._call("/end_weight_update", {})

    def _request(self, version: int) -> dict[str, Any]:
        """The request that brings a version. To make it can take seconds (torch is imported), so it is made before the engine is paused."""
        if version not in self._requests:
            payload = _payload(self._order(version))
            self._requests = {
                version: {
                    "serialized_named_tensors": [payload] * int(self._call("/server_info")["tp_size"]),
                    "load_format": LOAD_FORMAT,
                    "selector": "target",
                    "disable_draft_model": True,  # how releases without a selector say it
                    "flush_cache": self.pause_mode != "in_place",
                }
            }
        return self._requests[version]

    def _order(self, version: int) -> str:
        wanted = self._wanted
        return Wanted(wanted.server, wanted.model, str(version), wanted.lane, wanted.retry_seconds).to_json()

    def _ranks(self) -> list[Status]:
        return [Status.from_json(found) for found in self._control(self._status)["ranks"]]

    def _control(self, action: str) -> Any:
        message = self._call("/weights_checker", {"action": action})["message"]
        try:
            return json.loads(message)
        except ValueError as error:
            raise FailedPrecondition(
                f"{self.url} does not know {action.partition(' ')[0]}",
                fix="install weighbridge in the environment of SGLang, and start the server again",
            ) from error

    def _call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)  # noqa: S310  # checked above
        try:
            with opener(self.url).open(request, timeout=self.timeout) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            said = error.read()
            if error.code == 404:
                raise _NoRoute(
                    f"the engine at {self.url} has no {path}",
                    fix="if it is a vLLM, say so: --engine vllm; else install a release of SGLang that weighbridge supports",
                ) from error
            raise FailedPrecondition(f"{self.url}{path}: {_message(said) or error}") from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.url}{path} did not answer within {self.timeout} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self.url}{path} cannot be reached: {error}") from error
        return json.loads(text)


def _message(body: bytes) -> str:
    """What an answer says that is an error."""
    try:
        found = json.loads(body)
        return str(found.get("message") or found.get("error", {}).get("message", ""))
    except (ValueError, AttributeError):
        return body.decode(errors="replace")[:500]


def _payload(text: str) -> str:
    """A text as a named tensor, as SGLang takes it: pickled, of nothing but types that it lets through."""
    import pickle

    import torch

    return base64.b64encode(pickle.dumps([(text, torch.empty(0))])).decode()
