"""What a trainer rank does: hand over the shards it holds, and take shards of any version back."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc

from weighbridge import bulk, dtypes, hf_folder, pieces, rpc, safetensors_files, wire
from weighbridge.client import Client
from weighbridge.errors import (
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    WeighbridgeError,
)
from weighbridge.folder_weights import FolderWeights
from weighbridge.lane_loans import WriteLoan
from weighbridge.layouts import Layout, TensorSpec
from weighbridge.local_lane import GRPC, LOCAL
from weighbridge.push_handle import PushHandle, PushReport
from weighbridge.push_sources import OpenSource, ShardSource, StagingPool, StreamSource, TensorSource
from weighbridge.resources import Model, Version
from weighbridge.striping import Striping
from weighbridge.tensor_stream import StreamWriter
from weighbridge.v1 import checkpoint_service_pb2 as pb
from weighbridge.v1 import checkpoint_service_pb2_grpc, resources_pb2

if TYPE_CHECKING:
    import torch

_DECLARE_SECONDS = 600.0
"""How long a rank waits for the other ranks to declare what they hold."""
_DECLARE_CALL_SECONDS = 10.0
"""How long one call waits for that before it is made again."""
_PAUSE_SECONDS = 0.1
_PREPARE_PAUSES = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds before each question for the memory of the next version: it may be in use until this one is durable."""
_PUSHES_AT_ONCE = 2
"""Pushes of one client whose bytes may still be on their way; a further one waits."""


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
        self._lock = threading.Lock()
        self._running: list[PushHandle] = []
        self._slots = threading.BoundedSemaphore(_PUSHES_AT_ONCE)
        self._closing = threading.Event()
        self._preparing: set[str] = set()

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
        started = time.monotonic()
        run = self.run if run is None else run
        opening = pb.OpenVersionRequest(
            model=model, step=step, run=run, ranks=world_size, client_id=self._client_id,
            request_id=request_id or f"{run}/{step}",
        )  # fmt: skip
        self._slots.acquire()
        number = 0
        delivery: _Delivery | None = None
        try:
            number = self._call(self._checkpoints.OpenVersion, opening).version.number
            assigned = self._declare(model, number, rank, layout, space)
            chosen = layout.select(assigned)
            handle = PushHandle(self, model, number, chosen.nbytes)
            header = pb.PushHeader(model=model, number=number, rank=rank, client_id=self._client_id)
            copying = time.monotonic()
            delivery = self._copy_out(header, chosen, open_source(assigned, chosen))
            now = time.monotonic()
            arguments = (handle, header, delivery, (now - started, now - copying))
            # not a daemon: a trainer that ends after its last push must not lose it
            threading.Thread(target=self._deliver, args=arguments, name=f"push-{model}@{number}").start()
        except BaseException as error:
            self._slots.release()
            if delivery is not None:
                delivery.give_up()
            # Without this rank the version cannot be completed: do not let the others wait for it. But a rank that
            # belongs to another process is that process's business.
            if number and not isinstance(error, AlreadyExists):
                with contextlib.suppress(WeighbridgeError):
                    self.abort(
                        model, number, f"rank {rank} gave up before it pushed anything: {error!r}"[:300]
                    )
            raise
        with self._lock:
            self._running = [h for h in self._running if not h.done] + [handle]
        return handle

    def close(self) -> None:
        """Wait until what was pushed has arrived or failed, then close the connection."""
        self._closing.set()
        with self._lock:
            running, self._running = self._running, []
        for handle in running:
            handle._report.exception()
        super().close()

    def _declare(
        self, model: str, number: int, rank: int, layout: Layout, space: resources_pb2.TensorSpace.ValueType
    ) -> list[int]:
        request = pb.DeclareLayoutRequest(
            model=model, number=number, rank=rank, client_id=self._client_id, digest=layout.digest
        )
        give_up = time.monotonic() + _DECLARE_SECONDS
        while True:
            try:
                response = self._call(self._checkpoints.DeclareLayout, request, seconds=_DECLARE_CALL_SECONDS)
            except DeadlineExceeded:  # ranks are still missing; it names them
                if time.monotonic() > give_up:
                    raise
                request.ClearField("layout")  # it has arrived
                time.sleep(_PAUSE_SECONDS)
                continue
            if not response.layout_needed:
                return list(response.assigned)
            request.layout.CopyFrom(wire.layout_to_proto(layout, space))

    def _copy_out(self, header: pb.PushHeader, stream: Layout, source: ShardSource) -> _Delivery:
        """Copy shards out of the trainer's tensors: to where they belong if they can be written there, to a buffer otherwise."""
        why = ""
        if self._lane.wanted and stream.nbytes:
            try:
                loan = self._lane.write(header.model, header.number, header.rank, stream)
            except WeighbridgeError as error:
                why = self._lane.refused(error, f"push of {header.model}@{header.number}")
            else:
                try:
                    loan.fill(source)
                except BaseException:
                    with contextlib.suppress(WeighbridgeError):
                        loan.end(complete=False)
                    raise
                return _Delivery(loan, None, why)
        return _Delivery(None, source.stage(), why)

    def _deliver(
        self,
        handle: PushHandle,
        header: pb.PushHeader,
        delivery: _Delivery,
        costs: tuple[float, float],
    ) -> None:
        started = time.monotonic()
        try:
            if delivery.loan is not None:
                delivery.loan.end(complete=True)
            if delivery.staged is not None:
                self._stream(header, delivery.staged, handle.stream_bytes)
            self._call(
                self._checkpoints.SealRank,
                pb.SealRankRequest(
                    model=header.model, number=header.number, rank=header.rank, client_id=header.client_id
                ),
            )
            seconds = time.monotonic() - started
            handle._report.set_result(
                PushReport(*costs, handle.stream_bytes, seconds, delivery.lane, delivery.why_not_local)
            )
        except BaseException as error:  # goes to whoever waits
            handle._report.set_exception(error)
        finally:
            delivery.give_up()
            self._slots.release()
        if delivery.loan is not None:
            # a daemon: nothing is lost if it does not get to its end
            threading.Thread(target=self._prepare_next, args=(header.model,), daemon=True).start()

    def _prepare_next(self, model: str) -> None:
        """Map the memory of the next version while the trainer trains; if that fails, the next push will do it."""
        with self._lock:
            if model in self._preparing:
                return
            self._preparing.add(model)
        try:
            with contextlib.suppress(WeighbridgeError):
                for pause in _PREPARE_PAUSES:
                    if self._closing.wait(pause) or self._lane.prepare(model):
                        return
        finally:
            with self._lock:
                self._preparing.discard(model)

    def _stream(self, header: pb.PushHeader, source: StreamSource, total: int) -> None:
        """Stream all bytes; where it breaks, ask what has arrived and go on from there."""
        missing = [(0, total)] if total else []
        patience = rpc.Patience(self.retry_seconds)
        while missing:
            try:
                with rpc.translated_errors(self.server):
                    bulk.send(
                        "/weighbridge.v1.CheckpointService/Push",
                        partial(_messages, header, source, missing),
                        self._bulk,
                        sum(end - start for start, end in missing),
                    )
                return
            except WeighbridgeError as error:
                if not patience.wait_after(error):
                    raise
                state = self._call(
                    self._checkpoints.GetPushState,
                    pb.GetPushStateRequest(model=header.model, number=header.number, rank=header.rank),
                )
                before, missing = missing, list(_gaps([(r.start, r.end) for r in state.received], total))
                if missing != before:
                    patience.renew()

    def abort(self, model: str, number: int, reason: str = "aborted by the trainer") -> Version:
        """Give a version up that has not become visible yet."""
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
            channel: grpc.Channel, striping: Striping, offset: int
        ) -> Iterable[pieces.Carried[pb.RestoreResponse]]:
            restore = channel.unary_stream(
                "/weighbridge.v1.CheckpointService/Restore",
                request_serializer=pb.RestoreRequest.SerializeToString,
                response_deserializer=pieces.decoder(pb.RestoreResponse),
            )
            # once the ref is resolved, a stream that is opened again stays with that version
            wanted = str(resolved[0].number) if resolved else str(version)
            request = pb.RestoreRequest(
                model=model,
                version=wanted,
                layout=message,
                offset=offset,
                striping=wire.striping_to_proto(striping),
            )
            return cast("Iterable[pieces.Carried[pb.RestoreResponse]]", restore(request))

        def on_header(header: pb.StreamHeader) -> None:
            if header.stream_bytes != layout.nbytes:
                raise DataLoss(
                    f"a stream of {header.stream_bytes} bytes came for {layout.nbytes} bytes of shards"
                )
            resolved.append(wire.version_from_proto(header.version))

        writer = StreamWriter(layout, tensor_for)
        stream = bulk.receive(
            open_at,
            self._bulk,
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


@dataclass(frozen=True, slots=True)
class _Delivery:
    """Shards that have been copied out, on their way.

    Attributes:
        loan: the memory that they were written to; None if they go by gRPC.
        staged: their copy; None if there is none.
        why_not_local: why they go by gRPC, if something else was wanted.
    """

    loan: WriteLoan | None
    staged: StreamSource | None
    why_not_local: str

    @property
    def lane(self) -> str:
        return GRPC if self.loan is None else LOCAL

    def give_up(self) -> None:
        """Let go of everything; nothing happens to what has been delivered."""
        if self.staged is not None:
            self.staged.release()
        if self.loan is not None:
            with contextlib.suppress(WeighbridgeError):
                self.loan.end(complete=False)


def _messages(
    header: pb.PushHeader, source: StreamSource, ranges: Sequence[tuple[int, int]], striping: Striping
) -> Iterator[bytes]:
    yield pb.PushRequest(header=header).SerializeToString()
    for begin, end in ranges:
        for start, stop in striping.messages(begin, end):
            data = source.read(start, stop)
            yield pieces.encode(pb.PushRequest(offset=start, checksum=rpc.checksum(data)), data)


def _gaps(received: Sequence[tuple[int, int]], total: int) -> Iterator[tuple[int, int]]:
    position = 0
    for start, end in received:
        if start > position:
            yield position, start
        position = max(position, end)
    if position < total:
        yield position, total
