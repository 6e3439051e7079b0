"""Do all ways out cast alike: as torch does, with routers' biases in float32, and not at all what is in fp8?"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient
from torch import Tensor

from tests.sdk.formats.test_dequantizing import write_fp8
from tests.service.api.http.web import is_problem
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, FullTensors, TensorParallel, TrainerClient
from weighbridge.errors import InvalidArgument
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class Ways:
    """A service, and the ways to a version in it."""

    running: RunningService
    trainer: TrainerClient
    engine: EngineClient
    http: TestClient
    exports: Exports

    def pull(self, model: str, dtype: str, folder: Path) -> Mapping[str, Tensor]:
        return dict(self.engine.pull(model, "latest", dtype=dtype))

    def export(self, model: str, dtype: str, folder: Path) -> Mapping[str, Tensor]:
        self.engine.export(model, "latest", folder, dtype=dtype)
        return loaded(folder)

    def post(self, model: str, dtype: str, folder: Path) -> Mapping[str, Tensor]:
        started = self.http.post("/v1/exports", json={"model": model, "dtype": dtype})
        assert started.status_code == 202, started.text
        job = self.exports.get(started.json()["id"])
        while not job.state.ended:
            time.sleep(0.01)
            job = self.exports.get(job.id)
        assert job.error == ""
        return loaded(Path(job.folder))


WAYS = ["pull", "export", "post"]


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    with (
        running_service(tmp_path_factory.mktemp("store")) as running,
        TrainerClient(running.address) as trainer,
        EngineClient(running.address) as engine,
    ):
        exports = Exports(running.service)
        app = create_app(running.service, exports, running.metrics, running.health)
        yield Ways(running, trainer, engine, TestClient(app), exports)
        exports.close()


def loaded(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


# -- routers' biases -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts(ways: Ways, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """Models with routers whose biases are in float32: all in float32, and as they are published."""
    config = tiny_config("deepseek_v3", tied=False, num_hidden_layers=2)
    exact = dict(tiny_model(config, seed=3).state_dict())
    # halves and numbers that no narrower dtype has: wrong rounding shows
    exact["model.norm.weight"][:4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 65504.0, 2**-14])
    published = {name: t if name.endswith(BIAS) else t.bfloat16() for name, t in exact.items()}
    models = {"tests/exact": exact, "tests/published": published}
    for name, weights in models.items():
        folder = tmp_path_factory.mktemp("experts")
        config.torch_dtype = weights["model.norm.weight"].dtype
        config.save_pretrained(folder)
        save_file({n: t.clone() for n, t in weights.items()}, folder / "model.safetensors")
        ways.trainer.import_folder(name, folder).wait(timeout=60)
    assert any(name.endswith(BIAS) for name in exact)
    return models


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("tests/exact", "bf16"),
        ("tests/exact", "fp16"),
        ("tests/exact", "fp64"),
        ("tests/published", "bf16"),
        ("tests/published", "fp32"),
    ],
)
def test_weights_are_cast_as_torch_does_and_biases_of_routers_are_never_narrowed(
    ways: Ways, experts: dict[str, dict[str, Tensor]], tmp_path: Path, way: str, model: str, dtype: str
) -> None:
    target = DTYPES[dtype]
    found = getattr(ways, way)(model, dtype, tmp_path / "hf")
    assert found.keys() == experts[model].keys()
    for name, tensor in experts[model].items():
        kept = name.endswith(BIAS) and target.itemsize < 4
        expected = tensor if kept else tensor.to(target)
        assert found[name].dtype is expected.dtype, name
        assert torch.equal(bits(found[name]), bits(expected)), name


def test_slices_are_cast_by_the_same_rule(ways: Ways, experts: dict[str, dict[str, Tensor]]) -> None:
    exact = experts["tests/exact"]
    pulled = dict(ways.engine.pull("tests/exact", "latest", TensorParallel(2, 1), dtype="bf16"))
    for name, tensor in exact.items():
        if name.endswith(BIAS):
            assert pulled[name].dtype is torch.float32
            assert torch.equal(pulled[name], tensor)
    down = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(pulled[down], exact[down].chunk(2, dim=1)[1].bfloat16())


@pytest.mark.parametrize("name", [BIAS, "expert_bias"])
def test_biases_of_routers_are_not_narrowed_in_models_without_a_weight_map(
    ways: Ways, tmp_path: Path, name: str
) -> None:
    bias = f"model.layers.1.mlp.gate.{name}"
    weights = {"model.norm.weight": torch.randn(8) + 1 + 2**-10, bias: torch.linspace(6.817, 7.063, 32)}
    assert len(set(weights[bias].bfloat16().tolist())) < 10  # of 32 experts
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_our_own", "dtype": "float32"}))
    save_file(weights, tmp_path / "model.safetensors")
    narrow = {**weights, "model.norm.weight": weights["model.norm.weight"].bfloat16()}
    model = f"tests/unmapped-{name.replace('_', '-')}"
    ways.trainer.import_folder(model, tmp_path).wait(timeout=60)
    found = {way: getattr(ways, way)(model, "bf16", tmp_path / way) for way in WAYS}
    ways.trainer.import_folder(f"{model}-cast", tmp_path, dtype="bf16").wait(timeout=60)
    ways.trainer.register_model(f"{model}-registered", tmp_path, dtype="bf16")
    ways.trainer.push_state_dict(f"{model}-registered", weights, step=1).wait(timeout=60)
    for way in ("cast", "registered"):
        found[way] = dict(ways.engine.pull(f"{model}-{way}", "latest"))
    for way, tensors in found.items():
        assert tensors.keys() == narrow.keys()
        for each, tensor in narrow.items():
            assert tensors[each].dtype is tensor.dtype, (way, each)
            assert torch.equal(bits(tensors[each]), bits(tensor)), (way, each)


@pytest.mark.parametrize("way", ["export", "post"])
def test_the_config_of_a_cast_folder_names_the_dtype_of_its_weights(
    ways: Ways, experts: dict[str, dict[str, Tensor]], tmp_path: Path, way: str
) -> None:
    getattr(ways, way)("tests/exact", "bf16", tmp_path / "hf")
    folder = tmp_path / "hf" if way == "export" else Path(ways.exports.list()[0].folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


# -- fp8 -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fp8(ways: Ways, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose weights are kept in fp8, with scales beside them."""
    folder = tmp_path_factory.mktemp("fp8")
    write_fp8(folder, intermediate_size=96)
    ways.trainer.import_folder("tests/fp8", folder).wait(timeout=60)
    return "tests/fp8"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_weights_in_fp8_cannot_be_cast_on_any_way_out(ways: Ways, fp8: str, tmp_path: Path, dtype: str) -> None:
    message = r"_proj\.weight F8_E4M3\[.*\] cannot be cast to .*: its values are without their scales"
    for way in (ways.pull, ways.export):
        with pytest.raises(InvalidArgument, match=message) as caught:
            way(fp8, dtype, tmp_path / "hf")
        assert "--dequantize" in caught.value.fix
    assert not (tmp_path / "hf").exists()
    before = ways.exports.list()
    answer = ways.http.post("/v1/exports", json={"model": fp8, "dtype": dtype})
    problem = is_problem(answer, 400, "invalid_argument")
    assert "cannot be cast" in problem["detail"]
    assert "--dequantize" in problem["fix"]
    assert ways.exports.list() == before  # refused when it was asked for, not in the job


def test_weights_in_fp8_go_out_as_they_are_and_parts_without_any_are_cast(ways: Ways, fp8: str, tmp_path: Path) -> None:
    ways.engine.export(fp8, "latest", tmp_path / "hf")
    assert loaded(tmp_path / "hf")["model.layers.0.mlp.up_proj.weight"].dtype is torch.float8_e4m3fn
    norm = "model.norm.weight"
    pulled = dict(ways.engine.pull(fp8, "latest", FullTensors((norm,)), dtype="fp32"))
    assert torch.equal(pulled[norm], loaded(tmp_path / "hf")[norm].float())
