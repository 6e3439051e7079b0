"""Targets that are configs of models: each is refused, or makes a model whose tensors are known, in time."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tests.fuzz import mutators
from tests.fuzz.target import Bounds, Target, stateless
from tests.support.reference import MORE_TINY_FAMILIES, TINY_FAMILIES, UNKNOWN_TO_MBRIDGE, tiny_config
from weighbridge.errors import WeighbridgeError
from weighbridge_service.models.bridges import parse_config
from weighbridge_service.models.registration import model_for_registration, registration_of
from weighbridge_storage.documents.names import ModelName

_NAME = ModelName("acme", "smol")
_FIELDS = (
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "num_experts",
    "num_local_experts", "n_routed_experts", "intermediate_size", "tie_word_embeddings", "quantization_config", "rope_scaling", "text_config",
    "auto_map", "architectures", "dtype", "torch_dtype", "layer_types", "llama", "qwen3", "mixtral", "deepseek_v3", "gpt_oss", "float8_e4m3fn",
)  # fmt: skip


def _config(data: bytes) -> None:
    parse_config(data)
    model = model_for_registration(_NAME, {"config.json": data}, "")
    registration_of(model)
    _ = model.nbytes, model.keep_in_fp32


def _configs() -> Sequence[bytes]:
    families = (*TINY_FAMILIES, *MORE_TINY_FAMILIES, *UNKNOWN_TO_MBRIDGE)
    return [str(tiny_config(family, tied=False).to_json_string()).encode() for family in families]


def _heavy() -> list[bytes]:
    small = json.loads(_configs()[0])
    large = {
        "num_hidden_layers": (10**6, 10**12, -1), "hidden_size": (2**31, 2**62), "vocab_size": (2**40,), "num_attention_heads": (2**31, 0),
        "head_dim": (2**40,), "intermediate_size": (2**50,), "num_key_value_heads": (2**31,),
    }  # fmt: skip
    changed = [json.dumps({**small, name: value}).encode() for name, values in large.items() for value in values]
    return [
        *changed,
        b"[" * 1_000_000,
        b'{"a":' * 200_000,
        b'{"model_type":' + b"9" * 4300 + b"}",
        b" " * 50_000_000,
    ]


TARGETS = (
    Target(
        "configs", stateless(_config), _configs, mutators.json_documents(texts=_FIELDS), (WeighbridgeError,), _heavy,
        Bounds(seconds=10.0, mb=256.0), longest=1 << 14, weight=0.005,
    ),
)  # fmt: skip
