"""Values of Megatron-core's optimizers other than tensors: parameter groups, step counts, gradient scales.

They are the same on all ranks. The number of optimizers depends on the parallelism: with expert parallelism experts
have their own optimizer, and without it they share the optimizer of the other parameters. Therefore values are stored
by group, and groups are matched by the properties by which Megatron itself forms groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weighbridge._core.text.counts import counted
from weighbridge._trainers.states.megatron_optimizer import RankOptimizer
from weighbridge.errors import FailedPrecondition, LayoutError

_STEP = "step"
_EXPERT = "is_expert_parallel"


class _Identity(NamedTuple):
    """Identity of a parameter group: the kind of its optimizer, the factors of its rates, and whether it belongs to
    experts.
    """

    kind: str
    rates: tuple[tuple[str, Any], ...]
    of_experts: bool

    def __str__(self) -> str:
        rates = ", ".join(f"{name}={value}" for name, value in self.rates)
        return f"a group with {rates}{' of experts' if self.of_experts else ''} of a {self.kind}"


def values_of(optimizers: Sequence[RankOptimizer]) -> dict[str, Any]:
    """Return the values of a rank's optimizers other than tensors, as plain data.

    A group without parameters on this rank does not count steps, so it gets the count of another group of the same
    kind.

    Raises:
        FailedPrecondition: parameters of one group have made different numbers of steps.
    """
    groups: list[dict[str, Any]] = [
        {
            "kind": optimizer.kind,
            "values": {name: value for name, value in group.items() if name != "params"},
            _STEP: _step(optimizer, group),
        }
        for optimizer in optimizers
        for group in optimizer.inner.param_groups
    ]
    for kind in {group["kind"] for group in groups}:
        alike = [group for group in groups if group["kind"] == kind]
        steps = [group[_STEP] for group in alike if group[_STEP] is not None]
        of_groups = [group["values"][_STEP] for group in alike if _STEP in group["values"]]
        for group in alike:
            if steps and group[_STEP] is None:
                group[_STEP] = steps[0]
            if of_groups:
                group["values"].setdefault(_STEP, of_groups[0])
    scalers = [each.grad_scaler.state_dict() for each in optimizers if each.grad_scaler]
    return {"groups": groups, "grad_scalers": scalers}


class FittedValues:
    """Stored values, each with the optimizer and the group to which it belongs.

    Args:
        optimizers: optimizers of this rank.
        kept: result of `values_of`.

    Raises:
        LayoutError: the optimizers are of other kinds, or have other groups.
    """

    def __init__(self, optimizers: Sequence[RankOptimizer], kept: Mapping[str, Any]) -> None:
        self._optimizers = optimizers
        self._scalers = kept["grad_scalers"]
        own = [(optimizer, group) for optimizer in optimizers for group in optimizer.inner.param_groups]
        found = _matched([_identity(optimizer.kind, group) for optimizer, group in own], kept["groups"])
        self._groups = [(*each, values) for each, values in zip(own, found, strict=True)]

    def give(self) -> None:
        """Set the values in the optimizers and groups."""
        import torch

        for optimizer, group, kept in self._groups:
            group.update({name: value for name, value in kept["values"].items() if name != _EXPERT})
            if kept[_STEP] is None:
                continue
            for parameter in group["params"]:
                # the device that torch uses
                device = parameter.device if group.get("capturable") or group.get("fused") else None
                optimizer.inner.state[parameter][_STEP] = torch.tensor(kept[_STEP], dtype=torch.float32, device=device)
        scaled = [optimizer for optimizer in self._optimizers if optimizer.grad_scaler]
        for index, optimizer in enumerate(scaled if self._scalers else ()):
            optimizer.grad_scaler.load_state_dict(self._scalers[min(index, len(self._scalers) - 1)])


def _step(optimizer: RankOptimizer, group: Mapping[str, Any]) -> float | None:
    """Return the number of steps that a group has made, if steps are counted by parameter."""
    states = [optimizer.inner.state.get(parameter, {}) for parameter in group["params"]]
    steps = {float(state[_STEP]) for state in states if _STEP in state}
    if len(steps) > 1:
        raise FailedPrecondition(
            f"parameters of one group of the {optimizer.kind} have made different numbers of steps: {sorted(steps)[:8]}"
        )
    return steps.pop() if steps else None


def _identity(kind: str, group: Mapping[str, Any]) -> _Identity:
    from megatron.core.optimizer.optimizer import param_group_identifier_keys as names

    # NeMo has other names for some of these
    rates = [(name, group.get(name, group.get(f"pre_{name}"))) for name in names if name != _EXPERT]
    return _Identity(kind, tuple(rates), bool(group.get(_EXPERT)))


def _matched(own: Sequence[_Identity], kept: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the stored group for each group."""
    # Megatron's own checkpoints do not contain kinds
    unknown = own[0].kind if own else ""
    there = [_identity(each["kind"] or unknown, each["values"]) for each in kept]
    if own == there:
        return list(kept)
    kinds = {each.kind for each in own} - {each.kind for each in there}
    if kinds:
        raise LayoutError(
            f"the optimizer is a {', '.join(sorted(kinds))}, but "
            + (
                f"the pushed state is that of a {', '.join(sorted({each.kind for each in there}))}"
                if there
                else "no state of an optimizer was pushed"
            ),
            fix="build the optimizer with the same settings as when it was pushed, or leave optimizer= out",
        )
    by_identity = dict(zip(there, kept, strict=True))
    # expert parallelism splits one group into two, and one of them belongs to the experts
    by_rates = {each._replace(of_experts=False): values for each, values in by_identity.items()}
    by_rates |= {each: values for each, values in by_identity.items() if not each.of_experts}
    found = [by_identity.get(each, by_rates.get(each._replace(of_experts=False))) for each in own]
    missing = [str(each) for each, values in zip(own, found, strict=True) if values is None]
    if missing:
        raise LayoutError(
            f"the push did not have {counted(len(missing), 'parameter group')} of the optimizer",
            details=missing,
            fix="build the optimizer with the same settings as when it was pushed",
        )
    return [values for values in found if values is not None]
