"""Training states of models with peft's adapters: does training go on as if it had not stopped, and are weights merged
for engines alone?

What is right is a run that never stopped, and peft's own ``merge_and_unload`` of a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.training_states import Whole
from weighbridge import CheckpointManager, EngineClient, LayoutError, TrainerClient
from weighbridge._trainers.states.torch_training import TorchRestore, training_tensors
from weighbridge._trainers.states.training_state import RankValues, TrainingState

peft = pytest.importorskip("peft")
CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "saved head": {"modules_to_save": ["lm_head"]},
    "tied": {},
}
"""Options of LoraConfig; the model of the last one has tied embeddings."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


def config(case: str = "lora") -> Any:
    return tiny_config("llama", tied=case == "tied", num_hidden_layers=2, vocab_size=64)


def adapted(case: str = "lora", *, seed: int = 1, **named: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model with fresh adapters, and the optimizer of what is trained of it."""
    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], **CASES[case])
    model = peft.get_peft_model(tiny_model(config(case), seed=1), lora, **named)
    return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def loss(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    """The loss before a step, which is made."""
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(5))
    found: Tensor = model(input_ids=tokens, labels=tokens).loss
    found.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return found.detach()


@pytest.mark.parametrize("until", [None, "optimizer_step"])
@pytest.mark.parametrize("case", CASES)
def test_training_with_adapters_goes_on_to_the_bit_and_engines_get_what_peft_merges(
    service: RunningService, tmp_path: Path, case: str, until: str | None
) -> None:
    name = f"tests/{case.replace(' ', '-')}-{until or 'in-call'}"
    config(case).save_pretrained(tmp_path)
    model, optimizer = adapted(case)
    with TrainerClient(service.address) as trainer:
        trainer.register_model(name, tmp_path, dtype="fp32")
        saving = CheckpointManager(trainer, name, model, optimizer, until=until)
        for _ in range(2):
            loss(model, optimizer)
        merged = copy.deepcopy(model).merge_and_unload().state_dict()
        saving.save(2)
        right = [loss(model, optimizer) for _ in range(2)]
        assert saving.wait(timeout=60)

        fresh, renewed = adapted(case, seed=9)
        assert CheckpointManager(trainer, name, fresh, renewed).restore()
    assert [loss(fresh, renewed) for _ in range(2)] == right
    with EngineClient(service.address) as engine:
        pulled = dict(engine.pull(name))
    assert {*merged} - {*pulled} <= {"lm_head.weight"}
    assert [each for each, tensor in pulled.items() if not torch.equal(tensor, merged[each])] == []


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> Whole:
    return Whole.of([TrainingState.of(training_tensors(model, optimizer), RankValues(), 0)])


def test_a_state_fits_the_adapters_that_it_has_and_says_how_a_module_gets_them() -> None:
    kept = state_of(*adapted())

    bare = tiny_model(config(), seed=1)
    with pytest.raises(LayoutError, match="the module has none") as refused:
        kept.fill(TorchRestore(bare, None))
    assert "get_peft_model" in refused.value.fix

    with pytest.raises(LayoutError, match="has the adapters 'default', and the module has 'other'") as refused:
        kept.fill(TorchRestore(adapted(adapter_name="other")[0], None))
    assert "adapter_name=" in refused.value.fix

    merged, _ = adapted()
    merged.merge_adapter()
    with pytest.raises(LayoutError, match="4 layers have adapters that are merged") as refused:
        kept.fill(TorchRestore(merged, None))
    assert "unmerge_adapter" in refused.value.fix

    without = state_of(bare, torch.optim.AdamW(bare.parameters()))
    with pytest.raises(LayoutError, match="of a model without adapters, and the module has 'default'"):
        without.fill(TorchRestore(adapted()[0], None))
