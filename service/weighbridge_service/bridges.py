"""What mbridge knows, behind one small interface, so that another provider can take its place.

mbridge is run on tensors without weights: on meta tensors for shapes, on index tensors for placement. It never sees a
weight, a process group or a device.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from weighbridge import dtypes
from weighbridge.errors import InvalidArgument
from weighbridge.layouts import TensorSpec
from weighbridge_service.relations import Link

FAMILIES = ("llama", "qwen2", "qwen3")
"""Model types whose maps are tested, end to end, against real Megatron-core models."""

VOCABULARY_TENSORS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron-core tensors whose first axis is the vocabulary, and may be padded."""

# mbridge's tables have the biases of QKV only; llama and qwen3 configs can ask for these as well
_ATTENTION_BIASES = {"self_attention.linear_proj.bias": ["model.layers.{layer_number}.self_attn.o_proj.bias"]}
_MLP_BIASES = {
    "mlp.linear_fc1.bias": [
        "model.layers.{layer_number}.mlp.gate_proj.bias",
        "model.layers.{layer_number}.mlp.up_proj.bias",
    ],
    "mlp.linear_fc2.bias": ["model.layers.{layer_number}.mlp.down_proj.bias"],
}

_LARGEST = {
    # far above any model there is: what is larger would only eat the service's memory
    "num_hidden_layers": 1 << 10,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
}

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


class Bridge(Protocol):
    """Names, shapes and conversions between megatron-core's tensors, one per layer, and Hugging Face's.

    Attributes:
        model_type: of the Hugging Face config.
        hugging_face: the model's tensors in the order of its state dict, tied ones once.
        megatron: for each megatron-core tensor, named per layer as with Transformer Engine, its Hugging Face tensors.
        num_layers: decoder layers.
        vocab_size: rows of the embedding, without padding.
        traces: links of the kinds of tensors that have been traced so far, by kind and rows of the vocabulary.
    """

    model_type: str
    hugging_face: dict[str, TensorSpec]
    megatron: dict[str, tuple[str, ...]]
    num_layers: int
    vocab_size: int
    traces: dict[tuple[str, int], list[Link]]

    def megatron_shape(self, name: str, padded_vocab_size: int) -> tuple[int, ...]:
        """Global shape of a megatron-core tensor."""

    def conversion(
        self, name: str, padded_vocab_size: int
    ) -> Callable[[torch.Tensor], Sequence[tuple[str, torch.Tensor]]]:
        """How the full megatron-core tensor becomes Hugging Face tensors."""

    def parallel_plan(self) -> Mapping[str, str]:
        """How each Hugging Face tensor is cut for tensor parallelism: ``colwise`` or ``rowwise``; the rest is not."""

    def head_counts(self) -> tuple[int, int]:
        """Attention heads and key-value heads."""


def kind_of(name: str) -> str:
    """The name with the layer's number taken out: layers of one kind are converted alike."""
    return _LAYER.sub("{layer}", name)


def parse_config(config_json: bytes) -> dict[str, Any]:
    """The content of a ``config.json``, with a model type that has a weight map.

    Raises:
        InvalidArgument: it is no JSON object, or its model type has no map.
    """
    try:
        config = json.loads(config_json.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"config.json cannot be read: {error}"[:300]) from error
    if not isinstance(config, dict):
        raise InvalidArgument("config.json does not hold a JSON object")
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise InvalidArgument(
            f"there is no weight map for the model type {str(model_type)[:80]!r}",
            fix=f"model types that have one: {', '.join(FAMILIES)}",
        )
    return config


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, before anything is made of them.

    Raises:
        InvalidArgument: names the field.
    """
    for name, largest in _LARGEST.items():
        value = config.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= largest):
            raise InvalidArgument(
                f"config.json has {name} = {str(value)[:40]}, not an integer from 1 to {largest}"
            )


def bridge_for(config_json: bytes) -> Bridge:
    """The bridge for a Hugging Face config; made once for each config and process.

    Takes about 5 s the first time in a process (mbridge imports transformers and megatron-core).

    Raises:
        InvalidArgument: the config has no map, or transformers cannot make a model of it.
    """
    parse_config(config_json)
    with _making:
        return _cached_bridge(config_json)


@functools.lru_cache(maxsize=64)
def _cached_bridge(config_json: bytes) -> Bridge:
    return MBridge(parse_config(config_json))


_making = threading.Lock()
"""transformers cannot be imported by two threads at once, and makes models by changing torch's default device."""


class MBridge:
    """A `Bridge` that asks mbridge 0.15 and transformers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        import transformers

        self.model_type: str = config["model_type"]
        _check_sizes(config)
        try:
            # only the family's own fields: others name code to run (`auto_map`, `attn_implementation`), replace
            # methods, or make transformers fill memory (`num_labels`), and none of them has a say in the weights
            family = transformers.CONFIG_MAPPING[self.model_type]
            parameters = inspect.signature(family.__init__).parameters.values()
            known = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
            self._config = family(**{name: config[name] for name in known if name in config})
            heads, kv_heads = self.head_counts()
            if heads % kv_heads:
                raise ValueError(f"{heads} attention heads cannot share {kv_heads} key-value heads")
            self._model = self._meta_model()
            self._bridge = _offline_bridge(self._config)
        except Exception as error:  # transformers raises whatever a wrong value leads to
            raise InvalidArgument(
                f"transformers cannot make a {self.model_type} model of this config.json: {error}"[:500]
            ) from error
        self.num_layers: int = self._config.num_hidden_layers
        self.vocab_size: int = self._config.vocab_size
        self.hugging_face: dict[str, TensorSpec] = self._hugging_face_specs()
        self._lock = threading.Lock()
        self.traces: dict[tuple[str, int], list[Link]] = {}
        self.megatron: dict[str, tuple[str, ...]] = self._megatron_names()
        reached = {name for names in self.megatron.values() for name in names}
        missing = [name for name in self.hugging_face if name not in reached]
        if missing:
            raise InvalidArgument(
                f"the weight map of {self.model_type} does not know {len(missing)} tensors of this config",
                details=missing[:10],
                fix="check config.json for options that the family does not have in Megatron-core",
            )

    def _meta_model(self) -> Any:
        import transformers

        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(self._config)

    def _hugging_face_specs(self) -> dict[str, TensorSpec]:
        # the order of the state dict, each tied tensor under the first of its names only
        seen: set[int] = set()
        specs = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                specs[name] = TensorSpec(name, dtypes.from_torch(tensor.dtype), tuple(tensor.shape))
        return specs

    def _megatron_names(self) -> dict[str, tuple[str, ...]]:
        bridge = self._bridge
        suffixes = [*bridge._ATTENTION_MAPPING, *bridge._MLP_MAPPING]
        layers = [
            f"decoder.layers.{layer}.{suffix}" for layer in range(self.num_layers) for suffix in suffixes
        ]
        found: dict[str, tuple[str, ...]] = {}
        reached: set[str] = set()
        for name in [*bridge._DIRECT_MAPPING, *layers]:
            targets = tuple(bridge._weight_name_mapping_mcore_to_hf(name))
            # a family's table also lists what only some of its models have (biases, QK norm, an untied output layer)
            if all(target in self.hugging_face for target in targets) and reached.isdisjoint(targets):
                found[name] = targets
                reached.update(targets)
        return found

    def megatron_shape(self, name: str, padded_vocab_size: int) -> tuple[int, ...]:
        """Global shape of a megatron-core tensor."""
        sources = [torch.empty(self.hugging_face[n].shape, device="meta") for n in self.megatron[name]]
        with self._vocabulary(padded_vocab_size):
            return tuple(self._bridge._weight_to_mcore_format(name, sources).shape)

    def conversion(
        self, name: str, padded_vocab_size: int
    ) -> Callable[[torch.Tensor], Sequence[tuple[str, torch.Tensor]]]:
        """How the full megatron-core tensor becomes Hugging Face tensors."""

        def convert(tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
            with self._vocabulary(padded_vocab_size):
                names, tensors = self._bridge._weight_to_hf_format(name, tensor)
            return list(zip(names, tensors, strict=True))

        return convert

    @contextmanager
    def _vocabulary(self, padded_vocab_size: int) -> Iterator[None]:
        """mbridge takes the sizes from the bridge itself: no other thread may set them until it is done."""
        with self._lock:
            self._bridge.vocab_size = self.vocab_size
            self._bridge.padded_vocab_size = padded_vocab_size
            yield

    def parallel_plan(self) -> Mapping[str, str]:
        """How each Hugging Face tensor is cut for tensor parallelism, by transformers' own plan for the model."""
        # `tp_plan` of the whole model: patterns such as `model.layers.*.self_attn.q_proj` -> `colwise`
        patterns = {
            re.compile(re.escape(k).replace(r"\*", r"\d+")): v for k, v in self._model.tp_plan.items()
        }
        patterns |= {re.compile(re.escape(k)): v for k, v in (type(self._model)._tp_plan or {}).items()}
        plan = {}
        for name in self.hugging_face:
            module = name.rpartition(".")[0]
            for pattern, style in patterns.items():
                if pattern.fullmatch(module):
                    plan[name] = {"colwise_rep": "colwise", "rowwise_rep": "rowwise"}.get(style, style)
        return plan

    def head_counts(self) -> tuple[int, int]:
        """Attention heads and key-value heads."""
        return self._config.num_attention_heads, self._config.num_key_value_heads


def _offline_bridge(config: Any) -> Any:
    """An mbridge bridge that needs no process group and shares nothing with others of its class."""
    import mbridge  # noqa: F401  (registers the families)
    from mbridge.core.bridge import _MODEL_REGISTRY
    from mbridge.core.parallel_states import ParallelStates

    family = _MODEL_REGISTRY[config.model_type]
    config = copy.deepcopy(config)
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads

    class Offline(family):  # type: ignore[misc, valid-type]
        def _build_config(self) -> SimpleNamespace:
            # mbridge writes the names of tied weights into tables of the class: give this instance its own
            for table in ("_DIRECT_MAPPING", "_ATTENTION_MAPPING", "_MLP_MAPPING", "_OTHER_MAPPING"):
                setattr(self, table, copy.deepcopy(getattr(self, table)))
            self._ATTENTION_MAPPING |= _ATTENTION_BIASES
            self._MLP_MAPPING |= _MLP_BIASES
            return SimpleNamespace(
                num_layers=config.num_hidden_layers,
                mtp_num_layers=None,
                gated_linear_unit=True,
                num_moe_experts=None,
            )

    return Offline(
        config,
        dtype=None,  # no cast: placement only
        parallel_states=ParallelStates(vpp_size=None),
        make_vocab_size_divisible_by=1,  # any value: it makes mbridge heed vocab_size and padded_vocab_size
    )
