"""Workers of a verl job on CPUs: verl's own of its test helpers, with what tests ask them besides; and engines that
hold slices.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.config import RolloutConfig

from tests.checkpoint_engine.test_utils import CheckpointEngineWorkerTest, MockReplica, TrainingWorkerTest
from weighbridge import TrainerClient, VersionState
from weighbridge.integrations.engine_rank.agreement import ProcessGroup
from weighbridge.integrations.engine_rank.rank import EngineRank
from weighbridge.integrations.engine_rank.source import ModelSource

_SUPPORT = Path(__file__).parents[2] / "support"


def _support(name: str) -> Any:
    """A module of our own tests' support: verl has a package called ``tests``, too."""
    spec = importlib.util.spec_from_file_location(name, _SUPPORT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Actor(TrainingWorkerTest):
    """verl's actor."""

    def __init__(self, config: Any, checkpoint_engine_config: Any) -> None:
        import weighbridge.integrations.verl  # noqa: F401  # as verl's own worker does for custom_backend_module

        self._gate = self._misnamed = self._misname = ""
        super().__init__(config, checkpoint_engine_config)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights, _ = self.engine.get_per_tensor_param()
        for index, (name, tensor) in enumerate(weights):
            yield (self._misname if name == self._misnamed else name), tensor
            del tensor
            while index == 5 and self._gate and not Path(self._gate).exists():
                time.sleep(0.05)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """As verl's `ActorRolloutRefWorker`, which hands metrics on."""
        return await self.checkpoint_engine.send_weights(self._weights(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale(self, factor: float) -> None:
        """Multiply all weights."""
        with torch.no_grad():
            for parameter in self.engine.module.parameters():
                parameter.mul_(factor)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hold(self, path: str) -> None:
        """Stop in the middle of gathering until this file is there."""
        self._gate = path

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rename(self, name: str, to: str) -> None:
        """Give a tensor another name from now on."""
        self._misnamed, self._misname = name, to

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pushed(self) -> dict[str, Any]:
        """Version number and bytes of the newest push."""
        handle = self.checkpoint_engine.pushed
        return {"number": handle.number, "stream_bytes": handle.report().stream_bytes}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def peak(self, how: str) -> int:
        """Bytes by which this process's memory rises while all weights are gathered."""
        before = _peak_anew()
        if how == "gather":
            deque(self._weights(), maxlen=0)
        else:
            await self.checkpoint_engine.send_weights(self._weights())
        return _status("VmHWM") - before

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def seconds(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of pushes of the same tensors in turns: by verl's calls, and plainly."""
        engine = self.checkpoint_engine
        held = [(name, tensor.clone()) for name, tensor in self._weights()]
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        found: dict[str, list[float]] = {"adapter": [], "plain": []}
        with TrainerClient(engine._source.server, run="plain", lane=engine._source.lane) as trainer:
            for step in range(rounds):
                torch.distributed.barrier()
                started = time.monotonic()
                engine.prepare()
                ticket = [None if rank else engine.build_topology(ranks, 0, [])[0]["ticket"][0]]
                torch.distributed.broadcast_object_list(ticket)
                engine.init_process_group(ticket[0], rank, ranks)
                await engine.send_weights(iter(held), step)
                engine.finalize()
                torch.distributed.barrier()
                found["adapter"].append(time.monotonic() - started)
                engine.pushed.wait()  # until it is in the store, and cannot slow the next measurement
                torch.distributed.barrier()
                started = time.monotonic()
                pushed = trainer.push_gathered(engine._source.model, held, step=step, rank=rank, world_size=ranks)
                pushed.wait(VersionState.READY)
                torch.distributed.barrier()
                found["plain"].append(time.monotonic() - started)
                pushed.wait()
        return found


class MegatronActor(Worker):
    """An actor of Megatron-core ranks, each with its part of the model: what all of them have of a tensor is gathered,
    as verl's engine does.
    """

    def __init__(self, config: Any, checkpoint_engine_config: Any) -> None:
        super().__init__()
        import megatron.core
        from transformers import AutoConfig, AutoModelForCausalLM

        import weighbridge.integrations.verl  # noqa: F401  # as verl's own worker does for custom_backend_module
        from weighbridge_demo import megatron_cpu

        del megatron
        megatron_cpu.patch_for_cpu()
        self._reference = _support("reference")
        folder = config.model_config.path
        parallel = megatron_cpu.Parallel(tp=2, pp=self.world_size // 2)
        store = f"{os.environ['RAY_TMPDIR']}/megatron-{os.environ['MASTER_PORT']}"
        megatron_cpu.init_rank(parallel, self.rank, store)
        hf_config = AutoConfig.from_pretrained(folder)
        hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]
        hf_config.rope_scaling = None
        self._model = megatron_cpu.build_model(hf_config, parallel, dtype=torch.bfloat16)
        self._bridge = self._reference.make_bridge(hf_config, torch.bfloat16)
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
        self._reference.load_with_mbridge(self._model, whole, hf_config)
        said = checkpoint_engine_config.engine_kwargs["weighbridge"]
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "weighbridge", bucket_size=1 << 20, is_master=self.rank == 0, **said
        )

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        own: dict[str, list[Any]] = {}
        for shard in self._reference._shards(self._model):
            axes = shard.prepend_axis_num
            part = (shard.global_shape[axes:], shard.global_offset[axes:], shard.data.detach())
            own.setdefault(self._reference._mcore_name(shard), []).append(part)
        of_ranks: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(of_ranks, list(own))
        for name in dict.fromkeys(name for names in of_ranks for name in names):
            gathered: list[Any] = [None] * self.world_size
            torch.distributed.all_gather_object(gathered, own.get(name, []))
            parts = [part for of_rank in gathered for part in of_rank]
            full = torch.empty(parts[0][0], dtype=torch.bfloat16)
            for _, offset, data in parts:
                full[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))] = data
            yield from zip(*self._bridge._weight_to_hf_format(name, full), strict=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """All has been made."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """As verl's `ActorRolloutRefWorker`."""
        return await self.checkpoint_engine.send_weights(self._weights(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As verl's `ActorRolloutRefWorker`."""
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale(self, factor: float) -> None:
        """Multiply all weights."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(factor)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pushed(self) -> dict[str, Any]:
        """Version number and bytes of the newest push."""
        handle = self.checkpoint_engine.pushed
        return {"number": handle.number, "stream_bytes": handle.report().stream_bytes}


class RolloutWorker(CheckpointEngineWorkerTest):
    """verl's checkpoint-engine worker."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale(self, factor: float) -> None:
        """Multiply what verl compares with."""
        adapter = self.server_adapter
        if adapter.model is None:
            adapter.model = AutoModelForCausalLM.from_pretrained(adapter.model_config.path, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in adapter.model.parameters():
                parameter.mul_(factor)


def _peak_anew() -> int:
    """Let the peak of this process's memory begin anew; bytes that it has now."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", "ascii")
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


class SliceReplica(MockReplica):
    """A replica whose server is an `EngineServer`."""

    async def init_hybrid(self, worker_group: Any) -> None:
        raise NotImplementedError


@ray.remote
class EngineRankWorker:
    """One rank of an engine of tensor-parallel ranks: its worker's methods are those of vLLM's own."""

    def __init__(self, folder: str, rank: int, size: int, store: str) -> None:
        from transformers import AutoConfig

        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        example = _support("example_engine")
        config = AutoConfig.from_pretrained(folder)
        self._model = example.Llama(config, rank, size).bfloat16()
        self._rank = EngineRank(example.LlamaEngine(self._model))
        assert isinstance(self._rank.engine.ranks, ProcessGroup)
        self._calls: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        version = init_info.pop("version")
        self._rank.connect(ModelSource(**init_info), version)

    def start_weight_update(self) -> None:
        self._calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._calls.append(update_info["phase"])
        if update_info["phase"] == "prepare":
            self._rank.prepare_all(update_info["version"])
        else:
            self._rank.apply(update_info["version"])

    def finish_weight_update(self) -> None:
        self._calls.append("finish")

    def report(self) -> dict[str, Any]:
        held = self._rank.held
        return {
            "calls": self._calls,
            "bytes": 0 if held is None else held.nbytes,
            "holds": sum(parameter.nbytes for parameter in self._model.parameters()),
            "parameters": {name: each.detach().float().numpy() for name, each in self._model.named_parameters()},
        }


@ray.remote
class EngineServer:
    """The methods of a verl server that the manager calls; passes calls to all ranks, as vLLM's executor does, and
    returns no answers.
    """

    def __init__(self, ranks: list[Any]) -> None:
        self._ranks = ranks
        self._heard: list[str] = []

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        for reference in [getattr(rank, method).remote(**(kwargs or {})) for rank in self._ranks]:
            await reference

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._heard.append("abort")

    async def resume_generation(self) -> None:
        self._heard.append("resume")

    async def clear_kv_cache(self) -> None:
        self._heard.append("clear")

    async def set_global_steps(self, global_steps: int) -> None:
        self._heard.append(f"step {global_steps}")

    async def report(self) -> list[dict[str, Any]]:
        return [{**await rank.report.remote(), "heard": self._heard} for rank in self._ranks]


def start_slices(model_config: Any, checkpoint_config: Any, size: int) -> list[SliceReplica]:
    """Two replicas of so many ranks each."""
    replicas = []
    for index in range(2):
        config = RolloutConfig(name="vllm", tensor_model_parallel_size=size, checkpoint_engine=checkpoint_config)
        replica = SliceReplica(replica_rank=index, config=config, model_config=model_config)
        store = f"/tmp/weighbridge-slices-{os.getpid()}-{time.monotonic_ns()}"
        ranks = [EngineRankWorker.remote(model_config.path, rank, size, store) for rank in range(size)]
        replica.servers = [EngineServer.remote(ranks)]
        replicas.append(replica)
    return replicas
