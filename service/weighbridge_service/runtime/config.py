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
        store: where versions are kept: a folder, or a location such as ``s3://bucket/prefix``
            (`weighbridge_storage.opening`).
        scratch: folder on this machine for what may be lost: images that do not fit into memory, the read cache. By
            default the store's folder, or ``weighbridge-data`` in the current one if the store is not a folder.
        exports: folder under which exports that are asked for over HTTP are written; by default ``exports`` in the
            scratch folder.
        memory_budget: most bytes of shared memory for images; None for what the machine allows
            (`weighbridge_service.runtime.memory_plan.choose_budget`). What does not fit goes to files in the scratch folder.
        spill_budget: most bytes of these files; None for as many as the disk has room for, 0 to let pushes wait for memory instead.
        byte_budget: most bytes of weights in flight over gRPC: being gathered or sent, or received and not yet in their place.
        budget_wait: seconds that a stream without a deadline waits for room in the byte budget.
        read_cache: most bytes on disk, in the scratch folder, of what pulls have brought from a store that is no folder.
        redirect_downloads: whether clients of the Hub's protocol are sent to the store itself for large files, if it can sign
            URLs.
        bulk_port: for streams of weights over gRPC; ``auto`` for the one behind that of all calls, or any if that is taken; ``off`` if they
            share it (`weighbridge_service.api.grpc.server.bulk_ports`).
        local_socket: path of the Unix socket by which processes of this machine get at weights in shared memory; ``auto`` for one
            that only this user's processes can reach, ``off`` for none.
        lane_trust_uids: users, besides the service's own, whose processes memory is lent to for writing
            (`weighbridge_service.api.lane.trust`).
        receive_timeout: seconds without a word from any rank after which a version being received is given up.
        advertise: ``host:port`` under which other replicas of the service, and trainer ranks on other nodes, reach this one's gRPC face;
            empty if ranks of one version do not push to several replicas.
        open_lease: seconds after which a version that is being received is taken for abandoned if no replica renews that; each does
            at half of it. Clocks of replicas must differ by less.
        store_patience: seconds that a control call waits for the store, and of silence after which such calls fail at once
            (`weighbridge_storage.stores.guarded`).
        peer_patience: seconds without a word from another replica after which it counts as gone.
        opening_wait: seconds that a call waits for its turn to open a version.
        image_wait: seconds that a push waits for its turn and for room while all room for images is taken.
        unmap_wait: seconds that processes may take to unmap memory that they were asked to, with a rank waiting; they do it in milliseconds.
        max_receiving: versions of all models together that may be received at one time.
        drain_seconds: how long shutting down waits for pushes and publications that are under way.
        collect_every: seconds between two collections of what need not be kept, on average; 0 for none.
        grace_seconds: how long a version can still be read after it was taken out of history; the same for all replicas.
        report_every: seconds between two reports of an agent of whose engine nothing changes; after three times as long without one the engine is
            stale, after twelve times as long it is gone.
        http_hosts: names by which the HTTP face may be asked, besides addresses, this machine's own name, and names that no public DNS server
            answers for; ``*`` for any.
        policy: file that says who may do what (`weighbridge_service.access.policy`); None if whoever reaches the service may do everything.
        policy_look: seconds between two looks at whether that file has changed.
        standing_look: seconds between two questions whether what let a long call in counts still.
        count_rest: how many times as long as it took to count what a namespace holds it is not counted again.
        otlp: OTLP address of a collector to which traces are sent; empty for what OpenTelemetry's own variables say.
        audit: file to which is appended who did what (`weighbridge_service.access.audit`); None for none.
        tls: certificate of both faces; None to answer without TLS.
        insecure: whether to answer without TLS at addresses that other machines reach.
        sha256: whether SHA-256 of each file is made when a version is pushed, so that nothing is read again when it is signed
            (docs/signing.md).
        most_streams: most pushes, pulls and restores over gRPC at one time, each of which takes a thread; what replicas read from each other
            may be as many again.
        kept_models: models that the process remembers; of others the store is asked. Those that it receives versions of come on top.
        kept_shards: shards of the layouts that ranks have declared lately that are remembered of each model, so that ranks need not send them
            again. Those of a version that is being received are known until it is planned.
        kept_images: images of durable versions that are kept so that they can be read in memory. Each takes whole pages, two descriptors and
            a mapping, and with it stays the push's session.
        kept_pushes: ended pushes of all models together that are remembered, so that whoever pushed learns what became of them.
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
        """The grace time. Raises InvalidArgument if it cannot be one."""
        return Grace(round(self.grace_seconds * 1000))

    @property
    def scratch_folder(self) -> Path:
        """Where what may be lost goes."""
        return self.scratch or (_DEFAULT_SCRATCH if is_remote(self.store) else Path(self.store))

    @property
    def exports_folder(self) -> Path:
        """Where exports go."""
        return self.exports or self.scratch_folder / "exports"

    @property
    def store_shown(self) -> str:
        """The store for people: without options, and a folder from the root on."""
        return shown(self.store)
