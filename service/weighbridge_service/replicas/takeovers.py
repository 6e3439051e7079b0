"""Takeovers of versions between replicas: the call that the leaving replica makes, and the takeover by its
successor.
"""

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
"""Number of parts of files that are read concurrently."""
_TOLD_AT_ONCE = 8
"""Number of replicas that are notified concurrently."""
_ASK_AGAIN_SECONDS = 5.0
"""Seconds for which a takeover is retried if the other replica does not respond."""


class KnownReplicas:
    """Successors from the directory. Thread-safe; implements `push.handover.Successors`.

    Args:
        directory: directory of the replicas.
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
        self._links.leaving = True  # replicas that appear later learn this with their first exchange
        return counted_on

    def _leave(self, other: Home) -> frozenset[tuple[str, int]]:
        try:
            _, shared = self._links.exchange(other, leaving=True)
        except WeighbridgeError as error:
            log.info("the replica %s could not be notified that this one leaves: %s", other, error.message)
            return frozenset()
        return frozenset(progress.version[:2] for progress in shared)

    def hand_over(self, to: Home, version: HandedVersion, seconds: float, memory_wait: float) -> None:
        """See `Successors`. Retries if a response may have been lost. A replica that has already taken the version over
        responds to a retry at once.
        """
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
    """Takes over versions from replicas that leave. Thread-safe.

    Args:
        taking_over: receiver of the versions.
        links: connections to those replicas.
    """

    def __init__(self, taking_over: TakingOver, links: Links) -> None:
        self._taking_over = taking_over
        self._links = links

    def take_over(self, sender: Home, version: HandedVersion, memory_wait: float, go_on: Callable[[], bool]) -> None:
        """Read files of a version from another replica's image, and become the owner of these files.

        Other replicas with a share are notified before the leaving replica gets its response, so that they do not treat
        its share as lost once it has stopped.

        Args:
            sender: the leaving replica.
            version: the version, or share of a version, that it hands over.
            memory_wait: maximum seconds to wait for memory.
            go_on: returns whether the sender still waits for the response.

        Raises:
            FailedPrecondition: this replica is leaving, too.
            Unavailable: the sender no longer waits.
            AlreadyExists: this replica already had the version, and it has failed or belongs to another push.
            ResourceExhausted: the memory is too small for the files.
            WeighbridgeError: the bytes of the files could not be read.
        """
        key = version.key
        wait_until = time.monotonic() + memory_wait

        def fill(files: Mapping[str, ByteArray]) -> None:
            def read(part: tuple[str, int]) -> None:
                if not go_on():
                    raise Unavailable(f"the replica {sender} no longer waits for the handover")
                file, start = part
                length = min(_PART_BYTES, len(files[file]) - start)
                data = self._links.read_file(sender, key, file, start, length)
                files[file][start : start + length] = np.frombuffer(data, np.uint8)

            parts = [(file, start) for file, data in files.items() for start in range(0, len(data), _PART_BYTES)]
            with ThreadPoolExecutor(_READS, thread_name_prefix="takeover") as pool:
                for _ in pool.map(read, parts):
                    pass

        def may_wait() -> bool:
            return go_on() and time.monotonic() < wait_until

        self._taking_over.take_over(sender, version, fill, may_wait)
        self._tell_others(sender, version)

    def _tell_others(self, sender: Home, version: HandedVersion) -> None:
        """Notify the other replicas of the new owner of a share.

        Unreachable replicas learn this from the next heartbeat.
        """
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
    """Encode a handed-over version as a message. The caller sets its sender."""
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
    """Decode a handed-over version from a message.

    Raises:
        InvalidArgument: the message is malformed.
        FailedPrecondition: this release uses a different layout for the model's files.
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
        raise FailedPrecondition(f"this replica lays out the files of {name} differently")
    ranks = [(rank.client_id, rank.digest) for rank in message.ranks]
    share = _share_from_proto(message.share, model) if message.HasField("share") else None
    nonfinite = message.nonfinite_elements
    return HandedVersion(model, entry, message.claim, message.ready_time_ms, ranks, share, nonfinite)


def _listed_from_proto(sent: Iterable[resources_pb2.TensorSpec], digest: str) -> ListedTensors | None:
    """Decode a list of tensors and verify its digest. Returns None if the digest is empty.

    Raises InvalidArgument if it does not match.
    """
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
            "the share that is handed over has different files, or refers to a replica that is not listed"
        )
    return HandedShare(message.number, homes, dict(message.owners), dict(message.handovers))
