"""Giving versions out: slices for engines, shards for trainers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import partial

from weighbridge import dtypes
from weighbridge.dtypes import DType
from weighbridge.errors import FailedPrecondition
from weighbridge.layouts import Layout, TensorSpec
from weighbridge.resources import Version, VersionState
from weighbridge.safetensors_files import FilesLayout
from weighbridge.slices import LayoutRequest
from weighbridge_service.casting import Casting, cast_specs
from weighbridge_service.catalog import Catalog
from weighbridge_service.megatron_layouts import TrainerRank, megatron_layout
from weighbridge_service.models import Cache, RegisteredModel
from weighbridge_service.reading import OpenVersion, Reading
from weighbridge_service.store_readers import reading_since
from weighbridge_service.transfers import Bytes
from weighbridge_storage.names import ModelName
from weighbridge_storage.versions import open_version

_KEPT_CASTS = 250_000
"""Slices of pulls in another dtype that are remembered, over all models."""
_KEPT_OPEN = 16
"""Durable versions whose files stay mapped after a pull."""


class Serving:
    """Versions on their way out. Thread-safe.

    Args:
        catalog: which versions there are.

    Attributes:
        bytes_out: bytes of weights that were sent.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._opened: Cache[tuple[FilesLayout, Mapping[str, Bytes]]] = Cache(_KEPT_OPEN)
        self._casts: Cache[Casting] = Cache(_KEPT_CASTS, lambda cast: 1 + len(cast.layout.placements))
        self.bytes_out = 0
        self._counting = threading.Lock()

    def count(self, nbytes: int) -> None:
        """Bytes of weights are being sent."""
        with self._counting:
            self.bytes_out += nbytes

    def plan_pull(
        self, name: str, version: str, request: LayoutRequest, dtype: str = ""
    ) -> tuple[Version, Layout]:
        """Which version a pull would read, and which slices it would bring; cast, if a dtype is named."""
        model_name = ModelName.parse(name)
        found = self._catalog.resolve(model_name, version)
        model = self._catalog.state(model_name).model
        layout = model.pull_layout(request)
        return found, self._casting(model, layout, dtype).layout if dtype else layout

    def pull(self, name: str, version: str, request: LayoutRequest, offset: int, dtype: str = "") -> Reading:
        """Slices of a version as a stream, from byte ``offset`` on; cast, if a dtype is named."""
        model_name = ModelName.parse(name)
        model = self._catalog.state(model_name).model
        layout = model.pull_layout(request)
        casting = self._casting(model, layout, dtype) if dtype else None
        opened = self._open(model_name, version)
        try:
            transfer = model.pull_transfer(opened.files.layout, layout)
        except BaseException:
            opened.close()
            raise
        gather = partial(transfer.gather, files=opened.buffers)
        if casting is None:
            return Reading(opened.version, layout, offset, opened, gather)
        return Reading(opened.version, casting.layout, offset, opened, partial(casting.gather, gather))

    def cast(self, name: str, specs: Iterable[TensorSpec], dtype: DType) -> list[TensorSpec]:
        """What tensors of a model are after a cast. Raises InvalidArgument if one cannot be cast."""
        return cast_specs(specs, dtype, self._catalog.state(ModelName.parse(name)).model.bridge.keep_in_fp32)

    def _casting(self, model: RegisteredModel, layout: Layout, dtype: str) -> Casting:
        target, kept = dtypes.parse(dtype), model.bridge.keep_in_fp32
        return self._casts.get_or_make((layout.digest, target, kept), lambda: Casting(layout, target, kept))

    def restore(self, name: str, version: str, layout: Layout, offset: int) -> Reading:
        """The shards of a trainer rank as a stream, from byte ``offset`` on."""
        model_name = ModelName.parse(name)
        model = self._catalog.state(model_name).model
        opened = self._open(model_name, version)
        try:
            transfer = model.restore_transfer(opened.files.layout, layout)
        except BaseException:
            opened.close()
            raise
        return Reading(opened.version, layout, offset, opened, partial(transfer.gather, files=opened.buffers))

    def open(self, name: str, version: str) -> OpenVersion:
        """A visible version's bytes; close it after use."""
        return self._open(ModelName.parse(name), version)

    def describe_shards(self, name: str, rank: TrainerRank) -> Layout:
        """The shards that a Megatron-core rank holds, with a key for each layer and expert."""
        model = self._catalog.state(ModelName.parse(name)).model
        return megatron_layout(model.bridge, model.tensors, rank, experts_apart=True)

    def _open(self, name: ModelName, version: str) -> OpenVersion:
        asked_ms = self._catalog.readers.clock()
        head = self._catalog.head(name)
        found = self._catalog.resolve(name, version, head)
        state = self._catalog.state(name)
        with self._catalog.changed:
            live = state.versions.get(found.number)
            image = live.receiving.image if live else None
            if image is not None:
                lease = image.lease()
                return OpenVersion(found, state.model.files, image.read_only_buffers, lease)
        if found.state is not VersionState.DURABLE:
            head = self._catalog.head(name)
            found = self._catalog.resolve(name, str(found.number), head)  # it may have become durable since
        if found.state is not VersionState.DURABLE:
            raise FailedPrecondition(
                f"{found} is no longer held: it could not be made durable and a newer one is live"
            )
        since_ms = reading_since(head, found.number, asked_ms)
        lease = self._catalog.readers.begin(name, found.number, since_ms)
        try:
            with self._catalog.unless_deleted(name, found.number):
                files, buffers = self._opened.get_or_make(
                    (name, found.number), lambda: open_version(self._catalog.store, name, found.number)
                )
        except BaseException:
            lease.release()
            raise
        return OpenVersion(found, files, buffers, lease)
