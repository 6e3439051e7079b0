"""Command that checks a service or a machine: doctor."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from weighbridge._cli.output import print_json
from weighbridge._cli.parsing import size_or
from weighbridge._cli.running import Command
from weighbridge._core.checks import Check, CheckStatus
from weighbridge._transport.addresses import SERVER_VARIABLE
from weighbridge.errors import InvalidArgument, PermissionDenied, Unavailable

_HTTP_PORT = 8080
_DEFAULT_HTTP = f"127.0.0.1:{_HTTP_PORT}"
_SECONDS = 60.0
"""How long a service may take: it looks at each model."""


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
    ctx: click.Context, named: str | None, memory_budget: int | None, scratch: Path, as_json: bool
) -> None:
    """Say whether the service has the memory and disk it needs.

    Asks a running service: what limits its memory, who holds it, and what a push of each model needs. Without one, says what this
    machine allows one. The exit code is 1 if a check fails.
    """
    server = os.environ.get(SERVER_VARIABLE, "")
    addresses = [named] if named else _guessed(server)
    for address in addresses:
        try:
            checks = _ask(address)
            break
        except Unavailable as error:
            problem = error
    else:
        absent = _absent(named, server, addresses, problem)
        checks = [absent, *_examine_machine(memory_budget, scratch)]
    if as_json:
        print_json({"checks": [check.to_json() for check in checks]})
    else:
        _print(checks)
    ctx.exit(1 if any(check.status is CheckStatus.FAIL for check in checks) else 0)


def _guessed(server: str) -> list[str]:
    """Where the HTTP face of a service may be whose gRPC addresses these are: at the default port of the same hosts."""
    hosts = [each.strip().rpartition(":")[0] for each in server.split(",")]
    return list(dict.fromkeys(f"{host}:{_HTTP_PORT}" for host in hosts if host)) or [_DEFAULT_HTTP]


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


def _ask(address: str) -> list[Check]:
    """What a service finds.

    Raises:
        InvalidArgument: that is no address.
        Unavailable: none answers there, or what answers is none.
    """
    from weighbridge._transport.credentials import Credentials

    credentials = Credentials.from_environment()
    url = address if "://" in address else f"{'http' if credentials.ca is None else 'https'}://{address}"
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument(f"{address[:80]!r} is no HTTP address", fix="write it like 127.0.0.1:8080")
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/checks")  # noqa: S310  # checked above
    url = request.full_url
    if credentials.has_token:
        if url.startswith("http://"):
            credentials.check_address(request.host)
        request.add_header(*credentials.bearer())
    tls = credentials.for_https() if url.startswith("https://") else None
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS, context=tls) as response:  # noqa: S310  # likewise
            found: Any = json.load(response)
        checks = [
            Check(each["name"], CheckStatus(each["status"]), each["what"], each["fix"])
            for each in found["checks"]
        ]
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise PermissionDenied(
                f"{url} answers {error.code}: it does not let you look",
                fix="show a token that has the scope observe, in WEIGHBRIDGE_TOKEN",
            ) from error
        raise Unavailable(
            f"{url} answers {error.code} {error.reason}", fix="is it a service of this release?"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(
            f"{url} cannot be reached: {reason}", fix="is the service running, and is this its --http?"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"{url} does not answer as a service does", fix="is this its --http?") from error
    return [Check("service", CheckStatus.OK, f"one answers at {address}"), *checks]


def _examine_machine(memory_budget: int | None, scratch: Path) -> list[Check]:
    from weighbridge_service.health.doctor import examine_machine
    from weighbridge_service.runtime.config import ServiceConfig

    return examine_machine(ServiceConfig(scratch, scratch=scratch, memory_budget=memory_budget))


def _print(checks: Sequence[Check]) -> None:
    wide = max(len(check.name) for check in checks)
    for check in checks:
        click.echo(f"{check.status.value:<6}{check.name:<{wide}}  {check.what}")
        if check.fix:
            click.echo(f"{'':<6}{'':<{wide}}  what to do: {check.fix}")
