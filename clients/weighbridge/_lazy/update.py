"""Bring a version to the parameters of a rank, by what was recorded of its loader."""

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


class Incoming(Protocol):
    """Slices of a version on their way to a rank: a `Pull`, or an `Arrived`."""

    version: Version
    layout: Layout
    nbytes: int
    lane: str

    def bring(self, buffer: torch.Tensor | None = None, *, pin: bool = False) -> Slices:
        """Bring all slices to this machine; see `Pull.bring`."""

    def filled(self, tensor_for: Callable[[int], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Bring slices into tensors that the caller makes; see `Pull.filled`."""


class Update:
    """One version for one rank. Until `fill` or `fill_all` no parameter is touched.

    Args:
        recording: what the engine's loader takes, and where it puts it.
        incoming: what was pulled by ``recording.request``.

    Attributes:
        incoming: as given.
        version: which version it is; fixed, wherever a ref moves meanwhile.
        nbytes: how many bytes come.
        replaced: names of staged parameters in place of which `fill_made` brings what the engine has made of them.

    Raises:
        FailedPrecondition: a tensor is another one than when it was recorded; names it.
    """

    def __init__(self, recording: Recording, incoming: Incoming) -> None:
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
        """How the bytes came, ``local`` or ``grpc``; empty before they do."""
        return self.incoming.lane

    def prepare(self, *, pin: bool = False) -> None:
        """Bring the bytes to this machine; nothing that is done afterwards needs the service. May run in another thread.

        Args:
            pin: whether the parameters are on a GPU.

        Raises:
            WeighbridgeError: the service is gone, or the version is.
        """
        if self._slices is None:
            try:
                spare = self._spare.pop()
            except IndexError:
                spare = None
            self._slices = self.incoming.bring(spare, pin=pin)

    def stage(self, place: StagingPlace, there: Collection[str] = ()) -> None:
        """Bring what was prepared to a place in which it lies as the parameters do, as far as there is room, so that `fill` makes one copy for each.

        Parameters of which the version leaves elements alone are filled from where the bytes came. May run in another thread while the model
        computes. Nothing else may write to the place until the update is closed.

        Args:
            place: where to.
            there: names of parameters that are in the place already (`EarlyStaging`).
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
        """Parameters that have been brought to the place and lie there as they were loaded, by name."""
        return self._staged

    @property
    def made(self) -> Mapping[str, torch.Tensor]:
        """Tensors that `replace` keeps, by name."""
        return self._made

    def replace(self, names: Collection[str], made: Mapping[str, torch.Tensor]) -> bool:
        """Keep what the engine has made of staged parameters in their place, as quantisation makes it.

        Args:
            names: of the parameters, which are not staged any more.
            made: by the names of the tensors that they go to; on the place's device, not in the engine's own memory.

        Returns:
            Whether there was room for it; if not, nothing has changed.
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
        """Bring tensors what was made for them; all are complete when it returns.

        Args:
            targets: by the names that `replace` was given, all of them.
        """
        with torch.no_grad():
            for name, made in self._made.items():
                targets[name].detach().copy_(made, non_blocking=made.is_cuda)
            cuda_copies.wait_for_streams(self._made.values())

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Bring parameters what belongs to them; all are complete when it returns. The bytes must have been prepared.

        Args:
            targets: by name, the parameters, or tensors that lie in memory in the same way. No two of them share memory.

        Raises:
            FailedPrecondition: the bytes are not here.
            LayoutError: one lies otherwise than when it was recorded; none has been touched.
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
            raise FailedPrecondition("the bytes are not here yet", fix="call prepare() before")
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
        """Bring all parameters what belongs to them. What was not prepared goes straight there as it comes.

        If it fails before the end, some parameters are of this version and others are not: prepare, to avoid that.

        Args:
            targets: the parameters and buffers by name; those that nothing goes to are not touched.

        Raises:
            LayoutError: one is missing, or lies otherwise than when it was recorded; none has been touched.
            WeighbridgeError: the service is gone, or the version is.
        """
        self._recording.check(targets)
        if self._slices is not None or self._staged:
            self.fill({name: targets[name] for name in self._recording.targets})
            return
        with torch.no_grad():
            self._fill_as_it_comes(targets)

    def close(self) -> None:
        """Give back the memory that bytes were brought to."""
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
        # a pull may fill what is straight ahead of the steps before it: nothing else may write to that memory
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
            """Take all steps, in order, up to one whose box is not here."""
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
