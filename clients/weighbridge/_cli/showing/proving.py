"""Command that compares the parameters of a running engine with the bytes of a version: prove."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from weighbridge._cli.output import print_result
from weighbridge._cli.parsing import checked_url, model_perhaps_at_version
from weighbridge._cli.running import Command, client_options, engine_key_option, engine_of
from weighbridge._cli.showing import completing
from weighbridge._core.references import Reference
from weighbridge._core.text.counts import counted, named
from weighbridge._core.text.durations import readable_duration
from weighbridge.errors import FailedPrecondition

if TYPE_CHECKING:
    from weighbridge.follow.evidence import RankProof
    from weighbridge.follow.proving import Proof
    from weighbridge.follow.sglang import SglangServer
    from weighbridge.follow.vllm import VllmServer

_NAMED = 10
"""Maximum number of a rank's parameters that are listed."""


@click.command("prove", cls=Command)
@completing.reference("MODEL[@VERSION]", model_perhaps_at_version)
@click.option(
    "--url",
    default="http://127.0.0.1:8000",
    show_default=True,
    help="The HTTP address of the vLLM or SGLang server.",
)
@engine_key_option
@click.option(
    "--engine-server",
    metavar="HOST:PORT",
    help="The service's address as the engine reaches it.  [default: --server]",
)
@click.option(
    "--by-loading",
    is_flag=True,
    help=(
        "Pause the engine, and let its own loader load the version again over what it has: this "
        "names what differed, and corrects it."
    ),
)
@client_options
@click.pass_context
def prove_command(
    ctx: click.Context,
    reference: Reference,
    url: str,
    engine_key: str,
    engine_server: str | None,
    by_loading: bool,
    server: str,
    as_json: bool,
) -> None:
    """Prove that an engine computes with the bytes of a version.

    The engine is a vLLM or SGLang server. Every worker of every engine behind the server makes a digest of each
    parameter where it lies, while the engine serves. This command pulls what each worker takes of the version, and
    makes the digests that the parameters must have. Without VERSION it is the version that the engine says it serves.
    What the engine repacks or quantizes after loading cannot be compared, and is named. The exit code is 1 if a
    parameter has other bytes, a worker serves another version, or no parameter can be compared; and if a worker does
    not answer, which is named.
    """
    from weighbridge._core.engines.facts import FAILED, NOT_PROVED
    from weighbridge.follow.proving import prove, prove_by_load

    model = reference.model
    url = checked_url(url)
    with engine_of(server) as client:
        client.model(model).check_whole()
        engine = engine_at(url, model, engine_server or server, engine_key)
        engine.connect()
        number = client.version(model, reference.version).number if reference.version else engine.serving().version
        if number is None:
            raise FailedPrecondition(
                f"the engine does not report which version of {model} it serves",
                fix=f"name one: {model}@NUMBER",
            )
        proof = prove_by_load(engine, model, number) if by_loading else prove(client, engine.evidence, model, number)
    print_result(proof, as_json, *_lines(proof))
    ctx.exit(proof.verdict in (FAILED, NOT_PROVED))


def engine_at(url: str, model: str, server: str, key: str) -> VllmServer | SglangServer:
    """Driver of the server at an address, whichever engine it is.

    Args:
        url: URL of the server.
        model: ``namespace/name`` of the served model.
        server: the service's address as the engine reaches it.
        key: the server's key; empty if there is none.
    """
    from weighbridge.follow.sglang import SglangServer, is_sglang
    from weighbridge.follow.vllm import VllmServer

    if is_sglang(url, key):
        return SglangServer(url, server, model, api_key=key)
    return VllmServer(url, model, server, api_key=key)


def _lines(proof: Proof) -> Iterator[str]:
    yield f"{proof.model}@{proof.version}: {proof.verdict}"
    for name, rank in proof.ranks.items():
        yield f"  {name}: serves {rank.served or 'no version'}; {_compared(rank)}"
        if rank.unseen:
            whys: dict[str, list[str]] = {}
            for parameter, why in sorted(rank.unseen.items()):
                whys.setdefault(why, []).append(parameter)
            for why, parameters in whys.items():
                yield f"    not compared, {why}: {named(parameters, _NAMED)}"
    if proof.untested:
        yield (
            "  by a record of the engine's loader that was never compared with a load by that "
            "loader: --by-loading compares it, and pauses the engine"
        )


def _compared(rank: RankProof) -> str:
    right = rank.compared - len(rank.wrong)
    took = f", digests made in {readable_duration(rank.seconds)}"
    if not rank.wrong:
        return f"{counted(right, 'parameter has', 'parameters have')} its bytes{took}"
    return (
        f"OTHER BYTES in {named(rank.wrong, _NAMED)}; "
        f"{counted(right, 'parameter has', 'parameters have')} its bytes{took}"
    )
