"""Training state of a torch module and its optimizers: FSDP2, HSDP, tensor parallelism, DDP, DeepSpeed's ZeRO, or one
process.

Names are those of ``torch.distributed.checkpoint.state_dict``: ``model.<name>`` for ``get_model_state_dict``,
``optimizer.state.<name>.exp_avg`` for ``get_optimizer_state_dict``. If tensors are tied and so share memory, only the
first one is stored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats import peft_models, zero3
from weighbridge._formats.naming.parameter_names import unwrapped_name
from weighbridge._formats.torch_state import check_not_copied
from weighbridge._trainers.states.boxed_tensors import BoxedTensors, place, taken_twice
from weighbridge._trainers.states.torch_optimizers import NamedOptimizers, OptimizerFit
from weighbridge._trainers.states.training_state import Filling, RankRestore, StoredState, TrainingTensors
from weighbridge._trainers.states.zero_optimizers import ZeroOptimizer, is_zero
from weighbridge.errors import InvalidArgument, LayoutError

if TYPE_CHECKING:
    import torch

_MODEL, _OPTIMIZER = "model.", "optimizer."
_ADAPTERS = "adapters"
_SPACE = TensorSpace.HUGGING_FACE


def training_tensors(module: object, optimizers: object | None) -> TrainingTensors:
    """Return the tensors of a module and its optimizers that this rank holds.

    Args:
        module: a torch module. Its tensors may be DTensors of any mesh, or plain tensors, which every rank holds whole.
            They may be on any device.
        optimizers: one optimizer, several, or None.

    Raises:
        InvalidArgument: the module is not a torch module, or an optimizer is not a torch optimizer.
        LayoutError: optimizers have parameters that the module does not have, tensors cannot be stored, or adapters are
            merged into weights (names each).
    """
    root = _root(module)
    peft_models.check_apart(root)
    boxed = BoxedTensors()
    others: dict[str, Any] = {}
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, value in _entries(root):
        if not _is_tensor(name, value):
            others[name] = value
        elif (kept := first.setdefault(place(value), name)) == name:
            boxed.take(_MODEL + name, value)
        else:
            tied[name] = kept
    values: dict[str, Any] = {"model": others, "tied": tied}
    if adapters := peft_models.adapter_names(root):
        values[_ADAPTERS] = adapters
    if optimizers is not None:
        named = _named(root, optimizers)
        named.take_into(boxed, _OPTIMIZER)
        values["optimizer"] = named.values()
    if boxed.problems:
        raise LayoutError(
            f"{counted(len(boxed.problems), 'entry', 'entries')} of the training state cannot be stored",
            details=first_lines(boxed.problems),
        )
    return TrainingTensors(boxed.layout, tuple(boxed.tensors), values, _SPACE)


class TorchRestore(RankRestore):
    """Restore of a module and its optimizers.

    Args:
        module, optimizers: see `training_tensors`; filled in place.
        strict: whether both must have the same tensors and parameters. If False, tensors and parameters that only one
            of them has are unchanged.

    Raises:
        InvalidArgument, LayoutError: see `training_tensors`.
    """

    def __init__(self, module: object, optimizers: object | None, *, strict: bool = True) -> None:
        self._module = _root(module)
        self._optimizers = None if optimizers is None else _named(self._module, optimizers)
        self._strict = strict

    def fit(self, stored: StoredState) -> Filling:
        """See `RankRestore.fit`."""
        module, optimizers, strict = self._module, self._optimizers, self._strict
        _check_adapters(module, stored)
        tensors = {name: spec for name, spec in stored.tensors.items() if name.startswith(_MODEL)}
        boxed = BoxedTensors()
        problems: list[str] = []
        own: dict[str, torch.Tensor] = {}
        others: dict[str, Any] = {}
        kept = stored.values.get("model", {})
        for name, value in _entries(module):
            if _is_tensor(name, value):
                if place(own.setdefault(_MODEL + name, value)) != place(value):
                    problems.append(taken_twice(_MODEL + name))
            elif name in kept:
                others[name] = kept[name]
            elif strict:
                problems.append(f"{_MODEL}{name} is missing from the version")
        filled = {place(value) for name, value in own.items() if name in tensors}
        for name, value in own.items():
            spec = tensors.get(name)
            if spec is not None:
                found = boxed.take(name, value, filled=True)
                if found not in (spec, None):
                    problems.append(f"{found} of the module is {spec.dtype}{list(spec.shape)} in the version")
            elif strict and place(value) not in filled:
                problems.append(f"{name} is missing from the version")
        check_not_copied(module, boxed.layout, boxed.tensors)
        if strict:
            problems += [f"the module has no {spec}" for name, spec in tensors.items() if name not in own]
        fit: OptimizerFit | None = None
        if optimizers is not None:
            values = stored.values.get("optimizer")
            if values is None:
                raise LayoutError(
                    f"{stored.name} has no optimizer state",
                    fix="leave optimizer= out, or restore a version that was pushed with an optimizer",
                )
            begin = len(_OPTIMIZER)
            states = {name[begin:]: spec for name, spec in stored.tensors.items() if name.startswith(_OPTIMIZER)}
            fit = optimizers.fit(states, values, strict=strict)
            for part in fit.parts:
                boxed.add(part.spec, part.held)
            for name, value in fit.tensors.items():
                boxed.take(name, value)
            problems += fit.problems
        problems += boxed.problems
        if problems:
            raise LayoutError(
                (
                    f"{stored.name} is the training state of a different model or optimizer: "
                    f"{counted(len(problems), 'entry differs', 'entries differ')}"
                ),
                details=first_lines(problems),
                fix=(
                    "build module and optimizer as they were when it was pushed, on any number of "
                    "ranks; strict=False fills what both have"
                ),
            )
        return _TorchFilling(boxed.layout, tuple(boxed.tensors), module, others, fit)


@dataclass(frozen=True)
class _TorchFilling(Filling):
    """Filling of a module and its optimizers.

    Attributes:
        module: the module.
        others: stored values of its state dict that are not tensors.
        fit: fit of the optimizers; None if none are restored.
    """

    module: torch.nn.Module
    others: Mapping[str, Any]
    fit: OptimizerFit | None

    def finish(self) -> None:
        """See `Filling.finish`."""
        if self.others:
            self.module.load_state_dict(self.others, strict=False)
        if self.fit is not None:
            self.fit.finish()


def _check_adapters(module: torch.nn.Module, stored: StoredState) -> None:
    """Refuse a module whose adapters differ from those in the state, or are merged into its weights. The state contains
    adapters separately from the weights.

    Raises:
        LayoutError: the adapters differ, or are merged.
    """
    has, kept = peft_models.adapter_names(module), stored.values.get(_ADAPTERS)
    there = any("base_layer" in name.split(".") for name in stored.tensors)
    if there and not has:
        raise LayoutError(
            f"{stored.name} is the state of a model with adapters of peft, and the module has none",
            fix="wrap the module with get_peft_model and the same LoraConfig first; or restore "
            "only the merged weights: restore_state_dict(model, module) "
            "without optimizer= and state=",
        )
    if has and not there:
        raise LayoutError(
            f"{stored.name} is the state of a model without adapters, and the module has {_quoted(has)}",
            fix="restore before get_peft_model adds them, and start with a new optimizer",
        )
    if kept is not None and list(kept) != has:
        raise LayoutError(
            f"{stored.name} has the adapters {_quoted(kept)}, and the module has {_quoted(has)}",
            fix="give the module's adapters the same names: get_peft_model(..., adapter_name=...)",
        )
    peft_models.check_apart(module)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _root(given: object) -> torch.nn.Module:
    """Return the module inside DDP and torch.compile.

    Raises InvalidArgument if its state does not have the form of torch's own optimizers.
    """
    import torch

    if not isinstance(given, torch.nn.Module):
        raise InvalidArgument(
            f"a {type(given).__name__} has no optimizer state",
            fix="give the module itself with optimizer=, state= or rank_state=, not a state dict",
        )
    module, inner = given, _wrapped(given)
    while inner is not None:
        module, inner = inner, _wrapped(inner)
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if any(isinstance(each, fsdp) for each in module.modules()):
        raise InvalidArgument(
            "the training state of FullyShardedDataParallel (FSDP1) is not supported",
            fix="use fully_shard (FSDP2)",
        )
    return module


def _named(module: torch.nn.Module, optimizers: object) -> NamedOptimizers | ZeroOptimizer:
    """Return optimizers by the names of their parameters."""
    if is_zero(optimizers):
        return ZeroOptimizer(optimizers, _parameter_names(module))
    if any(zero3.is_partitioned(parameter) for parameter in module.parameters()):
        raise InvalidArgument(
            f"a {type(optimizers).__name__} does not have the state of a module that ZeRO-3 has partitioned",
            fix="give the optimizer of DeepSpeed: optimizer=engine.optimizer",
        )
    return NamedOptimizers.of(optimizers, _parameter_names(module))


def _wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that DDP, torch.compile or DeepSpeed has wrapped. Wrappers are recognised by type, because any
    module may have a child named ``module``.
    """
    import torch

    # class of compiled modules; it exists only if something was compiled
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", ())
    if isinstance(module, (torch.nn.parallel.DistributedDataParallel, engine)):
        inner = module.module
    elif isinstance(module, compiled):
        inner = module._orig_mod
    else:
        return None
    return inner if isinstance(inner, torch.nn.Module) else None


def _entries(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in (zero3.partitioned_state(module) or module.state_dict()).items():
        yield unwrapped_name(name), value


def _parameter_names(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: unwrapped_name(name) for name, parameter in module.named_parameters()}


def _is_tensor(name: str, value: Any) -> bool:
    """Whether an entry of a state dict is a tensor of the model. The extra state of a module is not, because each
    module and rank may define its own.
    """
    import torch

    return isinstance(value, torch.Tensor) and name.rpartition(".")[2] != "_extra_state"
