"""Handlers of `ModelService`, except the derived operations. Each converts its request, calls one method of the
service, and converts the result."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from functools import lru_cache, partial
from itertools import groupby

from weighbridge._core.resources import (
    RECEIVING,
    Version,
)
from weighbridge._transport import wire
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import model_service_pb2 as pb
from weighbridge.v1 import resources_pb2
from weighbridge_service.admission.quotas import HostQuota
from weighbridge_service.api.grpc.call import Call
from weighbridge_service.api.grpc.methods import Methods
from weighbridge_service.api.grpc.watches import Watches, merged
from weighbridge_service.catalog.bases import Bases
from weighbridge_service.core import Core
from weighbridge_storage.documents.names import ModelName

_WAIT_SECONDS = 60.0
_MANIFEST_BYTES = 1 << 20
"""Maximum bytes of a manifest in one response."""
_MOST_REFS = 1024


@lru_cache(maxsize=256)
def _watched(index: int, version: Version) -> bytes:
    """The encoded response for a version, shared by all watchers that list its ref at the same index."""
    response = pb.WatchRefsResponse(index=index, version=wire.version_to_proto(version))
    return response.SerializeToString()


def _files(messages: Iterable[resources_pb2.ModelFile]) -> dict[str, bytes]:
    """Files by name. Consecutive messages with the same name are parts of one file.

    Raises:
        InvalidArgument: two messages with the same name are not consecutive.
    """
    found: dict[str, bytes] = {}
    for name, group in groupby(messages, key=lambda file: file.name):
        if name in found:
            raise InvalidArgument(f"two files are named {name[:200]!r}")
        found[name] = b"".join(file.content for file in group)
    return found


class ModelHandlers:
    """`ModelService`."""

    def __init__(self, service: Core, methods: Methods, watches: Watches, most_watches: int) -> None:
        self._catalog = service.catalog
        self._bases = Bases(service.catalog)
        self._collecting = service.collecting
        self._intake = service.intake
        self._registry = service.registry
        self._quotas = service.quotas
        self._signatures = service.signatures
        self._methods = methods
        self._watches = watches
        self._watching = HostQuota("watches", most_watches)

    def RegisterModel(self, request: pb.RegisterModelRequest, call: Call) -> pb.RegisterModelResponse:
        files = _files(request.files)
        found = wire.specs_from_proto(request.tensors)
        model = self._bases.register_model(
            request.model,
            files,
            request.dtype,
            found,
            weight_map=not request.no_weight_map,
            base=request.base,
            by=call.peer,
        )
        return pb.RegisterModelResponse(model=wire.write(resources_pb2.Model, model))

    def GetModelFiles(self, request: pb.GetModelFilesRequest, call: Call) -> pb.GetModelFilesResponse:
        files = self._catalog.model_files(request.model, request.version)
        response = pb.GetModelFilesResponse()
        for name, content in files.items():
            response.files.add(name=name, content=content)
        return response

    async def GetVersion(self, request: pb.GetVersionRequest, call: Call) -> pb.GetVersionResponse:
        wanted = wire.state_from_proto(request.wait_for)
        if wanted is None and request.wait_for:
            raise InvalidArgument(f"there is no state {request.wait_for} to wait for")
        if wanted is None:
            find = partial(self._catalog.get_version, request.model, request.version)
            version = await self._methods.run(call, find)
        else:
            patience = call.patience(_WAIT_SECONDS)
            version = await self._watches.reached(request.model, request.version, wanted, patience)
        push = None
        if request.with_ranks:
            push = self._registry.find(ModelName.parse(version.model), version.number)
        return pb.GetVersionResponse(
            version=wire.version_to_proto(version),
            ranks=()
            if push is None
            else [wire.write(resources_pb2.RankProgress, each) for each in push.progress.ranks],
        )

    async def WatchRefs(self, request: pb.WatchRefsRequest, call: Call) -> AsyncIterator[bytes]:
        if not 0 < len(request.refs) <= _MOST_REFS:
            raise InvalidArgument(f"the request names {len(request.refs)} refs, not between 1 and {_MOST_REFS}")
        follows = [
            self._watches.follow(each.model, RECEIVING if each.receiving else each.ref, each.after)
            for each in request.refs
        ]
        with self._watching.taking(call.peer.host, len(follows)):
            async with aclosing(merged(follows)) as found:
                accepted = False
                async for index, version in found:
                    if not accepted:  # there may be no version to send for long
                        await call.accept()
                        accepted = True
                    if version is not None:
                        yield _watched(index, version)

    def ReadManifest(self, request: pb.ReadManifestRequest, call: Call) -> pb.ReadManifestResponse:
        data, total = self._signatures.manifest_part(request.model, request.number, request.offset, _MANIFEST_BYTES)
        return pb.ReadManifestResponse(data=data, total_bytes=total)

    def GetSignatures(self, request: pb.GetSignaturesRequest, call: Call) -> pb.GetSignaturesResponse:
        number, found = self._signatures.of_version(request.model, request.version)
        return pb.GetSignaturesResponse(
            number=number,
            signatures=[resources_pb2.Signature(id=each.id, content=each.content) for each in found],
        )

    def AddSignature(self, request: pb.AddSignatureRequest, call: Call) -> pb.AddSignatureResponse:
        added = self._signatures.add(request.model, request.number, request.content, call.peer.name)
        return pb.AddSignatureResponse(id=added)

    def DeleteModel(self, request: pb.DeleteModelRequest, call: Call) -> pb.DeleteModelResponse:
        found = self._collecting.delete_model(
            request.model, request.request_id, forced=request.force, sees=call.peer.sees
        )
        return pb.DeleteModelResponse(versions=found.versions)
