"""Two versions that a rank pulls as one: a policy's, and the version of a drafter that is a separate model.

A recording of both prefixes the names of the drafter's tensors with the drafter's model, and lists them after the
policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from weighbridge._clients.engine import EngineClient, Pull
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.slices import Boxes
from weighbridge._formats.host_slices import Slices
from weighbridge._lazy.recording import Recording
from weighbridge._lazy.source import Source

if TYPE_CHECKING:
    import torch


class Pair(Source):
    """A policy's version together with a drafter's. As a `Source`, it is the policy's version.

    Args:
        client: must stay open as long as tensors are copied from.
        model, version: the policy's, as for `Source`.
        draft: the drafter's version, as ``namespace/name@number``.

    Attributes:
        drafter: the drafter's version.

    Raises:
        NotFound: a model, version or ref does not exist.
        FailedPrecondition: a version is not ready.
    """

    def __init__(self, client: EngineClient, model: str, version: str | int, draft: str) -> None:
        super().__init__(client, model, version)
        of, _, number = draft.rpartition("@")
        self.drafter = Source(client, of, int(number) if number.isdecimal() else number)


def prefix_of(draft: str) -> str:
    """Prefix of the names of a drafter's tensors in a recording of both.

    Args:
        draft: a version of the drafter, as ``namespace/name@number``.
    """
    return f"{draft.rpartition('@')[0]}:"


def prefixed(spec: TensorSpec, prefix: str) -> TensorSpec:
    """A tensor under its name in a recording of both."""
    return replace(spec, name=prefix + spec.name)


def pull_recorded(
    client: EngineClient, recording: Recording, model: str, number: int, draft: str = ""
) -> Pull | PairedPull:
    """Pull of the recorded slices, of one version or of two.

    Args:
        client: client of the service.
        recording: recording of the loader.
        model, number: the policy's version.
        draft: the drafter's version, as ``namespace/name@number``; empty if there is none.
    """
    if not draft:
        return client.pull(model, number, recording.request)
    prefix = prefix_of(draft)
    of, mine = prefix.removesuffix(":"), int(draft.rpartition("@")[2])
    policy = [(name, box.offset, box.extent) for name, box in recording.boxes if not name.startswith(prefix)]
    drafter = [
        (name.removeprefix(prefix), box.offset, box.extent) for name, box in recording.boxes if name.startswith(prefix)
    ]
    return PairedPull(client.pull(model, number, Boxes(policy)), client.pull(of, mine, Boxes(drafter)), prefix)


class PairedPull:
    """Pulls of both versions, as one pull of the slices of both.

    Args:
        policy, drafter: the pulls.
        prefix: prefix of the drafter's names.

    Attributes:
        version: the policy's.
        layout: layout of all slices, the policy's first.
        nbytes: bytes of both.
        lane: lane of the policy's slices; empty before it is chosen.
    """

    def __init__(self, policy: Pull, drafter: Pull, prefix: str) -> None:
        self._parts = policy, drafter
        self._count = len(policy.layout.placements)
        self._prefix = prefix
        self.version = policy.version
        self.lane = ""
        self.nbytes = policy.nbytes + drafter.nbytes
        self.layout = Layout.stream(
            [
                *policy.layout.tensors.values(),
                *(prefixed(spec, prefix) for spec in drafter.layout.tensors.values()),
            ],
            [
                *(placement.shard for placement in policy.layout.placements),
                *(
                    placement.shard._replace(tensor=prefix + placement.shard.tensor)
                    for placement in drafter.layout.placements
                ),
            ],
        )

    def __repr__(self) -> str:
        return f"<PairedPull of {' and '.join(str(part.version) for part in self._parts)}>"

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        policy, drafter = self._parts
        yield from policy
        yield from ((self._prefix + name, tensor) for name, tensor in drafter)

    def bring(self, buffer: torch.Tensor | None = None, *, pin: bool = False) -> PairedSlices:
        """See `Pull.bring`; the buffer is for the policy's slices."""
        policy, drafter = self._parts
        found = PairedSlices((policy.bring(buffer, pin=pin), drafter.bring(pin=pin)), self._count)
        self.lane = policy.lane
        return found

    def filled(self, tensor_for: Callable[[int], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Pull.filled`."""
        policy, drafter = self._parts
        yield from policy.filled(tensor_for)
        self.lane = policy.lane
        own = drafter.filled(lambda index: tensor_for(self._count + index))
        yield from ((self._prefix + name, tensor) for name, tensor in own)


class PairedSlices:
    """Slices of both versions.

    Args:
        parts: the policy's and the drafter's.
        count: number of the policy's.
    """

    def __init__(self, parts: Sequence[Slices], count: int) -> None:
        self.parts = parts
        self._count = count

    def tensor(self, index: int) -> torch.Tensor:
        """See `Slices.tensor`."""
        at, own = self._place(index)
        return self.parts[at].tensor(own)

    def fill(self, targets: Iterable[tuple[int, torch.Tensor]]) -> None:
        """See `Slices.fill`."""
        found: tuple[list[tuple[int, torch.Tensor]], ...] = ([], [])
        for index, tensor in targets:
            at, own = self._place(index)
            found[at].append((own, tensor))
        for part, mine in zip(self.parts, found, strict=True):
            part.fill(mine)

    def _place(self, index: int) -> tuple[int, int]:
        return (0, index) if index < self._count else (1, index - self._count)
