"""Do transformers models start from the service and go from version to version, as if they had been loaded from its
folders?

`make test-transformers` runs the same with the newest transformers, which stacks experts when it loads them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from tests.support import transformers_client as client
from tests.support.mortal_proxy import MortalProxy
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge._clients.engine import Pull
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound, WeighbridgeError
from weighbridge.integrations.transformers import attach, from_weighbridge, live_model, update
from weighbridge.integrations.transformers.options import single_device

FAMILIES = [
    ("llama", False),
    ("qwen2", True),
    ("qwen3_moe", False),
    ("mixtral", False),
    ("deepseek_v3", False),
]


@dataclass(frozen=True)
class Model:
    """A model of which the service has two versions, and the folders that they are of."""

    name: str
    folders: list[str]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def models(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    found = {}
    with TrainerClient(service.address) as trainer:
        for family, tied in FAMILIES:
            folders = []
            for seed in (1, 2):
                folder = tmp_path_factory.mktemp(family)
                tiny_model(tiny_config(family, tied=tied), seed).save_pretrained(folder)
                GenerationConfig(do_sample=True, temperature=0.25).save_pretrained(folder)
                _tokenizer().save_pretrained(folder)
                if seed == 1:
                    trainer.register_model(f"tests/{family}", folder)
                trainer.push_folder(f"tests/{family}", folder).wait(timeout=60)
                folders.append(str(folder))
            found[family] = Model(f"tests/{family}", folders)
    return found


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 7, "world": 9}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, None) for family, _ in FAMILIES), ("qwen2", "bfloat16"), ("mixtral", "bfloat16")],
)
def test_a_model_starts_and_is_updated_bit_for_bit_as_transformers_loads_the_folder(
    service: RunningService, models: dict[str, Model], family: str, dtype: str | None
) -> None:
    model = models[family]
    found = client.call(client.start_and_update, service.address, model.name, model.folders, dtype)
    assert found["different"] == []
    assert found["numbers"] == [1, 2, 1]
    assert max(found["logits"]) < (1e-4 if dtype is None else 1)
    assert found["nbytes"] == [found["held"] * (1 if dtype is None else 2)] * 3
    assert found["in place"]
    assert found["class"] == AutoModelForCausalLM.from_pretrained(model.folders[0]).__class__.__name__
    assert found["tied"] == (family == "qwen2")
    assert (found["temperature"], found["trainable"], found["training"]) == (0.25, True, False)


@pytest.mark.parametrize("from_config", [True, False])
def test_a_model_generates_as_one_of_the_folder_does(
    service: RunningService, tmp_path: Path, from_config: bool
) -> None:
    name = f"tests/generating-{'by' if from_config else 'beside'}-its-config"
    source = tiny_model(tiny_config("llama", tied=False), 5)
    source.generation_config._from_model_config = from_config  # as transformers writes it, of its own accord
    source.save_pretrained(tmp_path)
    with TrainerClient(service.address) as trainer:
        trainer.import_folder(name, tmp_path).wait(timeout=60)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = from_weighbridge(f"{name}@latest", service.address)
    ids = torch.arange(5).view(1, 5)
    wanted = {"max_new_tokens": 6, "do_sample": False}
    assert model.generate(ids, **wanted).equal(expected.generate(ids, **wanted))
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_each_rank_brings_its_slices_and_all_of_them_go_or_none(
    service: RunningService, models: dict[str, Model], family: str
) -> None:
    model = models[family]
    ranks = client.call_ranks(2, client.tensor_parallel, service.address, model.name, model.folders)
    whole = sum(tensor.nbytes for tensor in AutoModelForCausalLM.from_pretrained(model.folders[0]).parameters())
    for rank in ranks:
        assert rank["different"] == []
        assert max(rank["logits"]) < 1e-4
        assert rank["held"] < 0.75 * whole
        assert all(rank["held"] <= nbytes <= 1.01 * rank["held"] for nbytes in rank["nbytes"])
        assert "127.0.0.1:9" in rank["error"]
        assert rank["kept"] == 1


def test_the_tokenizer_is_the_versions(service: RunningService, models: dict[str, Model]) -> None:
    assert client.call(client.tokens, service.address, "tests/llama@1", "hello world") == [7, 9]


@pytest.mark.parametrize(
    ("family", "changed", "named"),
    [
        ("llama", {"vocab_size": 144}, r"model.embed_tokens.weight is \[144, 64\]"),
        ("mixtral", {"num_local_experts": 8}, "experts"),
        ("mixtral", {"num_local_experts": 2}, "experts"),
        ("llama", {"num_hidden_layers": 6}, "model.layers.4"),
        ("llama", {"num_hidden_layers": 3}, "model.layers.3"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_and_said_where(
    service: RunningService, models: dict[str, Model], family: str, changed: dict[str, int], named: str
) -> None:
    said = client.call(client.refused, service.address, models[family].name, changed)
    assert said.startswith("FailedPrecondition: ")
    assert re.search(named, said), said


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("llama", {"vocab_size": 144}),
        ("mixtral", {"num_local_experts": 8}),
        ("llama", {"num_hidden_layers": 6}),
    ],
)
def test_a_live_model_that_does_not_fit_is_left_alone(
    service: RunningService, models: dict[str, Model], tmp_path: Path, family: str, changed: dict[str, int]
) -> None:
    tiny_model(tiny_config(family, tied=False, **changed), 3).save_pretrained(tmp_path)
    found = client.call(client.refused_live, service.address, models[family].name, str(tmp_path))
    assert "fit" in found["error"] or "nothing for" in found["error"] or "cannot create" in found["error"]
    assert (found["different"], found["version"]) == ([], None)


def test_a_live_model_from_elsewhere_goes_to_a_version(service: RunningService, models: dict[str, Model]) -> None:
    model = tiny_model(tiny_config("llama", tied=False, torch_dtype="bfloat16"), 3).bfloat16()
    with pytest.raises(FailedPrecondition, match="does not come from the service"):
        update(model)
    live = attach(model, "tests/llama", service.address)
    assert live.version is None
    assert update(model).number == 2
    expected = AutoModelForCausalLM.from_pretrained(models["llama"].folders[1], dtype=torch.bfloat16)
    assert client.differences(model, expected) == []
    model.float()  # the recording is not valid any more
    update(model, 1)
    assert client.differences(model, AutoModelForCausalLM.from_pretrained(models["llama"].folders[0])) == []


def test_a_model_keeps_its_version_when_the_service_dies_in_the_middle_of_an_update(
    service: RunningService, models: dict[str, Model]
) -> None:
    proxy = MortalProxy(service.address)
    model = from_weighbridge("tests/llama@1", EngineClient(proxy.address, retry_seconds=0.5))
    live = live_model(model)
    proxy.die_after(200_000)
    with pytest.raises(WeighbridgeError):
        update(model, 2)
    assert live.version is not None
    assert live.version.number == 1
    expected = AutoModelForCausalLM.from_pretrained(models["llama"].folders[0])
    assert client.differences(model, expected) == []
    live.rank.clients = {live.rank.source: EngineClient(service.address)}
    assert update(model).number == 2


def test_a_model_keeps_its_version_when_another_lacks_a_tensor(
    service: RunningService, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lacking(EngineClient):
        """A client of a service whose version 2 lacks a norm."""

        def pull(self, model: str, version: str | int = "latest", *args: Any, **kwargs: Any) -> Pull:
            found = super().pull(model, version, *args, **kwargs)
            if found.version.number == 2 and "model.norm.weight" in found.layout.tensors:
                raise NotFound("tests/llama@2 has no tensor 'model.norm.weight'")
            return found

    model = from_weighbridge("tests/llama@1", Lacking(service.address))
    with pytest.raises(NotFound, match=r"model\.norm\.weight"):
        update(model)
    assert live_model(model).version == EngineClient(service.address).version("tests/llama", 1)
    assert client.differences(model, AutoModelForCausalLM.from_pretrained(models["llama"].folders[0])) == []


def test_of_two_updates_at_once_the_second_is_refused(service: RunningService, models: dict[str, Model]) -> None:
    under_way, go_on = threading.Event(), threading.Event()

    class Slow(EngineClient):
        def version(self, model: str, version: str | int = "latest") -> Any:
            if version == 2:
                under_way.set()
                assert go_on.wait(60)
            return super().version(model, version)

    model = from_weighbridge("tests/llama@1", Slow(service.address))
    first = threading.Thread(target=update, args=(model, 2))
    first.start()
    assert under_way.wait(60)
    with pytest.raises(FailedPrecondition, match="another update of this tests/llama is under way"):
        update(model, 1)
    go_on.set()
    first.join()
    version = live_model(model).version
    assert version is not None
    assert version.number == 2


def test_what_is_missing_is_initialised_if_that_is_asked_for(service: RunningService, models: dict[str, Model]) -> None:
    with pytest.raises(FailedPrecondition, match=r"score\.weight"):
        from_weighbridge("tests/llama@1", service.address, model_class=AutoModelForSequenceClassification)
    model = from_weighbridge(
        "tests/llama@1", service.address, model_class=AutoModelForSequenceClassification, strict=False
    )
    head = model.score.weight.clone()
    update(model)
    assert model.score.weight.equal(head)
    expected = AutoModelForCausalLM.from_pretrained(models["llama"].folders[1])
    assert client.differences(model.model, expected.model) == []


@pytest.mark.parametrize(
    "options",
    [
        {"torch_dtype": torch.bfloat16}, {"torch_dtype": "float16"}, {"torch_dtype": torch.float16, "dtype": torch.float32},
        {"use_cache": False, "dtype": "auto"}, {"rope_theta": 99.0, "attn_implementation": "eager", "dtype": "auto"},
        {"num_hidden_layers": 1, "dtype": "auto"}, {"device_map": "auto", "dtype": "auto"}, {"device_map": {"": "cpu"}, "dtype": "auto"},
        {"cache_dir": "/nowhere", "local_files_only": True, "low_cpu_mem_usage": True, "dtype": "auto"},
    ],
    ids=lambda options: ",".join(options),
)  # fmt: skip
def test_options_do_what_they_do_in_from_pretrained(
    service: RunningService, models: dict[str, Model], options: dict[str, Any]
) -> None:
    expected = AutoModelForCausalLM.from_pretrained(models["llama"].folders[0], **options)
    found = from_weighbridge("tests/llama@1", service.address, strict="num_hidden_layers" not in options, **options)
    assert client.differences(found, expected) == []
    configs = [model.config.to_diff_dict() for model in (found, expected)]
    assert configs[0] | {"_name_or_path": ""} == configs[1] | {"_name_or_path": ""}
    assert (found.dtype, found.device) == (expected.dtype, expected.device)
    assert found.config._attn_implementation == expected.config._attn_implementation


def test_a_head_has_as_many_labels_as_are_asked_for(service: RunningService, models: dict[str, Model]) -> None:
    options: dict[str, Any] = {"num_labels": 3, "problem_type": "multi_label_classification"}
    expected = AutoModelForSequenceClassification.from_pretrained(models["llama"].folders[0], **options)
    found = from_weighbridge(
        "tests/llama@1",
        service.address,
        model_class=AutoModelForSequenceClassification,
        strict=False,
        **options,
    )
    assert found.score.weight.shape == expected.score.weight.shape
    assert (found.config.id2label, found.config.problem_type) == (
        expected.config.id2label,
        expected.config.problem_type,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"revision": "prod"}, {"subfolder": "unet"}, {"variant": "fp16"}, {"gguf_file": "a.gguf"}, {"state_dict": {"a": 1}}, {"load_in_4bit": True},
        {"max_memory": {0: "1GB"}}, {"offload_folder": "/tmp"}, {"ignore_mismatched_sizes": True}, {"output_loading_info": True},
        {"device_map": {"model": "cpu", "lm_head": "meta"}}, {"device_map": "nowhere"},
    ],
    ids=lambda options: ",".join(options),
)  # fmt: skip
def test_options_that_a_version_cannot_fulfil_are_refused_by_name(
    service: RunningService, models: dict[str, Model], options: dict[str, Any]
) -> None:
    with pytest.raises(WeighbridgeError, match=next(iter(options))) as refused:
        from_weighbridge("tests/llama@1", service.address, **options)
    assert refused.value.fix


@pytest.mark.parametrize(
    ("devices", "free", "found"), [(1, 100, "cuda:0"), (1, 99, "in host memory"), (2, 100, "over 2 devices")]
)
def test_a_model_goes_to_the_only_accelerator_if_it_fits_and_is_spread_over_no_several(
    monkeypatch: pytest.MonkeyPatch, devices: int, free: int, found: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 1000))
    if found.startswith("cuda"):
        assert single_device("balanced", 100) == torch.device(found)
        return
    with pytest.raises(InvalidArgument, match=found):
        single_device("balanced", 100)


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "deepseek_v3"])
def test_a_trainer_pushes_and_fills_a_model_as_transformers_holds_it(
    service: RunningService, models: dict[str, Model], family: str
) -> None:
    model = models[family]
    found = client.call(client.train, service.address, model.name, model.folders[0])
    assert found["changed"] == []
    assert bool(found["stacked"]) == (bool(client.PYTHON) and family != "qwen2")
    with EngineClient(service.address) as engine:
        pulled = dict(engine.pull(model.name, found["number"]))
        first = dict(engine.pull(model.name, 1))
    assert pulled.keys() == first.keys()
    assert all(torch.equal(pulled[name], tensor) for name, tensor in first.items())


def test_a_model_that_peft_has_given_adapters_is_refused_an_update_and_taken_without_them(
    service: RunningService, models: dict[str, Model]
) -> None:
    peft = pytest.importorskip("peft")
    there = models["llama"]
    model = from_weighbridge(f"{there.name}@1", service.address)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(FailedPrecondition, match="peft has added adapters to this model") as refused:
        update(model, 2)
    assert "model.unload()" in refused.value.fix
    assert adapted.unload() is model
    assert update(model, 2).number == 2
    expected = AutoModelForCausalLM.from_pretrained(there.folders[1]).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
