"""Takeovers of versions between replicas: the call of the one that leaves, and the takeover at the one that goes on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from weighbridge._transport import rpc, wire
from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument, Unavailable, WeighbridgeError
from weighbridge.v1 import replica_service_pb2 as pb
from weighbridge.v1 import resources_pb2
from weighbridge_service.models.listed_tensors import ListedTensors
from weighbridge_service.models.model_tensors import ModelTensors
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.plan.declarations import Home
from weighbridge_service.push.handover import HandedShare, HandedVersion
from weighbridge_service.push.taking_over import TakingOver
from weighbridge_service.replicas.directory import Directory
from weighbridge_service.replicas.links import Links
from weighbridge_service.replicas.progress import Progress, Stage, home_from_proto, home_to_proto
from weighbridge_storage.documents import entry_json, strict_json
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.stores.objects import ByteArray

log = logging.getLogger(__name__)

_PART_BYTES = 8 << 20
_READS = 4
"""Parts of files that are read at one time."""
_TOLD_AT_ONCE = 8
"""Replicas that are told at one time who has a share now."""
_ASK_AGAIN_SECONDS = 5.0
"""How long a replica that does not answer is asked again to take something over."""


class KnownReplicas:
    """Successors by the directory. Thread-safe; is `push.handover.Successors`.

    Args:
        directory: who there is.
        links: connections to them.
    """

    def __init__(self, directory: Directory, links: Links) -> None:
        self._directory = directory
        self._links = links

    def others(self) -> Sequence[Home]:
        """See `Successors`."""
        return self._directory.others()

    def staying(self) -> frozenset[Home]:
        """See `Successors`."""
        return self._directory.staying()

    def leave(self) -> frozenset[tuple[str, int]]:
        """See `Successors`."""
        others = self._directory.others()
        if not others:
            self._links.leaving = True
            return frozenset()
        with ThreadPoolExecutor(min(len(others), _TOLD_AT_ONCE)) as pool:
            counted_on = frozenset[tuple[str, int]]().union(*pool.map(self._leave, others))
        self._links.leaving = True  # those that come now hear of it with the first exchange
        return counted_on

    def _leave(self, other: Home) -> frozenset[tuple[str, int]]:
        try:
            _, shared = self._links.exchange(other, leaving=True)
        except WeighbridgeError as error:
            log.info("the replica %s does not hear that this one leaves: %s", other, error.message)
            return frozenset()
        return frozenset(progress.version[:2] for progress in shared)

    def hand_over(self, to: Home, version: HandedVersion, seconds: float, memory_wait: float) -> None:
        """See `Successors`. Is asked again where an answer may be lost: who has taken it says so at once."""
        request = handed_to_proto(version, memory_wait)
        deadline = time.monotonic() + seconds
        patience = rpc.Patience(min(_ASK_AGAIN_SECONDS, seconds))
        while True:
            try:
                self._links.take_over(to, request, max(deadline - time.monotonic(), 0.0))
                return
            except Unavailable:
                if not patience.wait():
                    raise


class Takeovers:
    """Takes versions over from replicas that leave. Thread-safe.

    Args:
        taking_over: receives them.
        links: connections to those replicas.
    """

    def __init__(self, taking_over: TakingOver, links: Links) -> None:
        self._taking_over = taking_over
        self._links = links

    def take_over(
        self, sender: Home, version: HandedVersion, memory_wait: float, go_on: Callable[[], bool]
    ) -> None:
        """Read files of a version out of another replica's image, and own them from then on.

        The others that hold a share are told before the one that leaves learns of it, so that they do not miss that one.

        Args:
            sender: the replica that leaves.
            version: what it hands over.
            memory_wait: how many seconds memory may be waited for.
            go_on: whether the other one still waits for the answer.

        Raises:
            FailedPrecondition: this replica leaves itself.
            Unavailable: the other one does not wait any more.
            AlreadyExists: this replica has had the version before, and it was given up or is another push's.
            ResourceExhausted: there is no memory for the files.
            WeighbridgeError: their bytes could not be read.
        """
        key = version.key
        wait_until = time.monotonic() + memory_wait

        def fill(files: Mapping[str, ByteArray]) -> None:
            def read(part: tuple[str, int]) -> None:
                if not go_on():
                    raise Unavailable(f"the replica {sender} does not wait for the handover any more")
                file, start = part
                length = min(_PART_BYTES, len(files[file]) - start)
                data = self._links.read_file(sender, key, file, start, length)
                files[file][start : start + length] = np.frombuffer(data, np.uint8)

            parts = [
                (file, start) for file, data in files.items() for start in range(0, len(data), _PART_BYTES)
            ]
            with ThreadPoolExecutor(_READS, thread_name_prefix="takeover") as pool:
                for _ in pool.map(read, parts):
                    pass

        def may_wait() -> bool:
            return go_on() and time.monotonic() < wait_until

        self._taking_over.take_over(sender, version, fill, may_wait)
        self._tell_others(sender, version)

    def _tell_others(self, sender: Home, version: HandedVersion) -> None:
        """Say who has a share now. Who cannot be reached is told by the next heartbeat."""
        home, share = self._links.home, version.share
        if share is None:
            return
        agreed = version.agreed_by(home)
        said = Progress(*version.key, Stage.COMPLETE, share.number, agreed.handovers[share.number])

        def tell(other: Home) -> None:
            with suppress(WeighbridgeError):
                self._links.exchange(other, [(said, False)])

        with ThreadPoolExecutor(_TOLD_AT_ONCE, thread_name_prefix="takeover") as pool:
            list(pool.map(tell, {*share.homes} - {home, sender}))


def handed_to_proto(version: HandedVersion, memory_wait: float) -> pb.TakeOverRequest:
    """A version that is handed over as a message; its sender is still to be named."""
    model, share = version.model, version.share
    return pb.TakeOverRequest(
        model=str(model.name),
        entry=strict_json.encode(entry_json.to_json(version.entry)),
        claim=version.claim,
        ready_time_ms=version.ready_ms,
        ranks=[pb.RankDeclaration(client_id=client, digest=digest) for client, digest in version.ranks],
        registration=pb.ModelRegistration(
            config_json=model.config_json,
            tensors=strict_json.encode(model.kept.to_json()),
            listed=map(wire.spec_to_proto, () if model.listed is None else model.listed.specs),
            files_id=model.files_id,
            side_files=model.side_files,
            files_digest=model.files.layout.digest,
        ),
        share=None
        if share is None
        else pb.HandedShare(
            number=share.number,
            homes=[home_to_proto(home) for home in share.homes],
            owners=share.owners,
            handovers=share.handovers,
        ),
        memory_wait_ms=round(memory_wait * 1000),
        nonfinite_elements=version.nonfinite,
    )


def handed_from_proto(message: pb.TakeOverRequest) -> HandedVersion:
    """A message as the version that is handed over.

    Raises:
        InvalidArgument: it cannot be read.
        FailedPrecondition: this release lays the files of the model out otherwise.
    """
    sent = message.registration
    try:
        entry = entry_json.from_json(OpenEntry, json.loads(message.entry), "the entry")
        kept = ModelTensors.from_json(json.loads(sent.tensors))
        listed = _listed_from_proto(sent.listed, kept.listed)
    except (DataLoss, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"the version that is handed over cannot be read: {error}") from error
    if len(message.ranks) != entry.ranks or not message.claim:
        raise InvalidArgument("the version that is handed over was not declared by all of its ranks")
    name = ModelName.parse(message.model)
    model = RegisteredModel(name, sent.config_json, kept, sent.files_id, sent.side_files, listed)
    if model.files.layout.digest != sent.files_digest:
        raise FailedPrecondition(f"this replica lays the files of {name} out otherwise")
    ranks = [(rank.client_id, rank.digest) for rank in message.ranks]
    share = _share_from_proto(message.share, model) if message.HasField("share") else None
    nonfinite = message.nonfinite_elements
    return HandedVersion(model, entry, message.claim, message.ready_time_ms, ranks, share, nonfinite)


def _listed_from_proto(sent: Iterable[resources_pb2.TensorSpec], digest: str) -> ListedTensors | None:
    """The list with this digest; None if there is none."""
    if not digest:
        return None
    listed = ListedTensors.of(map(wire.spec_from_proto, sent))
    if listed.digest != digest:
        raise InvalidArgument("the list of the model's tensors does not agree with its digest")
    return listed


def _share_from_proto(message: pb.HandedShare, model: RegisteredModel) -> HandedShare:
    homes = tuple(home_from_proto(home) for home in message.homes)
    numbers = (message.number, *message.owners.values(), *message.handovers)
    if message.owners.keys() != model.files.file_sizes.keys() or max(numbers) >= len(homes):
        raise InvalidArgument(
            "the share that is handed over is of other files, or of no replica that is named"
        )
    return HandedShare(message.number, homes, dict(message.owners), dict(message.handovers))
