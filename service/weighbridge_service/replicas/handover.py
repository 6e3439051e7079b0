"""Handover of versions between replicas: the call of the one that leaves, and the takeover at the one that goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument, Unavailable
from weighbridge.v1 import replica_service_pb2 as pb
from weighbridge_service.model_tensors import ModelTensors
from weighbridge_service.models import RegisteredModel
from weighbridge_service.push.declarations import Home
from weighbridge_service.push.handover import HandedVersion
from weighbridge_service.push.intake import Intake
from weighbridge_service.replicas.directory import Directory
from weighbridge_service.replicas.links import Links
from weighbridge_storage import entries, strict_json
from weighbridge_storage.names import ModelName
from weighbridge_storage.objects import ByteArray

_PART_BYTES = 8 << 20
_READS = 4
"""Parts of files that are read at one time."""


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

    def hand_over(self, to: Home, version: HandedVersion, seconds: float) -> None:
        """See `Successors`."""
        self._links.take_over(to, handed_to_proto(version), seconds)


class Takeovers:
    """Takes versions over from replicas that leave. Thread-safe.

    Args:
        intake: receives them.
        links: connections to those replicas.
    """

    def __init__(self, intake: Intake, links: Links) -> None:
        self._intake = intake
        self._links = links

    def take_over(self, sender: Home, version: HandedVersion, go_on: Callable[[], bool]) -> None:
        """Read all files of a version out of another replica's image, and own it from then on.

        Args:
            sender: the replica that leaves.
            version: which version.
            go_on: whether the other one still waits for it.

        Raises:
            Unavailable: this replica leaves itself, or the other one does not wait any more.
            AlreadyExists: this replica has had the version before, and it was given up or is another push's.
            ResourceExhausted: there is no memory for its files now.
            WeighbridgeError: its bytes could not be read.
        """
        key = version.key

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

        self._intake.take_over(sender, version, fill)


def handed_to_proto(version: HandedVersion) -> pb.TakeOverRequest:
    """A version that is handed over as a message; its sender is still to be named."""
    model = version.model
    return pb.TakeOverRequest(
        model=str(model.name),
        entry=strict_json.encode(entries.to_json(version.entry)),
        claim=version.claim,
        ready_time_ms=version.ready_ms,
        ranks=[pb.RankDeclaration(client_id=client, digest=digest) for client, digest in version.ranks],
        registration=pb.ModelRegistration(
            config_json=model.config_json,
            tensors=json.dumps(model.kept.to_json()).encode(),
            files_id=model.files_id,
            side_files=model.side_files,
            files_digest=model.files.layout.digest,
        ),
    )


def handed_from_proto(message: pb.TakeOverRequest) -> HandedVersion:
    """A message as the version that is handed over.

    Raises:
        InvalidArgument: it cannot be read.
        FailedPrecondition: this release lays the files of the model out otherwise.
    """
    sent = message.registration
    try:
        entry = entries.from_json(entries.OpenEntry, json.loads(message.entry), "the entry")
        kept = ModelTensors.from_json(json.loads(sent.tensors))
    except (DataLoss, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"the version that is handed over cannot be read: {error}") from error
    if len(message.ranks) != entry.ranks or not message.claim:
        raise InvalidArgument("the version that is handed over was not declared by all of its ranks")
    name = ModelName.parse(message.model)
    model = RegisteredModel(name, sent.config_json, kept, sent.files_id, sent.side_files)
    if model.files.layout.digest != sent.files_digest:
        raise FailedPrecondition(f"this replica lays the files of {name} out otherwise")
    ranks = [(rank.client_id, rank.digest) for rank in message.ranks]
    return HandedVersion(model, entry, message.claim, message.ready_time_ms, ranks)
