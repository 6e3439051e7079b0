"""A NeMo-RL job on CPUs: its own synchronizer, worker groups and workers on Ray. Asked over a pipe what it is to do.

Runs in an environment of its own, with NeMo-RL's sources in PYTHONPATH.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES, RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.vllm import vllm_generation
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.weight_sync import create_weight_synchronizer
from transformers import AutoTokenizer

from tests.support.jobs import serve

POLICY, ROLLOUT = "nemo_rl_workers.PolicyWorker", "nemo_rl_workers.RolloutWorker"
for worker in (POLICY, ROLLOUT):
    ACTOR_ENVIRONMENT_REGISTRY[worker] = PY_EXECUTABLES.SYSTEM
vllm_generation.resolve_generation_worker_cls = lambda *_: ROLLOUT
AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]


class PolicyGroup(Policy):
    """NeMo-RL's policy, as far as its synchronizer asks it."""

    def __init__(self, cluster: RayVirtualCluster, config: dict[str, Any], tokenizer: Any) -> None:
        workers = cluster.world_size()
        self.worker_group = RayWorkerGroup(
            cluster,
            RayWorkerBuilder(POLICY, config, tokenizer=tokenizer, init_optimizer=False, init_reference_model=False),
            name_prefix="policy",
            sharding_annotations=NamedSharding(np.arange(workers).reshape(1, workers, 1, 1), AXES),
        )


class Job:
    """One job; its methods are what it can be asked."""

    _synchronizer: Any = None

    def start(self, folder: str, generation: dict[str, Any], workers: int) -> None:
        """So many policy workers with FSDP2, and as many rollouts, each a vLLM.

        Args:
            folder: of the model.
            generation: a user's ``policy.generation``.
            workers: of each kind.
        """
        ray.init(num_cpus=32, num_gpus=8, include_dashboard=False)
        config = _policy_config(folder, generation)
        clusters = [RayVirtualCluster([workers], num_gpus_per_node=workers, name=name) for name in ("train", "rollout")]
        self._policy = PolicyGroup(clusters[0], config, AutoTokenizer.from_pretrained(folder))
        self._generation = vllm_generation.VllmGeneration(clusters[1], config["generation"])

    def connect(self, generation: dict[str, Any]) -> None:
        """Make a synchronizer between them from a user's ``policy.generation``, and shut down the previous one."""
        if self._synchronizer is not None:
            self._synchronizer.shutdown()
        self._generation.cfg.update(generation)
        self._synchronizer = create_weight_synchronizer(self._policy, self._generation, "vllm", colocated=False)
        self._synchronizer.init_communicator()

    def sync(self) -> None:
        """A refit."""
        self._synchronizer.sync_weights()

    def is_stale(self) -> bool:
        """Whether NeMo-RL takes the rollouts' weights for old."""
        return bool(self._synchronizer.is_stale)

    def of_policy(self, method: str, **named: Any) -> list[Any]:
        """The results of a method on all policy workers."""
        return ray.get([getattr(each, method).remote(**named) for each in self._policy.worker_group.workers])

    def of_rollouts(self, method: str, **named: Any) -> list[Any]:
        """The results of a method on all rollouts."""
        workers = self._generation.worker_group.workers
        return ray.get([getattr(each, method).remote(**named) for each in workers])


def _policy_config(folder: str, generation: dict[str, Any]) -> dict[str, Any]:
    """The part of NeMo-RL's configuration that its workers read."""
    return {
        "model_name": folder,
        "precision": "float32",
        "offload_optimizer_for_logprob": False,
        "max_grad_norm": 1.0,
        "sequence_packing": {"enabled": False},
        "dtensor_cfg": {
            "cpu_offload": False,
            "sequence_parallel": False,
            "activation_checkpointing": False,
            "tensor_parallel_size": 1,
            "context_parallel_size": 1,
            "custom_parallel_plan": None,
        },
        "generation": {
            "model_name": folder,
            "max_new_tokens": 8,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "val_temperature": 1.0,
            "val_top_p": 1.0,
            "val_top_k": None,
            "stop_token_ids": None,
            "stop_strings": None,
            "vllm_cfg": {
                "precision": "float32",
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "expert_parallel_size": 1,
                "gpu_memory_utilization": 0.3,
                "max_model_len": 64,
                "async_engine": False,
                "skip_tokenizer_init": False,
                "load_format": "dummy",
                "enforce_eager": True,
                "enable_prefix_caching": False,
            },
            "vllm_kwargs": {},
            **generation,
        },
    }


if __name__ == "__main__":
    serve(Job())
