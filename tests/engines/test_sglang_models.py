"""Do the parameters of real SGLang models become what SGLang's own loader makes of the whole files, and does each rank
bring only its own?
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.sglang_engines import HAS_PLUGINS, Ranks, needs_sglang, ranks
from weighbridge import TrainerClient
from weighbridge_service.families import model_types

pytestmark = [needs_sglang, pytest.mark.slow, pytest.mark.timeout(900)]

LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "tp4": (4, 1), "ep2": (2, 2)}
FAMILIES = {
    "llama": ("llama", False),
    "qwen2": ("qwen2", False),
    "qwen2-tied": ("qwen2", True),
    "qwen3": ("qwen3", False),
    "qwen3_moe": ("qwen3_moe", False),
    "mixtral": ("mixtral", False),
    "llama-fp32": ("llama", False),
}
"""In bfloat16, but for the last, which the engine casts."""
_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 96, "vocab_size": 256,
    "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 4, "pad_token_id": 0}
UNMAPPED: dict[str, dict[str, Any]] = {
    "opt": {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64},  # biases everywhere, the output layer tied
    "olmo2": _GROUPED,  # norms of all queries and of all keys together
    "phi3": _GROUPED,  # queries, keys and values in one tensor
    "starcoder2": {**_GROUPED, "vocab_size": 254},  # padded by SGLang
    # experts one by one, and stacked
    "olmoe": {**_GROUPED, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {**_GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2},
}
"""Model types that SGLang knows and that have no weight map: fields of their configs."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def folders(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The files of versions 1 and 2 of each model, as transformers has written them."""
    assert UNMAPPED.keys().isdisjoint(model_types())
    configs: dict[str, PretrainedConfig] = {
        name: tiny_config(family, tied=tied, vocab_size=256) for name, (family, tied) in FAMILIES.items()
    }
    configs |= {name: CONFIG_MAPPING[name](**fields) for name, fields in UNMAPPED.items()}
    found = {}
    with TrainerClient(service.address) as trainer:
        for name, config in configs.items():
            dtype = torch.float32 if name.endswith("fp32") else torch.bfloat16
            pair = (tmp_path_factory.mktemp(name), tmp_path_factory.mktemp(name))
            for seed, folder in enumerate(pair):
                tiny_model(config, seed).to(dtype).save_pretrained(folder)
                if seed == 0:
                    trainer.register_model(f"tests/{name}", folder)
                trainer.push_folder(f"tests/{name}", folder, step=seed).wait(timeout=60)
            found[name] = pair
    return found


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(*LAYOUTS[request.param], tmp_path_factory.mktemp(request.param)) as started:
        yield started


@pytest.mark.skipif(not HAS_PLUGINS, reason="this release calls no plug-in before it reads a model's configuration")
@pytest.mark.parametrize("name", [*FAMILIES, *UNMAPPED])
def test_a_rank_holds_after_a_pull_what_its_own_loader_makes_of_all_files_and_brings_no_more(
    name: str, engine: Ranks, service: RunningService, folders: dict[str, tuple[Path, Path]]
) -> None:
    width = 2 if name.endswith("fp32") else 1
    sent = service.service.serving.bytes_out
    started = engine.tell("build", "lazy", f"weighbridge://{service.address}/tests/{name}@1")
    held = [answer["held"] * width for answer in started]
    assert service.service.serving.bytes_out - sent == pytest.approx(sum(held), rel=0.01)
    engine.tell("build", "whole", str(folders[name][0]))
    for answer in engine.tell("different", "whole", "lazy"):
        assert not answer["names"]
        assert answer["compared"] > 20

    wanted = json.dumps({"server": service.address, "model": f"tests/{name}", "version": 2})
    sent = service.service.serving.bytes_out
    updated = engine.tell("apply", "lazy", wanted)
    assert service.service.serving.bytes_out - sent == pytest.approx(sum(held), rel=0.01)
    assert [answer["served"] for answer in updated] == [f"tests/{name}@2"] * engine.tp
    engine.tell("build", "whole", str(folders[name][1]))
    for answer in engine.tell("different", "whole", "lazy"):
        assert not answer["names"]
    engine.tell("forget", "whole", "lazy")


@pytest.mark.parametrize("name", [*FAMILIES, *UNMAPPED])
def test_an_engine_that_was_started_from_files_has_its_loader_recorded_by_the_first_update(
    name: str, engine: Ranks, service: RunningService, folders: dict[str, tuple[Path, Path]]
) -> None:
    width = 2 if name.endswith("fp32") else 1
    wanted = json.dumps({"server": service.address, "model": f"tests/{name}", "version": 2})
    engine.tell("build", "whole", str(folders[name][1]))
    held = [answer["held"] * width for answer in engine.tell("build", "other", str(folders[name][0]))]
    prepared = engine.tell("prepare", "other", wanted)
    assert [answer["nbytes"] for answer in prepared] == pytest.approx(held, rel=0.01)
    assert all(answer["names"] for answer in engine.tell("different", "whole", "other"))
    engine.tell("apply", "other", wanted)
    for answer in engine.tell("different", "whole", "other"):
        assert not answer["names"]
    engine.tell("forget", "whole", "other")
