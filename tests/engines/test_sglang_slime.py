"""Does a live SGLang server answer by the weights that Megatron ranks hold, after slime's updater has moved them?

Its text is compared with that of transformers on the same weights. The trainer's side is that of
`tests.frameworks.test_slime`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tests.engines.test_sglang_live import MODEL, PROMPT, TOKENS, Engine, live
from tests.support.killable_service import KillableService
from tests.support.megatron_families import build_family_model
from tests.support.megatron_ranks import run_ranks
from tests.support.reference import load_with_mbridge, tiny_config, tiny_model
from tests.support.sglang_engines import needs_sglang
from tests.support.slime_actors import EngineHandle, TrainerActor, arguments
from weighbridge import TrainerClient
from weighbridge_demo.megatron_cpu import Parallel

pytestmark = [needs_sglang, pytest.mark.slow, pytest.mark.timeout(900)]

PARALLEL = Parallel(tp=2, pp=2)


@pytest.fixture
def models() -> list[PreTrainedModel]:
    return [tiny_model(tiny_config("qwen3", tied=False), seed) for seed in (1, 2, 3)]


@pytest.fixture
def service(tmp_path: Path, models: list[PreTrainedModel]) -> Iterator[KillableService]:
    service = KillableService(tmp_path / "store")
    service.start()
    models[0].save_pretrained(tmp_path / "hf")
    with TrainerClient(service.address) as trainer:
        trainer.register_model(MODEL, tmp_path / "hf")
        trainer.push_folder(MODEL, tmp_path / "hf").wait(timeout=60)
    yield service
    service.kill()


def said(model: PreTrainedModel) -> list[int]:
    """The tokens that transformers generates from the prompt."""
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    found: list[int] = tokens[0, len(PROMPT) :].tolist()
    return found


def train(rank: int, config: PretrainedConfig, weights: list[dict[str, Tensor]], address: str, url: str) -> None:
    """Hold one model's weights after the other's, each brought to the engine."""
    del rank
    model = build_family_model(config, PARALLEL)
    settings = {"model": MODEL, "server": address}
    actor = TrainerActor("slime", arguments("slime", weighbridge=settings), [model])
    for number, state in enumerate(weights):
        load_with_mbridge(model, state, config)
        actor.update_weights([EngineHandle("slime", url)], 0 if number else 1)


def test_a_live_server_answers_by_the_weights_of_the_ranks(
    service: KillableService, models: list[PreTrainedModel], tmp_path: Path
) -> None:
    texts = [said(model) for model in models]
    assert len({tuple(text) for text in texts}) == 3
    engine: Engine
    with live(service, 2, tmp_path / "log") as engine:
        assert engine.says()[0] == texts[0]
        states = [dict(model.state_dict()) for model in models]
        run_ranks(PARALLEL, train, models[0].config, states[1:], service.address, engine.url, timeout=300)
        assert engine.says() == (texts[2], "2")
        run_ranks(PARALLEL, train, models[0].config, states[1:2], service.address, engine.url, timeout=300)
        assert engine.says() == (texts[1], "1")
        assert engine.driver.serving().version == 4
