"""Command that converts folders, with no service running."""

from __future__ import annotations

from pathlib import Path

import click

from weighbridge._cli.output import print_json, print_left_out, progress_bar, say
from weighbridge._cli.parsing import WholeNumber, size
from weighbridge._cli.running import Command
from weighbridge._core.text.counts import counted
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.extras import needs_extra
from weighbridge._core.text.sizes import readable_size

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command("convert", cls=Command)
@click.argument("source", type=_FOLDER)
@click.argument("target", type=_FOLDER)
@click.option(
    "--config",
    type=_FOLDER,
    help="Hugging Face folder with the config.json, tokenizer and so on of a checkpoint.  "
    "[default: SOURCE/hf, SOURCE/huggingface, or SOURCE itself]",
)
@click.option(
    "--keys",
    type=click.Choice(["auto", "stacked", "per-layer"]),
    default="auto",
    show_default=True,
    help="To torch_dist: one key for all layers, or one for each layer, as trainers save them with "
    "non_homogeneous_layers; auto stacks layers if all are alike.",
)
@click.option(
    "--spec",
    type=click.Choice(["te", "local"]),
    default="te",
    show_default=True,
    help="To torch_dist: the names of norms: those of Transformer Engine, or those of Megatron's own layers.",
)
@click.option(
    "--vocab-multiple",
    type=WholeNumber(min=1),
    default=128,
    show_default=True,
    help="To torch_dist: pad the vocabulary to a multiple of this number.",
)
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    callback=lambda ctx, param, text: None if text is None else size(ctx, param, text),
    help="Largest file.  [default: 5GB to Hugging Face, 2GB to torch_dist]",
)
@click.option(
    "--workers",
    type=WholeNumber(min=1),
    help="Number of processes that copy.  [default: one for each CPU, up to 4]",
)
@click.option(
    "--memory-budget",
    metavar="SIZE",
    callback=size,
    default="2GiB",
    show_default=True,
    help="Memory limit for all processes together, whatever the size of the model.",
)
@click.option("--restart", is_flag=True, help="Start over, and discard what an interrupted conversion has left.")
@click.option("--json", "as_json", is_flag=True, help="Print a report as JSON, also for errors.")
def convert_command(
    source: Path,
    target: Path,
    config: Path | None,
    keys: str,
    spec: str,
    vocab_multiple: int,
    max_shard_size: int | None,
    workers: int | None,
    memory_budget: int,
    restart: bool,
    as_json: bool,
) -> None:
    """Convert checkpoints to Hugging Face folders, and back.

    Of a Hugging Face folder, TARGET becomes a torch_dist checkpoint of Megatron-core. Of a checkpoint it becomes a
    Hugging Face folder: of torch_dist, and of DCP and FSDP (a file for each rank, as verl's) whose parameters have its
    names. TARGET is new, and appears when it is complete. No service is needed, and the model may be larger than
    memory. If the command is interrupted, running it again continues where it stopped.
    """
    with needs_extra("service"):
        from weighbridge_service.converting.conversions import ConvertOptions
        from weighbridge_service.converting.convert import convert_folder
        from weighbridge_service.models.bridge_process import BridgeProcess
        from weighbridge_service.models.library_models import compared_by

    options = ConvertOptions(
        config=config,
        keys=keys,  # type: ignore[arg-type]  # click has compared it with the choices
        spec=spec,  # type: ignore[arg-type]
        vocab_multiple=vocab_multiple,
        max_file_bytes=max_shard_size,
    )

    def resumed(done: int, total: int) -> None:
        say(f"resuming: {readable_size(done)} of {readable_size(total)} are already converted", err=True)

    # in a process of its own: this one has a budget of memory
    library = BridgeProcess()
    try:
        with compared_by(library.compare), progress_bar(f"converting to {target.name}") as update:
            report = convert_folder(
                source,
                target,
                options,
                workers=workers,
                memory_budget=memory_budget,
                restart=restart,
                on_progress=update,
                on_resume=resumed,
            )
    except KeyboardInterrupt:
        say("interrupted: run the same command again to resume where it stopped", err=True)
        raise
    finally:
        library.close()
    if as_json:
        print_json(report)
        return
    say(
        f"{target}: {readable_size(report.bytes)}, {counted(report.tensors, 'tensor')} in "
        f"{counted(len(report.files), 'file')}, "
        f"{readable_duration(report.seconds)}"
    )
    print_left_out(report.left_out)
