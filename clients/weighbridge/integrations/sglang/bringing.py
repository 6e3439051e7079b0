"""Pull of one rank of an engine: what it takes of a version, its bytes, and their way into the parameters.

The model's own loader says what the rank takes, once; from then on each version is one pull. All that can be wrong is found, and all
bytes are on this machine, before a parameter is touched.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import cast

import torch

from weighbridge import lazy
from weighbridge.engine import EngineClient
from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.sglang.configuration import configuration_of
from weighbridge.integrations.sglang.fitting import check_config, check_covered, check_tensors
from weighbridge.integrations.sglang.storageless import storageless, targets_of
from weighbridge.integrations.sglang.wanted import Wanted
from weighbridge.layouts import TensorSpec
from weighbridge.resources import Version
from weighbridge.slices import FullTensors

log = logging.getLogger(__name__)


class Incoming:
    """A version on its way to one rank.

    Attributes:
        version: which one.
        nbytes: how many bytes come.
    """

    def __init__(self, client: EngineClient, source: lazy.Source, recording: lazy.Recording) -> None:
        self.version = source.version
        self._client = client
        self._recording = recording
        self._update = recording.update(client, self.version.model, self.version.number)
        whole = {spec.name: spec for spec in source.specs if spec.name in recording.unrecorded}
        self.nbytes = self._update.nbytes + sum(spec.nbytes for spec in whole.values())
        self._whole = tuple(whole)
        self._rest: list[tuple[str, torch.Tensor]] = []

    def bring(self, *, pin: bool) -> None:
        """Bring all bytes to this machine. May run in another thread while the model serves.

        Args:
            pin: whether the model is on a GPU.

        Raises:
            WeighbridgeError: the service is gone, or the version is.
        """
        self._update.prepare(pin=pin)
        if self._whole:
            layout = FullTensors(self._whole)
            self._rest = list(self._client.pull(self.version.model, self.version.number, layout))

    def check(self, model: torch.nn.Module) -> None:
        """Refuse a model whose parameters do not lie as when the loader was recorded.

        Raises:
            LayoutError, FailedPrecondition: names the parameter.
        """
        targets = targets_of(model)
        for name in self._recording.targets:
            if name not in targets:
                raise FailedPrecondition(f"{name} is no parameter of this engine any more")
            self._recording.check_target(name, targets[name])

    def place(self, model: torch.nn.Module) -> None:
        """Put the version into the model's parameters.

        The loader runs over what could not be recorded, usually nothing, and in any case: some derive something from the weights in
        the end.
        """
        self._update.fill_all(targets_of(model))
        loader_of(model)(iter(self._rest))

    def close(self) -> None:
        """Give the memory back."""
        self._update.close()
        self._rest = []


class Rank:
    """One model in one process of an engine.

    Attributes:
        model: the model.
        served: the version in its parameters, if it came from the service.
        broken: why its parameters are of no version; empty if they are of one.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.served: Version | None = None
        self.broken = ""
        self.model = model
        self._clients: dict[Wanted, EngineClient] = {}
        self._specs: tuple[TensorSpec, ...] = ()
        self._configuration = ""
        self._recording: lazy.Recording | None = None

    def number(self, wanted: Wanted) -> int:
        """Which version a ref names now. A number needs no service."""
        if wanted.version.isdecimal():
            return int(wanted.version)
        return self._client(wanted).version(wanted.model, wanted.version).number

    def plan(self, wanted: Wanted, number: int) -> Incoming:
        """Find out what this rank takes of a version. Takes the time of one run of the loader if the version's tensors are new to it;
        not to be called while the model computes.

        Raises:
            FailedPrecondition: the version is of another model; names what differs.
            WeighbridgeError: there is no such version, or the service is gone.
            Exception: whatever the loader raises, when the version does not fit.
        """
        client = self._client(wanted)
        source = lazy.Source(client, wanted.model, number)
        self._check(client, source)
        return Incoming(client, source, self._recorded(source))

    def first_load(self, wanted: Wanted, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Load a version into a model that has no weights yet: straight into the parameters, as the bytes come.

        Yields:
            Names and tensors that the model's loader has to run for.
        """
        client = self._client(wanted)
        source = lazy.Source(client, wanted.model, number)
        self._check(client, source)
        rest: list[str] | None = None
        try:
            recording = self._recorded(source)
            rest = list(recording.unrecorded)
        except Exception as error:
            log.warning("%s is loaded tensor by tensor, it cannot be recorded: %s", source.version, error)
        if rest is not None:
            recording.update(client, wanted.model, number).fill_all(targets_of(self.model))
        self.served = source.version
        yield from source.tensors(rest)

    def put(self, incoming: Incoming) -> None:
        """Put a version that has been brought into the model."""
        self.served = None
        self.broken = f"{incoming.version} was applied in part"
        incoming.place(self.model)
        self.served, self.broken = incoming.version, ""
        incoming.close()

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on a GPU."""
        return any(tensor.is_cuda for tensor in itertools.islice(self.model.parameters(), 1))

    def _client(self, wanted: Wanted) -> EngineClient:
        place = Wanted(wanted.server, wanted.model, lane=wanted.lane, retry_seconds=wanted.retry_seconds)
        if place not in self._clients:
            self._clients[place] = EngineClient(
                wanted.server, lane=wanted.lane, retry_seconds=wanted.retry_seconds
            )
        return self._clients[place]

    def _check(self, client: EngineClient, source: lazy.Source) -> None:
        version = source.version
        engine = getattr(self.model, "config", None)
        config = client.model_files(version.model, version.number).get("config.json")
        if engine is not None and config is not None:
            check_config(engine, config, version)
        if self._specs:
            check_tensors(self._specs, source.specs, version)

    def _recorded(self, source: lazy.Source) -> lazy.Recording:
        configuration = configuration_of(self.model)
        if self._recording is None or (self._specs, self._configuration) != (source.specs, configuration):
            with storageless(self.model) as targets:
                found = lazy.remembered(source.specs, loader_of(self.model), targets, configuration)
                if not found.unrecorded:
                    check_covered(found.unwritten, dict(self.model.named_parameters()), source.version)
            self._recording, self._specs, self._configuration = found, source.specs, configuration
        return self._recording


def loader_of(model: torch.nn.Module) -> lazy.Load:
    """The model's own loader."""
    return cast("lazy.Load", model.load_weights)
