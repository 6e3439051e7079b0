"""verl's own training loops on GPUs: ``python -m tests.gpu.verl_loops tensors``.

Each case is one job of verl: an FSDP2 actor on one GPU, verl's vLLM server on another, GRPO on sums of two digits, with
SmolLM2-135M in float32. The service is a process of this machine. Prints the times of each step, and for

- ``nccl``: verl's own transfer, to compare with;
- ``tensors``: `separate_async`, whole tensors;
- ``slices``: `one_step_off_policy` with `WeighbridgeManager`, and a proof of the versions that the engine serves;
- ``resumed``: checkpoints in the service; the job is killed with SIGKILL after a save, and resumed. Versions of the same
  step must have equal tensors.

Needs two GPUs, and the packs vllm, verl and smollm2 on PYTHONPATH (docs/testing.md).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = "acme/policy"
NEEDED = {
    "verl": "pack it with make pack-gpu ENV=verl",
    "vllm": "pack it with make pack-gpu ENV=vllm",
    "weighbridge_demo.language_model": "pack SmolLM2 with make pack-gpu ENV=smollm2, and put examples on PYTHONPATH",
}
SHOWN = (
    "critic/rewards/mean", "timing_s/step", "timing_s/update_weights", "timing_s/save_checkpoint",
    "weighbridge/version", "weighbridge/push_seconds",
)  # fmt: skip
VALUE = re.compile(r"([A-Za-z_/0-9@.]+):(?:np\.\w+\()?(-?[0-9.]+(?:e[+-]?[0-9]+)?)")
SAVED_STEP, EVERY = 10, 5
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Reward of a response: 1 for the right sum, 0.1 for another number. verl imports this function."""
    found = re.search(r"\d+", solution_str)
    if found is None:
        return 0.0
    return 1.0 if found.group() == ground_truth else 0.1


def prepare(folder: Path) -> None:
    """Write the questions, and SmolLM2 as a Hugging Face folder."""
    import pandas as pd
    from transformers import AutoTokenizer

    from weighbridge_demo import language_model

    dice = random.Random(7)
    for name, count in (("train", 2048), ("test", 64)):
        rows = []
        for index in range(count):
            one, two = dice.randint(0, 9), dice.randint(0, 9)
            question = f"What is {one} + {two}? Answer with the number alone."
            rows.append(
                {
                    "data_source": "sums",
                    "prompt": [{"role": "user", "content": question}],
                    "ability": "math",
                    "reward_model": {"style": "rule", "ground_truth": str(one + two)},
                    "extra_info": {"index": index, "split": name},
                }
            )
        pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
    if not (folder / "hf" / "config.json").exists():
        language_model.convert_gguf(language_model.find_gguf(), folder / "hf")
        tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
        if not tokenizer.chat_template:
            tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
            tokenizer.save_pretrained(folder / "hf")


def command(case: str, folder: Path, server: str, steps: int) -> list[str]:
    """The command line of a job of verl."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    engine = f"{rollout}.checkpoint_engine"
    kwargs = f"+{engine}.engine_kwargs.weighbridge"
    module = "verl.experimental.one_step_off_policy.main_ppo" if case == "slices" else "verl.trainer.main_ppo"
    found = [
        *(sys.executable, "-m", module),
        "algorithm.adv_estimator=grpo", f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet",
        "data.train_batch_size=16", "data.max_prompt_length=64", "data.max_response_length=16", "data.return_raw_chat=True",
        "actor_rollout_ref.hybrid_engine=False", f"actor_rollout_ref.model.path={folder}/hf",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=False",
        f"{actor}.strategy=fsdp2", f"{actor}.optim.lr=1e-6", f"{actor}.ppo_mini_batch_size=16",
        f"{actor}.ppo_micro_batch_size_per_gpu=16", f"{actor}.use_kl_loss=False",
        f"{rollout}.name=vllm", f"{rollout}.mode=async", f"{rollout}.n=4", f"{rollout}.nnodes=1",
        f"{rollout}.n_gpus_per_node=1", f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.enforce_eager=True",
        f"{rollout}.gpu_memory_utilization=0.3", f"{rollout}.log_prob_micro_batch_size_per_gpu=16",
        f"{rollout}.agent.num_workers=1", "reward.num_workers=1",
        f"reward.custom_reward_function.path={Path(__file__)}", "reward.custom_reward_function.name=compute_score",
        "trainer.logger=[console]", "trainer.nnodes=1", "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}", "trainer.val_before_train=False", "trainer.test_freq=-1",
        f"trainer.default_local_dir={folder}/checkpoints", "+ray_kwargs.ray_init.include_dashboard=False",
    ]  # fmt: skip
    if case == "nccl":
        found += [f"{engine}.backend=nccl"]
    else:
        found += [
            f"{engine}.backend=weighbridge", f"{engine}.custom_backend_module=weighbridge.integrations.verl",
            f"{kwargs}.server={server}", f"{kwargs}.model={MODEL}", f"{kwargs}.hf_dir={folder}/hf",
        ]  # fmt: skip
    if case == "slices":
        found += [
            f"{kwargs}.mode=slices", f"+{rollout}.engine_kwargs.vllm.weight_transfer_config.backend=weighbridge",
            f"+{rollout}.checkpoint_manager_class=weighbridge.integrations.verl.WeighbridgeManager",
            "rollout.nnodes=1", "rollout.n_gpus_per_node=1",
        ]  # fmt: skip
    else:
        found += ["trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=1"]
    if case == "resumed":
        variables = "+ray_kwargs.ray_init.runtime_env.env_vars"
        found += [
            "actor_rollout_ref.model.external_lib=weighbridge.integrations.verl.checkpoints",
            f"{variables}.WEIGHBRIDGE_CHECKPOINTS={MODEL}", f"{variables}.WEIGHBRIDGE_SERVER={server}",
            f"trainer.save_freq={EVERY}", "trainer.resume_mode=auto",
        ]  # fmt: skip
    else:
        found += ["trainer.save_freq=-1", "trainer.resume_mode=disable"]
    return found


def steps_of(log: str) -> list[dict[str, float]]:
    """The metrics of each step in a log of verl."""
    return [{name: float(value) for name, value in VALUE.findall(line)} for line in re.findall(r"step:\d+ - .*", log)]


class Job:
    """A job of verl, with all of its processes.

    Args:
        log: file that it writes to.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        variables = {
            "VERL_LOGGING_LEVEL": "WARN",  # verl 0.9.1 passes flush= to its logger at INFO
            "VLLM_SERVER_DEV_MODE": "1",  # for proofs
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        self.log = log
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **variables}, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip

    def wait(self, seconds: float) -> None:
        """Wait until the job has ended; ends the program if it fails."""
        code = self._process.wait(seconds)
        self.kill()
        if code:
            sys.exit(f"verl ended with {code}:\n{self.log.read_text(errors='replace')[-4000:]}")

    @property
    def ended(self) -> bool:
        """Whether the trainer has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End all processes of the job by SIGKILL. Ray's are sessions of their own, and have the job as an ancestor."""
        import psutil

        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            below = psutil.Process(self._process.pid).children(recursive=True)
            os.killpg(self._process.pid, signal.SIGKILL)
            for each in below:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        for each in psutil.process_iter(["cmdline"]):  # adopted by init
            if any(
                "raylet" in word or "gcs_server" in word or word.startswith("ray::")
                for word in each.info["cmdline"] or ()
            ):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        self._process.wait()


@contextmanager
def service(folder: Path, server: str) -> Iterator[None]:
    """A service on a new store."""
    from weighbridge import Client
    from weighbridge.errors import WeighbridgeError

    with (folder / "service.log").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "weighbridge", "serve", "--store", str(folder / "store"), "--grpc", server],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        with Client(server, retry_seconds=60) as client, suppress(WeighbridgeError):
            client.models()
        yield
    finally:
        process.terminate()
        process.wait(60)


def engines() -> Iterator[str]:
    """The addresses on which vLLM servers of this machine listen."""
    import psutil

    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN:
            url = f"http://{'127.0.0.1' if each.laddr.ip in ('0.0.0.0', '::') else each.laddr.ip}:{each.laddr.port}"
            with suppress(OSError, ValueError), _DIRECT.open(url + "/get_world_size", timeout=2) as answer:
                if "world_size" in json.load(answer):
                    yield url


def prove_until(ended: threading.Event, server: str) -> None:
    """Prove each version that verl's engine serves, until the event is set."""
    from weighbridge import EngineClient
    from weighbridge.errors import WeighbridgeError
    from weighbridge.follow.proving import prove
    from weighbridge.follow.vllm import VllmServer

    proved: dict[int, str] = {}
    url = None
    with EngineClient(server) as client:
        while not ended.wait(0.2):
            url = url or next(engines(), None)
            if url is None:
                continue
            driver = VllmServer(url, MODEL, server)
            try:
                number = driver.serving().version
                if number is not None and number not in proved:
                    proof = prove(client, driver.evidence, MODEL, number)
                    if not proof.wrong_text.count("serves"):  # it took the next version meanwhile
                        proved[number] = proof.verdict
            except WeighbridgeError as error:
                print(f"not proved: {error.message}", flush=True)
    print(f"proofs: {proved}", flush=True)


def compare(server: str) -> None:
    """Compare versions of the same step, and end the program if a tensor differs."""
    import torch

    from weighbridge import EngineClient

    by_step = defaultdict(list)
    with EngineClient(server) as client:
        for version in client.versions(MODEL):
            by_step[version.step].append(version.number)
        for step, numbers in sorted(by_step.items()):
            first, *others = [dict(client.pull(MODEL, number)) for number in numbers]
            differ = [name for name in first for other in others if not torch.equal(first[name], other[name])]
            print(f"step {step}: versions {numbers}, {len(first)} tensors, {len(differ)} differ", flush=True)
            if differ:
                sys.exit(1)


def resume(folder: Path, server: str, steps: int, seconds: float) -> None:
    """Kill a job after a save, and resume it."""
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    job = Job(command("resumed", folder, server, steps), folder / "killed.log")
    until = time.monotonic() + seconds
    while not (tracker.exists() and int(tracker.read_text() or 0) >= SAVED_STEP):
        if job.ended or time.monotonic() > until:
            job.kill()
            sys.exit(f"no checkpoint of step {SAVED_STEP}:\n{job.log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.2)
    time.sleep(3.0)  # another step, which the resumed job repeats
    job.kill()
    print("killed", flush=True)
    Job(command("resumed", folder, server, SAVED_STEP + 2), folder / "resumed.log").wait(seconds)
    compare(server)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("case", choices=("nccl", "tensors", "slices", "resumed"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/verl-loops"), help="empty, or of an earlier case")
    parser.add_argument("--server", default="127.0.0.1:50051", help="address on which the service listens")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=500.0, help="time limit of a job")
    parser.add_argument("--print", action="store_true", help="print the command of the job, and run nothing")
    arguments = parser.parse_args(argv)
    folder = arguments.folder / arguments.case
    if arguments.print:
        print("\n".join(command(arguments.case, folder, arguments.server, arguments.steps)))
        return
    for name, fix in NEEDED.items():
        try:
            importlib.import_module(name)
        except ImportError as error:
            sys.exit(f"{name} is missing ({error}): {fix}")
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    with service(folder, arguments.server):
        if arguments.case == "resumed":
            resume(folder, arguments.server, arguments.steps, arguments.seconds)
            return
        job = Job(command(arguments.case, folder, arguments.server, arguments.steps), folder / "verl.log")
        ended = threading.Event()
        proving = threading.Thread(target=prove_until, args=(ended, arguments.server))
        if arguments.case == "slices":
            proving.start()
        try:
            job.wait(arguments.seconds)
        finally:
            job.kill()
            ended.set()
            if arguments.case == "slices":
                proving.join()
        for step in steps_of(job.log.read_text(errors="replace")):
            print(" ".join(f"{name.partition('/')[2]}={step[name]:.3f}" for name in SHOWN if name in step), flush=True)


if __name__ == "__main__":
    main()
