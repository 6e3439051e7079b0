"""Command that checks a service, a store and a machine: doctor."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from weighbridge._cli.doctor import asking
from weighbridge._cli.output import print_json
from weighbridge._cli.parsing import StoreLocation, size_or
from weighbridge._cli.running import Command
from weighbridge._core.checks import Check, CheckStatus
from weighbridge._transport.addresses import DEFAULT_SERVER, SERVER_VARIABLE
from weighbridge.errors import Unavailable, WeighbridgeError

_SECONDS = 60.0
"""How long a service may take: it looks at each model."""
_GRACE_SECONDS = 900.0
"""`serve --grace` unless told otherwise."""


@click.command("doctor", cls=Command)
@click.option(
    "--http",
    "named",
    envvar="WEIGHBRIDGE_HTTP",
    show_envvar=True,
    metavar="HOST:PORT",
    help="The service's HTTP address.  [default: port 8080 where WEIGHBRIDGE_SERVER is, or here, if one answers there]",
)
@click.option(
    "--server",
    envvar=SERVER_VARIABLE,
    show_envvar=True,
    metavar="HOST:PORT[,...]",
    help=f"The service's gRPC address, or those of its replicas.  [default: {DEFAULT_SERVER}, if a service answers here]",
)
@click.option(
    "--store",
    type=StoreLocation(exists=True),
    metavar="LOCATION",
    help="Also this store, as for serve: whether it keeps conditional writes, and its clock. Small objects are written and removed again.",
)
@click.option(
    "--memory-budget",
    metavar="SIZE|auto",
    callback=size_or(auto=None),
    default="auto",
    show_default=True,
    help="Without a service: what one would be started with.",
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
    """Say what is wrong with a service, and with this machine.

    Asks a running service: its store, what limits its memory, who holds it, and what a push of each model needs. Without one, says what
    this machine allows one. Then, from here: ports, certificates, clocks, the local lane, shared memory, huge pages, and releases of other
    packages. The exit code is 1 if a check fails.
    """
    checks = [
        *_of_service(named, server or "", memory_budget, scratch),
        *(_of_store(store) if store is not None else ()),
        *_of_machine(),
    ]
    if as_json:
        print_json({"checks": [check.to_json() for check in checks]})
    else:
        _print(checks)
    ctx.exit(1 if any(check.status is CheckStatus.FAIL for check in checks) else 0)


def _of_service(named: str | None, server: str, memory_budget: int | None, scratch: Path) -> Iterator[Check]:
    """What a service says of itself, or what this machine allows one; and what is found of the way to it."""
    addresses = [named] if named else asking.guessed_addresses(server)
    answered = ""
    for address in addresses:
        asked = time.time()
        try:
            answer = asking.ask(address, "/v1/checks", _SECONDS)
            yield Check("service", CheckStatus.OK, f"one answers at {address}")
            yield from _found(answer)
            if answer.said_s is not None:
                from weighbridge._cli.doctor.checks import check_skew

                yield check_skew(asked, time.time(), answer.said_s)
        except Unavailable as error:
            problem = error
            continue
        answered = answer.url
        break
    if not answered:
        yield _absent(named, server, addresses, problem)
        yield from _examine_machine(memory_budget, scratch)
    here = answered and not named
    yield from _of_connections(server or (DEFAULT_SERVER if here else ""), answered)


def _found(answer: asking.Answer) -> list[Check]:
    """The checks in an answer. Raises Unavailable if these are none."""
    try:
        found: Any = answer.value["checks"]
        return [Check(each["name"], CheckStatus(each["status"]), each["what"], each["fix"]) for each in found]
    except (ValueError, KeyError, TypeError) as error:
        raise asking.no_service(answer.url) from error


def _absent(named: str | None, server: str, tried: Sequence[str], error: Unavailable) -> Check:
    """What is said where no service was asked."""
    if named:
        return Check("service", CheckStatus.FAIL, error.message, error.fix)
    what = f"none answers at {' or '.join(tried)}"
    if server:
        what += f", and {SERVER_VARIABLE} names {server}: it was not asked, and this is what this machine allows one"
        return Check(
            "service", CheckStatus.WARN, what, "name its HTTP address: --http HOST:PORT, or WEIGHBRIDGE_HTTP"
        )
    return Check("service", CheckStatus.OK, f"{what}: this is what this machine allows one")


def _examine_machine(memory_budget: int | None, scratch: Path) -> list[Check]:
    from weighbridge_service.health.doctor import examine_machine
    from weighbridge_service.runtime.config import ServiceConfig

    return examine_machine(ServiceConfig(scratch, scratch=scratch, memory_budget=memory_budget))


def _of_connections(server: str, http: str) -> Iterator[Check]:
    """What is found of the gRPC addresses of a service, and of the certificates at these and at its HTTP address."""
    from weighbridge._cli.doctor import checks, readings
    from weighbridge._transport.addresses import Addresses
    from weighbridge._transport.credentials import Credentials

    credentials = Credentials.from_environment()
    secured = [asking.address_of(http)] if http.startswith("https://") else []
    for address in Addresses.of(server).all if server else ():
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
            yield Check("local lane", CheckStatus.WARN, error.message, error.fix)
    for address in secured:
        yield checks.check_certificate(readings.read_certificate(address, credentials), time.time())


def _of_store(location: Path | str) -> list[Check]:
    from weighbridge_service.health.doctor import examine_store

    return examine_store(location, _GRACE_SECONDS)


def _of_machine() -> Iterator[Check]:
    """What is found of this machine: its shared memory, and the packages of this environment."""
    from weighbridge._cli.doctor import checks, readings, releases

    memory = readings.read_shared_memory()
    yield checks.check_shared_memory(memory)
    yield checks.check_huge_pages(memory)
    found = (releases.check_release(*each) for each in readings.read_releases())
    yield from (check for check in found if check is not None)


def _print(checks: Iterable[Check]) -> None:
    listed = list(checks)
    wide = max(len(check.name) for check in listed)
    for check in listed:
        click.echo(f"{check.status.value:<6}{check.name:<{wide}}  {check.what}")
        if check.fix:
            click.echo(f"{'':<6}{'':<{wide}}  what to do: {check.fix}")
