"""Has a version that transformers' Trainer pushes what `save_pretrained` writes beside the weights, so that engines
stop where the trainer does?
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    GenerationConfig,
    LlamaForCausalLM,
    TrainerControl,
    TrainerState,
)

from tests.support.reference import tiny_config
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge.integrations.transformers.trainer_callback import PushCallback

_CONFIGURATION = """
from transformers import PretrainedConfig
class CubeConfig(PretrainedConfig):
    model_type = "cube"
"""
_MODELING = """
import torch
from transformers import PreTrainedModel
from .configuration_cube import CubeConfig
from .sides import SIDE
class CubeModel(PreTrainedModel):
    config_class = CubeConfig
    def __init__(self, config):
        super().__init__(config)
        self.side = torch.nn.Linear(SIDE, SIDE)
        self.post_init()
    def _init_weights(self, module): pass
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


def pushed(service: RunningService, name: str, model: Any) -> dict[str, bytes]:
    """The files of a model whose first version a Trainer's callback has pushed."""
    with closing(PushCallback(name, service.address, strict=True)) as callback:
        callback.on_save(None, TrainerState(global_step=1), TrainerControl(), model=model)  # type: ignore[arg-type]
    with TrainerClient(service.address) as client:
        return dict(client.model_files(name))


def test_what_ends_an_answer_is_what_the_trainer_has(service: RunningService, tmp_path: Path) -> None:
    model = LlamaForCausalLM(tiny_config("llama", tied=False))
    model.generation_config = GenerationConfig(eos_token_id=[2, 11], max_new_tokens=9)
    model.save_pretrained(tmp_path)
    files = pushed(service, "acme/chat", model)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert json.loads(files["generation_config.json"]) == saved
    assert saved["eos_token_id"] == [2, 11]


def test_a_generation_config_that_says_nothing_of_its_own_replaces_none(
    service: RunningService, tmp_path: Path
) -> None:
    model = LlamaForCausalLM(tiny_config("llama", tied=False))
    model.save_pretrained(tmp_path)
    chosen = {"eos_token_id": [2, 11]}
    (tmp_path / "generation_config.json").write_text(json.dumps(chosen))
    with TrainerClient(service.address) as client:
        client.register_model("acme/registered", tmp_path)
    assert json.loads(pushed(service, "acme/registered", model)["generation_config.json"]) == chosen


def test_code_of_a_repository_goes_with_a_model_that_is_made_by_it(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder, saved, out = tmp_path / "cube", tmp_path / "saved", tmp_path / "out"
    folder.mkdir()
    auto_map = {"AutoConfig": "configuration_cube.CubeConfig", "AutoModel": "modeling_cube.CubeModel"}
    files = {
        "configuration_cube.py": _CONFIGURATION,
        "modeling_cube.py": _MODELING,
        "sides.py": "SIDE = 8\n",
        "config.json": json.dumps({"model_type": "cube", "auto_map": auto_map}),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModel.from_config(config, trust_remote_code=True)
    model.save_pretrained(saved)
    there = pushed(service, "acme/cube", model)
    assert {name for name in there if name.endswith(".py")} == {path.name for path in saved.glob("*.py")}
    assert json.loads(there["config.json"])["auto_map"] == auto_map
    out.mkdir()
    for name, content in there.items():
        (out / name).write_bytes(content)
    (out / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    again = AutoModel.from_pretrained(out, trust_remote_code=True)
    assert torch.equal(again.side.weight, model.side.weight)
