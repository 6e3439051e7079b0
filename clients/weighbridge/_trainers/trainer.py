"""Client of a trainer rank: pushes the shards it holds; folders, and restores, are its bases'."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from weighbridge._clients.adapter_filling import check_computes_alike
from weighbridge._clients.calls import pull_calls
from weighbridge._clients.calls.known_layouts import KnownLayouts
from weighbridge._clients.holding.agreement import RankAgreement
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options, say
from weighbridge._clients.pushing import PushTerms
from weighbridge._core.layouts import TensorSpec, adapter_digest
from weighbridge._core.metadata import ADAPTER_DIGEST, BASE, BaseVersion, check_base
from weighbridge._core.references import Reference, parse_reference
from weighbridge._core.resources import REF_LATEST, Version
from weighbridge._core.slices import FullTensors
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._trainers.importer import ImportingClient, adapter_registration
from weighbridge.errors import InvalidArgument, LayoutError
from weighbridge.v1.model_service_pb2 import RegisterModelRequest

if TYPE_CHECKING:
    import torch

    from weighbridge._formats.megatron_state import WeightShards
    from weighbridge._trainers.megatron_adapters import PlacedAdapters

__all__ = ["TrainerClient"]


class TrainerClient(ImportingClient):
    """The trainer's side of the service; one for each rank.

    Args:
        server: ``host:port`` of the gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        run: name of the training run, the same on all ranks; part of the version's lineage.
        ahead_bytes: host memory for the copies of a push with a training state, page-locked if they are of a GPU. So many bytes are copied to
            it while the service is asked where they go, and delivered from there behind the caller. Larger pushes are copied when that is known. Each of two
            pushes that are on their way takes as much.
        options: as for `Client`.
    """

    def push(
        self,
        model: str,
        sharded_state_dict: Any,
        *,
        step: int,
        rank: int | None = None,
        world_size: int | None = None,
        run: str | None = None,
        request_id: str | None = None,
        cast: str = "allow",
        optimizer: Any = None,
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
        until: Any = None,
        **options: Unpack[PushOptions],
    ) -> PushHandle:
        """Hand over this rank's shards as a new version. All ranks call it with the same step.

        Returns once the shards are copied out: training may go on and change them. The bytes travel behind it. Of
        shards that several ranks hold, each is pushed by one of them. The first push waits until all ranks have come.

        With ``optimizer``, ``state`` or ``rank_state`` a training state is pushed behind the weights, as by `push_state_dict`: all that `restore`
        needs to go on from here, by the keys of Megatron's own checkpoints. Ranks do not communicate: of what the distributed optimizer has shared
        out, each pushes its ranges.

        Args:
            model: ``namespace/name``, registered before.
            sharded_state_dict: what Megatron-core's ``model.sharded_state_dict()`` returns.
            step: the training step.
            rank: this rank, from 0; by default torch.distributed's, or 0.
            world_size: number of ranks that push; by default torch.distributed's, or 1.
            run: overrides the client's.
            request_id: what makes the ranks of one push find each other; by default run and step.
            cast: as for `push_state_dict`: Megatron-core keeps some tensors in float32 beside bf16, such as norms or routers, if so configured.
            optimizer: what ``get_megatron_optimizer`` returned, after its first step: `FP32Optimizer`, `Float16OptimizerWithFloat16Params` or
                `DistributedOptimizer`, chained or not.
            state, rank_state, until: as for `push_state_dict`.
            options: metadata, whether the version is held, and what the push may cost the loop: `PushOptions`. Where torch.distributed has
                as many ranks as push, they agree by its store before anything is copied: all of them push, or none.

        Returns:
            The push of the weights. Its ``training`` is the one of the training state.

        Raises:
            NotFound: the model is not registered.
            InvalidArgument: the optimizer is none of these, values are not plain data (names the entry), or ``until`` names no optimizer.
            FailedPrecondition: the optimizer has made no step.
            LayoutError: shapes, dtypes or names contradict the model, or the ranks together do not hold all of it.
            AlreadyExists: another process pushes as this rank of this step.
        """
        check_options(options)
        from weighbridge._formats.torch_state import check_cast, rank_and_world
        from weighbridge._trainers.states.megatron_training import training_tensors

        check_cast(cast)
        rank, world_size = rank_and_world(rank, world_size)
        opening = self._opening(model, step, run, world_size, request_id)
        find = partial(self._weight_shards, model, sharded_state_dict, cast)
        with self._on_terms(opening, options) as call:
            call.handle = self._push_tensors(
                opening, rank, TensorSpace.MEGATRON, find, lambda shards: training_tensors(shards.held, optimizer), options,
                call.terms, until=until, optimizer=optimizer, state=state, rank_state=rank_state,
            )  # fmt: skip
        return call.handle

    def push_state_dict(
        self,
        model: str,
        state_dict_or_module: Any,
        *,
        step: int,
        rank: int | None = None,
        world_size: int | None = None,
        run: str | None = None,
        request_id: str | None = None,
        cast: str = "allow",
        optimizer: Any = None,
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
        until: Any = None,
        **options: Unpack[PushOptions],
    ) -> PushHandle:
        """Hand over this rank's part of a torch model as a new version: FSDP2, HSDP, tensor parallelism, DDP, or one process.

        As `push`, with Hugging Face's names. ``_orig_mod``, ``_fsdp_wrapped_module`` and a leading ``module`` are stripped from them.
        Tied copies of other tensors, and rotary frequencies, are left out. What several ranks hold is pushed by one of them.

        With ``optimizer``, ``state`` or ``rank_state`` a training state is pushed behind the weights: all that `restore_state_dict` needs to go
        on from here. It is a version of ``namespace/name:training``, with the number of the weights' version if that is free. Weights do not
        wait for it. Its parameters have the module's own dtypes.

        Args:
            model: ``namespace/name``, registered before.
            state_dict_or_module: a module, of which the ``state_dict()`` is taken, with peft's adapters merged into copies; a state dict; or pairs of name and
                tensor. Tensors are DTensors of any mesh, or plain ones, which every rank holds whole; on any device.
            step: the training step.
            rank: this rank; by default torch.distributed's, or 0.
            world_size: number of ranks that push; by default torch.distributed's, or 1.
            run: overrides the client's.
            request_id: what makes the ranks of one push find each other; by default run and step.
            cast: ``allow`` casts floating-point tensors of another dtype than the model's on the way (integers never); ``exact`` does so
                if the model's is wider; ``never`` refuses them. The report says how many were cast.
            optimizer: the ``torch.optim.Optimizer`` of the module's parameters, or several. Whether it has made a step or not, it is not changed.
            state: values by name, the same on all ranks: plain data, or objects with ``state_dict()`` and ``load_state_dict()`` such as schedulers.
            rank_state: likewise, of this rank alone, such as the state of a random number generator or a data loader.
            until: ``"optimizer_step"`` returns once it is known what is to be copied: what nothing but the optimizer's step changes is copied
                behind the caller, during the next forward and backward, and the step waits for what is left. Or an optimizer, where its
                state is not pushed along. Nothing else may change parameters before: `PushHandle.copied` waits for that.
            options: as for `push`.

        Returns:
            The push of the weights. Its ``training`` is the one of the training state.

        Raises:
            NotFound: the model is not registered.
            InvalidArgument: that is no state dict, ``cast`` is none of these, values are not plain data (names the entry), or ``until`` names
                no optimizer.
            LayoutError: names, shapes, dtypes or placements contradict the model, LoRA adapters cannot be merged, or with a training state are merged in
                place, or the ranks together do not hold all of it; names each tensor.
            AlreadyExists: another process pushes as this rank of this step.
        """
        check_options(options)
        from weighbridge._formats.peft_models import merges_together
        from weighbridge._formats.torch_state import rank_and_world, torch_shards
        from weighbridge._trainers.states.torch_training import training_tensors

        rank, world_size = rank_and_world(rank, world_size)
        opening = self._opening(model, step, run, world_size, request_id)
        with self._on_terms(opening, options) as call, self._tensors(model) as tensors:
            if merges_together(state_dict_or_module):
                self._pusher.meet(model, call.terms)
            find = partial(
                torch_shards, state_dict_or_module, tensors, cast=cast, whole=world_size == 1, of=model
            )
            call.handle = self._push_tensors(
                opening, rank, TensorSpace.HUGGING_FACE, find, lambda _: training_tensors(state_dict_or_module, optimizer), options,
                call.terms, until=until, optimizer=optimizer, state=state, rank_state=rank_state,
            )  # fmt: skip
        return call.handle

    def push_adapter(
        self,
        model: str,
        peft_model: Any,
        *,
        base: str,
        step: int,
        adapter_name: str = "default",
        rank: int | None = None,
        world_size: int | None = None,
        run: str | None = None,
        request_id: str | None = None,
        save_embedding_layers: bool | str = "auto",
        **options: Unpack[PushOptions],
    ) -> PushHandle:
        """Hand over an adapter of a model that peft has wrapped, or of a Megatron-core model, as a new version that is a change on a version of another model.

        The first push registers the model by the adapter's tensors. All ranks call it: under DDP each has an equal copy, of which the service takes one;
        under FSDP2 each has its part. The version's files are those that peft's ``save_pretrained`` writes.

        Of a Megatron-core model to which Megatron-Bridge's ``LoRA`` or ``CanonicalLoRA`` was applied, each rank pushes its shards, by the weight map of the base.
        They are peft's tensors then, and the config is made of rank and alpha of the layers: all ranks say by the store of torch.distributed which they have.

        Args:
            model: ``namespace/name`` of the adapter.
            peft_model: what ``peft.get_peft_model`` has made, or DDP or torch.compile of it; or a model of Megatron-core, or the list of its virtual stages.
            base: the version that it is on, such as ``acme/smol@17``; a ref is resolved once. It is kept as long as versions of the adapter are on it.
            step: the training step.
            adapter_name: which adapter of the model.
            rank, world_size, run, request_id: as for `push_state_dict`.
            save_embedding_layers: as for peft's ``save_pretrained``: with ``auto`` peft may look up the base's config in the Hub.
            options: as for `push`.

        Raises:
            NotFound: there is no such base.
            InvalidArgument: that is no model of peft, it has no such adapter, or the base is no model; or it is one of Megatron-core without adapters, or on a base
                that has no weight map.
            LayoutError: the base lacks modules of the adapter, or has them with other features; or adapters of Megatron-core are of another kind than LoRA.
            FailedPrecondition: the name is registered for a model, or for an adapter with other tensors: of another rank or other target modules; or the base
                is not durable.
            PermissionDenied: the caller may not pull the base.
            ResourceExhausted: the caller has adapters on as many versions of the base as the policy allows.
        """
        check_options(options)
        from weighbridge._formats.torch_state import TorchShards, adapter_shards, rank_and_world
        from weighbridge._trainers.megatron_adapters import is_megatron
        from weighbridge._trainers.peft_adapters import TrainedAdapter
        from weighbridge._trainers.states.torch_training import training_tensors

        check_base(base)
        rank, ranks = rank_and_world(rank, world_size)
        opening = self._opening(model, step, run, ranks, request_id)
        opening.metadata[BASE].text = base
        registration = RegisterModelRequest()

        def find() -> TorchShards | PlacedAdapters:
            shards: TorchShards | PlacedAdapters
            if is_megatron(peft_model):
                shards, config_json, tensors = self._megatron_adapters(model, peft_model, base, call.terms)
            else:
                found = TrainedAdapter.of(peft_model, adapter_name, save_embedding_layers)
                shards = adapter_shards(found.state, whole=ranks == 1, of=model)
                config_json, tensors = found.config_json, shards.layout.tensors
            registration.CopyFrom(adapter_registration(model, base, config_json, tensors.values()))
            opening.metadata[ADAPTER_DIGEST].text = adapter_digest(config_json, tensors.values())
            return shards

        with self._on_terms(opening, options) as call:
            call.handle = self._push_tensors(
                opening, rank, TensorSpace.HUGGING_FACE, find, lambda _: training_tensors(peft_model, None), options, call.terms,
                until=None, optimizer=None, state=None, rank_state=None, registration=registration,
            )  # fmt: skip
            if is_megatron(peft_model):
                self._pusher.forget(call.terms)
        return call.handle

    def restore_adapter(
        self,
        model: str,
        peft_model: Any,
        *,
        version: str | int | None = None,
        adapter_name: str = "default",
        save_embedding_layers: bool | str = "auto",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Version:
        """Fill the adapter of a model in place from any version, whatever parallelism it was pushed with. All ranks call it.

        Only this rank's bytes come over the wire. The model has the adapter already, with the rank, the scales and the target modules of the version.

        Args:
            model: ``namespace/name`` of the adapter.
            peft_model, adapter_name, save_embedding_layers, rank, world_size: as for `push_adapter`.
            version: a number or a ref; by default the latest.

        Returns:
            The version that was restored.

        Raises:
            NotFound: no such model or version.
            InvalidArgument: that is no adapter, no model of peft or Megatron-core, or it has no such adapter.
            LayoutError: the model's adapter has other tensors, or layers of Megatron-core with other scales; names them. Or it is merged, or layers
                that the model fuses have adapters with different A in the version.
            FailedPrecondition: by the config of the model's adapter, the same tensors compute something else; names the entries.
        """
        from weighbridge._formats.peft_models import merged_layers
        from weighbridge._formats.torch_state import adapter_shards, check_not_copied, rank_and_world
        from weighbridge._trainers.adapter_restores import StoredAdapter, apart, fill_shared
        from weighbridge._trainers.megatron_adapters import MegatronAdapters, is_megatron
        from weighbridge._trainers.peft_adapters import LoraParts, TrainedAdapter, wrapped_model

        meant = Reference.of(model, version, REF_LATEST)
        plan = self._connection.run(
            pull_calls.plan_pull(KnownLayouts(), meant.model, meant.version, FullTensors(), None)
        )
        number = plan.version.number
        files = self.model_files(meant.model, number)
        stored = StoredAdapter.of(f"{meant.model}@{number}", files, plan.layout.tensors)
        if not is_megatron(peft_model):
            if merged := merged_layers(wrapped_model(peft_model)):
                raise LayoutError(
                    counted(len(merged), "layer has", "layers have")
                    + " adapters that are merged into the weights",
                    details=first_lines(merged),
                    fix="call model.unmerge_adapter() before",
                )
            found = TrainedAdapter.of(peft_model, adapter_name, save_embedding_layers)
            shards = adapter_shards(found.state, whole=False, of=stored.name, filled=True)
            stored.check_tensors(shards.layout.tensors)
            config = wrapped_model(peft_model).peft_config[adapter_name]
            check_computes_alike(files, config, stored.name)
            check_not_copied(wrapped_model(peft_model), shards.layout, shards.tensors)
            return self.restore_shards(meant.model, shards.layout, shards.tensors, version=number)
        _, ranks = rank_and_world(rank, world_size)
        agreement = RankAgreement.of_process_group(meant.model, f"restore/{number}", ranks)
        terms = PushTerms(agreement=agreement)
        try:
            adapters = MegatronAdapters.of(peft_model)
            base = BaseVersion.of(plan.version.metadata)
            placed = adapters.placed(self._links(str(base), adapters.beside.values()))
            own = LoraParts(placed.layout.tensors, placed.modules)
            said = self._pusher.meet(stored.name, terms, own.encoded)
            stored.check_tensors(LoraParts.together([LoraParts.decode(each) for each in said]).tensors)
            stored.check_scales(placed.modules)
            filled = apart(placed.tensors)
            self.restore_shards(meant.model, placed.layout, filled, version=number)
            fill_shared(placed.layout, placed.tensors, filled)
        except Exception as error:
            if agreement is not None:
                agreement.refuse(error)
            raise
        return plan.version

    def push_gathered(
        self,
        model: str,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        step: int,
        rank: int | None = None,
        world_size: int | None = None,
        run: str | None = None,
        request_id: str | None = None,
        cast: str = "allow",
        buffer_bytes: int = 256 << 20,
        held: Iterable[str] | None = None,
        **options: Unpack[PushOptions],
    ) -> PushHandle:
        """Hand over whole tensors that all ranks gather one after another, as RL frameworks do, as a new version.

        All ranks call it with the same tensors; each pushes its share of each, before it asks for the next one. So a tensor need not outlive
        that, and no rank holds more than the one that it is given: on the local lane it is copied straight to its place in the version. Returns
        when all have passed by. Of ``weights`` all are taken in any case, also if the push fails: other ranks may gather them together with
        this one. Names are understood as by `push_state_dict`; a copy of a tied tensor may be among them, and is compared.

        Args:
            model: ``namespace/name``, registered before.
            weights: ``(name, tensor)`` pairs, on any device; an iterator is taken to its end.
            step: the training step.
            rank: this rank; by default torch.distributed's, or 0.
            world_size: number of ranks that push; by default torch.distributed's, or 1.
            run: overrides the client's.
            request_id: what makes the ranks of one push find each other; by default run and step.
            cast: as for `push_state_dict`.
            buffer_bytes: host memory that what goes by gRPC may take; 2 MiB at the least.
            held: names of the tensors that this rank is given, where the ranks are given different ones, as by pipeline or expert parallelism; of
                a tensor that several are given, the whole is pushed by one of them, and not compared; nor is a copy of a tied tensor on a rank
                that is not given that one.
            options: as for `push`.

        Raises:
            NotFound: the model is not registered.
            InvalidArgument: ``cast`` is not known.
            LayoutError: names, shapes or dtypes contradict the model, or tensors are missing; names each.
            AlreadyExists: another process pushes as this rank of this step.
        """
        passing = iter(weights)
        try:
            check_options(options)
            from weighbridge._formats.gathered_shards import (
                GatheredShards,
                OpenPassing,
                held_layout,
                share_layout,
            )
            from weighbridge._formats.torch_state import check_cast, rank_and_world

            check_cast(cast)
            rank, ranks = rank_and_world(rank, world_size)
            opening = self._opening(model, step, run, ranks, request_id)
            with self._on_terms(opening, options) as call, self._tensors(model) as tensors:
                with self._pusher.telling([opening], rank, call.terms):
                    say(opening, options)
                    if held is None:
                        shares = share_layout(tensors, rank, ranks)
                        given = partial(GatheredShards, rank=rank, ranks=ranks)
                    else:
                        shares = held_layout(tensors, held)
                        given = partial(GatheredShards, rank=0, ranks=1, expected=shares.tensors)
                passed = OpenPassing(partial(given, passing, tensors, cast=cast), buffer_bytes)
                call.handle = self._pusher.push(
                    opening, rank, shares, TensorSpace.HUGGING_FACE, passed, terms=call.terms
                )
        except Exception:
            _take_all(passing)
            raise
        if call.handle.skipped is not None:
            _take_all(passing)
        return call.handle

    def _megatron_adapters(
        self, model: str, megatron_model: Any, base: str, terms: PushTerms
    ) -> tuple[PlacedAdapters, bytes, Mapping[str, TensorSpec]]:
        """The adapters of a Megatron-core model's rank by peft's names; and the config and the tensors that all ranks have together."""
        from weighbridge._trainers.megatron_adapters import MegatronAdapters
        from weighbridge._trainers.peft_adapters import LoraParts

        on = parse_reference(base).model
        found = MegatronAdapters.of(megatron_model)
        placed = found.placed(self._links(base, found.beside.values()))
        own = LoraParts(placed.layout.tensors, placed.modules)
        said = self._pusher.meet(model, terms, own.encoded)
        parts = LoraParts.together([LoraParts.decode(each) for each in said])
        if not parts.modules:
            raise InvalidArgument(
                "the model has no LoRA adapters of Megatron-Bridge",
                fix="push the model to which LoRA or CanonicalLoRA was applied",
            )
        found.check_frozen()
        with self._tensors(on) as base_tensors:
            config_json = parts.config_json(on, base_tensors)
        return placed, config_json, parts.tensors

    def _weight_shards(self, model: str, sharded_state_dict: Any, cast: str) -> WeightShards:
        from weighbridge._formats.megatron_state import as_registered, sharded_tensors

        held = sharded_tensors(sharded_state_dict)
        with self._registered(model, held.layout) as registered:
            return as_registered(held, registered, cast)


def _take_all(passing: Iterator[object]) -> None:
    """Take what is left of tensors: the other ranks gather them together with this one, and would wait for it for ever."""
    for _ in passing:
        pass
