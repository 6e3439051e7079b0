"""Client of a trainer rank: the public methods, each of which hands what it is given to the part of the client that does it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from weighbridge._clients.calls import push_calls
from weighbridge._clients.client import Client
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options
from weighbridge._clients.transport import ConnectionOptions
from weighbridge._core.file_names import is_adapter
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge._core.references import Reference, training_of
from weighbridge._core.resources import REF_LATEST, Model, Version
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import OpenSource
from weighbridge._formats.side_files.reading import CONFIG
from weighbridge._trainers import model_folders, restoring
from weighbridge._trainers.adapters import Adapters
from weighbridge._trainers.known_tensors import KnownTensors
from weighbridge._trainers.pushes import Pushes, all_taken
from weighbridge._trainers.restorer import Restorer
from weighbridge._trainers.torch_dist.folder import DEFAULT_FILE_BYTES
from weighbridge._trainers.training import Beside
from weighbridge._trainers.training_files import WrittenCheckpoint, write_checkpoint

if TYPE_CHECKING:
    import torch


__all__ = ["TrainerClient"]


class TrainerClient(Client):
    """The trainer's side of the service; one for each rank.

    Args:
        server: ``host:port`` of the gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        run: name of the training run, the same on all ranks; part of the version's lineage.
        ahead_bytes: host memory for the copies of a push with a training state, page-locked if they are of a GPU. So many bytes are copied to
            it while the service is asked where they go, and delivered from there behind the caller. Larger pushes are copied when that is known. Each of two
            pushes that are on their way takes as much.
        options: as for `Client`.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        run: str = "default",
        ahead_bytes: int = 2 << 30,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        super().__init__(server, **options)
        self.run = run
        self._known = KnownTensors(self._connection)
        self._restorer = Restorer(self._connection, self._known)
        self._pushes = Pushes(self._connection, self._known, ahead_bytes)
        self._adapters = Adapters(self._connection, self._known, self._pushes)

    def close(self) -> None:
        """Wait until what was pushed has arrived or failed, then close the connection."""
        self._pushes.close()
        super().close()

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
        call = self._pushes.call(model, step, self._run(run), rank, world_size, request_id, options)
        call.beside = Beside(optimizer, state, rank_state)
        return self._pushes.megatron(call, sharded_state_dict, cast, until)

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
        call = self._pushes.call(model, step, self._run(run), rank, world_size, request_id, options)
        call.beside = Beside(optimizer, state, rank_state)
        return self._pushes.state_dict(call, state_dict_or_module, cast, until)

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
        with all_taken(passing):
            call = self._pushes.call(model, step, self._run(run), rank, world_size, request_id, options)
            return self._pushes.gathered(call, passing, cast, buffer_bytes, held)

    def push_shards(
        self,
        model: str,
        layout: Layout,
        space: TensorSpace,
        open_source: OpenSource,
        *,
        step: int,
        rank: int,
        world_size: int,
        run: str | None = None,
        request_id: str | None = None,
        hold_seal: bool = False,
        cast_from: Iterable[str] = (),
        **options: Unpack[PushOptions],
    ) -> PushHandle:
        """Push the shards of any layout; what `push` and `push_folder` do in the end.

        Args:
            model: ``namespace/name``, registered before.
            layout: the shards this rank holds, as one stream.
            space: ``TensorSpace.MEGATRON`` or ``TensorSpace.HUGGING_FACE``, to which the names belong.
            open_source: is called for the bytes of the shards that this rank is to push; and, for those that other ranks hold, too, before
                that to compare them.
            step, rank, world_size, run, request_id, options: as for `push`.
            hold_seal: leave it to `PushHandle.seal` to say that this rank has pushed everything: until then no version becomes visible.
            cast_from: safetensors' names of the dtypes that the source casts from; the version's manifest has them.
        """
        call = self._pushes.call(
            model, step, self._run(run), rank, world_size, request_id, options, part=True
        )
        call.hold_seal = hold_seal
        call.opening.cast_from.extend(cast_from)
        return self._pushes.shards(call, layout, space, open_source)

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
        call = self._pushes.call(model, step, self._run(run), rank, world_size, request_id, options)
        return self._adapters.push(call, peft_model, base, adapter_name, save_embedding_layers)

    def push_folder(
        self,
        model: str,
        hf_dir: str | Path,
        *,
        step: int = 0,
        run: str | None = None,
        request_id: str | None = None,
        cast: str = "allow",
        hold_seal: bool = False,
        **options: Unpack[PushOptions],
    ) -> PushHandle:
        """Push the weights of a Hugging Face folder, and its other files if it has a ``config.json``, as a new version of a registered model.

        The folder's files become the registered ones, so that this version and those that ranks push after it have them. Registered files that
        the folder does not have stay, but for those of the tokenizer if it brings one; a folder without ``config.json`` leaves all as they are.

        Args:
            model: ``namespace/name``, registered before.
            hf_dir: a folder with safetensors files. Which tensors are tied says its ``config.json``, or the model's own if it has none.
            step: recorded with the version.
            run: overrides the client's.
            request_id: what makes a repeated call find its version; unique by default.
            cast: ``allow`` casts floating-point tensors of another dtype than the model's as they are read, ``exact`` does so if the model's
                is wider, ``never`` refuses them. The report says how many were cast.
            hold_seal: as for `push_shards`.
            options: as for `push`.

        Raises:
            NotFound: the model is not registered, or the folder has no safetensors files.
            LayoutError: the folder's tensors are not those of the model, or its ``config.json`` describes another model.
            DataLoss: a file is damaged.
        """
        request_id = request_id or str(uuid.uuid4())
        call = self._pushes.call(model, step, self._run(run), 0, 1, request_id, options, part=True)
        call.hold_seal = hold_seal
        folder, registered = Path(hf_dir), self.model_files(model)
        if is_adapter(registered):
            self.model(model).check_whole()
        files, weights = model_folders.pushed(model, folder, registered)
        with self._known.of(model) as tensors:
            weights = weights.as_model_has_them(tensors, cast)
            model_folders.replace_files(
                self, model, f"{CONFIG} of {folder}", registered, files, tensors, cast=bool(weights.cast_from)
            )
            return self._pushes.weights(call, weights)

    def register_model(
        self,
        model: str,
        hf_dir: str | Path,
        *,
        dtype: str | torch.dtype = "",
        tensors: Any = None,
        weight_map: bool = True,
    ) -> Model:
        """Register a model by a Hugging Face folder: its ``config.json``, tokenizer and so on, not its weights.

        A model type without a weight map is registered by its tensors: by the headers of the folder's weights, or by ``tensors``. Such a
        model has Hugging Face's names alone. Repeating it is harmless, so every rank may call it, with its own part of ``tensors``.

        Args:
            model: ``namespace/name``.
            hf_dir: the folder. If it has weights, their headers are compared with ``config.json``.
            dtype: of the weights, such as ``bf16``, which ``config.json`` names from then on; by default each tensor's own if they are
                known, and otherwise what ``config.json`` says. Without a weight map, only floating-point tensors of 16 bits or more get it.
            tensors: a torch module, a state dict, or pairs of a name and a tensor, as for `push_state_dict`, by whose names, global
                shapes and dtypes the model is registered; by default the folder's weights. Data is not read: the meta device will do.
            weight_map: False registers it by its tensors alone, although there may be a weight map for its model type: of a quantised
                model, or one with layers of its own.

        Raises:
            InvalidArgument: its model type has no weight map and its tensors are not known, or they are not what ``config.json``
                describes (names the tensors).
            LayoutError: ``tensors`` has LoRA adapters that are not merged, or what is no tensor.
            DataLoss: a file of weights is damaged.
            FailedPrecondition: the model is registered already, with other tensors.
        """
        files, specs = model_folders.registered_by(model, hf_dir, dtype, tensors)
        return self.register_files(model, files, dtype, specs, weight_map=weight_map)

    def import_folder(
        self,
        model: str,
        hf_dir: str | Path,
        *,
        dtype: str | torch.dtype = "",
        dequantize: str = "",
        step: int = 0,
        run: str | None = None,
        weight_map: bool = True,
        **options: Unpack[PushOptions],
    ) -> PushHandle:
        """Register a model by a Hugging Face folder, and push its weights.

        Args:
            model: ``namespace/name``.
            hf_dir: the folder.
            dtype: what floating-point weights are cast to as they are read, such as ``bf16``; by default they are kept as they are.
            dequantize: the dtype, such as ``bf16``, that block-quantised fp8 weights are turned into on the way; by default
                they are kept as they are.
            step: recorded with the version.
            run: overrides the client's.
            weight_map: as for `register_model`.
            options: as for `push`.

        Raises:
            As `register_model` and `push_folder` do, and:
            InvalidArgument: ``dequantize`` is given, and there is nothing to dequantise or a scale is missing; or ``dtype`` is given, and
                weights cannot be cast to it.
        """
        call = self._pushes.call(model, step, self._run(run), 0, 1, str(uuid.uuid4()), options, part=True)
        files, weights = model_folders.imported(model, hf_dir, dtype, dequantize)
        self.register_files(model, files, dtype, weights.layout.tensors.values(), weight_map=weight_map)
        if dtype or weights.beside is not None:
            with self._known.of(model) as tensors:
                weights = weights.as_model_has_them(tensors, "allow")
        return self._pushes.weights(call, weights)

    def import_adapter(
        self,
        model: str,
        folder: str | Path,
        *,
        base: str,
        step: int = 0,
        run: str | None = None,
        **options: Unpack[PushOptions],
    ) -> PushHandle:
        """Register an adapter by a folder that peft's ``save_pretrained`` has written, and push it.

        Args:
            model: ``namespace/name`` of the adapter.
            folder: has ``adapter_config.json`` and ``adapter_model.safetensors``, which are kept as they are; its other files are not.
            base: the version that it is on, such as ``acme/smol@17``; a ref is resolved once.
            step: recorded with the version.
            run: overrides the client's.
            options: as for `push`.

        Raises:
            NotFound: the folder is none of peft's, or there is no such base.
            InvalidArgument: the weights are a pickle, or the base is no model.
            LayoutError: the base lacks modules of the adapter, or has them with other features.
            FailedPrecondition: the name is registered for a model, or for an adapter with other tensors; or the base is not durable.
            PermissionDenied: the caller may not pull the base.
            DataLoss: a file is damaged.
        """
        call = self._pushes.call(model, step, self._run(run), 0, 1, str(uuid.uuid4()), options, part=True)
        return self._adapters.push_folder(call, Path(folder), base)

    def import_training(
        self,
        model: str,
        folder: str | Path,
        *,
        step: int | None = None,
        run: str | None = None,
        **options: Unpack[PushOptions],
    ) -> PushHandle:
        """Push a checkpoint of Megatron-core (``torch_dist``), torch (``dcp``) or verl's FSDP2 ranks (a file of each) as a training state, with its optimizer.

        Its layout is what is declared, and the bytes of tensors are read from where they lie. Entries that are no tensors are kept as the bytes
        that they are, unopened.

        Args:
            model: ``namespace/name``, registered before.
            folder: the checkpoint; of Megatron-LM that of one iteration.
            step: recorded with the version; by default the one that the checkpoint says itself or, without that, its folder's name.
            run: overrides the client's.
            options: as for `push`. Elements that are not finite do not hold it.

        Raises:
            NotFound: the model is not registered, there is no checkpoint, or a file of it is missing.
            DataLoss: it is damaged or cut short.
            InvalidArgument: a tensor has a dtype or name that is not supported, what is no tensor has more than a GiB, or nothing says the step.
            LayoutError: a part of a tensor is missing, or there twice; names each tensor.
        """
        check_options(options)
        from weighbridge._trainers.states.checkpoints.checkpoint_folder import CheckpointFolder
        from weighbridge._trainers.states.checkpoints.checkpoint_step import known_step

        options["allow_nonfinite"] = True
        found = CheckpointFolder.read(Path(folder))
        step = known_step(found.step if step is None else step, folder)
        call = self._pushes.call(
            training_of(model), step, self._run(run), 0, 1, str(uuid.uuid4()), options, part=True
        )
        return self._pushes.shards(call, found.layout, found.space, found.open_source)

    def restore(
        self,
        model: str,
        sharded_state_dict: Any,
        *,
        version: str | int | None = None,
        optimizer: Any = None,
        state: MutableMapping[str, Any] | None = None,
        rank_state: MutableMapping[str, Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Version:
        """Fill a sharded state dict in place from any version, whatever parallelism it was pushed with.

        Only this rank's bytes come over the wire. Tensors of another floating-point dtype than the model's are cast.

        With ``optimizer``, ``state`` or ``rank_state`` all comes from a training state, as by `restore_state_dict`.

        Args:
            model: ``namespace/name``.
            sharded_state_dict: what Megatron-core's ``model.sharded_state_dict()`` returns.
            version: a number or a ref; by default the latest.
            optimizer: as for `TrainerClient.push`; filled in place. It is given a state first, if it has none.
            state, rank_state, rank, world_size: as for `restore_state_dict`.

        Returns:
            The version that was restored.

        Raises:
            NotFound: no such model or version.
            InvalidArgument: the version was pushed without what is asked for.
            LayoutError: shapes, dtypes or names contradict the model or the training state.
        """
        beside = Beside(optimizer, state, rank_state, rank, world_size)
        return self._restorer.megatron(_latest(model, version), sharded_state_dict, beside)

    def restore_state_dict(
        self,
        model: str,
        state_dict_or_module: Any,
        *,
        version: str | int | None = None,
        strict: bool = True,
        optimizer: Any = None,
        state: MutableMapping[str, Any] | None = None,
        rank_state: MutableMapping[str, Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Version:
        """Fill a torch model in place from any version, whatever parallelism it was pushed with.

        Only this rank's bytes come over the wire. Tensors of another floating-point dtype than the model's are cast.

        With ``optimizer``, ``state`` or ``rank_state`` all comes from a training state: parameters too, in their own dtype, and ``version`` is one of
        ``namespace/name:training``. Training goes on as if it had not stopped, on as many ranks to the bit.

        Args:
            model: ``namespace/name``.
            state_dict_or_module: as for `push_state_dict`.
            version: a number or a ref; by default the latest.
            strict: whether it must hold all tensors of the model, and no others, as for `Pull.into`. If not, those are filled that both
                have, and names of which the model has none are refused.
            optimizer: as for `push_state_dict`. It takes what was pushed, whether it has made a step or not, and has nothing else afterwards.
            state: what was pushed as ``state``, by the same names, or some of it: objects load theirs, plain values are replaced in the mapping. On
                another number of ranks than pushed it, all get those of rank 0.
            rank_state: likewise, of this rank; for as many ranks as pushed it.
            rank, world_size: by default torch.distributed's, or 0 and 1.

        Returns:
            The version that was restored.

        Raises:
            NotFound: no such model or version.
            InvalidArgument: that is no state dict, or the version was pushed without what is asked for.
            LayoutError: tensors are missing, unexpected, or contradict the model, or LoRA adapters are not merged; names each tensor.
        """
        beside = Beside(optimizer, state, rank_state, rank, world_size)
        return self._restorer.state_dict(_latest(model, version), state_dict_or_module, strict, beside)

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
        meant = _latest(model, version)
        return self._adapters.restore(meant, peft_model, adapter_name, save_embedding_layers, world_size)

    def restore_shards(
        self, model: str, layout: Layout, tensors: Sequence[torch.Tensor], *, version: str | int | None = None
    ) -> Version:
        """Fill the shards of any layout that has Hugging Face's names; what `restore_state_dict` does in the end.

        Args:
            model: ``namespace/name``.
            layout: which shards.
            tensors: one for each of them, of the extent of its box, on any device. One of another floating-point dtype is cast to.
            version: a number or a ref; by default the latest.

        Returns:
            The version that was restored.

        Raises:
            NotFound: no such model, version or tensor.
            InvalidArgument: the layout contradicts the model.
        """
        return restoring.hugging_face_shards(self._connection, _latest(model, version), layout, tensors)

    def restore_layout(
        self,
        model: str,
        layout: Layout,
        tensor_for: Callable[[int], torch.Tensor],
        *,
        version: str | int | None = None,
    ) -> Iterator[tuple[Version, int]]:
        """Restore the shards of a layout in megatron-core's tensor space, one after the other.

        Args:
            model: ``namespace/name``.
            layout: which shards, as a stream.
            tensor_for: gives the tensor to fill for a placement, by index.
            version: a number or a ref; by default the latest.

        Yields:
            The version, and the index of each placement that is complete.
        """
        return restoring.megatron_shards(self._connection, _latest(model, version), layout, tensor_for)

    def export_training(
        self,
        model: str,
        version: str | int | None,
        folder: str | Path,
        *,
        checkpoint_format: str | None = None,
        replace: bool = False,
        max_file_bytes: int = DEFAULT_FILE_BYTES,
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> WrittenCheckpoint:
        """Write a training state as a checkpoint of its trainer: of Megatron-core ``torch_dist``, of torch ``dcp``.

        Tensors are streamed. What ranks have besides is loaded here, with ``weights_only``. The folder appears whole or not at all.

        Args:
            model: ``namespace/name``, or the name of its part.
            version: of the part: a number or a ref; None for the one that ``model`` names, or the latest.
            folder: a new or empty folder. Of Megatron-core it becomes what ``--load`` is given: the checkpoint is ``iter_%07d`` in it, by the
                step, beside ``latest_checkpointed_iteration.txt``.
            checkpoint_format: ``torch_dist`` or ``dcp``; by default the trainer's.
            replace: write to a folder that is not empty: in the place of the checkpoint there, of Megatron-core beside other iterations.
            max_file_bytes: about how large a ``.distcp`` file may become.
            on_progress: is called with bytes written so far and in all.

        Raises:
            NotFound: no such model or version.
            InvalidArgument: the folder is not empty, it is the state of a trainer with other checkpoints, or values have a name that means
                something else there.
            LayoutError: it has no tensors.
            DataLoss: a rank's values are missing, or are none.
            ResourceExhausted: the disk is full.
            FailedPrecondition: the folder cannot be written.
        """
        return write_checkpoint(
            self._connection, _latest(model, version), Path(folder), checkpoint_format=checkpoint_format, replaces=replace,
            max_file_bytes=max_file_bytes, on_progress=on_progress,
        )  # fmt: skip

    def describe_tensors(self, model: str, *, refresh: bool = False) -> Mapping[str, TensorSpec]:
        """A model's tensors by name. They are asked for once, and again with ``refresh``: the name may stand for another model by now.

        Raises:
            NotFound: the model is not registered.
        """
        return self._known.described(model, refresh=refresh)

    def describe_shards(self, model: str, rank: MegatronRank | None = None) -> Layout:
        """The shards that a Megatron-core rank holds, by per-layer keys.

        Args:
            model: ``namespace/name``.
            rank: which rank, of which sizes; by default the only one.

        Raises:
            InvalidArgument: the sizes do not divide the model.
        """
        return self._connection.run(push_calls.describe_shards(model, rank or MegatronRank()))

    def _run(self, run: str | None) -> str:
        return self.run if run is None else run


def _latest(model: str, version: str | int | None) -> Reference:
    return Reference.of(model, version, REF_LATEST)
