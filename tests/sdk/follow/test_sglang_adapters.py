"""Does SGLang get an adapter by its version, on the base version that it names, and is what it cannot serve refused
before anything is loaded?
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.end_to_end.test_adapters import ALICE, BASE, Service, serving
from tests.support.sglang_fakes import FakeSglang, fake_sglang
from weighbridge import EngineClient, FailedPrecondition
from weighbridge._cli import commands
from weighbridge.follow.engines import EngineFailed
from weighbridge.follow.sglang import SglangServer
from weighbridge.follow.sglang_adapters import unserved

SERVED: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "rank_pattern": {},
    "use_dora": False,
    "modules_to_save": None,
}
LAYER = "base_model.model.model.layers.0"
TENSORS = [f"{LAYER}.{module}.lora_A.weight" for module in ("mlp.down_proj", "self_attn.q_proj", "self_attn.v_proj")]
GATED = ["model.layers.0.mlp.gate_proj.weight"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("adapters")) as found:
        found.push(ALICE, f"{BASE}@2", target_modules=SERVED["target_modules"])
        found.push("acme/rslora", f"{BASE}@2", target_modules=SERVED["target_modules"], use_rslora=True)
        yield found


@pytest.fixture(params=[2])
def engine(request: pytest.FixtureRequest) -> Iterator[FakeSglang]:
    with fake_sglang(request.param) as engine:
        engine.info = {
            "enable_lora": True,
            "max_lora_rank": 16,
            "lora_target_modules": ["q_proj", "v_proj", "down_proj"],
        }
        engine.serve(f"{BASE}@2")
        yield engine


@pytest.fixture
def client(service: Service) -> Iterator[EngineClient]:
    with EngineClient(service.running.address) as client:
        yield client


def driver(engine: FakeSglang, service: Service) -> SglangServer:
    return SglangServer(engine.url, service.running.address, BASE)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_rslora": True}, "lora_alpha / r"),
        ({"use_dora": True}, "no DoRA"),
        ({"rank_pattern": {"q_proj": 2}}, "one rank"),
        ({"alpha_pattern": {"q_proj": 2}}, "one alpha"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"target_parameters": ["experts.down_proj"]}, "only modules"),
        ({"bias": "lora_only"}, "no biases"),
        ({"r": 32}, "--max-lora-rank 16"),
        ({"target_modules": ["q_proj", "model.up_proj"]}, "it changes up_proj"),
        ({"target_modules": ".*q_proj"}, "regular expression"),
    ],
)
def test_each_thing_that_sglang_would_leave_out_is_a_reason(changed: dict[str, Any], said: str) -> None:
    info = {"max_lora_rank": 16, "lora_target_modules": ["q_proj", "v_proj", "down_proj"]}
    assert list(unserved(SERVED, TENSORS, GATED, info)) == []
    (reason,) = unserved({**SERVED, **changed}, TENSORS, GATED, info)
    assert said in reason


def test_tensors_that_sglang_has_no_place_for_are_a_reason() -> None:
    (reason,) = unserved(SERVED, [*TENSORS, "base_model.model.lm_head.weight"], GATED, {})
    assert "base_model.model.lm_head.weight" in reason


def test_parts_of_layers_that_sglang_has_as_one_are_a_reason() -> None:
    (reason,) = unserved(SERVED, TENSORS[:2], GATED, {})
    assert "it changes q_proj alone" in reason
    up = f"{LAYER}.mlp.up_proj.lora_A.weight"
    (reason,) = unserved(SERVED, [*TENSORS, up], GATED, {})
    assert "up_proj without gate_proj" in reason
    assert list(unserved(SERVED, [*TENSORS, up, f"{LAYER}.mlp.gate_proj.lora_A.weight"], GATED, {})) == []
    assert list(unserved(SERVED, [*TENSORS, up], ["model.layers.0.mlp.up_proj.weight"], {})) == []


def test_an_adapter_is_loaded_under_its_number_with_its_tensors_and_its_config(
    engine: FakeSglang, service: Service, client: EngineClient, tmp_path: Path
) -> None:
    server = driver(engine, service)
    found = server.load_adapter(client, ALICE, "latest")
    assert (found.name, found.base, found.way) == (f"{ALICE}@1", f"{BASE}@2", "tensors")
    payloads, config = engine.adapters[f"{ALICE}@1"]
    out = service.export(ALICE, tmp_path / "out")
    saved = load_file(out / "adapter_model.safetensors")
    assert config == json.loads((out / "adapter_config.json").read_text())
    assert len(payloads) == 2  # one for each tensor-parallel rank
    for each in payloads:
        assert each.keys() == saved.keys()
        assert all(torch.equal(each[name], tensor) for name, tensor in saved.items())
    assert server.adapters() == (f"{ALICE}@1",)
    assert server.load_adapter(client, ALICE, 1).way == ""  # the same version: it has that one
    server.unload_adapter(ALICE, 1)
    assert server.adapters() == ()
    with pytest.raises(EngineFailed, match="does not exist"):
        server.unload_adapter(ALICE, 1)


def test_a_folder_is_for_releases_that_take_no_tensors(
    engine: FakeSglang, service: Service, client: EngineClient, tmp_path: Path
) -> None:
    engine.refuse["from_tensors"] = "no such route"
    server = driver(engine, service)
    with pytest.raises(FailedPrecondition, match="has no /load_lora_adapter_from_tensors") as refused:
        server.load_adapter(client, ALICE)
    assert "--folder" in refused.value.fix
    assert server.load_adapter(client, ALICE, folder=tmp_path).way == "files"
    place = Path(engine.adapters[f"{ALICE}@1"])
    assert place == tmp_path / f"{ALICE}@1"
    assert (place / "adapter_model.safetensors").is_file()


def test_an_adapter_on_another_base_version_is_refused_and_both_are_named(
    engine: FakeSglang, service: Service, client: EngineClient
) -> None:
    server = driver(engine, service)
    engine.serve(f"{BASE}@3")
    with pytest.raises(FailedPrecondition, match=f"{ALICE}@1 is on {BASE}@2, and this engine serves {BASE}@3"):
        server.load_adapter(client, ALICE, 1)
    engine.serve("")
    with pytest.raises(FailedPrecondition, match="serves no known version"):
        server.load_adapter(client, ALICE, 1)
    other = SglangServer(engine.url, service.running.address, "acme/other")
    with pytest.raises(FailedPrecondition, match="serves versions of acme/other"):
        other.load_adapter(client, ALICE, 1)
    assert not engine.adapters
    engine.serve(f"{BASE}@2")
    engine.loading = lambda: engine.serve(f"{BASE}@3")  # an update between look and load
    with pytest.raises(FailedPrecondition, match=f"serves {BASE}@3"):
        server.load_adapter(client, ALICE, 1)
    assert not engine.adapters


def test_an_engine_that_takes_none_or_not_this_one_is_not_asked_to_load_it(
    engine: FakeSglang, service: Service, client: EngineClient
) -> None:
    server = driver(engine, service)
    with pytest.raises(FailedPrecondition, match="SGLang cannot serve acme/rslora@1") as refused:
        server.load_adapter(client, "acme/rslora")
    assert "use_rslora is True" in refused.value.details[0]
    engine.info = {}
    with pytest.raises(FailedPrecondition, match="started without adapters") as refused:
        server.load_adapter(client, ALICE)
    assert "--enable-lora" in refused.value.fix
    engine.info = {"enable_lora": True, "dp_size": 2}
    with pytest.raises(FailedPrecondition, match="--dp-size 2"):
        server.load_adapter(client, ALICE)
    assert not any(call.startswith("/load") for call in engine.calls)


@pytest.mark.parametrize("engine", [1], indirect=True)  # the vocabulary cannot be cut
def test_an_update_of_the_base_is_refused_as_long_as_adapters_are_on_another_version(
    engine: FakeSglang, service: Service, client: EngineClient
) -> None:
    server = driver(engine, service)
    server.load_adapter(client, ALICE, 1)
    for step in (lambda: server.prepare(3), lambda: server.apply(3, f"{BASE}@3")):
        with pytest.raises(FailedPrecondition, match=f"has {ALICE}@1, on {BASE}@2") as refused:
            step()
        assert f"weighbridge adapters {ALICE}@1 --url {engine.url} --unload" in refused.value.fix
    assert "/update_weights_from_tensor" not in engine.calls
    server.unload_adapter(ALICE, 1)
    server.prepare(3)
    server.pause()
    server.apply(3, f"{BASE}@3")
    server.resume()
    assert server.serving().version == 3


def test_the_command_loads_and_unloads(engine: FakeSglang, service: Service) -> None:
    where = ["--url", engine.url, "--server", service.running.address]
    loaded = CliRunner().invoke(commands, ["adapters", ALICE, *where, "--json"])
    assert loaded.exit_code == 0, loaded.output
    assert json.loads(loaded.output)["name"] == f"{ALICE}@1"
    assert f"{ALICE}@1" in engine.adapters
    gone = CliRunner().invoke(commands, ["adapters", f"{ALICE}@1", *where, "--unload"])
    assert gone.exit_code == 0, gone.output
    assert not engine.adapters
    refused = CliRunner().invoke(commands, ["adapters", f"{BASE}@2", *where])
    assert refused.exit_code != 0
    assert "is not an adapter" in refused.output
