"""What an engine rank does: pull exactly its slices of a version, and hear of new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc

from weighbridge import bulk, dtypes, hf_folder, pieces, safetensors_files, wire
from weighbridge.client import Client
from weighbridge.errors import DataLoss, FailedPrecondition, WeighbridgeError
from weighbridge.host_slices import HostSlices, Slices
from weighbridge.lane_loans import ReadLoan
from weighbridge.layouts import Layout, TensorSpec
from weighbridge.local_lane import GRPC, LOCAL
from weighbridge.resources import Version
from weighbridge.slices import FullTensors, LayoutRequest
from weighbridge.striping import Striping
from weighbridge.tensor_stream import StreamWriter
from weighbridge.v1 import checkpoint_service_pb2, weight_service_pb2, weight_service_pb2_grpc

if TYPE_CHECKING:
    import torch


class Pull:
    """A pull that is about to begin: iterate over it to get ``(name, tensor)``, each as soon as it is complete.

    Tensors are in host memory, with the shape of the slice. Iterating again pulls again. On the service's machine a tensor is a view
    of the version wherever its slice lies there in one run: it costs nothing, writing to it changes nobody else's, and the service
    holds the version as long as such a tensor is there.

    Attributes:
        version: which version comes; fixed, wherever the ref moves meanwhile.
        layout: the slices in the order in which they come.
        nbytes: bytes of all slices.
        lane: how they came, ``local`` or ``grpc``; empty before they do.
        lane_reason: why they did not come by ``local``, if that was wanted.
    """

    def __init__(
        self, client: EngineClient, version: Version, layout: Layout, request: LayoutRequest, dtype: str = ""
    ) -> None:
        self.version = version
        self.layout = layout
        self.nbytes = layout.nbytes
        self.lane = self.lane_reason = ""
        self._client = client
        self._asked = request
        self._request = wire.request_to_proto(request)
        self._dtype = dtype

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        loan = self._borrow()
        if loan is not None:
            for index, placement in enumerate(self.layout.placements):
                yield placement.shard.tensor, loan.tensor(index)
            return
        placements, tensors = self.layout.placements, self.layout.tensors

        def allocate(index: int) -> torch.Tensor:
            shard = placements[index].shard
            return torch.empty(shard.box.extent, dtype=tensors[shard.tensor].dtype.torch)

        yield from self._stream_into(allocate)

    def into(self, tensor_for: Callable[[int], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pull into tensors that the caller makes.

        Args:
            tensor_for: gives the tensor for a placement of the layout, by index; any device.

        Yields:
            Name and tensor, each as soon as it is complete.
        """
        loan = self._borrow()
        if loan is None:
            yield from self._stream_into(tensor_for)
            return
        for index, placement in enumerate(self.layout.placements):
            tensor = tensor_for(index)
            loan.fill(index, tensor)
            yield placement.shard.tensor, tensor

    def bring(self, buffer: torch.Tensor | None = None, *, pin: bool = False) -> Slices:
        """Bring all slices to this machine, and read them later, in any order.

        On the service's machine they are there: the service holds the version as long as the result is.

        Args:
            buffer: of a `HostSlices` that this gave before, to be used again: what it holds is lost.
            pin: whether GPUs will copy from them.
        """
        loan = self._borrow()
        if loan is not None:
            return loan
        slices = HostSlices(self.layout, buffer, pin=pin)
        for _ in self._stream_into(slices.tensor):
            pass
        return slices

    def _borrow(self) -> ReadLoan | None:
        """The version where it lies, if this process can read it there."""
        lane = self._client._lane
        self.lane, self.lane_reason = GRPC, ""
        if not lane.wanted:
            return None
        try:
            if self._dtype:
                raise FailedPrecondition("a cast is made by the service, and sent by gRPC")
            loan = lane.read(self.version.model, self.version.number, self._asked, self.layout)
        except WeighbridgeError as error:
            self.lane_reason = lane.refused(error, f"pull of {self.version}")
            return None
        self.lane = LOCAL
        return loan

    def _stream_into(self, tensor_for: Callable[[int], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        writer = StreamWriter(self.layout, tensor_for)
        for data in self.stream():
            for index, tensor in writer.feed(data):
                yield self.layout.placements[index].shard.tensor, tensor

    def stream(self) -> Iterator[memoryview]:
        """The bytes of the slices by gRPC, one behind the other, checked, in pieces of 1 MiB at most."""

        def open_at(
            channel: grpc.Channel, striping: Striping, offset: int
        ) -> Iterable[pieces.Carried[weight_service_pb2.PullResponse]]:
            pull = channel.unary_stream(
                "/weighbridge.v1.WeightService/Pull",
                request_serializer=weight_service_pb2.PullRequest.SerializeToString,
                response_deserializer=pieces.decoder(weight_service_pb2.PullResponse),
            )
            request = weight_service_pb2.PullRequest(
                model=self.version.model,
                version=str(self.version.number),
                layout=self._request,
                offset=offset,
                dtype=self._dtype,
                striping=wire.striping_to_proto(striping),
            )
            return cast("Iterable[pieces.Carried[weight_service_pb2.PullResponse]]", pull(request))

        def on_header(header: checkpoint_service_pb2.StreamHeader) -> None:
            if header.stream_bytes != self.nbytes:
                raise DataLoss(
                    f"a stream of {header.stream_bytes} bytes came, and {self.nbytes} were planned"
                )

        return bulk.receive(
            open_at,
            self._client._bulk,
            nbytes=self.nbytes,
            on_header=on_header,
            retry_seconds=self._client.retry_seconds,
        )


class EngineClient(Client):
    """The engine's side of the service; one for each rank.

    Args:
        server: ``host:port`` of the gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        retry_seconds, lane, connections: as for `Client`.
    """

    @cached_property
    def _weights(self) -> weight_service_pb2_grpc.WeightServiceStub:
        return weight_service_pb2_grpc.WeightServiceStub(self._channel)

    def pull(
        self,
        model: str,
        version: str | int = "latest",
        layout: LayoutRequest | None = None,
        *,
        dtype: str | None = None,
    ) -> Pull:
        """Pull slices of a version; only their bytes come over the wire.

        Args:
            model: ``namespace/name``.
            version: a number or a ref.
            layout: `FullTensors` (the default), `TensorParallel` or `Boxes`.
            dtype: the service casts floating-point tensors to it before it sends them, such as ``bf16``; None keeps
                them as they are.

        Returns:
            Iterate over it to get ``(name, tensor)``.

        Raises:
            NotFound: no such model, version, ref or tensor.
            InvalidArgument: the layout does not fit the model, or a tensor cannot be cast; names the tensor.
            FailedPrecondition: the version is not ready.
        """
        request = layout or FullTensors()
        plan = self._call(
            self._weights.PlanPull,
            weight_service_pb2.PlanPullRequest(
                model=model,
                version=str(version),
                layout=wire.request_to_proto(request),
                dtype=dtype or "",
            ),
        )
        return Pull(
            self,
            wire.version_from_proto(plan.version),
            wire.layout_from_proto(plan.layout),
            request,
            dtype or "",
        )

    def export(
        self,
        model: str,
        version: str | int,
        folder: str | Path,
        *,
        dtype: str | None = None,
        max_shard_bytes: int = safetensors_files.DEFAULT_SHARD_BYTES,
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> Version:
        """Write a version as a Hugging Face folder on this machine.

        Args:
            model: ``namespace/name``.
            version: a number or a ref.
            folder: a new or empty folder.
            dtype: the service casts floating-point tensors to it, such as ``bf16``; None keeps them as they are.
            max_shard_bytes: largest safetensors file.
            on_progress: is called with bytes written so far and in all.

        Returns:
            The version that was written.

        Raises:
            NotFound: no such model or version.
            InvalidArgument: the folder is not empty, no such dtype, or a tensor cannot be cast; names the tensor.
        """
        plan = self.pull(model, version, dtype=dtype)
        number = plan.version.number

        def tensors(specs: Sequence[TensorSpec]) -> Pull:
            return self.pull(model, number, FullTensors(tuple(spec.name for spec in specs)), dtype=dtype)

        hf_folder.write_hf_folder(
            Path(folder),
            list(plan.layout.tensors.values()),
            tensors,
            self.model_files(model, number),
            dtype=dtypes.parse(dtype) if dtype else None,
            max_shard_bytes=max_shard_bytes,
            on_progress=on_progress,
        )
        return plan.version
