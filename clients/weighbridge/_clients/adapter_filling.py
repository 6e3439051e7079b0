"""Adapter of a model that peft has wrapped, as what a pull of an adapter's version fills: its tensors, by the names that peft's files have."""

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
        *("r", "rank_pattern", "target_modules", "exclude_modules", "target_parameters", "modules_to_save", "layers_to_transform", "layers_pattern"),
        *("ensure_weight_tying", "peft_type", "use_dora"),
    }
)  # fmt: skip
"""Entries of a config that differ only if names or shapes of tensors do, or that say the same of a model in several ways."""
_OF_TRAINING = frozenset(
    {
        *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "task_type", "lora_dropout"),
        *("init_lora_weights", "init_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("megatron_config", "megatron_core", "qalora_group_size"),
    }
)  # fmt: skip
"""Entries that say where an adapter comes from and how it was begun, and not what it computes."""


def adapter_target(
    plan: PullPlan,
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    adapter_name: str,
) -> Steps[Mapping[str, torch.Tensor] | None]:
    """The tensors of a model that a pull of an adapter's version fills; None where the pull is not one of an adapter into a module.

    Args:
        plan: of the pull.
        target: what is to be filled.
        adapter_name: which adapter of the model.

    Raises:
        FailedPrecondition: the module has no adapters, or the version's config lets its adapter compute otherwise with the same tensors; names the entries.
        InvalidArgument: it has no adapter of this name.
        LayoutError: the adapter is merged into the weights below, or peft keeps copies of its tensors.
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
            f"adapters are merged into the weights below, and would be there twice after {version} has come",
            details=first_lines(merged),
            fix="call model.unmerge_adapter() before",
        )
    files = yield from model_files(plan.version.model, plan.version.number)
    check_computes_alike(files, model.peft_config[adapter_name], version)
    return _tensors(model, adapter_name, frozenset(plan.layout.tensors))


def check_computes_alike(files: Mapping[str, bytes], config: Any, version: str) -> None:
    """Refuse a model's adapter that would compute otherwise than a version's with the same tensors, as with another ``lora_alpha``.

    Args:
        files: of the version, besides its weights.
        config: the model's, of peft.
        version: what errors call the version.

    Raises:
        FailedPrecondition: names each entry that differs.
    """
    there = json.loads(files[ADAPTER_CONFIG])
    known = type(config)().to_dict()  # what an older peft did not write
    own = config.to_dict()
    if there.get("peft_type") != own["peft_type"]:
        raise FailedPrecondition(
            f"{version} is of the kind {shown(there.get('peft_type'))}, and the model's adapter {shown(own['peft_type'])}",
            fix="give the model an adapter with the version's adapter_config.json",
        )
    names = sorted(known.keys() - _TOLD_BY_TENSORS - _OF_TRAINING)
    different = [
        f"{name} is {shown(_plain(there.get(name, known.get(name))))} in the version and {shown(_plain(own.get(name)))} in the model"
        for name in names
        if _plain(there.get(name, known.get(name))) != _plain(own.get(name))
    ]
    if different:
        raise FailedPrecondition(
            f"with the tensors of {version} this adapter would compute something else than the version does",
            details=first_lines(different),
            fix="give the model an adapter with the version's adapter_config.json, as from_weighbridge and load_adapter of peft do",
        )


def _plain(value: Any) -> Any:
    """A value of a config as JSON has it; what is empty is nothing."""
    if isinstance(value, set | frozenset):
        value = sorted(value)
    return None if value in ({}, [], "", False) else value


def _tensors(model: Any, adapter_name: str, wanted: frozenset[str]) -> Mapping[str, torch.Tensor]:
    """The adapter's tensors, which alias the model's; of embeddings, which peft saves with an adapter of theirs, those that are ``wanted``."""
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
