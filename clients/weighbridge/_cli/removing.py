"""Commands that take something away: delete, abort."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from weighbridge._cli.output import print_result, say
from weighbridge._cli.parsing import model_at_number, model_perhaps_at_version
from weighbridge._cli.running import Command, client_of, client_options
from weighbridge._cli.showing import completing
from weighbridge._core.references import Reference
from weighbridge._core.text.counts import counted
from weighbridge._core.text.sizes import readable_size
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    from weighbridge._clients.client import Client


@click.command("delete", cls=Command)
@completing.reference("MODEL[@NUMBER]", model_perhaps_at_version, completing.numbers)
@click.option("--yes", is_flag=True, help="Delete a whole model without asking.")
@click.option("--force", is_flag=True, help="Delete it even if adapters are based on it.")
@client_options
def delete_command(reference: Reference, yes: bool, force: bool, server: str, as_json: bool) -> None:
    """Delete a version, or a model with all of its versions.

    A version that a ref names cannot be deleted, and what adapters are on only with --force. One that is deleted is in
    no list from then on, and its objects go after the grace time. A deleted model's name can be registered again at
    once, also with other tensors.
    """
    if reference.version:
        _delete_version(reference, force, server, as_json)
        return
    model = reference.model
    with client_of(server) as client:
        if not yes:
            _confirm(client, model, as_json)
        deleted = client.delete_model(model, force=force)
    print_result(deleted, as_json, f"{model}: deleted, with {counted(deleted.versions, 'version')}")


def _delete_version(reference: Reference, force: bool, server: str, as_json: bool) -> None:
    number = _number(reference, "what a ref names cannot be deleted")
    with client_of(server) as client:
        client.delete_version(reference.model, number, force=force)
    print_result(
        {"model": reference.model, "number": number},
        as_json,
        f"{reference.model}: version {number} is deleted",
    )


def _number(reference: Reference, why_no_ref: str) -> int:
    """The number that was typed. Raises click.UsageError if a ref was."""
    try:
        return reference.number
    except InvalidArgument as error:
        raise click.UsageError(f"{error.message}; {why_no_ref}") from error


def _confirm(client: Client, model: str, as_json: bool) -> None:
    """Ask the user to type the name again. Raises click.UsageError if there is no terminal to ask at."""
    if as_json or not _at_a_terminal():
        raise click.UsageError(f"this deletes {model} with all of its versions: confirm it with --yes")
    found, count = client.model(model), len(client.versions(model))
    say(f"{model}: {counted(count, 'version')} of {readable_size(found.tensor_bytes)} will be deleted")
    typed: str = click.prompt("Type the model's name to continue", err=True)
    if typed != model:
        raise click.Abort


def _at_a_terminal() -> bool:
    return sys.stdin.isatty()


@click.command("abort", cls=Command)
@completing.reference("MODEL@NUMBER", model_at_number, completing.numbers)
@click.option("--reason", default="aborted from the command line", show_default=True, help="Kept with it.")
@client_options
def abort_command(reference: Reference, reason: str, server: str, as_json: bool) -> None:
    """Abort a version that is being received.

    Its ranks are notified. A version that is visible but cannot be made durable can be aborted, too.
    `weighbridge versions MODEL --all` lists what is being received.
    """
    number = _number(
        reference,
        "a ref names what is visible; `weighbridge versions MODEL --all` lists what is being received",
    )
    with client_of(server) as client:
        version = client.abort(reference.model, number, reason)
    print_result(version, as_json, f"{version}: {version.error}")
