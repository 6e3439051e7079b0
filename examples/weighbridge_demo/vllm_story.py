"""Course of the demo with vLLM: it starts from the service, is asked, and follows what Megatron ranks train.

First with a real language model on one rank of vLLM, then with a small one on two engines at once, of two
tensor-parallel ranks and of two pipeline stages. Each answer is compared with what transformers says of the weights
that lie in the object store.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from weighbridge import TrainerClient
from weighbridge.errors import Unavailable
from weighbridge_demo import language_model as lm
from weighbridge_demo import trainer_ranks
from weighbridge_demo.megatron_cpu import Parallel
from weighbridge_demo.ranks import run_ranks, start_server
from weighbridge_demo.report import Report
from weighbridge_demo.service_process import ServiceProcess
from weighbridge_demo.trainer_ranks import TrainerJob
from weighbridge_demo.vllm_server import EAGER, TRACED, Answer, VllmServer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_JOB_SECONDS = 240.0
_FOLLOW_SECONDS = 120.0
_TOLERANCE = 2e-3
"""Allowed difference of log-probabilities between two engines in float32; training moves them by far more."""


@dataclass(frozen=True)
class Part:
    """One model on its way through the demo.

    Attributes:
        model: its name.
        trainer: parallelism of the Megatron ranks that train it.
        engines: arguments of each vLLM that follows it, by name.
    """

    model: str
    trainer: Parallel
    engines: Mapping[str, tuple[str, ...]]


SMOL = Part("acme/smol", Parallel(tp=3, pp=2), {"vLLM TP 1": EAGER})
TINY = Part(
    "acme/tiny",
    Parallel(tp=2, pp=1),
    {
        "vLLM TP 2": (*EAGER, "--tensor-parallel-size", "2"),
        "vLLM PP 2": (*TRACED, "--pipeline-parallel-size", "2"),
    },
)


class VllmStory:
    """The demo.

    Args:
        work: an empty folder for everything.
        steps: optimizer steps of the trainer.
        python: Python of the environment that vLLM is installed in.
        say: called with each line of progress.
        report: filled in while the demo runs.
        keep: called with the service and its addresses, gRPC and HTTP, when all is done; the service ends when it
            returns.
    """

    def __init__(
        self,
        work: Path,
        steps: int,
        python: Path,
        say: Callable[[str], None],
        report: Report,
        keep: Callable[[ServiceProcess, str, str], None] | None = None,
    ) -> None:
        self.work = work
        self.steps = steps
        self.python = python
        self.report = report
        self._say = say
        self._stage = partial(report.stage, say)
        self._keep = keep
        report.model = SMOL.model

    def tell(self) -> None:
        """Run the demo.

        Raises:
            WeighbridgeError: something could not be done.
            RankError: a process of the trainer failed.
        """
        start_server()
        with ServiceProcess(self.work / "store", self.work, self.work / "scratch") as service:
            with self._stage("convert SmolLM2-135M-Instruct from GGUF to a Hugging Face folder"):
                model, tokenizer = lm.convert_gguf(lm.find_gguf(), self.work / "smol")
            server, http = service.wait_ready()
            self._play(SMOL, server, self.work / "smol", model, tokenizer)
            with self._stage("make a small model with the same tokenizer"):
                model, tokenizer = _make_tiny(self.work / "tiny", self.work / "smol")
            self._play(TINY, server, self.work / "tiny", model, tokenizer)
            if self._keep is not None:
                self._keep(service, server, http)
            exit_code = service.stop()
        self.report.check("the service ended in good order", exit_code == 0, f"exit code {exit_code}")

    def _play(
        self,
        part: Part,
        server: str,
        folder: Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        with (
            self._stage(f"{part.model}: import the folder as version 1"),
            TrainerClient(server, run="import") as client,
        ):
            client.register_model(part.model, folder)
            client.push_folder(part.model, folder).wait("durable", timeout=_JOB_SECONDS)
        before = _by_transformers(model, tokenizer)
        tokens = lm.sample_tokens(tokenizer)
        with torch.no_grad():
            job = TrainerJob(server, part.model, model.config, part.trainer, tokens, model(tokens).logits)
        with ExitStack() as running:
            with self._stage(f"{part.model}: start {' and '.join(part.engines)} from the service"):
                engines = {
                    name: running.enter_context(
                        VllmServer(self.python, server, part.model, self._log(name), *arguments)
                    )
                    for name, arguments in part.engines.items()
                }
                for engine in engines.values():
                    engine.wait_ready()
            answers = {name: engine.complete(lm.PROMPT, lm.NEW_TOKENS) for name, engine in engines.items()}
            self._compare(f"{part.model}@1", before, answers)
            agents = {name: running.enter_context(_Agent(part.model, server, e.url)) for name, e in engines.items()}
            for name, agent in agents.items():
                had = agent.next()
                self.report.check(
                    f"{name}: the agent finds version 1", had["serves"] == 1 and not had["error"], str(had)
                )
            with self._stage(
                f"{part.model}: train {self.steps} steps at TP {part.trainer.tp} x PP {part.trainer.pp}, push"
            ):
                batch = lm.training_batch(tokenizer)
                seconds = _JOB_SECONDS + 30 * self.steps
                run_ranks(part.trainer, trainer_ranks.train, job, batch, self.steps, self.work, timeout=seconds)
            with self._stage(f"{part.model}: the agents take the live engines along"):
                for name, agent in agents.items():
                    self._followed(name, agent.next())
            stored = self.work / "store" / "models" / part.model / "versions" / f"{2:012d}"
            after = _by_transformers(*lm.load_folder(stored))
            moved = _distance(before, after)
            self.report.check(
                f"{part.model}: training moved what the model says",
                moved > 10 * _TOLERANCE,
                f"log-probabilities by {moved:.3f}",
            )
            answers = {name: engine.complete(lm.PROMPT, lm.NEW_TOKENS) for name, engine in engines.items()}
            self._compare(f"{part.model}@2", after, answers)
            labels = {name: engine.weight_version() for name, engine in engines.items()}
            self.report.check(
                f"{part.model}: vLLM says that it serves version 2",
                set(labels.values()) == {f"{part.model}@2"},
                str(labels),
            )

    def _followed(self, name: str, done: Mapping[str, Any]) -> None:
        self._say(
            f"  {name}: version {done['version']}, {done['nbytes'] / 1e6:.1f} MB prepared in "
            f"{done['prepare_seconds']:.2f} s, "
            f"paused for {done['pause_seconds']:.2f} s"
        )
        followed = done["serves"] == 2 and not done["error"]
        figures = f"{done['nbytes']:,} bytes, pause {done['pause_seconds']:.2f} s" if followed else str(done)
        self.report.check(f"{name}: the agent took the live engine to version 2", followed, figures)

    def _compare(self, version: str, expected: Answer, answers: Mapping[str, Answer]) -> None:
        self.report.texts[f"transformers, {version}"] = expected.text
        for name, answer in answers.items():
            self.report.texts[f"{name}, {version}"] = answer.text
            apart = _distance(expected, answer)
            self.report.check(
                f"{name} says of {version} what transformers says",
                answer.text == expected.text and apart <= _TOLERANCE,
                f"{answer.text!r}, log-probabilities apart by {apart:.1e}",
            )

    def _log(self, name: str) -> Path:
        return self.work / f"{name.replace(' ', '-').lower()}.log"


class _Agent:
    """``weighbridge follow`` beside an engine, for two versions."""

    def __init__(self, model: str, server: str, url: str) -> None:
        command = [sys.executable, "-m", "weighbridge", "follow", model, "--server", server, "--url", url]
        self._process = subprocess.Popen([*command, "--count", "2", "--json"], stdout=subprocess.PIPE, text=True)

    def next(self) -> dict[str, Any]:
        """Next message of the agent."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"the agent ended with exit code {self._process.wait(_FOLLOW_SECONDS)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def _by_transformers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Answer:
    """Greedy completion of the prompt by transformers, with log-probabilities."""
    inputs: Any = tokenizer(lm.PROMPT, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=lm.NEW_TOKENS, do_sample=False)
        logprobs = torch.log_softmax(model(output).logits[0].float(), dim=-1)
    first = inputs["input_ids"].shape[1]
    new = output[0, first:]
    likely = logprobs[first - 1 : -1].gather(1, new[:, None])[:, 0]
    return Answer(tokenizer.decode(new), likely.tolist())


def _distance(a: Answer, b: Answer) -> float:
    """Largest difference of the tokens' log-probabilities; those of the first token alone where later ones differ."""
    count = len(a.logprobs) if a.text == b.text else 1
    return max(abs(x - y) for x, y in zip(a.logprobs[:count], b.logprobs[:count], strict=False))


def _make_tiny(folder: Path, tokenizer: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A llama of four layers with random weights, and another model's tokenizer."""
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    theirs = AutoConfig.from_pretrained(tokenizer)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=theirs.vocab_size,
            max_position_embeddings=256,
            initializer_range=0.3,
            bos_token_id=theirs.bos_token_id,
            eos_token_id=theirs.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    for path in tokenizer.iterdir():
        if "token" in path.name:
            shutil.copy(path, folder)
    return lm.load_folder(folder)
