"""Ranks of vLLM without its scheduler: run in vLLM's environment, with a list of jobs as JSON on stdin, by
`tests.engines.test_vllm_ranks`.

Each job makes a model as vLLM's worker makes it, twice: loaded by vLLM's own loader from the Hugging Face folder, and
by the plug-in from the service. What is said about them goes to stdout as JSON, one list for each job with one value
for each rank.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  # vLLM's CPU kernels want to be first
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from weighbridge.integrations.engine_rank.source import ModelSource
from weighbridge.integrations.vllm import layers
from weighbridge.integrations.vllm.model import VllmModel, vllm_rank
from weighbridge.integrations.vllm.wrapped import unwrapped


def engine_config(job: dict[str, Any], **changes: Any) -> Any:
    """vLLM's configuration for one job."""
    return EngineArgs(
        model=job["folder"],
        tokenizer=job["folder"],
        skip_tokenizer_init=True,
        dtype=job.get("dtype", "float32"),
        tensor_parallel_size=job["tp"],
        enable_expert_parallel=job.get("ep", False),
        distributed_executor_backend="mp",
        enforce_eager=True,
        max_model_len=32,
        load_format="safetensors",
        use_tqdm_on_load=False,
        **changes,
    ).create_engine_config()


@contextmanager
def making(config: Any) -> Any:
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("cpu"),
    ):
        yield


def made(config: Any) -> torch.nn.Module:
    config.compilation_config.static_forward_context.clear()  # else a second model has names that are taken
    with making(config):
        model = initialize_model(vllm_config=config)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)  # what is not loaded shall not pass for a weight
    return model


def by_vllm(config: Any) -> torch.nn.Module:
    model = made(config)
    with making(config):
        DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
    return model


def by_weighbridge(config: Any, job: dict[str, Any], version: int) -> torch.nn.Module:
    from weighbridge.integrations.vllm.loader import WeighbridgeLoader

    extra = {"server": job["server"], "model": job["model"], "version": version}
    model = made(config)
    with making(config):
        loader = WeighbridgeLoader(replace(config.load_config, model_loader_extra_config=extra))
        loader.load_weights(model, config.model_config)
    return model


def processed(config: Any, model: torch.nn.Module) -> torch.nn.Module:
    with making(config):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


def different(a: torch.nn.Module, b: torch.nn.Module) -> list[str]:
    """Names of parameters that are not the same bits."""
    mine, others = dict(a.named_parameters()), dict(b.named_parameters())
    found = sorted(mine.keys() ^ others.keys())
    for name in mine.keys() & others.keys():
        x, y = mine[name].data, others[name].data
        same = x.shape == y.shape and x.dtype == y.dtype
        if not same or not torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)):
            found.append(name)
    return found


def compute_differently(a: torch.nn.Module, b: torch.nn.Module) -> list[str]:
    """Names of linear layers that give other bits: vLLM's CPU kernels have packed their weights out of sight."""
    found = []
    others = dict(b.named_modules())
    for name, layer in a.named_modules():
        if not hasattr(layer, "cpu_linear"):
            continue
        sizes = ("input_size_per_partition", "input_size", "embedding_dim")
        size = next(getattr(layer, name) for name in sizes if hasattr(layer, name))
        x = torch.randn(3, size, generator=torch.Generator().manual_seed(1)).to(next(a.parameters()).dtype)
        bias = getattr(layer, "bias", None)
        mine = layer.cpu_linear(x, layer.weight, bias)
        if not torch.equal(mine, others[name].cpu_linear(x, others[name].weight, getattr(others[name], "bias", None))):
            found.append(name)
    return found


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of a rank's parameters that a checkpoint fills: all but the padding of vocabularies."""
    total = 0
    for layer in model.modules():
        for parameter in layer._parameters.values():
            if parameter is None:
                continue
            rows = getattr(getattr(layer, "shard_indices", None), "num_org_elements", parameter.shape[0])
            total += parameter[:rows].nbytes
    shared = sum(p.nbytes for p in model.parameters())  # each parameter once
    return min(total, shared)


# -- jobs -------------------------------------------------------------------------------------------------------------


def load(job: dict[str, Any]) -> dict[str, Any]:
    """A first load of version 1."""
    config = engine_config(job)
    expected, model = by_vllm(config), by_weighbridge(config, job, 1)
    recording = vllm_rank(model, config)._recorded.recording
    return {
        "different": different(model, expected),
        "fetched": recording.nbytes,
        "held": held_bytes(expected),
        "unrecorded": dict(recording.unrecorded),
    }


def update(job: dict[str, Any]) -> dict[str, Any]:
    """Updates of a model that computes with processed weights: to version 2, to 1, and to 2 again."""

    config = engine_config(job)
    if job.get("started_elsewhere"):  # nothing is known of where its weights have come from
        model = processed(config, by_vllm(config))
    else:
        model = processed(config, by_weighbridge(config, job, 1))
    expected = {}
    for number, folder in ((1, job["folder"]), (2, job["folder2"])):
        expected[number] = processed(config, by_vllm(engine_config({**job, "folder": folder})))
    if not (different(expected[1], expected[2]) and compute_differently(expected[1], expected[2])):
        raise AssertionError("the versions do not differ")
    where = {name: p.data_ptr() for name, p in model.named_parameters()}
    if job.get("wrapped"):
        wrap_for_lora(model, config)
    rank = vllm_rank(model, config)
    rank.connect(ModelSource(job["model"], job["server"]))
    found = {}
    for turn, number in enumerate((2, 1, 2)):
        counts: dict[str, int] = {}
        with counted(counts):
            rank.apply(number)
        with unwrapped(model):
            found[f"{turn}: version {number}"] = [
                *different(model, expected[number]),
                *compute_differently(model, expected[number]),
            ]
    with unwrapped(model):
        moved = [name for name, p in model.named_parameters() if p.data_ptr() != where.get(name)]
    status = rank.status()
    rank.close()
    attention = sum(isinstance(layer, Attention) for layer in model.modules())
    return {
        "different": found,
        "moved": moved,
        "served": status.served,
        "counts": counts,
        "attention": attention,
    }


def derived(job: dict[str, Any]) -> dict[str, Any]:
    """Recording and update of a model whose loader makes something of its parameters in the end, as loaders of DFlash
    drafters do.
    """

    def load_weights(self: Any, tensors: Any) -> Any:
        loaded = original(self, tensors)
        self.model.stacked = torch.stack([each.input_layernorm.weight.data for each in self.model.layers])
        self.model.alias = self.model.norm.weight.data
        return loaded

    config = engine_config(job)
    kind: Any = type(made(config))
    original, kind.load_weights = kind.load_weights, load_weights
    try:
        model, expected = (
            processed(config, by_vllm(engine_config({**job, "folder": folder})))
            for folder in (job["folder"], job["folder2"])
        )
        before = model.model.stacked
        rank = vllm_rank(model, config)
        rank.connect(ModelSource(job["model"], job["server"]))
        kept = model.model.stacked is before
        rank.apply(2)
        rank.close()
    finally:
        kind.load_weights = original
    right = [
        not mine.is_meta and torch.equal(mine, of_fresh)
        for mine, of_fresh in (
            (model.model.stacked, expected.model.stacked),
            (model.model.alias, expected.model.alias),
        )
    ]
    return {"kept": kept, "right": right}


def ahead(job: dict[str, Any]) -> dict[str, Any]:
    """Updates of a model whose linear layers vLLM quantises while it loads them, in a place as a card's: to version 2,
    1, 2, and by vLLM's own reload.
    """
    from weighbridge import _lazy as lazy

    quantization = ""
    if job.get("quantized", True):
        from tests.support import vllm_online

        quantization, vllm_online.special = vllm_online.NAME, job.get("special", {})
    options = {"quantization": quantization} if quantization else {}

    def fresh(folder: str) -> torch.nn.Module:
        config = engine_config({**job, "folder": folder}, **options)
        model = by_vllm(config)
        with making(config):
            layerwise.finalize_layerwise_processing(model, config.model_config)
        return processed(config, model)

    expected = {1: fresh(job["folder"]), 2: fresh(job["folder2"])}
    config = engine_config(job, **options)
    model = by_weighbridge(config, job, 1)
    if quantization:
        with making(config):
            layerwise.finalize_layerwise_processing(model, config.model_config)
    processed(config, model)
    rank = vllm_rank(model, config)
    nbytes = int(lazy.staging_bytes(layers.shapes_loaded(model)) * job.get("share", 1))
    rank.engine.place = lazy.StagingPlace(torch.zeros(nbytes, dtype=torch.uint8))
    rank.connect(ModelSource(job["model"], job["server"]))
    where = {name: p.data_ptr() for name, p in model.named_parameters()}
    found, counts = {"start": different(model, expected[1])}, {}
    for turn, number in enumerate((2, 1, 2)):
        rank.prepare(number)
        rank._preparation.wait()
        update = rank._preparation.update
        before = different(model, expected[3 - number])
        counts[turn] = {"replaced": len(update.replaced)}
        with counted(counts[turn]):
            rank.apply(number)
        found[f"{turn}: version {number}"] = [
            *before,
            *different(model, expected[number]),
            *compute_differently(model, expected[number]),
        ]
    if not has_experts(job):  # vLLM itself cannot load CPU experts again
        proof = rank.compare_with_load()
        found["proof"] = [*proof.wrong, *different(model, expected[2])]
    moved = [name for name, p in model.named_parameters() if p.data_ptr() != where.get(name)]
    left = rank.engine.applier.ahead.left
    room = [rank.engine.applier.ahead.reserve(torch.device("cpu"))]
    rank.engine.join(torch.nn.Linear(1, 1))
    room.append(rank.engine.applier.ahead._room.numel())
    rank.engine.part()
    room.append(rank.engine.applier.ahead._room.numel())
    rank.close()
    return {"different": found, "counts": counts, "moved": moved, "left": left, "room": room}


@contextmanager
def counted(counts: dict[str, int]) -> Any:
    """Counts what vLLM does meanwhile: the layers that it makes anew, by class, its reloads, and attention that it
    processes.
    """
    materialize, reload = layerwise.materialize_layer, layers.initialize_layerwise_reload
    attention = Attention.process_weights_after_loading

    def count(what: str, do: Any) -> Any:
        def counting(*args: Any) -> Any:
            name = what or type(args[0]).__name__
            counts[name] = counts.get(name, 0) + 1
            return do(*args)

        return counting

    layerwise.materialize_layer = count("", materialize)
    layers.initialize_layerwise_reload = count("reloads", reload)
    Attention.process_weights_after_loading = count("attention", attention)
    try:
        yield
    finally:
        layerwise.materialize_layer, layers.initialize_layerwise_reload = materialize, reload
        Attention.process_weights_after_loading = attention


@contextmanager
def kernels_of(job: dict[str, Any]) -> Any:
    """Kernels that take weights as a loader leaves them, as a GPU's do, if the job says so."""
    supported = _custom_ops._supports_onednn
    if job.get("as_loaded"):
        _custom_ops._supports_onednn = False
    try:
        yield
    finally:
        _custom_ops._supports_onednn = supported


def wrap_for_lora(model: Any, config: Any) -> None:
    """Wrap linear layers as vLLM does for adapters."""
    from vllm.lora.layers import (
        MergedColumnParallelLinearWithLoRA,
        MergedQKVParallelLinearWithLoRA,
        RowParallelLinearWithLoRA,
    )

    kinds = {
        "MergedColumnParallelLinear": MergedColumnParallelLinearWithLoRA,
        "QKVParallelLinear": MergedQKVParallelLinearWithLoRA,
        "RowParallelLinear": RowParallelLinearWithLoRA,
    }
    count = 0
    for name, layer in list(model.named_modules()):
        if (kind := kinds.get(type(layer).__name__)) is not None:
            parent, _, own = name.rpartition(".")
            with set_current_vllm_config(config):
                setattr(model.get_submodule(parent), own, kind(layer))
            count += 1
    assert count, "nothing was wrapped"


def wrap(job: dict[str, Any]) -> str:
    """Error of an engine that has renamed a layer after loading, with the version that it serves."""
    from weighbridge.errors import WeighbridgeError

    config = engine_config(job)
    model = processed(config, by_weighbridge(config, job, 1))
    mlp = model.get_submodule("model.layers.1.mlp")
    mlp.down_proj = torch.nn.ModuleDict({"other": mlp.down_proj})
    rank = vllm_rank(model, config)
    rank.connect(ModelSource(job["model"], job["server"]))
    try:
        rank.apply(2)
    except WeighbridgeError as error:
        return f"{error} {rank.status().served}"
    finally:
        rank.close()
    return ""


def fail(job: dict[str, Any]) -> dict[str, Any]:
    """An update that fails on one rank while parameters are filled; then one of which one rank cannot even fetch the
    bytes.
    """
    from vllm.distributed.parallel_state import get_world_group

    from weighbridge import _lazy as lazy
    from weighbridge.errors import WeighbridgeError

    config = engine_config(job)
    model = processed(config, by_weighbridge(config, job, 1))
    expected = processed(config, by_vllm(config))
    rank = vllm_rank(model, config)
    rank.connect(ModelSource(job["model"], job["server"]))
    last = get_world_group().rank_in_group == job["tp"] - 1
    for number in (2, 1) if job.get("as_loaded") else ():  # from then on without vLLM's reloading
        rank.apply(number)
    fill, filled = lazy.Update.fill, []

    def fill_or_fail(update: lazy.Update, targets: dict[str, torch.Tensor]) -> None:
        for name, tensor in targets.items():
            filled.append(name)
            if last and len(filled) == 12:
                raise RuntimeError("made up")
            fill(update, {name: tensor})

    lazy.Update.fill = fill_or_fail
    said = []
    for number in (2, 1000):
        try:
            rank.apply(number)
        except WeighbridgeError as error:
            said.append(str(error))
    found = {
        "said": said,
        "served": rank.status().served,
        "different": [*different(model, expected), *compute_differently(model, expected)],
    }
    rank.close()
    return found


def session(job: dict[str, Any]) -> dict[str, Any]:
    """Sessions of updates by the calls of vLLM's own worker: of a version that there is not, which it refuses, and of
    version 2.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    from weighbridge.errors import WeighbridgeError
    from weighbridge.integrations.vllm import register

    register()
    config = engine_config(job, weight_transfer_config={"backend": "weighbridge"})
    expected = processed(config, by_vllm(engine_config({**job, "folder": job["folder2"]})))
    config.compilation_config.static_forward_context.clear()
    runner = SimpleNamespace(reset_lora_state=lambda: None, get_model=lambda: runner.model)
    runner.load_model = lambda **_options: setattr(runner, "model", get_model(vllm_config=config))
    worker: Any = CPUWorker.__new__(CPUWorker)
    vars(worker).update(
        vllm_config=config,
        model_config=config.model_config,
        parallel_config=config.parallel_config,
        device=torch.device("cpu"),
        rank=0,
        model_runner=runner,
        weight_transfer_engine=None,
        _weight_update_active=False,
        _weight_update_is_draft=False,
    )
    worker.load_model()
    worker.init_weight_transfer_engine({"server": job["server"], "model": job["model"], "version": "1"})
    said, whole = [], []
    for number in (1000, 2):
        worker.start_weight_update()
        whole.append(not any(tensor.is_meta for tensor in runner.model.parameters()))
        try:
            worker.update_weights({"version": number, "phase": "prepare"})
            worker.update_weights({"version": number})
        except WeighbridgeError as error:
            said.append(str(error))
        with suppress(RuntimeError):  # after a refusal it raises again on the rank that has raised
            worker.finish_weight_update()
    status = worker.weight_transfer_engine.rank.status()
    worker.weight_transfer_engine.shutdown()
    return {
        "said": said,
        "whole": whole,
        "served": status.served,
        "different": [*different(runner.model, expected), *compute_differently(runner.model, expected)],
    }


def drafter(job: dict[str, Any]) -> dict[str, Any]:
    """Updates of a model and its drafter, each loaded by the plug-in and sharing what vLLM lets them share: to version
    2, to 1, and to 2 again.
    """
    from weighbridge.integrations.vllm import register

    register()
    expected = {1: with_drafter(job), 2: with_drafter({**job, "folder": job["folder2"]})}
    if not all(map(different, expected[1][:2], expected[2][:2])):
        raise AssertionError("the versions do not differ")
    extra = {"server": job["server"], "model": job["model"], "version": "1"}
    target, drafter, config = with_drafter(job, load_format="weighbridge", model_loader_extra_config=extra)
    found = {"started": different(target, expected[1][0]) + different(drafter, expected[1][1])}
    rank = WeightTransferEngineFactory.create_engine(
        config.weight_transfer_config, config, torch.device("cpu"), target
    ).rank
    where = [p.data_ptr() for model in (target, drafter) for p in model.parameters()]
    rank.connect()
    for turn, number in enumerate((2, 1, 2)):
        rank.apply(number)
        found[f"{turn}: version {number}"] = [
            name
            for mine, of_fresh in zip((target, drafter), expected[number][:2], strict=True)
            for name in different(mine, of_fresh)
        ]
    rank.close()
    moved = where != [p.data_ptr() for model in (target, drafter) for p in model.parameters()]
    shared = [each for each in target.parameters() if any(each is other for other in drafter.parameters())]
    return {"different": found, "moved": moved, "shared": len(shared), "served": rank.status().served}


def drafter_left(job: dict[str, Any]) -> dict[str, Any]:
    """An update by a version that has nothing for the drafter, before and after that is allowed."""
    from weighbridge.errors import WeighbridgeError
    from weighbridge.integrations.vllm import register

    register()
    expected, *_ = with_drafter({**job, "folder": job["folder2"]})
    target, drafter, config = with_drafter(job)
    of_target = {id(each) for each in target.parameters()}
    own = {name: each for name, each in drafter.named_parameters() if id(each) not in of_target}
    before = {name: (each.data_ptr(), each.detach().clone()) for name, each in own.items()}
    rank = WeightTransferEngineFactory.create_engine(
        config.weight_transfer_config, config, torch.device("cpu"), target
    ).rank
    source, refused = ModelSource(job["model"], job["server"]), ""
    try:
        rank.apply(1, source)
    except WeighbridgeError as error:
        refused = str(error)
    rank.stale_drafter = "allow"
    rank.apply(1, source)
    rank.close()
    changed = [
        name
        for name, (where, value) in before.items()
        if where != own[name].data_ptr() or not torch.equal(value, own[name])
    ]
    shared = {id(each) for each in target.parameters()} & {id(each) for each in drafter.parameters()}
    return {
        "refused": refused,
        "different": different(target, expected),
        "changed": changed,
        "own": len(own),
        "shared": len(shared),
        "stale": rank.status().stale,
        "unseen": rank.evidence().unseen,
    }


def with_drafter(job: dict[str, Any], **load: Any) -> tuple[torch.nn.Module, torch.nn.Module, Any]:
    """A model and its drafter, as vLLM's worker makes them, and vLLM's configuration."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    config = engine_config(
        job,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        weight_transfer_config={"backend": "weighbridge"},
    )
    config.load_config = replace(config.load_config, **load)
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config):
        target = get_model(vllm_config=config)
        drafter = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    proposer: Any = SimpleNamespace(model=drafter, vllm_config=config, use_local_argmax_reduction=False)
    SpecDecodeBaseProposer._maybe_share_embeddings(proposer, target)
    SpecDecodeBaseProposer._maybe_share_lm_head(proposer, target)
    return target, drafter, config


def drafters_named(job: dict[str, Any]) -> dict[str, Any]:
    """Drafters that the plug-in sees before one is loaded: of methods that draft without a model, and on stages of a
    pipeline.
    """
    from weighbridge.integrations.vllm import releases

    def seen(**speculative: Any) -> str:
        config = engine_config(job, speculative_config={"num_speculative_tokens": 1, **speculative})
        return releases.drafting(config).name

    found = {
        "ngram": seen(method="ngram", prompt_lookup_max=2),
        "custom_class": seen(method="custom_class", model="package.Proposer"),
    }
    for last in (False, True):
        releases.get_pp_group = partial(SimpleNamespace, is_last_rank=last)
        found[f"mtp, {'last' if last else 'first'} stage"] = seen(method="mtp")
    return found


def refuse(job: dict[str, Any]) -> str:
    """Error that refuses a version which does not fit; empty if there is none."""
    from weighbridge import EngineClient
    from weighbridge import _lazy as lazy
    from weighbridge.errors import WeighbridgeError
    from weighbridge.integrations.engine_rank.preparation import check_model

    config = engine_config(job, hf_overrides=job.get("overrides", {}))
    model = made(config)
    with EngineClient(job["server"]) as client, making(config):
        source = lazy.Source(client, job["model"], 1)
        source.specs = tuple(spec for spec in source.specs if spec.name != job.get("without"))
        engine = VllmModel(model, config)
        try:
            check_model(engine.config, client, source.version)
            engine.record_first(source)
        except WeighbridgeError as error:
            return str(error)
    return ""


# -- ranks ------------------------------------------------------------------------------------------------------------


def has_experts(job: dict[str, Any]) -> bool:
    return "_experts" in (Path(job["folder"]) / "config.json").read_text()


def rank_main(rank: int, size: int, meeting: str, jobs: list[dict[str, Any]], answers: Any) -> None:
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.set_num_threads(1)
    os.environ["VLLM_DIST_IDENT"] = Path(meeting).name  # as vLLM's CPU worker does
    try:
        # vLLM makes groups for experts only where the model has some
        with set_current_vllm_config(engine_config(max(jobs, key=has_experts))):
            init_distributed_environment(size, rank, f"file://{meeting}", rank, "gloo")
            initialize_model_parallel(size)
        said = []
        for job in jobs:
            with kernels_of(job):
                said.append(globals()[job["do"]](job))
        answers.send(said)
    except BaseException:
        answers.send(traceback.format_exc())
        raise


def main() -> None:
    asked = json.load(sys.stdin)
    size, jobs = asked["tp"], [{**job, "tp": asked["tp"]} for job in asked["jobs"]]
    meeting = Path(asked["work"]) / f"meeting-{os.getpid()}"
    # forked: what takes vLLM ten seconds to import is imported once
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=rank_main, args=(rank, size, str(meeting), jobs, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    said = []
    for rank, (answers, _) in enumerate(pipes):
        if not answers.poll(asked["seconds"]):
            sys.exit(f"rank {rank} says nothing")
        said.append(answers.recv())
        if isinstance(said[-1], str):
            sys.exit(f"rank {rank}: {said[-1]}")
    for rank in ranks:
        rank.join()
    print("\n" + json.dumps([list(of_job) for of_job in zip(*said, strict=True)]))


if __name__ == "__main__":
    main()
