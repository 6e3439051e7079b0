"""A model's own parameter names, without additions of wrappers and adapters; and the names of tied parameters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from weighbridge._core.text.counts import counted, first_lines
from weighbridge.errors import LayoutError

_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""Parts of names that torch.compile, FSDP and activation checkpointing insert between the names of a module and its
parameters.
"""
_ADAPTERS = frozenset(("lora_A", "lora_B", "base_layer"))
_OWN_ADAPTERS = "_lora"
"""Suffixes of config fields of models whose weights include adapters, such as Phi-4-multimodal."""
_HEADS = (
    "embed_out.weight", "generator_lm_head.weight", "lm_head.decoder.weight", "lm_head.weight",
    "output_projection.weight", "predictions.decoder.weight", "proj_out.weight", "vocab_projector.weight",
)  # fmt: skip
"""Suffixes of the names of output heads that transformers models tie to the token embedding."""
_EMBEDDINGS = (
    "backbone.embeddings.weight", "embed_in.weight", "embed_tokens.weight", "word_embeddings.weight", "wte.weight",
)  # fmt: skip
"""Suffixes of the names of those embeddings."""
_SHARED = "shared.weight"
"""Suffix of the name of an embedding that encoder and decoder share, and that each may contain again."""


def is_head(name: str) -> bool:
    """Whether a tensor has the name of an output head that transformers models tie to an embedding."""
    return _is_whole(name, _HEADS)


def is_embedding(name: str) -> bool:
    """Whether a tensor has the name of a token embedding to which transformers models tie their head."""
    return _is_whole(name, (*_EMBEDDINGS, _SHARED))


def head_and_embedding(names: Iterable[str]) -> tuple[str, str] | None:
    """The output head among a model's tensors and the embedding that it may be tied to; None unless there is one of
    each.
    """
    given = [name for name in names if ".layers." not in name]
    heads, embeddings = list(filter(is_head, given)), list(filter(is_embedding, given))
    shared = [name for name in embeddings if name.endswith(_SHARED)]
    if len(heads) != 1 or len(shared or embeddings) != 1:
        return None
    return heads[0], (shared or embeddings)[0]


def _is_whole(name: str, endings: Iterable[str]) -> bool:
    """Whether a name equals one of some suffixes, or ends with a dot and one of them."""
    return any(name == each or name.endswith(f".{each}") for each in endings)


def parameter_in(name: str, parameters: Collection[str]) -> str | None:
    """The longest parameter name that equals the given name, or that the given name extends after a dot; None if there
    is none.
    """
    while name and name not in parameters:
        name = name.rpartition(".")[0]
    return name or None


def unwrapped_name(name: str) -> str:
    """A parameter's name without the parts that torch.compile, FSDP and activation checkpointing insert."""
    return ".".join(unwrapped_parts(name))


def unwrapped_parts(name: str) -> list[str]:
    """The parts of `unwrapped_name`."""
    return [part for part in name.split(".") if part not in _WRAPPERS]


def unwrapped_names(names: Iterable[str]) -> dict[str, str]:
    """Names of all parameters of a model, each mapped to its name without additions of wrappers.

    A leading ``module`` is DDP's if all names have it.

    Raises:
        LayoutError: two parameters would have the same name; names each.
    """
    given = list(names)
    parts = [unwrapped_parts(name) for name in given]
    while parts and all(len(each) > 1 and each[0] == "module" for each in parts):
        parts = [each[1:] for each in parts]
    own = [".".join(each) for each in parts]
    twice = [name for name, count in Counter(own).items() if count > 1]
    if twice:
        raise LayoutError(
            counted(len(twice), "tensor is", "tensors are") + " given more than once",
            details=first_lines(twice),
        )
    return dict(zip(given, own, strict=True))


def check_merged(names: Iterable[str], fix: str) -> None:
    """Refuse LoRA adapters, because names do not show whether they are merged. Raises LayoutError, which names them."""
    adapters = [name for name in names if not _ADAPTERS.isdisjoint(name.split("."))]
    if adapters:
        raise LayoutError(
            counted(len(adapters), "tensor belongs", "tensors belong")
            + " to LoRA adapters, or to layers that have one",
            details=first_lines(adapters),
            fix=fix,
        )


def has_own_adapters(config_json: bytes) -> bool:
    """Whether a ``config.json`` describes a model whose weights include adapters."""
    try:
        config: Mapping[str, Any] = json.loads(config_json)
        return any(name.endswith(_OWN_ADAPTERS) and isinstance(config[name], dict) for name in config)
    except (ValueError, TypeError, RecursionError):
        return False  # the code that reads the config reports its errors
