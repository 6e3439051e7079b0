"""What an engine rank does: pull exactly its slices of a version, and hear of new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from weighbridge import control_calls, dtypes, hf_folder, safetensors_files
from weighbridge.client import Client
from weighbridge.host_slices import Slices
from weighbridge.known_layouts import KnownLayouts
from weighbridge.layouts import TensorSpec
from weighbridge.pulling import PullPlan, Transfer
from weighbridge.resources import Version
from weighbridge.slices import FullTensors, LayoutRequest
from weighbridge.transport import Transport

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

    def __init__(self, transport: Transport, plan: PullPlan) -> None:
        self.version = plan.version
        self.layout = plan.layout
        self.nbytes = plan.nbytes
        self.lane = self.lane_reason = ""
        self._transport = transport
        self._plan = plan

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._transfer() as transfer:
            for step in transfer.tensors():
                yield from step

    def into(self, tensor_for: Callable[[int], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pull into tensors that the caller makes.

        Args:
            tensor_for: gives the tensor for a placement of the layout, by index; any device.

        Yields:
            Name and tensor, each as soon as it is complete.
        """
        with self._transfer() as transfer:
            for step in transfer.into(tensor_for):
                yield from step

    def bring(self, buffer: torch.Tensor | None = None, *, pin: bool = False) -> Slices:
        """Bring all slices to this machine, and read them later, in any order.

        On the service's machine they are there: the service holds the version as long as the result is.

        Args:
            buffer: of a `HostSlices` that this gave before, to be used again: what it holds is lost.
            pin: whether GPUs will copy from them.
        """
        with self._transfer() as transfer:
            return transfer.bring(buffer, pin=pin)

    def stream(self) -> Iterator[memoryview]:
        """The bytes of the slices by gRPC, one behind the other, checked, in pieces of 1 MiB at most."""
        return Transfer(self._transport, self._plan).stream()

    @contextmanager
    def _transfer(self) -> Iterator[Transfer]:
        transfer = Transfer(self._transport, self._plan)
        transfer.borrow()
        self.lane, self.lane_reason = transfer.lane, transfer.lane_reason
        try:
            yield transfer
        finally:
            transfer.stop()


class EngineClient(Client):
    """The engine's side of the service; one for each rank.

    Args:
        server: ``host:port`` of the gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        retry_seconds, lane, connections: as for `Client`.
    """

    @cached_property
    def _layouts(self) -> KnownLayouts:
        return KnownLayouts()

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
        plan = self._run(control_calls.plan_pull(self._layouts, model, version, layout, dtype))
        return Pull(self._transport, plan)

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
