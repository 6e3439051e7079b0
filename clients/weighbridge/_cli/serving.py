"""Commands that run the service: serve, demo."""

from __future__ import annotations

from pathlib import Path

import click

from weighbridge._cli.parsing import StoreLocation, WholeNumber, size, size_or
from weighbridge._cli.running import Command
from weighbridge._core.text.extras import needs_extra


@click.command("serve", cls=Command)
@click.option(
    "--store",
    type=StoreLocation(),
    default="./weighbridge-data",
    show_default=True,
    help="Where the versions are stored: a folder, or "
    "s3://BUCKET/PREFIX?endpoint=URL&region=REGION&addressing=path|virtual&public_endpoint=URL, all "
    "options optional, with credentials from the environment as boto3 finds them (AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, ...).",
)
@click.option(
    "--grpc",
    default="127.0.0.1:50051",
    show_default=True,
    metavar="HOST:PORT",
    help="gRPC address, for trainers and engines.",
)
@click.option(
    "--http",
    default="127.0.0.1:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="HTTP address, for people and programs.",
)
@click.option(
    "--memory-budget",
    metavar="SIZE|auto",
    callback=size_or(auto=None),
    default="auto",
    show_default=True,
    help="Limit of shared memory for versions: the live one, and those being pushed. auto: what the "
    "container has left, or half of what the machine has left. What does not fit goes to files in the "
    "scratch folder.",
)
@click.option(
    "--spill-budget",
    metavar="SIZE|auto|off",
    callback=size_or(auto=None, off=0),
    default="auto",
    show_default=True,
    help="Limit of disk space in the scratch folder for versions that do not fit into memory. auto: all "
    "that is free. off: pushes wait for memory instead.",
)
@click.option(
    "--byte-budget",
    metavar="SIZE",
    callback=size,
    default="256MiB",
    show_default=True,
    help="Limit of memory for weights in transit through gRPC; streams wait for room in it.",
)
@click.option(
    "--read-cache",
    metavar="SIZE",
    callback=size,
    default="16GiB",
    show_default=True,
    help=(
        "Limit of disk space in the scratch folder for the cache of what pulls read from S3; not "
        "used if the store is a folder."
    ),
)
@click.option(
    "--bulk-port",
    metavar="PORT|auto|off",
    default="auto",
    show_default=True,
    help="Port for streams of weights over gRPC, which clients learn from the service. auto: the one "
    "after that of --grpc, or any if that is taken; off: they share the port of --grpc, and take more "
    "processor time.",
)
@click.option(
    "--local-socket",
    metavar="PATH|auto|off",
    default="auto",
    show_default=True,
    help="Unix socket for trainers and engines of this machine, which then share memory with the "
    "service. auto: in a folder of this user; to share memory with other containers, name a path in a "
    "folder that they mount too.",
)
@click.option(
    "--lane-trust-uid",
    "lane_trust_uids",
    multiple=True,
    type=WholeNumber(min=0),
    metavar="UID",
    help="A user, besides the service's own, whose trainers write weights to the service's memory "
    "themselves; can be given several times. "
    "Others push over gRPC. These users could change that memory later: name only those whom "
    "you would let run as the service's user.",
)
@click.option(
    "--receive-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up a version when none of its ranks has been active for this long.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a shutdown waits for pushes and publications in progress.",
)
@click.option(
    "--advertise",
    metavar="HOST:PORT",
    help="Where other replicas over the same store, and trainer ranks on other nodes, reach this one's "
    "gRPC endpoint (PORT may be 0 for that of --grpc). Set it if trainer ranks push one version to "
    "several replicas, each to the one on its own node.",
)
@click.option(
    "--collect-every",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How often versions that need not be kept are deleted; 0 leaves that to other services.",
)
@click.option(
    "--report-every",
    type=click.FloatRange(min=0.1, max=3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help=(
        "How often agents report what their engines serve. An engine is stale after three missing "
        "reports, and gone after twelve."
    ),
)
@click.option(
    "--grace",
    "grace_seconds",
    type=click.FloatRange(min=1, max=10**9),
    default=900.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a deleted version can still be read; the same for all services over one store, "
    "whose clocks must differ "
    "by less than a quarter of it.",
)
@click.option(
    "--scratch",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for data that may be lost: weights in transit that do not fit into memory, the read "
    "cache.  [default: the store's folder; for S3 ./weighbridge-data]",
)
@click.option(
    "--exports",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for exports that are requested over HTTP.  [default: exports in the scratch folder]",
)
@click.option(
    "--redirect-downloads",
    is_flag=True,
    help="Redirect Hugging Face's clients to S3 for large files, by URLs that are valid for an hour.",
)
@click.option(
    "--http-host",
    "http_hosts",
    multiple=True,
    metavar="NAME",
    help="A host name that HTTP requests may use for this service; can be given several times, * for "
    "any. Addresses, names without a dot, and those that end in .local, .internal, .svc or "
    ".cluster.local are allowed in any case.",
)
@click.option(
    "--tls-cert",
    type=click.Path(dir_okay=False, path_type=Path),
    help=(
        "The service's certificate and any intermediate certificates (PEM): all ports speak TLS. "
        "Renewed files are read while the service runs."
    ),
)
@click.option("--tls-key", type=click.Path(dir_okay=False, path_type=Path), help="Its private key (PEM).")
@click.option(
    "--client-ca",
    type=click.Path(dir_okay=False, path_type=Path),
    help=(
        "Authorities that issue clients' certificates (PEM). gRPC clients must present one; HTTP "
        "requests, except probes, need one or a token."
    ),
)
@click.option(
    "--policy",
    type=click.Path(dir_okay=False, path_type=Path),
    help=(
        "Who may do what (TOML; docs/access.md). Read again when it changes.  [default: every "
        "client that reaches the service may do everything]"
    ),
)
@click.option(
    "--audit",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to which the service appends who did what to which model, and who was refused, as lines of JSON.",
)
@click.option(
    "--otlp",
    default="",
    metavar="URL",
    help=(
        "Collector to which traces are sent, as http://127.0.0.1:4317 (docs/traces.md).  "
        "[default: OTEL_EXPORTER_OTLP_ENDPOINT, or else none]"
    ),
)
@click.option(
    "--sha256",
    is_flag=True,
    help="Also compute SHA-256 of files as they are pushed, so that signing a version reads nothing "
    "again; takes three times the processor time of the other digests.",
)
@click.option("--insecure", is_flag=True, help="Answer without TLS at addresses that other machines can reach.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
@click.pass_context
def serve_command(
    ctx: click.Context,
    store: Path | str,
    grpc: str,
    http: str,
    memory_budget: int | None,
    spill_budget: int | None,
    byte_budget: int,
    read_cache: int,
    bulk_port: str,
    local_socket: str,
    lane_trust_uids: tuple[int, ...],
    receive_timeout: float,
    drain_seconds: float,
    advertise: str | None,
    collect_every: float,
    report_every: float,
    grace_seconds: float,
    scratch: Path | None,
    exports: Path | None,
    redirect_downloads: bool,
    http_hosts: tuple[str, ...],
    tls_cert: Path | None,
    tls_key: Path | None,
    client_ca: Path | None,
    policy: Path | None,
    audit: Path | None,
    otlp: str,
    sha256: bool,
    insecure: bool,
    log_level: str,
) -> None:
    """Run the service."""
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key must be given together")
    if client_ca is not None and tls_cert is None:
        raise click.UsageError("--client-ca needs --tls-cert and --tls-key")
    with needs_extra("service"):
        from weighbridge_service.runtime.config import ServiceConfig
        from weighbridge_service.runtime.tls_files import TlsFiles
        from weighbridge_service.server import run

    config = ServiceConfig(
        store=store,
        scratch=scratch,
        exports=exports,
        memory_budget=memory_budget,
        spill_budget=spill_budget,
        byte_budget=byte_budget,
        read_cache=read_cache,
        bulk_port=bulk_port,
        local_socket=local_socket,
        lane_trust_uids=lane_trust_uids,
        receive_timeout=receive_timeout,
        drain_seconds=drain_seconds,
        advertise=advertise or "",
        collect_every=collect_every,
        report_every=report_every,
        grace_seconds=grace_seconds,
        redirect_downloads=redirect_downloads,
        http_hosts=http_hosts,
        policy=policy,
        audit=audit,
        otlp=otlp,
        tls=TlsFiles(tls_cert, tls_key, client_ca) if tls_cert and tls_key else None,
        insecure=insecure,
        sha256=sha256,
    )
    ctx.exit(run(config, grpc, http, log_level))


@click.command("demo", cls=Command)
@click.option(
    "--dir",
    "work_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for all data.  [default: a temporary folder]",
)
@click.option(
    "--store",
    metavar="FOLDER|s3://...",
    help="Where the service stores versions.  [default: a folder in --dir]",
)
@click.option("--steps", type=WholeNumber(min=1), default=3, show_default=True, help="Training steps.")
@click.option(
    "--vllm",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PYTHON",
    help="Let real vLLM servers follow the trainer: the Python of vLLM's environment.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Keep the service running at the end, until Ctrl-C, so that you can inspect it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def demo_command(
    ctx: click.Context,
    work_dir: Path | None,
    store: str | None,
    steps: int,
    vllm: Path | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Train, push, pull and generate, on this machine.

    Ends by itself, with all that it has started. With --keep it prints the addresses of its service, and ends at
    Ctrl-C.
    """
    with needs_extra("demo"):
        from weighbridge_demo.run import run_demo

    ctx.exit(run_demo(work_dir, steps, as_json, store, vllm, keep))
