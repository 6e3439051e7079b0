"""Is what was pushed from a folder what is served: its config, tokenizer and all other files beside its weights?"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    TrainerControl,
    TrainerState,
)

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TrainerClient, VersionState
from weighbridge.errors import LayoutError
from weighbridge.integrations.transformers.trainer_callback import PushCallback
from weighbridge_service.push.publisher import Publisher

TEMPLATES = {"default": "D", "tool_use": "T"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture
def trainer(service: RunningService) -> Iterator[TrainerClient]:
    with TrainerClient(service.address) as client:
        yield client


def _tokenizer(*templates: str) -> Any:
    from tokenizers import Tokenizer, models

    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
        unk_token="<unk>",
    )
    made.chat_template = {name: TEMPLATES[name] for name in templates} or None
    return made


def _folder(path: Path, seed: int = 1, **fields: Any) -> Path:
    tiny_model(tiny_config("llama", tied=False, num_hidden_layers=1, **fields), seed).save_pretrained(path)
    return path


def _exported(service: RunningService, name: str, folder: Path) -> Path:
    with EngineClient(service.address) as engine:
        engine.export(name, None, folder)
    return folder


def test_a_version_is_the_folder_that_was_pushed_with_its_config_and_chat_templates(
    service: RunningService, trainer: TrainerClient, tmp_path: Path
) -> None:
    name = "tests/carried"
    first = _folder(tmp_path / "first")
    _tokenizer("default").save_pretrained(first)
    (first / "LICENSE").write_text("theirs")
    trainer.import_folder(name, first).wait(timeout=60)
    second = _folder(tmp_path / "second", 2, rms_norm_eps=0.25)
    _tokenizer("default", "tool_use").save_pretrained(second)
    trainer.push_folder(name, second, step=2).wait("durable", timeout=60)

    found = _exported(service, f"{name}@2", tmp_path / "found")
    configs = [AutoConfig.from_pretrained(folder).to_diff_dict() for folder in (found, second)]
    assert configs[0] | {"_name_or_path": ""} == configs[1] | {"_name_or_path": ""}
    assert configs[0]["rms_norm_eps"] == 0.25
    assert AutoTokenizer.from_pretrained(found).chat_template == TEMPLATES
    assert (found / "LICENSE").read_text() == "theirs"
    # the version before is as it was, and ranks that push after it push the same model
    assert not (_exported(service, f"{name}@1", tmp_path / "before") / "additional_chat_templates").exists()
    model = AutoModelForCausalLM.from_pretrained(second)
    trainer.push_state_dict(name, model, step=3, rank=0, world_size=1).wait("durable", timeout=60)
    assert trainer.model_files(name, 3) == trainer.model_files(name, 2)


def test_a_config_of_other_heads_is_refused_and_no_version_is_opened(trainer: TrainerClient, tmp_path: Path) -> None:
    name = "tests/heads"
    trainer.import_folder(name, _folder(tmp_path / "hf")).wait(timeout=60)
    other = _folder(tmp_path / "other", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    with pytest.raises(
        LayoutError, match=r"config\.json of .*other describes a different model than tests/heads"
    ) as refused:
        trainer.push_folder(name, other, step=2)
    assert "import" in refused.value.fix
    assert [version.number for version in trainer.versions(name, include_invisible=True)] == [1]
    # without a map of its heads, the model is what its config says
    trainer.import_folder("tests/unmapped", tmp_path / "hf", weight_map=False).wait(timeout=60)
    trainer.push_folder("tests/unmapped", other, step=2).wait("durable", timeout=60)
    config = json.loads(trainer.model_files("tests/unmapped", 2)["config.json"])
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)


def test_a_trainer_pushes_with_its_own_chat_template_and_the_registered_dtype(
    service: RunningService, trainer: TrainerClient, tmp_path: Path
) -> None:
    name, first = "tests/trained", _folder(tmp_path / "first")
    _tokenizer("default").save_pretrained(first)
    trainer.register_model(name, first, dtype="bf16")
    model = AutoModelForCausalLM.from_pretrained(first)
    model.config.rms_norm_eps = 0.25
    callback = PushCallback(name, service.address, strict=True)
    said: Any = (None, TrainerState(global_step=7), TrainerControl())
    callback.on_train_begin(*said, model=model)
    callback.on_save(*said, model=model, processing_class=_tokenizer("default", "tool_use"))
    callback.wait()
    callback.close()
    found = _exported(service, f"{name}@latest", tmp_path / "found")
    assert AutoTokenizer.from_pretrained(found).chat_template == TEMPLATES
    config = AutoConfig.from_pretrained(found)
    assert (config.rms_norm_eps, config.dtype) == (0.25, torch.bfloat16)


def test_a_config_names_the_dtype_that_the_pushed_weights_were_cast_to(
    service: RunningService, trainer: TrainerClient, tmp_path: Path
) -> None:
    name = "tests/cast"
    model = tiny_model(tiny_config("llama", tied=False, num_hidden_layers=1), 1)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    trainer.import_folder(name, tmp_path / "bf16").wait(timeout=60)
    trainer.push_folder(name, _folder(tmp_path / "fp32"), step=2).wait("durable", timeout=60)
    found = _exported(service, f"{name}@2", tmp_path / "found")
    assert AutoModelForCausalLM.from_pretrained(found, torch_dtype="auto").dtype == torch.bfloat16


def test_a_version_that_is_not_stored_yet_has_its_own_files_though_others_are_registered_since(
    trainer: TrainerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, going, publish = "tests/ready", threading.Event(), Publisher.publish
    first = _folder(tmp_path / "hf")
    (first / "extra").mkdir()
    (first / "extra/one.txt").write_text("1")
    monkeypatch.setattr(Publisher, "publish", lambda *a, **k: going.wait(60) and publish(*a, **k))
    handle = trainer.import_folder(name, first)
    try:
        assert not handle.wait(VersionState.READY, timeout=60).state.stored
        mine = trainer.model_files(name, 1)
        trainer.register_files(name, {"config.json": mine["config.json"], "other.txt": b"2"})
        assert trainer.model_files(name, 1) == mine
        assert set(trainer.model_files(name)) == {"config.json", "other.txt"}
    finally:
        going.set()
    handle.wait("durable", timeout=60)
    assert trainer.model_files(name, 1) == mine
    assert mine["extra/one.txt"] == b"1"


def test_the_folder_in_which_transformers_keeps_templates_belongs_to_the_tokenizer() -> None:
    from transformers.utils import CHAT_TEMPLATE_DIR

    from weighbridge._formats.side_files.carried import is_of_tokenizer

    assert is_of_tokenizer(f"{CHAT_TEMPLATE_DIR}/rag.jinja")
