"""Weight transfer of TRL: each sync of an ``AsyncGRPOTrainer`` is a version, and the ranks of vLLM pull their own
slices of it.

``AsyncGRPOTrainer(weight_transfer=WeighbridgeTransfer(...))``. TRL calls five of its methods. This module does not
import TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from weighbridge._clients.push_handle import PushHandle
from weighbridge._core.resources import VersionState
from weighbridge._transport.addresses import Addresses
from weighbridge.follow.status import label
from weighbridge.follow.updates import Updated, update
from weighbridge.follow.vllm import PauseMode, VllmServer
from weighbridge.integrations.weight_updates import PluginSettings, UpdateSender, WeightUpdate, taken_to_the_end

if TYPE_CHECKING:
    import torch


class WeighbridgeTransfer:
    """Transfers the weights of TRL's main process to vLLM servers that have weighbridge's plug-in.

    TRL pauses its server before it gathers, and resumes it after the transfer unless that failed. Here servers generate
    until the version is complete and on their machines. `send_weights` pauses them only for the last step, and resumes
    them whenever their weights are consistent. TRL's own pauses are ignored.

    Args:
        model: ``namespace/name``.
        urls: URL of the vLLM server, as ``vllm_server_base_url``; or several URLs; or none, if agents of the servers
            follow ``live``.
        server: ``host:port`` of the service's gRPC endpoint; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        step: returns the step of a version, such as ``lambda: trainer.state.global_step``; by default the number of
            versions sent.
        pause_mode: treatment of running requests: ``keep`` them, as TRL does, ``wait`` for them, or ``abort`` them.
        buffer_bytes: host memory for data that is sent over gRPC.
        start_seconds: how long to wait for servers that are starting.
        settings: ``hf_dir``, ``dtype``, ``run``, ``cast``, ``lane``, ``engine_server``, ``retry_seconds``,
            ``stale_drafter``: as for `PluginSettings`.

    Attributes:
        pushed: the newest push.
        updated: measurements of the newest update of the servers.

    Raises:
        InvalidArgument: a setting, lane or port does not exist.
    """

    def __init__(
        self,
        model: str,
        urls: str | list[str] = "http://127.0.0.1:8000",
        server: str | None = None,
        *,
        step: Callable[[], int] | None = None,
        pause_mode: PauseMode = "keep",
        buffer_bytes: int = 256 << 20,
        start_seconds: float = 600.0,
        **settings: Any,
    ) -> None:
        self.pushed: PushHandle | None = None
        self.updated: Updated | None = None
        said = {"model": model, "server": server, **settings}
        self._settings = PluginSettings.read(said, type(self).__name__)
        self._step = step
        self._buffer_bytes = buffer_bytes
        self._start_seconds = start_seconds
        there = str(Addresses.of(self._settings.of_engines.server))
        self._engines = {
            url: VllmServer(
                url,
                model,
                there,
                lane=self._settings.lane,
                pause_mode=pause_mode,
                stale_drafter=self._settings.drafter,
            )
            for url in ([urls] if isinstance(urls, str) else urls)
        }

    def init_weight_transfer(self) -> None:
        """Register the model, and check that all servers accept updates.

        Raises:
            As `TrainerClient.register_model`, and:
            EngineFailed: a server does not respond, or does not respond like vLLM with ``VLLM_SERVER_DEV_MODE=1``.
            FailedPrecondition: a server was not started for updates from weighbridge.
        """
        self._sender.register()
        for engine in self._engines.values():
            engine.wait_ready(self._start_seconds)
            engine.connect()

    def pause(self) -> None:
        """Does nothing: servers generate while weights are transferred."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push the weights, and update all servers to them.

        Args:
            iterator: name and whole tensor of each. Always consumed to the end, because other ranks gather them
                together with this one.

        Raises:
            As `TrainerClient.push_gathered`, and:
            VersionFailed: the version could not be completed; no server was changed.
            EngineFailed: a server could not be updated, and keeps its weights; states why.
        """
        with taken_to_the_end(iterator):
            sender, step = self._sender, None if self._step is None else self._step()
        self.pushed = sender.send(
            WeightUpdate.new(),
            iterator,
            step=step,
            rank=0,
            ranks=1,
            buffer_bytes=self._buffer_bytes,
        )
        version = self.pushed.wait(VersionState.READY)
        self.updated = update(self._engines, version.number, label(version.model, version.number))

    def resume(self) -> None:
        """Does nothing: servers resume as soon as they have the weights."""

    def destroy(self) -> None:
        """End the connection to the service."""
        sender = vars(self).pop("_sender", None)
        if sender is not None:
            sender.close()

    @cached_property
    def _sender(self) -> UpdateSender:
        return UpdateSender(self._settings)
