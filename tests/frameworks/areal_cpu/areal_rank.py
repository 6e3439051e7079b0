"""One rank of an AReaL job on CPUs: its own trainer with two FSDP2 ranks over gloo, and its own engine class for remote
SGLang servers. Asked over a pipe what it is to do.

Runs in AReaL's environment.
"""

from __future__ import annotations

import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from areal.api.cli_args import (
    ClusterSpecConfig,
    InferenceEngineConfig,
    NameResolveConfig,
    PPOActorConfig,
    PPOConfig,
    SGLangConfig,
    StatsLoggerConfig,
    TrainDatasetConfig,
)
from areal.utils import name_resolve

from weighbridge._clients.rank_stream import RankStream
from weighbridge._core.resources import VersionState
from weighbridge.integrations.areal.trainer import WeighbridgePPOTrainer

NAMED = {"experiment_name": "experiment", "trial_name": "trial"}


class Rank:
    """This rank; its methods are what it can be asked."""

    def start(self, folder: str, root: str) -> list[str]:
        """AReaL's trainer over the weights of a folder; its actor's class, and what that derives from.

        Engines are named by AREAL_LLM_SERVER_ADDRS.
        """
        cluster = ClusterSpecConfig(
            fileroot=root, name_resolve=NameResolveConfig(type="nfs", nfs_record_root=f"{root}/names")
        )
        name_resolve.reconfigure(cluster.name_resolve)
        config = PPOConfig(
            **NAMED,
            cluster=cluster,
            tokenizer_path=folder,
            actor=PPOActorConfig(
                **NAMED,
                path=folder,
                backend="fsdp:d2",
                attn_impl="sdpa",
                optimizer=None,
                weight_update_mode="disk",
                kl_ctl=0.0,
            ),
            rollout=InferenceEngineConfig(
                **NAMED,
                fileroot=root,
                backend="sglang:d2",
                tokenizer_path=folder,
                setup_timeout=60.0,
                request_timeout=60.0,
                request_retries=1,
                pause_grace_period=0.0,
                consumer_batch_size=2,
                max_concurrent_rollouts=2,
            ),
            train_dataset=TrainDatasetConfig(path="none", type="rl", batch_size=2, num_workers=0),
            stats_logger=StatsLoggerConfig(**NAMED, fileroot=root),
        )
        config.saver.experiment_name = config.evaluator.experiment_name = config.recover.experiment_name = "experiment"
        config.saver.trial_name = config.evaluator.trial_name = config.recover.trial_name = "trial"
        config.saver.fileroot = config.evaluator.fileroot = config.recover.fileroot = root
        # the arguments of a server that AReaL would launch: they depend on the installed SGLang, which is missing here
        SGLangConfig.build_args = staticmethod(lambda **_: {})
        self._trainer = WeighbridgePPOTrainer(config, train_dataset=[{"prompt": "a"}] * 4)
        return [each.__name__ for each in type(self._trainer.actor).__mro__[:3]]

    def scale(self, factor: float) -> None:
        """Multiply all weights."""
        with torch.no_grad():
            for parameter in self._trainer.actor.model.parameters():
                parameter.mul_(factor)

    def update(self, version: int) -> int:
        """An update as the trainer's loop makes it; the number of what was pushed."""
        meta = self._trainer.weight_update_meta.with_version(version)
        self._trainer.actor.update_weights(meta)
        self._trainer.actor.set_version(version)
        self._trainer.rollout.set_version(version)
        return int(self._trainer.actor.pushed.number)

    def pushed(self) -> dict[str, Any]:
        """Bytes and lane of the newest push of this rank."""
        report = self._trainer.actor.pushed.report()
        return {"stream_bytes": report.stream_bytes, "lane": report.lane}

    def spoil(self, name: str) -> None:
        """Give this rank's model a tensor that the registered one has not."""
        self._trainer.actor.model.register_parameter(name, torch.nn.Parameter(torch.ones(2)))

    def mend(self, name: str) -> None:
        """Take it away."""
        delattr(self._trainer.actor.model, name)

    def hold_pushes(self, path: str) -> None:
        """Let this rank stop before it seals what it has pushed, until this file is there.

        Before that, ranks wait for each other.
        """
        seal = RankStream.seal

        def held(stream: RankStream, *said: Any) -> None:
            Path(f"{path}.waiting").touch()
            while not Path(path).exists():
                time.sleep(0.02)
            seal(stream, *said)

        RankStream.seal = held  # type: ignore[method-assign]

    def seconds(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of pushes of the same tensors in turns: by the adapter, and plainly."""
        actor = self._trainer.actor
        found: dict[str, list[float]] = {"adapter": [], "plain": []}
        source = actor._settings.source
        for step in range(rounds):
            dist.barrier()
            started = time.monotonic()
            actor.push_version(self._trainer.weight_update_meta.with_version(step))
            dist.barrier()
            found["adapter"].append(time.monotonic() - started)
            actor.pushed.wait()
            dist.barrier()
            started = time.monotonic()
            pushed = actor._client.push_state_dict(source.model, actor.model, step=step, run="plain")
            pushed.wait(VersionState.READY)
            dist.barrier()
            found["plain"].append(time.monotonic() - started)
            pushed.wait()
        return found


def main() -> None:
    """Answer until the pipe is closed."""
    rank = Rank()
    with Connection(int(sys.argv[1])) as link:
        while True:
            try:
                name, arguments = link.recv()
            except EOFError:
                break
            try:
                link.send((True, getattr(rank, name)(**arguments)))
            except Exception as error:
                traceback.print_exc()
                link.send((False, str(error)))


if __name__ == "__main__":
    main()
