"""A rank of a trainer that sends weights by vLLM's own calls, with FSDP2 over gloo.

Run in vLLM's environment, by `tests.engines.test_vllm_trainer`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)

from tests.support.jobs import serve
from weighbridge.integrations.vllm.trainer import WeighbridgeTrainerInitInfo


class Source(ModuleSource):
    """vLLM's own, which can stop in the middle, and misname a tensor."""

    rank = 0
    until = misnamed = ""
    is_unsure = False

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for index, (name, tensor) in enumerate(super().__iter__()):
            yield (f"{name}s" if name == self.misnamed else name), self.given(name, tensor)
            while index == 5 and self.until and not Path(self.until).exists():
                time.sleep(0.05)

    def given(self, _name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor

    def held_names(self) -> Any:
        if self.is_unsure:
            raise RuntimeError("what this rank holds is not known")
        return self.held()

    def held(self) -> Any:
        return super().held_names()


class Client(HTTPVLLMWeightSyncClient):
    """vLLM's own, which can lose the answer to the start of an update."""

    loses = False

    def start_weight_update(self, *arguments: Any) -> None:
        super().start_weight_update(*arguments)
        if self.loses:
            raise ConnectionError("the answer is lost")


class Stages(Source):
    """One of two pipeline stages: a rank holds every second layer; the first one holds all else."""

    def held(self) -> set[str]:
        return {meta.name for meta in self.metadata() if self._stage(meta.name) == self.rank}

    def given(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor if self._stage(name) == self.rank else None

    def _stage(self, name: str) -> int:
        parts = name.split(".")
        return int(parts[2]) % 2 if parts[1] == "layers" else 0


class Rank:
    """One rank; its methods are what it can be asked."""

    def start(self, rank: int, ranks: int, meeting: str, folder: str) -> None:
        """Build the model, and shard it over the ranks."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
        self._rank, self._ranks = rank, ranks
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)

    def connect(self, url: str, said: dict[str, Any], stages: bool, pushing: list[int] | None = None) -> None:
        """As a user of vLLM's factory writes it, with a group of the ranks that push, if it is asked for."""
        if pushing is not None:
            said = {**said, "group": dist.new_group(pushing, backend="gloo")}
        self._source = (Stages if stages else Source)(self._model)
        self._source.rank = self._rank
        self._client = Client(url)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            WeighbridgeTrainerInitInfo(rank=self._rank, **said),
            client=self._client,
            source=self._source,
        )

    def load(self, folder: str) -> None:
        """Take the weights of a folder: each rank its rows."""
        weights = load_file(Path(folder) / "model.safetensors")
        for name, parameter in self._model.named_parameters():
            local = parameter.to_local()
            rows = weights[name].chunk(self._ranks)
            if self._rank < len(rows):
                local.copy_(rows[self._rank])

    def hold(self, until: str) -> None:
        """Stop in the middle of the source until this file exists; an empty path ends that."""
        self._source.until = until

    def misname(self, name: str) -> None:
        """Give a tensor a wrong name; empty for none."""
        self._source.misnamed = name

    def forget(self, rank: int | None) -> None:
        """Let one rank not know what it holds; None for none."""
        self._source.is_unsure = rank == self._rank

    def lose(self, on: bool) -> None:
        """Lose the answers to starts of updates."""
        self._client.loses = on

    def send(self) -> int | None:
        """Send the weights; returns the number of bytes that this rank has pushed, or None if it has pushed none."""
        before = self._engine.pushed
        self._engine.send_weights()
        pushed = self._engine.pushed
        return None if pushed is before else int(pushed.report().stream_bytes)

    def end(self) -> None:
        """Shut it down."""
        self._engine.shutdown()


if __name__ == "__main__":
    with torch.no_grad():
        serve(Rank())
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit()
