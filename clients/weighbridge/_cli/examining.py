"""Command that checks a service, a store and a machine: doctor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weighbridge._cli.doctor import asking
from weighbridge._cli.output import print_json, print_table
from weighbridge._cli.parsing import StoreLocation, size_or
from weighbridge._cli.running import Command
from weighbridge._core.checks import Check, CheckStatus
from weighbridge._transport.addresses import DEFAULT_SERVER, SERVER_VARIABLE
from weighbridge.errors import FailedPrecondition, Unavailable, WeighbridgeError

if TYPE_CHECKING:
    from weighbridge._transport.credentials import Credentials

_SECONDS = 60.0
"""Timeout of a service's answer: the service examines each model."""
_GRACE_SECONDS = 900.0
"""Default of `serve --grace`."""


@click.command("doctor", cls=Command)
@click.option(
    "--http",
    "named",
    envvar="WEIGHBRIDGE_HTTP",
    show_envvar=True,
    metavar="HOST:PORT",
    help="The service's HTTP address.  [default: what the service at --server reports]",
)
@click.option(
    "--server",
    envvar=SERVER_VARIABLE,
    show_envvar=True,
    metavar="HOST:PORT[,...]",
    help=(
        f"The service's gRPC address, or those of its replicas.  [default: {DEFAULT_SERVER}, if a service answers here]"
    ),
)
@click.option(
    "--store",
    type=StoreLocation(exists=True),
    metavar="LOCATION",
    help=(
        "Also check this store, named as for serve: whether it honors conditional writes, and its "
        "clock. Writes small objects, and removes them again."
    ),
)
@click.option(
    "--memory-budget",
    metavar="SIZE|auto",
    callback=size_or(auto=None),
    default="auto",
    show_default=True,
    help="Without a service: the memory budget with which one would be started.",
)
@click.option(
    "--scratch",
    type=click.Path(file_okay=False, path_type=Path),
    default="./weighbridge-data",
    show_default=True,
    help="Without a service: its scratch folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, also for errors.")
@click.pass_context
def doctor_command(
    ctx: click.Context,
    named: str | None,
    server: str | None,
    store: Path | str | None,
    memory_budget: int | None,
    scratch: Path,
    as_json: bool,
) -> None:
    """Find what is wrong with a service or a machine, and what to do.

    Asks a running service: its store, what limits its memory, who holds it, and what a push of each model needs.
    Without one, says what this machine allows one. Then, from here: ports, certificates, clocks, the local lane, shared
    memory, huge pages, and releases of other packages. The exit code is 1 if a check fails.
    """
    checks = [
        *_of_service(named, server or "", memory_budget, scratch),
        *(_of_store(store) if store is not None else ()),
        *_of_machine(),
    ]
    if as_json:
        print_json({"checks": checks})
    else:
        _print(checks)
    ctx.exit(1 if any(check.status is CheckStatus.FAIL for check in checks) else 0)


def _of_service(named: str | None, server: str, memory_budget: int | None, scratch: Path) -> Iterator[Check]:
    """Checks that a service reports about itself, or, without a service, those of this machine; then those of the
    connections to it.
    """
    from weighbridge._transport.addresses import Addresses
    from weighbridge._transport.credentials import Credentials

    credentials = Credentials.from_environment()
    servers = Addresses.of(server).all if server or not named else ()
    answered = ""
    try:
        http = named or _told_address(servers, credentials)
        asked = time.time()
        answer = asking.ask(http, "/v1/checks", _SECONDS, credentials)
        answered = answer.url
        yield Check.ok("service", f"one answers at {http}")
        yield from _found(answer)
        if answer.said_s is not None:
            from weighbridge._cli.doctor.checks import check_skew

            yield check_skew(asked, time.time(), answer.said_s)
    except Unavailable as error:
        yield _absent(error, wanted=bool(named or server))
        yield from _examine_machine(memory_budget, scratch)
        if not server:
            return
    except WeighbridgeError as error:
        status = CheckStatus.WARN if isinstance(error, FailedPrecondition) else CheckStatus.FAIL
        yield Check("service", status, error.message, error.fix)
    yield from _of_connections(servers, answered, credentials)


def _told_address(servers: Sequence[str], credentials: Credentials) -> str:
    """HTTP address that the first service to answer reports.

    Raises WeighbridgeError if none answers, or one refuses.
    """
    for server in servers[:-1]:
        with contextlib.suppress(Unavailable):
            return asking.told_address(server, credentials)
    return asking.told_address(servers[-1], credentials)


def _found(answer: asking.HttpResponse) -> list[Check]:
    """The checks in an answer. Raises Unavailable if it contains something else."""
    try:
        found: Any = answer.value["checks"]
        return [Check(each["name"], CheckStatus(each["status"]), each["what"], each["fix"]) for each in found]
    except (ValueError, KeyError, TypeError) as error:
        raise asking.no_service(answer.url) from error


def _absent(error: Unavailable, *, wanted: bool) -> Check:
    """Check for a service that has not answered: it fails only if the user named one."""
    if wanted:
        return Check.fail("service", error.message, error.fix)
    return Check.ok("service", f"{error.message}: the other checks show what this machine allows a service")


def _examine_machine(memory_budget: int | None, scratch: Path) -> list[Check]:
    from weighbridge_service.health.doctor import examine_machine
    from weighbridge_service.runtime.config import ServiceConfig

    return examine_machine(ServiceConfig(scratch, scratch=scratch, memory_budget=memory_budget))


def _of_connections(servers: Sequence[str], http: str, credentials: Credentials) -> Iterator[Check]:
    """Checks of a service's gRPC addresses, and of the certificates at these and at its HTTP address."""
    from weighbridge._cli.doctor import checks, readings

    secured = [asking.address_of(http)] if http.startswith("https://") else []
    for address in servers:
        port = readings.read_port(address, "gRPC")
        yield checks.check_port(port)
        if port.error:
            continue
        if credentials.ca is not None:
            secured.append(address)
        bulk = readings.read_bulk_port(address, credentials)
        if bulk is not None:
            yield checks.check_port(bulk)
        try:
            yield checks.check_lane(readings.read_lane(address, credentials))
        except WeighbridgeError as error:
            yield Check.warn("local lane", error.message, error.fix)
    for address in secured:
        yield checks.check_certificate(readings.read_certificate(address, credentials), time.time())


def _of_store(location: Path | str) -> list[Check]:
    from weighbridge_service.health.doctor import examine_store

    return examine_store(location, _GRACE_SECONDS)


def _of_machine() -> Iterator[Check]:
    """Checks of this machine: its shared memory, and the packages of this environment."""
    from weighbridge._cli.doctor import checks, readings, releases

    memory = readings.read_shared_memory()
    yield checks.check_shared_memory(memory)
    yield checks.check_huge_pages(memory)
    found = (releases.check_release(*each) for each in readings.read_releases())
    yield from (check for check in found if check is not None)


def _print(checks: Iterable[Check]) -> None:
    rows = [
        (
            check.status.value,
            check.name,
            f"{check.what}\nwhat to do: {check.fix}" if check.fix else check.what,
        )
        for check in checks
    ]
    print_table(("", "CHECK", "FOUND"), rows)
