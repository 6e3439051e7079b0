"""Client that takes in what lies in folders: registers models by them, and pushes their weights and training states."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from weighbridge._clients.push_client import PushingClient
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options
from weighbridge._core import dtypes
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.references import training_of
from weighbridge._core.resources import Model
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats import hf_folder, safetensors_files
from weighbridge._formats.folder_weights import FolderWeights
from weighbridge.errors import InvalidArgument

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
            specs = _read(model, folder, files["config.json"]).layout.tensors.values()
        return self.register_files(model, files, dtype, specs, weight_map=weight_map)

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
        weights = _read(model, Path(hf_dir), files["config.json"], dtype)
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
        """Push a checkpoint of Megatron-core (``torch_dist``), torch (``dcp``) or verl's FSDP2 ranks (a file of each) as a training state, with its optimizer.

        Its layout is what is declared, and the bytes of tensors are read from where they lie. Entries that are no tensors are kept as the bytes
        that they are, unopened.

        Args:
            model: ``namespace/name``, registered before.
            folder: the checkpoint; of Megatron-LM that of one iteration.
            step: recorded with the version; by default the iteration that the folder is named by, or what an export has noted in it, or 0.
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
        weights = _read(model, Path(hf_dir), config_json)
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


def _read(model: str, folder: Path, config_json: bytes, dequantize: DType | None = None) -> FolderWeights:
    """The weights in a folder; a log names what in it is not pushed."""
    weights = FolderWeights.read(folder, config_json, dequantize=dequantize)
    for remark in weights.remarks:
        log.warning("%s: %s", model, remark)
    return weights


def _tell_of_tokenizer(model: str, folder: str | Path, files: Iterable[str]) -> None:
    if not hf_folder.has_tokenizer(files):
        log.warning("%s: %s has no tokenizer: engines that need one will not find it here", model, folder)
