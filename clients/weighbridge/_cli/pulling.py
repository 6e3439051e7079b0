"""Commands that bring weights out of the service: pull, export, restore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weighbridge._cli.output import print_json, progress_bar, say
from weighbridge._cli.parsing import WholeNumber, model_at_version, size
from weighbridge._cli.running import Command, client_options, engine_of, trainer_of
from weighbridge._cli.showing import completing
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge._core.references import Reference, is_training, training_of
from weighbridge._core.text.counts import counted
from weighbridge._core.text.extras import needs_extra
from weighbridge._core.text.sizes import readable_size
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    from weighbridge._clients.engine import EngineClient
    from weighbridge._core.layouts import Layout
    from weighbridge._core.resources import Version
    from weighbridge._core.slices import TensorParallel
    from weighbridge._trainers.trainer import TrainerClient

_FOLDER = click.Path(file_okay=False, path_type=Path)
_SIZE = WholeNumber(min=1)
_RANK = WholeNumber(min=0)


def _layer_range(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """Callback of the option ``A:B``."""
    if text is None:
        return None
    first, _, end = text.partition(":")
    if not (text.isascii() and first.isdigit() and end.isdigit()):
        raise click.BadParameter(f"{text!r} is not a range of layers: write it like 0:16", ctx, param)
    return int(first), int(end)


@click.command("pull", cls=Command)
@completing.reference("MODEL@VERSION", model_at_version)
@click.option(
    "--out",
    type=_FOLDER,
    required=True,
    help="A new folder; for one rank's slices, a folder that other ranks may write to as well.",
)
@click.option("--tp-size", type=_SIZE, help="Number of tensor-parallel ranks: pull only the slices of one of them.")
@click.option("--tp-rank", type=_RANK, help="Which of them, from 0.")
@click.option("--ep-size", type=_SIZE, help="Number of expert-parallel ranks: pull only the experts of one of them.")
@click.option("--ep-rank", type=_RANK, help="Which of them, from 0.")
@click.option("--etp-size", type=_SIZE, help="Number of ranks that share the matrices of each expert.  [default: 1]")
@click.option("--etp-rank", type=_RANK, help="Which of them, from 0.")
@click.option(
    "--layers",
    metavar="A:B",
    callback=_layer_range,
    help="Only a pipeline stage: its first layer, from 0, and one past its last.",
)
@click.option(
    "--vocab-multiple",
    type=_SIZE,
    help="Pad embedding and output layer with zeros to a multiple of this number, and shard both; "
    "engines use 64.  [default: the embedding is whole on each rank, as transformers has it]",
)
@click.option("--dtype", help="Cast floating-point tensors, e.g. to bf16.  [default: keep them as they are]")
@client_options
def pull_command(
    reference: Reference,
    out: Path,
    tp_size: int | None,
    tp_rank: int | None,
    ep_size: int | None,
    ep_rank: int | None,
    etp_size: int | None,
    etp_rank: int | None,
    layers: tuple[int, int] | None,
    vocab_multiple: int | None,
    dtype: str | None,
    server: str,
    as_json: bool,
) -> None:
    """Pull a version, or one rank's slices of it.

    The whole version becomes a Hugging Face folder that transformers loads. One rank's slices go to the file
    model-tp{RANK}-of-{SIZE}.safetensors (-ep{RANK}-of-{SIZE}, -etp{RANK}-of-{SIZE}, -layers{A}-{B} follow where they
    are asked for), with Hugging Face's names, and config.json beside it. Its __metadata__ says which part of each
    tensor they are.
    """
    _check_together(tp_size=tp_size, tp_rank=tp_rank)
    _check_together(ep_size=ep_size, ep_rank=ep_rank)
    _check_together(etp_size=etp_size, etp_rank=etp_rank)
    with engine_of(server) as client:
        if all(option is None for option in (tp_size, ep_size, etp_size, layers, vocab_multiple)):
            _write_folder(client, reference, out, as_json, "pulling", {"dtype": dtype})
            return
        from weighbridge._core.slices import ExpertParallel, TensorParallel

        experts = None
        if ep_size is not None or etp_size is not None:
            experts = ExpertParallel(ep_size or 1, ep_rank or 0, etp_size or 1, etp_rank or 0)
        part = TensorParallel(
            tp_size or 1,
            tp_rank or 0,
            experts=experts,
            layers=layers,
            vocab_multiple=1 if vocab_multiple is None else vocab_multiple,
        )
        _pull_rank(client, reference, out, part, dtype, as_json)


@click.command("export", cls=Command)
@completing.reference("MODEL@VERSION", model_at_version)
@click.argument("folder", type=_FOLDER)
@click.option("--dtype", help="Cast floating-point tensors, e.g. to bf16.  [default: keep them as they are]")
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    callback=size,
    default="5GB",
    show_default=True,
    help="Largest safetensors file.",
)
@click.option(
    "--format",
    "checkpoint_format",
    type=click.Choice(["torch_dist", "dcp"]),
    help=(
        "For a training state: Megatron-core's checkpoints, or those of "
        "torch.distributed.checkpoint.  [default: its trainer's]"
    ),
)
@click.option(
    "--replace",
    is_flag=True,
    help="For a training state: write to a FOLDER that is not empty, and replace that checkpoint if it exists.",
)
@client_options
def export_command(
    reference: Reference,
    folder: Path,
    dtype: str | None,
    max_shard_size: int,
    checkpoint_format: str | None,
    replace: bool,
    server: str,
    as_json: bool,
) -> None:
    """Write a version in another dtype or size of files.

    FOLDER is new or empty, and becomes a Hugging Face folder that transformers loads. A training state,
    MODEL:training@VERSION, becomes a checkpoint with optimizer: of a Megatron-core trainer what Megatron-LM takes as
    --load, of others one of torch.distributed.checkpoint.
    """
    if is_training(reference.model):
        if dtype is not None:
            raise InvalidArgument("a training state is written unchanged: leave out --dtype")
        _write_training(reference, folder, checkpoint_format, replace, max_shard_size, server, as_json)
        return
    if checkpoint_format is not None or replace:
        option = "--replace" if checkpoint_format is None else "--format"
        raise InvalidArgument(
            f"{option} is for training states, and {reference.model} has weights",
            fix=(
                f"name the training state: {training_of(reference.model)}@{reference.version}; of "
                "weights, convert the folder"
            ),
        )
    with engine_of(server) as client:
        settings = {"dtype": dtype, "max_shard_bytes": max_shard_size}
        _write_folder(client, reference, folder, as_json, "exporting", settings)


def _write_training(
    reference: Reference,
    folder: Path,
    checkpoint_format: str | None,
    replace: bool,
    max_file_bytes: int,
    server: str,
    as_json: bool,
) -> None:
    with needs_extra("torch"):
        import torch  # noqa: F401 (before anything is written)
    with (
        trainer_of(server) as client,
        progress_bar(f"exporting {reference.model}@{reference.version}") as update,
    ):
        written = client.export_training(
            reference.model,
            reference.version,
            folder,
            checkpoint_format=checkpoint_format,
            replace=replace,
            max_file_bytes=max_file_bytes,
            on_progress=update,
        )
    files = sorted(path for path in written.folder.rglob("*") if path.is_file())
    _report_written(written.version, files, as_json, written.folder)


@click.command("restore", cls=Command)
@completing.reference("MODEL@VERSION", model_at_version)
@click.option("--out", type=_FOLDER, required=True, help="Folder; other ranks may write to it as well.")
@click.option("--tp-size", type=_SIZE, help="Tensor-parallel ranks.  [default: 1]")
@click.option("--tp-rank", type=_RANK, help="Which of them, from 0.")
@click.option("--pp-size", type=_SIZE, help="Pipeline stages.  [default: 1]")
@click.option("--pp-rank", type=_RANK, help="Which of them, from 0.")
@click.option("--ep-size", type=_SIZE, help="Ranks over which experts are spread.  [default: 1]")
@click.option("--ep-rank", type=_RANK, help="Which of them, from 0.")
@click.option("--etp-size", type=_SIZE, help="Tensor-parallel ranks inside of experts.  [default: 1]")
@click.option("--etp-rank", type=_RANK, help="Which of them, from 0.")
@client_options
def restore_command(
    reference: Reference,
    out: Path,
    tp_size: int | None,
    tp_rank: int | None,
    pp_size: int | None,
    pp_rank: int | None,
    ep_size: int | None,
    ep_rank: int | None,
    etp_size: int | None,
    etp_rank: int | None,
    server: str,
    as_json: bool,
) -> None:
    """Restore what one Megatron-core rank holds.

    They go to the file megatron-tp{R}-of-{T}-pp{Q}-of-{P}.safetensors (with experts -ep{..}-of-{..} and so on behind
    it), with Megatron-core's keys, one a layer and expert, each as the rank's own parameter is: gate and up of SwiGLU
    together. Its __metadata__ says which part of the global tensor they are.
    """
    _check_together(tp_size=tp_size, tp_rank=tp_rank)
    _check_together(pp_size=pp_size, pp_rank=pp_rank)
    _check_together(ep_size=ep_size, ep_rank=ep_rank)
    _check_together(etp_size=etp_size, etp_rank=etp_rank)
    at = MegatronRank(
        tp=(tp_rank or 0, tp_size or 1),
        pp=(pp_rank or 0, pp_size or 1),
        ep=(ep_rank or 0, ep_size or 1),
        etp=(etp_rank or 0, etp_size or 1),
    )
    name = f"megatron-tp{at.tp[0]}-of-{at.tp[1]}-pp{at.pp[0]}-of-{at.pp[1]}"
    name += f"-ep{ep_rank}-of-{ep_size}" if ep_size else ""
    name += f"-etp{etp_rank}-of-{etp_size}" if etp_size else ""
    with needs_extra("torch"):
        import torch  # noqa: F401 (before anything is written)
    with trainer_of(server) as client:
        version = client.version(reference.model, reference.version)
        layout = client.describe_shards(reference.model, at)
        stream = _shards_of(client, version, layout)
        about = _described(at)
        path = out / f"{name}.safetensors"
        _write_rank(path, version, layout, stream, about, {}, as_json, "restoring")


def _described(at: MegatronRank) -> dict[str, str]:
    """The metadata of a rank's file: sizes and ranks by name."""
    grids = {"tensor": at.tp, "pipeline": at.pp, "expert": at.ep, "expert_tensor": at.etp}
    return {
        f"{grid}_parallel_{what}": str(value)
        for grid, (rank, size) in grids.items()
        for what, value in (("size", size), ("rank", rank))
    }


def _shards_of(client: TrainerClient, version: Version, layout: Layout) -> Iterator[memoryview]:
    """The bytes of each shard that a rank restores."""
    import torch

    arriving: dict[int, torch.Tensor] = {}

    def allocate(index: int) -> torch.Tensor:
        shard = layout.placements[index].shard
        arriving[index] = torch.empty(shard.box.extent, dtype=layout.tensors[shard.tensor].dtype.torch)
        return arriving[index]

    for _, index in client.restore_layout(version.model, layout, allocate, version=version.number):
        yield arriving.pop(index).reshape(-1).view(torch.uint8).numpy().data


def _check_together(**options: int | None) -> None:
    """Refuse a size without a rank, or a rank without a size: the ranks of a job must not all take rank 0."""
    missing = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is None]
    if len(missing) == 1:
        raise click.UsageError(f"{missing[0]} is missing: a size and a rank go together")


def _write_folder(
    client: EngineClient,
    reference: Reference,
    folder: Path,
    as_json: bool,
    verb: str,
    settings: dict[str, Any],
) -> None:
    with needs_extra("torch"):
        import torch  # noqa: F401 (before anything is written)
    from weighbridge._core.file_names import SIGNATURES_FOLDER

    with progress_bar(f"{verb} {reference.model}@{reference.version}") as update:
        version = client.export(reference.model, reference.version, folder, on_progress=update, **settings)
    if version.state.stored and not (folder / SIGNATURES_FOLDER).exists():
        unsigned = len(client.signatures(version.model, version.number))
        if unsigned:
            say(
                f"without {counted(unsigned, 'signature')}: these are not the files that were signed",
                err=True,
            )
    _report_written(version, sorted(path for path in folder.rglob("*") if path.is_file()), as_json, folder)


def _pull_rank(
    client: EngineClient,
    reference: Reference,
    out: Path,
    part: TensorParallel,
    dtype: str | None,
    as_json: bool,
) -> None:
    from weighbridge._cli.rank_files import describe
    from weighbridge._core import dtypes
    from weighbridge._formats import hf_folder

    pull = client.pull(reference.model, reference.version, part, dtype=dtype)
    files = client.model_files(reference.model, pull.version.number)
    name, about = describe(part, dtype)
    config = files["config.json"]
    beside = {"config.json": config if dtype is None else hf_folder.with_dtype(config, dtypes.parse(dtype))}
    _write_rank(out / name, pull.version, pull.layout, pull.stream(), about, beside, as_json, "pulling")


def _write_rank(
    path: Path,
    version: Version,
    layout: Layout,
    stream: Iterator[bytes] | Iterator[memoryview],
    about: dict[str, str],
    beside: dict[str, bytes],
    as_json: bool,
    verb: str,
) -> None:
    """Write the file of one rank, and the files beside it."""
    from weighbridge._cli.rank_files import check_absent, lay_out_rank_file, write_beside, write_rank_file

    check_absent(path)
    file = lay_out_rank_file(layout, {"model": version.model, "version": str(version.number), **about})
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, content in beside.items():
        write_beside(path.with_name(name), content)
    with progress_bar(f"{verb} {version.model}@{version.number}") as update:
        write_rank_file(path, file, layout, stream, update)
    _report_written(version, [path, *map(path.with_name, beside)], as_json)


def _report_written(version: Version, paths: list[Path], as_json: bool, folder: Path | None = None) -> None:
    nbytes = sum(path.stat().st_size for path in paths)
    if as_json:
        folder = folder or paths[0].parent
        names = [str(path.relative_to(folder)) for path in paths]
        print_json({"version": version, "folder": str(folder), "files": names, "bytes": nbytes})
    else:
        where = paths[0] if len(paths) == 1 else folder or paths[0].parent
        say(f"{version}: {readable_size(nbytes)} in {where}")
