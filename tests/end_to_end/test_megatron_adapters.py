"""Is an adapter of Megatron-core ranks, however they are cut, the one folder that peft loads to compute what they
compute?
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tests.support.megatron_families import build_family_model
from tests.support.megatron_lora import LoRALinear, add_lora
from tests.support.megatron_ranks import run_ranks
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TrainerClient, WeighbridgeError
from weighbridge._core.metadata import BaseVersion
from weighbridge_demo.megatron_cpu import Parallel, build_model, forward_logits

peft = pytest.importorskip("peft")
TOKENS = torch.randint(131, (2, 9), generator=torch.Generator().manual_seed(3))
TOLERANCE = 2e-5
CUTS = [Parallel(), Parallel(tp=2), Parallel(pp=2), Parallel(tp=2, pp=2), Parallel(dp=2)]


@dataclass(frozen=True)
class Base:
    """A base in the service, and the model of transformers that it is."""

    name: str
    model: PreTrainedModel

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def bases(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    found = {}
    for family, tied in (("qwen3", False), ("llama", True), ("qwen3_moe", False)):
        config = tiny_config(family, tied=tied, num_hidden_layers=2, vocab_size=132)
        base = Base(f"acme/{family}", tiny_model(config, seed=len(found)))
        folder = tmp_path_factory.mktemp(family)
        base.model.save_pretrained(folder)
        with TrainerClient(service.address) as trainer:
            trainer.import_folder(base.name, folder).wait(timeout=60)
        found[family] = base
    return found


KINDS: dict[str, dict[str, Any]] = {
    "fused": {},
    "canonical": {"canonical": True},
    "patterns": {"dim_of": {"linear_fc2": 2}, "alpha_of": {"linear_fc2": 3.0, "linear_proj": 12}},
    "one-layer": {"layers": [1], "targets": ["linear_qkv", "linear_fc1"]},
}


def _rank(
    rank: int,
    address: str,
    run: str,
    parallel: Parallel,
    base: str,
    config: PretrainedConfig,
    metadata: Any = None,
) -> dict[str, Tensor | None]:
    """Restore the base, then add each kind of adapter, compute, and push."""
    found = {}
    with TrainerClient(address, run=run) as trainer:
        for kind, options in KINDS.items():
            model = build_model(config, parallel)
            trainer.restore(base, model.sharded_state_dict())
            add_lora(model, **options)
            found[kind] = forward_logits(model, TOKENS, parallel)
            trainer.push_adapter(f"{base}-{kind}", model, base=f"{base}@1", step=1).wait(timeout=60)
    return found


def exported(service: RunningService, model: str, folder: Path) -> Path:
    with EngineClient(service.address) as engine:
        engine.export(model, "latest", folder)
    return folder


def log_probabilities(base: Base, folder: Path) -> Tensor:
    model = tiny_model(base.config, seed=0)
    model.load_state_dict(base.model.state_dict())
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(model, folder).eval()(input_ids=TOKENS).logits
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_ranks_of_any_cut_push_one_folder_that_computes_the_same_in_peft(
    service: RunningService, bases: dict[str, Base], family: str, tmp_path: Path
) -> None:
    base, first = bases[family], {}
    for cut, parallel in enumerate(CUTS):
        ranks = run_ranks(parallel, _rank, service.address, f"cut-{cut}", parallel, base.name, base.config)
        for kind in KINDS:
            folder = exported(service, f"{base.name}-{kind}", tmp_path / f"{kind}-{cut}")
            found = {
                each: (folder / each).read_bytes() for each in ("adapter_config.json", "adapter_model.safetensors")
            }
            if not cut:
                first[kind] = found
                computed = log_probabilities(base, folder)
            assert found == first[kind], (kind, parallel)
            logits = next(each[kind] for each in ranks if each[kind] is not None)
            if cut:
                computed = log_probabilities(base, folder)
            assert torch.allclose(torch.log_softmax(logits, -1), computed, atol=TOLERANCE), (kind, parallel)


EXPERT_CUTS = [Parallel(), Parallel(dp=2, ep=2), Parallel(tp=2, ep=2, etp=1), Parallel(tp=2, etp=2)]


def _expert_rank(
    rank: int, address: str, run: str, parallel: Parallel, base: str, config: PretrainedConfig
) -> Tensor | None:
    with TrainerClient(address, run=run) as trainer:
        model = build_family_model(config, parallel)
        trainer.restore(base, model.sharded_state_dict())
        add_lora(model, targets=("linear_fc1", "linear_fc2"))
        trainer.push_adapter(f"{base}-experts", model, base=f"{base}@1", step=1).wait(timeout=60)
        return forward_logits(model.eval(), TOKENS, parallel)


def test_experts_adapters_are_one_folder_however_the_experts_are_spread(
    service: RunningService, bases: dict[str, Base], tmp_path: Path
) -> None:
    base, files = bases["qwen3_moe"], set()
    for cut, parallel in enumerate(EXPERT_CUTS):
        ranks = run_ranks(parallel, _expert_rank, service.address, f"experts-{cut}", parallel, base.name, base.config)
        folder = exported(service, f"{base.name}-experts", tmp_path / str(cut))
        files.add((folder / "adapter_model.safetensors").read_bytes())
        if (
            parallel.expert_tp > 1
        ):  # Megatron-core leaves the sums of experts' ranks apart, and so adapters have no forward there
            continue
        computed = log_probabilities(base, folder)
        assert all(torch.allclose(torch.log_softmax(each, -1), computed, atol=TOLERANCE) for each in ranks)
    assert len(files) == 1
    assert any(".experts.7.down_proj.lora_B." in name for name in load_file(folder / "adapter_model.safetensors"))


def _restoring_rank(
    rank: int,
    address: str,
    parallel: Parallel,
    base: str,
    config: PretrainedConfig,
    model: str,
    canonical: bool,
) -> tuple[list[bool], str]:
    """Whether each parameter of a zeroed adapter came back; or the error of the restore."""
    held = build_model(config, parallel)
    add_lora(held, canonical=canonical)
    adapters = [each for name, each in held.named_parameters() if ".adapter." in name]
    expected = [each.detach().clone() for each in adapters]
    with torch.no_grad():
        for each in adapters:
            each.zero_()
    with TrainerClient(address) as trainer:
        try:
            trainer.restore_adapter(model, held)
        except WeighbridgeError as error:
            return [bool((each == 0).all()) for each in adapters], str(error)
    return [torch.equal(*each) for each in zip(adapters, expected, strict=True)], ""


@pytest.mark.parametrize("kind", ["fused", "canonical"])
def test_a_version_is_restored_into_ranks_that_are_cut_otherwise(
    service: RunningService, bases: dict[str, Base], kind: str
) -> None:
    base, name = bases["qwen3"], f"acme/back-{kind}"
    given = service.address, base.name, base.config, name, kind == "canonical"
    run_ranks(Parallel(tp=2), _pushing_rank, *given)
    for parallel in (Parallel(), Parallel(pp=2)):
        for same, error in run_ranks(parallel, _restoring_rank, service.address, parallel, *given[1:]):
            assert error == ""
            assert same
            assert all(same)


def _pushing_rank(rank: int, address: str, base: str, config: PretrainedConfig, model: str, canonical: bool) -> None:
    held = build_model(config, Parallel(tp=2))
    add_lora(held, canonical=canonical)
    with TrainerClient(address) as trainer:
        trainer.push_adapter(model, held, base=f"{base}@1", step=1).wait(timeout=60)


def test_an_adapter_that_fused_layers_cannot_have_is_refused_on_all_ranks_and_nothing_is_changed(
    service: RunningService, bases: dict[str, Base]
) -> None:
    base = bases["qwen3"]
    torch.manual_seed(4)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(base.config, seed=0), config)
    with TrainerClient(service.address) as trainer:
        trainer.push_adapter("acme/apart", model, base=f"{base.name}@1", step=1).wait(timeout=60)
    given = service.address, Parallel(pp=2), base.name, base.config, "acme/apart", False
    for unchanged, error in run_ranks(Parallel(pp=2), _restoring_rank, *given):
        assert "layers that the model fuses have different adapters" in error
        assert all(unchanged)


def _one_rank(rank: int, address: str, base: str, config: PretrainedConfig) -> dict[str, str]:
    """The errors of models that are refused, by name."""
    said = {}

    def refused(name: str, model: Any, on: str = f"{base}@1") -> None:
        with TrainerClient(address) as trainer:
            try:
                trainer.push_adapter(f"acme/refused-{name}", model, base=on, step=1)
            except WeighbridgeError as error:
                said[name] = str(error)

    def made(**options: Any) -> Any:
        model = build_model(config, Parallel())
        add_lora(model, **options)
        return model

    refused("bare", build_model(config, Parallel()))
    trained = made()
    trained.decoder.final_layernorm.weight.requires_grad_(True)
    refused("trained", trained)
    active = made(targets=["linear_proj"])
    for module in active.modules():
        if isinstance(module, LoRALinear):
            module.adapter.activation = torch.nn.SiLU()
    refused("active", active)
    refused("no-map", made(), "acme/listed@1")
    return said


def test_what_is_no_lora_on_a_base_with_a_weight_map_is_refused(
    service: RunningService, bases: dict[str, Base], tmp_path: Path
) -> None:
    base = bases["llama"]
    base.model.save_pretrained(tmp_path)
    with TrainerClient(service.address) as trainer:
        trainer.import_folder("acme/listed", tmp_path, weight_map=False).wait(timeout=60)
    [said] = run_ranks(Parallel(), _one_rank, service.address, base.name, base.config)
    assert "the model has no LoRA adapters" in said["bare"]
    assert "1 parameter is trained besides the adapters" in said["trained"]
    assert "decoder.final_layernorm.weight" in said["trained"]
    assert "has an activation between its two matrices" in said["active"]
    assert "was registered without a weight map" in said["no-map"]


def _failing_rank(rank: int, address: str, base: str, config: PretrainedConfig) -> tuple[str, str]:
    """One push that the second rank cannot make, one that it does not join, and one after both; the errors of the first
    two.
    """
    model = build_model(config, Parallel(tp=2))
    add_lora(model)
    with TrainerClient(address) as trainer:

        def refused(step: int, **options: Any) -> str:
            try:
                trainer.push_adapter("acme/failing", model, base=f"{base}@1", step=step, **options)
            except WeighbridgeError as error:
                return str(error)
            return ""

        model.decoder.final_layernorm.weight.requires_grad_(rank == 1)
        first = refused(1)
        model.requires_grad_(False)
        second = refused(2, max_hold_s=0.3) if rank == 0 else ""
        trainer.push_adapter("acme/failing", model, base=f"{base}@1", step=3).wait(timeout=60)
    return first, second


def test_a_rank_that_cannot_push_or_does_not_come_is_named_and_the_next_push_is_whole(
    service: RunningService, bases: dict[str, Base]
) -> None:
    base = bases["llama"]
    (told, late), (own, _) = run_ranks(Parallel(tp=2), _failing_rank, service.address, base.name, base.config)
    assert "not all ranks can push" in told
    assert "rank 1" in told
    assert "trained besides the adapters" in own
    assert "was still waiting for rank 1" in late
    with TrainerClient(service.address) as trainer:
        version = trainer.version("acme/failing")
    assert version.step == 3
    assert str(BaseVersion.of(version.metadata)) == f"{base.name}@1"
