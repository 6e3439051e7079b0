"""``python -m benchmarks.vllm_process JOB``: one rank of vLLM whose model is updated in two ways; runs in vLLM's own
environment.

JOB is a `Job` as JSON. The last line of standard output has the seconds, as JSON: for each way and each round, how long
bringing the bytes took, while an engine could have served, and how long the model was not to be used.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"


@dataclass(frozen=True)
class Job:
    """Specification of a rank's measurement.

    Attributes:
        server: address of the service, which has versions 1 and 2 of `model`.
        model: name of the model at the service.
        folder: folder of the model's config.json.
        lane: lane of the weights.
        ranks: number of tensor-parallel ranks.
        rank: this rank, from 0.
        meeting: path of a file by which the ranks find each other.
        rounds: number of rounds that count.
    """

    server: str
    model: str
    folder: str
    lane: str
    ranks: int
    rank: int
    meeting: str
    rounds: int


def main(job: Job) -> dict[str, list[float]]:
    """Update the model in turn by its loader on whole tensors, and by what was recorded of that loader."""
    import torch
    import vllm.v1.worker.cpu.shm  # noqa: F401  # vLLM's CPU kernels want to be first
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from weighbridge import EngineClient
    from weighbridge.integrations.vllm import layers
    from weighbridge.integrations.vllm.loader import WeighbridgeLoader
    from weighbridge.integrations.vllm.model import vllm_rank
    from weighbridge.integrations.vllm.settings import Settings

    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // job.ranks, 1))
    os.environ["VLLM_DIST_IDENT"] = os.path.basename(job.meeting)  # as vLLM's CPU worker does
    settings = Settings(job.model, job.server, job.lane, version="1")
    config = EngineArgs(
        model=job.folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        tensor_parallel_size=job.ranks,
        distributed_executor_backend="mp",
        enforce_eager=True,
        max_model_len=32,
        load_format="weighbridge",
        model_loader_extra_config=settings.write(),
    ).create_engine_config()
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(torch.bfloat16),
        torch.device("cpu"),
    ):
        init_distributed_environment(job.ranks, job.rank, f"file://{job.meeting}", job.rank, "gloo")
        initialize_model_parallel(job.ranks)
        model = initialize_model(vllm_config=config)
        WeighbridgeLoader(config.load_config).load_weights(model, config.model_config)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))

    serving = vllm_rank(model, config)
    serving.connect(settings.source)
    client = EngineClient(job.server, lane=job.lane)
    found: dict[str, list[float]] = {}

    def timed(name: str, do: Callable[[], Any]) -> Any:
        torch.distributed.barrier()
        started = time.monotonic()
        result = do()
        torch.distributed.barrier()
        found.setdefault(name, []).append(time.monotonic() - started)
        return result

    def pulled(version: int) -> list[tuple[str, torch.Tensor]]:
        return list(client.pull(job.model, version))

    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        with set_current_vllm_config(config), layers.reloading(model, config.model_config):
            model.load_weights(iter(tensors))

    def prepare(version: int) -> None:
        serving.prepare(version)
        while serving.status().preparing:
            time.sleep(0.001)

    for number in range(job.rounds + 1):
        version = 1 + number % 2
        tensors = timed("loader bytes", partial(pulled, version))
        timed("loader pause", partial(load, tensors))
        del tensors
        timed("recorded bytes", partial(prepare, 3 - version))
        timed("recorded pause", partial(serving.apply, 3 - version))
    serving.close()
    client.close()
    return {name: seconds[1:] for name, seconds in found.items()}  # the first round warms up


if __name__ == "__main__":
    print("\n" + json.dumps(main(Job(**json.loads(sys.argv[1])))))
