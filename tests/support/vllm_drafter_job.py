"""An engine of vLLM that decodes speculatively while versions come: run in vLLM's environment, by
`tests.engines.test_vllm_drafters`.

vLLM's core, worker, drafter and counts of accepted tokens are real, in one process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  # vLLM's CPU kernels want to be first
from transformers import AutoConfig, Qwen2Config
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

from tests.support.vllm_sleeping_job import give_memory, take_memory
from weighbridge.errors import WeighbridgeError

AutoConfig.register("mimo", type("MiMoConfig", (Qwen2Config,), {"model_type": "mimo"}))
TOKENS = 24


class Engine:
    """An `LLM`, with the operations of the test."""

    def __init__(self, server: str, model: str, prompt: str, speculative: dict[str, Any], **extra: Any) -> None:
        self._prompt, self._seen = prompt, (0, 0)
        self.llm = LLM(
            model,
            load_format="weighbridge",
            model_loader_extra_config={"server": server, "version": "1", **extra},
            speculative_config=speculative,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=2,
            kv_cache_memory_bytes=16 << 20,
            gpu_memory_utilization=0.3,
            disable_log_stats=False,
        )

    def call(self, method: str, *arguments: str) -> Any:
        (found,) = self.llm.collective_rpc(method, args=arguments)
        return found

    def says(self) -> list[Any]:
        """Greedy completion of the prompt, the share of drafted tokens that was accepted, and the worker's ``served``
        and ``stale``.
        """
        (found,) = self.llm.generate(
            [self._prompt], SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True), use_tqdm=False
        )
        counts = {each.name: each.value for each in self.llm.get_metrics() if hasattr(each, "value")}
        drafted, accepted = (int(counts[f"vllm:spec_decode_num_{kind}_tokens"]) for kind in ("draft", "accepted"))
        before, self._seen = self._seen, (drafted, accepted)
        status = self.call("weighbridge_status")
        part = (accepted - before[1]) / (drafted - before[0])
        return [str(found.outputs[0].text).strip(), part, status["served"], status["stale"]]

    def update(self, version: int, draft: str = "") -> str:
        """Update by vLLM's own calls."""
        self.llm.start_weight_update()
        try:
            self.llm.update_weights({"update_info": {"version": version, "draft": draft}})
        except Exception as error:
            return str(error)
        self.llm.finish_weight_update()
        return ""


def in_step(server: str, model: str, prompt: str) -> dict[str, Any]:
    """Layers of multi-token prediction that are in the policy's versions."""
    engine = Engine(server, model, prompt, {"method": "mtp", "num_speculative_tokens": 1})
    found: dict[str, Any] = {"first": engine.says()}
    engine.call("weighbridge_connect", "{}")
    found["evidence 1"] = engine.call("weighbridge_evidence", "")["evidence"]
    found["updated"] = [engine.call("weighbridge_prepare", "2")["failed"], engine.update(2), engine.says()]
    found["evidence 2"] = engine.call("weighbridge_evidence", "")["evidence"]
    found["loaded again"] = [engine.call("weighbridge_compare_with_load")["proof"], engine.says()]
    found["undone"] = [engine.call("weighbridge_undo", "2")["failed"], engine.says()]
    engine.llm.init_weight_transfer_engine({"init_info": {"when_asleep": "wait"}})
    for level in (1, 2):
        engine.llm.sleep(level)
        engine.llm.collective_rpc(take_memory, args=(level,))
        waits = engine.update(2) if level == 1 else ""
        engine.llm.collective_rpc(give_memory)
        engine.llm.wake_up()
        found[f"woken {level}"] = [waits, engine.says()]
    found["spoilt"] = _spoilt(engine)
    return found


def _spoilt(engine: Engine) -> Any:
    """Evidence of an engine of which one number of the drafter is another one."""
    drafter = engine.llm.collective_rpc(_drafter)[0]
    with torch.no_grad():
        drafter.model.mtp_layers["2"].final_layernorm.weight[7] *= -1
    return engine.call("weighbridge_evidence", "")["evidence"]


def _drafter(worker: Any) -> Any:
    return worker.model_runner.drafter.model


def apart(server: str, model: str, prompt: str, drafter: str) -> dict[str, Any]:
    """A drafter from a folder, which the policy's versions have nothing for."""
    engine = Engine(server, model, prompt, {"method": "draft_model", "model": drafter, "num_speculative_tokens": 2})
    found: dict[str, Any] = {"first": engine.says(), "refused": engine.update(2), "kept": engine.says()}
    engine.llm.init_weight_transfer_engine({"init_info": {"stale_drafter": "allow"}})
    found["allowed"] = [engine.update(2), engine.says()]
    found["evidence"] = engine.call("weighbridge_evidence", "")["evidence"]
    found["back"] = [engine.update(1), engine.says()]
    return found


def own(server: str, model: str, prompt: str, draft: str, other: str) -> dict[str, Any]:
    """A drafter that is a model of the service, with versions of its own; and one that has other tensors than the
    engine's.
    """
    engine = Engine(server, model, prompt, {"method": "draft_model", "num_speculative_tokens": 2}, draft=f"{draft}@1")
    found: dict[str, Any] = {"first": engine.says(), "unnamed": engine.update(2)}
    found["stages"] = _refused_stages(server, model, draft)
    prepared = engine.call("weighbridge_prepare", "2", f"{draft}@2")["failed"]
    found["both"] = [prepared, engine.update(2, f"{draft}@2"), engine.says()]
    found["evidence"] = engine.call("weighbridge_evidence", "")["evidence"]
    found["loaded again"] = [engine.call("weighbridge_compare_with_load")["proof"], engine.says()]
    found["unfit"] = [engine.update(1, f"{other}@1"), engine.says()]
    found["undone"] = [engine.call("weighbridge_undo", "2", f"{draft}@2")["failed"], engine.says()]
    found["policy alone"] = [engine.update(2, f"{draft}@1"), engine.says()]
    found["drafter alone"] = [engine.update(2, f"{draft}@2"), engine.says()]
    engine.llm.init_weight_transfer_engine({"init_info": {"when_asleep": "wait"}})
    engine.llm.sleep(2)
    engine.llm.collective_rpc(take_memory, args=(2,))
    engine.llm.collective_rpc(give_memory)
    engine.llm.wake_up()
    found["woken"] = engine.says()
    return found


def _refused_stages(server: str, model: str, draft: str) -> str:
    try:
        EngineArgs(
            model,
            load_format="weighbridge",
            model_loader_extra_config={"server": server, "version": "1", "draft": f"{draft}@1"},
            speculative_config={"method": "draft_model", "num_speculative_tokens": 2},
            pipeline_parallel_size=2,
        )
    except WeighbridgeError as error:
        return str(error)
    return ""


def later(server: str, model: str, prompt: str, folder: str, draft: str) -> dict[str, Any]:
    """A drafter that the engine has from a folder, until a version of its own comes."""
    engine = Engine(server, model, prompt, {"method": "draft_model", "model": folder, "num_speculative_tokens": 2})
    found: dict[str, Any] = {"first": engine.says()}
    found["both"] = [engine.update(2, f"{draft}@2"), engine.says()]
    found["loaded again"] = engine.call("weighbridge_compare_with_load")["proof"]
    return found


if __name__ == "__main__":
    print("=" + json.dumps(globals()[sys.argv[1]](*sys.argv[2:])), flush=True)
