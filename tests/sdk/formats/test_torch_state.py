"""Are a torch state dict's names, ties, dtypes and boxes read as torch means them, and is whatever is wrong named at
once?
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats.dtensors import boxes_of, cuts_of, runs_after
from weighbridge._formats.torch_state import (
    TorchShards,
    check_not_copied,
    model_name,
    rank_and_world,
    torch_shards,
)
from weighbridge.errors import InvalidArgument, LayoutError

BF16, FP32, I64 = (dtypes.parse(name) for name in ("bf16", "fp32", "i64"))
EMBED, NORM, GATE, STEPS = "model.embed.weight", "model.norm.weight", "model.layers.0.gate.weight", "steps"
MODEL = {
    spec.name: spec
    for spec in (
        TensorSpec(EMBED, BF16, (6, 4)),
        TensorSpec(GATE, BF16, (4, 4)),
        TensorSpec(NORM, FP32, (4,)),
        TensorSpec(STEPS, I64, (2,)),
    )
}


def state(**changed: Any) -> dict[str, Any]:
    """A state dict that is just the model's, but for some tensors by the names of their specs above."""
    made = {spec.name: torch.ones(spec.shape, dtype=spec.dtype.torch) for spec in MODEL.values()}
    return made | changed


def read(entries: Any, **options: Any) -> TorchShards:
    return torch_shards(entries, MODEL, **options)


# -- names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given_name",
    [
        GATE,
        f"module.{GATE}",
        f"_orig_mod.{GATE}",
        f"_orig_mod.module.{GATE}",
        f"module.module._orig_mod.{GATE}",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.gate._orig_mod.weight",
    ],
)
def test_what_wrappers_add_to_names_is_stripped(given_name: str) -> None:
    assert model_name(given_name, MODEL) == GATE


def test_a_name_that_the_model_has_stays_as_it_is() -> None:
    model = {"module.a", "a", "_orig_mod.b"}
    assert [model_name(name, model) for name in ("module.a", "a", "_orig_mod.b")] == [
        "module.a",
        "a",
        "_orig_mod.b",
    ]
    assert model_name("module.module.a", model) == "module.a"


@pytest.mark.parametrize("given_name", ["", "module", "gate.weight", f"model.module.{GATE}", f"other.{GATE}"])
def test_names_that_lead_nowhere_are_unknown(given_name: str) -> None:
    assert model_name(given_name, MODEL) is None


def test_modules_dicts_and_generators_say_the_same() -> None:
    module = torch.nn.Module()
    module.model = torch.nn.Module()
    module.model.norm = torch.nn.LayerNorm(4, bias=False)
    module.register_buffer("steps", torch.arange(2))
    module.register_buffer("scratch", torch.zeros(3), persistent=False)
    layouts = [
        read(each).layout
        for each in (
            module,
            module.state_dict(),
            module.state_dict().items(),
            iter(module.state_dict().items()),
        )
    ]
    assert {layout.digest for layout in layouts} == {layouts[0].digest}
    assert list(layouts[0].tensors) == ["steps", NORM]


@pytest.mark.parametrize("entries", [torch.ones(2, 2), 7, None, [torch.ones(2)], "model"])
def test_what_is_no_state_dict_is_refused(entries: Any) -> None:
    with pytest.raises(InvalidArgument, match="is not a state dict"):
        read(entries)


def test_alone_a_process_is_rank_0_of_1_and_what_is_given_goes_first() -> None:
    assert rank_and_world(None, None) == (0, 1)
    assert rank_and_world(3, 4) == (3, 4)


# -- ties, and what is no weight ------------------------------------------------------------------------------------------


def test_a_second_name_of_the_same_memory_is_left_out() -> None:
    entries = state()
    tied = {"lm_head.weight": entries[EMBED], **entries}
    assert list(read(tied, whole=True).layout.tensors) == list(MODEL)


@pytest.mark.parametrize("other", ["copy", "part"])
def test_a_second_name_of_other_memory_or_of_a_part_is_refused(other: str) -> None:
    entries = state()
    entries["lm_head.weight"] = entries[EMBED].clone() if other == "copy" else entries[EMBED][:3]
    with pytest.raises(LayoutError, match=r"lm_head\.weight: the model has no such tensor"):
        read(entries)


def test_rotary_frequencies_are_no_weights() -> None:
    assert len(read(state(**{"model.rotary_emb.inv_freq": torch.ones(3)}), whole=True).tensors) == len(MODEL)


@pytest.mark.parametrize("part", ["lora_A.default", "lora_B.default", "base_layer"])
def test_adapters_are_to_be_merged_first(part: str) -> None:
    name = f"base_model.model.model.layers.0.gate.{part}.weight"
    with pytest.raises(LayoutError, match="merge") as error:
        read(state(**{name: torch.ones(4, 4)}))
    assert name in str(error.value)


def test_names_that_all_have_one_thing_before_them_are_one_mistake() -> None:
    with pytest.raises(LayoutError, match=r"begin with 'actor\.'") as error:
        read({f"actor.{name}": value for name, value in state().items()}, whole=True)
    assert len(error.value.details) == 1
    assert "removeprefix('actor.')" in error.value.fix
    inner = {name.removeprefix("model."): value for name, value in state().items() if name.startswith("model.")}
    with pytest.raises(LayoutError, match=r"lack the model's prefix 'model\.'") as error:
        read(inner)
    assert "'model.' + name" in error.value.fix


def test_tensors_that_are_wrong_in_the_same_way_are_one_line() -> None:
    model = {f"layers.{n}.norm.weight": TensorSpec(f"layers.{n}.norm.weight", BF16, (4,)) for n in range(24)}
    model[NORM] = MODEL[NORM]
    wide = {name: torch.ones(4, dtype=torch.float64) for name in model}
    with pytest.raises(LayoutError, match="25 entries") as error:
        torch_shards(wide, model, cast="never")
    assert error.value.details == (
        "layers.0.norm.weight and 23 more are torch.float64, casts are not allowed, and the model has BF16",
        f"{NORM} is torch.float64, casts are not allowed, and the model has {NORM} F32[4]",
    )
    assert "cast='allow'" in error.value.fix


# -- errors ---------------------------------------------------------------------------------------------------------------


def test_one_error_names_everything_that_is_wrong() -> None:
    entries = {
        EMBED: torch.ones(5, 4, dtype=torch.bfloat16),
        "model.layers.0.gates.weight": torch.ones(4, 4, dtype=torch.bfloat16),
        "model.layers.7.gate.weight": torch.ones(4, 4, dtype=torch.bfloat16),
        STEPS: torch.ones(2),
        "optimizer": {"state": {}},
    }
    with pytest.raises(LayoutError) as error:
        read(entries, whole=True)
    assert sorted(error.value.details) == sorted(
        (
            f"{EMBED} is [5, 4], and the model has {EMBED} BF16[6, 4]",
            f"model.layers.0.gates.weight: the model has no such tensor; did you mean {GATE}?",
            "model.layers.7.gate.weight: the model has no such tensor",
            "steps is torch.float32, which is not cast, and the model has steps I64[2]",
            "optimizer is a dict, not a tensor",
            f"{GATE} BF16[4, 4] is missing",
            f"{NORM} F32[4] is missing",
        )
    )
    assert error.value.message.endswith("in 7 entries")


def test_what_one_of_several_ranks_lacks_others_may_have() -> None:
    assert list(read({NORM: torch.ones(4)}).layout.tensors) == [NORM]
    assert read({}).layout.nbytes == 0


def test_a_name_that_is_given_twice_is_refused() -> None:
    with pytest.raises(LayoutError, match="given twice"):
        read([(NORM, torch.ones(4)), (f"module.{NORM}", torch.ones(4))])


def test_a_tensor_without_data_is_refused() -> None:
    with pytest.raises(LayoutError, match="meta device"):
        read({NORM: torch.ones(4, device="meta")})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_are_declared_in_the_models_dtype_or_refused_by_name(dtype: torch.dtype) -> None:
    shards = read({NORM: torch.ones(4, dtype=dtype), EMBED: torch.ones(6, 4, dtype=torch.float32)})
    assert shards.layout.tensors == {name: MODEL[name] for name in (NORM, EMBED)}
    assert [tensor.dtype for tensor in shards.tensors] == [dtype, torch.float32]
    with pytest.raises(LayoutError) as error:
        read({NORM: torch.ones(4, dtype=dtype), EMBED: torch.ones(6, 4, dtype=torch.bfloat16)}, cast="never")
    assert error.value.details == (f"{NORM} is {dtype}, casts are not allowed, and the model has {NORM} F32[4]",)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64])
def test_only_floating_point_numbers_of_16_bits_or_more_are_cast(dtype: torch.dtype) -> None:
    with pytest.raises(LayoutError, match="not cast"):
        read({NORM: torch.ones(4).to(dtype)})


def test_exact_allows_casts_to_a_wider_dtype_and_what_is_refused_is_told_what_a_push_accepts() -> None:
    exact = read({NORM: torch.ones(4, dtype=torch.bfloat16)}, cast="exact")
    assert exact.cast == (NORM,)
    with pytest.raises(LayoutError, match="would not be exact") as refused:
        read({NORM: torch.ones(4, dtype=torch.float64)}, cast="exact")
    assert "cast='allow'" in refused.value.fix
    assert "pull" not in refused.value.fix


def test_a_word_for_casts_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'allow', 'exact', 'never'"):
        read(state(), cast="sometimes")


# -- boxes ----------------------------------------------------------------------------------------------------------------


def rank_boxes(
    shape: tuple[int, ...], placements: list[Any], mesh: tuple[int, ...], coordinate: tuple[int, ...]
) -> list[tuple[Box, tuple[slice, ...]]]:
    cuts = cuts_of(placements, mesh, coordinate, len(shape))
    return boxes_of([runs_after(length, of_axis) for length, of_axis in zip(shape, cuts, strict=True)])


@pytest.mark.parametrize(
    ("placements", "coordinate", "box"),
    [
        ([Replicate(), Shard(0)], (1, 1), Box((4, 0), (3, 4))),  # HSDP, uneven: 4 rows and 3
        ([Shard(1), Shard(0)], (1, 0), Box((0, 2), (4, 2))),
        # tensor parallelism cuts 7 rows into 4 and 3, FSDP2 each of them into 2 and 2, or 2 and 1
        ([_StridedShard(0, split_factor=2), Shard(0)], (0, 0), Box((0, 0), (2, 4))),
        ([_StridedShard(0, split_factor=2), Shard(0)], (1, 0), Box((2, 0), (2, 4))),
        ([_StridedShard(0, split_factor=2), Shard(0)], (0, 1), Box((4, 0), (2, 4))),
        ([_StridedShard(0, split_factor=2), Shard(0)], (1, 1), Box((6, 0), (1, 4))),
    ],
)
def test_boxes_on_a_mesh_of_two_by_two(placements: list[Any], coordinate: tuple[int, ...], box: Box) -> None:
    whole = tuple(slice(0, n) for n in box.extent)
    assert rank_boxes((7, 4), placements, (2, 2), coordinate) == [(box, whole)]


def test_rows_that_lie_apart_are_boxes_of_their_own() -> None:
    found = rank_boxes((8,), [_StridedShard(0, split_factor=2)], (2,), (1,))
    assert found == [(Box((2,), (2,)), (slice(0, 2),)), (Box((6,), (2,)), (slice(2, 4),))]


def test_ranks_without_a_row_hold_no_box() -> None:
    assert [len(rank_boxes((5, 2), [Shard(0)], (4,), (rank,))) for rank in range(4)] == [1, 1, 1, 0]


def test_parts_of_a_sum_are_refused() -> None:
    with pytest.raises(LayoutError, match="redistribute"):
        cuts_of([Partial()], (2,), (0,), 2)


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Any], tuple[int, ...]]:
    """A shape, placements, and the shape of their mesh."""
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axis = st.integers(0, len(shape) - 1)
    placement = st.one_of(
        st.just(Replicate()),
        axis.map(Shard),
        st.builds(lambda dim, pieces: _StridedShard(dim, split_factor=pieces), axis, st.integers(1, 3)),
    )
    return shape, [draw(placement) for _ in mesh], mesh


def torchs_local_tensor(
    full: torch.Tensor, placements: list[Any], mesh: tuple[int, ...], coordinate: tuple[int, ...]
) -> torch.Tensor:
    for placement, ranks, rank in zip(placements, mesh, coordinate, strict=True):
        if not placement.is_replicate():
            pieces, _ = placement._split_tensor(full, ranks, with_padding=False, contiguous=False)
            full = pieces[rank]
    return full


@given(placed())
@settings(max_examples=300, deadline=None)
def test_on_any_mesh_boxes_are_where_torch_took_the_elements_from(
    case: tuple[tuple[int, ...], list[Any], tuple[int, ...]],
) -> None:
    shape, placements, mesh = case
    full = torch.arange(math.prod(shape)).view(shape)
    times_held = torch.zeros(shape, dtype=torch.int64)
    for coordinate in itertools.product(*map(range, mesh)):
        local = torchs_local_tensor(full, placements, mesh, coordinate)
        boxes = rank_boxes(shape, placements, mesh, coordinate)
        assert sum(box.volume for box, _ in boxes) == local.numel()
        for box, where in boxes:
            region = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
            assert torch.equal(full[region], local[where])
            times_held[region] += 1
        if len(boxes) == 1:
            said = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
            assert said == (boxes[0][0].extent, boxes[0][0].offset)
    replicas = math.prod(n for n, placement in zip(mesh, placements, strict=True) if placement.is_replicate())
    assert bool((times_held == replicas).all())


def test_a_module_whose_state_dict_gives_copies_is_not_restored() -> None:
    class Copying(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2, 3))
            self.register_state_dict_post_hook(
                lambda _module, state, _prefix, _metadata: state.update(weight=state["weight"].clone())
            )

    spec = TensorSpec("weight", dtypes.parse("fp32"), (2, 3))
    copying, plain = Copying(), torch.nn.Linear(3, 2, bias=False)
    held = torch_shards(plain, {"weight": spec})
    check_not_copied(plain, held.layout, held.tensors)
    copies = torch_shards(copying, {"weight": spec})
    with pytest.raises(LayoutError, match=r"1 tensor of .* is a separate copy") as caught:
        check_not_copied(copying, copies.layout, copies.tensors)
    assert list(caught.value.details) == ["weight"]
