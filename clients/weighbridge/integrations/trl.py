"""Weight transfer of TRL: each sync of an ``AsyncGRPOTrainer`` is a version, and the ranks of vLLM pull their own slices of it.

``AsyncGRPOTrainer(weight_transfer=WeighbridgeTransfer(...))``. TRL asks five methods of it and is not imported here.
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
from weighbridge.integrations.weight_updates import PluginSettings, Update, UpdateSender, taken_to_the_end

if TYPE_CHECKING:
    import torch


class WeighbridgeTransfer:
    """Brings the weights of TRL's main process to vLLM servers that have weighbridge's plug-in.

    TRL pauses its server before it gathers, and resumes it after the transfer, unless that has failed. Here servers generate until the version is
    complete and lies on their machines. `send_weights` pauses them for the last step only, and resumes them in any case in which their weights are
    whole: so TRL's own pauses are passed over.

    Args:
        model: ``namespace/name``.
        urls: of the vLLM server, as ``vllm_server_base_url``; of several; or none, if agents beside them follow ``live``.
        server: ``host:port`` of the service's gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        step: gives a version its step, as ``lambda: trainer.state.global_step``; by default how many were sent.
        pause_mode: treatment of requests under way: ``keep`` them, as TRL does, ``wait`` for them, or ``abort`` them.
        buffer_bytes: host memory for what is sent by gRPC.
        start_seconds: how long to wait for servers that are starting.
        settings: ``hf_dir``, ``dtype``, ``run``, ``cast``, ``lane``, ``engine_server``, ``retry_seconds``, ``stale_drafter``: as for `PluginSettings`.

    Attributes:
        pushed: the newest push.
        updated: what the newest update of the servers took.

    Raises:
        InvalidArgument: there is no such setting, lane or port.
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
        """Register the model, and see that all servers take updates.

        Raises:
            As `TrainerClient.register_model`, and:
            EngineFailed: a server does not answer, or not as vLLM does with ``VLLM_SERVER_DEV_MODE=1``.
            FailedPrecondition: it was not started for updates from weighbridge.
        """
        self._sender.register()
        for engine in self._engines.values():
            engine.wait_ready(self._start_seconds)
            engine.connect()

    def pause(self) -> None:
        """Nothing yet: servers generate while weights travel."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push the weights, and bring all servers to them.

        Args:
            iterator: name and whole tensor of each; taken to the end in any case, since other ranks gather them together with this one.

        Raises:
            As `TrainerClient.push_gathered`, and:
            VersionFailed: the version could not be completed; no server was touched.
            EngineFailed: a server could not be brought to the version, and keeps the weights that it has; says why.
        """
        with taken_to_the_end(iterator):
            sender, step = self._sender, None if self._step is None else self._step()
        self.pushed = sender.send(
            Update.new(),
            iterator,
            step=step,
            rank=0,
            ranks=1,
            buffer_bytes=self._buffer_bytes,
        )
        version = self.pushed.wait(VersionState.READY)
        self.updated = update(self._engines, version.number, label(version.model, version.number))

    def resume(self) -> None:
        """Nothing: servers go on as soon as they have the weights."""

    def destroy(self) -> None:
        """End the connection to the service."""
        sender = vars(self).pop("_sender", None)
        if sender is not None:
            sender.close()

    @cached_property
    def _sender(self) -> UpdateSender:
        return UpdateSender(self._settings)
