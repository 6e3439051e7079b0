"""A trainer that holds gathered tensors and sends them, by TRL's or vLLM's calls and plainly.

Run in TRL's environment, by `benchmarks.framework_updates`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightSource, WeightTransferTrainerFactory

from tests.support.jobs import serve
from weighbridge import TrainerClient, VersionState
from weighbridge._clients.push_handle import PushHandle
from weighbridge.integrations.trl import WeighbridgeTransfer
from weighbridge.integrations.vllm.trainer import WeighbridgeTrainerInitInfo


class Held(WeightSource):
    """Source of tensors that are in memory."""

    def __init__(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self._weights = weights

    def metadata(self) -> list[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights)


class Nobody:
    """Client of vLLM without an engine: neither way counts the time that engines take."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_: None


class Sender:
    """One trainer; its methods are the requests that it serves."""

    def seconds(self, how: str, file: str, said: dict[str, Any], rounds: int) -> dict[str, list[float]]:
        """Seconds of sends of the same tensors in turns: by the framework's calls, and plainly, until engines could
        pull them.
        """
        held = list(load_file(file).items())
        send, newest = _by_trl(held, said) if how == "trl" else _by_vllm(held, said)
        found: dict[str, list[float]] = {"adapter": [], "plain": []}
        with TrainerClient(said["server"], run="plain", lane=said["lane"]) as trainer:
            for step in range(rounds):
                started = time.monotonic()
                send()
                found["adapter"].append(time.monotonic() - started)
                newest().wait()  # the upload to the store must not slow the plain push
                started = time.monotonic()
                pushed = trainer.push_gathered(said["model"], held, step=step, rank=0, world_size=1)
                pushed.wait(VersionState.READY)
                found["plain"].append(time.monotonic() - started)
                pushed.wait()
        return found


def _by_trl(
    held: list[tuple[str, torch.Tensor]], said: dict[str, Any]
) -> tuple[Callable[[], None], Callable[[], PushHandle]]:
    transfer = WeighbridgeTransfer(urls=[], **said)
    transfer.init_weight_transfer()

    def send() -> None:
        transfer.pause()
        transfer.send_weights(iter(held))
        transfer.resume()

    return send, lambda: _pushed(transfer.pushed)


def _by_vllm(
    held: list[tuple[str, torch.Tensor]], said: dict[str, Any]
) -> tuple[Callable[[], None], Callable[[], PushHandle]]:
    engine = WeightTransferTrainerFactory.trainer_init(
        WeighbridgeTrainerInitInfo(rank=0, **said), client=Nobody(), source=Held(held)
    )
    return engine.send_weights, lambda: _pushed(engine.pushed)


def _pushed(handle: PushHandle | None) -> PushHandle:
    assert handle is not None
    return handle


if __name__ == "__main__":
    serve(Sender())
