"""Client of a trainer rank: pushes the shards it holds; restores are its base's."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from weighbridge._clients.copies import Copies, CopiesInCall
from weighbridge._clients.copies_ahead import CopiesAhead, nbytes_ahead
from weighbridge._clients.copying_behind import StepGate
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options, opening_of, say
from weighbridge._clients.pushing import Pusher
from weighbridge._clients.restorer import RestoringClient
from weighbridge._clients.training import TrainingPushes, training_state
from weighbridge._clients.transport import ConnectionOptions
from weighbridge._core import dtypes
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.references import is_training, training_of
from weighbridge._core.resources import Model
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats import hf_folder, safetensors_files
from weighbridge._formats.folder_weights import FolderWeights
from weighbridge._formats.push_sources import (
    OpenSource,
    StagingPool,
    cast_dtypes,
)
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import checkpoint_service_pb2 as pb

if TYPE_CHECKING:
    import torch

    from weighbridge._formats.training.training_state import TrainingState

log = logging.getLogger(__name__)


class TrainerClient(RestoringClient):
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
        self._ahead_bytes = ahead_bytes
        self._ahead = StagingPool()
        self._staging = StagingPool()
        self._pusher = Pusher(self._connection)
        self._steps = StepGate()
        self._training = TrainingPushes(self._connection)

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
            dtype: of the weights, such as ``bf16``; by default each tensor's own if they are known, and otherwise what
                ``config.json`` says. Without a weight map, only floating-point tensors of 16 bits or more get it.
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
        folder = Path(hf_dir)
        files = hf_folder.side_files(folder)
        _tell_of_tokenizer(model, folder, files)
        specs: Iterable[TensorSpec] = ()
        if tensors is not None:
            from weighbridge._formats.torch_state import tensor_specs

            specs = tensor_specs(tensors)
        elif safetensors_files.has_weights(folder):
            specs = FolderWeights.read(folder, files["config.json"]).layout.tensors.values()
        return self.register_files(model, files, dtype, specs, weight_map=weight_map)

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
            optimizer: what ``get_megatron_optimizer`` returned, after its first step: `FP32Optimizer`, `Float16OptimizerWithFloat16Params` or
                `DistributedOptimizer`, chained or not.
            state, rank_state, until: as for `push_state_dict`.
            options: metadata, and whether the version is held: `PushOptions`.

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
        from weighbridge._formats.megatron_state import sharded_tensors
        from weighbridge._formats.torch_state import rank_and_world
        from weighbridge._formats.training.megatron_training import training_tensors

        rank, world_size = rank_and_world(rank, world_size)
        opening = self._opening(model, step, run, world_size, request_id)
        with self._telling_both(opening, rank, optimizer, state, rank_state):
            say(opening, options)
            shards = sharded_tensors(sharded_state_dict)
            opening.cast_from.extend(cast_dtypes(shards.layout, shards.tensors))
            held = partial(training_tensors, shards, optimizer)
            training = training_state(held, rank, optimizer=optimizer, state=state, rank_state=rank_state)
            copies = self._copies(model, shards.layout, shards.tensors, training, until, optimizer)
        push = self._push_of(opening, rank, shards.layout, TensorSpace.MEGATRON, shards.tensors, copies)
        return self._training.beside(push, opening, rank, training, copies)

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
            state_dict_or_module: a module, of which the ``state_dict()`` is taken, without LoRA adapters that peft has merged; a state dict; or pairs of name and tensor. Tensors are
                DTensors of any mesh, or plain ones, which every rank holds whole; on any device.
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
            LayoutError: names, shapes, dtypes or placements contradict the model, LoRA adapters are not merged, or the ranks together do
                not hold all of it; names each tensor.
            AlreadyExists: another process pushes as this rank of this step.
        """
        check_options(options)
        from weighbridge._formats.torch_state import rank_and_world, torch_shards
        from weighbridge._formats.training.torch_training import training_tensors

        rank, world_size = rank_and_world(rank, world_size)
        opening = self._opening(model, step, run, world_size, request_id)
        with self._tensors(model) as tensors:
            with self._telling_both(opening, rank, optimizer, state, rank_state):
                say(opening, options)
                shards = torch_shards(
                    state_dict_or_module, tensors, cast=cast, whole=world_size == 1, of=model
                )
                opening.cast_from.extend(cast_dtypes(shards.layout, shards.tensors))
                training = training_state(
                    partial(training_tensors, state_dict_or_module, optimizer),
                    rank,
                    optimizer=optimizer,
                    state=state,
                    rank_state=rank_state,
                )
                copies = self._copies(model, shards.layout, shards.tensors, training, until, optimizer)
            space = TensorSpace.HUGGING_FACE
            push = self._push_of(opening, rank, shards.layout, space, shards.tensors, copies)
            return self._training.beside(push, opening, rank, training, copies)

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
            with self._tensors(model) as tensors:
                with self._pusher.telling([opening], rank):
                    say(opening, options)
                    if held is None:
                        shares = share_layout(tensors, rank, ranks)
                        given = partial(GatheredShards, rank=rank, ranks=ranks)
                    else:
                        shares = held_layout(tensors, held)
                        given = partial(GatheredShards, rank=0, ranks=1, expected=shares.tensors)
                make = partial(given, passing, tensors, cast=cast)
                return self._pusher.push(
                    opening, rank, shares, TensorSpace.HUGGING_FACE, OpenPassing(make, buffer_bytes)
                )
        except Exception:
            for _ in (
                passing
            ):  # the other ranks gather them together with this one: they would wait for it for ever
                pass
            raise

    def _opening(
        self,
        model: str,
        step: int,
        run: str | None,
        ranks: int,
        request_id: str | None,
        *,
        part: bool = False,
    ) -> pb.OpenVersionRequest:
        run, client_id = self.run if run is None else run, self._connection.client_id
        if is_training(model) and not part:
            raise InvalidArgument(
                f"{model} takes training states alone, which are pushed beside weights",
                fix=f"push to {model.partition(':')[0]}, with optimizer= or state=",
            )
        return opening_of(model, step=step, run=run, ranks=ranks, client_id=client_id, request_id=request_id)

    def _telling_both(
        self, opening: pb.OpenVersionRequest, rank: int, *training: object
    ) -> AbstractContextManager[None]:
        """As `Pusher.telling`, of weights and of the training state beside them if anything of it is given."""
        both = [opening]
        if any(each is not None for each in training):
            both.append(self._training.opening(opening))
        return self._pusher.telling(both, rank)

    def _copies(
        self,
        model: str,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        training: TrainingState | None,
        until: Any,
        optimizer: Any,
    ) -> Copies:
        """How the shards of weights and of the training state beside them are copied."""
        if until is not None:
            both = [*tensors, *(() if training is None else training.tensors)]
            return self._steps.until(until, optimizer, both)
        if training is None:
            return CopiesInCall()
        weights = self._pusher.expected(model, layout, tensors)
        beside = self._training.expected(model, training)
        if weights is None or beside is None or nbytes_ahead([*weights, *beside]) > self._ahead_bytes:
            return CopiesInCall()
        return CopiesAhead([*weights, *beside], self._ahead)

    def _push_of(
        self,
        opening: pb.OpenVersionRequest,
        rank: int,
        layout: Layout,
        space: TensorSpace,
        tensors: Sequence[torch.Tensor],
        copies: Copies,
    ) -> Callable[[pb.OpenVersionRequest | None], PushHandle]:
        """A push of tensors that is made when it is called, with the opening of what comes behind."""

        def push(behind: pb.OpenVersionRequest | None) -> PushHandle:
            source, copying = copies.source(tensors, self._staging)
            return self._pusher.push(opening, rank, layout, space, source, behind=behind, copying=copying)

        return push

    def import_folder(
        self,
        model: str,
        hf_dir: str | Path,
        *,
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
            dequantize: the dtype, such as ``bf16``, that block-quantised fp8 weights are turned into on the way; by default
                they are kept as they are.
            step: recorded with the version.
            run: overrides the client's.
            weight_map: as for `register_model`.
            options: as for `push`.

        Raises:
            As `register_model` and `push_folder` do, and:
            InvalidArgument: ``dequantize`` is given, and there is nothing to dequantise or a scale is missing.
        """
        check_options(options)
        dtype = dtypes.parse(dequantize) if dequantize else None
        if dtype is not None and not dtype.is_float:
            raise InvalidArgument(f"fp8 weights cannot become {dtype}", fix="use bf16, fp16 or fp32")
        files = hf_folder.side_files(Path(hf_dir))
        _tell_of_tokenizer(model, hf_dir, files)
        weights = FolderWeights.read(Path(hf_dir), files["config.json"], dequantize=dtype)
        files["config.json"] = weights.config_json
        self.register_files(model, files, "", weights.layout.tensors.values(), weight_map=weight_map)
        return self._push_weights(model, weights, step, run, str(uuid.uuid4()), options)

    def import_training(
        self,
        model: str,
        folder: str | Path,
        *,
        step: int | None = None,
        run: str | None = None,
        **options: Unpack[PushOptions],
    ) -> PushHandle:
        """Push a checkpoint of Megatron-core (``torch_dist``) or torch (``dcp``) as a training state, with its optimizer.

        Its layout is what is declared, and the bytes of tensors are read from where they lie. Entries that are no tensors are kept as the bytes
        that they are, unopened.

        Args:
            model: ``namespace/name``, registered before.
            folder: the checkpoint; of Megatron-LM that of one iteration.
            step: recorded with the version; by default the iteration that the folder is named by, or 0.
            run: overrides the client's.
            options: as for `push`. Elements that are not finite do not hold it.

        Raises:
            NotFound: the model is not registered, there is no checkpoint, or a file of it is missing.
            DataLoss: it is damaged or cut short.
            InvalidArgument: a tensor has a dtype or name that is not supported, or what is no tensor has more than a GiB.
            LayoutError: a part of a tensor is missing, or there twice; names each tensor.
        """
        check_options(options)
        from weighbridge._formats.training.checkpoint_folder import CheckpointFolder

        options["allow_nonfinite"] = True
        found = CheckpointFolder.read(Path(folder))
        return self.push_shards(
            training_of(model), found.layout, found.space, found.open_source, step=found.step if step is None else step,
            rank=0, world_size=1, run=run, request_id=str(uuid.uuid4()), **options,
        )  # fmt: skip

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
        """Push the weights of a Hugging Face folder as a new version of a registered model.

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
            LayoutError: the folder's tensors are not those of the model.
            DataLoss: a file is damaged.
        """
        check_options(options)
        config = Path(hf_dir) / "config.json"
        config_json = config.read_bytes() if config.is_file() else self.model_files(model)["config.json"]
        weights = FolderWeights.read(Path(hf_dir), config_json)
        with self._tensors(model) as tensors:
            weights = weights.as_model_has_them(tensors, cast)
            request_id = request_id or str(uuid.uuid4())
            return self._push_weights(model, weights, step, run, request_id, options, hold_seal=hold_seal)

    def _push_weights(
        self,
        model: str,
        weights: FolderWeights,
        step: int,
        run: str | None,
        request_id: str,
        options: PushOptions,
        *,
        hold_seal: bool = False,
    ) -> PushHandle:
        return self.push_shards(
            model, weights.layout, TensorSpace.HUGGING_FACE, weights.open_source, step=step, rank=0, world_size=1, run=run,
            request_id=request_id, hold_seal=hold_seal, cast_from=weights.cast_from, **options,
        )  # fmt: skip

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
        opening = self._opening(model, step, run, world_size, request_id, part=True)
        opening.cast_from.extend(cast_from)
        with self._pusher.telling([opening], rank):
            say(opening, options)
        return self._pusher.push(opening, rank, layout, space, open_source, hold_seal=hold_seal)

    def close(self) -> None:
        """Wait until what was pushed has arrived or failed, then close the connection."""
        self._pusher.close()
        self._training.close()
        super().close()


def _tell_of_tokenizer(model: str, folder: str | Path, files: Iterable[str]) -> None:
    if not hf_folder.has_tokenizer(files):
        log.warning("%s: %s has no tokenizer: engines that need one will not find it here", model, folder)
