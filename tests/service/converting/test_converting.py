"""Are converted folders the same model, is nothing lost silently, and does an interrupted conversion resume?

What is written is compared with safetensors' own loader, with transformers, and with real Megatron models that
`tests.support.reference` has filled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import filecmp
import functools
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.sdk.trainers.torch_dist.test_torch_dist import assemble, write
from tests.service.families.test_conventions import (
    gemma3_model,
    llama4_model,
    llama4_text_model,
    qwen2_5_vl_model,
)
from tests.support.forked import forked_python, forking
from tests.support.megatron_ranks import run_ranks
from tests.support.published_families import PUBLISHED
from tests.support.reference import (
    MtpReference,
    in_files,
    load_with_mbridge,
    make_random,
    skip_if_saved_otherwise,
    tiny_config,
    tiny_model,
    tiny_value_model,
)
from tests.support.rounds import first_seed, rounds
from tests.support.services import running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge._cli import commands
from weighbridge._core.boxes import Box
from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.layouts import Shard, TensorSpec
from weighbridge._trainers.torch_dist.folder import lay_out_torch_dist, read_torch_dist
from weighbridge.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    LayoutError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    WeighbridgeError,
)
from weighbridge_demo.megatron_cpu import Parallel
from weighbridge_service.converting import convert, worker, workers, working_folder
from weighbridge_service.converting.checkpoint_keys import KeyForm, LayerSpec
from weighbridge_service.converting.conversions import ConvertOptions
from weighbridge_service.converting.convert import convert_folder
from weighbridge_service.converting.working_folder import WorkingFolder
from weighbridge_service.families.dense import Llama
from weighbridge_service.models import bridges
from weighbridge_service.models.bridges import bridge_for

KILLS = rounds("CONVERT_KILLS")
"""Number of kills of a conversion in each direction."""
SMALL_UNITS = 100_000

FAMILIES: list[tuple[str, bool, dict[str, Any]]] = [
    ("llama", False, {}),
    ("qwen2", True, {"vocab_size": 125}),
    ("mixtral", False, {}),
    ("qwen3_moe", False, {}),
    ("qwen3_moe_sparse", False, {"vocab_size": 130}),
    ("deepseek_v3_mtp", False, {}),
    ("mimo", False, {}),
    ("gpt_oss", False, {}),
    ("ernie4_5_moe", False, {}),
    ("minimax_m2", False, {}),
    ("deepseek_v32_mtp", False, {}),
]
OTHER_MODELS: dict[str, Callable[[], Any]] = {
    "gemma3": lambda: gemma3_model(tied=True),
    "gemma3-untied": lambda: gemma3_model(tied=False),
    "qwen2_5_vl": lambda: qwen2_5_vl_model(tied=False),
    "qwen3_vl_moe": PUBLISHED["qwen3_vl_moe"][0],
    "glm4v_moe": PUBLISHED["glm4v_moe"][0],
    "nemotron_h": PUBLISHED["nemotron_h"][0],
    "qwen3_next": PUBLISHED["qwen3_next-decoder"][0],
    "llama4": lambda: llama4_model(every=1),
    "llama4-interleaved": lambda: llama4_text_model(every=2),
}
"""Models that transformers makes of more than a few fields: with images, or with experts in one tensor."""


def weights_of(family: str, *, tied: bool, **overrides: Any) -> tuple[PretrainedConfig, dict[str, Tensor]]:
    """A config and weights by Hugging Face names, with tied ones twice."""
    config = tiny_config(family, tied=tied, **overrides)
    model = tiny_model(config, seed=1)
    weights = in_files(model, model.state_dict())
    if getattr(config, "num_nextn_predict_layers", 0):
        weights |= MtpReference(model, seed=2).tensors(model)
    return config, weights


def hf_folder(folder: Path, config: PretrainedConfig, weights: Mapping[str, Tensor]) -> Path:
    """A Hugging Face folder; written by hand, because transformers leaves out multi-token prediction."""
    config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"not": "read"}')
    kept = {
        name: tensor.clone()
        for name, tensor in weights.items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def loaded(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("llama"), *weights_of("llama", tied=False))


# -- the same model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied", "overrides"), FAMILIES, ids=[name for name, *_ in FAMILIES])
def test_what_comes_back_is_what_went(tmp_path: Path, family: str, tied: bool, overrides: dict[str, Any]) -> None:
    skip_if_saved_otherwise(family)
    config, weights = weights_of(family, tied=tied, torch_dtype="bfloat16", **overrides)
    weights = {
        # Routers' biases stay as they are in published checkpoints, in float32.
        name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        for name, tensor in weights.items()
    }
    source = hf_folder(tmp_path / "hf", config, weights)
    forms: list[tuple[KeyForm, LayerSpec]] = [("auto", "te"), ("per-layer", "local")]
    for keys, spec in forms:
        checkpoint, back = tmp_path / f"{keys}-{spec}", tmp_path / f"{keys}-{spec}-hf"
        options = ConvertOptions(keys=keys, spec=spec, max_file_bytes=300_000)
        report = convert_folder(source, checkpoint, options)
        assert sorted(report.files) == sorted(
            str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()
        )
        assert len(report.files) > 6
        convert_folder(checkpoint, back, ConvertOptions(max_file_bytes=200_000))
        same(loaded(back), loaded(source))
        for name in ("config.json", "tokenizer.json"):
            assert (back / name).read_bytes() == (source / name).read_bytes()
        index = json.loads((back / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == loaded(source).keys()
        rows = read_torch_dist(checkpoint).layout.tensors["embedding.word_embeddings.weight"].shape[0]
        assert rows == -(-config.vocab_size // 128) * 128
    assert not list(tmp_path.glob("*.converting"))


@pytest.mark.parametrize("key", OTHER_MODELS)
def test_models_with_images_and_stacked_experts_come_back(tmp_path: Path, key: str) -> None:
    skip_if_saved_otherwise(key)
    model = OTHER_MODELS[key]()
    make_random(model, seed=5)
    model.save_pretrained(tmp_path / "hf")
    convert_folder(tmp_path / "hf", tmp_path / "checkpoint")
    convert_folder(tmp_path / "checkpoint", tmp_path / "back")
    same(loaded(tmp_path / "back"), loaded(tmp_path / "hf"))
    # a conversion to the same names would pass the comparison above
    tensors = read_torch_dist(tmp_path / "checkpoint").layout.tensors
    assert any(name.endswith("self_attention.linear_qkv.weight") for name in tensors)


def test_constants_are_added_to_elements_that_units_cut_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that Megatron-core has less one, in units and gathers that begin and end inside an element."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 4)
    experts = {"num_experts": 2, "moe_intermediate_size": 2, "shared_expert_intermediate_size": 2}
    linear = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 2}
    config = tiny_config(
        "qwen3_next", tied=False, num_hidden_layers=2, vocab_size=8, num_attention_heads=1, num_key_value_heads=1,
        linear_value_head_dim=11, full_attention_interval=2, **sizes, **experts, **linear,
    )  # fmt: skip
    model = tiny_model(config, seed=1).bfloat16()
    norm = model.model.layers[0].linear_attn.norm.weight
    norm.data.copy_(torch.randn(11) * 3)
    model.save_pretrained(tmp_path / "hf")
    monkeypatch.setattr(convert, "_share", lambda budget, wanted: (2, 7))
    convert_folder(tmp_path / "hf", tmp_path / "checkpoint", ConvertOptions(vocab_multiple=1), unit_bytes=33)
    found = assemble(tmp_path / "checkpoint", read_torch_dist(tmp_path / "checkpoint").layout)
    assert torch.equal(found["decoder.layers.0.self_attention.out_norm.weight"], norm.data - 1)
    convert_folder(tmp_path / "checkpoint", tmp_path / "back", unit_bytes=33)
    expected = loaded(tmp_path / "hf")
    expected["model.layers.0.linear_attn.norm.weight"] = norm.data - 1 + 1
    same(loaded(tmp_path / "back"), expected)


def test_a_value_head_comes_back(tmp_path: Path) -> None:
    model = tiny_value_model(tiny_config("qwen2", tied=True), seed=3)
    model.save_pretrained(tmp_path / "hf")
    convert_folder(tmp_path / "hf", tmp_path / "checkpoint")
    convert_folder(tmp_path / "checkpoint", tmp_path / "back")
    assert read_torch_dist(tmp_path / "checkpoint").layout.tensors["output_layer.weight"].shape == (1, 64)
    same(loaded(tmp_path / "back"), loaded(tmp_path / "hf"))
    assert "score.bias" in loaded(tmp_path / "back")


@dataclass(frozen=True)
class Saved:
    """A model, and folders with checkpoints of it: each with its layers' spec, and whether layers have keys of their
    own.
    """

    config: PretrainedConfig
    weights: dict[str, Tensor]
    folders: dict[str, tuple[LayerSpec, bool]]


def _fill_and_load(rank: int, parallel: Parallel, cases: list[Saved]) -> list[str]:
    """Load checkpoints as Megatron does, and name what differs from models filled by another loader."""
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    from tests.support.megatron_families import build_family_model

    def parameters(model: Any) -> dict[str, Tensor]:
        return {n: t for n, t in model.state_dict().items() if t is not None and "_extra_state" not in n}

    different = []
    for case in cases:
        # Not the padding that was written: Megatron takes any.
        rows = -(-case.config.vocab_size // 8) * 8
        filled = build_family_model(case.config, parallel, padded_vocab_size=rows)
        load_with_mbridge(filled, case.weights, case.config)
        expected = parameters(filled)
        for folder, (spec, per_layer) in case.folders.items():
            model = build_family_model(case.config, parallel, names=spec, padded_vocab_size=rows)
            metadata = ensure_metadata_has_dp_cp_group({"non_homogeneous_layers": per_layer})
            state = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, folder)
            model.load_state_dict(state["model"])
            assert state["checkpoint_version"] == 3.0
            found = parameters(model)
            assert found.keys() == expected.keys()
            different += [
                f"{folder}: {name}" for name, tensor in expected.items() if not torch.equal(found[name], tensor)
            ]
    return different


def test_megatron_loads_what_is_written_at_any_parallelism(tmp_path: Path) -> None:
    cases = []
    for family, tied, overrides in (
        ("llama", False, {}),
        ("qwen2", True, {"vocab_size": 125}),
        ("mixtral", False, {}),
        ("deepseek_v3_mtp", False, {}),
    ):
        config, weights = weights_of(family, tied=tied, **overrides)
        source = hf_folder(tmp_path / family, config, weights)
        folders = {}
        forms: tuple[tuple[KeyForm, LayerSpec], ...] = (("auto", "te"), ("per-layer", "local"))
        for keys, spec in forms:
            folder = tmp_path / f"{family}-{spec}"
            convert_folder(source, folder, ConvertOptions(keys=keys, spec=spec))
            folders[str(folder)] = (spec, keys == "per-layer")
        cases.append(Saved(config, weights, folders))
    parallels = (Parallel(pp=2), Parallel(tp=2, ep=2, etp=1), Parallel(), Parallel(tp=2))
    for parallel in parallels if rounds("CELLS") else parallels[:2]:
        for different in run_ranks(parallel, _fill_and_load, parallel, cases):
            assert different == []


def _fill_and_save(
    rank: int,
    parallel: Parallel,
    config: PretrainedConfig,
    weights: dict[str, Tensor],
    folder: str,
    flag: str,
) -> None:
    """Save a filled model as Megatron's training does, with states of an optimizer and of random numbers."""
    import queue

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    from tests.support.megatron_families import build_family_model

    # Its writers are processes that report to a server process; ranks here are daemons, which may start none.
    filesystem_async._results_queue = queue.Queue()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    rows = -(-config.vocab_size // 16) * 16
    model = build_family_model(config, parallel, padded_vocab_size=rows)
    load_with_mbridge(model, weights, config)
    world = parallel.world_size
    moment = torch.full((1, 4), float(rank))
    dist_checkpointing.save(
        {
            "model": model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group({flag: True})),
            "optimizer": ShardedTensor.from_rank_offsets(
                "optimizer.state.exp_avg.decoder.layers.x", moment, (0, rank, world)
            ),
            "rng": ShardedObject("rng_state", [rank], (world,), (rank,)),
            "iteration": 7,
        },
        folder,
    )


@pytest.mark.parametrize(
    ("family", "tied", "overrides", "parallel", "flag"),
    [
        ("qwen2", True, {"vocab_size": 125}, Parallel(tp=2, pp=2), "of no meaning"),
        ("qwen3_moe", False, {}, Parallel(tp=2, ep=2, etp=1), "singleton_local_shards"),
        ("deepseek_v3", False, {}, Parallel(pp=2), "non_homogeneous_layers"),
    ],
)
def test_transformers_loads_what_megatron_has_saved(
    tmp_path: Path, family: str, tied: bool, overrides: dict[str, Any], parallel: Parallel, flag: str
) -> None:
    config, weights = weights_of(family, tied=tied, **overrides)
    hf_folder(tmp_path / "hf", config, weights)
    (tmp_path / "saved").mkdir()
    run_ranks(parallel, _fill_and_save, parallel, config, weights, str(tmp_path / "saved"), flag)
    with pytest.raises(NotFound, match=r"no config\.json"):
        convert_folder(tmp_path / "saved", tmp_path / "back")
    options = ConvertOptions(config=tmp_path / "hf")

    report = convert_folder(tmp_path / "saved", tmp_path / "back", options)

    read = AutoModelForCausalLM.from_pretrained(tmp_path / "back", torch_dtype="auto")
    found = in_files(read, read.state_dict())
    same(found, weights)
    assert report.left_out["optimizer (tensors)"] == 1
    assert report.left_out["rng_state (objects)"] == parallel.world_size
    assert report.left_out["_extra_state (objects)"] > 0


def test_a_checkpoint_without_multi_token_prediction_gives_a_model_without_it(tmp_path: Path) -> None:
    config, weights = weights_of("deepseek_v3_mtp", tied=False)
    plain = {
        name: tensor for name, tensor in weights.items() if not name.startswith(("model.layers.4.", "model.layers.5."))
    }
    source = hf_folder(tmp_path / "hf", config, plain)
    convert_folder(source, tmp_path / "checkpoint")
    convert_folder(tmp_path / "checkpoint", tmp_path / "back")
    same(loaded(tmp_path / "back"), plain)


def test_code_comes_along_and_what_does_not_is_named(tmp_path: Path, llama: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(llama, source)
    (source / "modeling_mine.py").write_text("raise SystemExit('nothing here runs this')")
    (source / "optimizer.bin").write_bytes(b"x")
    (source / "LICENSE").write_text("free")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling/config.json").write_text("{}")
    (source / "onnx").mkdir()
    (source / "onnx/model.onnx").write_bytes(b"x")
    report = convert_folder(source, tmp_path / "checkpoint")
    assert report.left_out == {"files (onnx, optimizer.bin)": 2}
    report = convert_folder(tmp_path / "checkpoint", tmp_path / "back")
    assert report.left_out == {"_extra_state (objects)": report.left_out["_extra_state (objects)"]}
    names = {path.name for path in source.iterdir()} - {"optimizer.bin", "onnx"}
    assert {path.name for path in (tmp_path / "back").iterdir()} == names
    assert (tmp_path / "back/1_Pooling/config.json").read_text() == "{}"
    assert (tmp_path / "back/modeling_mine.py").read_bytes() == (source / "modeling_mine.py").read_bytes()


def test_the_config_of_a_folder_names_the_dtype_of_its_weights(tmp_path: Path) -> None:
    """A trainer keeps float32 of a model that was published in bfloat16."""
    config, weights = weights_of("llama", tied=False, torch_dtype="bfloat16")
    convert_folder(hf_folder(tmp_path / "hf", config, weights), tmp_path / "checkpoint")
    convert_folder(tmp_path / "checkpoint", tmp_path / "back")
    fields = json.loads((tmp_path / "back/config.json").read_text())
    assert fields["dtype"] == fields["torch_dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", torch_dtype="auto")
    same(model.state_dict(), weights)  # to the bit: a cast to bfloat16 in between would show


def test_a_checkpoint_is_imported_as_a_version(tmp_path: Path) -> None:
    config, weights = weights_of("deepseek_v3_mtp", tied=False, vocab_size=125)
    source = hf_folder(tmp_path / "hf", config, weights)
    convert_folder(source, tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "checkpoint/hf")
    with running_service(tmp_path / "store") as running:
        line = ["import", str(tmp_path / "checkpoint"), "acme/tiny", "--server", running.address, "--json"]
        failed = CliRunner().invoke(commands, line)
        assert "config.json" in json.loads(failed.stdout)["error"]["message"]
        done = CliRunner().invoke(commands, [*line, "--config", str(source), "--step", "3"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["step"] == 3
        assert "_extra_state" in done.stderr
        with EngineClient(running.address) as engine:
            same(dict(engine.pull("acme/tiny", "latest")), loaded(source))
        cast = ["--config", str(source), "--step", "4", "--dtype", "bf16"]
        line[2] = "acme/cast"
        done = CliRunner().invoke(commands, [*line, *cast])
        assert done.exit_code == 0, done.output
        with EngineClient(running.address) as engine:
            pulled = dict(engine.pull("acme/cast", "latest"))
        kept = {name for name in pulled if name.endswith("e_score_correction_bias")}
        assert kept, "routers' biases stay in float32, as in an export"
        same(pulled, {n: t if n in kept else t.bfloat16() for n, t in loaded(source).items()})


# -- nothing is lost in silence ------------------------------------------------------------------------------------------------


Change = Callable[[dict[str, Tensor]], object]


def _rename(weights: dict[str, Tensor], name: str, new: str) -> None:
    weights[new] = weights.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("model.layers.2.mlp.experts.5.up_proj.weight"),
            "experts.5.up_proj.weight is missing",
        ),
        (lambda w: _rename(w, "model.norm.weight", "model.norm.w"), "model.norm.w F32"),
        (lambda w: w.update({"model.layers.9.enorm.weight": torch.ones(64)}), "model.layers.9.enorm.weight"),
        (lambda w: w.pop("model.layers.5.hnorm.weight"), "model.layers.5.hnorm.weight is missing"),
        (lambda w: w.update({"model.norm.weight": torch.ones(65)}), r"\[65\] has the wrong shape"),
        (
            lambda w: w.update({"model.layers.0.mlp.up_proj.weight": torch.ones(96, 64).bfloat16()}),
            "wrong dtype",
        ),
        (
            lambda w: w.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}),
            "dequantise",
        ),
    ],
)
def test_a_folder_that_is_not_the_model_is_refused_by_name(tmp_path: Path, change: Change, message: str) -> None:
    config, weights = weights_of("deepseek_v3_mtp", tied=False)
    change(weights)
    source = hf_folder(tmp_path / "hf", config, weights)
    with pytest.raises(InvalidArgument, match=message) as caught:
        convert_folder(source, tmp_path / "checkpoint")
    assert caught.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_copy_that_is_no_copy_is_not_dropped(tmp_path: Path) -> None:
    config, weights = weights_of("deepseek_v3_mtp", tied=False)
    weights["model.layers.5.embed_tokens.weight"] = weights["model.layers.5.embed_tokens.weight"] + 1
    source = hf_folder(tmp_path / "hf", config, weights)
    with pytest.raises(DataLoss, match=r"model\.layers\.5\.embed_tokens\.weight is not the same"):
        convert_folder(source, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with experts and multi-token prediction."""
    folder = tmp_path_factory.mktemp("deepseek")
    hf_folder(folder / "hf", *weights_of("deepseek_v3_mtp", tied=False))
    convert_folder(folder / "hf", folder / "checkpoint")
    return folder / "checkpoint"


FC1 = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
FC2 = "decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
Parts = tuple[list[Shard], dict[str, Tensor]]


def _without(name: str, *leading: int) -> Callable[[Parts], object]:
    def change(parts: Parts) -> None:
        parts[0][:] = [
            shard for shard in parts[0] if not (shard.tensor == name and shard.box.offset[: len(leading)] == leading)
        ]
        if not any(shard.tensor == name for shard in parts[0]):
            del parts[1][name]

    return change


def _with(name: str, tensor: Tensor, box: Box) -> Callable[[Parts], object]:
    def change(parts: Parts) -> None:
        parts[0].append(Shard(name, box))
        parts[1].setdefault(name, tensor)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(FC2, 3), r"experts\.3\.down_proj\.weight .* has no source"),
        (_without(FC1, 3, 48), r"experts\.3\.up_proj\.weight .* has no source"),
        (_without(FC1), r"experts\.0\.gate_proj\.weight .* has no source"),
        (_without("mtp.layers.1.eh_proj.weight"), r"layers\.5\.eh_proj\.weight .* has no source"),
        (_with(FC2, torch.empty(0), Box((3, 1, 0), (1, 1, 48))), "occurs twice"),
        (
            _with(FC2.replace("experts.linear", "experts.3.linear"), torch.zeros(64, 48), Box.whole((64, 48))),
            r"experts\.3\.down_proj\.weight .* would be written twice",
        ),
        (
            _with("decoder.layers.9.mlp.linear_fc2.weight", torch.zeros(64, 96), Box.whole((64, 96))),
            r"decoder\.layers\.9\.mlp\.linear_fc2\.weight F32\[64, 96\] is not a tensor of this",
        ),
        (
            _with("adapter.weight", torch.zeros(3), Box.whole((3,))),
            r"adapter\.weight F32\[3\] is not a tensor",
        ),
    ],
)
def test_a_checkpoint_that_is_not_the_model_is_refused_by_name(
    tmp_path: Path, deepseek: Path, change: Callable[[Parts], object], message: str
) -> None:
    layout = read_torch_dist(deepseek).layout
    tensors = assemble(deepseek, layout)
    shards = [placement.shard for placement in layout.placements]
    change((shards, tensors))
    specs = [
        TensorSpec(name, layout.tensors[FC1].dtype, tuple(tensor.shape))
        if name not in layout.tensors
        else layout.tensors[name]
        for name, tensor in tensors.items()
    ]
    write(tmp_path / "checkpoint", lay_out_torch_dist(shards, specs), tensors)
    with pytest.raises(LayoutError, match=message):
        convert_folder(tmp_path / "checkpoint", tmp_path / "back", ConvertOptions(config=deepseek / "hf"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_keys_may_have_the_prefix_of_a_wrapper(tmp_path: Path, deepseek: Path) -> None:
    layout = read_torch_dist(deepseek).layout
    tensors = {f"module.{name}": tensor for name, tensor in assemble(deepseek, layout).items()}
    shards = [p.shard._replace(tensor=f"module.{p.shard.tensor}") for p in layout.placements]
    specs = [replace(spec, name=f"module.{name}") for name, spec in layout.tensors.items()]
    write(tmp_path / "checkpoint", lay_out_torch_dist(shards, specs), tensors)
    convert_folder(tmp_path / "checkpoint", tmp_path / "back", ConvertOptions(config=deepseek / "hf"))
    same(loaded(tmp_path / "back"), loaded(deepseek.parent / "hf"))


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, llama: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(llama, source)
    convert_folder(source, tmp_path / "checkpoint")
    for folder, name in ((source, "model.safetensors"), (tmp_path / "checkpoint", "__0_0.distcp")):
        with (folder / name).open("r+b") as file:
            file.truncate(file.seek(0, os.SEEK_END) // 2)
        with pytest.raises(DataLoss, match=name.replace(".", r"\.")):
            convert_folder(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    (tmp_path / "checkpoint/__0_0.distcp").unlink()
    with pytest.raises(NotFound, match=r"__0_0\.distcp"):
        convert_folder(tmp_path / "checkpoint", tmp_path / "other")


def test_what_cannot_be_begun_is_refused_before_it_begins(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()
    with pytest.raises(AlreadyExists, match="not an empty folder"):
        convert_folder(llama, tmp_path / "there")
    with pytest.raises(NotFound, match="no folder"):
        convert_folder(tmp_path / "nowhere", tmp_path / "new")
    with pytest.raises(NotFound, match="neither"):
        convert_folder(tmp_path, tmp_path / "new")
    with pytest.raises(ResourceExhausted, match="this conversion needs") as caught:
        convert_folder(llama, tmp_path / "new", memory_budget=50 << 20)
    assert "--memory-budget" in caught.value.fix
    sparse = hf_folder(tmp_path / "sparse", *weights_of("qwen3_moe_sparse", tied=False))
    with pytest.raises(InvalidArgument, match="not all alike"):
        convert_folder(sparse, tmp_path / "new", ConvertOptions(keys="stacked"))
    full = SimpleNamespace(f_bavail=10, f_frsize=4096)
    monkeypatch.setattr(working_folder.os, "statvfs", lambda _: full)  # type: ignore[attr-defined]
    with pytest.raises(ResourceExhausted, match="the disk has 40960 left"):
        convert_folder(llama, tmp_path / "new")
    monkeypatch.undo()
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    convert_folder(llama, tmp_path / "new")


def test_a_second_copy_of_a_tied_tensor_is_compared_and_left_out(tmp_path: Path) -> None:
    config, weights = weights_of("qwen2", tied=True)
    source = hf_folder(tmp_path / "hf", config, weights)
    plain = load_file(source / "model.safetensors")
    save_file({**plain, "lm_head.weight": plain["model.embed_tokens.weight"].clone()}, source / "model.safetensors")

    report = convert_folder(source, tmp_path / "checkpoint")
    convert_folder(tmp_path / "checkpoint", tmp_path / "back")

    assert report.left_out == {"copies of other tensors": 1}
    same(loaded(tmp_path / "back"), plain)
    with running_service(tmp_path / "store") as running, TrainerClient(running.address) as trainer:
        trainer.import_folder("acme/tied", source).wait(timeout=60)
        with EngineClient(running.address) as engine:
            same(dict(engine.pull("acme/tied")), plain)
        save_file({**plain, "lm_head.weight": torch.zeros(128, 64)}, source / "model.safetensors")
        with pytest.raises(InvalidArgument, match=r"lm_head\.weight is not the same as model\.embed_tokens\.weight"):
            trainer.import_folder("acme/tied", source)
    with pytest.raises(DataLoss, match=r"lm_head\.weight is not the same"):
        convert_folder(source, tmp_path / "other")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": "stacked"}, "--keys"),
        ({"spec": "local"}, "--spec"),
        ({"vocab_multiple": 1}, "--vocab-multiple"),
    ],
)
def test_options_of_the_other_direction_are_refused(
    tmp_path: Path, llama: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match="--config"):
        convert_folder(llama, tmp_path / "new", ConvertOptions(config=llama))
    convert_folder(llama, tmp_path / "checkpoint")
    with pytest.raises(InvalidArgument, match=message):
        convert_folder(tmp_path / "checkpoint", tmp_path / "new", ConvertOptions(**options))


@pytest.mark.parametrize("direct", [True, False], ids=["past the page cache", "through it"])
def test_bytes_at_any_place_are_copied_and_their_neighbours_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(path, flags, mode)

    really_open = os.open
    if not direct:
        monkeypatch.setattr(os, "open", refusing)
    randomness = random.Random(7)
    source, size, buffer_bytes = randomness.randbytes(100_000), 120_000, 16 << 10
    (tmp_path / "source").write_bytes(source)
    working = worker.Worker(worker.Job((str(tmp_path / "source"),), str(tmp_path), buffer_bytes), io.BytesIO())
    for number in range(200):
        before = randomness.randbytes(size)
        (tmp_path / "target").write_bytes(before)
        to = randomness.randrange(size)
        length = min(randomness.choice([0, 1, 4095, 4096, 4097, 8192, 40_000, 70_000]), size - to)
        at = randomness.randrange(len(source) - length)
        gathers = []
        for first in range(0, length, buffer_bytes):
            part = min(buffer_bytes, length - first)
            copied = ByteCopy((part,), 0, (1,), 0, at + first, (1,))
            gathers.append(worker.Gather(to + first, part, (copied,)))
        working.do(worker.Unit(number, "target", tuple(gathers)))
        expected = before[:to] + source[at : at + length] + before[to + length :]
        assert (tmp_path / "target").read_bytes() == expected


# -- interruptions ---------------------------------------------------------------------------------------------------------------


def _answers(answer: dict[str, Any]) -> str:
    return f"import sys; sys.stdin.buffer.read(8); print('{json.dumps(answer)}', flush=True)"


@pytest.mark.parametrize(
    ("worker", "error", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", Unavailable, "signal 9 .* no memory left"),
        ("import sys; sys.stdin.buffer.read(8); sys.exit(3)", Unavailable, "exit code 3"),
        (_answers({"error": "No space left", "errno": 28, "path": None}), ResourceExhausted, "disk is full"),
        (_answers({"error": worker.TOO_SHORT, "path": "x"}), DataLoss, "ends before it should"),
    ],
)
def test_a_worker_that_fails_is_reported_and_the_next_run_goes_on(
    tmp_path: Path,
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    worker: str,
    error: type[WeighbridgeError],
    message: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_WORKER", worker)
        with pytest.raises(error, match=message):
            convert_folder(llama, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    convert_folder(llama, tmp_path / "new")
    assert not (tmp_path / "new.converting").exists()


def test_an_interrupted_conversion_goes_on_only_if_nothing_has_changed(tmp_path: Path, llama: Path) -> None:
    begin = functools.partial(convert_folder, unit_bytes=SMALL_UNITS)
    source, target = tmp_path / "hf", tmp_path / "new"
    shutil.copytree(llama, source)
    seen: list[tuple[int, int]] = []

    def interrupt_at(fraction: float) -> Callable[[int, int], None]:
        def on_progress(done: int, total: int) -> None:
            if done >= total * fraction and threading.current_thread() is not threading.main_thread():
                raise KeyboardInterrupt

        return on_progress

    with pytest.raises(KeyboardInterrupt):
        begin(source, target, on_progress=interrupt_at(0.5), workers=1)
    with pytest.raises(FailedPrecondition, match="different options") as caught:
        begin(source, target, ConvertOptions(keys="per-layer"))
    assert "--restart" in caught.value.fix
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(FailedPrecondition, match="changed"):
        begin(source, target)
    assert not target.exists()
    with pytest.raises(KeyboardInterrupt):
        begin(source, target, on_progress=interrupt_at(0.5), workers=1, restart=True)
    with (tmp_path / "new.converting/journal").open("a") as journal:
        journal.write("1")  # a line that was cut short

    report = begin(source, target, on_resume=lambda done, total: seen.append((done, total)))

    assert seen
    assert 0 < seen[0][0] == report.resumed_bytes < seen[0][1]
    convert_folder(target, tmp_path / "back")
    same(loaded(tmp_path / "back"), loaded(source))
    # Another process holds the lock.
    held = WorkingFolder(tmp_path / "held")
    with pytest.raises(AlreadyExists, match="another process"):
        convert_folder(source, tmp_path / "held", lock_seconds=0.1)
    held.close()


@dataclass(frozen=True)
class HalfDone:
    """A whole checkpoint of the llama, and the files that a run stopped half-way has left of one."""

    whole: Path
    left: Path

    def leave(self, target: Path) -> Path:
        """Copy the half-done files to a target, as if the run had been for that target."""
        shutil.copytree(self.left, target.with_name(f"{target.name}.converting"))
        return target


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> HalfDone:
    def stop(done: int, total: int) -> None:
        if done >= total / 2 and threading.current_thread() is not threading.main_thread():
            raise KeyboardInterrupt

    folder = tmp_path_factory.mktemp("half-done")
    convert_folder(llama, folder / "whole", unit_bytes=SMALL_UNITS)
    with pytest.raises(KeyboardInterrupt):
        convert_folder(llama, folder / "half", unit_bytes=SMALL_UNITS, on_progress=stop, workers=1)
    left = folder / "half.converting"
    assert len((left / "journal").read_text().splitlines()) > 2
    return HalfDone(folder / "whole", left)


DEATHS: dict[str, tuple[Any, str, str]] = {
    # what the next run finds: where the restarting one died, and on which side of it
    "everything": (Path, "unlink", "before"),
    "no journal": (working_folder, "_sync_folder", "before"),
    "no files": (shutil, "rmtree", "behind"),
    "room": (WorkingFolder, "_check_room", "behind"),
    "new files": (WorkingFolder, "_write", "behind"),
    "a new journal of another name": (Path, "replace", "before"),
    "a new journal": (WorkingFolder, "_write_journal", "behind"),
}


@pytest.mark.parametrize(
    ("death", "options"),
    [
        *((death, ConvertOptions()) for death in DEATHS),
        ("new files", ConvertOptions(spec="local")),
        ("a new journal", ConvertOptions(spec="local")),
    ],
)
def test_a_restart_that_dies_at_once_leaves_nothing_that_passes_for_done(
    tmp_path: Path,
    llama: Path,
    half_done: HalfDone,
    monkeypatch: pytest.MonkeyPatch,
    death: str,
    options: ConvertOptions,
) -> None:
    begin = functools.partial(convert_folder, unit_bytes=SMALL_UNITS)
    target = half_done.leave(tmp_path / "new")
    owner, name, side = DEATHS[death]
    really = getattr(owner, name)

    def die(*args: Any, **settings: Any) -> None:
        if side == "behind":
            really(*args, **settings)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(KeyboardInterrupt):
            begin(llama, target, options, restart=True)
    assert not target.exists()

    refusal = None
    try:
        begin(llama, target)
    except FailedPrecondition as error:
        refusal = error
    if refusal is not None:  # what was begun anew is another conversion
        assert options != ConvertOptions()
        assert "--restart" in refusal.fix
        assert not target.exists()
        begin(llama, target, restart=True)
    _identical(target, half_done.whole)


def _damage(folder: Path, what: str) -> None:
    if what == "journal":
        with (folder / "journal").open("a") as journal:
            journal.write("9" * 5000 + "\nno number\n\xb2\n")
    elif what == "further file":
        (folder / "files/hf").mkdir()
        (folder / "files/hf/evil.json").write_text("{}")
    elif what == "missing file":
        next((folder / "files").glob("*.distcp")).unlink()
    else:
        with next((folder / "files").glob("*.distcp")).open("ab") as file:
            file.write(b"more")


@pytest.mark.parametrize("what", ["journal", "further file", "missing file", "longer file"])
def test_a_working_folder_that_somebody_has_been_at_leads_to_the_same_bytes(
    tmp_path: Path, llama: Path, half_done: HalfDone, what: str
) -> None:
    target = half_done.leave(tmp_path / "new")
    _damage(tmp_path / "new.converting", what)
    convert_folder(llama, target, unit_bytes=SMALL_UNITS)
    _identical(target, half_done.whole)


@pytest.mark.parametrize("what", ["new.converting", "new.converting/files"])
def test_what_a_symbolic_link_in_the_place_of_a_working_folder_points_to_is_left_alone(
    tmp_path: Path, llama: Path, what: str
) -> None:
    mine = tmp_path / "mine"
    (mine / "files").mkdir(parents=True)
    (mine / "__0_0.distcp").write_text("mine")
    (tmp_path / what).parent.mkdir(exist_ok=True)
    (tmp_path / what).symlink_to(mine)
    with pytest.raises(FailedPrecondition, match="symbolic link"):
        convert_folder(llama, tmp_path / "new", restart=True)
    assert sorted(path.name for path in mine.iterdir()) == ["__0_0.distcp", "files"]


def test_a_target_that_was_finished_and_then_damaged_is_not_taken_for_done(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(WorkingFolder, "remove", lambda self: None)
        convert_folder(llama, target)
    (target / "__0_0.distcp").write_text("broken")
    with pytest.raises(AlreadyExists):
        convert_folder(llama, target)


def test_what_is_no_file_of_weights_is_refused_and_not_waited_for(tmp_path: Path, llama: Path) -> None:
    for number, make in enumerate((os.mkfifo, os.mkdir)):
        source = tmp_path / str(number)
        shutil.copytree(llama, source)
        (source / "model.safetensors").unlink()
        make(source / "model.safetensors")
        with pytest.raises(DataLoss, match=r"model\.safetensors is not a regular file"):
            convert_folder(source, tmp_path / "new")


def test_a_conversion_by_other_rules_does_not_go_on_with_what_was_begun(
    tmp_path: Path, llama: Path, half_done: HalfDone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer release may put the same tensors together in another way."""
    begin = functools.partial(convert_folder, unit_bytes=SMALL_UNITS)
    target = half_done.leave(tmp_path / "new")
    really = Llama.rules

    def up_before_gate(family: Llama) -> list[Any]:
        return [
            replace(rule, hugging_face=rule.hugging_face[::-1])
            if rule.megatron.endswith(".mlp.linear_fc1.weight")
            else rule
            for rule in really(family)
        ]

    with monkeypatch.context() as patch:
        patch.setattr(Llama, "rules", up_before_gate)
        bridges._cached_bridge.cache_clear()
        try:
            with pytest.raises(FailedPrecondition, match="left over from a conversion of a different source") as caught:
                begin(llama, target)
        finally:
            bridges._cached_bridge.cache_clear()
    assert "--restart" in caught.value.fix
    # or that would prove nothing
    assert begin(llama, target).resumed_bytes
    _identical(target, half_done.whole)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_target_that_appears_meanwhile_is_not_overwritten(tmp_path: Path, llama: Path, what: str) -> None:
    target = tmp_path / "new"
    mine = target / "mine" if what == "folder" else target

    def on_progress(done: int, total: int) -> None:
        if not target.exists():
            mine.parent.mkdir(exist_ok=True)
            mine.write_text("mine")

    for _ in range(2):  # while it is converted, and when that is gone on with
        with pytest.raises(AlreadyExists, match="exists"):
            convert_folder(llama, target, on_progress=on_progress)
        assert mine.read_text() == "mine"
        assert [path.name for path in mine.parent.iterdir() if not path.name.endswith(".converting")] == (
            ["mine"] if what == "folder" else ["new"]
        )
    shutil.rmtree(target) if what == "folder" else target.unlink()
    convert_folder(llama, target)
    convert_folder(target, tmp_path / "back")
    same(loaded(tmp_path / "back"), loaded(llama))


def test_the_current_folder_may_be_the_target(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert_folder(llama, Path("."))
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    monkeypatch.chdir(tmp_path)  # the conversion has replaced the directory that was the current one
    with pytest.raises(AlreadyExists):
        convert_folder(llama, Path("here"))
    with pytest.raises(InvalidArgument, match="cannot be created as a new folder"):
        convert_folder(llama, Path("/"))
    convert_folder(Path("here"), Path("back"))
    same(loaded(tmp_path / "back"), loaded(llama))


def test_of_two_conversions_to_one_target_one_is_refused(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, second_waits, found = tmp_path / "new", threading.Event(), list[WeighbridgeError]()
    really = fcntl.flock

    def flock(lock: int, operation: int) -> None:
        try:
            really(lock, operation)
        except BlockingIOError:
            second_waits.set()
            raise

    def second() -> None:
        try:
            convert_folder(llama, target)
        except WeighbridgeError as error:
            found.append(error)

    monkeypatch.setattr(fcntl, "flock", flock)
    other = threading.Thread(target=second)

    def on_progress(done: int, total: int) -> None:
        # planned, and holding the lock
        if not second_waits.is_set():
            other.start()
            assert second_waits.wait(30)

    convert_folder(llama, target, on_progress=on_progress, workers=1)
    other.join(30)
    assert [type(error) for error in found] == [AlreadyExists]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    convert_folder(target, tmp_path / "back")
    same(loaded(tmp_path / "back"), loaded(llama))


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path, llama: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(llama, source)

    def on_progress(done: int, total: int) -> None:
        os.utime(source / "model.safetensors", ns=(1, 1))

    with pytest.raises(DataLoss, match="has changed while"):
        convert_folder(source, tmp_path / "new", on_progress=on_progress)
    assert not (tmp_path / "new").exists()


def _convert(begun: Connection, source: Path, target: Path) -> None:
    """Convert in a process group of its own, and signal the begin: the bridge exists by then."""
    os.setsid()
    of_checkpoint = source / "hf/config.json"
    bridge_for((of_checkpoint if of_checkpoint.exists() else source / "config.json").read_bytes())
    begun.send(None)
    convert_folder(source, target, unit_bytes=2 << 20)


def converted(source: Path, target: Path, kill_after: float | None = None) -> tuple[int, float]:
    """Convert in a process; its exit code and duration in seconds.

    It and its workers are killed after ``kill_after`` seconds.
    """
    context = forking()
    begins, begun = context.Pipe(duplex=False)
    # not a daemon, which could start no workers
    process = context.Process(target=_convert, args=(begun, source, target), daemon=False)
    process.start()
    begun.close()  # ours, or the death of a process that never begins would not be seen
    with begins:
        begins.recv()
    started = time.monotonic()
    process.join(kill_after)
    if process.exitcode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(cast(int, process.pid), signal.SIGKILL)
        process.join()
    return cast(int, process.exitcode), time.monotonic() - started


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some 70 MB."""
    overrides = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 5, "vocab_size": 2000}
    return hf_folder(tmp_path_factory.mktemp("larger"), *weights_of("llama", tied=False, **overrides))


def _identical(one: Path, other: Path) -> None:
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(other)) for path in other.rglob("*") if path.is_file())
    matching, different, broken = filecmp.cmpfiles(one, other, names, shallow=False)
    assert (different, broken) == ([], [])
    assert len(matching) == len(names)


@pytest.mark.timeout(120 + 60 * KILLS)
def test_killed_at_random_moments_it_gives_the_same_bytes(tmp_path: Path, larger: Path) -> None:
    randomness = random.Random(first_seed())
    seconds = []
    for source, target in ((larger, tmp_path / "checkpoint"), (tmp_path / "checkpoint", tmp_path / "back")):
        status, lasted = converted(source, target)
        assert status == 0
        seconds.append(lasted)
    killed = 0
    for source, whole, limit in (
        (larger, tmp_path / "checkpoint", seconds[0]),
        (tmp_path / "checkpoint", tmp_path / "back", seconds[1]),
    ):
        again = tmp_path / "again"
        for _ in range(KILLS):
            status, lasted = converted(source, again, randomness.uniform(0, limit))
            assert status in (0, -signal.SIGKILL)
            if status == 0:  # the machine has less to do now
                limit = min(limit, lasted)
            killed += status == -signal.SIGKILL
            if again.exists():
                # It was done, or all but: what is there is whole.
                _identical(again, whole)
                if not (tmp_path / "again.converting").exists():
                    shutil.rmtree(again)
        if not again.exists() or (tmp_path / "again.converting").exists():
            assert converted(source, again)[0] == 0
        _identical(again, whole)
        assert not (tmp_path / "again.converting").exists()
        shutil.rmtree(again)
    same(loaded(tmp_path / "back"), loaded(larger))
    assert killed or KILLS < 10, "no conversion was killed in its middle"


def test_the_command_says_how_it_goes_on(tmp_path: Path, larger: Path) -> None:
    target = tmp_path / "checkpoint"
    code = (
        "import functools, sys; from weighbridge._cli import main; from weighbridge_service.converting import convert; "
        "convert.convert_folder = functools.partial(convert.convert_folder, unit_bytes=1 << 20); sys.exit(main())"
    )
    line = ["convert", str(larger), str(target), "--workers", "1"]
    log = tmp_path / "log"
    with log.open("w") as stderr, forked_python("-c", code, *line, stderr=stderr.fileno()) as process:
        journal = tmp_path / "checkpoint.converting/journal"
        deadline = time.monotonic() + 60
        while not journal.exists() or journal.read_text().count("\n") < 4:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    error = log.read_text()
    assert "run the same command again to resume" in error
    assert not target.exists()
    # Units of another size are other units.
    refused = CliRunner().invoke(commands, line)
    assert refused.exit_code == 1
    assert "--restart" in refused.stderr
    done = CliRunner().invoke(commands, [*line, "--restart", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["to"] == "torch_dist"
    assert report["bytes"] == sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    assert set(report) == {
        *("source", "target", "to", "tensors", "bytes", "files", "seconds", "resumed_bytes", "workers"),
        "left_out",
    }
    back = CliRunner().invoke(commands, ["convert", str(target), str(tmp_path / "back")])
    assert "left out, as they are not weights of the model" in back.stdout
