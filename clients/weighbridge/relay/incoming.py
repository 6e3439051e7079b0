"""Versions that become folders: each version that a ref names is written as a folder with the name of its step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from weighbridge._clients.attempts import attempts
from weighbridge._clients.engine import EngineClient
from weighbridge._core.resources import REF_LIVE, Version
from weighbridge.errors import WeighbridgeError
from weighbridge.relay.places import StepPlaces
from weighbridge.relay.relayed import Relayed


@dataclass(frozen=True)
class Incoming:
    """Places the versions of one ref as folders.

    Attributes:
        client: client of the service.
        model: ``namespace/name``.
        places: target of the folders.
        ref: ref to follow. Versions that it named only while another one was being written are skipped.
        retry_seconds: pause before a version is retried, twice as long each time.
    """

    client: EngineClient
    model: str
    places: StepPlaces
    ref: str = REF_LIVE
    _: KW_ONLY
    retry_seconds: float = 2.0

    def run(self) -> Iterator[Relayed]:
        """Relay until the process ends. Yields the step that is there at the start, if it is the ref's, then each that
        was placed, and each failure.

        Raises:
            FailedPrecondition: another process places folders there.
            NotFound: the model was deleted. A model that is not registered yet is waited for.
        """
        with self.places.held():
            for version in self.client.watch(self.model, self.ref):
                yield from self._insist(version)

    def _insist(self, version: Version) -> Iterator[Relayed]:
        for _ in attempts(self.client, self.model, self.ref, version.number, self.retry_seconds):
            done = self.take(version)
            yield done
            if not done.error:
                return

    def take(self, version: Version) -> Relayed:
        """Place one version, unless it is there already."""
        folder = str(self.places.names.path(self.places.root, version.step))
        label = f"{self.model}@{version.number}"

        def write(new: Path) -> None:
            self.client.export(self.model, version.number, new)

        started = time.monotonic()
        try:
            if self.places.label(version.step) == label:
                return Relayed(self.model, version.step, folder, version.number)
            self.places.put(version.step, label, write)
        except (WeighbridgeError, OSError) as error:
            return Relayed(self.model, version.step, folder, version.number, error=str(error))
        seconds = round(time.monotonic() - started, 3)
        return Relayed(self.model, version.step, folder, version.number, version.tensor_bytes, seconds)
