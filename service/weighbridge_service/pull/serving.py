"""Service of pulls and restores: slices for engines, shards for trainers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

from weighbridge._core import dtypes
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.lru import Cache
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge._core.resources import REF_LIVE, Version
from weighbridge._core.slices import FullTensors, LayoutRequest
from weighbridge._core.striping import WHOLE, Striping
from weighbridge._formats.safetensors_files import FilesLayout
from weighbridge._transport.pieces import Buffer
from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge_service.catalog.catalog import AWAY, Catalog
from weighbridge_service.catalog.store_readers import StoreReaders, reading_since
from weighbridge_service.models.megatron_layouts import megatron_layout
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.models.weight_maps import derive_weight_map, registered_specs
from weighbridge_service.plan.casting import Casting, cast_specs
from weighbridge_service.plan.relations import WeightMap
from weighbridge_service.plan.transfers import Transfer
from weighbridge_service.pull.read_ahead import StreamReader
from weighbridge_service.pull.reading import OpenedVersion, Reading
from weighbridge_service.push.filling.arrivals import ArrivingVersion
from weighbridge_service.replicas.peer_files import PeerFiles
from weighbridge_service.replicas.sessions import SharedSessions
from weighbridge_storage.cache.block_cache import BlockCache
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.history import History
from weighbridge_storage.memory.file_bytes import FileBytes, Place
from weighbridge_storage.memory.images import ImageHold
from weighbridge_storage.versions.reading import open_version

_KEPT_CASTS = 250_000
"""Maximum number of slices and shards in cached casts, over all models: pulls in another dtype, and restores that add
constants.
"""
_LATELY_SECONDS = 1.0
"""Maximum age in seconds of a head that is reused for versions in memory. A version that another replica removes from
history stays readable for much longer.
"""
_KEPT_OPEN = 16
"""Number of durable versions whose files stay open, or in the read cache, after a pull."""


@dataclass(frozen=True, slots=True, eq=False)
class GrantedVersion:
    """Slices of a version that another process on this machine reads in place.

    Attributes:
        opened: the open version; to be closed when the slices are no longer read.
        layout: layout of the slices.
        transfer: transfer between the slices and the files.
        places: places of the files on this machine.
    """

    opened: OpenedVersion
    layout: Layout
    transfer: Transfer
    places: Mapping[str, Place]

    def leave_open(self) -> None:
        """Record that the reader has disconnected without releasing the slices.

        Their memory is not reused while a process still maps it.
        """
        for place in self.places.values():
            place.leave_open()


class PullServing:
    """Pulls and restores of versions. Thread-safe.

    Args:
        catalog: catalog of versions.
        cache: cache for bytes of a remote store.
        readers: registry of reads from the store.
        shared: push sessions that other replicas take part in.
        peer_files: files that other replicas own.

    Attributes:
        bytes_out: bytes of weights that were sent to clients, or that clients read in place.
        bytes_out_locally: the number of these bytes that processes on this machine read in place.
    """

    def __init__(
        self,
        catalog: Catalog,
        cache: BlockCache,
        readers: StoreReaders,
        shared: SharedSessions,
        peer_files: PeerFiles,
    ) -> None:
        self._catalog = catalog
        self._shared = shared
        self._peer_files = peer_files
        self._cache = cache
        self._readers = readers
        self._opened: Cache[tuple[FilesLayout, Mapping[str, FileBytes]]] = Cache(_KEPT_OPEN)
        self._casts: Cache[Casting] = Cache(_KEPT_CASTS, lambda cast: 1 + len(cast.layout.placements))
        self.bytes_out = 0
        self.bytes_out_locally = 0
        self._counting = threading.Lock()

    def count(self, nbytes: int) -> None:
        """Count bytes of weights that are sent."""
        with self._counting:
            self.bytes_out += nbytes

    def count_granted(self, nbytes: int) -> None:
        """Count bytes of weights that a process on this machine reads in place."""
        with self._counting:
            self.bytes_out += nbytes
            self.bytes_out_locally += nbytes

    def plan_pull(self, name: str, version: str, request: LayoutRequest, dtype: str = "") -> tuple[Version, Layout]:
        """The version that a pull would read, and the layout of its slices, after a cast if a dtype is given."""
        model_name = ModelName.parse(name)
        found = self._catalog.resolve(model_name, version)
        model, _ = self._model_of(model_name, str(found.number))
        layout = model.pull_layout(request)
        return found, self._casting(model, layout, dtype).layout if dtype else layout

    def pull(
        self,
        name: str,
        version: str,
        request: LayoutRequest,
        offset: int,
        dtype: str = "",
        striping: Striping = WHOLE,
    ) -> Reading:
        """Open slices of a version as a stream, or one stripe of it, from byte ``offset`` on, with a cast if a dtype is
        given.
        """
        model_name = ModelName.parse(name)
        model, version = self._model_of(model_name, version)
        layout = model.pull_layout(request)
        casting = self._casting(model, layout, dtype) if dtype else None
        opened = self._open(model_name, version)
        return self._reading(opened, layout, (offset, striping), casting, model.pull_transfer)

    def grant(self, name: str, version: str, request: LayoutRequest) -> GrantedVersion:
        """Open slices of a version for in-place reads by a process on this machine.

        Raises:
            FailedPrecondition: the version's files are not on this machine.
        """
        model_name = ModelName.parse(name)
        model, version = self._model_of(model_name, version)
        return self._granted(model, self._open(model_name, version), request)

    def grant_arriving(self, version: Version, arriving: ArrivingVersion, request: LayoutRequest) -> GrantedVersion:
        """Open slices of a version that is still being received, for in-place reads by a process on this machine.

        Closing the result releases the hold on the image.

        Raises:
            InvalidArgument: the slices do not fit the version.
        """
        model, image = arriving.model, arriving.image
        return self._granted(model, OpenedVersion(version, model.files, image.file_bytes, arriving.hold), request)

    def _granted(self, model: RegisteredModel, opened: OpenedVersion, request: LayoutRequest) -> GrantedVersion:
        """Slices of an open version for in-place reads. Closes the version on an error."""
        try:
            layout = model.pull_layout(request)
            transfer = model.pull_transfer(opened.files.layout, layout)
            places = {file: source.place for file, source in opened.sources.items()}
            if None in places.values():
                raise FailedPrecondition(f"{opened.version} is in a remote store, not on this machine")
            here = {file: place for file, place in places.items() if place is not None}
            return GrantedVersion(opened, layout, transfer, here)
        except BaseException:
            opened.close()
            raise

    def cast(self, name: str, specs: Iterable[TensorSpec], dtype: DType) -> list[TensorSpec]:
        """Specs of a model's tensors after a cast. Raises InvalidArgument if a tensor cannot be cast."""
        model = self._catalog.model(ModelName.parse(name))
        return cast_specs(specs, dtype, model.keep_in_fp32, model.scales)

    def _casting(self, model: RegisteredModel, layout: Layout, dtype: str) -> Casting:
        target, kept = dtypes.parse(dtype), model.keep_in_fp32
        key = layout.digest, target, kept, model.scales
        return self._casts.get_or_make(key, lambda: Casting(layout, target, kept, model.scales))

    def _shifting(self, model: RegisteredModel, layout: Layout) -> Casting | None:
        """The casting that adds constants to elements of restored shards; None if there are none to add."""
        shifts = model.restore_shifts(layout)
        if not shifts:
            return None
        key = layout.digest, tuple(shifts.items())
        return self._casts.get_or_make(key, lambda: Casting(layout, None, shifts=shifts))

    def restore(self, name: str, version: str, layout: Layout, offset: int, striping: Striping = WHOLE) -> Reading:
        """Open the shards of a trainer rank as a stream, or one stripe of it, from byte ``offset`` on."""
        model_name = ModelName.parse(name)
        model = self._mapped(model_name)
        shifting = self._shifting(model, layout)
        opened = self._open(model_name, version)
        return self._reading(opened, layout, (offset, striping), shifting, model.restore_transfer)

    def close_gone(self, name: ModelName, history: History) -> None:
        """Close files of versions that are no longer in the history, because open files occupy disk space."""
        numbers = {number for model, number, _ in self._opened.keys if model == name}
        gone = {number for number in numbers if history.find(number) is None}
        self._opened.drop_if(lambda key: key[0] == name and key[1] in gone)

    def open(self, name: str, version: str) -> OpenedVersion:
        """Open a visible version. The caller closes it."""
        return self._open(ModelName.parse(name), version)

    def describe_shards(self, name: str, rank: MegatronRank) -> Layout:
        """The shards of a Megatron-core rank, with a key for each layer and expert."""
        model = self._mapped(ModelName.parse(name))
        return megatron_layout(model.bridge, model.tensors, rank, experts_apart=True)

    def registered_tensors(self, name: str, declared: Layout) -> Layout:
        """The declared tensors of a trainer that belong to the model, by Megatron-core's names, in the registered
        dtypes.
        """
        model = self._mapped(ModelName.parse(name))
        found = registered_specs(model.bridge, model.tensors, declared.tensors.values())
        return Layout.stream(found, [])

    def weight_map(self, name: str, declared: Layout) -> WeightMap:
        """The weight map from a trainer's tensors to the model's, for the tensors of `registered_tensors`."""
        model = self._mapped(ModelName.parse(name))
        found = registered_specs(model.bridge, model.tensors, declared.tensors.values())
        return derive_weight_map(model.bridge, model.tensors, {spec.name: spec for spec in found})

    def describe_tensors(self, name: str) -> Layout:
        """All whole tensors of a registered model, by their names in its safetensors files."""
        return self._mapped(ModelName.parse(name)).pull_layout(FullTensors())

    def _mapped(self, name: ModelName) -> RegisteredModel:
        """A model that is not an adapter and whose versions all have the same tensors.

        Raises InvalidArgument for other models.
        """
        model = self._catalog.model(name)
        if model.by_version:
            raise InvalidArgument(
                f"each version of {name} has tensors of its own, under the names that its trainer gave them",
                fix="pull tensors or boxes of one version by these names",
            )
        if model.is_adapter:
            raise InvalidArgument(
                f"{name} is an adapter, and trainers push whole models and restore them",
                fix="push it by push_adapter(model, peft_model, base=...), load it with peft, or "
                "push and restore the merged model under another name: "
                "docs/adapters.md",
            )
        return model

    def _model_of(self, name: ModelName, version: str) -> tuple[RegisteredModel, str]:
        """A model with the tensors of a version, and the version as a string.

        If each version has its own tensors, the string is the version's number, because a ref may move before the
        version is opened.
        """
        model = self._catalog.model(name)
        if not model.by_version:
            return model, version
        number = str(self._catalog.resolve(name, version).number)
        with closing(self._open(name, number)) as opened:
            return model.with_tensors(opened.files.layout.tensors.values()), number

    def _open(self, name: ModelName, version: str) -> OpenedVersion:
        asked_ms = self._readers.clock()
        found, history = self._find(name, version)
        model = self._catalog.model(name)
        in_image: dict[str, FileBytes] = {}
        hold: ImageHold | None = None
        known = self._catalog.snapshots.get(name, found.number)
        if known is not None and known.image is not None:
            with suppress(FailedPrecondition):  # the image was released after the snapshot
                hold, in_image = known.image.hold(), known.image.file_bytes
        files = None if known is None else known.files
        if files is None and not model.by_version:
            files = model.files
        if hold is not None and files is not None and in_image.keys() == files.file_sizes.keys():
            return OpenedVersion(found, files, in_image, hold)
        # if several replicas have received the version together, each holds some of the files in memory and reads the
        # others
        try:
            opened = None if files is None else self._open_elsewhere(name, found, files, asked_ms)
            if opened is None:
                opened = self._open_durable(name, found, history, asked_ms)
        except BaseException:
            if hold is not None:
                hold.release()
            raise
        return opened if hold is None else opened.partly_from(in_image, hold)

    def _find(self, name: ModelName, version: str) -> tuple[Version, History | None]:
        """A version, and the history that contains it. Without a history, only versions in memory can be read."""
        heads, here = self._catalog.heads, self._catalog.in_memory(name, version)
        numbered = here is not None and version != REF_LIVE
        head = heads.read_lately(name, _LATELY_SECONDS) if numbered else None
        try:
            if head is not None:
                return self._catalog.resolve(name, version, heads.history_of(name, head)), None
            history = self._catalog.history(name)
        except AWAY:
            here = self._catalog.in_memory(name, version)
            if here is None:
                raise
            return here, None
        return self._catalog.resolve(name, version, history), history

    def _open_elsewhere(
        self, name: ModelName, found: Version, layout: FilesLayout, asked_ms: int
    ) -> OpenedVersion | None:
        """Open a version that is not durable and has files on other replicas; None if it has no files there."""
        elsewhere = self._shared.files_elsewhere(name, found.number)
        if elsewhere is None:
            return None
        number, claim = found.number, elsewhere.claim
        sizes = {file: layout.file_sizes[file] for file in elsewhere.files}
        files, sources = self._opened.get_or_make(
            (name, number, f"from {claim}"),
            lambda: (
                layout,
                self._peer_files.open(
                    name, number, claim, elsewhere.owner_of, sizes,
                    lambda: self._shared.is_durable(name, number, claim),
                ),
            ),
        )  # fmt: skip
        # register as a reader of the store, since the remaining blocks come from there once the version is durable
        return OpenedVersion(found, files, sources, self._readers.begin(name, number, asked_ms))

    def _open_durable(self, name: ModelName, found: Version, history: History | None, asked_ms: int) -> OpenedVersion:
        if history is None or not found.state.stored:
            history = self._catalog.history(name)  # the version may have become durable since the first read
            found = self._catalog.resolve(name, str(found.number), history)
        if not found.state.stored:
            raise FailedPrecondition(
                f"{found} is no longer in memory: it could not be made durable and a newer one is live"
            )
        entry = history.find(found.number)
        open_it = partial(open_version, self._catalog.store, self._cache, name, found.number)
        hold = self._readers.begin(name, found.number, reading_since(entry, asked_ms))
        try:
            # a model that was deleted and registered again may use the same number for another version
            with self._catalog.unless_deleted(name, found.number):
                key = name, found.number, entry.write_id if entry else ""
                opened = self._opened.get_or_make(key, open_it)
                files, sources = opened
                damaged = {name: file.identity for name, file in sources.items() if file.damaged}
                if damaged:
                    again = open_it()
                    # until all damaged files are restored, keep the old sources: only they know which parts are
                    # damaged, and reject reads of these parts that are too small to be compared with a digest
                    if all(again[1][name].identity != identity for name, identity in damaged.items()):
                        files, sources = self._opened.put_instead(key, opened, again)
        except BaseException:
            hold.release()
            raise
        return OpenedVersion(found, files, sources, hold)

    def _reading(
        self,
        opened: OpenedVersion,
        layout: Layout,
        part: tuple[int, Striping],
        casting: Casting | None,
        transfer_of: Callable[[Layout, Layout], Transfer],
    ) -> Reading:
        """A stream of an open version.

        The stream closes the version at its end; if it cannot be created, the version is closed at once.
        """
        try:
            reader = StreamReader(transfer_of(opened.files.layout, layout), opened.sources, layout.nbytes)
        except BaseException:
            opened.close()
            raise
        model, number = ModelName.parse(opened.version.model), opened.version.number

        def gather(offset: int, length: int) -> Buffer:
            with self._catalog.unless_deleted(model, number):
                return reader.gather(offset, length)

        if casting is None:
            return Reading(opened.version, layout, *part, opened, reader, gather)
        return Reading(opened.version, casting.layout, *part, opened, reader, partial(casting.gather, gather))
