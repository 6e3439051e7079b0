"""Command that moves tags, or asks for it: tag."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from weighbridge._cli.output import print_json, say
from weighbridge._cli.parsing import model_perhaps_at_version
from weighbridge._cli.running import Command, client_of, client_options
from weighbridge._cli.showing import completing
from weighbridge._core.references import Reference
from weighbridge._core.resources import (
    REQUEST_DELETE,
    REQUEST_MOVE,
    REQUEST_UNPROTECT,
    RefRequest,
)
from weighbridge.errors import FailedPrecondition

if TYPE_CHECKING:
    from weighbridge._clients.client import Client


@click.command("tag", cls=Command)
@completing.reference("MODEL@VERSION", model_perhaps_at_version)
@click.argument("name", shell_complete=completing.refs)
@click.option("--delete", is_flag=True, help="Delete the tag; @VERSION may be left out.")
@click.option("--withdraw", is_flag=True, help="Withdraw the request for the tag; @VERSION may be left out.")
@click.option("--note", default="", help="Note that is stored with the request.")
@client_options
def tag_command(
    reference: Reference, name: str, delete: bool, withdraw: bool, note: str, server: str, as_json: bool
) -> None:
    """Set the tag NAME to a version, or delete the tag.

    If the tag is protected, and changes of it take approvals, this asks for it, and says how another identity approves
    it: the tag stays as it is until then. With --json, `state` is `done` or `pending`.
    """
    model, version = reference.model, reference.version
    if delete and withdraw:
        raise click.UsageError("--delete makes a request, and --withdraw withdraws one: use one of them")
    if not version and not delete and not withdraw:
        raise click.UsageError(f"{model!r} names no version: write {model}@latest, or a number or another ref")
    with client_of(server) as client:
        if withdraw:
            found = client.withdraw_ref(model, name, named_request(client, reference, name).request_id)
        elif delete:
            if version:
                _check_names(client, model, name, version)
            found = client.request_ref_deletion(model, name, note=note)
        else:
            found = client.request_ref(model, name, version, note=note)
    if as_json:
        number = found.version if found.done and found.version else None
        print_json({"model": model, "ref": name, "number": number, "state": found.state, "request": found})
    elif withdraw:
        say(f"{model}: {found.text} is withdrawn")
    else:
        say(*outcome_lines(found))


def named_request(client: Client, reference: Reference, ref: str, request_id: str | None = None) -> RefRequest:
    """The request of this name; without a name, the pending request for a ref.

    Raises:
        FailedPrecondition: there is no such request, or ``reference`` names a version and the request is not to set the
            ref to that one.
    """
    model = reference.model
    found = next(
        (
            each
            for each in client.ref_requests(model)
            if each.ref == ref and (each.pending if request_id is None else each.request_id == request_id)
        ),
        None,
    )
    if found is None:
        what = "there is no pending request" if request_id is None else f"there is no request {request_id}"
        raise FailedPrecondition(
            f"{what} for the ref {ref} of {model}", fix=f"list its requests: weighbridge show {model}"
        )
    if reference.version:
        number = client.version(model, reference.version).number
        if (found.action, found.version) != (REQUEST_MOVE, number):
            raise FailedPrecondition(
                f"{found.by} has requested {found.text} of {model}, not for {ref} to name version {number}",
                fix=f"to approve that: {approval_command(found)}",
            )
    return found


def outcome_lines(request: RefRequest) -> list[str]:
    """Lines on the outcome of a request, and on the next step."""
    model, ref = request.model, request.ref
    if request.pending:
        others = "another identity" if request.missing == 1 else f"{request.missing} other identities"
        asked = f"{model}: asked for {request.text}; it needs the approval of {others}:"
        return [asked, f"  {approval_command(request)}"]
    if not request.done:
        return [f"{model}: {request.text} was {request.state}"]
    done = {REQUEST_DELETE: f"{ref} was deleted", REQUEST_UNPROTECT: f"{ref} is no longer protected"}
    return [f"{model}: {done.get(request.action, f'{ref} names version {request.version}')}"]


def approval_command(request: RefRequest) -> str:
    """The command that approves a request, and no other one that is asked for later."""
    version = f"@{request.version}" if request.action == REQUEST_MOVE else ""
    return f"weighbridge approve {request.model}{version} {request.ref} --request {request.request_id}"


def _check_names(client: Client, model: str, name: str, version: str) -> None:
    """Refuse to take a tag away that names another version than the caller thinks."""
    named, meant = client.refs(model).get(name), client.version(model, version).number
    if named is not None and named != meant:
        raise FailedPrecondition(
            f"the tag {name} of {model} names version {named}, not {meant}",
            fix=f"leave out @{version} to delete it whatever it names",
        )
