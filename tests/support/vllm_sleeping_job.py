"""An engine of vLLM that sleeps while versions come: run in vLLM's environment, by `tests.engines.test_vllm_asleep`.

vLLM's core, executor and worker are real, in processes of their own. Sleep on a CPU takes no memory away, which is made
up in the worker: parameters say that they have none, and after level 2 they hold no numbers.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions below are called in the worker

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  # vLLM's CPU kernels want to be first
from safetensors.torch import load_file
from vllm import LLM, SamplingParams

from weighbridge import EngineClient, TrainerClient
from weighbridge.integrations.engine_rank.model import EngineAsleep
from weighbridge.integrations.vllm.colocated import ColocatedEngine


def take_memory(worker: Any, level: int) -> None:
    engine = worker.weight_transfer_engine.rank.engine

    def check_awake() -> None:
        raise EngineAsleep("the engine sleeps: made up", fix="wake it up")

    engine.check_awake = check_awake
    if level == 2:
        for parameter in engine.model.parameters():
            parameter.data.fill_(torch.nan)


def give_memory(worker: Any) -> None:
    vars(worker.weight_transfer_engine.rank.engine).pop("check_awake", None)


class Engine:
    """An `LLM`, with the operations of the test."""

    def __init__(self, server: str, model: str, prompt: str, tokens: int) -> None:
        self._prompt, self._tokens = prompt, tokens
        self.llm = LLM(
            model,
            load_format="weighbridge",
            model_loader_extra_config={"server": server, "version": "1"},
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=2,
            kv_cache_memory_bytes=16 << 20,
            gpu_memory_utilization=0.3,
        )
        self._core = self.llm.llm_engine.engine_core

    def sleep(self, level: int) -> None:
        self.llm.sleep(level)
        self.llm.collective_rpc(take_memory, args=(level,))

    def wake_up(self, *tags: str) -> str:
        try:
            self.wake(list(tags) or None)
        except Exception as error:
            return str(error)
        return ""

    def wake(self, tags: list[str] | None) -> None:
        self.llm.collective_rpc(give_memory)
        self.llm.wake_up(tags)

    def call(self, method: str, *arguments: str) -> Any:
        (found,) = self.llm.collective_rpc(method, args=arguments)
        return found

    def update(self, version: int) -> str:
        """Update by vLLM's own calls."""
        self.llm.start_weight_update()
        try:
            self.llm.update_weights({"update_info": {"version": version}})
        except Exception as error:
            return str(error)
        self.llm.finish_weight_update()
        return ""

    def when_asleep(self, said: str) -> None:
        self.llm.init_weight_transfer_engine({"init_info": {"when_asleep": said}})

    def paused(self) -> bool:
        return bool(self._core.call_utility("is_scheduler_paused"))

    def resume(self) -> None:
        self._core.call_utility("resume_scheduler")

    def says(self) -> str:
        """Greedy completion of the prompt."""
        (found,) = self.llm.generate(
            [self._prompt], SamplingParams(max_tokens=self._tokens, temperature=0), use_tqdm=False
        )
        return str(found.outputs[0].text).strip()

    def label(self) -> str:
        return str(self._core.call_utility("get_weight_version"))


class Llm:
    """The `LLM` of an engine, whose sleep is made up."""

    def __init__(self, engine: Engine) -> None:
        self.collective_rpc = engine.llm.collective_rpc
        self.update_weight_version = engine.llm.update_weight_version
        self._engine = engine

    def sleep(self, level: int) -> None:
        self._engine.sleep(level)

    def wake_up(self, tags: list[str]) -> None:
        self._engine.wake(tags)


def job(server: str, model: str, prompt: str, tokens: str, folder: str) -> dict[str, Any]:
    """Run the job; returns its observations by name."""
    engine = Engine(server, model, prompt, int(tokens))
    found: dict[str, Any] = {"first": engine.says()}
    engine.sleep(1)
    found["refused"] = engine.update(2)
    engine.wake_up()
    found["kept"] = [engine.says(), engine.call("weighbridge_status")["served"]]

    engine.when_asleep("wait")
    for level, version in ((1, 2), (2, 1)):
        engine.sleep(level)
        found[f"waits {level}"] = [engine.update(version), engine.call("weighbridge_status")["waiting"]]
        engine.resume()
        found[f"paused {level}"] = [engine.paused()]
        found[f"woken {level}"] = [engine.wake_up("weights"), engine.call("weighbridge_status")["served"]]
        found[f"paused {level}"].append(engine.paused())
        engine.wake_up("kv_cache")
        found[f"says {level}"] = [engine.paused(), engine.says(), engine.label()]

    engine.sleep(2)  # nothing waits: what it had comes back
    found["back"] = [engine.wake_up(), engine.says(), engine.label()]

    engine.sleep(2)  # or cannot come back
    engine.llm.collective_rpc(lose_service)
    found["none"] = [engine.wake_up(), engine.paused(), engine.call("weighbridge_status")["broken"]]
    engine.llm.collective_rpc(find_service)
    found["update"] = [engine.call("weighbridge_apply", "2")["failed"]]
    engine.resume()
    found["update"] += [engine.paused(), engine.says()]

    colocated = ColocatedEngine(Llm(engine), model, server)
    with TrainerClient(server) as trainer:
        colocated.sleep()
        push = partial(trainer.push_state_dict, model, load_file(f"{folder}/model.safetensors"), step=3)
        done = colocated.update(push, lambda: None)
    found["colocated"] = [done.version, engine.paused(), engine.says(), engine.label()]
    return found


def lose_service(worker: Any) -> None:
    rank = worker.weight_transfer_engine.rank
    rank.lost_clients = rank.clients
    rank.clients = {source: EngineClient("127.0.0.1:9", retry_seconds=0.2) for source in rank.clients}


def find_service(worker: Any) -> None:
    rank = worker.weight_transfer_engine.rank
    rank.clients = rank.lost_clients


if __name__ == "__main__":
    print("=" + json.dumps(job(*sys.argv[1:])), flush=True)
