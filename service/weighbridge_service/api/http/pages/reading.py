"""Reader of the facts that views show.

It combines one read of a model's head, this process's own state, and the manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from weighbridge._core.engines.facts import Engine
from weighbridge._core.lru import Cache
from weighbridge._core.resources import Model, Version, refs_of
from weighbridge._formats.safetensors_files import FilesLayout
from weighbridge._signing.bundle import signed_by
from weighbridge.errors import FailedPrecondition, NotFound
from weighbridge_service.api.http.pages import index_view, model_view
from weighbridge_service.api.http.pages.side_by_side.compare_view import SideOfPage
from weighbridge_service.api.http.pages.side_by_side.contents import (
    Contents,
    FileFacts,
    TensorFacts,
    in_order,
)
from weighbridge_service.api.http.pages.timeline_view import VersionPage
from weighbridge_service.api.http.pages.version_view import SignatureFacts, VersionFacts, as_pairs
from weighbridge_service.catalog.head_versions import page_of
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.models.registration import summary_from_head
from weighbridge_service.push.machine.rank_progress import PushProgress
from weighbridge_service.service import Weighbridge
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.history import History
from weighbridge_storage.versions.manifest import Manifest
from weighbridge_storage.versions.reading import read_manifest

MODELS = 100
"""Number of models on a page."""
VERSIONS = 50
"""Number of versions on a page."""
_NEWEST = 4
"""Number of newest versions of each model that are read for its line in the list of models."""
_EXPORTS = 10
_KEPT_TENSORS = 200_000
"""Maximum number of tensors in the cached contents of versions."""
_KEPT_SIGNED = 256
_SIGNED_SECONDS = 10.0
"""The signatures of a version are cached for this many seconds, because the store does not notify the service of new
ones.
"""
_Sees = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class FoundModels:
    """A page of the models that the viewer may see, and whether more follow."""

    models: tuple[index_view.ListedModelFacts, ...]
    more: bool


class Reader:
    """Reader of the facts that pages show. Thread-safe; all methods may wait for the store.

    Args:
        service: the service.
        exports: its exports.
    """

    def __init__(self, service: Weighbridge, exports: Exports) -> None:
        self._service = service
        self._exports = exports
        self._contents: Cache[Contents] = Cache(_KEPT_TENSORS, lambda each: 1 + len(each.tensors))
        self._signed: Cache[tuple[float, tuple[SignatureFacts, ...]]] = Cache(_KEPT_SIGNED)

    def models(self, sees: _Sees, query: str, after: str) -> FoundModels:
        """Models whose names contain ``query``, beginning after the name ``after``.

        Raises:
            WeighbridgeError: the store cannot be read.
        """
        catalog = self._service.catalog
        shown = catalog.list_models(after, MODELS + 1, lambda name: query in name and sees(name))
        engines: dict[str, list[Engine]] = {}
        for each in self._service.engines.listed(sees=sees):
            engines.setdefault(each.model, []).append(each)
        found = tuple(
            self._line(ModelName.parse(model.name), model, engines.get(model.name, ())) for model in shown[:MODELS]
        )
        return FoundModels(found, len(shown) > MODELS)

    def model(self, name: str, before: int, sees: _Sees) -> model_view.ModelFacts:
        """A model, with its newest versions below number ``before`` (0: the newest of all), and the adapters that
        ``sees`` allows.

        Raises:
            NotFound: the model does not exist.
            WeighbridgeError: the store cannot be read.
        """
        service, model = self._service, ModelName.parse(name)
        head, versions = service.catalog.page_of_versions(name, before, VERSIONS + 1, include_invisible=True)
        refs = service.gates.refs(name, head)
        found = summary_from_head(model, head, refs.refs)
        return model_view.ModelFacts(
            model=replace(found, adapters=tuple(filter(sees, found.adapters))),
            training=not model.part and service.catalog.heads.read(model.training) is not None,
            page=VersionPage(
                tuple(versions[:VERSIONS]),
                before,
                len(versions) > VERSIONS,
                {each.number: self._progress(model, each.number, head) for each in versions[:VERSIONS]},
            ),
            protections=refs.protections,
            requests=refs.requests,
            gate=head.gate,
            retention=head.retention,
            exports=tuple(islice((job for job in self._exports.list() if job.model == name), _EXPORTS)),
            engines=tuple(service.engines.listed(name)),
        )

    def version(self, name: str, number: str) -> VersionFacts:
        """A version, by number or ref.

        Raises:
            NotFound: the version does not exist.
            WeighbridgeError: the store cannot be read.
        """
        service, model = self._service, ModelName.parse(name)
        version = service.catalog.get_version(name, number)
        return VersionFacts(
            version=version,
            refs=refs_of(service.catalog.refs(name), version.number),
            progress=self._progress(model, version.number, service.catalog.heads.last_read(model)),
            contents=self._contents_of(model, version),
            signatures=self._signatures(name, version),
            engines=tuple(service.engines.listed(name)),
        )

    def side(self, name: str, number: str) -> SideOfPage:
        """A version, by number or ref, as one side of a comparison. Its weights are not read.

        Raises:
            NotFound: the version does not exist.
            WeighbridgeError: the store cannot be read.
        """
        version = self._service.catalog.get_version(name, number)
        named = refs_of(self._service.catalog.refs(name), version.number)
        return SideOfPage(version, self._contents_of(ModelName.parse(name), version), named)

    def _line(self, name: ModelName, model: Model, engines: Sequence[Engine]) -> index_view.ListedModelFacts:
        catalog = self._service.catalog
        known = catalog.snapshots.of_model(name)
        head = catalog.heads.last_read(name)
        history: History = catalog.history(name) if head is None else catalog.heads.history_of(name, head)
        newest = page_of(name, history, known, 0, _NEWEST, include_invisible=True)
        return index_view.ListedModelFacts(model, tuple(newest), tuple(engines))

    def _progress(self, model: ModelName, number: int, head: Head | None) -> PushProgress:
        """Progress of a push; for a push that this process does not know, only the time of its failure, from the
        head.
        """
        push = self._service.registry.find(model, number)
        if push is not None:
            return push.progress
        failed = None if head is None else head.failed.get(number)
        return PushProgress(ended_ms=0 if failed is None else failed.failed_ms)

    def _contents_of(self, model: ModelName, version: Version) -> Contents:
        """Contents of a version: from its manifest if it is durable, and from its layout while it is only in memory."""
        stored = version.state.stored
        key = (model, version.number, version.create_time_ms, stored)
        found = self._contents.get(key)
        if found is not None:
            return found
        if stored:
            with self._service.catalog.unless_deleted(model, version.number):
                found = _of_manifest(read_manifest(self._service.catalog.store, model, version.number))
        else:
            known = self._service.catalog.snapshots.get(model, version.number)
            if known is None or known.files is None:
                return Contents()
            found = _of_layout(known.files)
        self._contents.put(key, found)
        return found

    def _signatures(self, name: str, version: Version) -> tuple[SignatureFacts, ...]:
        if not version.state.stored:
            return ()
        key, now = (name, version.number, version.create_time_ms), time.monotonic()
        known = self._signed.get(key)
        if known is not None and now - known[0] < _SIGNED_SECONDS:
            return known[1]
        try:
            _, read = self._service.signatures.of_version(name, str(version.number))
        except (NotFound, FailedPrecondition):  # the version is being deleted
            return ()
        found = tuple(SignatureFacts(each.id, *signed_by(each.content)) for each in read)
        self._signed.put(key, (now, found))
        return found


def _of_layout(files: FilesLayout) -> Contents:
    layout = files.layout
    places = {place.shard.tensor: place.buffer for place in layout.placements}
    return Contents(
        tuple(FileFacts(name, size) for name, size in files.file_sizes.items()),
        tuple(
            TensorFacts(name, spec.dtype.name, tuple(spec.shape), spec.nbytes, places.get(name, ""))
            for name, spec in sorted(layout.tensors.items(), key=lambda item: in_order(item[0]))
        ),
    )


def _of_manifest(manifest: Manifest) -> Contents:
    return Contents(
        tuple(
            FileFacts(name, each.size, each.xxh3_128, each.blake3, each.sha256)
            for name, each in sorted(manifest.files.items())
        ),
        tuple(
            TensorFacts(name, each.dtype.name, each.shape, each.nbytes, each.file, each.xxh3_128, each.nonfinite)
            for name, each in sorted(manifest.tensors.items(), key=lambda item: in_order(item[0]))
        ),
        as_pairs(manifest.lineage),
        as_pairs(manifest.provenance),
    )
