"""Transfer of a version to the parameters of a rank, by the recording of its loader."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

import torch

from weighbridge._core.layouts import Layout
from weighbridge._core.resources import Version
from weighbridge._formats.host_slices import HostSlices, Slices
from weighbridge._lazy.pairs import PairedSlices
from weighbridge._lazy.recording import Constant, RecordedCopy, RecordedStep, Recording
from weighbridge._lazy.staging import StagingPlace, on_stream_of, packed, part_of
from weighbridge._lazy.tensor import shown
from weighbridge._memory import cuda_copies
from weighbridge.errors import FailedPrecondition


class IncomingSlices(Protocol):
    """Slices of a version on their way to a rank: a `Pull`, or an `Arrived`."""

    version: Version
    layout: Layout
    nbytes: int
    lane: str

    def bring(self, buffer: torch.Tensor | None = None, *, pin: bool = False) -> Slices:
        """Transfer all slices to this machine; see `Pull.bring`."""

    def filled(self, tensor_for: Callable[[int], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Transfer slices into tensors that the caller provides; see `Pull.filled`."""


class Update:
    """One version for one rank. No parameter is changed before `fill` or `fill_all`.

    Args:
        recording: recording of the engine's loader.
        incoming: pull of ``recording.request``.

    Attributes:
        incoming: the given pull.
        version: the version; it stays the same if a ref moves.
        nbytes: number of bytes to transfer.
        replaced: names of staged parameters in place of which `fill_made` copies the tensors that the engine has made
            of them.

    Raises:
        FailedPrecondition: a tensor differs from the recorded one; the message names it.
    """

    def __init__(self, recording: Recording, incoming: IncomingSlices) -> None:
        self.version = incoming.version
        self.nbytes = incoming.nbytes
        self._recording = recording
        self.incoming = incoming
        self._spare = recording.spare
        self._slices: Slices | None = None
        self._staged: Mapping[str, torch.Tensor] = {}
        self.replaced: frozenset[str] = frozenset()
        self._made: dict[str, torch.Tensor] = {}
        for name, spec in incoming.layout.tensors.items():
            if spec != recording.specs[name]:
                raise FailedPrecondition(
                    f"{self.version} has {spec}, and {recording.specs[name]} was recorded", fix="record again"
                )

    @property
    def lane(self) -> str:
        """Lane of the bytes, ``local`` or ``grpc``; empty before it is chosen."""
        return self.incoming.lane

    def prepare(self, *, pin: bool = False) -> None:
        """Transfer the bytes to this machine; nothing afterwards needs the service. May run in another thread.

        Args:
            pin: whether the parameters are on a GPU.

        Raises:
            WeighbridgeError: the service or the version is gone.
        """
        if self._slices is None:
            try:
                spare = self._spare.pop()
            except IndexError:
                spare = None
            self._slices = self.incoming.bring(spare, pin=pin)

    def stage(self, place: StagingPlace, there: Collection[str] = ()) -> None:
        """Copy the prepared bytes to a place with the layout of the parameters, as far as there is room, so that `fill`
        makes one copy for each.

        Parameters that the version does not fill completely are not staged; `fill` copies them from the prepared bytes.
        May run in another thread while the model computes. The caller must not let anything else write to the place
        until the update is closed.

        Args:
            place: the place.
            there: names of parameters that are staged already (`EarlyStaging`).
        """
        recording = self._recording
        staged = place.tensors(recording.whole)
        rest = {name: tensor for name, tensor in staged.items() if name not in there}
        if rest:
            with on_stream_of(place.device), torch.no_grad():
                self.fill(rest)
        self._staged = staged
        if staged.keys() == recording.targets.keys():
            self._give_back()

    @property
    def staged(self) -> Mapping[str, torch.Tensor]:
        """Parameters that are staged as they were loaded, by name."""
        return self._staged

    @property
    def made(self) -> Mapping[str, torch.Tensor]:
        """Tensors that `replace` has stored, by name."""
        return self._made

    def replace(self, names: Collection[str], made: Mapping[str, torch.Tensor]) -> bool:
        """Store tensors that the engine has made of staged parameters, such as quantised ones, in the memory of these.

        Args:
            names: names of the parameters, which are then no longer staged.
            made: tensors by the names of their targets; on the place's device, not in the engine's own memory.

        Returns:
            Whether there was room for them; if not, nothing has changed.
        """
        staged = self._staged
        self._staged = {name: tensor for name, tensor in staged.items() if name not in names}
        found = packed(made, [staged[name] for name in names])
        if found is None:
            self._staged = staged
            return False
        self.replaced |= frozenset(names)
        self._made |= found
        return True

    def fill_made(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of `replace` to their targets; all are complete on return.

        Args:
            targets: targets by the names that `replace` was given, all of them.
        """
        with torch.no_grad():
            for name, made in self._made.items():
                targets[name].detach().copy_(made, non_blocking=made.is_cuda)
            cuda_copies.wait_for_streams(self._made.values())

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill parameters; all are complete on return. The bytes must have been prepared.

        Args:
            targets: by name, the parameters, or tensors with the same strides. No two of them share memory.

        Raises:
            FailedPrecondition: the bytes have not been prepared.
            LayoutError: one has another shape, other strides or another dtype than the recorded one; none has been
                changed.
        """
        for name, tensor in targets.items():
            self._recording.check_target(name, tensor)
        rest = {name: tensor for name, tensor in targets.items() if name not in self._staged}
        staged = [(tensor, self._staged[name]) for name, tensor in targets.items() if name in self._staged]
        with torch.no_grad():
            if rest:
                self._fill_from_slices(rest)
            for tensor, there in staged:
                tensor.detach().copy_(there, non_blocking=tensor.is_cuda)
            cuda_copies.wait_for_streams(tensor for tensor, _ in staged)

    def _fill_from_slices(self, targets: Mapping[str, torch.Tensor]) -> None:
        recording, slices = self._recording, self._slices
        if slices is None:
            raise FailedPrecondition("the bytes have not arrived yet", fix="call prepare() first")
        for name, tensor in targets.items():
            if name not in recording.plain:
                for step in recording.by_target[name]:
                    self._do(step, part_of(tensor, step.part), slices)
        slices.fill(
            (recording.boxes[step.tensor, step.box], part_of(tensor, step.part))
            for name, tensor in targets.items()
            for step in recording.plain.get(name, ())
        )

    def fill_all(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill all parameters. Bytes that were not prepared are transferred straight into them.

        If that fails before the end, some parameters are of this version and others are not; call `prepare` first to
        avoid that.

        Args:
            targets: the parameters and buffers by name; those without a step are not changed.

        Raises:
            LayoutError: one is missing, or differs in shape, strides or dtype from the recorded one; none has been
                changed.
            WeighbridgeError: the service or the version is gone.
        """
        self._recording.check(targets)
        if self._slices is not None or self._staged:
            self.fill({name: targets[name] for name in self._recording.targets})
            return
        with torch.no_grad():
            self._fill_as_it_comes(targets)

    def close(self) -> None:
        """Release the memory of the prepared bytes."""
        self._staged, self._made = {}, {}
        self._give_back()

    def _give_back(self) -> None:
        slices, self._slices = self._slices, None
        if isinstance(slices, PairedSlices):
            slices = slices.parts[0]
        if isinstance(slices, HostSlices):
            self._spare[:] = [slices.buffer]

    def _do(self, step: RecordedStep, part: torch.Tensor, slices: Slices) -> None:
        if isinstance(step, Constant):
            part.fill_(step.value)
            return
        index = self._recording.boxes[step.tensor, step.box]
        if self._recording.is_straight(step):
            slices.fill([(index, part)])
        else:
            part.copy_(shown(slices.tensor(index), step.view, step.casts))

    def _fill_as_it_comes(self, targets: Mapping[str, torch.Tensor]) -> None:
        recording = self._recording
        todo = deque((step, part_of(targets[step.target], step.part)) for step in recording.steps)
        # a pull may fill straight copies ahead of earlier steps: no other step may write to that memory
        mixed = {part.untyped_storage().data_ptr() for step, part in todo if not recording.is_straight(step)}
        copies = [(step, part) for step, part in todo if isinstance(step, RecordedCopy)]
        users = Counter(recording.boxes[step.tensor, step.box] for step, _ in copies)
        straight = {
            index: part
            for step, part in copies
            if part.untyped_storage().data_ptr() not in mixed
            and users[index := recording.boxes[step.tensor, step.box]] == 1
        }
        here: dict[int, torch.Tensor] = {}

        def place_for(index: int) -> torch.Tensor:
            if index in straight:
                return straight[index]
            shard = self.incoming.layout.placements[index].shard
            dtype = recording.specs[shard.tensor].dtype.torch
            return torch.empty(shard.box.extent, dtype=dtype, device="cpu")

        def go_on() -> None:
            """Do all steps, in order, up to one whose box has not arrived."""
            while todo:
                step, part = todo[0]
                if isinstance(step, Constant):
                    part.fill_(step.value)
                else:
                    index = recording.boxes[step.tensor, step.box]
                    if index not in here:
                        return
                    if index not in straight:
                        part.copy_(shown(here[index], step.view, step.casts))
                    users[index] -= 1
                    if not users[index]:
                        del here[index]
                todo.popleft()

        go_on()
        for index, (_, tensor) in enumerate(self.incoming.filled(place_for)):
            here[index] = tensor
            go_on()
