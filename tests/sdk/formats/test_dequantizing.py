"""Are fp8 checkpoints kept to the byte, and dequantised as their format says on request?"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TensorParallel, TrainerClient
from weighbridge._cli import commands
from weighbridge._core import dtypes
from weighbridge._formats.dequantizing import Dequantized
from weighbridge._formats.safetensors_files import layout_of_files, map_folder
from weighbridge.errors import InvalidArgument

BLOCK = 16  # of the tiny models, so that there are several


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in fp8 and its scales, block by block."""
    rows, columns = (-(-n // BLOCK) for n in weight.shape)
    scales = torch.empty(rows, columns)
    made = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = weight[block].abs().max() / 448
            made[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return made, scales


def dequantise(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The dequantised matrix by the definition of the format, block by block."""
    made = torch.empty(weight.shape, dtype=dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            made[block] = (weight[block].float() * scales[i, j]).to(dtype)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    write_fp8(folder, intermediate_size=104)
    return folder


def write_fp8(folder: Path, *, intermediate_size: int) -> None:
    """A llama whose projections are in fp8; all else is bf16."""
    model = tiny_model(tiny_config("llama", tied=False, intermediate_size=intermediate_size), seed=11)
    model.save_pretrained(folder)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if "_proj" in name:
            state[name], state[name + "_scale_inv"] = quantise(tensor)
        else:
            state[name] = tensor.to(torch.bfloat16)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_an_fp8_folder_is_kept_to_the_byte_with_its_scales(running: RunningService, folder: Path) -> None:
    with TrainerClient(running.address) as trainer, EngineClient(running.address) as engine:
        trainer.import_folder("fp8/kept", folder).wait(timeout=60)
        pulled = dict(engine.pull("fp8/kept", version="latest"))
        config = json.loads(engine.model_files("fp8/kept")["config.json"])
    expected = load_file(folder / "model.safetensors")
    assert pulled.keys() == expected.keys()
    for name, tensor in expected.items():
        assert pulled[name].dtype == tensor.dtype, name
        assert torch.equal(bits(pulled[name]), bits(tensor)), name
    assert config["quantization_config"]["quant_method"] == "fp8"


def test_engine_ranks_get_the_scales_of_their_slices(running: RunningService, folder: Path, tmp_path: Path) -> None:
    even = tmp_path / "even"  # 96 columns are three blocks for each of two ranks
    write_fp8(even, intermediate_size=96)
    expected = load_file(even / "model.safetensors")
    with TrainerClient(running.address) as trainer, EngineClient(running.address) as engine:
        trainer.import_folder("fp8/even", even).wait(timeout=60)
        for rank in range(2):
            pulled = dict(engine.pull("fp8/even", version="latest", layout=TensorParallel(2, rank)))
            for suffix in ("", "_scale_inv"):
                down, up = (f"model.layers.1.mlp.{p}_proj.weight{suffix}" for p in ("down", "up"))
                assert torch.equal(bits(pulled[down]), bits(expected[down].chunk(2, dim=1)[rank]))
                assert torch.equal(bits(pulled[up]), bits(expected[up].chunk(2)[rank]))
        trainer.import_folder("fp8/sliced", folder).wait(timeout=60)
        # 104 rows over two ranks end inside a block: there is no such slice
        with pytest.raises(InvalidArgument, match=r"gate_proj.*ends inside a block of 16 x 16"):
            list(engine.pull("fp8/sliced", version="latest", layout=TensorParallel(2, 0)))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_dequantised_weights_are_the_products_that_the_format_says(
    running: RunningService, folder: Path, dtype: str
) -> None:
    model = f"fp8/as-{dtype}"
    with TrainerClient(running.address) as trainer, EngineClient(running.address) as engine:
        trainer.import_folder(model, folder, dequantize=dtype).wait(timeout=60)
        pulled = dict(engine.pull(model, version="latest"))
        config = json.loads(engine.model_files(model)["config.json"])
    found = load_file(folder / "model.safetensors")
    weights = {name: tensor for name, tensor in found.items() if not name.endswith("_scale_inv")}
    assert pulled.keys() == weights.keys()
    for name, tensor in weights.items():
        scales = found.get(name + "_scale_inv")
        expected = tensor if scales is None else dequantise(tensor, scales, dtypes.parse(dtype).torch)
        assert torch.equal(bits(pulled[name]), bits(expected)), name
    assert "quantization_config" not in config


def test_the_command_line_imports_fp8_either_way(running: RunningService, folder: Path) -> None:
    for options, dtype in (([], "F8_E4M3"), (["--dequantize", "fp16"], "F16")):
        model = f"fp8/typed-{dtype.lower().replace('_', '-')}"
        command = ["import", str(folder), model, *options, "--server", running.address, "--json"]
        result = CliRunner().invoke(commands, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        with EngineClient(running.address) as engine:
            pulled = dict(engine.pull(model, version="latest"))
        assert pulled["model.layers.0.mlp.up_proj.weight"].dtype == dtypes.from_safetensors(dtype).torch


def test_a_stream_of_dequantised_weights_can_be_read_from_anywhere(folder: Path) -> None:
    buffers = map_folder(folder)
    files = layout_of_files({name: data.data for name, data in buffers.items()})
    config = (folder / "config.json").read_bytes()
    weights = Dequantized(files.layout, buffers, config, dtypes.parse("bf16"))
    stream = weights.layout
    source = weights.select(range(len(stream.placements)), stream)
    whole = bytes(source.read(0, stream.nbytes))
    rng = random.Random(3)
    for _ in range(200):
        start = rng.randrange(stream.nbytes)
        stop = min(stream.nbytes, start + rng.randrange(1, 9000))
        assert bytes(source.read(start, stop)) == whole[start:stop]


def test_a_block_may_be_larger_than_the_matrix(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    weight = load_file(folder / "model.safetensors")[name]
    scale = torch.full((1, 1), 0.25)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1 << 40, 1 << 40]}}
    data = {"w": np.frombuffer(bytearray(save({name: weight, name + "_scale_inv": scale})), np.uint8)}
    weights = Dequantized(layout_of_files(data).layout, data, json.dumps(config).encode(), dtypes.parse("fp32"))
    found = bytes(weights.select([0], weights.layout).read(0, weights.layout.nbytes))
    assert torch.equal(
        torch.frombuffer(bytearray(found), dtype=torch.float32).reshape(weight.shape), weight.float() * 0.25
    )


@pytest.mark.parametrize("what", ["missing", "misshapen", "nothing", "other", "complex", "not finite"])
def test_what_cannot_be_dequantised_is_refused(folder: Path, tmp_path: Path, what: str) -> None:
    state = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    name = "model.layers.0.mlp.up_proj.weight"
    says = f"{name}"
    if what == "missing":
        del state[name + "_scale_inv"]
    elif what == "misshapen":
        state[name + "_scale_inv"] = torch.ones(3, 3)
    elif what == "nothing":
        state = {n: t for n, t in state.items() if "_proj" not in n}
        says = "no weight of the folder is in F8_E4M3"
    elif what == "complex":
        state[name + "_scale_inv"] = state[name + "_scale_inv"].to(torch.complex64)
        says = f"{name}_scale_inv C64"
    elif what == "not finite":
        state[name + "_scale_inv"][0, 0] = torch.nan
        says = "not finite"
    else:
        config["quantization_config"]["quant_method"] = "awq"
        says = "awq"
    save_file(state, tmp_path / "model.safetensors")
    buffers = map_folder(tmp_path)
    files = layout_of_files({n: data.data for n, data in buffers.items()})
    with pytest.raises(InvalidArgument) as caught:
        Dequantized(files.layout, buffers, json.dumps(config).encode(), dtypes.parse("bf16"))
    assert says in str(caught.value)
