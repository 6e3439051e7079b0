"""What does a rank of vLLM take of a version? Its own loader says, and what it says must fit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weighbridge import lazy
from weighbridge.engine import EngineClient
from weighbridge.errors import FailedPrecondition, WeighbridgeError
from weighbridge.integrations.vllm import layers
from weighbridge.layouts import TensorSpec

_COMPARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "tie_word_embeddings",
)  # fmt: skip
"""What of a configuration decides about names and shapes of weights."""
_FIX = "start the engine with the configuration of this model"


def record(
    model: Any,
    model_config: Any,
    client: EngineClient,
    source: lazy.Source,
    configuration: str | None = None,
) -> lazy.Recording:
    """Let the loader of a model that has just been made, or is without storage, say what it takes.

    Args:
        model: vLLM's.
        model_config: vLLM's configuration of it.
        client: of the service.
        source: a version; all versions of a model have the same tensors.
        configuration: all else that the loader's choice depends on, if what was recorded before may be used; None runs the loader.

    Raises:
        FailedPrecondition: the model is configured otherwise than this one of the service, its loader does not take one of the
            version's tensors, or a parameter would stay without weights; names it.
    """
    version = source.version
    check_configuration(
        model_config, json.loads(client.model_files(version.model, version.number)["config.json"])
    )
    last: list[TensorSpec] = []

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        return model.load_weights(_watched(tensors, source.specs, last))

    try:
        if configuration is None:
            recording = lazy.record(source.specs, load, layers.tensors_of(model))
        else:
            recording = lazy.remembered(source.specs, load, layers.tensors_of(model), configuration)
    except WeighbridgeError:
        raise
    except Exception as error:
        where = f" at {last[-1]}" if last else ""
        raise FailedPrecondition(
            f"vLLM's loader does not take {version.model}@{version.number}: it ended{where} with "
            f"{type(error).__name__}: {error}",
            fix=_FIX,
        ) from error
    _check_complete(model, model_config, recording)
    return recording


def configuration_of(vllm_config: Any) -> str:
    """All that decides about what a rank of vLLM takes of a version, besides the model's tensors and its own parameters."""
    import vllm
    from vllm.distributed.parallel_state import get_world_group

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    known = {
        "vllm": vllm.__version__,
        "rank": get_world_group().rank_in_group,
        "config": model.hf_config.to_dict(),
        "quantization": model.quantization,
        "parallel": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.data_parallel_size,
            parallel.data_parallel_rank,
            parallel.enable_expert_parallel,
            parallel.enable_eplb,
            str(parallel.expert_placement_strategy),
        ],
    }
    return json.dumps(known, sort_keys=True, default=str)


def check_configuration(model_config: Any, registered: dict[str, Any]) -> None:
    """Refuse an engine that is configured for weights of other shapes.

    Args:
        model_config: vLLM's.
        registered: the ``config.json`` of the version.

    Raises:
        FailedPrecondition: says what differs.
    """
    differ = []
    for key in _COMPARED:
        # by name of attribute: newer releases of transformers write some under another name
        mine, wanted = getattr(model_config.hf_config, key, None), registered.get(key)
        if mine is not None and wanted is not None and mine != wanted:
            differ.append(f"{key}: the engine has {mine}, the model {wanted}")
    if differ:
        raise FailedPrecondition("the engine is configured for another model", fix=_FIX, details=differ)


def _watched(
    tensors: Iterable[tuple[str, torch.Tensor]], specs: Iterable[TensorSpec], last: list[TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, remembering which one the loader has got last."""
    for spec, named in zip(specs, tensors, strict=True):
        last[:] = [spec]
        yield named


def _check_complete(model: torch.nn.Module, model_config: Any, recording: lazy.Recording) -> None:
    """Refuse a version that leaves a part of a parameter as it was, where every element has to come from a checkpoint."""
    if model_config.quantization is not None:
        return  # scales and the like may be left out of a checkpoint; vLLM knows which
    parameters = dict(model.named_parameters())
    missing = []
    for name, tensor in layers.tensors_of(model).items():
        left = recording.unwritten.get(name, 0)
        spare = tensor.numel() - getattr(tensor, "weight_loader_numel", tensor.numel())
        if left > spare and name in parameters:
            missing.append(f"{name}: {left} of {tensor.numel()} elements")
    if missing:
        raise FailedPrecondition("parameters would be left without weights", details=missing[:20], fix=_FIX)
