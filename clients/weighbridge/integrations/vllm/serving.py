"""Versions of a rank of vLLM: the one that it serves, the one that it prepares, and the way from one to the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger

from weighbridge import lazy
from weighbridge.engine import EngineClient
from weighbridge.errors import FailedPrecondition, WeighbridgeError
from weighbridge.integrations.vllm import layers, origins, ranks, reading
from weighbridge.integrations.vllm.applying import Applier
from weighbridge.integrations.vllm.settings import Settings
from weighbridge.slices import FullTensors

logger = init_logger(f"vllm.plugins.{__name__}")


class Preparation:
    """A version on its way to this rank's host memory, in a thread of its own: the engine goes on serving.

    Attributes:
        version: its number.
        nbytes: bytes that come, as soon as that is known.
        seconds: how long it took, in the end.
        problem: why it failed; empty if it did not.
    """

    def __init__(self, client: EngineClient, model: str, version: int, recording: lazy.Recording) -> None:
        self.version = version
        self.nbytes = 0
        self.seconds = 0.0
        self.problem = ""
        self.rest: list[tuple[str, torch.Tensor]] = []
        self.update: lazy.Update | None = None
        self._plan = (client, model, recording)
        self._lock = threading.Lock()
        self._closed = self._done = False
        self._thread = threading.Thread(target=self._run, name=f"prepare {model}@{version}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, model, recording = self._plan
        started = time.monotonic()
        try:
            update = recording.update(client, model, self.version)
            self.nbytes = update.nbytes
            update.prepare(pin=torch.cuda.is_available())
            if recording.unrecorded:
                pull = client.pull(model, self.version, FullTensors(tuple(recording.unrecorded)))
                self.nbytes += pull.nbytes
                self.rest = list(pull)
            self.update = update
        except Exception as error:
            self.problem = _told(error)
        self.seconds = time.monotonic() - started
        with self._lock:
            self._done = True
            if self._closed:
                self._free()

    @property
    def running(self) -> bool:
        """Whether it has not come to an end."""
        return not self._done

    def wait(self) -> None:
        """Return when it has come to an end, whichever."""
        self._thread.join()

    def close(self) -> None:
        """Give the memory back: at once, or when what is under way has come to an end."""
        with self._lock:
            self._closed = True
            if self._done:
                self._free()

    def _free(self) -> None:
        if self.update is not None:
            self.update.close()
        self.update, self.rest = None, []


class ServingRank:
    """What updates do to the model of one worker. Called by vLLM in the worker's own thread.

    Args:
        model: vLLM's, after loading.
        vllm_config: the engine's configuration.
        tell: how ranks hear of each other.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, tell: ranks.Share = ranks.share) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._tell = tell
        self._applier = Applier(model, vllm_config.model_config)
        self._origin = origins.of(model)
        self._client: EngineClient | None = None
        self._settings = self._origin.settings if self._origin else None
        self._recording = self._origin.recording if self._origin else None
        self._serving = self._origin.version if self._origin else None
        self._broken = ""
        self._preparation: Preparation | None = None

    def settings_for(self, model: str | None, server: str | None, lane: str | None) -> Settings | None:
        """What is known of where updates come from, with what is said of it now; None if no model is known."""
        known = self._settings
        if model is not None and (known is None or known.model != model):
            known = Settings(model)
        return known and replace(known, server=server or known.server, lane=lane or known.lane)

    def connect(self, settings: Settings | None) -> None:
        """Say which service and which model updates come from; None keeps where the weights have come from.

        Raises:
            FailedPrecondition: the engine has not been told, or is not configured for this model.
            NotFound: the service has no such model.
        """
        settings = settings or self._settings
        if settings is None:
            raise FailedPrecondition(
                "this engine was not loaded from weighbridge, and does not know which model it serves",
                fix="name server and model in init_info",
            )
        if self._client is not None and settings == self._settings:
            return
        client = settings.connect()
        try:
            recording, serving = self._recording, self._serving
            if self._settings is not None and settings.model != self._settings.model:
                recording, serving = None, None
            if recording is None:
                recording = self._record(client, settings)
        except BaseException:
            client.close()
            raise
        self.close()
        self._client, self._settings = client, settings
        self._recording, self._serving = recording, serving

    def _record(self, client: EngineClient, settings: Settings) -> lazy.Recording:
        from vllm.config import set_current_vllm_config

        config = self._vllm_config.model_config
        source = lazy.Source(client, settings.model, settings.version)
        known = reading.configuration_of(self._vllm_config)
        with set_current_vllm_config(self._vllm_config), layers.without_storage(self._model, config):
            return reading.record(self._model, config, client, source, known)

    def prepare(self, version: int) -> None:
        """Begin to bring a version to this machine; `status` tells when it is there.

        Raises:
            FailedPrecondition: another one is being prepared, there is no connection, or vLLM has wrapped layers since they were loaded.
        """
        client, settings, recording = self._connected()
        there = self._preparation
        if there is not None and there.version == version and not there.problem:
            return
        if there is not None and there.running:
            raise FailedPrecondition(
                f"version {there.version} is being prepared",
                fix="wait for it, or let one agent update this engine",
            )
        self._applier.check(recording)
        self.discard()
        self._preparation = Preparation(client, settings.model, version, recording)

    def all_prepare(self, version: int) -> None:
        """`prepare`, on all ranks or with an error on all.

        Raises:
            AllRanksFailed: says which ranks could not even begin.
        """
        ranks.all_must(
            f"version {version} is not being prepared", _problem_of(lambda: self.prepare(version)), self._tell
        )

    def all_connect(self, settings: Settings | None) -> None:
        """`connect`, on all ranks or with an error on all.

        Raises:
            AllRanksFailed: says which ranks could not.
        """
        ranks.all_must("the engine is not connected", _problem_of(lambda: self.connect(settings)), self._tell)

    def discard(self) -> None:
        """Give back the memory of what was prepared."""
        there, self._preparation = self._preparation, None
        if there is not None:
            there.close()

    def apply(self, version: int) -> None:
        """Bring a version to the parameters; prepares it if nobody has. All ranks have to call it, with the same number.

        No rank touches a parameter before all have all bytes. If one fails after that, all go back to the version they had.

        Raises:
            AllRanksFailed: says what went wrong on which ranks, and which version the engine has.
        """
        self._prepare_and_wait(version)
        had = self._serving
        try:
            self._fill(f"version {version} could not be applied")
        except ranks.AllRanksFailed as error:
            self._go_back(had, version, error)
        self._serving, self._broken = version, ""

    def _prepare_and_wait(self, version: int) -> None:
        problem = _problem_of(lambda: self.prepare(version))
        there = self._preparation
        if there is not None and not problem:
            there.wait()
            problem = there.problem
        try:
            ranks.all_must(
                f"version {version} was not prepared, and the engine keeps {self._named(self._serving)}",
                problem,
                self._tell,
            )
        except ranks.AllRanksFailed:
            if self._preparation is not None and self._preparation.version == version:
                self.discard()
            raise

    def _fill(self, what: str) -> None:
        """Apply what was prepared, and hear whether all ranks could."""
        problem = ""
        there, recording = self._preparation, self._recording
        try:
            if there is None or there.update is None or recording is None:
                raise FailedPrecondition("nothing was prepared")
            self._applier.apply(there.update, recording, there.rest)
        except Exception as error:
            logger.exception("an update failed")
            problem = _told(error)
        self.discard()
        ranks.all_must(what, problem, self._tell)

    def _go_back(self, had: int | None, version: int, error: ranks.AllRanksFailed) -> None:
        """Bring back the version that the engine had, and raise."""
        self._serving = None
        details = error.details
        try:
            ranks.all_must(
                "there is no way back", "" if had else "which version it had is not known", self._tell
            )
            if had is not None:
                self._prepare_and_wait(had)
                self._fill(f"version {had} could not be brought back")
        except ranks.AllRanksFailed as second:
            self._broken = f"{error}\n{second}"
            raise ranks.AllRanksFailed(
                f"version {version} was applied in part, and the engine serves no version",
                details=[*details, second.message, *second.details],
                fix="update it to any version, or start it again",
            ) from error
        self._serving = had
        raise ranks.AllRanksFailed(
            f"{error.message}; the engine is back at version {had}", details=details
        ) from error

    def status(self) -> dict[str, Any]:
        """What this rank serves and prepares, as JSON values."""
        there = self._preparation
        running = there is not None and there.running
        return {
            "model": self._settings.model if self._settings else None,
            "serving": self._serving,
            "broken": self._broken,
            "prepared": there.version if there and not running and not there.problem else None,
            "preparing": there.version if there and running else None,
            "problem": there.problem if there else "",
            "nbytes": there.nbytes if there else 0,
            "seconds": there.seconds if there else 0.0,
        }

    def _connected(self) -> tuple[EngineClient, Settings, lazy.Recording]:
        if self._client is None or self._settings is None or self._recording is None:
            self.connect(None)
        assert self._client is not None and self._settings is not None and self._recording is not None  # noqa: S101, PT018
        return self._client, self._settings, self._recording

    @staticmethod
    def _named(version: int | None) -> str:
        return "the weights it has" if version is None else f"version {version}"

    def close(self) -> None:
        """End the connection, and give memory back."""
        self.discard()
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _problem_of(do: Callable[[], object]) -> str:
    try:
        do()
    except Exception as error:  # whichever: the other ranks wait to hear of it
        return _told(error)
    return ""


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, WeighbridgeError) else f"{type(error).__name__}: {error}"
