"""Client that takes in what lies in folders: registers models by them, and pushes their weights and training states."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from weighbridge._clients.calls import model_calls
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options
from weighbridge._core import dtypes
from weighbridge._core.dtypes import DType
from weighbridge._core.file_names import ADAPTER_CONFIG, is_adapter
from weighbridge._core.layouts import TensorSpec, adapter_digest
from weighbridge._core.metadata import ADAPTER_DIGEST, BASE, check_base
from weighbridge._core.references import training_of
from weighbridge._core.resources import Model
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats import safetensors_files
from weighbridge._formats.folder_weights import FolderWeights
from weighbridge._formats.hf_folder import in_dtype_of, with_dtype
from weighbridge._formats.side_files.carried import carried_files, has_tokenizer
from weighbridge._formats.side_files.reading import CONFIG, SideFiles
from weighbridge._trainers.peft_adapters import AdapterFolder
from weighbridge._trainers.push_client import PushingClient
from weighbridge.errors import FailedPrecondition, InvalidArgument, LayoutError
from weighbridge.v1.model_service_pb2 import RegisterModelRequest

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class ImportingClient(PushingClient):
    """The base of clients that take in folders; see `TrainerClient` for the arguments."""

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
        folder = Path(hf_dir)
        files = _side_files(model, folder)
        specs: Iterable[TensorSpec] = ()
        if tensors is not None:
            from weighbridge._formats.torch_state import tensor_specs

            specs = tensor_specs(tensors)
        elif safetensors_files.has_weights(folder):
            specs = _read(model, folder, files["config.json"]).layout.tensors.values()
        if dtype:
            files["config.json"] = _in_dtype(files["config.json"], dtypes.parse(dtype))
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
        check_options(options)
        wide = dtypes.parse(dequantize) if dequantize else None
        if wide is not None and not wide.is_float:
            raise InvalidArgument(f"fp8 weights cannot become {wide}", fix="use bf16, fp16 or fp32")
        if wide is not None and dtype:
            raise InvalidArgument(
                "weights are dequantised or cast, and not both", fix=f"leave the dtype {dtype} out"
            )
        files = _side_files(model, Path(hf_dir))
        weights = _read(model, Path(hf_dir), files["config.json"], wide)
        files["config.json"] = weights.config_json
        if dtype:  # before anything is registered: a model keeps the dtypes that it was registered with
            files["config.json"] = _in_dtype(weights.config_json, weights.castable_to(dtype))
        self.register_files(model, files, dtype, weights.layout.tensors.values(), weight_map=weight_map)
        if dtype or weights.beside is not None:
            with self._tensors(model) as tensors:
                weights = weights.as_model_has_them(tensors, "allow")
        return self._push_weights(model, weights, step, run, str(uuid.uuid4()), options)

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
        check_options(options)
        found = AdapterFolder.read(Path(folder))
        check_base(base)
        tensors = found.layout.tensors.values()
        said = {BASE: base, ADAPTER_DIGEST: adapter_digest(found.config_json, tensors)}
        options["metadata"] = {**(options.get("metadata") or {}), **said}
        opening = self._opening(model, step, run, 1, str(uuid.uuid4()), part=True)
        return self._push_layout(
            opening, 0, found.layout, TensorSpace.HUGGING_FACE, found.open_source, options,
            registration=adapter_registration(model, base, found.config_json, tensors),
        )  # fmt: skip

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
        return self.push_shards(
            training_of(model), found.layout, found.space, found.open_source, step=step,
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
        check_options(options)
        folder, registered = Path(hf_dir), self.model_files(model)
        if is_adapter(registered):
            self.model(model).check_whole()
        files = registered
        if os.path.lexists(folder / CONFIG):
            sides = SideFiles.read(folder)
            sides.tell(model, folder)
            files = carried_files(registered, sides.files)
        weights = _read(model, folder, files[CONFIG])
        with self._tensors(model) as tensors:
            weights = weights.as_model_has_them(tensors, cast)
            source = f"{CONFIG} of {folder}"
            replace_files(self, model, source, registered, files, tensors, cast=bool(weights.cast_from))
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


def adapter_registration(
    model: str, base: str, config_json: bytes, tensors: Iterable[TensorSpec]
) -> RegisterModelRequest:
    """The request that registers an adapter, if it fits its base.

    Args:
        model: ``namespace/name`` of the adapter.
        base: the version that it is on.
        config_json: content of its ``adapter_config.json``.
        tensors: its tensors, whole.
    """
    files = {ADAPTER_CONFIG: config_json}
    return model_calls.registration(model, files, tensors=tensors, weight_map=False, base=base)


def _read(model: str, folder: Path, config_json: bytes, dequantize: DType | None = None) -> FolderWeights:
    """The weights in a folder; a log names what in it is not pushed."""
    weights = FolderWeights.read(folder, config_json, dequantize=dequantize)
    for remark in weights.remarks:
        log.warning("%s: %s", model, remark)
    return weights


def _in_dtype(config_json: bytes, dtype: DType) -> bytes:
    """A config that names a dtype; one that cannot be read as it is: the service says what is wrong with it."""
    try:
        return with_dtype(config_json, dtype)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return config_json


def _side_files(model: str, folder: Path) -> dict[str, bytes]:
    """The files of a folder besides its weights; logs what is left out or missing."""
    sides = SideFiles.read(folder)
    sides.tell(model, folder)
    if not has_tokenizer(sides.files) and _is_first_rank():
        log.warning("%s: %s has no tokenizer: engines that need one will not find it here", model, folder)
    return sides.files


def _is_first_rank() -> bool:
    """Whether this process is to say what all ranks of its job would say."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return bool(torch.distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def replace_files(
    client: ImportingClient,
    model: str,
    source: str,
    registered: Mapping[str, bytes],
    files: Mapping[str, bytes],
    tensors: Mapping[str, TensorSpec],
    *,
    cast: bool,
) -> None:
    """Have the next versions carry these files instead of the registered ones, if they are others.

    Args:
        client: registers them.
        model: ``namespace/name``.
        source: what to call the config among them.
        registered: the files as they are registered.
        files: those that are to be.
        tensors: the model's, which stay as they are.
        cast: whether weights are cast to the model's dtypes on the way; the folder's config then names another dtype than the version has.

    Raises:
        LayoutError: the config describes a model with other tensors, or with the same ones in other places, as by its heads.
    """
    if cast:
        files = {**files, CONFIG: in_dtype_of(tensors.values(), files[CONFIG])}
    if files == registered:
        return
    try:
        client.register_files(model, files, "", tensors.values(), weight_map=client.model(model).weight_map)
    except (FailedPrecondition, InvalidArgument) as error:
        raise LayoutError(
            f"{source} describes another model than {model}: {error.message}",
            details=error.details,
            fix="register it under another name: weighbridge import, or TrainerClient.register_model",
        ) from error
    other = sorted(name for name in {*files, *registered} if files.get(name) != registered.get(name))
    log.info("%s: versions have other files than before from now on: %s", model, ", ".join(other))
