"""Decisions on adapters: what an engine can serve, and on which base. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weighbridge._core.text.counts import counted

LORA_CONFIG = "adapter_config.json"
_CHANGES = (
    ("use_dora", "DoRA"),
    ("lora_bias", "biases of LoRA (lora_bias)"),
    ("alora_invocation_tokens", "activated LoRA (alora_invocation_tokens)"),
    ("layer_replication", "replicated layers (layer_replication)"),
    ("use_bdlora", "block-diagonal LoRA (use_bdlora)"),
    ("use_qalora", "QALoRA"),
    ("modules_to_save", "modules that are saved whole (modules_to_save)"),
    ("trainable_token_indices", "single trained tokens (trainable_token_indices)"),
    ("use_rslora", "rsLoRA"),
    ("rank_pattern", "ranks by pattern (rank_pattern)"),
    ("alpha_pattern", "alphas by pattern (alpha_pattern)"),
)
"""Config keys that change the computation, with descriptions."""
_NEVER = frozenset(key for key, _ in _CHANGES[:8])
"""Keys that no release of vLLM supports in a language model."""
_KEEPS_BASE = ("gaussian", "eva", "orthogonal", "mica", "lora_ga", "true", "false")
"""Initialisations of an adapter that do not change the base's weights."""
_PARTS = frozenset(("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"))


@dataclass(frozen=True)
class EngineState:
    """Properties of an engine on which adapters depend.

    Attributes:
        base: the version in its parameters, such as ``acme/smol@17``; empty if that is not known.
        created_ms: when that version was opened, as Unix time in milliseconds; 0 if not known.
        why: reason why the version is not known.
        modules: last name components of the modules that support LoRA.
        max_rank: greatest rank.
        known: config keys that this release of vLLM reads.
    """

    base: str = ""
    created_ms: int = 0
    why: str = ""
    modules: tuple[str, ...] = ()
    max_rank: int = 0
    known: tuple[str, ...] = ()

    @staticmethod
    def of(said: Mapping[str, Any]) -> EngineState:
        """A state from the fields that another process sent."""
        return EngineState(
            str(said["base"]), int(said["created_ms"]), str(said["why"]), tuple(said["modules"]), int(said["max_rank"]),
            tuple(said["known"]),
        )  # fmt: skip

    @property
    def can(self) -> str:
        """Description of the adapters that this engine supports."""
        return f"this engine supports LoRA and rsLoRA of rank up to {self.max_rank} on {', '.join(self.modules)}"


def config_problems(config: Mapping[str, Any], engine: EngineState) -> list[str]:
    """Reasons why an engine cannot serve an adapter with this config; empty if it can."""
    kind = str(config.get("peft_type", "LORA"))
    if kind.upper() != "LORA":
        return [f"it is an adapter of type {kind}, and vLLM supports only LoRA"]
    found = [
        f"it has {what}" + ("" if key in _NEVER else ", which this release of vLLM does not read")
        for key, what in _CHANGES
        if config.get(key) and (key in _NEVER or key not in engine.known)
    ]
    if config.get("bias", "none") != "none":
        found.append(f"it has biases (bias={config['bias']!r})")
    begun = config.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower() not in _KEEPS_BASE:
        found.append(f"it was initialised by {begun}, which changes the weights of the base")
    others = [each for each in config.get("target_parameters") or () if "experts" not in str(each)]
    if others:
        found.append(f"it changes parameters ({', '.join(map(str, others[:3]))}), not modules")
    ranks = [config.get("r"), *dict(config.get("rank_pattern") or {}).values()]
    wrong = [each for each in ranks if type(each) is not int or each < 1]
    if wrong:
        found.append(f"its rank is {wrong[0]!r}")
    elif max(ranks) > engine.max_rank:
        found.append(f"its rank is {max(ranks)}, above --max-lora-rank {engine.max_rank}")
    return found


def tensor_problems(names: Iterable[str], modules: Collection[str]) -> list[str]:
    """Reasons why an engine cannot serve an adapter with these tensors; empty if it can.

    Args:
        names: names of its tensors in peft.
        modules: last name components of the modules that support LoRA.
    """
    others, unfit = [], set()
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part in _PARTS), None)
        if at is None:
            others.append(name)
        elif "experts" not in parts and parts[at - 1] not in modules:
            unfit.add(parts[at - 1])
    found = []
    if others:
        found.append(f"{counted(len(others), 'tensor does', 'tensors do')} not belong to LoRA, such as {min(others)}")
    if unfit:
        found.append(f"this engine does not support LoRA on {', '.join(sorted(unfit))}")
    return found


def together(states: Sequence[EngineState]) -> EngineState:
    """Combined state of several engines behind one server, or of the workers of one engine: the values that are equal
    for all, and the union of their modules.
    """
    first = states[0]
    named = {each.base for each in states}
    modules = tuple(sorted({module for each in states for module in each.modules}))
    if len(named) > 1:
        said = " and ".join(sorted(each or "no known version" for each in named))
        return EngineState("", 0, f"its engines serve {said}", modules, first.max_rank, first.known)
    why = next((each.why for each in states if each.why), "")
    return EngineState(first.base, first.created_ms, why, modules, first.max_rank, first.known)


@dataclass(frozen=True)
class BaseNow:
    """A base version as currently stored in the service.

    Attributes:
        name: such as ``acme/smol@17``. In a different store, or in a store that was rolled back, a different version
            may have this name.
        created_ms: when it was opened, as Unix time in milliseconds; 0 if not known.
        digest: digest of its manifest; empty if not known.
    """

    name: str
    created_ms: int = 0
    digest: str = ""


def base_problem(name: str, base: str, engine: EngineState, now: BaseNow | None = None, digest: str = "") -> str:
    """Reason why an adapter must not be used on the base that an engine has; empty if it may be used.

    An engine knows when its version was opened; an adapter knows the digest of its base. The service knows both for the
    version that has this name now, so it can show whether they are the same version.

    Args:
        name: name of the adapter's version.
        base: its base version.
        engine: state of the engine.
        now: the version that has the base's name at the service now; None if not known.
        digest: digest of the base's manifest, as recorded in the adapter; empty if not known.
    """
    if not engine.base:
        return f"{name} is on {base}, and it is not known which version this engine serves: {engine.why}"
    if engine.base != base:
        return f"{name} is on {base}, and this engine serves {engine.base}"
    if now is None:
        return ""
    if now.created_ms and engine.created_ms and now.created_ms != engine.created_ms:
        return (
            f"{name} is on {base}, and this engine serves a different {base}, which was deleted: the number was reused"
        )
    if now.digest and digest and now.digest != digest:
        return (
            f"{name} is on {base} with the digest {digest[:12]}, and this engine serves a "
            f"different {base}, with the digest {now.digest[:12]}"
        )
    return ""
