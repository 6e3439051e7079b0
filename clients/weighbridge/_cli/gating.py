"""Commands that hold versions, protect refs, and approve versions and changes of refs: gate, approve."""

from __future__ import annotations

import getpass
import socket

import click

from weighbridge._cli.output import print_result
from weighbridge._cli.parsing import model_at_number, model_perhaps_at_version
from weighbridge._cli.running import Command, client_of, client_options
from weighbridge._cli.showing import completing
from weighbridge._cli.tagging import (
    approval_command,
    named_request,
    outcome_lines,
)
from weighbridge._core.references import Reference
from weighbridge._core.resources import REF_LATEST, REF_LIVE, Gate, refs_of
from weighbridge.errors import FailedPrecondition

_REQUIRED, _NONE = "required", "none"
_HOLD, _ALLOW = "hold", "allow"
_MOST_APPROVALS = 16
_NAMED = 10
"""Maximum number of held versions that are listed."""


@click.command("gate", cls=Command)
@click.argument("model", shell_complete=completing.models)
@click.option(
    "--approval",
    type=click.Choice([_REQUIRED, _NONE]),
    help="Whether to hold each version, as a candidate, until it is approved.",
)
@click.option(
    "--nonfinite",
    type=click.Choice([_HOLD, _ALLOW]),
    help="Whether to hold versions that have NaN or infinite elements.",
)
@click.option("--protect", metavar="REF", help="Protect a ref, whether it exists or not.")
@click.option(
    "--approvals",
    type=click.IntRange(0, _MOST_APPROVALS),
    help="With --protect: how many other identities must approve its changes.  [default: 0]",
)
@click.option(
    "--unprotect",
    metavar="REF",
    help="Remove the protection of a ref; this needs the same scope and approvals as moving the ref.",
)
@client_options
def gate_command(
    model: str,
    approval: str | None,
    nonfinite: str | None,
    protect: str | None,
    approvals: int | None,
    unprotect: str | None,
    server: str,
    as_json: bool,
) -> None:
    """Show or set which versions are held and which refs protected.

    live and latest pass by a version that is held, until it is approved. What is said goes for versions that are pushed
    from then on; what is left out stays as it is. A protected ref is changed by those alone of whose scopes one names
    it. Without any option the gate is shown.
    """
    if approvals is not None and protect is None:
        raise click.UsageError("--approvals needs --protect REF")
    with client_of(server) as client:
        if protect is not None:
            client.protect_ref(model, protect, approvals=approvals or 0)
        request = None if unprotect is None else client.unprotect_ref(model, unprotect)
        gate = client.gate(model)
        asked = Gate(
            approval_required=gate.approval_required if approval is None else approval == _REQUIRED,
            allow_nonfinite=gate.allow_nonfinite if nonfinite is None else nonfinite == _ALLOW,
        )
        if asked != gate:
            gate = client.set_gate(model, asked)
        protections = client.protections(model)
    shown = {"model": model, **gate.to_json(), "protections": protections}
    print_result(
        shown if request is None else {**shown, "request": request},
        as_json,
        f"{model}: holds {gate.text}",
        *(f"{model}: protects {protection.text}" for protection in protections),
        *(() if request is None else outcome_lines(request)),
    )


@click.command("approve", cls=Command)
@completing.reference("MODEL[@NUMBER]", model_perhaps_at_version, completing.numbers)
@click.argument("ref", required=False, shell_complete=completing.refs)
@click.option("--note", default="", help="Note that is stored with the approval.")
@click.option("--by", help="Who approves a version.  [default: USER@HOST of this process]")
@click.option("--request", "request_id", help="With REF: ID of the request.")
@client_options
@click.pass_context
def approve_command(
    ctx: click.Context,
    reference: Reference,
    ref: str | None,
    note: str,
    by: str | None,
    request_id: str | None,
    server: str,
    as_json: bool,
) -> None:
    """Approve a version that is held, or a change of a protected REF.

    live and latest then name the version, unless they name a newer one; they pass by what is held, so it is named by
    its number, or by a tag.

    With REF, which is protected, MODEL@NUMBER approves that it names this version, if that is what another identity has
    asked for. Other requests are named by --request.
    """
    if ref is not None:
        _approve_request(reference, ref, request_id, note, server, as_json)
        return
    if request_id is not None:
        raise click.UsageError("--request needs REF")
    if not reference.version:
        model_at_number(ctx, ctx.command.params[0], reference.model)  # reports the parser's own error
    model = reference.model
    with client_of(server) as client:
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
    names = ", ".join(refs_of(refs, version.number)) or "no ref"
    approved = f"approved ({', '.join(before.held)}); named by {names}"
    told = approved if before.held else "is not held, so there is nothing to approve"
    print_result(version, as_json, f"{version}: {told}")


def _approve_request(
    reference: Reference, ref: str, request_id: str | None, note: str, server: str, as_json: bool
) -> None:
    model = reference.model
    with client_of(server) as client:
        meant = named_request(client, reference, ref, request_id)
        if request_id is None and not reference.version:
            raise FailedPrecondition(
                f"{meant.by} has requested {meant.text} of {model}",
                fix=f"to approve it: {approval_command(meant)}",
            )
        found = client.approve_ref(model, ref, meant.request_id, note=note)
    print_result(found, as_json, *outcome_lines(found))


def _caller() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # in containers, user ids often have no name
        return ""
    return f"{user}@{socket.gethostname()}"
