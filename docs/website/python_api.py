"""Pages of the SDK's public names, which mkdocstrings fills from their docstrings without importing anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import weighbridge


@dataclass(frozen=True)
class Page:
    """One page of names.

    Attributes:
        title: its heading.
        about: what it is about.
        names: headings, and the names under each: full paths.
    """

    title: str
    about: str
    names: Mapping[str, Sequence[str]]

    def text(self) -> str:
        """The page, as Markdown that mkdocstrings reads."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from (f"# {self.title}", "", self.about)
        for heading, names in self.names.items():
            yield from ("", f"## {heading}")
            for name in names:
                yield from ("", f"::: {name}")


def _public(*names: str) -> tuple[str, ...]:
    return tuple(f"weighbridge.{name}" for name in names)


def _of(*modules: str) -> tuple[str, ...]:
    """Public names of the SDK by module, in the order of its names in each."""
    return _public(*(name for module in modules for name, of in weighbridge._MODULE_OF.items() if of == module))


PAGES: Mapping[str, Page] = {
    "clients": Page(
        "Clients",
        ("What trainers, engines and tools call. How it goes together: "
        "[trainers](../trainers.md), [pulling](../pulling.md), [asyncio](../asyncio.md)."),
        {
            "Trainers": _of("_trainers.trainer", "_clients.push_options", "_clients.push_handle"),
            "Engines": _of(
                "_clients.engine", "_reporting.reporter", "_clients.calls.pull_calls", "_clients.filling", "_formats.host_slices"
            ),
            "Asyncio": _of("aio.client", "aio.pulls"),
            "Training states": _of("_trainers.checkpoint_manager", "_trainers.states.random_states", "_trainers.training_files"),
            "Any client": _of("_clients.client", "_signing.signatures", "_clients.transport", "_transport.credentials"),
        },
    ),
    "values": Page(
        "Values",
        "What clients take and give: frozen dataclasses.",
        {
            "Models, versions, refs, and facts about them": _of("_core.resources", "_core.metadata"),
            "Layouts": _of("_core.boxes", "_core.dtypes", "_core.layouts", "_core.tensor_spaces", "_core.megatron_rank"),
            "What a pull asks for": _of("_core.slices"),
            "Sources of a push": _of("_formats.push_sources"),
            "Signatures": _of("_signing.checking", "_signing.signer", "_signing.steps", "_signing.trust"),
            "Collections": _of("_core.reports.collection"),
            "Engines that serve": _of("_core.engines.facts", "_core.engines.status", "_core.engines.golden"),
            "Limits": _of("_core.reports.usage"),
        },
    ),
    "errors": Page(
        "Errors", "Errors of the SDK, named by what the caller can do about them.", {"All errors": _of("errors")}
    ),
    "integrations": Page(
        "Integrations",
        ("Adapters to other libraries, none of which is imported unless it is used. Each has a "
        "page of its own that begins with the lines to type."),
        {
            "Megatron's save": _public("integrations.megatron_saving.push_on_save", "integrations.megatron_saving.PushOnSave"),
            "torch.distributed.checkpoint": _public(
                "integrations.torch.WeighbridgeWriter", "integrations.torch.WeighbridgeReader"
            ),
            "transformers": _public(
                "integrations.transformers.from_weighbridge", "integrations.transformers.tokenizer_from_weighbridge",
                "integrations.transformers.attach", "integrations.transformers.update", "integrations.transformers.LiveModel",
                "integrations.transformers.trainer_callback.PushCallback",
            ),
            "peft": _public("integrations.peft.merged_weights"),
            "vLLM": _public(
                "integrations.vllm.loader.WeighbridgeLoader", "integrations.vllm.transfer.WeighbridgeTransferEngine",
                "integrations.vllm.trainer.WeighbridgeTrainerInitInfo", "integrations.vllm.trainer.WeighbridgeTrainerEngine",
            ),
            "SGLang": _public("integrations.sglang.load", "integrations.sglang.connecting.Connector"),
            "verl": _public("integrations.verl.WeighbridgeCheckpointEngine", "integrations.verl.WeighbridgeManager"),
            "TRL": _public("integrations.trl.WeighbridgeTransfer"),
            "NeMo-RL": _public("integrations.nemo_rl.WeighbridgeCheckpointEngine"),
            "slime and Miles": _public("integrations.slime.init", "integrations.slime.WeighbridgeUpdater"),
            "AReaL": _public("integrations.areal.trainer.WeighbridgePPOTrainer"),
            "A framework of your own": _public(
                "integrations.weight_updates.WeightUpdate", "integrations.weight_updates.UpdateSender",
                "integrations.weight_updates.UpdateReceiver", "integrations.weight_updates.UpdateSettings",
            ),
            "An engine of your own": _public(
                "integrations.engine_rank.model.EngineModel", "integrations.engine_rank.rank.EngineRank",
                "integrations.engine_rank.source.ModelSource", "integrations.engine_rank.agreement.ProcessGroup",
            ),
        },
    ),
    "agents": Page(
        "Agents and relays",
        ("What `weighbridge follow` and `weighbridge relay` run: [engines](../engines.md), "
        "[prime-rl and other trainers that write folders](../prime-rl.md)."),
        {
            "Agents": _public("follow.agent.Follower", "follow.agent.Followed"),
            "Updates": _public("follow.updates.update", "follow.updates.Updated"),
            "Engines": _public(
                "follow.engines.EngineDriver", "follow.engines.PreparesEarly", "follow.engines.Prepared", "follow.engines.Serving", "follow.engines.EngineFailed",
                "follow.vllm.VllmServer", "follow.sglang.SglangServer",
            ),
            "Relays": _public("relay.incoming.Incoming", "relay.outgoing.Outgoing", "relay.relayed.Relayed"),
        },
    ),
}  # fmt: skip
"""Pages under reference/, by the names of their files."""
