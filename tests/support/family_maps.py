"""Two digests of a family's maps for a config, which can be compared between Python environments.

``python -m tests.support.family_maps FILE`` prints them for every config of a file of `data/family_maps.json`'s form;
``python -m tests.support.family_maps --configs`` prints the configs, as the transformers that is installed writes them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weighbridge import TensorParallel
from weighbridge._core import dtypes
from weighbridge._core.slices import ExpertParallel, LayoutRequest
from weighbridge.errors import InvalidArgument
from weighbridge_service.models.model_tensors import ModelTensors
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_storage.documents.names import ModelName

REQUESTS = (
    TensorParallel(1, 0),
    TensorParallel(2, 1, vocab_multiple=64),
    TensorParallel(4, 3),
    TensorParallel(4, 1, experts=ExpertParallel(2, 1, tp_size=2, tp_rank=0)),
)


def digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the tensors, with their order and the place of each element in Megatron-core, and of the slices that
    engines get.
    """
    content = json.dumps(config).encode()
    model = RegisteredModel(
        ModelName("tests", "any"), content, ModelTensors(dtypes.parse("bf16")), "0" * 32, ["config.json"]
    )
    slices = hashlib.sha256()
    for request in REQUESTS:
        slices.update(_slices(model, request).encode())
    return {"identity": model.identity, "slices": slices.hexdigest()}


def _slices(model: RegisteredModel, request: LayoutRequest) -> str:
    try:
        return model.pull_layout(request).digest
    except InvalidArgument:  # as of experts, where there are none
        return "none"


def configs() -> dict[str, dict[str, Any]]:
    """A small config of every family and of what they may have besides: heads, biases, tied embeddings, other sizes of
    experts.
    """
    from tests.service.families.test_conventions import MODELS
    from tests.support.reference import MORE_TINY_FAMILIES, TINY_FAMILIES, UNKNOWN_TO_MBRIDGE, tiny_config

    found: dict[str, dict[str, Any]] = {}
    for family in (*TINY_FAMILIES, *MORE_TINY_FAMILIES, *UNKNOWN_TO_MBRIDGE):
        for tied in (False, True):
            config = json.loads(tiny_config(family, tied=tied).to_json_string())
            found[f"{family}{'-tied' if tied else ''}"] = config
        found[f"{family}-bare"] = {
            name: value for name, value in config.items() if name not in ("tie_word_embeddings", "head_dim")
        }
    for family in ("llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"):
        for kind in ("TokenClassification", "SequenceClassification"):
            config = {**found[family], "architectures": [f"AnyFor{kind}"], "num_labels": 1}
            found[f"{family}-{kind}"] = config
    found["kimi_k2"] = {**found["deepseek_v3"], "model_type": "kimi_k2"}
    for name, (make, _, _) in MODELS.items():
        found[name] = json.loads(make().config.to_json_string())
    flat = {**found["qwen2_5_vl"]}
    found["qwen2_5_vl-flat"] = {**flat.pop("text_config"), **flat, "tie_word_embeddings": False}
    return found


if __name__ == "__main__":
    if sys.argv[1] == "--configs":
        print(json.dumps(configs(), indent=1))
    else:
        there = json.loads(Path(sys.argv[1]).read_text("utf-8"))
        print(json.dumps({name: digests(each["config"]) for name, each in there.items()}))
