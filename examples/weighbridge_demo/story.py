"""Course of the demo, from a model on disk to engines that serve what was trained from it.

One model goes round: Hugging Face folder, service, Megatron ranks of two shapes, training, service, engines of two
shapes. At every station it is compared with what transformers alone, or plain torch, makes of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weighbridge import EngineClient, Pull, TrainerClient
from weighbridge_demo import language_model as lm
from weighbridge_demo import tp_engine, trainer_ranks
from weighbridge_demo.hf_from_megatron import DumpedShard, assemble, convert_llama
from weighbridge_demo.megatron_cpu import Parallel
from weighbridge_demo.ranks import gloo_job, run_jobs, run_ranks, start_server
from weighbridge_demo.report import Report
from weighbridge_demo.service_process import ServiceProcess
from weighbridge_demo.trainer_ranks import Restored, TrainerJob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "acme/smol"
TOLERANCE = 1e-5
"""Allowed difference of logits, as a part of the largest. float32 leaves 3e-6 open: transformers' own logits of this
model are so far from what it computes in float64."""
_OTHER_SHAPE = Parallel(tp=1, pp=2)
_TRAINER_SHAPE = Parallel(tp=3, pp=2)
_ENGINES = {"engine A": 3, "engine B": 3, "engine C": 1}
"""Tensor-parallel size by name."""
_JOB_SECONDS = 240.0


class Story:
    """The demo. Its parts build on each other and are called in order by `tell`.

    Args:
        work: an empty folder for everything.
        steps: optimizer steps of the trainer.
        say: called with each line of progress.
        report: filled in while the demo runs.
        store: where the service keeps versions; a folder in ``work`` if None.
        keep: called with the service and its addresses, gRPC and HTTP, when all is done; the service ends when it
            returns.
    """

    def __init__(
        self,
        work: Path,
        steps: int,
        say: Callable[[str], None],
        report: Report,
        store: str | None = None,
        keep: Callable[[ServiceProcess, str, str], None] | None = None,
    ) -> None:
        self.work = work
        self.steps = steps
        self.report = report
        self._say = say
        self._stage = partial(report.stage, say)
        self._hf_dir = work / "hf"
        self._store = store or str(work / "store")
        self._keep = keep
        report.model = MODEL

    def tell(self) -> None:
        """Run the demo.

        Raises:
            WeighbridgeError: something could not be done.
            RankError: a process of the trainer or of an engine failed.
        """
        # The service and the ranks' server import what they need while the model is being converted.
        start_server()
        with ServiceProcess(self._store, self.work, self.work / "scratch") as service:
            with self._stage("convert SmolLM2-135M-Instruct from GGUF to a Hugging Face folder"):
                model, tokenizer = lm.convert_gguf(lm.find_gguf(), self._hf_dir)
                weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
                self.report.model_bytes = sum(tensor.nbytes for tensor in weights.values())
            with self._stage("ask transformers alone"):
                tokens = lm.sample_tokens(tokenizer)
                with torch.no_grad():
                    logits = model(tokens).logits
                self.report.texts["transformers, before"] = lm.continue_prompt(model, tokenizer)
            with self._stage("wait for the service"):
                server, http = service.wait_ready()
            self._say(f"  gRPC on {server}, HTTP on {http}, log in {service.log}")
            job = TrainerJob(server, MODEL, model.config, _OTHER_SHAPE, tokens, logits)
            with self._stage("import the folder as version 1"):
                self._import(server, weights)
            with self._stage("serve version 1 at TP 1"):
                self._serve_imported(server)
            with self._stage(f"restore version 1 into Megatron at {_shape(_OTHER_SHAPE)}"):
                ranks = run_ranks(_OTHER_SHAPE, trainer_ranks.restore, job, timeout=_JOB_SECONDS)
                self._restored(_OTHER_SHAPE, ranks, _largest(job))
            del model
            with self._stage(f"restore it at {_shape(_TRAINER_SHAPE)}, train {self.steps} steps, push"):
                self._train(TrainerJob(server, MODEL, job.config, _TRAINER_SHAPE, tokens, logits), tokenizer)
            with self._stage("compare version 2 with the ranks' own parameters"):
                self._compare(server, job, weights)
            with self._stage("serve the latest version with three engines"):
                self._serve_trained(server)
            with self._stage("ask transformers to load version 2 from the object store"):
                folder = _stored_folder(self._store, 2, self.work / "stored")
                self.report.texts["transformers, after"] = lm.continue_prompt(*lm.load_folder(folder))
            self._compare_texts()
            if self._keep is not None:
                self._keep(service, server, http)
            exit_code = service.stop()
        self.report.check("the service ended in good order", exit_code == 0, f"exit code {exit_code}")

    def _import(self, server: str, weights: Mapping[str, Tensor]) -> None:
        with TrainerClient(server, run="import") as trainer:
            trainer.register_model(MODEL, self._hf_dir)
            handle = trainer.push_folder(MODEL, self._hf_dir)
            push = handle.report(_JOB_SECONDS)
            version = handle.wait("durable", timeout=_JOB_SECONDS)
        self.report.imported = (push, version)
        self.report.check("the import is version 1", version.number == 1, str(version))
        with EngineClient(server) as client:
            different = _differences(client.pull(MODEL, 1), weights.items())
        self.report.check("version 1 is the folder, bit for bit", not different, _few(different, len(weights)))

    def _serve_imported(self, server: str) -> None:
        arguments = (server, MODEL, 1, 1)
        job = gloo_job(1, tp_engine.serve, *arguments, name="the engine of version 1")
        [[served]] = run_jobs([job], timeout=_JOB_SECONDS)
        self.report.texts["engine TP 1, before"] = served.text
        expected = self.report.texts["transformers, before"]
        self.report.check(
            "an engine of version 1 says what transformers says", served.text == expected, repr(served.text)
        )

    def _restored(self, parallel: Parallel, ranks: list[Restored], largest: float) -> None:
        self.report.restored.append((parallel, ranks))
        errors = [rank.logits_error for rank in ranks if rank.logits_error is not None]
        allowed = TOLERANCE * largest
        self.report.check(
            f"Megatron's logits at {_shape(parallel)} are transformers'",
            len(errors) == parallel.tp and max(errors) <= allowed,
            f"largest difference {max(errors):.1e}, allowed {allowed:.1e}; largest logit {largest:.0f}",
        )

    def _train(self, job: TrainerJob, tokenizer: PreTrainedTokenizerBase) -> None:
        batch = lm.training_batch(tokenizer)
        arguments = (job, batch, self.steps, self.work)
        trained = self.report.trained = run_ranks(
            job.parallel, trainer_ranks.train, *arguments, timeout=_JOB_SECONDS + 30 * self.steps
        )
        self._restored(job.parallel, [rank.restored for rank in trained], _largest(job))
        losses = self.report.losses
        if self.steps > 1:
            figures = f"{losses[0]:.4f} to {losses[-1]:.4f}"
            self.report.check("training lowers the loss", losses[-1] < losses[0], figures)
        versions = {rank.version.number for rank in trained}
        self.report.check("all ranks pushed one version, version 2", versions == {2}, f"{sorted(versions)}")
        pushed = sum(rank.pushed.stream_bytes for rank in trained)
        self.report.check(
            "the push moved every parameter once",
            pushed == self.report.model_bytes,
            f"{pushed:,} bytes, the model has {self.report.model_bytes:,}",
        )

    def _compare(self, server: str, job: TrainerJob, before: Mapping[str, Tensor]) -> None:
        shards: list[DumpedShard] = []
        for rank in range(_TRAINER_SHAPE.world_size):
            path = self.work / f"rank-{rank}.pt"
            # weights_only would refuse the dataclass; the file is our own process's
            shards += torch.load(path, weights_only=False)
            path.unlink()
        expected = dict(convert_llama(assemble(shards), job.config))
        unchanged = [name for name in expected if torch.equal(expected[name], before[name])]
        self.report.check("training changed every tensor", not unchanged, _few(unchanged, len(expected)))
        with EngineClient(server) as client:
            started = time.monotonic()
            pull = client.pull(MODEL, "latest")
            pulled = dict(pull)
            seconds = time.monotonic() - started
        self.report.full_pull = (sum(tensor.nbytes for tensor in pulled.values()), seconds, pull.lane)
        different = _differences(pulled.items(), expected.items())
        self.report.check(
            "latest is the ranks' parameters, converted by plain torch code, bit for bit",
            not different,
            _few(different, len(expected)),
        )

    def _serve_trained(self, server: str) -> None:
        jobs = [
            gloo_job(size, tp_engine.serve, server, MODEL, "latest", size, name=name) for name, size in _ENGINES.items()
        ]
        engines = self.report.engines
        engines.update(zip(_ENGINES, run_jobs(jobs, timeout=_JOB_SECONDS), strict=True))
        ranks = [rank for engine in engines.values() for rank in engine]
        self.report.check(
            "every engine rank pulled the bytes of its parameters and no others",
            all(rank.nbytes == rank.parameter_bytes for rank in ranks),
            ", ".join(f"{engine[0].nbytes:,} at TP {len(engine)}" for engine in engines.values()),
        )
        numbers = {rank.number for rank in ranks}
        self.report.check("latest was version 2 for all engines", numbers == {2}, f"{sorted(numbers)}")

    def _compare_texts(self) -> None:
        expected = self.report.texts["transformers, after"]
        texts = {
            f"{name}, TP {len(ranks)}": {rank.text for rank in ranks} for name, ranks in self.report.engines.items()
        }
        for who, said in texts.items():
            self.report.texts[who] = " | ".join(sorted(said))
        self.report.check(
            "all engines say what transformers says of version 2",
            all(said == {expected} for said in texts.values()),
            repr(expected),
        )


def _largest(job: TrainerJob) -> float:
    return job.expected_logits.abs().max().item()


def _shape(parallel: Parallel) -> str:
    return f"TP {parallel.tp} x PP {parallel.pp}"


def _differences(found: Pull | Iterable[tuple[str, Tensor]], expected: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of tensors that are on one side only, or of which a bit differs."""
    left = dict(expected)
    different = []
    for name, tensor in found:
        other = left.pop(name, None)
        if other is None or not torch.equal(tensor.view(torch.int32), other.contiguous().view(torch.int32)):
            different.append(name)
    return different + list(left)


def _few(names: list[str], total: int) -> str:
    return f"{len(names)} of {total} tensors: {', '.join(names[:3])}" if names else f"{total} tensors"


def _stored_folder(location: str, number: int, into: Path) -> Path:
    """A version's folder as it lies in the store; copied out as it is if the store is no folder."""
    from weighbridge_storage.opening import open_store

    prefix = f"models/{MODEL}/versions/{number:012d}/"
    if Path(location).is_dir():
        return Path(location, prefix)
    into.mkdir()
    with closing(open_store(location)) as store:
        for key in store.list(prefix):
            with (into / key.removeprefix(prefix)).open("wb") as file:
                file.writelines(store.stream(key))
    return into
