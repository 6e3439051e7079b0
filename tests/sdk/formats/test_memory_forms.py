"""Are stacked, merged and renamed tensors the files' tensors, element by element, whatever box of them a rank holds?"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats.gathered_shards import GatheredShards, share_layout
from weighbridge._formats.memory_forms import TensorForms
from weighbridge._formats.torch_state import tensor_specs, torch_shards
from weighbridge.errors import LayoutError

EXPERTS, WIDTH, HIDDEN = 3, 4, 5
MLP = "model.layers.0.mlp"


def tensors(stem: str, gate: str, up: str, down: str) -> dict[str, Tensor]:
    """The experts of a layer as files have them; no two elements are equal."""
    shapes = {gate: (WIDTH, HIDDEN), up: (WIDTH, HIDDEN), down: (HIDDEN, WIDTH)}
    names = [(f"{stem}.{n}.{each}.weight", shape) for n in range(EXPERTS) for each, shape in shapes.items() if each]
    numbers = itertools.count()
    return {
        name: torch.tensor([[next(numbers) for _ in range(shape[1])] for _ in range(shape[0])]).float()
        for name, shape in names
    }


def specs(files: dict[str, Tensor]) -> TensorForms:
    return TensorForms({n: TensorSpec(n, dtypes.from_torch(t.dtype), tuple(t.shape)) for n, t in files.items()})


def stacked(files: dict[str, Tensor], *projections: str) -> Tensor:
    """As transformers makes it: a list of each projection is stacked, and the stacks are concatenated along the
    rows.
    """
    lists = [[t for name, t in files.items() if name.endswith(f".{each}.weight")] for each in projections]
    return torch.cat([torch.stack(each) for each in lists], dim=1)


def check(files: dict[str, Tensor], held: dict[str, Tensor]) -> None:
    found = torch_shards(held, specs(files), whole=True)
    there = {p.shard.tensor: t for p, t in zip(found.layout.placements, found.tensors, strict=True)}
    assert there.keys() == files.keys()
    assert all(torch.equal(there[name], tensor) for name, tensor in files.items())
    pointers = {tensor.untyped_storage().data_ptr() for tensor in held.values()}
    assert {
        tensor.untyped_storage().data_ptr() for tensor in there.values()
    } == pointers  # views: what fills them fills the stack


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("files", "held"),
    [
        ((f"{MLP}.experts", "gate_proj", "up_proj", "down_proj"), f"{MLP}.experts"),
        (("model.layers.0.block_sparse_moe.experts", "w1", "w3", "w2"), f"{MLP}.experts"),
        (
            ("model.layers.0.feed_forward.experts", "w1", "w3", "w2"),
            "_orig_mod.model.layers.0.feed_forward.experts",
        ),
        (("backbone.layers.0.mixer.experts", "", "up_proj", "down_proj"), "model.layers.0.mixer.experts"),
    ],
)
def test_stacked_experts_are_views_of_each_file(files: tuple[str, str, str, str], held: str, swapped: bool) -> None:
    stem, gate, up, down = files
    of_files = tensors(stem, gate, up, down)
    first, second = stacked(of_files, *filter(None, (gate, up))), stacked(of_files, down)
    if swapped:
        first, second = first.mT.contiguous(), second.mT.contiguous()
    name = "gate_up_proj" if gate else "up_proj"
    check(of_files, {f"{held}.{name}": first, f"{held}.down_proj": second})


def test_a_stack_in_files_may_be_swapped_in_memory() -> None:
    files = {f"{MLP}.experts.gate_up_proj": torch.arange(24.0).view(2, 3, 4)}
    check(files, dict(files))
    check(files, {name: tensor.mT.contiguous() for name, tensor in files.items()})
    kernel = {"conv.weight": torch.arange(24.0).view(2, 3, 4)}
    with pytest.raises(LayoutError, match=r"conv\.weight is"):
        check(kernel, {"conv.weight": kernel["conv.weight"].mT})


def test_merged_and_renamed_tensors_are_the_files() -> None:
    gate, up = torch.arange(8.0).view(2, 4), torch.arange(8.0, 16.0).view(2, 4)
    router = torch.arange(4.0)
    files = {
        f"{MLP}.gate_proj.weight": gate, f"{MLP}.up_proj.weight": up, "model.layers.1.block_sparse_moe.gate.weight": router,
    }  # fmt: skip
    for name in ("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.router.weight"):
        check(files, {f"{MLP}.gate_up_proj.weight": torch.cat([gate, up]), name: router})


def test_a_tensor_that_is_given_twice_or_does_not_fit_is_refused() -> None:
    files = tensors(f"{MLP}.experts", "gate_proj", "up_proj", "down_proj")
    stack = stacked(files, "gate_proj", "up_proj")
    with pytest.raises(LayoutError, match="is given twice"):
        torch_shards({**files, f"{MLP}.experts.gate_up_proj": stack}, specs(files))
    with pytest.raises(LayoutError, match=r"gate_up_proj is \[2, 8, 5\], and the model has .* F32\[3, 8, 5\]"):
        torch_shards({f"{MLP}.experts.gate_up_proj": stack[:2]}, specs(files))
    with pytest.raises(LayoutError, match="casts are not allowed"):
        torch_shards({f"{MLP}.experts.gate_up_proj": stack.half()}, specs(files), cast="never")


def test_experts_with_gaps_or_of_different_shapes_have_no_stack() -> None:
    files = tensors(f"{MLP}.experts", "gate_proj", "up_proj", "down_proj")
    gaps = {name: tensor for name, tensor in files.items() if ".1." not in name}
    assert specs(gaps).other_forms == {}
    files[f"{MLP}.experts.1.up_proj.weight"] = torch.ones(WIDTH + 1, HIDDEN)
    assert specs(files).other_forms.keys() == {f"{MLP}.experts.down_proj"}


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_box_is_cut_into_boxes_of_files(data: st.DataObject) -> None:
    files = tensors(f"{MLP}.experts", "gate_proj", "up_proj", "down_proj")
    form = specs(files).form(f"{MLP}.experts.gate_up_proj")
    assert form is not None
    swapped = data.draw(st.booleans())
    whole = stacked(files, "gate_proj", "up_proj")
    whole = whole.mT if swapped else whole
    spans = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in whole.shape]
    box = Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))
    held = whole[tuple(slice(*span) for span in spans)]
    parts = form.parts(box, swapped=swapped)
    assert sum(part.box.volume for part in parts) == box.volume
    for part in parts:
        where = tuple(slice(o, o + e) for o, e in zip(*part.box, strict=True))
        assert torch.equal(part.view(held), files[part.tensor][where])


TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8,
}  # fmt: skip
CLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 16,
}  # fmt: skip
QWEN = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "embed_dim": 16,
}


def vision_model(kind: str) -> Any:
    import transformers

    match kind:
        case "llava":
            config: Any = transformers.LlavaConfig(
                vision_config=transformers.CLIPVisionConfig(**CLIP),
                text_config=transformers.LlamaConfig(**TEXT),
            )
            return transformers.LlavaForConditionalGeneration(config)
        case "llava_next":
            config = transformers.LlavaNextConfig(
                vision_config=transformers.CLIPVisionConfig(**CLIP),
                text_config=transformers.LlamaConfig(**TEXT),
            )
            return transformers.LlavaNextForConditionalGeneration(config)
        case "gemma3":
            config = transformers.Gemma3Config(text_config=TEXT, vision_config=CLIP)
            return transformers.Gemma3ForConditionalGeneration(config)
        case "qwen2_5_vl":
            rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
            config = transformers.Qwen2_5_VLConfig(text_config={**TEXT, **rope}, vision_config=QWEN)
            return transformers.Qwen2_5_VLForConditionalGeneration(config)
    raise ValueError(kind)


@pytest.mark.parametrize("kind", ["llava", "llava_next", "gemma3", "qwen2_5_vl"])
def test_a_vision_model_is_the_files_that_transformers_saves_of_it(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = vision_model(kind)
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    assert not files.keys() <= model.state_dict().keys(), "names differ in memory"
    shards = torch_shards(model, specs(files), whole=True)
    each = zip(shards.layout.placements, shards.tensors, strict=True)
    pushed = {placement.shard.tensor: tensor for placement, tensor in each}
    assert pushed.keys() == files.keys()
    assert [name for name, tensor in files.items() if not torch.equal(pushed[name], tensor)] == []


def test_names_of_every_vision_model_of_transformers_are_known_as_it_maps_them() -> None:
    """Its table says what begins a name in memory for what begins one in files."""
    import transformers

    tables = {
        name: table
        for name in transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
        for one in (name if isinstance(name, tuple) else (name,))
        if (table := getattr(getattr(transformers, one, None), "_checkpoint_conversion_mapping", None))
    }
    if not tables:
        pytest.skip("transformers 5 has no such tables")
    assert len(tables) > 8
    wrong = []
    for name, table in tables.items():
        plain = {there.removeprefix("^"): here for there, here in table.items() if "(" not in there}
        names = {f"{there}.x.weight": f"{here}.x.weight" for there, here in plain.items()}
        if len(plain) < len(table):  # everything else of the language model
            names["model.layers.0.x.weight"] = "model.language_model.layers.0.x.weight"
        forms = specs({file: torch.ones(2) for file in names})
        for file, memory in names.items():
            form = forms.form(memory)
            if form is None or form.tensors != [file]:
                wrong.append((name, file, memory))
    assert wrong == []


@pytest.mark.parametrize("kept", ["sparse_coo"])
def test_sparse_tensors_are_refused_by_name_at_every_door(kept: str) -> None:
    files = {"model.norm.weight": torch.ones(3, 3), "model.head.weight": torch.ones(3, 3)}
    state = dict(files)
    state["model.head.weight"] = files["model.head.weight"].to_sparse(layout=getattr(torch, kept))
    state["more.weight"] = state["model.head.weight"]
    told = rf"model.head.weight is of torch.{kept}, but versions contain dense tensors: pass tensor.to_dense\(\)"
    with pytest.raises(LayoutError, match=told):
        torch_shards(state, specs(files), whole=True)
    with pytest.raises(LayoutError, match=told):
        tensor_specs(state)
    stream = share_layout(specs(files), 0, 1)
    passing = GatheredShards(iter(state.items()), specs(files), stream, rank=0, ranks=1, cast="allow")
    with pytest.raises(LayoutError, match=told):
        list(passing.parts())
