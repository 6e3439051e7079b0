"""Client of a trainer rank. Each public method passes its arguments to the part of the client that implements it."""

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
from weighbridge._formats.push_sources import HeldShards
from weighbridge._formats.side_files.reading import CONFIG
from weighbridge._trainers import model_folders, restoring
from weighbridge._trainers.adapters import AdapterPushes
from weighbridge._trainers.known_tensors import KnownTensors
from weighbridge._trainers.pushes import Pushes, all_taken
from weighbridge._trainers.restorer import Restorer
from weighbridge._trainers.torch_dist.folder import DEFAULT_FILE_BYTES
from weighbridge._trainers.training import Beside
from weighbridge._trainers.training_files import WrittenCheckpoint, write_checkpoint
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    import torch


__all__ = ["TrainerClient"]


class TrainerClient(Client):
    """Client of a trainer; one for each rank.

    Args:
        server: ``host:port`` of the service's gRPC server; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        run: name of the training run, the same on all ranks; part of the version's lineage.
        ahead_bytes: bytes of host memory for the copies of a push with a training state; the memory is page-locked if
            the tensors are on a GPU. The client copies a push up to this size there while the service plans it, and a
            thread delivers it while training continues. It copies larger pushes after the service has planned them. Two
            pushes may be delivered at the same time, and each needs this much memory.
        options: see `Client`.

    Examples:
        >>> with TrainerClient(server, run="ppo-7") as trainer:
        ...     version = trainer.push_state_dict("acme/smol", model, step=200).wait()
        >>> print(version)
        acme/smol@2 (durable, step 200)
        >>> version.run
        'ppo-7'
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
        self._adapters = AdapterPushes(self._connection, self._known, self._pushes)

    def close(self) -> None:
        """Wait until all pushes have been delivered or have failed, then close the connection."""
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
        """Push this rank's shards as a part of a new version. All ranks call this with the same step.

        Returns once the shards have been copied, so that training may continue and change them. A thread delivers the
        copies. If several ranks hold a shard, one of them pushes it. The first push waits until all ranks have called.

        With ``optimizer``, ``state`` or ``rank_state`` a training state is pushed after the weights, as by
        `push_state_dict`. It contains everything that `restore` needs to continue, under the keys of Megatron's own
        checkpoints. The ranks do not communicate to push it. If a distributed optimizer shards its state, each rank
        pushes its own ranges.

        Args:
            model: ``namespace/name`` of a registered model.
            sharded_state_dict: result of Megatron-core's ``model.sharded_state_dict()``.
            step: the training step.
            rank: this rank, from 0; by default torch.distributed's, or 0.
            world_size: number of ranks that push; by default torch.distributed's, or 1.
            run: overrides the client's run.
            request_id: ID that is the same for all ranks of one push; by default run and step.
            cast: see `push_state_dict`. Megatron-core can be configured to keep some tensors, such as norms or routers,
                in float32 while the others are bf16.
            optimizer: result of ``get_megatron_optimizer``, after its first step: `FP32Optimizer`,
                `Float16OptimizerWithFloat16Params` or `DistributedOptimizer`, chained or not.
            state, rank_state, until: see `push_state_dict`.
            options: metadata, whether the version is held, and how long the push may block the training loop:
                `PushOptions`. If the push has as many ranks as torch.distributed, the ranks agree through its store
                before anything is copied: either all of them push, or none.

        Returns:
            The push of the weights. Its ``training`` is the push of the training state.

        Raises:
            NotFound: the model is not registered.
            InvalidArgument: the optimizer is not supported, values are not plain data (names the entry), or ``until``
                does not name an optimizer.
            FailedPrecondition: the optimizer has not made a step yet.
            LayoutError: shapes, dtypes or names contradict the model, or the ranks together do not hold all of it.
            AlreadyExists: another process is already pushing as this rank of this step.

        Examples:
            >>> handle = trainer.push("acme/smol", megatron_model.sharded_state_dict(), step=200, rank=0, world_size=1)
            >>> print(handle.wait())
            acme/smol@2 (durable, step 200)
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
        """Push this rank's part of a torch model as a part of a new version: FSDP2, HSDP, tensor parallelism, DDP, or
        one process.

        Works like `push`, but with Hugging Face's names. ``_orig_mod``, ``_fsdp_wrapped_module`` and a leading
        ``module`` are stripped from them. Tied copies of other tensors and rotary frequencies are omitted. If several
        ranks hold a tensor, one of them pushes it.

        With ``optimizer``, ``state`` or ``rank_state`` a training state is pushed after the weights: everything that
        `restore_state_dict` needs to continue. It is a version of ``namespace/name:training``, with the same number as
        the version of the weights if that number is free. The weights do not wait for it. Its parameters have the
        module's own dtypes.

        Args:
            model: ``namespace/name`` of a registered model.
            state_dict_or_module: a module, a state dict, or pairs of name and tensor. For a module its ``state_dict()``
                is used, with peft's adapters merged into copies. Tensors may be DTensors of any mesh, or plain tensors,
                which every rank must hold whole. They may be on any device.
            step: the training step.
            rank: this rank; by default torch.distributed's, or 0.
            world_size: number of ranks that push; by default torch.distributed's, or 1.
            run: overrides the client's run.
            request_id: ID that is the same for all ranks of one push; by default run and step.
            cast: ``allow`` casts floating-point tensors to the model's dtype if theirs differs (integers are never
                cast); ``exact`` casts them only if the model's dtype is wider; ``never`` refuses them. The report
                contains the number of cast tensors.
            optimizer: the ``torch.optim.Optimizer`` of the module's parameters, or several. The push does not change
                it, even if it has not made a step yet.
            state: values by name, the same on all ranks: plain data, or objects with ``state_dict()`` and
                ``load_state_dict()`` such as schedulers.
            rank_state: values of the same kinds for this rank only, for example the state of a random number generator
                or a data loader.
            until: with ``"optimizer_step"`` the call returns once it knows which tensors to copy. During the next
                forward and backward, a thread copies the tensors that only the optimizer's step changes, and the step
                waits until they are copied. Pass the optimizer itself if its state is not pushed. No other code may
                change parameters before the copies are made: `PushHandle.copied` waits for them.
            options: see `push`.

        Returns:
            The push of the weights. Its ``training`` is the push of the training state.

        Raises:
            NotFound: the model is not registered.
            InvalidArgument: the argument is not a state dict, ``cast`` is unknown, values are not plain data (names the
                entry), or ``until`` does not name an optimizer.
            LayoutError: names, shapes, dtypes or placements contradict the model; LoRA adapters cannot be merged, or
                are merged in place in a push with a training state; or the ranks together do not hold all of the model
                (names each tensor).
            AlreadyExists: another process is already pushing as this rank of this step.

        Examples:
            >>> handle = trainer.push_state_dict("acme/smol", model, step=200, metadata={"reward": 0.71})
            >>> version = handle.wait()
            >>> print(version)
            acme/smol@2 (durable, step 200)
            >>> version.metadata
            {'reward': 0.71}
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
        """Push whole tensors that all ranks gather one after another, as RL frameworks do, as a new version.

        All ranks call this with the same tensors. Each rank pushes its share of a tensor before it takes the next one
        from ``weights``. A tensor may therefore be freed after its turn, and a rank never holds more than one. On the
        local lane a share is copied directly to its place in the version. Returns when all tensors have been taken. The
        method consumes ``weights`` to its end even if the push fails, because other ranks may gather the tensors
        together with this one. Names are the same as for `push_state_dict`. ``weights`` may contain a copy of a tied
        tensor, which is compared with that tensor.

        Args:
            model: ``namespace/name`` of a registered model.
            weights: ``(name, tensor)`` pairs, on any device; an iterator is consumed to its end.
            step: the training step.
            rank: this rank; by default torch.distributed's, or 0.
            world_size: number of ranks that push; by default torch.distributed's, or 1.
            run: overrides the client's run.
            request_id: ID that is the same for all ranks of one push; by default run and step.
            cast: see `push_state_dict`.
            buffer_bytes: bytes of host memory for tensors that are sent over gRPC; at least 2 MiB.
            held: names of the tensors in this rank's ``weights``, if ranks have different tensors, as with pipeline or
                expert parallelism. If several ranks have a tensor, one of them pushes all of it, and the tensor is not
                compared. A copy of a tied tensor is not compared either on a rank that does not have that tensor.
            options: see `push`.

        Raises:
            NotFound: the model is not registered.
            InvalidArgument: ``cast`` is unknown.
            LayoutError: names, shapes or dtypes contradict the model, or tensors are missing (names each).
            AlreadyExists: another process is already pushing as this rank of this step.

        Examples:
            >>> handle = trainer.push_gathered("acme/smol", model.named_parameters(), step=200)
            >>> print(handle.wait())
            acme/smol@2 (durable, step 200)
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
        shards: HeldShards,
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
        """Push the shards of any layout. `push` and `push_folder` are built on this.

        Args:
            model: ``namespace/name`` of a registered model.
            layout: the shards that this rank holds, as one stream.
            space: space of the tensors' names, ``TensorSpace.MEGATRON`` or ``TensorSpace.HUGGING_FACE``.
            shards: these shards; `HeldShards.select` gives the source of those that the rank pushes, or compares with
                other ranks.
            step, rank, world_size, run, request_id, options: see `push`.
            hold_seal: whether only `PushHandle.seal` seals this rank. Until then the version does not become visible.
            cast_from: safetensors' names of the dtypes from which the source casts; the version's manifest lists them.
        """
        if not isinstance(shards, HeldShards):
            raise InvalidArgument(
                f"shards is a {type(shards).__name__}, not HeldShards",
                fix="derive a class from weighbridge.HeldShards; its select(indexes, stream) returns their source",
            )
        call = self._pushes.call(model, step, self._run(run), rank, world_size, request_id, options, part=True)
        call.hold_seal = hold_seal
        call.opening.cast_from.extend(cast_from)
        return self._pushes.push_shards(call, layout, space, shards)

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
        """Push an adapter of a peft model or a Megatron-core model as a new version.

        Its base is a version of another model.

        The first push registers the model by the adapter's tensors. All ranks call this. Under DDP all ranks have equal
        copies, and the service uses one; under FSDP2 each rank has its part. The version has the same files as peft's
        ``save_pretrained`` writes.

        For a Megatron-core model with Megatron-Bridge's ``LoRA`` or ``CanonicalLoRA``, each rank pushes its shards as
        peft's tensors, with the names that the weight map of the base gives them. The config is derived from rank and
        alpha of the layers, which the ranks exchange through the store of torch.distributed.

        Args:
            model: ``namespace/name`` of the adapter.
            peft_model: result of ``peft.get_peft_model``, which may be wrapped by DDP or torch.compile; or a
                Megatron-core model, or the list of its virtual stages.
            base: the version that is the base, such as ``acme/smol@17``; a ref is resolved once. The service keeps the
                base as long as a version of the adapter is based on it.
            step: the training step.
            adapter_name: name of the adapter in the model.
            rank, world_size, run, request_id: see `push_state_dict`.
            save_embedding_layers: as for peft's ``save_pretrained``. With ``auto`` peft may look up the base's config
                in the Hub.
            options: see `push`.

        Raises:
            NotFound: the base does not exist.
            InvalidArgument: the argument is not a peft model, it does not have an adapter with this name, or the base
                is not a whole model; or a Megatron-core model has no adapters, or its base has no weight map.
            LayoutError: the base lacks modules of the adapter, or has them with other numbers of features; or adapters
                of a Megatron-core model are not LoRA.
            FailedPrecondition: the name is registered for a model, or for an adapter with other tensors (another rank
                or other target modules); or the base is not durable.
            PermissionDenied: the caller may not pull the base.
            ResourceExhausted: the caller has adapters on as many versions of the base as the policy allows.

        Examples:
            >>> handle = trainer.push_adapter("acme/french", peft_model, base="acme/smol@1", step=200)
            >>> version = handle.wait()
            >>> print(version, "on", version.base)
            acme/french@1 (durable, step 200) on acme/smol@1
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
        """Push the weights of a Hugging Face folder as a new version of a registered model; its other files too if it
        has a ``config.json``.

        The folder's files replace the registered ones, so that this version and later ones have them. Registered files
        that the folder does not have stay, except tokenizer files if the folder has a tokenizer. A folder without
        ``config.json`` does not change registered files.

        Args:
            model: ``namespace/name`` of a registered model.
            hf_dir: a folder with safetensors files. Its ``config.json``, or the model's if it has none, determines the
                tied tensors.
            step: recorded with the version.
            run: overrides the client's run.
            request_id: ID by which a repeated call finds the version of the first call; unique by default.
            cast: ``allow`` casts floating-point tensors to the model's dtype while they are read, if theirs differs;
                ``exact`` casts them only if the model's dtype is wider; ``never`` refuses them. The report contains the
                number of cast tensors.
            hold_seal: see `push_shards`.
            options: see `push`.

        Raises:
            NotFound: the model is not registered, or the folder has no safetensors files.
            LayoutError: the folder's tensors differ from the model's, or its ``config.json`` describes another model.
            DataLoss: a file is damaged.

        Examples:
            >>> handle = trainer.push_folder("acme/smol", folder, step=200)
            >>> print(handle.wait())
            acme/smol@2 (durable, step 200)
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
        """Register a model by a Hugging Face folder: its ``config.json``, tokenizer and other files, but not its
        weights.

        A model type without a weight map is registered by its tensors: by the headers of the folder's weights, or by
        ``tensors``. Such a model has only Hugging Face's names. Calling this again is harmless, so every rank may call
        it, with its own part of ``tensors``.

        Args:
            model: ``namespace/name``.
            hf_dir: the folder. If it has weights, their headers are compared with ``config.json``.
            dtype: dtype of the weights, such as ``bf16``, which is written to the registered ``config.json``; by
                default each tensor keeps its own dtype if the tensors are known, otherwise the dtype in ``config.json``
                is used. Without a weight map, it applies only to floating-point tensors of 16 bits or more.
            tensors: a torch module, a state dict, or pairs of name and tensor, as for `push_state_dict`. The model is
                registered by their names, global shapes and dtypes; by default by the folder's weights. Their data is
                not read, so they may be on the meta device.
            weight_map: False registers the model only by its tensors, even if its model type has a weight map, for a
                quantised model or a model with custom layers.

        Raises:
            InvalidArgument: the model type has no weight map and the tensors are not known, or the tensors differ from
                what ``config.json`` describes (names them).
            LayoutError: ``tensors`` contains LoRA adapters that are not merged, or values that are not tensors.
            DataLoss: a weight file is damaged.
            FailedPrecondition: the model is already registered with other tensors.

        Examples:
            >>> registered = trainer.register_model("acme/other", folder, dtype="bf16")
            >>> registered.model_type, registered.dtype, registered.tensor_count
            ('qwen3', 'BF16', 24)
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
            dtype: dtype to which floating-point weights are cast while they are read, such as ``bf16``; by default
                their own.
            dequantize: dtype to which block-quantised fp8 weights are dequantised while they are read, such as
                ``bf16``; by default they stay quantised.
            step: recorded with the version.
            run: overrides the client's run.
            weight_map: see `register_model`.
            options: see `push`.

        Raises:
            The errors of `register_model` and `push_folder`, and:
            InvalidArgument: ``dequantize`` is given, but no weight is quantised or a scale is missing; or ``dtype`` is
                given, but weights cannot be cast to it.

        Examples:
            >>> handle = trainer.import_folder("acme/other", folder, dtype="bf16")
            >>> print(handle.wait())
            acme/other@1 (durable, step 0)
            >>> handle.report().cast_tensors
            24
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
            folder: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``, which are kept unchanged;
                other files are ignored.
            base: the version that is the base, such as ``acme/smol@17``; a ref is resolved once.
            step: recorded with the version.
            run: overrides the client's run.
            options: see `push`.

        Raises:
            NotFound: peft did not write the folder, or the base does not exist.
            InvalidArgument: the weights are a pickle, or the base is not a whole model.
            LayoutError: the base lacks modules of the adapter, or has them with other features.
            FailedPrecondition: the name is registered for a model, or for an adapter with other tensors; or the base is
                not durable.
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
        """Push a checkpoint of Megatron-core (``torch_dist``), torch (``dcp``) or verl's FSDP2 ranks (one file each) as
        a training state, with its optimizer.

        The version has the checkpoint's layout, and the bytes of tensors are read directly from its files. Entries that
        are not tensors are stored as bytes; they are not deserialized.

        Args:
            model: ``namespace/name`` of a registered model.
            folder: the checkpoint; for Megatron-LM the folder of one iteration.
            step: recorded with the version; by default the step in the checkpoint or, without one, in the folder's
                name.
            run: overrides the client's run.
            options: see `push`. The version is not held for non-finite elements.

        Raises:
            NotFound: the model is not registered, the folder has no checkpoint, or a file of it is missing.
            DataLoss: the checkpoint is damaged or cut short.
            InvalidArgument: a tensor has an unsupported dtype or name, an entry that is not a tensor is larger than a
                GiB, or the step is unknown.
            LayoutError: a part of a tensor is missing or occurs twice (names each tensor).

        Examples:
            >>> weights, optimizer_state = get_state_dict(model, optimizer)
            >>> metadata = dcp.save({"model": weights, "optimizer": optimizer_state}, checkpoint_id=out)
            >>> handle = trainer.import_training("acme/smol", out, step=200)
            >>> print(handle.wait())
            acme/smol:training@1 (durable, step 200)
        """
        check_options(options)
        from weighbridge._trainers.states.checkpoints.checkpoint_folder import CheckpointFolder
        from weighbridge._trainers.states.checkpoints.checkpoint_step import known_step

        options["allow_nonfinite"] = True
        found = CheckpointFolder.read(Path(folder))
        step = known_step(found.step if step is None else step, folder)
        call = self._pushes.call(training_of(model), step, self._run(run), 0, 1, str(uuid.uuid4()), options, part=True)
        return self._pushes.push_shards(call, found.layout, found.space, found.shards)

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
        """Fill a sharded state dict in place from any version, regardless of the parallelism with which it was pushed.

        Only this rank's bytes are transferred. Tensors whose floating-point dtype differs from the model's are cast.

        With ``optimizer``, ``state`` or ``rank_state`` everything comes from a training state, as in
        `restore_state_dict`.

        Args:
            model: ``namespace/name``.
            sharded_state_dict: result of Megatron-core's ``model.sharded_state_dict()``.
            version: a number or a ref; by default the latest.
            optimizer: see `TrainerClient.push`; filled in place. If it has no state, its state is allocated first.
            state, rank_state, rank, world_size: see `restore_state_dict`.

        Returns:
            The version that was restored.

        Raises:
            NotFound: the model or version does not exist.
            InvalidArgument: the version lacks requested values.
            LayoutError: shapes, dtypes or names contradict the model or the training state.

        Examples:
            >>> version = trainer.restore("acme/smol", megatron_model.sharded_state_dict(), version="latest")
            >>> print(version)
            acme/smol@1 (durable, step 100)
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
        """Fill a torch model in place from any version, regardless of the parallelism with which it was pushed.

        Only this rank's bytes are transferred. Tensors whose floating-point dtype differs from the model's are cast.

        With ``optimizer``, ``state`` or ``rank_state`` everything comes from a training state, including parameters in
        their own dtypes, and ``version`` is a version of ``namespace/name:training``. Training then continues as if it
        had not stopped; on the same number of ranks its results are bit-identical.

        Args:
            model: ``namespace/name``.
            state_dict_or_module: see `push_state_dict`.
            version: a number or a ref; by default the latest.
            strict: whether the target must have exactly the tensors of the model, as for `Pull.into`. If False, the
                common tensors are filled, and names that the model does not have are refused.
            optimizer: see `push_state_dict`. Afterwards it has exactly the pushed state, whether or not it had made a
                step before.
            state: all or some of the names that were pushed as ``state``. Objects load their state; plain values are
                replaced in the mapping. If a different number of ranks pushed the state, all ranks get the values of
                rank 0.
            rank_state: the same for ``rank_state`` of this rank; only if the same number of ranks pushed it.
            rank, world_size: by default torch.distributed's, or 0 and 1.

        Returns:
            The version that was restored.

        Raises:
            NotFound: the model or version does not exist.
            InvalidArgument: the argument is not a state dict, or the version lacks requested values.
            LayoutError: tensors are missing, unexpected, or contradict the model, or LoRA adapters are not merged
                (names each tensor).

        Examples:
            >>> version = trainer.restore_state_dict("acme/smol", model, version="latest")
            >>> print(version)
            acme/smol@1 (durable, step 100)
            >>> model.model.norm.weight[:3].tolist()
            [0.5, 0.5, 0.5]
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
        """Fill the adapter of a model in place from any version, regardless of the parallelism with which it was
        pushed. All ranks call this.

        Only this rank's bytes are transferred. The model must already have the adapter, with the same rank, scales and
        target modules as the version.

        Args:
            model: ``namespace/name`` of the adapter.
            peft_model, adapter_name, save_embedding_layers, rank, world_size: see `push_adapter`.
            version: a number or a ref; by default the latest.

        Returns:
            The version that was restored.

        Raises:
            NotFound: the model or version does not exist.
            InvalidArgument: the model is not an adapter, or ``peft_model`` is not a model of peft or Megatron-core, or
                does not have an adapter with this name.
            LayoutError: the adapter in ``peft_model`` has other tensors, or scales of Megatron-core's layers differ
                (names them); or it is merged; or layers that the model fuses have adapters with different A in the
                version.
            FailedPrecondition: with the config of the adapter in ``peft_model``, the same tensors compute a different
                result (names the entries).
        """
        meant = _latest(model, version)
        return self._adapters.restore(meant, peft_model, adapter_name, save_embedding_layers, world_size)

    def restore_shards(
        self, model: str, layout: Layout, tensors: Sequence[torch.Tensor], *, version: str | int | None = None
    ) -> Version:
        """Fill the shards of any layout with Hugging Face's names. `restore_state_dict` is built on this.

        Args:
            model: ``namespace/name``.
            layout: the shards.
            tensors: one tensor for each shard, with the shape of its box, on any device. Elements are cast to the
                tensor's floating-point dtype.
            version: a number or a ref; by default the latest.

        Returns:
            The version that was restored.

        Raises:
            NotFound: the model, version or tensor does not exist.
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
        """Restore the shards of a layout in Megatron-core's tensor space, one after the other.

        Args:
            model: ``namespace/name``.
            layout: the shards, as a stream.
            tensor_for: returns the tensor to fill for a placement, given its index.
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
        """Write a training state as a checkpoint in the format of its trainer: ``torch_dist`` for Megatron-core,
        ``dcp`` for torch.

        Tensors are streamed. This process loads the other values of ranks, with ``weights_only``. The folder appears
        complete or not at all.

        Args:
            model: ``namespace/name``, or the name of its part.
            version: number or ref of a version of the part; None for the version that ``model`` names, or the latest.
            folder: a new or empty folder. For Megatron-core it is the argument of ``--load``: the checkpoint is its
                subfolder ``iter_%07d``, named by the step, next to ``latest_checkpointed_iteration.txt``.
            checkpoint_format: ``torch_dist`` or ``dcp``; by default the trainer's.
            replace: whether the folder may have content. The checkpoint in it is then replaced; for Megatron-core,
                other iterations stay.
            max_file_bytes: approximate limit on the size of a ``.distcp`` file.
            on_progress: called with the bytes written so far and the total.

        Raises:
            NotFound: the model or version does not exist.
            InvalidArgument: the folder is not empty, the trainer uses another checkpoint format, or the name of a value
                has another meaning in a checkpoint.
            LayoutError: the training state has no tensors.
            DataLoss: the values of a rank are missing or malformed.
            ResourceExhausted: the disk is full.
            FailedPrecondition: the folder cannot be written.

        Examples:
            >>> handle = trainer.push_state_dict("acme/smol", model, step=200, optimizer=optimizer)
            >>> version = handle.training.wait()
            >>> checkpoint = trainer.export_training("acme/smol", None, out)
            >>> checkpoint.format, checkpoint.version.step
            ('dcp', 200)
        """
        return write_checkpoint(
            self._connection,
            _latest(model, version),
            Path(folder),
            checkpoint_format=checkpoint_format,
            replaces=replace,
            max_file_bytes=max_file_bytes,
            on_progress=on_progress,
        )

    def describe_tensors(self, model: str, *, refresh: bool = False) -> Mapping[str, TensorSpec]:
        """Return a model's tensors by name. The client requests them once and then caches them. ``refresh`` requests
        them again, because the name may now belong to another model.

        Raises:
            NotFound: the model is not registered.
        """
        return self._known.described(model, refresh=refresh)

    def describe_shards(self, model: str, rank: MegatronRank | None = None) -> Layout:
        """Return the shards that a Megatron-core rank holds, by per-layer keys.

        Args:
            model: ``namespace/name``.
            rank: position of the rank; by default the only rank.

        Raises:
            InvalidArgument: the model cannot be divided by the parallel sizes.
        """
        return self._connection.run(push_calls.describe_shards(model, rank or MegatronRank()))

    def _run(self, run: str | None) -> str:
        return self.run if run is None else run


def _latest(model: str, version: str | int | None) -> Reference:
    return Reference.of(model, version, REF_LATEST)
