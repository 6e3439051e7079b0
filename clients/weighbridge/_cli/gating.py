"""Commands that hold versions and release them: gate, approve."""

from __future__ import annotations

import getpass
import socket
from typing import TYPE_CHECKING

import click

from weighbridge._cli.output import print_json
from weighbridge._cli.parsing import model_at_number
from weighbridge._cli.running import RETRY_SECONDS, Command, client_options
from weighbridge._core.references import Reference
from weighbridge._core.resources import REF_LATEST, REF_LIVE, Gate
from weighbridge.errors import FailedPrecondition

if TYPE_CHECKING:
    from weighbridge._clients.client import Client

_REQUIRED, _NONE = "required", "none"
_HOLD, _ALLOW = "hold", "allow"
_NAMED = 10
"""How many versions are named that are held."""


def _connect(server: str) -> Client:
    from weighbridge._clients.client import Client

    return Client(server, retry_seconds=RETRY_SECONDS)


@click.command("gate", cls=Command)
@click.argument("model")
@click.option(
    "--approval",
    type=click.Choice([_REQUIRED, _NONE]),
    help="Whether each version is a candidate, which is held until it is approved.",
)
@click.option(
    "--nonfinite",
    type=click.Choice([_HOLD, _ALLOW]),
    help="Whether versions are held of which elements are NaN or infinite.",
)
@client_options
def gate_command(model: str, approval: str | None, nonfinite: str | None, server: str, as_json: bool) -> None:
    """Show or say which versions of a model are held.

    live and latest pass by a version that is held, until it is approved. What is said goes for versions that are pushed from then
    on; what is left out stays as it is. Without any option the gate is shown.
    """
    with _connect(server) as client:
        gate = client.gate(model)
        asked = Gate(
            approval_required=gate.approval_required if approval is None else approval == _REQUIRED,
            allow_nonfinite=gate.allow_nonfinite if nonfinite is None else nonfinite == _ALLOW,
        )
        if asked != gate:
            gate = client.set_gate(model, asked)
    if as_json:
        print_json({"model": model, **gate.to_json()})
    else:
        held = [
            *(["every version, as a candidate"] if gate.approval_required else []),
            *([] if gate.allow_nonfinite else ["versions with NaN or infinite elements"]),
        ]
        click.echo(f"{model}: holds {' and '.join(held) or 'what is pushed as a candidate'}")


@click.command("approve", cls=Command)
@click.argument("reference", callback=model_at_number, metavar="MODEL@NUMBER")
@click.option("--note", default="", help="Kept with the approval.")
@click.option("--by", help="Who approves it.  [default: USER@HOST of this process]")
@client_options
def approve_command(reference: Reference, note: str, by: str | None, server: str, as_json: bool) -> None:
    """Hold a version no longer.

    live and latest then name it, unless they name a newer one; they pass by what is held, so it is named by its number, or by a tag.
    """
    model = reference.model
    with _connect(server) as client:
        before = client.version(model, reference.version)
        if reference.version in (REF_LATEST, REF_LIVE) and not before.held:
            held = [each.number for each in client.versions(model, include_invisible=True) if each.held]
            raise FailedPrecondition(
                f"{reference.version} of {model} names version {before.number}, which is not held",
                fix=f"approve one that is: {', '.join(f'{model}@{number}' for number in held[:_NAMED])}"
                if held
                else "no version is held, so there is nothing to approve",
            )
        version = client.approve(model, before.number, note=note, by=_caller() if by is None else by)
        refs = client.refs(model)
    if as_json:
        print_json(version.to_json())
        return
    names = sorted(ref for ref, named in refs.items() if named == version.number)
    if before.held:
        click.echo(f"{version}: approved ({', '.join(before.held)}); named by {', '.join(names) or 'no ref'}")
    else:
        click.echo(f"{version}: is not held, so there is nothing to approve")


def _caller() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # containers run under numbers that have no name
        return ""
    return f"{user}@{socket.gethostname()}"
