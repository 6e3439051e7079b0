"""Push of a checkpoint. The service treats it like a push by a trainer with a single rank."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions
from weighbridge._core.boxes import Box
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import Layout, Placement, Shard, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats import safetensors_files
from weighbridge._formats.folder_weights import StandIns
from weighbridge._formats.hf_folder import in_dtype_of
from weighbridge._formats.push_sources import HeldShards, MappedSource, cast_dtypes
from weighbridge._formats.side_files.reading import CONFIG
from weighbridge._memory.file_reads import OpenFile
from weighbridge._trainers.states.checkpoints.checkpoint_step import step_of_folder
from weighbridge._trainers.torch_dist.noted_values import common_values, trained_arguments
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import InvalidArgument
from weighbridge_service.converting.checkpoint_model import (
    checkpoint_model,
    model_part,
    side_files_of,
)
from weighbridge_service.converting.named_model import Twin, check_twins, named_model, read_checkpoint
from weighbridge_service.converting.trained_model import check_trained
from weighbridge_service.families import has_weight_map
from weighbridge_service.models.bridges import bridge_for, parse_config
from weighbridge_service.plan.casting import ROUTER_BIASES, cast_specs


@dataclass(frozen=True)
class CheckpointToPush:
    """A checkpoint with all information that is needed to register its model.

    Attributes:
        folder: folder of the checkpoint.
        side_files: files of the model other than its weights.
        tensors: tensors of the model in Hugging Face's space, in the dtypes of the checkpoint.
        shards: weights of the checkpoint, in the tensor space `space`, each with the place of its bytes.
        declared: specs of the tensors that the shards are parts of.
        space: tensor space of the shards.
        tied: copies of other weights, chunk by chunk. They must equal their originals.
        left_out: number of entries that are not weights, and of files that do not belong to the model, by kind.
        step: step from the checkpoint or from the name of its folder; None if neither contains a step.
        targets: for each declared tensor, one of the model's tensors that are made from it.
        keep_in_fp32: suffixes of the names of tensors that a cast does not change.
    """

    folder: Path
    side_files: Mapping[str, bytes] = field(repr=False)
    tensors: Sequence[TensorSpec] = field(repr=False)
    shards: Sequence[tuple[Shard, Placement]] = field(repr=False)
    declared: Sequence[TensorSpec] = field(repr=False)
    space: TensorSpace
    tied: Sequence[Twin] = field(repr=False)
    left_out: Mapping[str, int] = field(repr=False)
    step: int | None
    targets: Mapping[str, str] = field(repr=False)
    keep_in_fp32: tuple[str, ...] = ()

    @staticmethod
    def read(folder: Path, config: Path | None) -> CheckpointToPush:
        """Inspect a checkpoint. Does not read weights and does not execute code from the checkpoint.

        Args:
            folder: folder of the checkpoint.
            config: Hugging Face folder with the model's config, tokenizer and similar files; None to search the
                checkpoint.

        Raises:
            NotFound: the checkpoint or ``config.json`` does not exist.
            DataLoss: the checkpoint is damaged.
            InvalidArgument: the trainer's arguments in the checkpoint contradict the config.
            LayoutError: a tensor is unknown, or its shape differs from the model's.
        """
        checkpoint, named = read_checkpoint(folder)
        sides = side_files_of(folder, config)
        side_files = sides.files
        step = step_of_folder(folder, checkpoint)
        parsed = parse_config(side_files["config.json"])
        kept = bridge_for(side_files["config.json"]).keep_in_fp32 if has_weight_map(parsed) else ROUTER_BIASES
        if named:
            model = named_model(side_files["config.json"], checkpoint)
            specs = tuple(model.tensors.values())
            return CheckpointToPush(
                folder,
                side_files,
                specs,
                tuple(model.shards()),
                specs,
                TensorSpace.HUGGING_FACE,
                model.tied,
                {**model.left_out, **sides.kinds()},
                step,
                {name: name for name in model.tensors},
                kept,
            )
        check_trained(side_files["config.json"], trained_arguments(common_values(folder, checkpoint)))
        layout, left_out = model_part(checkpoint)
        tensors, relation = checkpoint_model(side_files["config.json"], layout)
        specs = tuple(tensors.values())
        return CheckpointToPush(
            folder,
            side_files,
            specs,
            tuple((place.shard, place) for place in layout.placements),
            tuple(layout.tensors.values()),
            TensorSpace.MEGATRON,
            (),
            {**left_out, **sides.kinds()},
            step,
            {link.source: link.target for link in relation.links},
            kept,
        )

    def cast(self, dtype: DType) -> Mapping[str, TensorSpec]:
        """Tensors of the model after a cast of floating-point weights.

        Raises:
            InvalidArgument: weights cannot be cast to that dtype, or a tensor cannot be cast.
        """
        return {spec.name: spec for spec in cast_specs(self.tensors, dtype, self.keep_in_fp32)}

    def push(
        self,
        client: TrainerClient,
        model: str,
        *,
        step: int,
        run: str,
        dtype: DType | None = None,
        weight_map: bool = True,
        **options: Unpack[PushOptions],
    ) -> PushHandle:
        """Register the model and push the weights as a new version, directly from the checkpoint's files.

        Args:
            client: client of the service.
            model: ``namespace/name``.
            step: step to record with the version.
            run: run to record with the version.
            dtype: dtype to cast floating-point weights to while they are read; None does not cast them.
            weight_map: as for `TrainerClient.register_model`.
            options: as for `TrainerClient.push`.

        Raises:
            InvalidArgument: weights cannot be cast to that dtype, or a tensor cannot be cast; or the checkpoint has
                Megatron-core's names and ``weight_map`` is False.
            LayoutError: a tensor is missing or duplicated. The error names it.
            FailedPrecondition: the model is already registered with other tensors.
            DataLoss: a tensor differs from the one that it is tied to.
        """
        if not weight_map and self.space == TensorSpace.MEGATRON:
            raise InvalidArgument(
                "the checkpoint has Megatron-core's names, which only a weight map relates to a model's",
                fix="leave --no-weight-map out",
            )
        places = [place for _, place in self.shards]
        names = dict.fromkeys(place.buffer for place in places)
        files = {name: safetensors_files.map_file(self.folder, name) for name in names}
        check_twins(self.folder, self.tied)
        tensors = {spec.name: spec for spec in self.tensors} if dtype is None else self.cast(dtype)
        client.register_files(
            model,
            _in_dtype_of(tensors.values(), self.side_files),
            tensors=tensors.values(),
            weight_map=weight_map,
        )
        declared = [replace(spec, dtype=tensors[self.targets[spec.name]].dtype) for spec in self.declared]
        stream = Layout.stream(declared, [shard for shard, _ in self.shards])
        shards: HeldShards
        if declared != list(self.declared):
            shards, cast_from = self._casting(stream, files)
        else:
            shards, cast_from = MappedSource(stream, places, files), ()
        return client.push_shards(
            model, stream, self.space, shards, step=step, rank=0, world_size=1, run=run,
            request_id=str(uuid.uuid4()), cast_from=cast_from, **options,
        )  # fmt: skip

    def _casting(self, stream: Layout, files: Mapping[str, OpenFile]) -> tuple[HeldShards, tuple[str, ...]]:
        """The shards in the dtypes of the cast, and their original dtypes under safetensors' names."""
        own = {spec.name: spec.dtype for spec in self.declared}
        specs, placements = {}, []
        for index, (shard, place) in enumerate(self.shards):  # each as a tensor of its own
            name = str(index)
            specs[name] = TensorSpec(name, own[shard.tensor], shard.box.extent)
            placements.append(place._replace(shard=Shard(name, Box.whole(shard.box.extent))))
        stand_ins = StandIns(Layout(specs, tuple(placements)), files)
        tensors = [stand_ins.tensors[name] for name in specs]
        return stand_ins.shards(stream, tensors), tuple(cast_dtypes(stream, tensors))


def _in_dtype_of(tensors: Iterable[TensorSpec], side_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files of a model. The config in them gets the dtype of most of the weights."""
    return {**side_files, CONFIG: in_dtype_of(tensors, side_files[CONFIG])}
