"""Command that relays step folders between machines: relay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from weighbridge._cli.looking import say_if_absent
from weighbridge._cli.output import print_result
from weighbridge._cli.parsing import WholeNumber
from weighbridge._cli.running import Command, client_options, end_tidily, engine_of, trainer_of
from weighbridge._cli.showing import completing
from weighbridge._core.resources import REF_LIVE
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.extras import needs_extra
from weighbridge._core.text.sizes import readable_size
from weighbridge.errors import NotFound

if TYPE_CHECKING:
    from weighbridge._trainers.trainer import TrainerClient
    from weighbridge.relay.relayed import Relayed
    from weighbridge.relay.steps import StepNames

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command("relay", cls=Command)
@click.argument("model", shell_complete=completing.models)
@click.option("--from", "source", type=_FOLDER, help="Where a trainer writes its steps: each becomes a version.")
@click.option("--to", "target", type=_FOLDER, help="Where engines look for steps: each version becomes a folder.")
@click.option(
    "--name",
    default="step_{step}",
    show_default=True,
    help=(
        "Name of a step's folder; {step:07d} with leading zeros, step_{step}/weight if the weights are in a subfolder."
    ),
)
@click.option(
    "--marker",
    default="STABLE",
    show_default=True,
    help="The file that is written last, relative to the weights: STABLE or ../STABLE.",
)
@click.option(
    "--config",
    "hf_dir",
    type=_FOLDER,
    help=(
        "With --from: a folder with config.json and the tokenizer, from which MODEL is registered if it does not exist."
    ),
)
@click.option(
    "--run",
    default="default",
    show_default=True,
    help="With --from: the name of the training run, recorded with each version.",
)
@click.option(
    "--cast",
    type=click.Choice(["allow", "exact", "never"]),
    default="allow",
    show_default=True,
    help="With --from: whether floating-point tensors of another dtype than the model's are cast.",
)
@click.option(
    "--ref",
    default=REF_LIVE,
    show_default=True,
    help="With --to: ref to follow, as with follow.",
    shell_complete=completing.refs,
)
@click.option(
    "--keep",
    type=WholeNumber(min=1),
    default=3,
    show_default=True,
    help="With --to: how many folders are kept.",
)
@click.option(
    "--count",
    type=WholeNumber(min=1),
    help="Exit after this many lines, with exit code 1 if the last one is a failure.",
)
@client_options
@click.pass_context
def relay_command(
    ctx: click.Context,
    model: str,
    source: Path | None,
    target: Path | None,
    name: str,
    marker: str,
    hf_dir: Path | None,
    run: str,
    cast: str,
    ref: str,
    keep: int,
    count: int | None,
    server: str,
    as_json: bool,
) -> None:
    """Relay step folders between machines.

    They need no common file system. Beside the trainer, --from pushes the newest step, once its marker is there, as a
    version of MODEL. Beside the engines, --to writes each version that a ref comes to name to a folder of the same
    step, once MODEL is registered; its marker comes last, and the last few folders stay. One line a step. Either goes
    on where it was when it is started again.
    """
    from weighbridge.relay.steps import StepNames

    names = StepNames(name, marker)
    end_tidily()
    done: Relayed | None = None
    if (source is None) == (target is None):
        raise click.UsageError("name one of --from and --to")
    with needs_extra("torch"):
        import torch  # noqa: F401 (before anything is relayed)
    steps: Iterator[Relayed] = iter(())
    if source is not None:
        steps = _outgoing(server, model, source, names, hf_dir, run, cast)
    elif target is not None:
        steps = _incoming(server, model, target, names, keep, ref)
    for done in itertools.islice(steps, count):
        print_result(done, as_json, _line(done), one_line=True)
    ctx.exit(1 if done is not None and done.error else 0)


def _outgoing(
    server: str, model: str, source: Path, names: StepNames, hf_dir: Path | None, run: str, cast: str
) -> Iterator[Relayed]:
    from weighbridge.relay.outgoing import Outgoing

    with trainer_of(server, run) as client:
        if hf_dir is None:
            _check_registered(client, model)
        yield from Outgoing(client, model, source, names, hf_dir=hf_dir, cast=cast).run()


def _check_registered(client: TrainerClient, model: str) -> None:
    """Refuse a wrong name, or a service that is not there, now; later ones are waited out."""
    try:
        client.model(model)
    except NotFound as error:
        fix = "name the folder of its config.json and tokenizer with --config"
        raise NotFound(error.message, fix=fix) from error


def _incoming(server: str, model: str, target: Path, names: StepNames, keep: int, ref: str) -> Iterator[Relayed]:
    from weighbridge.relay.incoming import Incoming
    from weighbridge.relay.places import StepPlaces

    places = StepPlaces(target, names, keep)
    with engine_of(server) as client:
        say_if_absent(client, model, ref)
        yield from Incoming(client, model, places, ref).run()


def _line(done: Relayed) -> str:
    named = done.model if done.version is None else f"{done.model}@{done.version}"
    if done.version is None and done.step is not None:
        named += f": step {done.step}"
    if done.error:
        return f"{named}: failed: {done.error}"
    if not done.nbytes:
        return f"{named}: {done.folder} already exists"
    return f"{named}: {done.folder}, {readable_size(done.nbytes)} in {readable_duration(done.seconds)}"
