"""Commands about running engines: one that keeps one on a ref, follow, and one that shows those of the service,
engines.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weighbridge._cli.looking import say_if_absent
from weighbridge._cli.output import print_json, print_result, print_table, say
from weighbridge._cli.parsing import WholeNumber, checked_url, model_perhaps_at_version, ref_of
from weighbridge._cli.running import (
    Command,
    client_of,
    client_options,
    end_tidily,
    engine_key_option,
    engine_of,
)
from weighbridge._cli.showing import completing
from weighbridge._cli.signing import FILE, trusted
from weighbridge._core.engines.step_parts import step_text
from weighbridge._core.references import Reference, is_training
from weighbridge._core.resources import REF_LATEST
from weighbridge._core.text.counts import counted
from weighbridge._core.text.durations import readable_age, readable_duration
from weighbridge._core.text.sizes import readable_size

if TYPE_CHECKING:
    from weighbridge._core.engines.facts import Engine
    from weighbridge._core.engines.status import AgentStatus
    from weighbridge.follow.agent import Followed
    from weighbridge.follow.engines import StaleDrafter, WhenAsleep
    from weighbridge.follow.sglang import SglangServer
    from weighbridge.follow.vllm import VllmServer


def _draft(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, str] | None:
    """Callback of the option of a drafter's model and ref."""
    if text is None:
        return None
    named = model_perhaps_at_version(ctx, param, text)
    return named.model, ref_of(named, None, REF_LATEST)


@click.command("follow", cls=Command)
@completing.reference("MODEL[@REF]", model_perhaps_at_version)
@click.option(
    "--engine",
    "kind",
    type=click.Choice(["vllm", "sglang"]),
    default="vllm",
    show_default=True,
    help="Kind of engine.",
)
@click.option(
    "--url",
    "urls",
    multiple=True,
    help="The engine's HTTP address; by default port 8000 (vLLM) or 30000 (SGLang) of this machine.",
)
@click.option(
    "--ref",
    show_default=REF_LATEST,
    help="Ref to follow.",
    shell_complete=completing.refs,
)
@click.option(
    "--pause-mode",
    type=click.Choice(["wait", "keep", "retract", "abort"]),
    help="What to do with running requests: wait until they end (vLLM, its default), keep them and "
    "continue with the new weights, recompute what they have so far with the new weights (retract: "
    "SGLang, its default), or abort them.",
)
@click.option(
    "--when-asleep",
    type=click.Choice(["wait", "refuse"]),
    help="What to do with a version while the engine's weights sleep (vLLM): wait until they wake up, "
    "and load it before the engine answers any request (default), or refuse it.",
)
@engine_key_option
@click.option(
    "--draft",
    metavar="MODEL[@REF]",
    callback=_draft,
    help="Model of the engine's drafter (vLLM), and which ref of it to follow, by default latest. When "
    "either ref moves, both versions are prepared, and loaded in one pause or not at all.",
)
@click.option(
    "--stale-drafter",
    type=click.Choice(["refuse", "allow"]),
    help="What to do with a version that leaves behind the drafter of an engine that decodes "
    "speculatively: refuse it (default), or load it and leave the drafter unchanged.",
)
@click.option(
    "--adapters",
    "chosen",
    multiple=True,
    metavar="PATTERN[@REF]",
    help="Adapters on the model that the engine is to load before a request names them (vLLM with "
    "weighbridge's middleware), as 'acme/*': those versions that the ref names, by default "
    "latest, "
    "when it moves and after each update.",
)
@click.option(
    "--engine-server",
    metavar="HOST:PORT",
    help="The service's address as the engine reaches it.  [default: --server]",
)
@click.option("--lane", type=click.Choice(["grpc", "local", "auto"]), help="How weights travel to the engine.")
@click.option(
    "--count",
    type=WholeNumber(min=1),
    help="Exit after this many lines, with exit code 1 if the last one is a failure.",
)
@click.option(
    "--require-signature",
    "required",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="Take only versions that are signed by one of the public keys, or by a certificate of one of "
    "the authorities, in this file (PEM); if given several times, by one of each file.",
)
@click.option(
    "--status",
    "status_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=(
        "Maintain a JSON file with the state of the engine: its version, how many versions it is "
        "behind, since when the service cannot be reached."
    ),
)
@click.option(
    "--prove",
    "prove_every",
    type=WholeNumber(min=1),
    metavar="N",
    help="Prove at the start and after every N-th update that the server computes with the version's "
    "bytes, as `weighbridge prove` does; this host pulls what the workers take of the version each time. "
    "A version that fails its proof is loaded again. The first proof of a kind of engine pauses it for a "
    "load by its own loader.",
)
@click.option(
    "--golden/--no-golden",
    default=True,
    show_default=True,
    help="Send a version's golden prompts, if it has any, to the engine at the start and after each update.",
)
@click.option(
    "--max-drift",
    type=click.FloatRange(min=0.0),
    metavar="X",
    help="Largest difference of log probabilities in golden prompts; above it the engine is "
    "failing, and gets the version again.  "
    "[default: the version's own bound, if it has one]",
)
@click.option(
    "--approve",
    is_flag=True,
    help="Approve a version that is held as a candidate when the drift of this engine is within the bound.",
)
@click.option(
    "--ask-token",
    is_flag=True,
    help=(
        "Request one token from the engine after each update, and report how long it took until "
        "the engine had answered with the new weights."
    ),
)
@click.option("--force", is_flag=True, help="Follow even if the engine reports that it serves a different model.")
@client_options
@click.pass_context
def follow_command(
    ctx: click.Context,
    reference: Reference,
    kind: str,
    urls: tuple[str, ...],
    ref: str | None,
    pause_mode: str | None,
    when_asleep: WhenAsleep | None,
    draft: tuple[str, str] | None,
    stale_drafter: StaleDrafter | None,
    engine_key: str,
    chosen: tuple[str, ...],
    engine_server: str | None,
    lane: str | None,
    count: int | None,
    required: tuple[Path, ...],
    status_path: Path | None,
    prove_every: int | None,
    golden: bool,
    max_drift: float | None,
    approve: bool,
    ask_token: bool,
    force: bool,
    server: str,
    as_json: bool,
) -> None:
    """Keep a running vLLM or SGLang server on a ref's version.

    Each new version is fetched while the server answers; then it is paused, gets it, and goes on. On any failure it
    keeps the version that it has. One line a version. While a server cannot be reached, this is reported again and
    again, with the time since when; once it is back, it gets the version that it should have. With --require-signature
    it fetches nothing of a version that is not signed so, and takes the version when it is.
    """
    from weighbridge._reporting.reporter import EngineReporter
    from weighbridge.follow.adapters import Chosen, LoadsAhead, TakesAdapters
    from weighbridge.follow.agent import Follower
    from weighbridge.follow.golden import GoldenChecks
    from weighbridge.follow.reaching import ReachWatch
    from weighbridge.follow.status_file import status_file

    model, ref = reference.model, ref_of(reference, ref, REF_LATEST)
    for each in filter(is_training, (model, *(draft or ())[:1])):
        raise click.UsageError(f"engines cannot load training states: follow {each.partition(':')[0]}")
    if len(urls) > 1:
        raise click.UsageError(f"--url names {len(urls)} servers: run one agent beside each")
    url = checked_url(urls[0]) if urls else None
    if draft is not None and kind != "vllm":
        raise click.UsageError(f"--engine {kind} does not support --draft")
    if draft is not None and draft[0] == model:
        raise click.UsageError(f"--draft names {model}, which is the model that the engine answers by")
    ahead = [Chosen.read(each) for each in chosen]
    checks = GoldenChecks(golden, max_drift, approve)
    end_tidily()  # else the engine would stay paused
    trusts = trusted(required)
    listener = _nobody if status_path is None else status_file(status_path)
    engine = _engine(
        kind, url, model, engine_server or server, lane, pause_mode, when_asleep, engine_key, stale_drafter
    )
    if ahead and not isinstance(engine, TakesAdapters):
        raise click.UsageError(
            f"--engine {kind} does not support --adapters: its base takes no updates while adapters are loaded"
        )
    with engine_of(server) as client:
        for followed in filter(None, ((model, ref), draft)):
            found = say_if_absent(client, *followed)
            if found is not None:
                found.check_whole()
        done = None
        reporter = EngineReporter(client, model, kind=kind, address=engine.url, ref=ref, listener=listener)
        with ExitStack() as beside:
            beside.enter_context(closing(reporter))
            beside.enter_context(closing(ReachWatch(engine.url)))
            if ahead and isinstance(engine, TakesAdapters):
                loads = LoadsAhead(client, model, engine, ahead, partial(say, err=True))
                beside.enter_context(closing(loads))
            follower = Follower(
                client,
                model,
                engine,
                ref,
                force=force,
                required=trusts,
                reporter=reporter,
                prove_every=prove_every or 0,
                golden=checks,
                draft=draft,
                leaves_draft=stale_drafter == "allow",
                ask_token=ask_token,
            )
            for done in itertools.islice(follower.run(), count):
                print_result(done, as_json, _line(done), one_line=True)
    ctx.exit(1 if done is not None and done.error else 0)


def _nobody(_status: AgentStatus) -> None:
    """Discard the status: no status file was asked for."""


def _engine(
    kind: str,
    url: str | None,
    model: str,
    server: str,
    lane: str | None,
    pause_mode: str | None,
    when_asleep: WhenAsleep | None,
    engine_key: str,
    stale_drafter: StaleDrafter | None = None,
) -> VllmServer | SglangServer:
    from weighbridge.follow.sglang import SglangServer
    from weighbridge.follow.vllm import VllmServer

    modes = {
        "vllm": {None: "wait", "wait": "wait", "keep": "keep", "abort": "abort"},
        "sglang": {None: "retract", "retract": "retract", "keep": "in_place", "abort": "abort"},
    }[kind]
    if pause_mode not in modes:
        raise click.UsageError(f"--engine {kind} does not support --pause-mode {pause_mode}")
    mode: Any = modes[pause_mode]
    if kind == "sglang":
        if when_asleep is not None:
            raise click.UsageError(f"--engine {kind} does not support --when-asleep")
        url = url or "http://127.0.0.1:30000"
        return SglangServer(
            url,
            server,
            model,
            api_key=engine_key,
            lane=lane,
            pause_mode=mode,
            reported=True,
            stale_drafter=stale_drafter,
        )
    url = url or "http://127.0.0.1:8000"
    return VllmServer(
        url,
        model,
        server,
        lane=lane,
        pause_mode=mode,
        reported=True,
        when_asleep=when_asleep or "wait",
        api_key=engine_key,
        stale_drafter=stale_drafter,
    )


def _line(done: Followed) -> str:
    from weighbridge.follow.engines import DIFFERENT
    from weighbridge.follow.status import label

    if done.error:
        none = "different versions" if DIFFERENT in done.error else "no version"
        serves = none if done.serves is None else f"version {done.serves}"
        behind = f", {counted(done.behind, 'version')} behind" if done.behind else ""
        return f"{done.model}@{done.version}: failed, and the engine serves {serves}{behind}: {done.error}"
    version = label(done.model, done.version, done.drafter)
    if not done.nbytes:
        return f"{version}: the engine has it{_checked(done)}"
    if done.waits:
        return (
            f"{done.model}@{done.version}: {readable_size(done.nbytes)} prepared in "
            f"{readable_duration(done.prepare_seconds)}; the engine loads it when it wakes up"
        )
    return (
        f"{version}: {readable_size(done.nbytes)} prepared in {readable_duration(done.prepare_seconds)}, "
        f"engine paused for {readable_duration(done.pause_seconds)} ({step_text(done.parts)}){_checked(done)}"
    )


def _checked(done: Followed) -> str:
    proof = f", {done.proof}" if done.proof else ""
    drift = "" if done.drift is None else f" (drift {done.drift:.2g})"
    golden = f", golden prompts: {done.golden}{drift}" if done.golden else ""
    return f"{proof}{golden}; {done.stale}" if done.stale else f"{proof}{golden}"


_BESIDES = ("REF", "HEARD", "LAST UPDATE", "STEP", "PROOF", "GOLDEN", "NOTE")


@click.command("engines", cls=Command)
@click.argument("model", required=False, shell_complete=completing.models)
@client_options
def engines_command(model: str | None, server: str, as_json: bool) -> None:
    """Show what engines serve, and how far behind they are.

    Those of MODEL, or of all models, as their agents report. An engine is stale when its agent was not heard for three
    reports (15 s), and gone after a minute. What engines that are not gone serve or draft by is kept, whatever the
    retention says.
    """
    with client_of(server) as client:
        found = client.engines(model)
    if as_json:
        print_json(found)
    elif found:
        print_table(
            ("ENGINE", "MODEL", "SERVES", "STANDING", "STATE", *_BESIDES),
            [_engine_row(engine, time.time() * 1000) for engine in found],
            below=_BESIDES,
        )
    else:
        say(
            "no engine has reported lately: agents do (`weighbridge follow`), or `EngineReporter`",
            err=True,
        )


def _engine_row(engine: Engine, now_ms: float) -> tuple[str, ...]:
    update = f"to {engine.update_version}, {readable_age(engine.update_time_ms, now_ms)} ago, {engine.update_text}"
    proof = f"{engine.proof_text}, {engine.proof_when}{readable_age(engine.proof_time_ms, now_ms)} ago"
    notes = [engine.error, "" if engine.proof_error in engine.error else engine.proof_error]
    return (
        engine.label,
        engine.model,
        f"{engine.version or '-'} + {engine.drafter}" if engine.drafter else str(engine.version or "-"),
        engine.standing_text,
        f"{engine.state_text}, {readable_age(engine.since_ms, now_ms)}",
        engine.ref_text or "-",
        f"{readable_age(engine.heard_time_ms, now_ms)} ago",
        update if engine.update_version else "-",
        engine.step_text or "-",
        proof if engine.proof_time_ms else engine.proof_text,
        engine.golden_text or "-",
        "; ".join(filter(None, notes)),
    )
