"""Mapping of a version's tensors to a model's parameters, as transformers itself defines it.

`from_pretrained` accepts a state dict; here it receives lazy tensors. Transformers renames them, slices them for tensor
parallelism, stacks them (experts, since transformers 5) and casts them. The results are the model's parameters, still
lazy. This module contains no model-specific rules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from weighbridge._core.layouts import TensorSpec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._lazy import Recording, record
from weighbridge._lazy.joined import Storageless
from weighbridge.errors import FailedPrecondition

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Recipe:
    """Recipe from which transformers builds a model.

    Attributes:
        model_class: a class of models, not an auto class.
        config: the model's configuration.
        strict: whether the model's parameters and the version's tensors must match exactly.
        options: further arguments of ``from_pretrained``.
    """

    model_class: Any
    config: PretrainedConfig
    strict: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, tensors: Mapping[str, torch.Tensor]) -> tuple[PreTrainedModel, set[str]]:
        """A model whose parameters are parts of these lazy tensors, and the names of the parameters that receive
        nothing.

        Raises:
            FailedPrecondition: the tensors do not fit the configuration; names them.
        """
        try:
            with _without_progress_bars():
                model, found = self.model_class.from_pretrained(
                    None,
                    config=copy.deepcopy(self.config),
                    state_dict=dict(tensors),
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # it would not name them
                    **self.options,
                )
        except RuntimeError as error:
            raise FailedPrecondition(
                f"transformers cannot create a {self.model_class.__name__} from these tensors: {error}",
                fix="look at its log; a tensor may be missing",
            ) from error
        self._check(model, tensors, found)
        return model, set(found["missing_keys"])

    def _check(self, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], found: Mapping[str, Any]) -> None:
        name = self.model_class.__name__
        if found["mismatched_keys"]:
            # transformers 5 gives each with its shapes
            keys = sorted(key if isinstance(key, str) else key[0] for key in found["mismatched_keys"])
            held = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
            shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
            raise FailedPrecondition(
                f"the version does not fit the configuration of this {name}",
                details=first_lines(
                    f"{key} is {held.get(key)} in the model"
                    + (f", {shapes[key]} in the version" if key in shapes else "")
                    for key in keys
                ),
                fix="compare vocabulary, experts and sizes in the model's config with the version's config.json",
            )
        if self.strict and found["missing_keys"]:
            raise FailedPrecondition(
                f"the version has nothing for {counted(len(found['missing_keys']), 'parameter')} of this {name}",
                details=first_lines(sorted(found["missing_keys"])),
                fix="check its configuration; strict=False leaves them as transformers initialises them",
            )
        if self.strict and found["unexpected_keys"]:
            raise FailedPrecondition(
                f"this {name} has no place for {counted(len(found['unexpected_keys']), 'tensor')} of the version",
                details=first_lines(sorted(found["unexpected_keys"])),
                fix="check its configuration; strict=False leaves them out",
            )

    def record(self, specs: Iterable[TensorSpec], weights: Mapping[str, torch.Tensor]) -> Recording:
        """Record which slices this model needs of any version with these tensors. Fetches no bytes.

        Args:
            specs: the version's tensors.
            weights: weights of the model that is filled, as `weights_of` returns them.
        """
        targets = {
            name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for name, t in weights.items()
        }

        def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
            built = weights_of(self.build(dict(tensors))[0])
            for name, target in targets.items():
                target.copy_(built[name])

        return record(specs, load, targets)


def concrete_class(model_class: Any, config: PretrainedConfig, **options: Any) -> Any:
    """Class of models that an auto class resolves to; for None, the class that the configuration names."""
    import transformers

    if model_class is None:
        found = [getattr(transformers, name, None) for name in config.architectures or ()]
        model_class = found[0] if found and found[0] is not None else transformers.AutoModelForCausalLM
    if not hasattr(model_class, "from_config"):
        return model_class
    with torch.device("meta"):  # the public way to resolve an auto class
        return type(model_class.from_config(copy.deepcopy(config), **options))


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's parameters and persistent buffers, by name.

    Tensors that share memory appear once, under their first name. Distributed tensors are replaced by this rank's part.
    """
    kept = model.state_dict().keys()
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        return {name: _local(tensor) for name, tensor in found.items() if name in kept}


def materialise(model: PreTrainedModel, device: torch.device | None) -> None:
    """Allocate parameters and buffers that have no memory yet, and move the model to a device.

    Args:
        model: a model from `Recipe.build`; the new memory is uninitialised.
        device: None uses the device that transformers chose for each.
    """
    made: dict[int, torch.Tensor] = {}
    for module in list(model.modules()):
        own = [*module._parameters.items(), *module._buffers.items()]
        for name, tensor in own:
            if tensor is not None and isinstance(_local(tensor), Storageless):
                if id(tensor) not in made:
                    made[id(tensor)] = _with_memory(tensor, device)
                setattr(module, name, made[id(tensor)])
    if device is not None:
        model.to(device)


def _with_memory(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    local = _local(tensor)
    # dense, as transformers creates them, regardless of the layout of the lazy tensor
    found = torch.empty(local.shape, dtype=local.dtype, device=device or local.device)
    if local is not tensor:
        from torch.distributed.tensor import DTensor

        whole = cast(DTensor, tensor)  # as it has a local part
        found = DTensor.from_local(
            found, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )  # fmt: skip
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(found, requires_grad=tensor.requires_grad)
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)  # a DTensor has it
    return tensor if to_local is None else to_local()


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # nothing is loaded yet
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
