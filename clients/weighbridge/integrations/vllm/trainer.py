"""Trainer's side of vLLM's weight transfer: `send_weights` makes a version, which engines with the weight-transfer engine ``weighbridge`` pull.

Importing it registers it with vLLM's ``WeightTransferTrainerFactory``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weighbridge._clients.push_handle import PushHandle
from weighbridge._core.resources import VersionState
from weighbridge.errors import InvalidArgument, WeighbridgeError
from weighbridge.follow.engines import EngineFailed
from weighbridge.follow.status import label
from weighbridge.follow.vllm import refused
from weighbridge.integrations.engine_rank.source import ModelSource
from weighbridge.integrations.vllm import NAME
from weighbridge.integrations.weight_updates import UpdateSender


@dataclass
class WeighbridgeTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is seen as untyped
    """Where weights go, and which rank of the trainer this is (``rank``, by keyword).

    Attributes:
        model: ``namespace/name``.
        server: ``host:port`` of the service's gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        engine_server: how engines reach the service, if not as the trainer does.
        hf_dir: folder with ``config.json`` and the tokenizer, by which rank 0 registers the model; not needed if it is registered.
        dtype: that it is registered with, such as ``bf16``; by default what the folder says.
        run: name of the training run; part of the versions' lineage.
        ranks: how many of the trainer's ranks push. With 1 rank 0 does, and what the others gather is let go. With all of them each pushes its
            share of each tensor, which is then given to all; or the tensors that the source's ``held_names`` names.
        cast: which casts to the registered dtype a push may make, as for `TrainerClient.push_state_dict`.
        lane: how weights travel: ``grpc``, ``local`` or ``auto``.
        buffer_bytes: host memory of a rank that what goes by gRPC may take.
        retry_seconds: how long to keep trying when the service cannot be reached.
    """

    backend: ClassVar[str] = NAME

    model: str
    server: str | None = None
    engine_server: str | None = None
    hf_dir: str | None = None
    dtype: str = ""
    run: str = "default"
    ranks: int = 1
    cast: str = "allow"
    lane: str | None = None
    buffer_bytes: int = 256 << 20
    retry_seconds: float = 60.0


class WeighbridgeTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]  # vLLM is seen as untyped
    """One rank of a trainer.

    Args:
        init_info: says where weights go.
        client: of the engines, as vLLM's; called by rank 0.
        source: the weights.

    Attributes:
        pushed: this rank's newest push.
    """

    init_info_cls = WeighbridgeTrainerInitInfo

    def __init__(self, init_info: WeighbridgeTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.pushed: PushHandle | None = None
        self._info = init_info
        where = ModelSource(init_info.model, init_info.server, init_info.lane, init_info.retry_seconds)
        self._sender = UpdateSender(where, run=init_info.run, cast=init_info.cast)

    @classmethod
    def trainer_init(
        cls, init_info: WeighbridgeTrainerInitInfo, *, client: Any, source: Any = None
    ) -> WeighbridgeTrainerEngine:
        """Register the model, if that is asked for, and tell the engines where versions will come from.

        Raises:
            InvalidArgument: there is no source.
            EngineFailed: the engines refuse it; says why.
            NotFound: the model is not registered.
        """
        if source is None:
            raise InvalidArgument(
                f"the backend {NAME} sends a WeightSource", fix="give one: source=ModuleSource(model)"
            )
        engine = cls(init_info, client=client, source=source)
        if init_info.is_sender:
            if init_info.hf_dir is not None:
                engine._sender.register(init_info.hf_dir, init_info.dtype)
            said = {
                "server": init_info.engine_server or init_info.server,
                "model": init_info.model,
                "lane": init_info.lane,
            }
            engine._ask(
                "init_weight_transfer_engine", {key: each for key, each in said.items() if each is not None}
            )
        elif init_info.rank < init_info.ranks:
            engine._sender.wait_registered(init_info.retry_seconds)
        return engine

    def send_weights(self) -> None:
        """Push the source's weights as a version; rank 0 then brings the engines to exactly that one.

        The source is gone through to its end in any case, since ranks gather together.

        Raises:
            As `TrainerClient.push_gathered`, and:
            VersionFailed: the version could not be completed; no engine was touched.
            EngineFailed: the engines could not be brought to it, and keep the weights that they have; says why.
        """
        info = self._info
        if info.rank >= info.ranks:
            for _ in self.source:
                pass
            return
        self.pushed = self._sender.send(
            None,
            self._given(),
            step=None,
            rank=info.rank,
            ranks=info.ranks,
            buffer_bytes=info.buffer_bytes,
            held=None if info.ranks == 1 else self.source.held_names(),
        )
        version = self.pushed.wait(VersionState.READY)
        if self.is_sender:
            self._bring(version.number)

    def shutdown(self) -> None:
        """End the connection to the service."""
        self._sender.close()

    def _given(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that this rank is given; in the place of those that others hold, a source has None."""
        for name, tensor in self.source:
            if tensor is not None:
                yield name, tensor

    def _bring(self, number: int) -> None:
        self._ask("start_weight_update")
        try:
            self._ask("update_weights", {"version": number})
        except BaseException:
            with suppress(EngineFailed):  # vLLM wants it before the next update, and raises
                self._ask("finish_weight_update")
            raise
        self._ask("finish_weight_update", label(self._info.model, number))

    def _ask(self, method: str, *arguments: Any) -> None:
        call: Callable[..., None] = getattr(self.client, method)
        with _said_by_engines(method):
            call(*arguments)


@contextmanager
def _said_by_engines(method: str) -> Iterator[None]:
    """Raise what a client raises with the engine's own words: of an answer over HTTP it has only the status."""
    try:
        yield
    except WeighbridgeError:
        raise
    except Exception as error:
        answer = getattr(error, "response", None)
        if answer is not None:
            raise refused(f"/{method}", answer.status_code, answer.content) from error
        raise EngineFailed(f"the engine did not answer {method}: {error}") from error


if NAME not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(NAME, WeighbridgeTrainerEngine)
