"""Handlers of `ModelService`: each translates its request, calls one method of the service, and translates back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from functools import lru_cache, partial
from itertools import groupby

from weighbridge._core.metadata import conditions
from weighbridge._core.resources import Gate, Retention, Version
from weighbridge._transport import wire
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import model_service_pb2, resources_pb2
from weighbridge_service.access.scopes import Verb
from weighbridge_service.admission.quotas import HostQuota
from weighbridge_service.api.grpc.call import Call
from weighbridge_service.api.grpc.methods import Methods, takes_long
from weighbridge_service.api.grpc.watches import Watches, merged
from weighbridge_service.push.image_allocator import IMAGES_OF_A_MODEL
from weighbridge_service.service import Weighbridge

_PAGE = 100
_LARGEST_PAGE = 1000
_WAIT_SECONDS = 60.0
_MANIFEST_BYTES = 1 << 20
"""Of a manifest, in one answer."""
_MOST_REFS = 1024
_MOST_WATCHES = 16_384


def _page(size: int) -> int:
    return min(size, _LARGEST_PAGE) if size > 0 else _PAGE


@lru_cache(maxsize=256)
def _watched(index: int, version: Version) -> bytes:
    """What all who watch the version as their ref with this index are sent."""
    response = model_service_pb2.WatchRefsResponse(index=index, version=wire.version_to_proto(version))
    return response.SerializeToString()


def _files(messages: Iterable[resources_pb2.ModelFile]) -> dict[str, bytes]:
    """Files by name; one that has the name of the one before goes on with its content.

    Raises:
        InvalidArgument: two that do not follow each other have the same name.
    """
    found: dict[str, bytes] = {}
    for name, group in groupby(messages, key=lambda file: file.name):
        if name in found:
            raise InvalidArgument(f"two files are named {name[:200]!r}")
        found[name] = b"".join(file.content for file in group)
    return found


class ModelHandlers:
    """`ModelService`."""

    def __init__(self, service: Weighbridge, methods: Methods, watches: Watches) -> None:
        self._catalog = service.catalog
        self._collecting = service.collecting
        self._gates = service.gates
        self._refs = service.refs
        self._intake = service.intake
        self._quotas = service.quotas
        self._signatures = service.signatures
        self._methods = methods
        self._watches = watches
        self._watching = HostQuota("watches", _MOST_WATCHES)

    def RegisterModel(
        self, request: model_service_pb2.RegisterModelRequest, call: Call
    ) -> model_service_pb2.RegisterModelResponse:
        files = _files(request.files)
        found = wire.specs_from_proto(request.tensors)
        model = self._catalog.register_model(
            request.model, files, request.dtype, found, weight_map=not request.no_weight_map
        )
        return model_service_pb2.RegisterModelResponse(model=wire.model_to_proto(model))

    def GetModel(
        self, request: model_service_pb2.GetModelRequest, call: Call
    ) -> model_service_pb2.GetModelResponse:
        return model_service_pb2.GetModelResponse(
            model=wire.model_to_proto(self._catalog.get_model(request.model, call.peer.sees))
        )

    def ListModels(
        self, request: model_service_pb2.ListModelsRequest, call: Call
    ) -> model_service_pb2.ListModelsResponse:
        size = _page(request.page_size)
        models = self._catalog.list_models(request.page_token, size, call.peer.sees)
        return model_service_pb2.ListModelsResponse(
            models=map(wire.model_to_proto, models),
            next_page_token=models[-1].name if len(models) == size else "",
        )

    def GetModelFiles(
        self, request: model_service_pb2.GetModelFilesRequest, call: Call
    ) -> model_service_pb2.GetModelFilesResponse:
        files = self._catalog.model_files(request.model, request.version)
        response = model_service_pb2.GetModelFilesResponse()
        for name, content in files.items():
            response.files.add(name=name, content=content)
        return response

    async def GetVersion(
        self, request: model_service_pb2.GetVersionRequest, call: Call
    ) -> model_service_pb2.GetVersionResponse:
        wanted = wire.state_from_proto(request.wait_for)
        if wanted is None and request.wait_for:
            raise InvalidArgument(f"there is no state {request.wait_for} to wait for")
        if wanted is None:
            find = partial(self._catalog.get_version, request.model, request.version)
            version = await self._methods.run(call, find)
        else:
            patience = call.patience(_WAIT_SECONDS)
            version = await self._watches.reached(request.model, request.version, wanted, patience)
        return model_service_pb2.GetVersionResponse(version=wire.version_to_proto(version))

    def ListVersions(
        self, request: model_service_pb2.ListVersionsRequest, call: Call
    ) -> model_service_pb2.ListVersionsResponse:
        size = _page(request.page_size)
        before = request.page_token or "0"
        if not before.isascii() or not before.isdigit() or len(before) > 12:
            raise InvalidArgument(f"{before[:40]!r} is no page token", fix="pass on what the last page gave")
        versions = self._catalog.list_versions(
            request.model,
            before=int(before),
            limit=size,
            include_invisible=request.include_invisible,
            where=conditions(request.where),
        )
        return model_service_pb2.ListVersionsResponse(
            versions=map(wire.version_to_proto, versions),
            next_page_token=str(versions[-1].number) if len(versions) == size else "",
        )

    async def WatchRefs(
        self, request: model_service_pb2.WatchRefsRequest, call: Call
    ) -> AsyncIterator[bytes]:
        if not 0 < len(request.refs) <= _MOST_REFS:
            raise InvalidArgument(f"{len(request.refs)} refs are not between 1 and {_MOST_REFS}")
        follows = [self._watches.follow(each.model, each.ref, each.after) for each in request.refs]
        with self._watching.taking(call.peer.host, len(follows)):
            async with aclosing(merged(follows)) as found:
                async for index, version in found:
                    yield _watched(index, version)

    def SetRef(
        self, request: model_service_pb2.SetRefRequest, call: Call
    ) -> model_service_pb2.SetRefResponse:
        version, found = self._refs.move(
            request.model,
            request.ref,
            request.version,
            call.peer.asker(Verb.TAG, request.model, request.ref),
            request_id=request.request_id,
            note=request.note,
        )
        return model_service_pb2.SetRefResponse(
            version=wire.version_to_proto(version), request=wire.ref_request_to_proto(found)
        )

    def DeleteRef(
        self, request: model_service_pb2.DeleteRefRequest, call: Call
    ) -> model_service_pb2.DeleteRefResponse:
        found = self._refs.delete(
            request.model,
            request.ref,
            call.peer.asker(Verb.TAG, request.model, request.ref),
            request_id=request.request_id,
            note=request.note,
        )
        return model_service_pb2.DeleteRefResponse(request=wire.ref_request_to_proto(found))

    def ApproveRef(
        self, request: model_service_pb2.ApproveRefRequest, call: Call
    ) -> model_service_pb2.ApproveRefResponse:
        found = self._refs.approve(
            request.model,
            request.ref,
            request.request_id,
            call.peer.asker(Verb.APPROVE, request.model, request.ref),
            note=request.note,
        )
        return model_service_pb2.ApproveRefResponse(request=wire.ref_request_to_proto(found))

    def WithdrawRef(
        self, request: model_service_pb2.WithdrawRefRequest, call: Call
    ) -> model_service_pb2.WithdrawRefResponse:
        asker = call.peer.asker(Verb.TAG, request.model, request.ref)
        found = self._refs.withdraw(request.model, request.ref, request.request_id, asker)
        return model_service_pb2.WithdrawRefResponse(request=wire.ref_request_to_proto(found))

    def SetProtection(
        self, request: model_service_pb2.SetProtectionRequest, call: Call
    ) -> model_service_pb2.SetProtectionResponse:
        asker = call.peer.asker(Verb.TAG, request.model, request.ref)
        found = self._refs.protect(request.model, request.ref, request.approvals, asker)
        return model_service_pb2.SetProtectionResponse(protections=map(wire.protection_to_proto, found))

    def DeleteProtection(
        self, request: model_service_pb2.DeleteProtectionRequest, call: Call
    ) -> model_service_pb2.DeleteProtectionResponse:
        found = self._refs.unprotect(
            request.model,
            request.ref,
            call.peer.asker(Verb.TAG, request.model, request.ref),
            request_id=request.request_id,
            note=request.note,
        )
        return model_service_pb2.DeleteProtectionResponse(request=wire.ref_request_to_proto(found))

    def ListRefs(
        self, request: model_service_pb2.ListRefsRequest, call: Call
    ) -> model_service_pb2.ListRefsResponse:
        return model_service_pb2.ListRefsResponse(
            refs=self._catalog.refs(request.model),
            requests=map(wire.ref_request_to_proto, self._refs.requests(request.model)),
            protections=map(wire.protection_to_proto, self._refs.protections(request.model)),
        )

    @takes_long
    def VerifyVersion(
        self, request: model_service_pb2.VerifyVersionRequest, call: Call
    ) -> model_service_pb2.VerifyVersionResponse:
        found = self._catalog.verify(request.model, request.version, sha256=request.sha256)
        return model_service_pb2.VerifyVersionResponse(**found.to_json())

    def ReadManifest(
        self, request: model_service_pb2.ReadManifestRequest, call: Call
    ) -> model_service_pb2.ReadManifestResponse:
        data, total = self._signatures.manifest_part(
            request.model, request.number, request.offset, _MANIFEST_BYTES
        )
        return model_service_pb2.ReadManifestResponse(data=data, total_bytes=total)

    def GetSignatures(
        self, request: model_service_pb2.GetSignaturesRequest, call: Call
    ) -> model_service_pb2.GetSignaturesResponse:
        number, found = self._signatures.of_version(request.model, request.version)
        return model_service_pb2.GetSignaturesResponse(
            number=number,
            signatures=[resources_pb2.Signature(id=each.id, content=each.content) for each in found],
        )

    def AddSignature(
        self, request: model_service_pb2.AddSignatureRequest, call: Call
    ) -> model_service_pb2.AddSignatureResponse:
        added = self._signatures.add(request.model, request.number, request.content, call.peer.name)
        return model_service_pb2.AddSignatureResponse(id=added)

    def GetRetention(
        self, request: model_service_pb2.GetRetentionRequest, call: Call
    ) -> model_service_pb2.GetRetentionResponse:
        retention = self._collecting.retention(request.model)
        return model_service_pb2.GetRetentionResponse(retention=wire.retention_to_proto(retention))

    def SetRetention(
        self, request: model_service_pb2.SetRetentionRequest, call: Call
    ) -> model_service_pb2.SetRetentionResponse:
        asked = wire.read(Retention, request.retention)
        retention = self._collecting.set_retention(request.model, asked)
        return model_service_pb2.SetRetentionResponse(retention=wire.retention_to_proto(retention))

    def GetGate(
        self, request: model_service_pb2.GetGateRequest, call: Call
    ) -> model_service_pb2.GetGateResponse:
        return model_service_pb2.GetGateResponse(gate=wire.gate_to_proto(self._gates.gate(request.model)))

    def SetGate(
        self, request: model_service_pb2.SetGateRequest, call: Call
    ) -> model_service_pb2.SetGateResponse:
        gate = self._gates.set_gate(request.model, wire.read(Gate, request.gate))
        return model_service_pb2.SetGateResponse(gate=wire.gate_to_proto(gate))

    def ApproveVersion(
        self, request: model_service_pb2.ApproveVersionRequest, call: Call
    ) -> model_service_pb2.ApproveVersionResponse:
        by = call.peer.called(request.by)
        version = self._gates.approve(
            request.model, request.number, by=by, note=request.note, reasons=request.reasons
        )
        return model_service_pb2.ApproveVersionResponse(version=wire.version_to_proto(version))

    @takes_long
    def DeleteVersion(
        self, request: model_service_pb2.DeleteVersionRequest, call: Call
    ) -> model_service_pb2.DeleteVersionResponse:
        version = self._collecting.delete_version(request.model, request.number)
        return model_service_pb2.DeleteVersionResponse(version=wire.version_to_proto(version))

    @takes_long
    def DeleteModel(
        self, request: model_service_pb2.DeleteModelRequest, call: Call
    ) -> model_service_pb2.DeleteModelResponse:
        found = self._collecting.delete_model(request.model, request.request_id)
        return model_service_pb2.DeleteModelResponse(versions=found.versions)

    @takes_long
    def CollectVersions(
        self, request: model_service_pb2.CollectVersionsRequest, call: Call
    ) -> model_service_pb2.CollectVersionsResponse:
        report = self._collecting.collect(request.model, dry_run=request.dry_run)
        return model_service_pb2.CollectVersionsResponse(collection=wire.collection_to_proto(report))

    @takes_long
    def WarmModel(
        self, request: model_service_pb2.WarmModelRequest, call: Call
    ) -> model_service_pb2.WarmModelResponse:
        images, image_bytes = self._intake.warm(request.model)
        return model_service_pb2.WarmModelResponse(
            memory=model_service_pb2.WarmMemory(
                model=request.model, images=images, wanted=IMAGES_OF_A_MODEL, image_bytes=image_bytes
            )
        )

    def GetUsage(
        self, request: model_service_pb2.GetUsageRequest, call: Call
    ) -> model_service_pb2.GetUsageResponse:
        return model_service_pb2.GetUsageResponse(**self._quotas.usage(call.peer).to_json())
