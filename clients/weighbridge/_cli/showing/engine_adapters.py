"""Command that loads adapters into a running engine, unloads them, and lists them: adapters."""

from __future__ import annotations

from pathlib import Path

import click

from weighbridge._cli.output import print_result
from weighbridge._cli.parsing import checked_url, model_perhaps_at_version
from weighbridge._cli.running import Command, client_options, engine_key_option, engine_of
from weighbridge._cli.showing import completing
from weighbridge._core.references import Reference
from weighbridge._core.text.sizes import readable_size
from weighbridge.errors import InvalidArgument


@click.command("adapters", cls=Command)
@completing.reference("ADAPTER[@VERSION]", model_perhaps_at_version)
@click.option(
    "--url",
    default="http://127.0.0.1:30000",
    show_default=True,
    help="The HTTP address of the vLLM or SGLang server.",
)
@engine_key_option
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help=(
        "Export the adapter to this folder, which the engine sees by the same path (SGLang). "
        "Without it the tensors go with the request."
    ),
)
@click.option("--unload", is_flag=True, help="Unload this version instead.")
@client_options
def adapters_command(
    reference: Reference,
    url: str,
    engine_key: str,
    folder: Path | None,
    unload: bool,
    server: str,
    as_json: bool,
) -> None:
    """Load a version of an adapter into a running vLLM or SGLang server.

    Requests to an SGLang name it by its number, as in acme/alice@18, also if VERSION is a ref, which is resolved once:
    without VERSION the latest. A vLLM with weighbridge's middleware loads what requests name by itself; this spares the
    first of them the wait. The engine must serve the base version that the adapter names, and be able to serve the
    adapter: otherwise nothing is loaded, and the error says why.
    """
    from weighbridge._cli.showing.proving import engine_at

    url = checked_url(url)
    with engine_of(server) as client:
        version = client.version(reference.model, reference.version or None)
        if version.base is None:
            raise InvalidArgument(
                f"{version.model}@{version.number} is not an adapter",
                fix="weighbridge follow serves whole models",
            )
        engine = engine_at(url, version.base.model, server, engine_key)
        if unload:
            engine.unload_adapter(version.model, version.number)
            name = f"{version.model}@{version.number}"
            print_result({"name": name, "unloaded": True}, as_json, f"{url} no longer has {name}")
            return
        found = engine.load_adapter(client, version.model, version.number, folder)
    how = f", {readable_size(found.nbytes)} by {found.way}" if found.way else ", which was there already"
    print_result(found, as_json, f"{url} serves {found.name} on {found.base}{how}")
