"""Does a live SGLang server compute the same as peft with an adapter from the service, and only on the base version
that the adapter names?
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.test_sglang_live import MODEL, PROMPT, TOKENS, Engine, live
from tests.support.killable_service import KillableService
from tests.support.reference import tiny_config, tiny_model
from tests.support.sglang_engines import HAS_PLUGINS, needs_sglang, update
from weighbridge import EngineClient, TrainerClient
from weighbridge.errors import FailedPrecondition
from weighbridge.follow.engines import EngineFailed

peft = pytest.importorskip("peft")
pytestmark = [
    needs_sglang,
    pytest.mark.skipif(not HAS_PLUGINS, reason="the engine starts from a version of the service"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
ALICE, BOB = "tests/alice", "tests/bob"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = (
    *("--enable-lora", "--max-lora-rank", "8", "--lora-backend", "torch_native", "--lora-target-modules"),
    *MODULES,
)


def adapted(seed: int, base: int, **options: Any) -> Any:
    """An adapter on the model of a version that changes its output."""
    torch.manual_seed(seed)
    given = {"r": 4, "lora_alpha": 16, "target_modules": MODULES, "init_lora_weights": False, **options}
    return peft.get_peft_model(tiny_model(tiny_config("qwen3", tied=False), base), peft.LoraConfig(**given)).eval()


def said(model: Any) -> list[int]:
    """The tokens that transformers generates from the prompt with a model."""
    tokens = torch.tensor([PROMPT])
    found = model.generate(input_ids=tokens, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    texts: list[int] = found[0, len(PROMPT) :].tolist()
    return texts


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableService]:
    service = KillableService(tmp_path_factory.mktemp("store"))
    service.start()
    with TrainerClient(service.address) as trainer:
        for seed in (1, 2):
            folder = tmp_path_factory.mktemp("model")
            tiny_model(tiny_config("qwen3", tied=False), seed).save_pretrained(folder)
            trainer.import_folder(MODEL, folder, step=seed).wait(timeout=60)
        for step, seed, base in ((1, 5, 1), (2, 6, 1), (3, 7, 2)):
            pushed = trainer.push_adapter(ALICE, adapted(seed, base), base=f"{MODEL}@{base}", step=step)
            pushed.wait(timeout=60)
        part = adapted(8, 1, target_modules=["q_proj"])
        trainer.push_adapter(BOB, part, base=f"{MODEL}@1", step=1).wait(timeout=60)
    yield service
    service.kill()


@pytest.fixture(scope="module")
def engine(service: KillableService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with live(service, 1, tmp_path_factory.mktemp("engine") / "log", *LORA) as started:
        yield started


def test_it_answers_by_the_version_that_a_request_names_and_unloads(
    engine: Engine, service: KillableService, tmp_path: Path
) -> None:
    """SGLang reads files of adapters by the load format of its model, so one that has started from the service takes
    tensors alone.
    """
    plain = said(tiny_model(tiny_config("qwen3", tied=False), 1))
    expected = {1: said(adapted(5, 1)), 2: said(adapted(6, 1))}
    assert len({tuple(each) for each in (plain, *expected.values())}) == 3
    driver = engine.driver
    with EngineClient(service.address) as client:
        assert driver.load_adapter(client, ALICE, 1).way == "tensors"
        assert driver.load_adapter(client, ALICE, 2).way == "tensors"
        for number, text in expected.items():
            assert engine.says(f"{ALICE}@{number}")[0] == text
        assert engine.says()[0] == plain
        assert driver.adapters() == (f"{ALICE}@1", f"{ALICE}@2")
        with pytest.raises(FailedPrecondition, match=f"{ALICE}@3 is on {MODEL}@2, and this engine serves {MODEL}@1"):
            driver.load_adapter(client, ALICE, "latest")
        with pytest.raises(FailedPrecondition, match="SGLang cannot serve tests/bob@1") as refused:
            driver.load_adapter(client, BOB)
        assert "q_proj and v_proj together" in refused.value.details[0]
        driver.unload_adapter(ALICE, 1)
        with pytest.raises(EngineFailed, match="load_format"):
            driver.load_adapter(client, ALICE, 1, tmp_path)
        with pytest.raises(EngineFailed):
            driver.unload_adapter(ALICE, 1)
        assert driver.adapters() == (f"{ALICE}@2",)
        driver.unload_adapter(ALICE, 2)


def test_the_base_of_adapters_is_updated_once_they_are_unloaded(engine: Engine, service: KillableService) -> None:
    driver = engine.driver
    with EngineClient(service.address) as client:
        driver.load_adapter(client, ALICE, 1)
        with pytest.raises(FailedPrecondition, match=f"has {ALICE}@1, on {MODEL}@1") as refused:
            driver.prepare(2)
        assert "--unload" in refused.value.fix
        assert engine.says(f"{ALICE}@1")[0] == said(adapted(5, 1))
        driver.unload_adapter(ALICE, 1)
        update(driver, 2)
        assert engine.says()[0] == said(tiny_model(tiny_config("qwen3", tied=False), 2))
        driver.load_adapter(client, ALICE, "latest")
        assert engine.says(f"{ALICE}@3")[0] == said(adapted(7, 2))
        driver.unload_adapter(ALICE, 3)
