"""Driver of a vLLM server, over the routes that it has with ``VLLM_SERVER_DEV_MODE=1``."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, Literal

from weighbridge.errors import FailedPrecondition
from weighbridge.follow import heard
from weighbridge.follow.answers import EngineApi, NoRoute, understood
from weighbridge.follow.engines import (
    EngineFailed,
    Prepared,
    Ranks,
    Serving,
    check_same_ranks,
    serving_of,
    wait_prepared,
)
from weighbridge.follow.status import label as label_of

PauseMode = Literal["wait", "keep", "abort"]
_PREPARE_SECONDS = 3600.0
_LOOK_SECONDS = 0.5
_WORKERS = "/collective_rpc"
"""Route of calls that all workers answer."""
OTHER = "start it with VLLM_SERVER_DEV_MODE=1; if it is an SGLang, say so: --engine sglang"
"""What to do if a server lacks a route."""


class VllmServer:
    """One server, with all ranks of all engines behind it.

    Args:
        url: of the server, such as ``http://127.0.0.1:8000``.
        model: ``namespace/name`` at the service.
        server: the service's gRPC address as the engine's workers reach it.
        lane: how weights travel to them; None leaves what the engine was started with.
        pause_mode: what becomes of requests that are being answered: ``wait`` for them, ``keep`` them where they are, to go on
            with the new weights, or ``abort`` them.
        timeout: seconds that one call may take.
        reported: whether the agent reports to the service what the engine serves, which then does not report it itself.
    """

    def __init__(
        self,
        url: str,
        model: str,
        server: str,
        *,
        lane: str | None = None,
        pause_mode: PauseMode = "wait",
        timeout: float = 600.0,
        reported: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self._model = model
        more: dict[str, Any] = ({"lane": lane} if lane else {}) | ({"reported": True} if reported else {})
        self._init_info = {"server": server, "model": model, **more}
        self._pause_mode = pause_mode
        self._api = EngineApi(self.url, timeout, OTHER)
        self._told: Ranks = {}

    def wait_ready(self, seconds: float) -> None:
        """Return when the server answers.

        Raises:
            EngineFailed: it does not within so many seconds.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._api.call("/health")
            except EngineFailed:
                if time.monotonic() > deadline:
                    raise
            else:
                return
            time.sleep(_LOOK_SECONDS)

    def connect(self) -> None:
        """Tell all workers where versions come from; they find out what they take of one, if they do not know.

        Raises:
            FailedPrecondition: a worker cannot; or not all workers behind the server answer.
        """
        self._ask_workers("weighbridge_connect", json.dumps(self._init_info))

    def serving(self) -> Serving:
        """What all workers say they have."""
        return serving_of(self._ask_workers("weighbridge_status"), self._model)

    def prepare(self, version: int) -> Prepared:
        """Ask all workers to prepare, and wait until they have."""
        self._told = self._ask_workers("weighbridge_prepare", str(version))
        return wait_prepared(
            self._told,
            lambda: self._ask_workers("weighbridge_status"),
            self._model,
            version,
            _PREPARE_SECONDS,
        )

    def discard(self) -> None:
        """Ask all workers to give back what they have prepared."""
        self._ask_workers("weighbridge_discard")

    def pause(self) -> None:
        """Returns when nothing is being computed, and caches of the old weights are empty."""
        self._api.call(f"/pause?mode={self._pause_mode}", {})

    def apply(self, version: int, label: str) -> None:
        """Not in a session of vLLM's own: one that another agent has left open, or a worker that fails, would end it for all.

        Raises:
            FailedPrecondition: an engine could not take the version; the others have gone back, or the error says which one serves what.
        """
        answers = self._answers("weighbridge_apply", str(version))
        if heard.has_several(answers):  # which updates of two agents may have reached in different orders
            answers = self._answers("weighbridge_status")
        ranks = self._by_name(answers)
        if self._told:
            check_same_ranks(self._told, ranks)
        wanted = label_of(self._model, version)
        if any(status.served != wanted for status in ranks.values()):
            found = ", ".join(f"{name} {status.served or 'no version'}" for name, status in ranks.items())
            raise FailedPrecondition(
                f"not all ranks serve version {version}: {found}", fix="let one agent update an engine"
            )
        self.label(label)

    def resume(self) -> None:
        """Let it go on."""
        self._api.call("/resume", {})

    def label(self, label: str) -> None:
        """Set vLLM's ``weight_version``, of each engine. vLLM 0.24 has none."""
        with contextlib.suppress(NoRoute):
            self._api.call("/update_weight_version", {"new_version": label})

    def _ask_workers(self, method: str, *arguments: str) -> Ranks:
        """Statuses of all workers of all engines.

        Raises:
            FailedPrecondition: a worker could not do it, says why; or not all have answered.
        """
        return self._by_name(self._answers(method, *arguments))

    def _by_name(self, answers: heard.Answers) -> Ranks:
        with understood(self.url + _WORKERS):
            return heard.by_name(answers, self._count_workers)

    def _answers(self, method: str, *arguments: str) -> heard.Answers:
        said = self._api.call(_WORKERS, {"method": method, "args": arguments})
        with understood(self.url + _WORKERS):
            answers: heard.Answers = said.get("results", [])
            heard.check_done(answers)
        return answers

    def _count_workers(self) -> int | None:
        """Number of workers that vLLM has started, of all engines; None if it does not say."""
        with contextlib.suppress(NoRoute):
            said = self._api.call("/get_world_size")
            size = said.get("world_size") if isinstance(said, dict) else None
            return size if isinstance(size, int) else None
        return None
