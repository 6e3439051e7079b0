"""The command that takes a running engine along with a ref: follow."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import click

from weighbridge.cli.output import print_json, readable_size
from weighbridge.cli.running import RETRY_SECONDS, Command, client_options
from weighbridge.resources import REF_LATEST

if TYPE_CHECKING:
    from weighbridge.follow.agent import Followed


@click.command("follow", cls=Command)
@click.argument("model")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the vLLM server.")
@click.option("--ref", default=REF_LATEST, show_default=True, help="Which ref to follow.")
@click.option(
    "--pause-mode",
    type=click.Choice(["wait", "keep", "abort"]),
    default="wait",
    show_default=True,
    help="What becomes of requests under way: wait for their ends, keep them and go on with new weights, abort them.",
)
@click.option(
    "--engine-server",
    metavar="HOST:PORT",
    help="The service's address as the engine reaches it; as --server if not given.",
)
@click.option(
    "--lane", type=click.Choice(["grpc", "local", "auto"]), help="How weights travel to the engine."
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    help="End after so many lines; with exit code 1 if the last one is a failure.",
)
@client_options
@click.pass_context
def follow_command(
    ctx: click.Context,
    model: str,
    url: str,
    ref: str,
    pause_mode: Any,
    engine_server: str | None,
    lane: str | None,
    count: int | None,
    server: str,
    as_json: bool,
) -> None:
    """Take a running vLLM server along with a ref.

    Each new version is fetched while the server answers; then it is paused, gets it, and goes on. On any failure it keeps the version
    that it has. One line a version.
    """
    from weighbridge.engine import EngineClient
    from weighbridge.follow.agent import Follower
    from weighbridge.follow.vllm import VllmServer

    engine = VllmServer(url, model, engine_server or server, lane=lane, pause_mode=pause_mode)
    with EngineClient(server, retry_seconds=RETRY_SECONDS) as client:
        done = None
        for done in itertools.islice(Follower(client, model, engine, ref).run(), count):
            if as_json:
                print_json(done.to_json(), one_line=True)
            else:
                click.echo(_line(done))
    ctx.exit(1 if done is not None and done.error else 0)


def _line(done: Followed) -> str:
    if done.error:
        serves = "no version" if done.serves is None else f"version {done.serves}"
        return f"{done.model}@{done.version}: failed, and the engine serves {serves}: {done.error}"
    if not done.nbytes:
        return f"{done.model}@{done.version}: the engine has it"
    return (
        f"{done.model}@{done.version}: {readable_size(done.nbytes)} prepared in {done.prepare_seconds:.2f} s, "
        f"engine paused for {done.pause_seconds:.2f} s"
    )
