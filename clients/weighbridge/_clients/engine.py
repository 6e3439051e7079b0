"""Client of an engine rank: pulls exactly its slices of a version, and watches refs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from weighbridge._clients.adapter_filling import adapter_target
from weighbridge._clients.calls import pull_calls, version_calls
from weighbridge._clients.calls.known_layouts import KnownLayouts
from weighbridge._clients.calls.pull_calls import PullPlan
from weighbridge._clients.client import Client, manifest_of
from weighbridge._clients.connection import Connection
from weighbridge._clients.filling import Filled, fill_tensors, fit
from weighbridge._clients.pulling import PullRun
from weighbridge._core import dtypes
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.resources import Version
from weighbridge._core.slices import FullTensors, LayoutRequest
from weighbridge._formats import hf_folder, safetensors_files
from weighbridge._formats.host_slices import Slices
from weighbridge._formats.side_files.signature_files import write_signatures
from weighbridge._lane.loans import ReadLoan
from weighbridge._tracing import spans
from weighbridge.errors import FailedPrecondition

if TYPE_CHECKING:
    import torch

__all__ = ["EngineClient", "Pull"]


class Pull:
    """A pull that is about to begin: iterate over it to get ``(name, tensor)``, each as soon as it is complete.

    Tensors are in host memory, with the shape of the slice. Iterating again pulls again. On the service's machine a tensor is a view
    of the version if its slice is contiguous there. Such a view costs no copy, writes to it are private to this process, and the
    service holds the version as long as the tensor exists.

    Attributes:
        version: the version. It stays the same if the ref moves.
        layout: the slices in the order in which they come.
        nbytes: bytes of all slices.
        lane: lane of the slices, ``local`` or ``grpc``; empty before the pull.
        lane_reason: reason why the lane was not ``local``, if that was wanted.
    """

    def __init__(self, connection: Connection, plan: PullPlan) -> None:
        self.version = plan.version
        self.layout = plan.layout
        self.nbytes = plan.nbytes
        self.lane = self.lane_reason = ""
        self._connection = connection
        self._plan = plan

    def __repr__(self) -> str:
        lane = f", by the {self.lane} lane" if self.lane else ""
        return f"<Pull of {self.version}: {pull_calls.described(self._plan)}{lane}>"

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._transfer() as transfer:
            for step in transfer.tensors():
                yield from step

    def into(
        self,
        target: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        cast: str = "exact",
        strict: bool = True,
        adapter_name: str = "default",
    ) -> Filled:
        """Fill a model in place. Nothing of it is changed unless all of it fits.

        A version of an adapter fills an adapter of a model that peft has wrapped. Whether the model below is the base that the version names is not known
        here.

        Args:
            target: a module, or a state dict; its tensors are plain ones of the slices' shapes on any device, or DTensors, of which each
                rank pulls what it holds. Names are Hugging Face's; what torch.compile, DDP and FSDP add to them is stripped. Of names
                that share memory one is enough. A mapping's tensors are written to, not replaced.
            cast: ``exact`` casts to a wider floating-point dtype, and refuses others; ``allow`` casts to any; ``never`` to none. To have
                the service cast, which takes fewer bytes on the way, name the ``dtype`` of the pull.
            strict: whether target and pull must have the same tensors. If not, those are filled that both have.
            adapter_name: which adapter of a model that peft has wrapped.

        Returns:
            What was filled, from which version.

        Raises:
            InvalidArgument: ``target`` is neither, there is no such ``cast``, or the model has no such adapter.
            LayoutError: tensors are missing, unexpected, or of another shape or dtype; LoRA adapters are not merged, or, of an adapter, are. Names each.
            FailedPrecondition: the version is an adapter, and the module has none, or one that computes otherwise, as with another ``lora_alpha``.
        """
        adapter = self._connection.run(adapter_target(self._plan, target, adapter_name))
        fill = fit(self._plan, target, cast=cast, strict=strict, adapter=adapter)
        pull = self
        if fill.boxes is not None:
            plan = self._connection.run(pull_calls.plan_boxes(self._plan, fill.boxes))
            pull = Pull(self._connection, plan)
        if fill.tensors:
            deque(fill_tensors(pull.layout, fill.tensors, pull.filled), maxlen=0)
            self.lane, self.lane_reason = pull.lane, pull.lane_reason
        return fill.report

    def filled(self, tensor_for: Callable[[int], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pull into tensors that the caller makes, as the result is iterated over.

        Args:
            tensor_for: gives the tensor for a placement of the layout, by index; any device. Is called in the order of placements,
                and for tensors on GPUs ahead of what is yielded, so that their copy engines stay busy: some 64 MB, and not beyond a
                tensor that shares memory with one that has not been yielded.

        Yields:
            Name and tensor, each as soon as it is complete.
        """
        with self._transfer() as transfer:
            for step in transfer.filled(tensor_for):
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
        return PullRun(self._connection, self._plan).stream()

    @contextmanager
    def _transfer(self) -> Iterator[PullRun]:
        transfer = PullRun(self._connection, self._plan)
        transfer.borrow()
        self.lane, self.lane_reason = transfer.lane, transfer.lane_reason
        try:
            yield transfer
        except Exception as error:
            spans.fail(transfer.span, error)
            raise
        finally:
            transfer.stop()


class EngineClient(Client):
    """The engine's side of the service; one for each rank.

    Args:
        server: ``host:port`` of the gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        retry_seconds, lane, connections, credentials: as for `Client`.
    """

    @cached_property
    def _layouts(self) -> KnownLayouts:
        return KnownLayouts()

    def pull(
        self,
        model: str,
        version: str | int | None = None,
        layout: LayoutRequest | None = None,
        *,
        dtype: str | torch.dtype | None = None,
    ) -> Pull:
        """Pull slices of a version; only their bytes come over the wire.

        Args:
            model: ``namespace/name``.
            version: a number or a ref; by default the latest.
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
        plan = self._connection.run(pull_calls.plan_pull(self._layouts, model, version, layout, dtype))
        return Pull(self._connection, plan)

    def export(
        self,
        model: str,
        version: str | int | None,
        folder: str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        max_shard_bytes: int = safetensors_files.DEFAULT_SHARD_BYTES,
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> Version:
        """Write a version as a Hugging Face folder on this machine.

        If the version is signed and its files are written as they are in the store, its manifest and signatures go along.

        Args:
            model: ``namespace/name``.
            version: a number or a ref; None for the one that ``model`` names.
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
        model, number = plan.version.model, plan.version.number

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
        if dtype is None and plan.version.state.stored:
            _, signatures = self._connection.run(version_calls.get_signatures(model, number))
            if signatures:
                manifest = manifest_of(self, model, number)
                write_signatures(Path(folder), manifest, signatures)
        return plan.version


def read_arriving(
    client: EngineClient, model: str, number: int, request: LayoutRequest, layout: Layout
) -> ReadLoan:
    """Borrow a version that is still being received from the service on this machine.

    Args:
        client: of the service.
        model: ``namespace/name``.
        number: of the version.
        request: names the slices.
        layout: of these, as an earlier version has them.

    Returns:
        The slices, of which `ReadLoan.arrivals` says which may be read.

    Raises:
        FailedPrecondition: the version has other tensors, arrives at other replicas, too, or cannot be borrowed from here.
        WeighbridgeError: the version has failed, or the service is gone.
    """
    lane = client._connection.lane
    if not lane.wanted:
        raise FailedPrecondition("what arrives is read by the local lane")
    return lane.read(model, number, request, layout, arriving=True)
