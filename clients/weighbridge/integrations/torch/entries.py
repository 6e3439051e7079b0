"""Maps entries of a state dict that `torch.distributed.checkpoint` has flattened to the model's tensors."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._core.text.suggestions import did_you_mean
from weighbridge._formats.dtensors import local_shards, local_tensor
from weighbridge._formats.memory_forms import Form, FormPart, TensorForms
from weighbridge._formats.misfits import common_prefix
from weighbridge._formats.naming.parameter_names import check_merged
from weighbridge._formats.torch_state import (
    NAMED,
    memory_of,
    mismatch,
    model_form,
)
from weighbridge.errors import LayoutError

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
"""Names of transformers' input embeddings, of which a tied ``lm_head.weight`` is a copy."""


@dataclass(frozen=True)
class Entries:
    """Names of a state dict's entries.

    Attributes:
        model: the model's tensors, by name.
        prefix: possible prefix of the model's entries, such as ``model.`` in ``{"model": ..., "optimizer": ...}``.
    """

    model: TensorForms
    prefix: str

    def form(self, entry: str) -> Form | None:
        """Shape and dtype of the model's tensor for an entry; None if the entry does not belong to the model."""
        found = model_form(entry, self.model)
        return model_form(entry.removeprefix(self.prefix), self.model) if found is None else found

    def tied(self, entry: str) -> Form | None:
        """The tensor of which an entry may be a tied copy: the input embeddings, if the model has no separate head."""
        is_head = entry == _HEAD or entry.endswith(f".{_HEAD}")
        return self._embeddings if is_head else None

    def is_about_weights(self, entry: str) -> bool:
        """Whether an entry's name contains a tensor's name, as in an optimizer's ``state.<name>.exp_avg``."""
        parts = entry.split(".")
        spans = itertools.combinations(range(len(parts) + 1), 2)
        return any(".".join(parts[start:stop]) in self.model for start, stop in spans)

    @cached_property
    def _embeddings(self) -> Form | None:
        if any(name.endswith(_HEAD) for name in self.model):
            return None
        found = [name for name in self.model if name.endswith(_EMBEDDINGS)]
        return self.model.form(found[0]) if len(found) == 1 else None


@dataclass(frozen=True)
class PlannedShards:
    """The model's shards that a rank will write.

    Attributes:
        layout: the shards as one stream.
        sources: for each shard, the item of the plan and the part of it.
        copies: additional entries that must be tied copies of the model's tensors.
    """

    layout: Layout
    sources: tuple[tuple[WriteItem, FormPart], ...]
    copies: tuple[str, ...]


def planned_shards(items: Iterable[WriteItem], entries: Entries, cast: str) -> PlannedShards:
    """Find the model's shards among the items that a rank will write.

    Args:
        items: items of a save plan.
        entries: names of the model's tensors.
        cast: as for `weighbridge.TrainerClient.push_state_dict`.

    Raises:
        LayoutError: shapes or dtypes contradict the model, some entries do not belong to it, or LoRA adapters are not
            merged; names all of these.
    """
    items = list(items)
    check_merged(
        [item.index.fqn for item in items],
        "save what is merged: dict(weighbridge.integrations.peft.merged_weights(model)): docs/recipes/lora.md",
    )
    found: list[tuple[WriteItem, FormPart]] = []
    copies: list[str] = []
    problems: dict[str, None] = {}
    others: defaultdict[str, list[str]] = defaultdict(list)
    for item in items:
        entry, data = item.index.fqn, item.tensor_data
        form = entries.form(entry)
        if form is not None and data is not None:
            problem = mismatch(form, data.size, data.properties.dtype, cast)
            if problem is not None:
                problems[problem] = None
            elif 0 not in data.chunk.sizes:
                box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
                found += [(item, part) for part in form.parts(box, swapped=form.is_swapped(data.size))]
        elif entry.endswith("inv_freq"):
            continue
        elif entries.tied(entry) is not None:
            copies.append(entry)
        elif data is None or entries.is_about_weights(entry) or not entry.startswith(entries.prefix):
            others[entry.split(".")[0]].append(entry)
        else:
            nearest = did_you_mean(entry.removeprefix(entries.prefix), entries.model) if len(problems) < NAMED else ""
            problems[f"{entry}: the model has no such tensor{nearest}"] = None
    problems.update(dict.fromkeys(_foreign(of_root) for of_root in others.values()))
    if problems:
        prefix = None if found else common_prefix([item.index.fqn for item in items], entries.model)
        if prefix is not None:
            raise LayoutError(
                (
                    f"the entries of the state dict that are the model's begin with {prefix!r}, "
                    f"not with {entries.prefix!r}"
                ),
                fix=f"WeighbridgeWriter(..., prefix={prefix!r})",
            )
        raise LayoutError(
            f"the tensors differ from those of the model in {counted(len(problems), 'entry', 'entries')}",
            details=first_lines(problems),
            fix="keep only the model here, and save optimizers and other state with another writer: "
            "dcp.save({'optimizer': ...}, checkpoint_id=folder)"
            if others
            else "pass exactly the tensors of the model's safetensors files, with the same names and shapes",
        )
    specs = [entries.model[name] for name in dict.fromkeys(part.tensor for _, part in found)]
    layout = Layout.stream(specs, [Shard(part.tensor, part.box) for _, part in found])
    return PlannedShards(layout, tuple(found), tuple(copies))


def check_none_absent(names: Iterable[str], entries: Entries) -> None:
    """Refuse a save in which no rank writes any part of a tensor that has elements.

    Args:
        names: names of the ranks' entries.
        entries: names of the model's tensors.

    Raises:
        LayoutError: names each such tensor.
    """
    forms = (entries.form(name) for name in dict.fromkeys(names))
    there = {tensor for form in forms if form is not None for tensor in form.tensors}
    absent = [spec for name, spec in entries.model.items() if name not in there and spec.nbytes]
    if absent:
        raise LayoutError(
            (
                "the ranks together do not hold all of the model: "
                f"{counted(len(absent), 'tensor is', 'tensors are')} missing"
            ),
            details=first_lines(f"{spec} is missing" for spec in absent),
            fix="save all tensors that the model's safetensors files hold, by the same names",
        )


def _foreign(entries: list[str]) -> str:
    more = f" and {len(entries) - 1} more like it" if len(entries) > 1 else ""
    return f"{entries[0]}{more}: not the model's"


def planned_state(planner: Any) -> Mapping[str, Any]:
    """Entries that a planner saves or loads, if it is built like DCP's own; empty for any other planner."""
    state = getattr(planner, "state_dict", None)
    return state if isinstance(state, Mapping) else {}


def check_one_box(planner: Any, entry: str) -> None:
    """Refuse a DTensor whose shard consists of several boxes, because DCP can express only one.

    Raises:
        LayoutError: the shard consists of several boxes.
    """
    value = planned_state(planner).get(entry)
    if isinstance(value, torch.Tensor) and len(local_shards(value)) > 1:
        raise LayoutError(
            (
                f"{entry}: this rank's shard lies in several places of the tensor, and "
                "torch.distributed.checkpoint knows only one"
            ),
            fix="use push_state_dict and restore_state_dict, or sizes that the ranks share evenly",
        )


def untied(planner: Any, copies: Iterable[str], entries: Entries, *, by_content: bool = False) -> list[str]:
    """Entries that do not share memory with one of the model's tensors.

    Args:
        planner: a planner that is built like DCP's own.
        copies: entries that may be tied.
        entries: names of the model's tensors.
        by_content: whether equal elements suffice, because staging for ``async_save`` may have copied tied tensors
            separately.
    """
    state = planned_state(planner)
    known = {
        memory_of(value): value
        for entry, value in state.items()
        if isinstance(value, torch.Tensor) and entries.form(entry) is not None
    }

    def is_tied(entry: str) -> bool:
        value = state.get(entry)
        if not isinstance(value, torch.Tensor):
            return False
        return memory_of(value) in known or (
            by_content and any(_same_elements(value, other) for other in known.values())
        )

    return [entry for entry in copies if not is_tied(entry)]


def _same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    ours, theirs = local_tensor(one), local_tensor(other)
    return ours.shape == theirs.shape and torch.equal(ours, theirs)
