"""Command that shows or creates golden prompts, or sends them to a running engine: golden."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weighbridge._cli.output import print_result, say
from weighbridge._cli.parsing import checked_url, model_perhaps_at_version
from weighbridge._cli.running import Command, client_options, engine_of
from weighbridge._cli.showing import completing
from weighbridge._core.engines.golden import MOST_PROMPTS, MOST_TOKENS, GoldenPrompts, logprobs_text
from weighbridge._core.references import Reference
from weighbridge._core.resources import REF_LATEST, Version
from weighbridge._core.text.counts import counted
from weighbridge._core.text.extras import needs_extra
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound

if TYPE_CHECKING:
    from weighbridge._clients.engine import EngineClient
    from weighbridge.follow.engines import Serving
    from weighbridge.follow.golden import Drift
    from weighbridge.follow.sglang import SglangServer
    from weighbridge.follow.vllm import VllmServer

_FILE = click.Path(dir_okay=False, path_type=Path)
_MOST_FILE = 1 << 20


@click.command("golden", cls=Command)
@completing.reference("MODEL[@VERSION]", model_perhaps_at_version)
@click.option(
    "--make",
    "count",
    type=click.IntRange(1, MOST_PROMPTS),
    metavar="N",
    help="Let the version write N prompts itself, and compute their log probabilities with transformers.",
)
@click.option(
    "--tokens",
    type=click.IntRange(2, MOST_TOKENS),
    default=40,
    show_default=True,
    help=(
        "With --make: length of each prompt. Longer than a block of the engine's prefix cache, or "
        "else a stale block is not noticed."
    ),
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="With --make: seed; a different one makes different prompts.",
)
@click.option(
    "--prompts",
    "source",
    type=_FILE,
    metavar="FILE",
    help="Compute the log probabilities of these prompts with transformers: a text in each line, "
    "for the version's tokenizer; or, in a file that "
    "ends with .json, an array of arrays of token ids.",
)
@click.option("--out", type=_FILE, metavar="FILE", help="With --make or --prompts: write them to this file.")
@click.option(
    "--from",
    "given",
    type=_FILE,
    metavar="FILE",
    help="Use the golden prompts of this file instead of those that came with the version.",
)
@click.option("--url", help="Ask the engine at this HTTP address, which serves the version.")
@click.option(
    "--engine",
    "kind",
    type=click.Choice(["vllm", "sglang"]),
    default="vllm",
    show_default=True,
    help="With --url: kind of engine.",
)
@click.option(
    "--engine-key",
    envvar="WEIGHBRIDGE_ENGINE_KEY",
    default="",
    help="With --url: the engine's key, if it has one.",
)
@click.option(
    "--max-drift",
    type=click.FloatRange(min=0.0),
    metavar="X",
    help="Largest difference of log probabilities: with --url, above it the exit code is 1; with "
    "--make or --prompts, the bound that is written.  "
    "[default: the version's own, if it has one]",
)
@client_options
@click.pass_context
def golden_command(
    ctx: click.Context,
    reference: Reference,
    count: int | None,
    tokens: int,
    seed: int,
    source: Path | None,
    out: Path | None,
    given: Path | None,
    url: str | None,
    kind: str,
    engine_key: str,
    max_drift: float | None,
    server: str,
    as_json: bool,
) -> None:
    """Show, make or ask the golden prompts of a version.

    Golden prompts are token ids with the log probabilities that the trainer's model gives them. Without an option those
    are shown that came with the version. --make and --prompts compute them from the version's bytes in this process, in
    float32, and write a file, which a push of these weights takes (`weighbridge push --golden FILE`). --url asks a
    running engine, and prints how far it is from them; one that says that it serves another version is refused. Without
    VERSION it is the newest that is not held.
    """
    making = count is not None or source is not None
    if count is not None and source is not None:
        raise click.UsageError("--make writes prompts, and --prompts names some: use one of them")
    if making and (given is not None or url is not None):
        raise click.UsageError("--make and --prompts make a file: name it with --from, and ask the engine then")
    if out is not None and not making:
        raise click.UsageError("--out needs --make or --prompts")
    if max_drift is not None and not making and url is None:
        raise click.UsageError("--max-drift needs --url, --make or --prompts")
    with engine_of(server) as client:
        version = client.version(reference.model, reference.version or REF_LATEST)
        made = _made(client, version, count, tokens, seed, source, max_drift) if making else _given(version, given)
        if url is not None:
            engine = _engine(kind, checked_url(url), reference.model, server, engine_key)
            drift = _asked(engine, version, made, max_drift, as_json)
            print_result(
                {**drift.to_json(), "drift": drift.largest, "mean_drift": drift.mean},
                as_json,
                *_drift_lines(drift),
            )
            ctx.exit(bool(drift.wrong_text))
    if out is not None:
        out.write_text(json.dumps(made.to_json()) + "\n")
        say(f"{out}: golden prompts of {version.model}@{version.number}, {made.text}", err=as_json)
        if not as_json:
            return
    print_result(made, as_json, *_lines(version, made))


def _given(version: Version, path: Path | None) -> GoldenPrompts:
    found = GoldenPrompts.from_metadata(version.metadata) if path is None else GoldenPrompts.read(path)
    if found is None:
        name = f"{version.model}@{version.number}"
        raise NotFound(
            f"{name} has no golden prompts",
            fix=(
                "push versions with golden=..., or make some and use the file: weighbridge golden "
                f"{name} --make 4 --out golden.json"
            ),
        )
    return found


def _made(
    client: EngineClient,
    version: Version,
    count: int | None,
    tokens: int,
    seed: int,
    source: Path | None,
    max_drift: float | None,
) -> GoldenPrompts:
    with needs_extra("transformers"):
        import torch
        import transformers  # noqa: F401 (before anything is fetched)

        from weighbridge.integrations.transformers import from_weighbridge
        from weighbridge.integrations.transformers.golden import golden_prompts, written_prompts

    name = f"{version.model}@{version.number}"
    chosen = None if source is None else _prompts(client, name, source)
    model = from_weighbridge(name, client, dtype=torch.float32)
    prompts = chosen if chosen is not None else written_prompts(model, count or 1, tokens, seed)
    made = GoldenPrompts(tuple(golden_prompts(model, prompts)), max_drift)
    made.metadata()  # refuses prompts that a push would refuse
    return made


def _prompts(client: EngineClient, name: str, source: Path) -> Sequence[Sequence[int]]:
    """Token ids of the prompts of a file."""
    with source.open("rb") as file:
        content = file.read(_MOST_FILE + 1)
    if len(content) > _MOST_FILE:
        raise InvalidArgument(f"{source} has more than {_MOST_FILE} bytes", fix="choose a few short prompts")
    try:
        if source.suffix == ".json":
            found = [[_token(token) for token in each] for each in json.loads(content)]
        else:
            lines = [line for line in content.decode().splitlines() if line.strip()]
            tokenizer = _tokenizer(client, name)
            found = [tokenizer(line)["input_ids"] for line in lines]
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidArgument(
            f"{source} has no prompts: {error}"[:300],
            fix="write a text in each line, or an array of arrays of token ids to a file that ends with .json",
        ) from error
    if not found:
        raise InvalidArgument(f"{source} has no prompts", fix="write a text in each line")
    return found


def _token(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a token id")
    return value


def _tokenizer(client: EngineClient, name: str) -> Any:
    from weighbridge.integrations.transformers import tokenizer_from_weighbridge

    return tokenizer_from_weighbridge(name, client.server)


def _engine(kind: str, url: str, model: str, server: str, key: str) -> SglangServer | VllmServer:
    from weighbridge.follow.sglang import SglangServer
    from weighbridge.follow.vllm import VllmServer

    if kind == "sglang":
        return SglangServer(url, server, model, api_key=key)
    return VllmServer(url, model, server, api_key=key)


def _asked(
    engine: SglangServer | VllmServer,
    version: Version,
    made: GoldenPrompts,
    max_drift: float | None,
    as_json: bool,
) -> Drift:
    from weighbridge.follow.golden import ask
    from weighbridge.follow.updates import quietly

    serving = quietly(engine.serving)
    if serving is not None:
        _check_serves(serving, version)
    elif not as_json:
        say("the engine does not report which version it serves", err=True)
    return ask(engine, version.model, version.number, made, max_drift)


def _check_serves(serving: Serving, version: Version) -> None:
    """Refuse an engine that serves another version: its answers may be within the bound without being evidence for this
    version.

    Raises:
        FailedPrecondition: the engine serves another version; names it.
    """
    if serving.broken:
        raise FailedPrecondition(f"the engine serves no version: {serving.broken}", fix="update it first")
    if serving.model not in ("", version.model):
        raise FailedPrecondition(
            f"the engine serves {serving.model}, not {version.model}",
            fix=f"name that: {serving.model}@NUMBER",
        )
    if serving.version not in (None, version.number):
        raise FailedPrecondition(
            f"the engine serves version {serving.version}, not {version.number}",
            fix=f"name that: {version.model}@{serving.version}; or update the engine first",
        )


def _lines(version: Version, found: GoldenPrompts) -> Iterator[str]:
    bound = "no bound" if found.max_drift is None else f"bound {found.max_drift:g}"
    yield f"{version.model}@{version.number}: {found.text}, {bound}"
    for at, each in enumerate(found.prompts):
        yield (
            f"  prompt {at}: {counted(len(each.tokens), 'token')}, mean log probability {logprobs_text(each.logprobs)}"
        )


def _drift_lines(drift: Drift) -> Iterator[str]:
    bound = "" if drift.max_drift is None else f" of {drift.max_drift:g}"
    yield f"{drift.model}@{drift.version}: {drift.verdict}{bound}; drift {drift.largest:.4g}, mean {drift.mean:.4g}"
    for each in drift.prompts:
        above = " ABOVE" if drift.max_drift is not None and each.worst > drift.max_drift else ""
        where = f" of {each.engine}" if each.engine else ""
        yield (
            f"  prompt {each.prompt}{where}: largest {each.largest:.4g}, mean {each.mean:.4g}, "
            f"with cached prefixes {each.cached:.4g}{above}"
        )
