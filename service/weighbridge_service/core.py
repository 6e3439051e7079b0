"""Core of the service: the catalog, pushes and pulls. The servers in `api` only convert requests to its calls."""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from dataclasses import dataclass

from weighbridge._core.checks import CheckStatus
from weighbridge._transport.credentials import Credentials
from weighbridge_service.access.access import Access
from weighbridge_service.access.audit import Audit
from weighbridge_service.admission.byte_budget import ByteBudget
from weighbridge_service.admission.identity_quotas import IdentityQuotas
from weighbridge_service.admission.policy_quotas import Quotas
from weighbridge_service.admission.reader_shares import ReaderShares
from weighbridge_service.admission.stored_bytes import StoredBytes
from weighbridge_service.admission.tickets import ticket_key
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.catalog.collection_loop import Collecting
from weighbridge_service.catalog.gate import Gates
from weighbridge_service.catalog.head_versions import approved_since
from weighbridge_service.catalog.signatures import SignatureCheck, StoredSignatures
from weighbridge_service.plan.declarations import Home
from weighbridge_service.pull.serving import PullServing
from weighbridge_service.push.effect_runner import Facilities
from weighbridge_service.push.image_allocator import ImageAllocator
from weighbridge_service.push.intake import Intake
from weighbridge_service.push.machine.state import Limits
from weighbridge_service.push.mappings import Mappings
from weighbridge_service.push.observing.observer import PushFigures
from weighbridge_service.push.opener import Opener
from weighbridge_service.push.registry import Registry
from weighbridge_service.push.taking_over import TakingOver
from weighbridge_service.replicas.directory import Directory
from weighbridge_service.replicas.heartbeat import Heartbeat
from weighbridge_service.replicas.links import Links
from weighbridge_service.replicas.peer_files import PeerFiles
from weighbridge_service.replicas.sessions import SharedSessions
from weighbridge_service.replicas.takeovers import KnownReplicas, Takeovers
from weighbridge_service.runtime.config import ServiceConfig
from weighbridge_service.runtime.memory_plan import (
    PROCESS_BYTES,
    MemoryReport,
    Needs,
    check_budget,
    check_limits,
    choose_budget,
    room_for_images,
)
from weighbridge_service.runtime.tls_files import TlsFiles
from weighbridge_storage.cache.block_cache import BlockCache
from weighbridge_storage.cache.block_file import check_holes
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.history import History
from weighbridge_storage.memory.image_pool import ImagePool
from weighbridge_storage.memory.memory_limits import UNLIMITED, read_disk, read_memory
from weighbridge_storage.opening import is_remote, open_store
from weighbridge_storage.stores.guarded import Count, GuardedStore
from weighbridge_storage.stores.probe import probe

log = logging.getLogger(__name__)

_OPENINGS_SECONDS = 1.0
"""Maximum seconds for which this replica waits for its pending openings of versions when another replica leaves."""
_LOG_LEVELS = {
    CheckStatus.OK: logging.INFO,
    CheckStatus.WARN: logging.WARNING,
    CheckStatus.FAIL: logging.ERROR,
}


@dataclass(frozen=True, slots=True)
class Plugged:
    """Callbacks of other packages for the core.

    Attributes:
        pushes: observes pushes.
        count_store_call: observes control calls to the store.
        check_signature: checks that a signature is valid and signs a version.
    """

    pushes: PushFigures
    count_store_call: Count
    check_signature: SignatureCheck


class Core:
    """One service over one object store. Thread-safe, including all attributes.

    Args:
        config: settings of the service.
        port: port for gRPC calls.
        plugged: callbacks of other packages.

    Raises:
        FailedPrecondition: the store does not honor conditional writes, or the scratch folder's file system cannot hold
            a read cache for it.
        InvalidArgument: a setting is not valid.
        WeighbridgeError: the store cannot be opened or used.
        OSError: the scratch folder cannot be created.

    Attributes:
        catalog: models, versions and refs.
        intake: pushes of versions.
        registry: sessions of pushes.
        serving: pulls of versions.
        collecting: collection of versions that need not be kept.
        gates: held versions and protected refs.
        signatures: signatures of versions.
        images: pool of images, in which versions are assembled.
        memory_budget: budget of memory for images.
        mappings: local processes that have images mapped.
        reader_shares: shares of images that readers may keep.
        byte_budget: budget of bytes in flight over gRPC.
        read_cache: cache of bytes read from a remote store or from other replicas.
        store_readers: registry of readers of the store.
        shared: versions that several replicas receive.
        peer_files: files of these versions, read from other replicas.
        directory: directory of other replicas.
        links: connections to other replicas.
        taking_over: receiver of versions that leaving replicas hand over.
        takeovers: reads these versions from the leaving replicas' images.
        key: secret that all replicas over the store share.
        access: identifies callers.
        quotas: quotas of identities and namespaces, and their usage.
        audit: the audit log.
    """

    def __init__(self, config: ServiceConfig, port: int, plugged: Plugged) -> None:
        self.config = config
        grace = config.grace
        self.byte_budget = ByteBudget(config.byte_budget)
        scratch = config.scratch_folder / ".images"
        scratch.mkdir(parents=True, exist_ok=True)
        self.read_cache = BlockCache(scratch, config.read_cache)
        # files of a remote store and of other replicas are read through the cache
        self._uses_cache = is_remote(config.store) or bool(config.advertise)
        self._cache_in_memory = self._uses_cache and read_disk(scratch).in_memory
        if self._uses_cache:
            check_holes(scratch)
        self.audit = Audit(config.audit)
        self._store = open_store(config.store)
        try:
            probe(self._store)
        except BaseException:
            self._store.close()
            raise
        self._scratch = scratch
        self.memory_budget = choose_budget(config.memory_budget, read_memory(), self._needs())
        self.mappings = Mappings()
        self.images = ImagePool(
            self.memory_budget.nbytes,
            scratch,
            self.mappings.recall,
            spill_bytes=UNLIMITED if config.spill_budget is None else config.spill_budget,
            memory_room=lambda: room_for_images(read_memory(), self._needs()),
        )
        self.reader_shares = ReaderShares(self.memory_budget.nbytes, spill=config.spill_budget != 0)
        for check in (
            check_limits(read_memory(), self._needs()),
            check_budget(self.memory_budget, self.images.spaces()[0]),
        ):
            log.log(_LOG_LEVELS[check.status], "%s", check)
        # transfers of weights wait for the store without a time limit, in threads of their own; control calls have one
        hasty = self._store.with_time_limit(config.store_patience)
        self._guarded = GuardedStore(hasty, config.store_patience, count=plugged.count_store_call)
        self.catalog = Catalog(
            self._store,
            grace,
            self._guarded,
            kept_models=config.kept_models,
            kept_shards=config.kept_shards,
            open_names=config.policy is None,
        )
        self.key = ticket_key(self.catalog.store)
        asks_clients = config.tls is not None and config.tls.client_ca is not None
        self.access = access = Access(
            config.policy,
            self.key,
            certificates=asks_clients,
            lane=config.local_socket != "off",
            look_seconds=config.policy_look,
            standing_seconds=config.standing_look,
        )
        home = Home(_address(config.advertise, port), uuid.uuid4().hex)
        news = threading.Event()
        heads = self.catalog.heads
        registry = self.registry = Registry(
            self.catalog.snapshots,
            news,
            lambda name, number: approved_since(heads.last_read(name), number),
            kept_images=config.kept_images,
            kept_pushes=config.kept_pushes,
        )
        self.links = links = Links(home, _proofs(config.tls, access), self.replica_left)
        self.directory = Directory(self._store, home, lambda other: links.exchange(other, ()))
        successors = KnownReplicas(self.directory, self.links)
        stored = StoredBytes(self._guarded, heads, access.stored_limits, rest=config.count_rest)
        self.quotas = Quotas(IdentityQuotas(), stored, access.limited)
        allocator = ImageAllocator(self.images)
        facilities = Facilities(home, _limits(config), allocator, self.mappings, successors, plugged.pushes)
        opener = Opener(self.catalog, registry, facilities, config.max_receiving, self.quotas)
        self.intake = Intake(self.catalog, registry, opener, facilities)
        self.taking_over = TakingOver(self.catalog, registry, opener, facilities)
        self.takeovers = Takeovers(self.taking_over, self.links)
        self.store_readers = self.catalog.readers
        self.shared = SharedSessions(registry)
        self.peer_files = PeerFiles(self.links, self.read_cache, self._store)
        self._heartbeat: Heartbeat | None = None
        if config.advertise:
            self._heartbeat = Heartbeat(self.links, self.shared, news, config.peer_patience)
            self.directory.start()
        self.serving = PullServing(self.catalog, self.read_cache, self.store_readers, self.shared, self.peer_files)
        self.gates = Gates(self.catalog, registry.approved, self.access.named)
        self.signatures = StoredSignatures(self.catalog, plugged.check_signature)
        self.collecting = Collecting(self.catalog, config.collect_every, self._on_collected)

    def replica_left(self, home: Home) -> None:
        """Assign no further versions to a replica that is leaving."""
        if self.directory.left(home):
            self.intake.opener.wait_for_openings(_OPENINGS_SECONDS)  # they may still count on the replica
        self.shared.count_on(self.directory.staying())

    def is_leaving(self) -> bool:
        """Whether this replica is leaving and has notified the others."""
        return self.links.leaving

    def _on_collected(self, name: ModelName, history: History) -> None:
        self.registry.forget_deleted_model(name, history.head.first_version)
        self.serving.close_gone(name, history)
        self.quotas.stored.note(name)

    def _needs(self) -> Needs:
        """Memory that this service needs in addition to images."""
        cache = self.config.read_cache if self._cache_in_memory else 0
        return Needs(PROCESS_BYTES + self.config.byte_budget, cache and cache - self.read_cache.usage().nbytes)

    @property
    def store_silent_seconds(self) -> float:
        """Seconds for which the store has not answered, while control calls that need it fail at once; 0 while it
        answers.
        """
        return self._guarded.silent_seconds

    def memory(self) -> MemoryReport:
        """Current report on the service's memory. Does not access the store.

        Raises:
            WeighbridgeError: the scratch folder cannot be examined.
        """
        memory, disk = self.images.spaces()
        return MemoryReport(
            budget=self.memory_budget,
            needs=self._needs(),
            reading=read_memory(),
            memory=memory,
            disk=disk,
            scratch=read_disk(self._scratch),
            read_cache=self.read_cache.usage().nbytes,
            read_cache_budget=self.config.read_cache if self._uses_cache else 0,
            holdings=tuple(self.images.holdings()),
            waiting=tuple(self.images.waiting()),
        )

    @property
    def draining(self) -> bool:
        """Whether the service is shutting down."""
        return self.intake.opener.draining

    def drain(self) -> bool:
        """Refuse new versions, complete the current ones or hand them over, and stop.

        Returns whether no version was lost.
        """
        finished = self.intake.drain(self.config.drain_seconds)
        self._stop()
        return finished

    def close(self) -> None:
        """Release files and memory. Call `drain` before."""
        self._stop()
        self.links.close()
        self.catalog.readers.close()
        self.images.trim()
        self.read_cache.close()
        self._guarded.close()
        self._store.close()
        self.audit.close()

    def _stop_telling(self) -> None:
        """Stop exchanges of plugged-in packages with other replicas; for subclasses to override."""

    def _stop(self) -> None:
        self.catalog.stopping.set()
        self.catalog.changes.notify()
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._stop_telling()
            self.directory.close()
        self.intake.stop()
        self.collecting.join()


def _limits(config: ServiceConfig) -> Limits:
    """Limits of pushes, from the settings."""
    return Limits(
        receive_timeout=config.receive_timeout,
        opening_wait=config.opening_wait,
        image_wait=config.image_wait,
        unmap_wait=config.unmap_wait,
        lease=config.open_lease,
        spreading=bool(config.advertise),
        sha256=config.sha256,
    )


def _proofs(tls: TlsFiles | None, access: Access) -> Credentials:
    """Credentials for calls to other replicas, whose certificates are from the same authorities."""
    token = None if access.open else access.replica_token
    if tls is None:
        return Credentials(token=token, insecure=True)
    authority = Credentials.from_environment().ca or str(tls.client_ca or tls.certificate)
    return Credentials(authority, str(tls.certificate), str(tls.key), token=token)


def _address(advertise: str, port: int) -> str:
    """Address at which other replicas reach this process: ``advertise``, with host name and port filled in where it has
    none.
    """
    host, _, advertised = advertise.rpartition(":")
    return f"{host or socket.gethostname()}:{port if advertised in ('', '0') else advertised}"
