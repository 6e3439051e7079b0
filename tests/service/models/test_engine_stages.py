"""Do the stages of a pipeline hold every tensor once, and the right ones of towers and heads?"""

from __future__ import annotations

import itertools
import json
import re
from functools import partial
from typing import Any

import pytest
import torch

from tests.service.families.test_conventions import gemma3_model, llama4_model, qwen2_5_vl_model
from tests.service.models.engine_models import PlainBridge, Source, real_bridge
from tests.support.reference import tiny_config, tiny_value_model
from weighbridge import TensorParallel
from weighbridge.errors import InvalidArgument
from weighbridge_service.models.bridges import bridge_for


@pytest.mark.parametrize("cuts", [[0, 4], [0, 2, 4], [0, 1, 2, 3, 4], [0, 3, 4]])
@pytest.mark.parametrize(
    ("family", "tied"),
    [("qwen2", False), ("qwen2", True), ("deepseek_v3_mtp", False), ("mimo", False), ("qwen2_5_vl", True)],
)
def test_the_stages_of_a_pipeline_hold_every_tensor_once(family: str, tied: bool, cuts: list[int]) -> None:
    config = qwen2_5_vl_model(tied).config if family == "qwen2_5_vl" else tiny_config(family, tied=tied)
    bridge = real_bridge(config)
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(shape, generator=generator) for name, shape in bridge.hugging_face.items()}
    source = Source(bridge, state)
    cuts = [cut * bridge.num_layers // 4 for cut in cuts]
    pairs = [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
    stages = [source.rank(2, 1, layers=pair) for pair in pairs]
    whole = source.rank(2, 1)
    assert whole.keys() == state.keys()
    last = len(stages) - 1
    for name, tensor in whole.items():
        layer = re.match(r"model\.(language_model\.)?layers\.(\d+)\.", name)
        if layer and int(layer[2]) < bridge.num_layers:
            where = [i for i, (a, b) in enumerate(pairs) if a <= int(layer[2]) < b]
        elif layer or "mtp" in name or name.startswith(("model.norm", "model.language_model.norm", "lm_head")):
            where = [last]
        elif name.endswith("embed_tokens.weight") and tied:
            where = sorted({0, last})
        else:
            where = [0]
        assert [i for i, stage in enumerate(stages) if name in stage] == where, name
        assert all(torch.equal(stages[i][name], tensor) for i in where), name


def test_the_output_head_of_a_value_model_is_on_the_last_stage_and_its_embedding_only_on_the_first() -> None:
    model = tiny_value_model(tiny_config("qwen2", tied=True), seed=3)
    config = {**model.config.to_dict(), "architectures": ["Qwen2ForTokenClassification"]}
    source = Source(bridge_for(json.dumps(config).encode()), dict(model.state_dict()))
    first, last = (source.rank(1, 0, layers=layers) for layers in ((0, 2), (2, 4)))
    assert "model.embed_tokens.weight" in first.keys() - last.keys()
    assert {"model.norm.weight", "score.weight", "score.bias"} <= last.keys() - first.keys()


@pytest.mark.parametrize("make", [gemma3_model, qwen2_5_vl_model, partial(llama4_model, 1)])
def test_the_language_model_of_one_with_images_is_cut_and_its_vision_tower_is_not(make: Any) -> None:
    bridge = real_bridge(make(tied=False).config)
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(shape, generator=generator) for name, shape in bridge.hugging_face.items()}
    source = Source(bridge, state)
    for rank in range(2):
        found = dict(source.slices(TensorParallel(2, rank)))
        for name, tensor in state.items():
            axis = None
            if "vision" not in name and not name.startswith("visual."):
                if re.search(r"\.(q|k|v|gate|up)_proj\.(weight|bias)$", name):
                    axis = 0
                elif re.search(r"\.(o|down)_proj\.weight$", name):
                    axis = 1
            if axis is not None:
                assert torch.equal(found[name], tensor.chunk(2, dim=axis)[rank]), name
            elif "norm" in name or "vision" in name or name.startswith("visual."):
                assert torch.equal(found[name], tensor), name


def test_a_family_whose_plan_cuts_nothing_is_refused_instead_of_giving_every_rank_everything() -> None:
    source = Source(PlainBridge(), {"transformer.h.0.attn.q.weight": torch.randn(8, 8)})
    assert source.rank(1, 0).keys() == {"transformer.h.0.attn.q.weight"}
    with pytest.raises(InvalidArgument, match=r"only the vocabulary of a plain model (.|\n)* parallel_plan"):
        source.rank(2, 0)
