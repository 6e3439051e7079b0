"""Is a folder of weights taken for a model only if it is whole by what it says of itself: its index, its files' names,
their headers?

Folders are written by huggingface_hub, safetensors and torch, as trainers write them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from weighbridge._formats.folder_weights import FolderWeights
from weighbridge._formats.naming.weight_files import weight_files
from weighbridge._formats.safetensors_files import read_folder
from weighbridge._formats.side_files.reading import SideFiles
from weighbridge.errors import DataLoss, InvalidArgument, LayoutError, NotFound, WeighbridgeError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
INDEX = "model.safetensors.index.json"
WEIGHTS = {f"layers.{i}.w": torch.full((4, 8), float(i)) for i in range(3)}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Three files and their index."""
    save_torch_state_dict(WEIGHTS, tmp_path, max_shard_size=130)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    return tmp_path


def names(folder: Path, config: bytes = b"{}") -> set[str]:
    return set(FolderWeights.read(folder, config).layout.tensors)


def test_a_tensor_that_the_index_lists_and_no_file_has_is_named(sharded: Path) -> None:
    assert names(sharded) == WEIGHTS.keys()
    file = sharded / json.loads((sharded / INDEX).read_text())["weight_map"]["layers.1.w"]
    save_file({"another": torch.ones(2)}, file)
    with pytest.raises(DataLoss, match="lists 1 tensor ") as refused:
        names(sharded)
    assert refused.value.details == (f"layers.1.w in {file.name}",)
    assert "download or save" in refused.value.fix


def test_tensors_that_the_index_does_not_list_are_kept_as_loaders_keep_them(sharded: Path) -> None:
    file = sharded / "model-00001-of-00003.safetensors"
    save_file({**load_file(file), "mtp.w": torch.ones(2)}, file)
    assert names(sharded) == {*WEIGHTS, "mtp.w"}


def test_a_save_in_one_file_beside_the_index_of_an_earlier_one_is_refused_as_loaders_differ(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
    )
    earlier, later = (transformers.LlamaForCausalLM(config) for _ in range(2))
    later.save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    earlier.save_pretrained(tmp_path, max_shard_size=700)
    (tmp_path / "model.safetensors").write_bytes(whole)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    indexed = json.loads((tmp_path / INDEX).read_text())["weight_map"]["lm_head.weight"]
    assert torch.equal(loaded.lm_head.weight, later.lm_head.weight)
    assert not torch.equal(load_file(tmp_path / indexed)["lm_head.weight"], later.lm_head.weight)
    with pytest.raises(InvalidArgument, match=r"model\.safetensors and an index of other files") as refused:
        names(tmp_path)
    assert refused.value.details[:2] == ("model.safetensors", min(p.name for p in tmp_path.glob("model-*")))
    assert "an earlier save left: model.safetensors, or the index" in refused.value.fix
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model.safetensors"}}))
    found = FolderWeights.read(tmp_path, b"{}")
    assert len(found.layout.tensors) == 12


def test_a_file_of_a_series_that_is_missing_is_told_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert names(sharded) == WEIGHTS.keys()
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(NotFound, match=r"of the 3 files model-.* 1 is missing; .* 1, 3"):
        names(sharded)


def test_a_count_in_a_name_takes_no_memory_for_what_is_not_there() -> None:
    name = f"model-00001-of-{10**18}.safetensors"
    with pytest.raises(NotFound, match=f"{10**18 - 1} are missing"):
        weight_files([name], None)


def test_an_index_that_is_a_link_to_nothing_or_out_of_the_folder_is_not_passed_over(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    elsewhere = index.rename(sharded.with_name("elsewhere.json"))
    index.symlink_to(elsewhere)
    with pytest.raises(InvalidArgument, match="outside its folder"):
        read_folder(sharded)
    elsewhere.unlink()
    with pytest.raises(NotFound, match=r"index\.json is a dangling link"):
        read_folder(sharded)


def test_a_series_is_whole_by_either_count_and_any_width() -> None:
    for names in (
        ["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"],
        ["model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"],
        ["a.safetensors", "b.safetensors"],
    ):
        assert weight_files(names, None).taken == tuple(names)


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (["model.safetensors", "model-00001-of-00001.safetensors"], "several sets and no index"),
        (["model.safetensors", "other.safetensors"], "several sets and no index"),
        (["model.safetensors", "adapter_model.safetensors"], "is an adapter"),
        (["adapter_model.safetensors"], "is an adapter"),
        (["shard-00001-model-00001-of-00001.safetensors"], "a rank's file of torch's"),
        (["model-rank-0-part-0.safetensors"], "a rank's file of vLLM's"),
        (["model0-mp8.safetensors"], "a rank's file of DeepSeek's"),
    ],
)
def test_files_that_are_no_one_model_are_refused_with_what_helps(there: list[str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as refused:
        weight_files(there, None)
    assert refused.value.fix


def test_the_same_weights_in_mistrals_own_form_are_left_out_and_named(tmp_path: Path, sharded: Path) -> None:
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, sharded / "consolidated.safetensors")
    for _ in ("with an index", "without one"):
        found = FolderWeights.read(sharded, b"{}")
        assert found.layout.tensors.keys() == WEIGHTS.keys()
        assert any("consolidated.safetensors" in remark for remark in found.remarks)
        (sharded / INDEX).unlink(missing_ok=True)
    alone = tmp_path / "alone"
    alone.mkdir()
    (sharded / "consolidated.safetensors").rename(alone / "consolidated.safetensors")
    assert names(alone) == {"layers.0.attention.wq.weight"}


def test_files_of_torchs_writer_are_taken_whole_and_refused_in_parts(tmp_path: Path) -> None:
    for ranks, folder in ((False, tmp_path / "whole"), (True, tmp_path / "ranks")):
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=ranks)
        dcp.save(dict(WEIGHTS), storage_writer=writer, no_dist=True)
    assert names(tmp_path / "whole") == WEIGHTS.keys()
    with pytest.raises(InvalidArgument, match="holds parts of tensors") as refused:
        names(tmp_path / "ranks")
    assert "consolidate_safetensors_files" in refused.value.fix
    # under another name, the header tells
    info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2, 0]}, "b": {"saved_offsets": [0]}})}
    (tmp_path / "renamed").mkdir()
    save_file({"w": torch.ones(2, 6), "b": torch.ones(2)}, tmp_path / "renamed/model.safetensors", info)
    with pytest.raises(InvalidArgument, match="parts of 1 tensor") as refused:
        names(tmp_path / "renamed")
    assert refused.value.details == ("w",)


@pytest.mark.parametrize("noted", ["[]", "{", '{"w": 5}', '{"w": {"saved_offsets": ["x"]}}', '"x"'])
def test_a_note_of_parts_that_cannot_be_read_is_damage(tmp_path: Path, noted: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", {"DCP_SHARDING_INFO": noted})
    with pytest.raises(DataLoss, match=r"DCP_SHARDING_INFO in the header of model\.safetensors"):
        names(tmp_path)


@pytest.mark.parametrize("framework", ["tf", "flax"])
def test_weights_of_another_framework_are_refused(tmp_path: Path, framework: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", {"format": framework})
    with pytest.raises(InvalidArgument, match=f"weights of {framework}") as refused:
        names(tmp_path)
    assert f"from_{framework}=True" in refused.value.fix


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)


class _Compiled(torch.nn.Module):
    """A module as torch.compile wraps it, as far as names go: the compiler takes seconds to import."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_names_are_those_of_the_module_whatever_wraps_it(tmp_path: Path) -> None:
    plain = _Net().state_dict()
    partly = _Net()
    partly.one = _Compiled(partly.one)  # type: ignore[assignment]
    states: dict[str, dict[str, Tensor]] = {
        "compiled": _Compiled(_Net()).state_dict(),
        "compiled inside": partly.state_dict(),
        "of DDP": torch.nn.DataParallel(_Net()).state_dict(),
    }
    for what, state in states.items():
        assert state.keys() != plain.keys()
        (folder := tmp_path / what).mkdir()
        save_file(state, folder / "model.safetensors")
        found = FolderWeights.read(folder, b"{}")
        assert found.layout.tensors.keys() == plain.keys()
        assert any("torch.compile" in remark for remark in found.remarks)
        files = read_folder(folder)
        places = {place.shard.tensor: place for place in files.layout.placements}
        for name, tensor in zip(plain, state.values(), strict=True):
            place = places[name]
            held = files.buffers[place.buffer][place.offset : place.offset + place.nbytes]
            assert held.tobytes() == tensor.numpy().tobytes()


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2), "_orig_mod.w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(LayoutError, match="1 tensor is given more than once"):
        read_folder(tmp_path)


def test_adapters_among_weights_are_refused_unless_the_config_has_its_own(tmp_path: Path) -> None:
    lora = {"q.base_layer.weight": torch.ones(2), "q.lora_A.speech.weight": torch.ones(2)}
    save_file(lora, tmp_path / "model.safetensors")
    with pytest.raises(WeighbridgeError, match="2 tensors belong to LoRA adapters") as refused:
        names(tmp_path)
    assert "merge_and_unload" in refused.value.fix
    # as Phi-4-multimodal's config has it
    assert names(tmp_path, b'{"model_type": "phi4mm", "speech_lora": {"r": 320}}') == lora.keys()


def test_a_folder_of_another_kind_says_what_it_is_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(NotFound, match="no safetensors files") as refused:
        read_folder(tmp_path)
    assert "pytorch_model.bin cannot be read" in refused.value.fix
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(NotFound, match="is a PEFT adapter") as refused:
        SideFiles.read(tmp_path)
    assert "merge_and_unload" in refused.value.fix
