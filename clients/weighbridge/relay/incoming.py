"""Versions that become folders: each version that a ref comes to name is placed under the name of its step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from weighbridge._clients.attempts import attempts
from weighbridge._clients.engine import EngineClient
from weighbridge._core.resources import REF_LIVE, Version
from weighbridge.errors import WeighbridgeError
from weighbridge.relay.places import StepPlaces
from weighbridge.relay.relayed import Relayed


class Incoming:
    """Places the versions of one ref as folders.

    Args:
        client: of the service.
        model: ``namespace/name``.
        places: where.
        ref: which ref to follow. Versions that it named in passing, while another one was being written, are passed by.
        retry_seconds: pause before a version is tried again, twice as long each time.
    """

    def __init__(
        self,
        client: EngineClient,
        model: str,
        places: StepPlaces,
        ref: str = REF_LIVE,
        *,
        retry_seconds: float = 2.0,
    ) -> None:
        self._client = client
        self._model = model
        self._places = places
        self._ref = ref
        self._retry_seconds = retry_seconds

    def run(self) -> Iterator[Relayed]:
        """Relay for ever. Gives the step that is there at the start, if it is the ref's, and then each that was placed, and each failure.

        Raises:
            FailedPrecondition: another process places folders there.
            NotFound: the model was deleted. One that is not registered yet is waited for.
        """
        with self._places.held():
            for version in self._client.watch(self._model, self._ref):
                yield from self._insist(version)

    def _insist(self, version: Version) -> Iterator[Relayed]:
        for _ in attempts(self._client, self._model, self._ref, version.number, self._retry_seconds):
            done = self.take(version)
            yield done
            if not done.error:
                return

    def take(self, version: Version) -> Relayed:
        """Place one version, unless it is there."""
        folder = str(self._places.names.path(self._places.root, version.step))
        label = f"{self._model}@{version.number}"

        def write(new: Path) -> None:
            self._client.export(self._model, version.number, new)

        started = time.monotonic()
        try:
            if self._places.label(version.step) == label:
                return Relayed(self._model, version.step, folder, version.number)
            self._places.put(version.step, label, write)
        except (WeighbridgeError, OSError) as error:
            return Relayed(self._model, version.step, folder, version.number, error=str(error))
        seconds = round(time.monotonic() - started, 3)
        return Relayed(self._model, version.step, folder, version.number, version.tensor_bytes, seconds)
