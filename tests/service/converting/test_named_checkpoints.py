"""Do FSDP checkpoints with Hugging Face's names become the model that was trained, in a folder and in a service?

Real ranks over gloo save them by torch's own means, as verl and torchtitan do. What comes out is compared with what
torch gathers.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import time
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from tests.support.reference import in_files, tiny_config, tiny_model
from tests.support.services import running_service
from tests.support.torch_ranks import full_tensors, run_ranks, shared
from weighbridge import EngineClient
from weighbridge._cli import commands
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge.errors import DataLoss, InvalidArgument, LayoutError, NotFound
from weighbridge_service.converting.conversions import ConvertOptions
from weighbridge_service.converting.convert import convert_folder
from weighbridge_service.converting.pushing import CheckpointToPush
from weighbridge_service.models.library_models import LoaderComparison, compared_by

RANKS = 4
CONFIGS = {
    "untied": tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=131),
    "tied": tiny_config("qwen3", tied=True, num_hidden_layers=2, vocab_size=131),
    "experts": tiny_config("qwen3_moe", tied=False, num_hidden_layers=1, vocab_size=131),
}
OF_RANKS = ("fsdp4", "hsdp", "tp_fsdp", "fsdp1", "fsdp1_over_a_mesh")


def _save(state: Any, folder: Path, rank: int) -> None:
    """Save as verl's ``FSDPCheckpointManager`` does."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / f"model_world_size_{RANKS}_rank_{rank}.pt")


def _fsdp1(model: Any, mesh: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = FullyShardedDataParallel(model, device_id=torch.device("cpu"), device_mesh=mesh)
        with FullyShardedDataParallel.state_dict_type(
            module, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
        ):
            return dict(module.state_dict())


def _stacked(axis: int) -> dict[str, Any]:
    """A state dict as transformers 5 has it, with experts stacked in one tensor, which ranks share along an axis."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = tiny_model(CONFIGS["experts"], seed=5).float()
    state = in_files(model, model.state_dict())
    stem = "model.layers.0.mlp.experts"
    of = {
        each: torch.stack([state.pop(f"{stem}.{n}.{each}.weight") for n in range(8)])
        for each in ("gate_proj", "up_proj", "down_proj")
    }
    mesh = init_device_mesh("cpu", (RANKS,))
    for name, tensor in (
        ("gate_up_proj", torch.cat([of["gate_proj"], of["up_proj"]], 1)), ("down_proj", of["down_proj"]),
    ):  # fmt: skip
        state[f"{stem}.{name}"] = distribute_tensor(tensor, mesh, [Shard(axis)])
    return state


def _save_all(rank: int, to: str) -> dict[str, dict[str, Tensor]]:
    """Save checkpoints in all ways; the tensors that torch gathers of each."""
    from torch.distributed.device_mesh import init_device_mesh

    folder, gathered = Path(to), {}
    for way in OF_RANKS:
        model = tiny_model(CONFIGS["untied"], seed=5).float()
        if way.startswith("fsdp1"):
            gathered[way] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            state = _fsdp1(model, init_device_mesh("cpu", (RANKS,)) if way != "fsdp1" else None)
        else:
            module = shared(model, way)
            gathered[way], state = full_tensors(module), module.state_dict()
        _save(state, folder / way, rank)
    torch.save({"state": {}}, folder / "fsdp4" / f"optim_world_size_{RANKS}_rank_{rank}.pt")
    module = shared(tiny_model(CONFIGS["tied"], seed=5).float(), "fsdp4")
    gathered["tied"] = full_tensors(module)
    _save(module.state_dict(), folder / "tied", rank)
    dcp.save({"model": module.state_dict()}, checkpoint_id=folder / "dcp_tied")
    whole = full_tensors(_stacked(0))
    if not rank:
        torch.save(whole, folder / "whole.pt")
    for axis in (0, 1):
        _save(_stacked(axis), folder / f"stacked_{axis}", rank)
        dcp.save({"model": _stacked(axis)}, checkpoint_id=folder / f"dcp_stacked_{axis}")

    module = shared(tiny_model(CONFIGS["untied"], seed=7).float(), "tp_fsdp")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    gathered["dcp"] = full_tensors(module)
    model_state, optimizer_state = (
        get_model_state_dict(module),
        get_optimizer_state_dict(module, optimizer),
    )
    rest = {"train_state": {"step": torch.tensor(1)}, "lr_scheduler": {"last_epoch": 1}}
    for name, saved in {
        "dcp_nested": {"model": model_state, "optimizer": optimizer_state, **rest},
        "dcp_plain": model_state,
        "dcp_titan": {**model_state, "optimizer": optimizer_state, **rest},  # the model at the top
        "dcp_app": {"app": {"model": model_state, "optim": optimizer_state}},
    }.items():
        dcp.save(saved, checkpoint_id=folder / name)
    return gathered


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    gathered = run_ranks(RANKS, _save_all, str(folder))[0]
    model = tiny_model(CONFIGS["experts"], seed=5)
    experts = {name: each.float() for name, each in in_files(model, model.state_dict()).items()}
    for axis in (0, 1):
        gathered[f"stacked_{axis}"] = gathered[f"dcp_stacked_{axis}"] = experts
    gathered["tied"].pop("lm_head.weight")
    gathered["dcp_tied"] = gathered["tied"]
    for name in ("dcp_nested", "dcp_plain", "dcp_titan", "dcp_app"):
        gathered[name] = gathered["dcp"]
    for name, config in CONFIGS.items():
        config.save_pretrained(folder / "configs" / name)
    return folder, gathered


def _config(folder: Path, name: str) -> Path:
    kind = name.removeprefix("dcp_")
    return folder / "configs" / ("tied" if kind == "tied" else "experts" if "stacked" in kind else "untied")


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


OPTIMIZER = {"optimizer (tensors)", "optimizer (objects)"}
REST = {"lr_scheduler (objects)", "train_state (tensors)"}
NAMES = {
    **{name: set() for name in (*OF_RANKS, "dcp_plain", "stacked_0", "stacked_1", "dcp_stacked_0", "dcp_stacked_1")},
    "fsdp4": {"optim (files)"},
    "tied": {"copies of other tensors"},
    "dcp_tied": {"copies of other tensors"},
    "dcp_nested": OPTIMIZER | REST,
    "dcp_titan": OPTIMIZER | REST,
    "dcp_app": {"app (tensors)", "app (objects)"},
}  # fmt: skip
"""Checkpoints, and what is left out of them."""


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_becomes_the_model_that_torch_gathers(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path, name: str
) -> None:
    folder, gathered = saved
    report = convert_folder(
        folder / name, tmp_path / "hf", ConvertOptions(config=_config(folder, name)), unit_bytes=50_000
    )
    _same(load_file(tmp_path / "hf/model.safetensors"), gathered[name])
    assert report.left_out.keys() == NAMES[name]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.mark.parametrize("name", ["tp_fsdp", "fsdp1", "tied", "stacked_0", "dcp_tied", "dcp_titan", "dcp_stacked_0"])
def test_a_checkpoint_is_imported_as_a_version(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], service: Any, name: str
) -> None:
    folder, gathered = saved
    config = ["--config", str(_config(folder, name))]
    step = [] if name == "dcp_titan" else ["--step", "1"]  # torchtitan's says which it is
    line = ["import", str(folder / name), f"tests/{name}", "--server", service.address, *step, *config]
    done = CliRunner().invoke(commands, [*line, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["step"] == 1
    with EngineClient(service.address) as engine:
        _same(dict(engine.pull(f"tests/{name}")), gathered[name])


@pytest.mark.parametrize("name", ["fsdp4", "dcp_nested", "dcp_stacked_1"])
def test_a_checkpoint_in_fp32_becomes_a_model_in_bf16(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], service: Any, name: str
) -> None:
    folder, gathered = saved
    model = f"cast/{name.replace('_', '-')}"
    line = [
        "import",
        str(folder / name),
        model,
        "--server",
        service.address,
        "--dtype",
        "bf16",
        "--step",
        "3",
    ]
    if name == "dcp_stacked_1":  # it is converted before it is imported
        convert_folder(folder / name, folder / "converted", ConvertOptions(config=_config(folder, name)))
        line[1] = str(folder / "converted")
    else:
        line += ["--config", str(_config(folder, name))]
    done = CliRunner().invoke(commands, line)
    assert done.exit_code == 0, done.output
    assert f"{len(gathered[name])} tensors were cast to the model's dtype (rounded)" in done.stderr
    with EngineClient(service.address) as engine:
        assert engine.model(model).dtype == "BF16"
        assert json.loads(engine.model_files(model)["config.json"])["dtype"] == "bfloat16"
        _same(dict(engine.pull(model)), {key: each.bfloat16() for key, each in gathered[name].items()})


def test_a_checkpoint_that_does_not_say_its_step_is_not_taken_for_step_0(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], service: Any, tmp_path: Path
) -> None:
    folder, _ = saved
    line = ["--config", str(_config(folder, "tied")), "--server", service.address, "--json"]
    refused = CliRunner().invoke(commands, ["import", str(folder / "tied"), "tests/stepless", *line])
    assert "--step N" in json.loads(refused.stdout)["error"]["fix"]
    with EngineClient(service.address) as engine, pytest.raises(NotFound):
        engine.model("tests/stepless")
    shutil.copytree(folder / "tied", tmp_path / "global_step_40" / "actor")
    named = ["import", str(tmp_path / "global_step_40" / "actor"), "tests/stepless", *line]
    assert json.loads(CliRunner().invoke(commands, named).stdout)["step"] == 40


def test_what_lies_in_another_order_is_converted_before_it_is_imported(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], service: Any, tmp_path: Path
) -> None:
    """Experts whose matrices are transposed, as some models of transformers have them."""
    folder, gathered = saved
    config = folder / "configs/experts"

    def transpose(state: dict[str, Any]) -> None:
        full = torch.load(folder / "whole.pt")
        state.clear()
        state.update({name: each.mT.contiguous() if each.dim() == 3 else each for name, each in full.items()})

    source = _one_process(tmp_path / "swapped", transpose)
    line = ["import", str(source), "tests/swapped", "--server", service.address, "--json", "--step", "1"]
    failed = CliRunner().invoke(commands, [*line, "--config", str(config)])
    error = json.loads(failed.stdout)["error"]
    assert "down_proj" in str(error["details"])
    assert "weighbridge convert" in error["fix"]
    convert_folder(source, tmp_path / "hf", ConvertOptions(config=config))
    _same(load_file(tmp_path / "hf/model.safetensors"), gathered["stacked_0"])


def test_a_model_without_a_weight_map_is_taken_as_it_is(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path
) -> None:
    folder, gathered = saved
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    for name in ("dcp_nested", "dcp_titan", "fsdp4"):
        convert_folder(folder / name, tmp_path / name, ConvertOptions(config=tmp_path / "config"))
        _same(load_file(tmp_path / name / "model.safetensors"), gathered[name])


def test_the_config_lies_where_verl_writes_it(saved: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path) -> None:
    folder, gathered = saved
    shutil.copytree(folder / "hsdp", tmp_path / "global_step_10/actor")
    CONFIGS["untied"].save_pretrained(tmp_path / "global_step_10/actor/huggingface")
    convert_folder(tmp_path / "global_step_10/actor", tmp_path / "hf")
    _same(load_file(tmp_path / "hf/model.safetensors"), gathered["hsdp"])
    with pytest.raises(NotFound) as error:
        convert_folder(tmp_path / "global_step_10", tmp_path / "other")
    assert "actor" in error.value.fix


# -- bad input ------------------------------------------------------------------------------------------------------------


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was_run",)


def _one_process(to: Path, change: Any) -> Path:
    """A checkpoint of one rank that holds all, changed."""
    state = dict(tiny_model(CONFIGS["untied"], seed=5).float().state_dict())
    change(state)
    to.mkdir()
    torch.save(state, to / "model_world_size_1_rank_0.pt")
    return to


def test_tensors_that_are_missing_unknown_or_of_another_shape_are_named(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path
) -> None:
    options = ConvertOptions(config=saved[0] / "configs/untied")

    def change(state: dict[str, Any]) -> None:
        state.pop("model.norm.weight")
        state["model.layers.0.mlp.gate_porj.weight"] = state.pop("model.layers.0.mlp.gate_proj.weight")
        state["model.layers.1.input_layernorm.weight"] = torch.ones(3)

    with pytest.raises(LayoutError) as error:
        convert_folder(_one_process(tmp_path / "changed", change), tmp_path / "hf", options)
    told = "\n".join(error.value.details)
    assert "model.norm.weight is missing" in told
    assert "gate_porj" in told
    assert "did you mean model.layers.0.mlp.gate_proj.weight" in told
    assert "model.layers.1.input_layernorm.weight F32[3] has the wrong shape" in told

    def adapt(state: dict[str, Any]) -> None:
        state["model.layers.0.mlp.gate_proj.lora_A.weight"] = torch.ones(2, 2)

    with pytest.raises(LayoutError, match="LoRA"):
        convert_folder(_one_process(tmp_path / "adapters", adapt), tmp_path / "hf", options)

    def rename(state: dict[str, Any]) -> None:
        for name in list(state):
            state[name.replace("model.", "").replace("lm_head", "output")] = state.pop(name)

    with pytest.raises(NotFound) as nothing:
        convert_folder(_one_process(tmp_path / "renamed", rename), tmp_path / "hf", options)
    assert "torchtitan" in nothing.value.fix
    assert not (tmp_path / "hf").exists()


def test_files_that_are_no_checkpoint_are_refused_and_nothing_is_run(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source, options = saved[0] / "fsdp4", ConvertOptions(config=saved[0] / "configs/untied")
    missing = shutil.copytree(source, tmp_path / "missing")
    (missing / f"model_world_size_{RANKS}_rank_2.pt").unlink()
    with pytest.raises(NotFound) as absent:
        convert_folder(missing, tmp_path / "hf", options)
    assert absent.value.details == (f"model_world_size_{RANKS}_rank_2.pt is missing",)

    mixed = shutil.copytree(source, tmp_path / "mixed")
    torch.save({}, mixed / "model_world_size_2_rank_0.pt")
    with pytest.raises(InvalidArgument, match="of 2 and of 4 ranks"):
        convert_folder(mixed, tmp_path / "hf", options)

    short = shutil.copytree(source, tmp_path / "short")
    path = short / f"model_world_size_{RANKS}_rank_1.pt"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(DataLoss, match=r"rank_1\.pt"):
        convert_folder(short, tmp_path / "hf", options)

    evil = _one_process(tmp_path / "evil", lambda state: state.update(other=_Runs()))
    with pytest.raises(DataLoss, match=r"names (posix|os)\.mkdir.*no code was executed"):
        convert_folder(evil, tmp_path / "hf", options)
    (evil / "model_world_size_1_rank_0.pt").write_bytes(pickle.dumps({"no": "archive"}))
    with pytest.raises(DataLoss):
        convert_folder(evil, tmp_path / "hf", options)
    assert not Path("was_run").exists()


def test_a_tensor_that_claims_more_than_the_files_hold_costs_nothing(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path
) -> None:
    source = shutil.copytree(saved[0] / "fsdp4", tmp_path / "vast")
    path = source / f"model_world_size_{RANKS}_rank_0.pt"
    # the shape of the embedding, 131 x 64, as the pickle has it
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive, zipfile.ZipFile(path, "w") as changed:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("data.pkl"):
                content = content.replace(b"K\x83K@", b"J\xff\xff\xff\x7fK@")
            changed.writestr(name, content)
    with pytest.raises(LayoutError) as error:
        convert_folder(source, tmp_path / "hf", ConvertOptions(config=saved[0] / "configs/untied"))
    assert "all files together" in str(error.value.details)


@pytest.mark.parametrize("name", ["\x1b[2Jodd\n", "\udc80odd", "odd" * 100_000])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_name_of_anything_is_told_in_a_short_line_that_can_be_printed(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path, name: str, options: list[str]
) -> None:
    source = _one_process(tmp_path / "odd", lambda state: state.update({name: 7}))
    line = ["convert", str(source), str(tmp_path / "hf"), "--config", str(saved[0] / "configs/untied")]
    done = CliRunner().invoke(commands, [*line, *options], color=True)
    assert done.exit_code == 0, done.output
    assert "odd" in done.stdout
    assert len(done.stdout) < 2000
    assert all(part.isprintable() for part in done.stdout.splitlines())


class _Called:
    """An object that a pickle makes by a call."""

    def __init__(self, made_by: Any, *arguments: Any) -> None:
        self.call = made_by, arguments

    def __reduce__(self) -> Any:
        return self.call


def _of_shape(*shape: int) -> _Called:
    """A tensor of one element whose description has this shape."""
    storage = torch.zeros(1).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    make = torch._utils._rebuild_tensor_v2  # type: ignore[attr-defined]
    return _Called(make, typed, 0, shape, shape, False, OrderedDict())


def _parameter_of(value: Any) -> _Called:
    return _Called(torch._utils._rebuild_parameter, value, False, OrderedDict())  # type: ignore[attr-defined]


def test_tensors_of_a_hundred_thousand_axes_and_parameters_of_parameters_are_refused_at_once(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path
) -> None:
    vast = 100_000 * (65535,)
    nested: Any = torch.ones(64)
    for _ in range(200):
        nested = _parameter_of(nested)

    def change(state: dict[str, Any]) -> None:
        state.update({f"vast.{number}": _of_shape(*vast) for number in range(3)}, nested=nested)

    source = _one_process(tmp_path / "vast", change)
    started = time.process_time()
    with pytest.raises(LayoutError) as error:
        convert_folder(source, tmp_path / "hf", ConvertOptions(config=saved[0] / "configs/untied"))
    assert time.process_time() - started < 10
    told = str(error.value)
    assert "'vast.0' in model_world_size_1_rank_0.pt: it has 100000 axes" in told
    assert "'nested' in model_world_size_1_rank_0.pt: its pickle does not contain a plain tensor" in told
    assert len(told) < 2000


def test_a_length_that_nothing_but_an_empty_file_makes_room_for_costs_nothing(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path
) -> None:
    source = shutil.copytree(saved[0] / "fsdp4", tmp_path / "sparse")
    path = source / f"model_world_size_{RANKS}_rank_0.pt"
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive, zipfile.ZipFile(path, "w") as changed:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("data.pkl"):  # the shape of the embedding, 131 x 64
                content = content.replace(b"K\x83K@", b"\x8a\x05\x00\x00\x00\x00\x02K@")
            changed.writestr(name, content)
    os.truncate(source / f"model_world_size_{RANKS}_rank_1.pt", 1 << 42)
    with pytest.raises(DataLoss, match=r"rank_1\.pt"):
        convert_folder(source, tmp_path / "hf", ConvertOptions(config=saved[0] / "configs/untied"))


def test_ranks_that_disagree_about_a_tensor_are_named(
    saved: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path
) -> None:
    options = ConvertOptions(config=saved[0] / "configs/untied")

    source = shutil.copytree(saved[0] / "fsdp4", tmp_path / "disagree")
    path = source / f"model_world_size_{RANKS}_rank_1.pt"
    state = {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}
    torch.save(state, path)
    with pytest.raises(LayoutError) as error:
        convert_folder(source, tmp_path / "hf", options)
    assert "model.norm.weight" in error.value.details[0]
    torch.save({}, path)  # what the rank held of all tensors is gone
    with pytest.raises(LayoutError, match="exactly once"):
        convert_folder(source, tmp_path / "hf", options)


def test_a_tied_copy_that_differs_is_refused(saved: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in tiny_model(CONFIGS["tied"], seed=5).float().state_dict().items()}
    state["lm_head.weight"] += 1
    dcp.save({"model": state}, checkpoint_id=tmp_path / "differs", no_dist=True)
    with pytest.raises(DataLoss, match=r"lm_head\.weight is not the same"):
        convert_folder(tmp_path / "differs", tmp_path / "hf", ConvertOptions(config=saved[0] / "configs/tied"))


# -- without a weight map --------------------------------------------------------------------------------------------------

WRAPPED = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled inside": lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    "checkpointing": lambda name: name.replace("layers.0.", "layers.0._checkpoint_wrapped_module."),
    "FSDP1": lambda name: f"_fsdp_wrapped_module.{name}",
    "DDP": lambda name: f"module.{name}",
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("top", ["model", "state_dict", ""], ids=["under model", "under state_dict", "at the top"])
def test_names_of_a_type_without_a_map_are_those_of_the_module(tmp_path: Path, wrapper: str, top: str) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text('{"model_type": "unheard-of"}')
    weights = {"layers.0.w": torch.rand(3, 2), "layers.1.w": torch.rand(2), "head": torch.rand(4)}
    state = {WRAPPED[wrapper](name): tensor for name, tensor in weights.items()}
    dcp.save({top: state} if top else state, checkpoint_id=tmp_path / "saved", no_dist=True)
    found = CheckpointToPush.read(tmp_path / "saved", tmp_path / "config")
    for shard, place in found.shards:
        data = (tmp_path / "saved" / place.buffer).read_bytes()[place.offset : place.offset + place.nbytes]
        assert data == weights.pop(shard.tensor).numpy().tobytes()
    assert not weights


def test_a_checkpoint_that_transformers_own_model_does_not_fit_is_not_converted(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text('{"model_type": "mistral"}')
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    missing = LoaderComparison("MistralForCausalLM", ("lm_head.weight",))
    with (
        compared_by(lambda config, shapes: missing),
        pytest.raises(InvalidArgument, match="MistralForCausalLM") as told,
    ):
        convert_folder(tmp_path / "saved", tmp_path / "hf", ConvertOptions(config=tmp_path / "config"))
    assert told.value.details == ("lm_head.weight is missing",)


def test_a_checkpoint_is_imported_by_its_tensors_alone_if_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text('{"model_type": "mistral"}')
    dcp.save({"model": {"w": torch.arange(2.0)}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    missing = LoaderComparison("MistralForCausalLM", ("lm_head.weight",))
    with running_service(tmp_path / "store") as running, compared_by(lambda config, shapes: missing):
        line = ["import", str(tmp_path / "saved"), "tests/part", "--config", str(tmp_path / "config")]
        line += ["--server", running.address, "--step", "0"]
        refused = CliRunner().invoke(commands, line)
        assert refused.exit_code == 1
        assert "lm_head.weight is missing" in refused.stderr
        assert "--no-weight-map" in refused.stderr
        done = CliRunner().invoke(commands, [*line, "--no-weight-map"])
        assert done.exit_code == 0, done.output
        with EngineClient(running.address) as engine:
            assert torch.equal(dict(engine.pull("tests/part", "latest"))["w"], torch.arange(2.0))
    of_megatron = CheckpointToPush(tmp_path, {}, (), (), (), TensorSpace.MEGATRON, (), {}, None, {})
    with pytest.raises(InvalidArgument, match="only a weight map relates"):
        of_megatron.push(None, "tests/part", step=0, run="", weight_map=False)  # type: ignore[arg-type]
