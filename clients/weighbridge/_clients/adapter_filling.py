"""Adapter of a peft model as the target of a pull: its tensors, by the names in peft's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weighbridge._clients.calls.model_calls import model_files
from weighbridge._clients.calls.pull_calls import PullPlan
from weighbridge._clients.calls.steps import Steps
from weighbridge._core.file_names import ADAPTER_CONFIG
from weighbridge._core.metadata import BaseVersion
from weighbridge._core.text.counts import first_lines
from weighbridge._core.text.shortening import shown
from weighbridge._formats.peft_models import merged_layers, peft_model_in
from weighbridge.errors import FailedPrecondition, InvalidArgument, LayoutError

if TYPE_CHECKING:
    import torch

_TOLD_BY_TENSORS = frozenset(
    {
        *(
            "r",
            "rank_pattern",
            "target_modules",
            "exclude_modules",
            "target_parameters",
            "modules_to_save",
            "layers_to_transform",
            "layers_pattern",
        ),
        *("ensure_weight_tying", "peft_type", "use_dora"),
    }
)
"""Entries of a config that differ only if names or shapes of tensors differ, or that can describe the same model in
several ways.
"""
_OF_TRAINING = frozenset(
    {
        *(
            "base_model_name_or_path",
            "revision",
            "inference_mode",
            "auto_mapping",
            "peft_version",
            "task_type",
            "lora_dropout",
        ),
        *(
            "init_lora_weights",
            "init_weights",
            "loftq_config",
            "eva_config",
            "corda_config",
            "lora_ga_config",
            "runtime_config",
        ),
        *("megatron_config", "megatron_core", "qalora_group_size"),
    }
)
"""Entries that describe the origin and the initialization of an adapter, and do not affect its computation."""


def adapter_target(
    plan: PullPlan,
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    adapter_name: str,
) -> Steps[Mapping[str, torch.Tensor] | None]:
    """Return the tensors of a model that a pull of an adapter's version fills; None if the pull does not fill a module
    with an adapter.

    Args:
        plan: plan of the pull.
        target: the module or state dict to fill.
        adapter_name: name of the adapter in the model.

    Raises:
        FailedPrecondition: the module has no adapters, or with the version's config the same tensors compute a
            different result (names the entries).
        InvalidArgument: the model does not have an adapter with this name.
        LayoutError: the adapter is merged into the base weights, or peft keeps copies of its tensors.
    """
    import torch

    base = BaseVersion.of(plan.version.metadata)
    if base is None or not isinstance(target, torch.nn.Module):
        return None
    version = f"{plan.version.model}@{plan.version.number}"
    model = peft_model_in(target)
    if model is None:
        raise FailedPrecondition(
            f"{version} is an adapter on {base}, and a {type(target).__name__} has no adapters",
            fix="let peft add one to a model of that base: weighbridge.integrations.transformers.from_weighbridge, "
            "or get_peft_model with the version's adapter_config.json",
        )
    if adapter_name not in model.peft_config:
        raise InvalidArgument(
            f"the model has no adapter {adapter_name!r}",
            fix=f"name one that it has: {', '.join(map(repr, sorted(model.peft_config)))}",
        )
    if merged := merged_layers(model):
        raise LayoutError(
            f"adapters are merged into the base weights, and would be applied twice after {version} has arrived",
            details=first_lines(merged),
            fix="call model.unmerge_adapter() first",
        )
    files = yield from model_files(plan.version.model, plan.version.number)
    check_computes_alike(files, model.peft_config[adapter_name], version)
    return _tensors(model, adapter_name, frozenset(plan.layout.tensors))


def check_computes_alike(files: Mapping[str, bytes], config: Any, version: str) -> None:
    """Refuse a model's adapter that, with the same tensors, would compute a different result than the version's, for
    example because of another ``lora_alpha``.

    Args:
        files: files of the version other than its weights.
        config: peft's config of the model's adapter.
        version: name of the version in errors.

    Raises:
        FailedPrecondition: names each entry that differs.
    """
    there = json.loads(files[ADAPTER_CONFIG])
    known = type(config)().to_dict()  # defaults for entries that an older peft did not write
    own = config.to_dict()
    if there.get("peft_type") != own["peft_type"]:
        raise FailedPrecondition(
            (
                f"{version} is of the kind {shown(there.get('peft_type'))}, and the model's "
                f"adapter {shown(own['peft_type'])}"
            ),
            fix="give the model an adapter with the version's adapter_config.json",
        )
    names = sorted(known.keys() - _TOLD_BY_TENSORS - _OF_TRAINING)
    different = [
        (
            f"{name} is {shown(_plain(there.get(name, known.get(name))))} in the version and "
            f"{shown(_plain(own.get(name)))} in the model"
        )
        for name in names
        if _plain(there.get(name, known.get(name))) != _plain(own.get(name))
    ]
    if different:
        raise FailedPrecondition(
            f"with the tensors of {version} this adapter would compute something else than the version does",
            details=first_lines(different),
            fix=(
                "give the model an adapter with the version's adapter_config.json, as "
                "from_weighbridge and load_adapter of peft do"
            ),
        )


def _plain(value: Any) -> Any:
    """Return a value of a config as it is in JSON; None if it is empty."""
    if isinstance(value, set | frozenset):
        value = sorted(value)
    return None if value in ({}, [], "", False) else value


def _tensors(model: Any, adapter_name: str, wanted: frozenset[str]) -> Mapping[str, torch.Tensor]:
    """Return the adapter's tensors, which alias the model's. Embeddings, which peft saves if they have an adapter, are
    included only if they are ``wanted``.
    """
    from peft import get_peft_model_state_dict

    def named(embeddings: bool) -> Mapping[str, torch.Tensor]:
        found: Mapping[str, torch.Tensor] = get_peft_model_state_dict(
            model, adapter_name=adapter_name, save_embedding_layers=embeddings
        )
        return found

    own = named(embeddings=False)
    if not wanted - own.keys():
        return own
    return {
        **own,
        **{name: tensor for name, tensor in named(embeddings=True).items() if name in wanted},
    }
