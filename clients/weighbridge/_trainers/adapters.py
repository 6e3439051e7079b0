"""Adapters of one trainer's client. They are pushed from folders and from models in training, by peft's names, and
restored into such models.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from weighbridge._clients.adapter_filling import check_computes_alike
from weighbridge._clients.calls import model_calls, pull_calls
from weighbridge._clients.calls.known_layouts import KnownLayouts
from weighbridge._clients.connection import Connection
from weighbridge._clients.holding.agreement import RankAgreement
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.pushing import PushTerms
from weighbridge._core.file_names import ADAPTER_CONFIG
from weighbridge._core.layouts import TensorSpec, adapter_digest
from weighbridge._core.metadata import ADAPTER_DIGEST, BASE, BaseVersion, check_base
from weighbridge._core.references import Reference, parse_reference
from weighbridge._core.resources import Version
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.peft_models import merged_layers
from weighbridge._formats.torch_state import TorchShards, adapter_shards, check_not_copied, rank_and_world
from weighbridge._trainers import restoring
from weighbridge._trainers.adapter_restores import StoredAdapter, apart, fill_shared
from weighbridge._trainers.known_tensors import KnownTensors
from weighbridge._trainers.megatron_adapters import MegatronAdapters, PlacedAdapters, is_megatron
from weighbridge._trainers.peft_adapters import AdapterFolder, LoraParts, TrainedAdapters, wrapped_model
from weighbridge._trainers.pushes import PushCall, Pushes
from weighbridge.errors import InvalidArgument, LayoutError
from weighbridge.v1.model_service_pb2 import RegisterModelRequest


class AdapterPushes:
    """Pushes and restores adapters.

    Args:
        connection: connection of the client.
        known: cache of each model's tensors, and of the mapping from Megatron-core tensors to tensors of the base.
        pushes: object that performs the pushes.
    """

    def __init__(self, connection: Connection, known: KnownTensors, pushes: Pushes) -> None:
        self._connection = connection
        self._known = known
        self._pushes = pushes
        self._trained = TrainedAdapters()

    def push_folder(self, call: PushCall, folder: Path, base: str) -> PushHandle:
        """Push an adapter that peft's ``save_pretrained`` has written; see `TrainerClient.import_adapter`."""
        found = AdapterFolder.read(folder)
        check_base(base)
        tensors = found.layout.tensors.values()
        said = {BASE: base, ADAPTER_DIGEST: adapter_digest(found.config_json, tensors)}
        call.options["metadata"] = {**(call.options.get("metadata") or {}), **said}
        call.registration = _registration(call, base, found.config_json, tensors)
        return self._pushes.push_shards(call, found.layout, TensorSpace.HUGGING_FACE, found.shards)

    def push(self, call: PushCall, peft_model: Any, base: str, adapter_name: str, embeddings: bool | str) -> PushHandle:
        """Push an adapter of a model in training; see `TrainerClient.push_adapter`."""
        check_base(base)
        call.opening.metadata[BASE].text = base
        with self._pushes.on_terms(call), self._pushes.copying(call) as copies:
            with self._pushes.telling(call):
                shards = self._found(call, peft_model, base, adapter_name, embeddings)
                self._pushes.begin(call, copies, shards.layout, shards.tensors)
            call.handle = self._pushes.tensors(
                call, TensorSpace.HUGGING_FACE, shards.layout, shards.tensors, copies=copies
            )
            if is_megatron(peft_model):
                self._pushes.pusher.forget(call.terms)
        return call.handle

    def restore(
        self, meant: Reference, peft_model: Any, adapter_name: str, embeddings: bool | str, ranks: int | None
    ) -> Version:
        """Fill the adapter of a model; see `TrainerClient.restore_adapter`."""
        plan = self._connection.run(pull_calls.plan_pull(KnownLayouts(), meant.model, meant.version))
        number = plan.version.number
        files = self._connection.run(model_calls.model_files(meant.model, number))
        stored = StoredAdapter.of(f"{meant.model}@{number}", files, plan.layout.tensors)
        fill = partial(restoring.hugging_face_shards, self._connection, Reference.of(meant.model, number))
        if not is_megatron(peft_model):
            if merged := merged_layers(wrapped_model(peft_model)):
                raise LayoutError(
                    counted(len(merged), "layer has", "layers have") + " adapters that are merged into the weights",
                    details=first_lines(merged),
                    fix="call model.unmerge_adapter() first",
                )
            found = self._trained.read(peft_model, adapter_name, embeddings)
            shards = adapter_shards(found.state, found.forms, whole=False, of=stored.name, filled=True)
            stored.check_tensors(shards.layout.tensors)
            config = wrapped_model(peft_model).peft_config[adapter_name]
            check_computes_alike(files, config, stored.name)
            check_not_copied(wrapped_model(peft_model), shards.layout, shards.tensors)
            return fill(shards.layout, shards.tensors)
        _, ranks = rank_and_world(None, ranks)
        agreement = RankAgreement.of_process_group(meant.model, f"restore/{number}", ranks)
        terms = PushTerms(agreement=agreement)
        try:
            base = BaseVersion.of(plan.version.metadata)
            _, placed, parts = self._together(stored.name, terms, peft_model, str(base))
            stored.check_tensors(parts.tensors)
            stored.check_scales(placed.modules)
            filled = apart(placed.tensors)
            fill(placed.layout, filled)
            fill_shared(placed.layout, placed.tensors, filled)
        except Exception as error:
            if agreement is not None:
                agreement.refuse(error)
            raise
        return plan.version

    def _found(
        self, call: PushCall, peft_model: Any, base: str, adapter_name: str, embeddings: bool | str
    ) -> TorchShards | PlacedAdapters:
        """Return the shards of an adapter that this rank holds.

        Adds the adapter's registration and digest to the call.
        """
        shards: TorchShards | PlacedAdapters
        if is_megatron(peft_model):
            adapters, shards, parts = self._together(call.opening.model, call.terms, peft_model, base)
            if not parts.modules:
                raise InvalidArgument(
                    "the model has no LoRA adapters of Megatron-Bridge",
                    fix="push the model to which LoRA or CanonicalLoRA was applied",
                )
            adapters.check_frozen()
            on = parse_reference(base).model
            with self._known.of(on) as base_tensors:
                config_json, tensors = parts.config_json(on, base_tensors), parts.tensors
        else:
            found = self._trained.read(peft_model, adapter_name, embeddings)
            shards = adapter_shards(found.state, found.forms, whole=call.opening.ranks == 1, of=call.opening.model)
            config_json, tensors = found.config_json, shards.layout.tensors
        call.registration = _registration(call, base, config_json, tensors.values())
        call.opening.metadata[ADAPTER_DIGEST].text = adapter_digest(config_json, tensors.values())
        return shards

    def _together(
        self, model: str, terms: PushTerms, megatron_model: Any, base: str
    ) -> tuple[MegatronAdapters, PlacedAdapters, LoraParts]:
        """Return the adapters of a Megatron-core model; those of this rank by peft's names; and those of all ranks
        together, which the ranks exchange.
        """
        found = MegatronAdapters.of(megatron_model)
        placed = found.placed(self._known.links(base, found.beside.values()))
        own = LoraParts(placed.layout.tensors, placed.modules)
        said = self._pushes.pusher.meet(model, terms, own.encoded)
        return found, placed, LoraParts.together([LoraParts.decode(each) for each in said])


def _registration(call: PushCall, base: str, config_json: bytes, tensors: Iterable[TensorSpec]) -> RegisterModelRequest:
    """Return the request that registers the adapter of a call, if the adapter fits its base."""
    files = {ADAPTER_CONFIG: config_json}
    return model_calls.registration(call.opening.model, files, tensors=tensors, weight_map=False, base=base)
