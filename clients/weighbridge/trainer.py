"""What a trainer rank does: hand over the shards it holds, and take shards of any version back."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighbridge import bulk, dtypes, hf_folder, pieces, rpc, safetensors_files, wire
from weighbridge.client import Client
from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge.folder_weights import FolderWeights
from weighbridge.layouts import Layout, TensorSpec
from weighbridge.push_handle import PushHandle
from weighbridge.push_sources import OpenSource, ShardSource, StagingPool, TensorSource
from weighbridge.pushing import Pusher
from weighbridge.request_parts import encoded_parts
from weighbridge.resources import Model, Version
from weighbridge.striping import Striping
from weighbridge.tensor_stream import StreamWriter
from weighbridge.v1 import checkpoint_service_pb2 as pb
from weighbridge.v1 import checkpoint_service_pb2_grpc, resources_pb2

if TYPE_CHECKING:
    import torch


class TrainerClient(Client):
    """The trainer's side of the service; one for each rank.

    Args:
        server: ``host:port`` of the gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        run: name of the training run, the same on all ranks; part of the version's lineage.
        retry_seconds, lane, connections: as for `Client`.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        run: str = "default",
        retry_seconds: float = 60.0,
        lane: str | None = None,
        connections: int | None = None,
    ) -> None:
        super().__init__(server, retry_seconds=retry_seconds, lane=lane, connections=connections)
        self.run = run
        self._staging = StagingPool()
        self._pusher = Pusher(self)

    @cached_property
    def _checkpoints(self) -> checkpoint_service_pb2_grpc.CheckpointServiceStub:
        return checkpoint_service_pb2_grpc.CheckpointServiceStub(self._channel)

    def register_model(self, model: str, hf_dir: str | Path, *, dtype: str = "") -> Model:
        """Register a model by a Hugging Face folder: its ``config.json``, tokenizer and so on, not its weights.

        Repeating it is harmless, so every rank may call it.

        Args:
            model: ``namespace/name``.
            hf_dir: the folder. If it has weights, their headers are compared with ``config.json``.
            dtype: of the weights, such as ``bf16``; by default each tensor's own if the folder has weights, and
                otherwise what ``config.json`` says.

        Raises:
            InvalidArgument: its model type has no weight map (lists those that have one), or its weights are not what
                ``config.json`` describes (names the tensors).
            DataLoss: a file of weights is damaged.
            FailedPrecondition: the model is registered already, with other tensors.
        """
        folder = Path(hf_dir)
        files = hf_folder.side_files(folder)
        tensors: Iterable[TensorSpec] = ()
        if safetensors_files.has_weights(folder):
            tensors = FolderWeights.read(folder, files["config.json"]).layout.tensors.values()
        return self.register_files(model, files, dtype, tensors)

    def push(
        self,
        model: str,
        sharded_state_dict: Any,
        *,
        step: int,
        rank: int,
        world_size: int,
        run: str | None = None,
        request_id: str | None = None,
    ) -> PushHandle:
        """Hand over this rank's shards as a new version. All ranks call it with the same step.

        Returns once the shards are copied out: training may go on and change them. The bytes travel behind it. Of
        shards that several ranks hold, each is pushed by one of them. The first push waits until all ranks have come.

        Args:
            model: ``namespace/name``, registered before.
            sharded_state_dict: what Megatron-core's ``model.sharded_state_dict()`` returns.
            step: the training step.
            rank: this rank, from 0.
            world_size: number of ranks that push.
            run: overrides the client's.
            request_id: what makes the ranks of one push find each other; by default run and step.

        Raises:
            NotFound: the model is not registered.
            LayoutError: shapes, dtypes or names contradict the model, or the ranks together do not hold all of it.
            AlreadyExists: another process pushes as this rank of this step.
        """
        from weighbridge.integrations.megatron import sharded_tensors

        shards = sharded_tensors(sharded_state_dict)

        def tensors(indexes: Sequence[int], stream: Layout) -> ShardSource:
            return TensorSource(self._staging, stream, [shards.tensors[i] for i in indexes])

        return self.push_shards(
            model, shards.layout, wire.MEGATRON, tensors, step=step, rank=rank, world_size=world_size, run=run,
            request_id=request_id,
        )  # fmt: skip

    def import_folder(
        self, model: str, hf_dir: str | Path, *, dequantize: str = "", step: int = 0, run: str | None = None
    ) -> PushHandle:
        """Register a model by a Hugging Face folder, and push its weights.

        Args:
            model: ``namespace/name``.
            hf_dir: the folder.
            dequantize: the dtype, such as ``bf16``, that block-quantised fp8 weights are turned into on the way; by default
                they are kept as they are.
            step: recorded with the version.
            run: overrides the client's.

        Raises:
            As `register_model` and `push_folder` do, and:
            InvalidArgument: ``dequantize`` is given, and there is nothing to dequantise or a scale is missing.
        """
        dtype = dtypes.parse(dequantize) if dequantize else None
        if dtype is not None and not dtype.is_float:
            raise InvalidArgument(f"fp8 weights cannot become {dtype}", fix="use bf16, fp16 or fp32")
        files = hf_folder.side_files(Path(hf_dir))
        weights = FolderWeights.read(Path(hf_dir), files["config.json"], dequantize=dtype)
        files["config.json"] = weights.config_json
        self.register_files(model, files, "", weights.layout.tensors.values())
        return self._push_weights(model, weights, step, run, str(uuid.uuid4()))

    def push_folder(
        self,
        model: str,
        hf_dir: str | Path,
        *,
        step: int = 0,
        run: str | None = None,
        request_id: str | None = None,
    ) -> PushHandle:
        """Push the weights of a Hugging Face folder as a new version of a registered model.

        Args:
            model: ``namespace/name``, registered before.
            hf_dir: a folder with safetensors files.
            step: recorded with the version.
            run: overrides the client's.
            request_id: what makes a repeated call find its version; unique by default.

        Raises:
            NotFound: the model is not registered, or the folder has no safetensors files.
            LayoutError: the folder's tensors are not those of the model.
            DataLoss: a file is damaged.
        """
        config = Path(hf_dir) / "config.json"
        weights = FolderWeights.read(Path(hf_dir), config.read_bytes() if config.is_file() else b"{}")
        return self._push_weights(model, weights, step, run, request_id or str(uuid.uuid4()))

    def _push_weights(
        self, model: str, weights: FolderWeights, step: int, run: str | None, request_id: str
    ) -> PushHandle:
        return self.push_shards(
            model, weights.layout, wire.HUGGING_FACE, weights.open_source, step=step, rank=0, world_size=1, run=run,
            request_id=request_id,
        )  # fmt: skip

    def push_shards(
        self,
        model: str,
        layout: Layout,
        space: resources_pb2.TensorSpace.ValueType,
        open_source: OpenSource,
        *,
        step: int,
        rank: int,
        world_size: int,
        run: str | None = None,
        request_id: str | None = None,
    ) -> PushHandle:
        """Push the shards of any layout; what `push` and `push_folder` do in the end.

        Args:
            model: ``namespace/name``, registered before.
            layout: the shards this rank holds, as one stream.
            space: ``wire.MEGATRON`` or ``wire.HUGGING_FACE``, to which the names belong.
            open_source: is called once, for the bytes of the shards that this rank is to push.
            step, rank, world_size, run, request_id: as for `push`.
        """
        run = self.run if run is None else run
        opening = pb.OpenVersionRequest(
            model=model, step=step, run=run, ranks=world_size, client_id=self._client_id,
            request_id=request_id or f"{run}/{step}",
        )  # fmt: skip
        return self._pusher.push(opening, rank, layout, space, open_source)

    def close(self) -> None:
        """Wait until what was pushed has arrived or failed, then close the connection."""
        self._pusher.close()
        super().close()

    def abort(self, model: str, number: int, reason: str = "aborted by the trainer") -> Version:
        """Give a version up that has not become visible yet, or that cannot be made durable.

        The latter stays visible until a newer version is; no further attempt is made.

        Raises:
            FailedPrecondition: it is visible already, and nothing keeps it from becoming durable.
        """
        request = pb.AbortVersionRequest(model=model, number=number, reason=reason)
        return wire.version_from_proto(self._call(self._checkpoints.AbortVersion, request).version)

    def restore(self, model: str, sharded_state_dict: Any, *, version: str | int = "latest") -> Version:
        """Fill a sharded state dict in place from any version, whatever parallelism it was pushed with.

        Only this rank's bytes come over the wire.

        Args:
            model: ``namespace/name``.
            sharded_state_dict: what Megatron-core's ``model.sharded_state_dict()`` returns.
            version: a number or a ref.

        Returns:
            The version that was restored.

        Raises:
            NotFound: no such model or version.
            LayoutError: shapes, dtypes or names contradict the model.
        """
        import torch

        from weighbridge.integrations.megatron import sharded_tensors

        shards = sharded_tensors(sharded_state_dict)
        with torch.no_grad():
            steps = self.restore_layout(model, shards.layout, shards.tensors.__getitem__, version=version)
            # a sharded state dict holds at least one shard
            restored = [version for version, _ in steps][-1]
            shards.finish_restore()
        return restored

    def restore_layout(
        self,
        model: str,
        layout: Layout,
        tensor_for: Callable[[int], torch.Tensor],
        *,
        version: str | int = "latest",
    ) -> Iterator[tuple[Version, int]]:
        """Restore the shards of a layout in megatron-core's tensor space, one after the other.

        Args:
            model: ``namespace/name``.
            layout: which shards, as a stream.
            tensor_for: gives the tensor to fill for a placement, by index.
            version: a number or a ref.

        Yields:
            The version, and the index of each placement that is complete.
        """
        message = wire.layout_to_proto(layout, wire.MEGATRON)
        resolved: list[Version] = []

        def open_at(
            way: bulk.Way, striping: Striping, offset: int
        ) -> Iterable[pieces.Carried[pb.RestoreResponse]]:
            # once the ref is resolved, a stream that is opened again stays with that version
            wanted = str(resolved[0].number) if resolved else str(version)
            request = pb.RestoreRequest(
                model=model,
                version=wanted,
                layout=message,
                offset=offset,
                striping=wire.striping_to_proto(striping),
            )
            return rpc.streamed(
                way.channel,
                "/weighbridge.v1.CheckpointService/Restore",
                encoded_parts(request),
                pieces.decoder(pb.RestoreResponse),
                way.metadata,
            )

        def on_header(header: pb.StreamHeader) -> None:
            if header.stream_bytes != layout.nbytes:
                raise DataLoss(
                    f"a stream of {header.stream_bytes} bytes came for {layout.nbytes} bytes of shards"
                )
            resolved.append(wire.version_from_proto(header.version))

        writer = StreamWriter(layout, tensor_for)
        stream = bulk.StreamReceiver(
            open_at,
            self._transport.connections,
            nbytes=layout.nbytes,
            on_header=on_header,
            retry_seconds=self.retry_seconds,
        )
        for data in stream:
            for index, _ in writer.feed(data):
                yield resolved[0], index

    def describe_shards(self, model: str, parallel: Mapping[str, int]) -> Layout:
        """The shards that a Megatron-core rank holds, by per-layer keys.

        Args:
            model: ``namespace/name``.
            parallel: ``tensor_parallel_size`` and ``_rank``, and the same for ``pipeline_parallel``, ``expert_parallel`` and
                ``expert_tensor_parallel``; experts may be left out.

        Raises:
            InvalidArgument: the sizes do not divide the model.
        """
        request = pb.DescribeShardsRequest(model=model, **parallel)
        return wire.layout_from_proto(self._call(self._checkpoints.DescribeShards, request).layout)
