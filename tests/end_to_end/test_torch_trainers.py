"""Torch trainers -> service -> engines, and back onto other meshes: is every bit where torch's own ``full_tensor()``
has it?

Real ranks over gloo share small models of transformers by FSDP2, HSDP, tensor parallelism and DDP. They overwrite their
parameters once `push_state_dict` has returned. A job runs several cases, for its start takes longer than they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.torch_ranks import fill, full_tensors, run_ranks, shared
from tests.support.zero3_ranges import gathered, partition
from weighbridge import EngineClient, LayoutError, PushReport, TrainerClient

UNEVEN = 131
"""Tokens that neither two nor four ranks share evenly."""


@dataclass(frozen=True)
class Case:
    """A model, and what a job does with it.

    Attributes:
        way: how ranks share it when it is pushed; see `torch_ranks.shared`.
        back: how they share the one that is filled again.
        config: of the model.
        registered: dtype in the service.
        held: dtype of the ranks' tensors.
        lane: how weights travel.
    """

    way: str
    back: str
    config: PretrainedConfig
    registered: str = "fp32"
    held: torch.dtype = torch.float32
    lane: str = "local"

    @property
    def name(self) -> str:
        """The model's name, which differs in each case."""
        held = str(self.held).removeprefix("torch.")
        return f"tests/{self.way}-{self.config.model_type}-{self.registered}-{held}-{self.lane}"


def llama(**fields: Any) -> PretrainedConfig:
    return tiny_config("llama", tied=False, num_hidden_layers=2, **{"vocab_size": UNEVEN, **fields})


def qwen3(**fields: Any) -> PretrainedConfig:
    return tiny_config("qwen3", tied=True, num_hidden_layers=2, **{"vocab_size": UNEVEN, **fields})


TWO_RANKS = [
    Case("fsdp", "ddp", qwen3(), lane="grpc"),
    Case("fsdp", "fsdp", llama(), "bf16", lane="local"),
    Case("fsdp", "fsdp", llama(), "bf16", lane="grpc"),
    Case("fsdp", "ddp", llama(), "fp32", torch.bfloat16),
    Case("compiled_fsdp", "fsdp", qwen3()),
    Case("ddp", "compiled_fsdp", qwen3(), "bf16", torch.bfloat16),
    Case("ddp", "fsdp", llama(), "fp16", lane="grpc"),
]
FOUR_RANKS = [
    Case("hsdp", "tp_fsdp", llama()),
    Case("hsdp", "fsdp4", qwen3(), "bf16", lane="grpc"),
    Case("tp_fsdp", "hsdp", llama(), "bf16", torch.bfloat16),
    Case("tp_fsdp", "fsdp4", llama(), "bf16", lane="grpc"),
    Case("fsdp4", "tp_fsdp", llama(), "fp32", torch.bfloat16, lane="grpc"),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        yield running


def register(service: RunningService, case: Case, folder: Path) -> None:
    case.config.save_pretrained(folder)
    with TrainerClient(service.address) as trainer:
        trainer.register_model(case.name, folder, dtype=case.registered)


@dataclass(frozen=True)
class Pushed:
    """The result of one rank: the tensors that it pushed, and those that it restored.

    Attributes:
        number: of the version.
        report: what the push cost.
        expected: all tensors as they were when they were pushed; of rank 0 only.
        restored: all tensors after they were filled from the version, onto another mesh; of rank 0 only.
    """

    number: int
    report: PushReport
    expected: dict[str, Tensor] | None
    restored: dict[str, Tensor] | None


def _rank(rank: int, address: str, cases: list[Case]) -> list[Pushed]:
    """Push each case as a trainer does, change every weight, and fill a model on another mesh."""
    found = []
    for case in cases:
        model = shared(tiny_model(case.config, seed=5).to(case.held), case.way)
        expected = full_tensors(model)
        with TrainerClient(address, lane=case.lane) as trainer:
            handle = trainer.push_state_dict(case.name, model, step=1)
            fill(model.parameters(), 7.0)
            version = handle.wait(timeout=100)
            other = shared(tiny_model(case.config, seed=6).to(case.held), case.back)
            fill(other.parameters(), 8.0)
            assert trainer.restore_state_dict(case.name, other, version=version.number) == version
        restored = full_tensors(other)
        fill(other.parameters(), 9.0)
        with EngineClient(address, lane=case.lane) as engine:
            filled = engine.pull(f"{case.name}@{version.number}").into(other, cast="allow")
        assert filled.version == version
        for name, tensor in full_tensors(other).items():
            assert torch.equal(tensor, restored[name]), (case, name)
        report = handle.report()
        found.append(
            Pushed(version.number, report, expected, restored)
            if rank == 0
            else Pushed(version.number, report, None, None)
        )
    return found


@pytest.mark.parametrize(("size", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)], ids=["2", "4"])
def test_what_ranks_share_is_pulled_whole_and_fills_other_meshes_bit_for_bit(
    service: RunningService, tmp_path: Path, size: int, cases: list[Case]
) -> None:
    for case in cases:
        register(service, case, tmp_path / case.name)
    results = run_ranks(size, _rank, service.address, cases)
    for index, case in enumerate(cases):
        ranks = [of_rank[index] for of_rank in results]
        assert len({rank.number for rank in ranks}) == 1
        expected, restored = ranks[0].expected, ranks[0].restored
        assert expected is not None
        assert restored is not None
        kept = getattr(torch, {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[case.registered])
        with EngineClient(service.address) as engine:
            pulled = dict(engine.pull(case.name, ranks[0].number))
        if case.config.tie_word_embeddings:
            assert torch.equal(restored["lm_head.weight"], restored["model.embed_tokens.weight"])
            del expected["lm_head.weight"]
        assert pulled.keys() == expected.keys(), case
        for name, tensor in expected.items():
            assert pulled[name].dtype == kept
            assert torch.equal(pulled[name], tensor.to(kept)), (case, name)
            assert torch.equal(restored[name], tensor.to(kept).to(case.held)), (case, name)

        # each tensor once, whatever the replicas; and reports name the casts
        reports = [rank.report for rank in ranks]
        assert sum(report.stream_bytes for report in reports) == sum(each.nbytes for each in pulled.values())
        assert {report.lane for report in reports} == {case.lane}
        cast = sum(report.cast_tensors for report in reports)
        assert (cast >= len(pulled)) == (kept != case.held), case
        widened = sum(report.widened_tensors for report in reports)
        assert widened == (cast if kept == torch.float32 else 0), case


def _odd_ranks(rank: int, address: str, name: str) -> dict[str, Any]:
    """The errors of refused pushes, by their mistake; and a push of tensors whose collectives are still in flight."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    config = llama()
    state = dict(shared(tiny_model(config, seed=5), "fsdp").state_dict())
    norm = state["model.norm.weight"]
    said: dict[str, Any] = {}
    with TrainerClient(address) as trainer:
        sums = DTensor.from_local(torch.ones(norm.shape), norm.device_mesh, [Partial()])
        short = DTensor.from_local(
            torch.ones(9), norm.device_mesh, norm.placements, run_check=False, shape=norm.shape, stride=(1,)
        )
        odd = {
            "partial": {**state, "model.norm.weight": sums},
            "short": {**state, "model.norm.weight": short},
            "missing": {key: value for key, value in state.items() if key != "model.norm.weight"},
        }
        for step, (what, entries) in enumerate(odd.items()):
            with pytest.raises(LayoutError) as error:
                trainer.push_state_dict(name, entries, step=step)
            said[what] = str(error.value)
        under_way = (
            (key, tensor.redistribute(placements=[Replicate()], async_op=True)) for key, tensor in state.items()
        )
        handle = trainer.push_state_dict(name, under_way, step=9, rank=rank, world_size=2)
        said["number"] = handle.wait(timeout=60).number
        said["expected"] = full_tensors(state)
        if rank == 0:  # as with a state dict that is gathered on rank 0
            alone = trainer.push_state_dict(name, said["expected"], step=10, rank=0, world_size=1)
            alone.wait(timeout=60)
    return said


def test_ranks_are_told_what_is_wrong_and_collectives_are_waited_for(service: RunningService, tmp_path: Path) -> None:
    case = Case("odd", "fsdp", llama())
    register(service, case, tmp_path)
    for said in run_ranks(2, _odd_ranks, service.address, case.name):
        assert "model.norm.weight: it is Partial(sum)" in said["partial"]
        assert "redistribute" in said["partial"]
        assert (
            "model.norm.weight: its local tensor is [9], but its placements (Shard(dim=0),) imply [32]" in said["short"]
        )
        assert "model.norm.weight F32[64]: box [0:64] has no source" in said["missing"]
        assert "state dict" in said["missing"]
        for version in (said["number"], "latest"):
            with EngineClient(service.address) as engine:
                pulled = dict(engine.pull(case.name, version))
            assert pulled.keys() == said["expected"].keys()
            assert all(torch.equal(pulled[key], tensor) for key, tensor in said["expected"].items())


@pytest.mark.smoke
def test_one_process_pushes_and_fills_a_model_and_is_told_all_that_is_wrong(
    service: RunningService, tmp_path: Path
) -> None:
    case = Case("alone", "", qwen3(), "bf16")
    register(service, case, tmp_path)
    model = tiny_model(case.config, seed=5)
    with TrainerClient(service.address) as trainer:
        state = model.state_dict()
        wrong = {**state, "model.norm.weight": torch.ones(63), "model.norms.weight": torch.ones(64)}
        del wrong["model.layers.1.mlp.up_proj.weight"]
        with pytest.raises(LayoutError) as error:
            trainer.push_state_dict(case.name, wrong, step=1)
        assert set(error.value.details) == {
            "model.norm.weight is [63], and the model has model.norm.weight BF16[64]",
            "model.norms.weight: the model has no such tensor; did you mean model.norm.weight?",
            "model.layers.1.mlp.up_proj.weight BF16[96, 64] is missing",
        }
        adapter = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight": torch.ones(2, 64)}
        with pytest.raises(LayoutError, match="push the model itself"):
            trainer.push_state_dict(case.name, {**state, **adapter}, step=1)
        with pytest.raises(LayoutError, match="casts are not allowed"):
            trainer.push_state_dict(case.name, model, step=1, cast="never")
        assert trainer.versions(case.name, include_invisible=True) == []

        handle = trainer.push_state_dict(case.name, model, step=1)
        assert handle.report().cast_tensors == len(state) - 1
        number = handle.wait(timeout=60).number
        same = model.bfloat16()
        again = trainer.push_state_dict(case.name, same, step=2, cast="never")
        assert again.report().cast_tensors == 0
        again.wait(timeout=60)

        part = {"module.model.norm.weight": torch.zeros(64, dtype=torch.float64)}
        with pytest.raises(LayoutError, match="is missing"):
            trainer.restore_state_dict(case.name, part, version=number)
        with pytest.raises(LayoutError, match="none of the 1 tensor that"):
            trainer.restore_state_dict(case.name, {"norms": torch.zeros(64)}, version=number, strict=False)
        assert not part["module.model.norm.weight"].any()
        part["head.of.my.own"] = torch.zeros(2)
        trainer.restore_state_dict(case.name, part, version=number, strict=False)
        assert torch.equal(part["module.model.norm.weight"], same.model.norm.weight.double())
        assert trainer.restore_state_dict(case.name, {}, strict=False).number == number + 1


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_weights_that_are_not_numbers_are_cast_and_pass_for_no_damage(
    service: RunningService, tmp_path: Path, lane: str
) -> None:
    """The sample that a version is verified by is cast apart from what is written."""
    case = Case("nan", "", qwen3(), "bf16", lane=lane)
    register(service, case, tmp_path)
    model = tiny_model(case.config, seed=5)
    fill(model.parameters(), float("nan"))
    with TrainerClient(service.address, lane=lane) as trainer:
        number = trainer.push_state_dict(case.name, model, step=1).wait(timeout=60).number
        fill(model.parameters(), 1.0)
        trainer.restore_state_dict(case.name, model, version=number)
    assert all(bool(tensor.isnan().all()) for tensor in model.state_dict().values())


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_ranges_of_zero_3_are_pushed_by_three_ranks_and_filled_on_two_without_a_collective(
    service: RunningService, tmp_path: Path, lane: str
) -> None:
    """The ranks are threads, between which torch.distributed could not gather anything."""
    case = Case("zero3", "", llama(), "bf16", lane=lane)
    register(service, case, tmp_path)

    def ranks(seed: int, size: int) -> list[PreTrainedModel]:
        models = [tiny_model(case.config, seed=seed) for _ in range(size)]
        for rank, model in enumerate(models):
            for name, parameter in model.named_parameters():
                partition(parameter, rank, size, persistent="norm" in name)
        return models

    def push(rank: int, model: PreTrainedModel) -> PushReport:
        with TrainerClient(service.address, lane=lane) as trainer:
            handle = trainer.push_state_dict(case.name, model, step=1, rank=rank, world_size=3)
            handle.wait(timeout=60)
            return handle.report()

    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(push, range(3), ranks(5, 3)))
    expected = {name: tensor.bfloat16() for name, tensor in tiny_model(case.config, seed=5).state_dict().items()}
    with EngineClient(service.address) as engine:
        pulled = dict(engine.pull(case.name))
    assert pulled.keys() == expected.keys()
    assert all(torch.equal(pulled[name], tensor) for name, tensor in expected.items())
    shares = [report.stream_bytes for report in reports]
    assert sum(shares) == sum(tensor.nbytes for tensor in expected.values())
    assert max(shares) - min(shares) < 100

    models = ranks(6, 2)
    with TrainerClient(service.address, lane=lane) as trainer:
        for model in models:
            trainer.restore_state_dict(case.name, model)
    for name, tensor in expected.items():
        parts = [model.get_parameter(name) for model in models]
        assert torch.equal(gathered(parts), tensor.float()), name
        if "norm" in name:
            assert all(torch.equal(part.detach(), tensor.float()) for part in parts)


def _peak_of_a_push(rank: int, address: str, lane: str, hf_dir: str) -> tuple[int, int]:
    """Bytes by which a push raises a rank's most resident memory, and bytes of the whole model."""
    module = torch.nn.Sequential(*(torch.nn.Linear(4096, 3072, bias=False) for _ in range(4)))
    whole = sum(parameter.nbytes for parameter in module.parameters())
    model = f"tests/peak-{lane}"
    with TrainerClient(address, lane=lane) as trainer:
        trainer.register_model(model, hf_dir, tensors=module, weight_map=False)
        for parameter in module.parameters():
            partition(parameter, rank, 2)
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        before = _most_resident()
        trainer.push_state_dict(model, module, step=1).wait(timeout=120)
        return _most_resident() - before, whole


def _most_resident() -> int:
    [line] = [each for each in Path("/proc/self/status").read_text("ascii").splitlines() if "VmHWM" in each]
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_a_rank_of_zero_3_takes_memory_for_its_own_ranges_and_not_for_the_model(
    service: RunningService, tmp_path: Path, lane: str
) -> None:
    llama().save_pretrained(tmp_path)
    for raised, whole in run_ranks(2, _peak_of_a_push, service.address, lane, str(tmp_path)):
        assert raised < 0.75 * whole  # half of it is the rank's own
