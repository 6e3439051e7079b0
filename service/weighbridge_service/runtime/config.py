"""Settings of a service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weighbridge_service.runtime.tls_files import TlsFiles
from weighbridge_storage.head.leases import Grace
from weighbridge_storage.opening import is_remote, shown
from weighbridge_storage.stores.guarded import DEFAULT_PATIENCE

_DEFAULT_SCRATCH = Path("weighbridge-data")


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Settings of one service process.

    Attributes:
        store: store of versions: a folder, or a location such as ``s3://bucket/prefix``
            (`weighbridge_storage.opening`).
        scratch: folder on this machine for files that may be lost: images that do not fit into memory, and the read
            cache. By default the store's folder, or ``weighbridge-data`` in the current folder if the store is not a
            folder.
        exports: folder for exports that are requested over HTTP; by default ``exports`` in the scratch folder.
        memory_budget: maximum bytes of shared memory for images; None for as much as the machine allows
            (`weighbridge_service.runtime.memory_plan.choose_budget`). Further images go to files in the scratch folder.
        spill_budget: maximum bytes of these files; None for as much as the disk has space for, 0 to let pushes wait for
            memory instead.
        byte_budget: maximum bytes of weights in flight over gRPC: being gathered or sent, or received and not yet
            stored.
        budget_wait: seconds that a stream without a deadline waits for space in the byte budget.
        read_cache: maximum bytes on disk, in the scratch folder, of the cache for pulls from a store that is not a
            folder.
        redirect_downloads: whether clients of the Hub's protocol are redirected to the store for large files, if it can
            sign URLs.
        bulk_port: port for streams of weights over gRPC; ``auto`` for the port after the port for all calls, or any
            free port if that one is in use; ``off`` to share the port for all calls
            (`weighbridge_service.api.grpc.server.bulk_ports`).
        local_socket: path of the Unix socket through which processes on this machine access weights in shared memory;
            ``auto`` for a socket that only this user's processes can reach, ``off`` for no socket.
        lane_trust_uids: ids of users, in addition to the service's own, whose processes may map memory for writing
            (`weighbridge_service.api.lane.trust`).
        receive_timeout: seconds without a message from any rank after which a version that is being received fails.
        advertise: ``host:port`` at which other replicas of the service, and trainer ranks on other nodes, reach this
            one's gRPC port; empty if ranks of one version do not push to several replicas.
        open_lease: seconds after which a version that is being received counts as abandoned unless a replica renews its
            lease, which each does after half of this time. The clocks of replicas must differ by less.
        store_patience: seconds that a control call waits for the store, and seconds without a response after which such
            calls fail at once (`weighbridge_storage.stores.guarded`).
        peer_patience: seconds without a response from another replica after which it counts as lost.
        opening_wait: seconds that a call waits for its turn to open a version.
        image_wait: seconds that a push waits for its turn and for space while all space for images is in use.
        unmap_wait: seconds that processes may take to unmap memory on request while a rank waits; normally they need
            milliseconds.
        max_receiving: maximum number of versions, of all models together, that are received concurrently.
        drain_seconds: seconds for which a shutdown waits for pushes and publications in progress.
        collect_every: average seconds between two garbage collections of the store; 0 disables them.
        grace_seconds: seconds for which a version can still be read after its removal from history; must be the same
            for all replicas.
        report_every: seconds between two reports of an agent whose engine does not change. After three times as long
            without a report the engine is stale, after twelve times as long it is gone.
        http_hosts: host names that requests to the HTTP port may use, in addition to addresses, this machine's own
            name, and names that no public DNS server resolves; ``*`` for any.
        policy: policy file (`weighbridge_service.access.policy`). With None, and if the service does not ask clients
            for certificates, every caller may do everything.
        policy_look: seconds between two checks of that file for changes.
        standing_look: seconds between two authorization checks of a long call.
        count_rest: after counting a namespace's stored bytes, the service waits this many times the duration of that
            count before the next one.
        otlp: OTLP address of a collector for traces; empty to use OpenTelemetry's own environment variables.
        audit: audit log to append to (`weighbridge_service.access.audit`); None for none.
        tls: certificate of the gRPC and HTTP ports; None to serve without TLS.
        insecure: whether to serve without TLS at addresses that other machines can reach.
        sha256: whether to compute the SHA-256 of each file when a version is pushed, so that signing need not read the
            files again (docs/signing.md).
        most_streams: maximum number of concurrent pushes, pulls and restores over gRPC. Each uses a thread. In
            addition, replicas may read as many streams from each other.
        kept_models: number of models that the process caches; others are read from the store. In addition, models with
            versions being received are cached.
        kept_shards: number of shards of recently declared layouts that are cached per model, so that ranks need not
            send them again. Layouts of a version that is being received are kept until it is planned.
        kept_images: number of images of durable versions that are kept for reads from memory. Each takes whole pages,
            two descriptors and a mapping, and keeps the push's session.
        kept_pushes: number of ended pushes, of all models together, that are recorded, so that their clients can learn
            the outcomes.
    """

    store: Path | str
    scratch: Path | None = None
    exports: Path | None = None
    memory_budget: int | None = None
    spill_budget: int | None = None
    byte_budget: int = 256 << 20
    budget_wait: float = 30.0
    read_cache: int = 16 << 30
    redirect_downloads: bool = False
    bulk_port: str = "auto"
    local_socket: str = "auto"
    lane_trust_uids: tuple[int, ...] = ()
    receive_timeout: float = 300.0
    advertise: str = ""
    open_lease: float = 120.0
    store_patience: float = DEFAULT_PATIENCE
    peer_patience: float = 60.0
    opening_wait: float = 10.0
    image_wait: float = 60.0
    unmap_wait: float = 5.0
    max_receiving: int = 64
    drain_seconds: float = 30.0
    collect_every: float = 600.0
    grace_seconds: float = 900.0
    report_every: float = 5.0
    http_hosts: tuple[str, ...] = ()
    policy: Path | None = None
    policy_look: float = 1.0
    standing_look: float = 5.0
    count_rest: float = 10.0
    audit: Path | None = None
    otlp: str = ""
    tls: TlsFiles | None = None
    insecure: bool = False
    sha256: bool = False
    most_streams: int = 1024
    kept_models: int = 128
    kept_shards: int = 2_000_000
    kept_images: int = 64
    kept_pushes: int = 1000

    @property
    def grace(self) -> Grace:
        """The grace time. Raises InvalidArgument if it is out of range."""
        return Grace(round(self.grace_seconds * 1000))

    @property
    def scratch_folder(self) -> Path:
        """Folder for files that may be lost."""
        return self.scratch or (_DEFAULT_SCRATCH if is_remote(self.store) else Path(self.store))

    @property
    def exports_folder(self) -> Path:
        """Folder for exports."""
        return self.exports or self.scratch_folder / "exports"

    @property
    def store_shown(self) -> str:
        """The store in a form for messages: without options, and with an absolute path if it is a folder."""
        return shown(self.store)
