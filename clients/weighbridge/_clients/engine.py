"""Client of an engine rank. It pulls exactly the rank's slices of a version, and watches refs."""

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
    """A pull that has not started yet.

    Iterating over it yields ``(name, tensor)`` pairs, each as soon as the tensor is complete.

    Tensors are in host memory and have the shape of the slice. Iterating again pulls again. On the service's machine a
    tensor is a view of the version if its slice is contiguous there. Such a view is not a copy. Writes to it are
    private to this process, and the service holds the version as long as the tensor exists.

    Attributes:
        version: the version. It does not change if the ref moves.
        layout: the slices in the order in which the pull yields them.
        nbytes: total bytes of all slices.
        lane: lane of the slices, ``local`` or ``grpc``; empty before the pull.
        lane_reason: reason why the lane was not ``local``, if that was requested.

    Examples:
        >>> pull = engine.pull("acme/smol@1", layout=FullTensors(("model.norm.weight",)))
        >>> pull.nbytes
        128
        >>> for name, tensor in pull:
        ...     print(name, tensor.dtype, tensor[:3].tolist())
        model.norm.weight torch.float32 [0.5, 0.5, 0.5]
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
        """Fill a model in place. If any tensor does not fit, nothing is changed.

        A version of an adapter fills an adapter of a peft model. The pull does not check whether the wrapped model is
        the base of the version.

        Args:
            target: a module or a state dict. Its tensors are plain tensors with the slices' shapes, on any device, or
                DTensors; each rank pulls its own part of a DTensor. Names are Hugging Face's, after prefixes of
                torch.compile, DDP and FSDP are stripped. If several names share memory, one of them is enough. The
                tensors of a mapping are written to, not replaced.
            cast: ``exact`` casts only to a wider floating-point dtype, and refuses others; ``allow`` casts to any
                floating-point dtype; ``never`` does not cast. To make the service cast, which may transfer fewer bytes,
                pass ``dtype`` to `EngineClient.pull`.
            strict: whether target and pull must have the same tensors. If False, the common ones are filled.
            adapter_name: name of the adapter in a peft model.

        Returns:
            The tensors that were filled, and the version.

        Raises:
            InvalidArgument: ``target`` is neither a module nor a state dict, ``cast`` is unknown, or the model does not
                have an adapter named ``adapter_name``.
            LayoutError: tensors are missing, unexpected, or of another shape or dtype; or LoRA adapters are not merged,
                or are merged in a fill of an adapter (names each tensor).
            FailedPrecondition: the version is an adapter, but the module does not have one, or its adapter computes
                something else, for example because it has another ``lora_alpha``.

        Examples:
            >>> engine.pull("acme/smol@1").into(model)
            <Filled from acme/smol@1: 24 tensors, 78.6 kB>
            >>> model.model.norm.weight[:3].tolist()
            [0.5, 0.5, 0.5]
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
        """Pull into tensors that the caller provides, while the caller iterates over the result.

        Args:
            tensor_for: returns the tensor for a placement of the layout, given its index. The tensor may be on any
                device. The function is called in the order of placements. For tensors on GPUs it is called before they
                are due, so that copy engines stay busy: about 64 MB ahead of the yielded ones, but not beyond a tensor
                that shares memory with one that has not been yielded.

        Yields:
            Name and tensor, as soon as the tensor is complete.
        """
        with self._transfer() as transfer:
            for step in transfer.filled(tensor_for):
                yield from step

    def bring(self, buffer: torch.Tensor | None = None, *, pin: bool = False) -> Slices:
        """Transfer all slices to this machine, to be read later in any order.

        On the service's machine nothing is transferred: the service holds the version as long as the result exists.

        Args:
            buffer: buffer of a `HostSlices` that an earlier call returned. It is reused, and its content is
                overwritten.
            pin: whether GPUs will copy from the slices.
        """
        with self._transfer() as transfer:
            return transfer.bring(buffer, pin=pin)

    def stream(self) -> Iterator[memoryview]:
        """Yield the checked bytes of the slices over gRPC, concatenated, in pieces of at most 1 MiB."""
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
    """Client of an engine; one for each rank.

    Args:
        server: ``host:port`` of the service's gRPC server; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        retry_seconds, lane, connections, credentials: see `Client`.

    Examples:
        >>> with EngineClient(server) as engine:
        ...     version = next(engine.watch("acme/smol"))
        ...     weights = dict(engine.pull("acme/smol", version.number))
        >>> len(weights), weights["model.norm.weight"][:3].tolist()
        (24, [0.5, 0.5, 0.5])
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
        """Pull slices of a version. Only their bytes are transferred.

        Args:
            model: ``namespace/name``.
            version: a number or a ref; by default the latest.
            layout: `FullTensors` (the default), `TensorParallel` or `Boxes`.
            dtype: dtype to which the service casts floating-point tensors before it sends them, such as ``bf16``; None
                does not cast.

        Returns:
            The pull, which yields ``(name, tensor)`` when iterated over.

        Raises:
            NotFound: the model, version, ref or tensor does not exist.
            InvalidArgument: the layout does not fit the model, or a tensor cannot be cast (names the tensor).
            FailedPrecondition: the version is not ready.

        Examples:
            >>> pull = engine.pull("acme/smol", "latest", TensorParallel(size=2, rank=0), dtype="bf16")
            >>> slices = dict(pull)
            >>> slices["model.layers.0.mlp.gate_proj.weight"].shape
            torch.Size([24, 32])
            >>> slices["model.norm.weight"].dtype
            torch.bfloat16
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

        If the version is signed and no ``dtype`` is given, its manifest and signatures are written too.

        Args:
            model: ``namespace/name``.
            version: a number or a ref; None for the version that ``model`` names.
            folder: a new or empty folder.
            dtype: dtype to which the service casts floating-point tensors, such as ``bf16``; None does not cast.
            max_shard_bytes: maximum size of a safetensors file.
            on_progress: called with the bytes written so far and the total.

        Returns:
            The version that was written.

        Raises:
            NotFound: the model or version does not exist.
            InvalidArgument: the folder is not empty, the dtype is unknown, or a tensor cannot be cast (names the
                tensor).

        Examples:
            >>> version = engine.export("acme/smol", "latest", out)
            >>> print(version)
            acme/smol@1 (durable, step 100)
            >>> sorted(path.name for path in out.iterdir())
            ['config.json', 'model.safetensors']
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


def read_arriving(client: EngineClient, model: str, number: int, request: LayoutRequest, layout: Layout) -> ReadLoan:
    """Request a read grant for a version that the service on this machine is still receiving.

    Args:
        client: client of the service.
        model: ``namespace/name``.
        number: number of the version.
        request: the slices.
        layout: layout that the slices had in an earlier version.

    Returns:
        The slices; `ReadLoan.arrivals` tells which of them may be read.

    Raises:
        FailedPrecondition: the version has other tensors, other replicas receive parts of it too, or it cannot be
            granted to this process.
        WeighbridgeError: the version has failed, or the service is unreachable.
    """
    lane = client._connection.lane
    if not lane.wanted:
        raise FailedPrecondition("arriving slices can only be read by the local lane")
    return lane.read(model, number, request, layout, arriving=True)
