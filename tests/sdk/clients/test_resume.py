"""Are streams that break resumed where they broke, with the right bytes in the end?

Between client and service stands a proxy that cuts the connection again and again.
"""

from __future__ import annotations

import random
import selectors
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TensorParallel, TrainerClient
from weighbridge._core import striping

MODEL = "tests/large"


class CuttingProxy:
    """Forwards connections to a port; cuts each after a random number of bytes, so many times in all."""

    def __init__(self, target: int, *, cuts: int, between: tuple[int, int], seed: int) -> None:
        self.cuts = 0
        self._most = cuts
        self._between = between
        self._target = target
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        left = self._random.randint(*self._between) if self.cuts < self._most else 1 << 60
        with (
            client,
            socket.create_connection(("127.0.0.1", self._target)) as server,
            selectors.DefaultSelector() as waiting,
        ):
            waiting.register(client, selectors.EVENT_READ, server)
            waiting.register(server, selectors.EVENT_READ, client)
            while left > 0:
                for key, _ in waiting.select():
                    data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not data:
                        return
                    key.data.sendall(data)
                    left -= len(data)
            self.cuts += 1

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A model of 17 MB: some twenty messages."""
    model = tiny_model(tiny_config("qwen3", tied=False, vocab_size=32_768), seed=9)
    folder = tmp_path_factory.mktemp("large")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, large: tuple[Path, PreTrainedModel]) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        TrainerClient(running.address).register_model(MODEL, large[0])
        yield running


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_push_and_a_pull_survive_cut_connections(
    service: RunningService,
    large: tuple[Path, PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    connections: int,
) -> None:
    monkeypatch.setattr(striping, "_LEAST_BYTES", 1 << 20)
    folder, model = large
    proxy = CuttingProxy(service.grpc.port, cuts=4, between=(1 << 20, 6 << 20), seed=seed)
    with TrainerClient(proxy.address, connections=connections, lane="grpc") as trainer:
        version = trainer.push_folder(MODEL, folder, step=seed).wait(timeout=90)
    assert proxy.cuts >= 2
    state = model.state_dict()
    with EngineClient(service.address, lane="grpc") as engine:
        assert not engine.verify(MODEL, version.number).problems
        for name, tensor in engine.pull(MODEL, version.number):
            assert torch.equal(tensor, state[name]), name

    proxy.cuts = 0
    with EngineClient(proxy.address, connections=connections, lane="grpc") as engine:
        pulled = dict(engine.pull(MODEL, version.number))
        slices = [dict(engine.pull(MODEL, version.number, TensorParallel(2, rank))) for rank in range(2)]
    proxy.close()
    assert proxy.cuts >= 2
    for name, tensor in pulled.items():
        assert torch.equal(tensor, state[name]), name
    assert torch.equal(torch.cat([s["lm_head.weight"] for s in slices]), state["lm_head.weight"])


def test_a_restore_over_several_cut_connections_brings_what_one_whole_one_brings(
    service: RunningService, large: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(striping, "_LEAST_BYTES", 1 << 20)
    TrainerClient(service.address, lane="grpc").push_folder(MODEL, large[0], step=9).wait(timeout=90)
    proxy = CuttingProxy(service.grpc.port, cuts=4, between=(1 << 20, 4 << 20), seed=4)
    restored = []
    for address, connections in ((service.address, 1), (proxy.address, 3)):
        with TrainerClient(address, connections=connections, lane="grpc") as trainer:
            layout = trainer.describe_shards(MODEL)
            tensors = [torch.zeros(p.shard.box.extent) for p in layout.placements]
            for _ in trainer.restore_layout(MODEL, layout, tensors.__getitem__):
                pass
            restored.append(tensors)
    proxy.close()
    assert proxy.cuts >= 2
    assert sum(t.numel() for t in restored[0]) == sum(t.numel() for t in large[1].parameters())
    for one, several in zip(*restored, strict=True):
        assert torch.equal(one, several)
