"""Does an adapter from the service compute, on the base that it names or in a model that is there, what peft makes of
its folder?
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.test_adapters import (
    ALICE,
    BASE,
    CONFIG,
    KINDS,
    Service,
    adapted,
    log_probabilities,
    peft,
    serving,
)
from tests.support.reference import tiny_model
from weighbridge import EngineClient, FailedPrecondition, InvalidArgument, LayoutError, NotFound
from weighbridge.aio import AsyncEngineClient
from weighbridge.integrations.transformers import from_weighbridge, update


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("adapters")) as found:
        yield found


@pytest.fixture(scope="module")
def engine(service: Service) -> Iterator[EngineClient]:
    with EngineClient(service.running.address) as client:
        yield client


def empty(**options: Any) -> Any:
    """A model with an adapter of these options that changes nothing yet."""
    given = {"r": 4, "target_modules": ["q_proj", "down_proj"], **options}
    return peft.get_peft_model(tiny_model(CONFIG, seed=1), peft.LoraConfig(**given))


def by_peft(service: Service, folder: Path) -> Any:
    """The model that transformers and peft load from the base's folder and the adapter's."""
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(service.base), folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_an_adapter_is_filled_in_place_and_then_computes_what_was_pushed(
    kind: str, service: Service, engine: EngineClient
) -> None:
    pushed = adapted(**KINDS[kind])
    name = f"acme/into-{kind.replace('_', '-')}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of embeddings
        service.trainer.push_adapter(name, pushed, base=f"{BASE}@1", step=1).wait(timeout=60)
        model = empty(**KINDS[kind])
        held = {id(parameter) for parameter in model.parameters()}
        assert not torch.equal(log_probabilities(model), log_probabilities(pushed))
        filled = engine.pull(name, 1).into(model)
    assert torch.equal(log_probabilities(model), log_probabilities(pushed))
    assert {id(parameter) for parameter in model.parameters()} == held
    assert filled.version.number == 1
    assert (filled.missing, filled.unexpected) == ((), ())


def test_one_of_several_adapters_is_filled_and_ddp_and_compiled_models_are_looked_through(
    service: Service, engine: EngineClient
) -> None:
    service.push("acme/second")
    model = empty()
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    before = log_probabilities(model)
    engine.pull("acme/second", 1).into(torch.compile(model), adapter_name="other")
    assert torch.equal(log_probabilities(model), before)  # the first one is active
    model.set_adapter("other")
    assert torch.equal(log_probabilities(model), log_probabilities(adapted()))
    with pytest.raises(InvalidArgument, match="no adapter 'third'") as refused:
        engine.pull("acme/second", 1).into(model, adapter_name="third")
    assert "'default', 'other'" in refused.value.fix

    async def by_the_event_loop(model: Any) -> None:
        async with AsyncEngineClient(service.running.address) as client:
            await client.pull("acme/second", 1).into(model)

    model = empty()
    asyncio.run(by_the_event_loop(model))
    assert torch.equal(log_probabilities(model), log_probabilities(adapted()))


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written(service: Service, engine: EngineClient) -> None:
    service.push("acme/fits", lora_alpha=3)

    def refused(model: Any, kind: type[Exception]) -> Any:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(kind) as error:
            engine.pull("acme/fits", 1).into(model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        return error.value

    said = refused(empty(lora_alpha=3, r=2), LayoutError)
    assert any("layers.0.self_attn.q_proj.lora_A.weight" in each for each in said.details)
    assert "adapter_config.json of acme/fits@1" in said.fix
    said = refused(empty(lora_alpha=3, target_modules=["q_proj"]), LayoutError)
    assert any("down_proj.lora_A.weight" in each and "missing" in each for each in said.details), said.details
    said = refused(empty(lora_alpha=3, target_modules=["q_proj", "down_proj", "up_proj"]), LayoutError)
    assert any("up_proj" in each for each in said.details), said.details
    said = refused(empty(lora_alpha=3, modules_to_save=["lm_head"]), LayoutError)
    assert any("lm_head" in each for each in said.details), said.details
    said = refused(empty(lora_alpha=4), FailedPrecondition)
    assert list(said.details) == ["lora_alpha is 3 in the version and 4 in the model"]
    said = refused(empty(lora_alpha=3, use_rslora=True), FailedPrecondition)
    assert any("use_rslora" in each for each in said.details)
    said = refused(tiny_model(CONFIG, seed=1), FailedPrecondition)
    assert f"acme/fits@1 is an adapter on {BASE}@1" in str(said)
    merged = empty(lora_alpha=3)
    merged.merge_adapter()
    assert "unmerge_adapter" in refused(merged, LayoutError).fix
    with pytest.raises(LayoutError, match="has LoRA adapters already"):
        engine.pull(BASE, 1).into(empty())


def test_an_adapter_comes_with_its_base_and_computes_as_peft_makes_it_of_the_folder(
    service: Service, engine: EngineClient, tmp_path: Path
) -> None:
    service.push("acme/whole", f"{BASE}@2", lora_alpha=5, modules_to_save=["lm_head"])
    model = from_weighbridge("acme/whole@1", server=engine)
    assert isinstance(model, peft.PeftModel)
    expected = by_peft(service, service.export("acme/whole", tmp_path / "1"))
    assert torch.equal(log_probabilities(model), log_probabilities(expected))
    own, theirs = (
        {name: parameter.requires_grad for name, parameter in each.named_parameters()} for each in (model, expected)
    )
    assert own == theirs

    changed = adapted(lora_alpha=5, modules_to_save=["lm_head"])
    with torch.no_grad():
        for parameter in changed.parameters():
            if parameter.requires_grad:
                parameter.mul_(2)
    service.trainer.push_adapter("acme/whole", changed, base=f"{BASE}@2", step=2).wait(timeout=60)
    assert update(model, "latest").number == 2
    expected = by_peft(service, service.export("acme/whole", tmp_path / "2"))
    assert torch.equal(log_probabilities(model), log_probabilities(expected))
    service.trainer.push_adapter("acme/whole", changed, base=f"{BASE}@3", step=3).wait(timeout=60)
    with pytest.raises(FailedPrecondition, match=f"acme/whole@3 is on {BASE}@3, and this model is {BASE}@2") as refused:
        update(model, 3)
    assert "from_weighbridge" in refused.value.fix


def test_an_adapter_is_attached_to_a_model_that_is_there_if_that_is_not_known_to_be_another(
    service: Service, engine: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    service.push("acme/attached", f"{BASE}@1")
    with caplog.at_level(logging.WARNING):
        model = from_weighbridge("acme/attached@1", server=engine, base=tiny_model(CONFIG, seed=1))
    assert f"acme/attached@1 is on {BASE}@1; it is not known whether the model" in caplog.text
    assert torch.equal(log_probabilities(model), log_probabilities(adapted()))
    caplog.clear()
    base = from_weighbridge(f"{BASE}@1", server=engine)
    model = from_weighbridge("acme/attached@1", server=engine, base=base)
    assert "is not known" not in caplog.text
    both = from_weighbridge("acme/attached@1", server=engine, base=model, adapter_name="other")
    assert both is model
    assert sorted(model.peft_config) == ["default", "other"]
    with pytest.raises(InvalidArgument, match="has an adapter 'other' already"):
        from_weighbridge("acme/attached@1", server=engine, base=model, adapter_name="other")
    other = from_weighbridge(f"{BASE}@2", server=engine)
    with pytest.raises(FailedPrecondition, match=f"is on {BASE}@1, and this model is {BASE}@2"):
        from_weighbridge("acme/attached@1", server=engine, base=other)
    with pytest.raises(InvalidArgument, match=f"{BASE}@1 is not an adapter"):
        from_weighbridge(f"{BASE}@1", server=engine, base=other)


def test_an_adapter_whose_base_was_deleted_says_so_and_what_to_do(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        service.push(ALICE, f"{BASE}@1")
        service.push(ALICE, f"{BASE}@3", step=2)
        service.trainer.delete_version(BASE, 1, force=True)
        address = service.running.address
        with pytest.raises(NotFound, match=f"{ALICE}@1 is on {BASE}@1, which was deleted") as refused:
            from_weighbridge(f"{ALICE}@1", server=address)
        assert "base=model" in refused.value.fix
        model = from_weighbridge(f"{ALICE}@1", server=address, base=tiny_model(CONFIG, seed=1))
        assert torch.equal(log_probabilities(model), log_probabilities(adapted()))
        service.trainer.delete_model(BASE, force=True)
        service.trainer.import_folder(BASE, service.base).wait(timeout=60)
        for step in range(2, 4):
            service.trainer.import_folder(BASE, service.base, step=step).wait(timeout=60)
        with pytest.raises(NotFound):  # another model of the same name has that number, or has not
            from_weighbridge(f"{ALICE}@2", server=address)
