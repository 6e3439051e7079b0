"""Engine of `benchmarks.pause`: a vLLM in one process, with the plug-in, that takes versions and reports checksums of
its parameters.

Run by vLLM's Python. Each line of its standard input is a JSON list: a command and its arguments. Each line of its
standard output that begins with ``=`` is an answer.
"""

from __future__ import annotations

import cProfile
import io
import json
import logging
import os
import pstats
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}

import torch

from benchmarks.pause_decoding import decode
from benchmarks.pause_models import MODEL, checksums, rank_name
from weighbridge import EngineClient
from weighbridge._core.resources import RECEIVING

_JOINED = ("failed", "preparing")
"""Fields that hold for all workers as soon as they hold for one."""


class Engine:
    """vLLM, started from the service.

    Args:
        server: address of the service.
        options: options of `vllm.LLM`. With a ``model``, that folder is loaded by vLLM's own loader.
        extra: extra config of the load format.
    """

    def __init__(self, server: str, options: dict[str, Any], extra: dict[str, Any]) -> None:
        if options.get("weight_transfer_config", {}).get("backend") == "ipc":
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
            sys.modules.setdefault("ray", types.ModuleType("ray"))  # it imports it, and does not use it
        from vllm import LLM

        begun = time.monotonic()
        self.client = EngineClient(server)
        ours: dict[str, Any] = {
            "model": MODEL,
            "load_format": "weighbridge",
            "model_loader_extra_config": {"server": server, **extra},
        }
        said = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 512}
        self.llm = LLM(**{**({} if "model" in options else ours), **said, **options})
        self.start_seconds = time.monotonic() - begun

    def facts(self) -> dict[str, Any]:
        """Start time, KV cache size and device memory of the engine; ``reserved`` is what torch reserves in this
        process.
        """
        config = self.llm.llm_engine.vllm_config.cache_config
        used = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        return {
            "start": self.start_seconds,
            "kv_tokens": (config.num_gpu_blocks or 0) * config.block_size,
            "free": used[0],
            "total": used[1],
            "reserved": torch.cuda.memory_reserved() if torch.cuda.is_available() else 0,
        }

    def ask(self, method: str, *arguments: str) -> dict[str, Any]:
        """Answer of the workers to the agent's call, with its seconds: the first worker's answer, with the first
        failure of any worker.
        """
        begun = time.monotonic()
        found = self.llm.collective_rpc(method, args=arguments)
        joined = {key: next((each[key] for each in found if each[key]), found[0][key]) for key in _JOINED}
        return {**found[0], **joined, "took": time.monotonic() - begun}

    def expect(self) -> dict[str, Any]:
        """Wait until the service receives a version, and bring it to this machine as it arrives, as an agent does."""
        _, version = next(iter(self.client.watch_refs([(MODEL, RECEIVING)])))
        return {**self.ask("weighbridge_prepare_early", str(version.number)), "heard": time.monotonic()}

    def prepare(self, version: int) -> dict[str, Any]:
        """Bring a version to this machine, and as far as it goes to the card."""
        begun = time.monotonic()
        status = self.ask("weighbridge_prepare", str(version))
        while status["preparing"]:
            time.sleep(0.001)
            status = self.ask("weighbridge_status")
        return {**status, "took": time.monotonic() - begun}

    def apply(self, version: int) -> dict[str, Any]:
        """Apply a version to the parameters; ``ended`` is the time at which the engine can go on."""
        return {**self.ask("weighbridge_apply", str(version)), "ended": time.monotonic()}

    def proof(self) -> list[float]:
        """Seconds in which the worker makes the digests of its parameters, and those with the answer; of a first and of
        a later proof.
        """
        found = []
        for _ in range(2):
            said = self.ask("weighbridge_evidence", "")
            found += [said["evidence"]["seconds"], said["took"]]
        return found

    def inject(self) -> None:
        """Take orders of `tests.support.engine_faults` from now on."""
        from tests.support import engine_faults

        engine_faults.register()

    def receive(self, update: dict[str, Any]) -> dict[str, Any]:
        """Take an update by vLLM's own transfer engine."""
        begun = time.monotonic()
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": update})
        self.llm.finish_weight_update()
        return self._done(begun)

    def reload(self, folder: str) -> dict[str, Any]:
        """Load a folder by vLLM's own reloading."""
        begun = time.monotonic()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        return self._done(begun)

    def decode(self, seconds: float, requests: int, follows: bool) -> dict[str, Any]:
        """See `pause_decoding.decode`."""
        return decode(self, seconds, requests, follows=follows)

    def profile(self, version: int) -> str:
        """The same, with where its time goes; slower by that."""
        with cProfile.Profile() as profile:
            self.apply(version)
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(60)
        return text.getvalue()

    def checksums(self) -> dict[str, int]:
        """Checksums of all parameters of all workers, by name.

        Names of other workers than the first begin with the rank.
        """
        ranks: list[dict[str, int]] = self.llm.apply_model(checksums)
        return {rank_name(rank, name): n for rank, sums in enumerate(ranks) for name, n in sums.items()}

    def generate(self) -> list[int]:
        """A few tokens."""
        from vllm import SamplingParams

        prompt = {"prompt_token_ids": [5, 6, 7, 8]}
        said = self.llm.generate(
            [prompt], SamplingParams(max_tokens=8, temperature=0, detokenize=False), use_tqdm=False
        )
        return list(said[0].outputs[0].token_ids)

    def _done(self, begun: float) -> dict[str, Any]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ended = time.monotonic()
        return {"failed": "", "took": ended - begun, "ended": ended}

    def sleep(self, level: int) -> None:
        """Let the weights sleep."""
        self.llm.sleep(level)

    def wake_up(self, *tags: str) -> None:
        """Wake the engine up."""
        self.llm.wake_up(list(tags) or None)


def answer_lines(make: Callable[..., Any]) -> None:
    """Do what the lines of the standard input ask, until it ends.

    Args:
        make: makes, of the arguments of ``start``, what has the methods that other lines name.
    """
    made: Any = None
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            if what == "start":
                made = make(*arguments)
                found = made.facts()
            else:
                found = getattr(made, what)(*arguments)
        except Exception as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"}
        print("=" + json.dumps(found), flush=True)


def main() -> None:
    """Answer as `Engine`, and write down how far preparations come."""
    logging.basicConfig(format="%(created).4f %(name)s: %(message)s")
    for part in ("_lazy", "integrations.engine_rank"):
        logging.getLogger(f"weighbridge.{part}").setLevel(logging.DEBUG)
    answer_lines(Engine)


if __name__ == "__main__":
    main()
