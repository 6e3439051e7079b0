"""Is a repeated registration under one name accepted if it is the same model, and refused otherwise?

A head as a later release writes it is made by hand: a registration is JSON.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.alone import alone
from tests.support.heads import allocate
from tests.support.reference import tiny_config
from tests.support.waiting import processor_seconds
from weighbridge._core import dtypes
from weighbridge._core.layouts import TensorSpec
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.models.bridges import bridge_for
from weighbridge_service.models.model_tensors import ModelTensors
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.stores.local import LocalStore

NAME = ModelName.parse("acme/tiny")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
OTHER_SHAPE = {"intermediate_size": 64}
OTHER_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
"""The same tensors; Megatron-core puts their elements in other places."""


def files(**changes: Any) -> dict[str, bytes]:
    return {"config.json": json.dumps({**LLAMA, **changes}).encode()}


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    store = LocalStore(tmp_path / "store")
    yield Catalog(store)
    store.close()


def change(catalog: Catalog, edit: Callable[[Head], Head]) -> None:
    catalog.heads.update(NAME, lambda head: (edit(head), None))


def open_version(catalog: Catalog) -> None:
    change(catalog, lambda head: allocate(head)[0])


# -- the same model again ------------------------------------------------------------------------------------------------


def registered_as(**config: Any) -> RegisteredModel:
    content = files(**config)["config.json"]
    return RegisteredModel(NAME, content, ModelTensors(dtypes.parse("fp32")), "0" * 32, ["config.json"])


def test_the_identity_of_a_model_stays_what_heads_have() -> None:
    """A change to the fields of the identity requires a new `IDENTITY_FORMAT`."""
    golden = "2:99faad921c98456abbf296ccfb3b62d43abd820e89aa9ab82510fbd34277aab9"
    assert registered_as().identity == golden
    assert registered_as(rope_theta=5.0, max_position_embeddings=64).identity == golden
    others = [registered_as(**changes) for changes in (OTHER_SHAPE, OTHER_HEADS, {"tie_word_embeddings": True})]
    assert others[1].files.layout.digest == registered_as().files.layout.digest
    assert len({golden, *(model.identity for model in others)}) == 4


def test_a_head_with_an_identity_of_another_release_takes_the_same_model_and_no_other(
    catalog: Catalog,
) -> None:
    catalog.register_model(str(NAME), files())
    open_version(catalog)
    current = dict(catalog.head(NAME).registration)
    change(catalog, lambda head: replace(head, registration={**current, "identity": f"3:{'5a' * 32}"}))
    for changes in (OTHER_SHAPE, {"tie_word_embeddings": True}, {"num_hidden_layers": 1}):
        with pytest.raises(FailedPrecondition, match="registered already, with different tensors"):
            catalog.register_model(str(NAME), files(**changes))
    with pytest.raises(FailedPrecondition, match="registered already, with different tensors"):
        catalog.register_model(str(NAME), files(), "bf16")
    catalog.register_model(str(NAME), {**files(), "tokenizer.json": b"{}"})
    assert catalog.head(NAME).registration == {**current, "files": ["config.json", "tokenizer.json"]}
    # and from now on the places of elements count as well
    with pytest.raises(FailedPrecondition, match="registered already, with different tensors or heads"):
        catalog.register_model(str(NAME), files(**OTHER_HEADS))


@pytest.mark.parametrize(
    "changes",
    [
        OTHER_SHAPE,
        OTHER_HEADS,
        {"tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 8},
        {"torch_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_a_model_without_versions_becomes_what_is_registered_last(catalog: Catalog, changes: dict[str, Any]) -> None:
    catalog.register_model(str(NAME), files())
    assert catalog.model(NAME).config_json == files()["config.json"]
    config = {**LLAMA, **changes}
    model = catalog.register_model(str(NAME), files(**changes))
    assert model.model_type == config["model_type"]
    assert model.dtype == dtypes.parse(config["torch_dtype"]).name
    expected = bridge_for(files(**changes)["config.json"]).hugging_face
    for one in (catalog, Catalog(catalog.store)):  # of this process, and of another
        tensors = one.model(NAME).tensors
        assert {name: spec.shape for name, spec in tensors.items()} == expected
    open_version(catalog)
    with pytest.raises(FailedPrecondition, match="registered already"):
        catalog.register_model(str(NAME), files(), "fp32")


# -- from files of weights, and from a config alone ----------------------------------------------------------------------


def predicting() -> tuple[dict[str, bytes], list[TensorSpec], set[str]]:
    """A config with layers of multi-token prediction, the tensors of files without them, and the names that these
    lack.
    """
    config = tiny_config("deepseek_v3_mtp", tied=False)
    content = json.dumps({**config.to_dict(), "model_type": config.model_type}).encode()
    bridge = bridge_for(content)
    lacking = set(bridge.parts["mtp"])
    fp32 = dtypes.parse("fp32")
    found = [TensorSpec(n, fp32, shape) for n, shape in bridge.hugging_face.items() if n not in lacking]
    return {"config.json": content}, found, lacking


def test_what_the_files_of_an_import_lack_is_remembered_when_only_the_config_comes_again(
    catalog: Catalog,
) -> None:
    content, found, lacking = predicting()
    imported = catalog.register_model(str(NAME), content, found=found)
    assert imported.tensor_count == len(found)
    open_version(catalog)
    for one in (catalog, Catalog(catalog.store)):
        again = one.register_model(str(NAME), content)  # as every rank of a trainer does
        assert again == imported
        assert one.model(NAME).tensors.keys() == {spec.name for spec in found}
    # an explicit dtype still counts
    with pytest.raises(FailedPrecondition, match="registered already"):
        catalog.register_model(str(NAME), content, "bf16")
    assert lacking.isdisjoint(catalog.model(NAME).tensors)


def test_files_may_lack_what_the_config_promised_before_the_first_version(catalog: Catalog) -> None:
    content, found, lacking = predicting()
    assert catalog.register_model(str(NAME), content).tensor_count == len(found) + len(lacking)
    assert lacking <= catalog.model(NAME).tensors.keys()
    assert catalog.register_model(str(NAME), content, found=found).tensor_count == len(found)
    assert catalog.model(NAME).tensors.keys() == {spec.name for spec in found}
    open_version(catalog)
    assert catalog.register_model(str(NAME), content).tensor_count == len(found)


def test_files_in_another_quantisation_than_maps_know_are_refused_with_the_way_out(catalog: Catalog) -> None:
    """As gpt-oss is published: blocks and scales in the place of the experts."""
    config = {
        **tiny_config("gpt_oss", tied=False).to_dict(),
        "quantization_config": {"quant_method": "mxfp4"},
    }
    content = {"config.json": json.dumps(config).encode()}
    u8, bf16 = dtypes.parse("uint8"), dtypes.parse("bf16")
    found = []
    for name, shape in bridge_for(content["config.json"]).hugging_face.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            found.append(TensorSpec(f"{name}_blocks", u8, (experts, outputs, inputs // 32, 16)))
            found.append(TensorSpec(f"{name}_scales", u8, (experts, outputs, inputs // 32)))
        else:
            found.append(TensorSpec(name, bf16, shape))
    with pytest.raises(InvalidArgument, match=r"quantised \(mxfp4\)") as refused:
        catalog.register_model(str(NAME), content, found=found)
    assert "Mxfp4Config(dequantize=True)" in str(refused.value)
    assert not catalog.register_model(str(NAME), content, found=found, weight_map=False).weight_map


def test_an_output_layer_that_the_config_ties_is_refused_with_the_reason(catalog: Catalog) -> None:
    """By the service, whatever a client leaves out by itself."""
    content = files(tie_word_embeddings=True)
    fp32 = dtypes.parse("fp32")
    found = [TensorSpec(n, fp32, s) for n, s in bridge_for(content["config.json"]).hugging_face.items()]
    catalog.register_model(str(NAME), content, found=found)
    with pytest.raises(InvalidArgument) as caught:
        catalog.register_model(str(NAME), content, found=[*found, TensorSpec("lm_head.weight", fp32, (64, 32))])
    [problem] = caught.value.details
    assert problem.startswith("lm_head.weight F32[64, 32] is not a tensor of this llama model: config.json ties it")


# -- configs that no model has -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mixtral", "num_hidden_layers": 512, "num_local_experts": 16384},
        {"model_type": "qwen2_moe", "num_hidden_layers": 512, "num_experts": 16384},
        {"model_type": "qwen3_moe", "num_hidden_layers": 512, "num_experts": 16384},
        {"model_type": "glm4_moe", "num_hidden_layers": 512, "n_routed_experts": 16384},
        {"model_type": "deepseek_v3", "num_hidden_layers": 512, "n_routed_experts": 16384},
        {"model_type": "minimax_m2", "num_hidden_layers": 512, "num_local_experts": 16384},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "E" * 512, "n_routed_experts": 16384},
        {"model_type": "qwen3_next", "num_hidden_layers": 512, "num_experts": 16384},
        {"model_type": "llama4_text", "num_hidden_layers": 512, "num_local_experts": 16384},
        {"model_type": "llama4", "text_config": {"num_hidden_layers": 512, "num_local_experts": 16384}},
        # what the config leaves open counts as well, and layers that predict further tokens
        {"model_type": "qwen3_moe", "num_experts": 16384},
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 4,
            "num_nextn_predict_layers": 64,
            "n_routed_experts": 16384,
        },
    ],
    ids=lambda config: f"{config['model_type']}-{config.get('num_hidden_layers')}",
)
def test_experts_beyond_count_over_all_layers_are_refused_at_once(catalog: Catalog, config: dict[str, Any]) -> None:
    content = {"config.json": json.dumps(config).encode()}

    def refuse() -> None:
        with pytest.raises(InvalidArgument, match=r"layers with 16384 experts each, more than 50000 in all"):
            catalog.register_model(str(NAME), content)

    # it took minutes and gigabytes; importing transformers takes its time
    assert processor_seconds(refuse) < 20.0
    with pytest.raises(NotFound):
        catalog.get_model(str(NAME))


IMPOSSIBLE_SIZES: list[tuple[str, str, Any]] = [
    *(("deepseek_v3", name, value) for name in ("kv_lora_rank", "v_head_dim") for value in (0, 1 << 28, 1 << 40)),
    ("deepseek_v3", "qk_nope_head_dim", 10**9),
    ("deepseek_v3", "qk_rope_head_dim", -8),
    ("deepseek_v32", "index_head_dim", 1 << 40),
    ("deepseek_v32", "q_lora_rank", None),
    ("qwen3_next", "linear_num_key_heads", 0),
    ("qwen3_next", "linear_num_key_heads", 5),
    ("qwen3_next", "linear_value_head_dim", 1 << 14),
    ("qwen3_next", "linear_key_head_dim", 1 << 40),
    ("qwen3_next", "full_attention_interval", 0),
    ("qwen3_next", "full_attention_interval", "4"),
    ("qwen3_next", "num_nextn_predict_layers", 2),
    ("llama", "head_dim", 1 << 14),
    ("llama", "hidden_size", 1 << 20),
    ("llama", "num_hidden_layers", "4"),
]


@alone
def test_sizes_that_no_model_has_are_refused_by_name_before_memory_is_taken(tmp_path: Path) -> None:
    with closing(LocalStore(tmp_path / "store")) as store:
        catalog = Catalog(store)
        for model_type, name, value in IMPOSSIBLE_SIZES:
            config = {
                "model_type": model_type,
                "num_attention_heads": 1 << 12,
                "num_key_value_heads": 1 << 12,
                name: value,
            }
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with pytest.raises(InvalidArgument, match=r"config\.json"):
                catalog.register_model(str(NAME), {"config.json": json.dumps(config).encode()})
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < 1 << 20, f"{model_type} with {name} of {value}: {grown} KiB"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "does not state the kind of each layer"),
        ({"hybrid_override_pattern": "MX"}, "'MX' is not a sequence of M"),
        ({"layers_block_type": ["mamba", "ssm"]}, "does not state the kind of each layer"),
        ({"hybrid_override_pattern": "M-" * 300}, "num_hidden_layers = 600, not an integer from 1 to 512"),
        ({"hybrid_override_pattern": "M", "mamba_head_dim": 1 << 20}, "mamba_head_dim = 1048576"),
        ({"hybrid_override_pattern": "M", "ssm_state_size": "128"}, "ssm_state_size = '128'"),
        ({"hybrid_override_pattern": "M-", "mlp_bias": True}, "the weight map of nemotron_h has none"),
    ],
)
def test_layers_that_a_hybrid_model_cannot_have_are_refused(
    catalog: Catalog, fields: dict[str, Any], message: str
) -> None:
    content = json.dumps({"model_type": "nemotron_h", **fields}).encode()
    with pytest.raises(InvalidArgument, match=message):
        catalog.register_model(str(NAME), {"config.json": content})
