"""Commands that bring weights into the service: import, push."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weighbridge._cli.output import print_json, print_left_out, progress_bar, say
from weighbridge._cli.parsing import WholeNumber, key_values
from weighbridge._cli.running import RETRY_SECONDS, Command, client_options
from weighbridge._cli.showing import completing
from weighbridge._core.metadata import Metadata
from weighbridge._core.resources import why_held
from weighbridge._core.text.counts import counted
from weighbridge._core.text.extras import needs_extra
from weighbridge._core.text.sizes import readable_size
from weighbridge.errors import InvalidArgument, WeighbridgeError

if TYPE_CHECKING:
    from weighbridge._clients.push_handle import PushHandle
    from weighbridge._clients.push_options import PushOptions
    from weighbridge._clients.trainer import TrainerClient
    from weighbridge._core.resources import Version

F = TypeVar("F", bound=Callable[..., Any])

_FOLDER = click.Path(file_okay=False, path_type=Path)


def _push_options(function: F) -> F:
    """Add what is said of a version that is pushed."""
    for option in (
        click.option(
            "--metadata",
            multiple=True,
            metavar="KEY=VALUE",
            callback=key_values,
            help="Keep this with the version; can be given several times.",
        ),
        click.option(
            "--candidate", is_flag=True, help="Hold the version: live and latest pass it by until approved."
        ),
        click.option(
            "--allow-nonfinite",
            is_flag=True,
            help="Do not hold the version if elements of it are NaN or infinite.",
        ),
    ):
        function = option(function)
    return function


@click.command("import", cls=Command)
@click.argument("folder", type=_FOLDER)
@click.argument("model", shell_complete=completing.models)
@click.option(
    "--config",
    type=_FOLDER,
    help="Hugging Face folder with the config.json, tokenizer and so on of a checkpoint.  "
    "[default: FOLDER/hf, FOLDER/huggingface, or FOLDER itself]",
)
@click.option(
    "--dtype",
    help="The dtype that all weights must have, such as bf16.  [default: each tensor keeps the one it has]",
)
@click.option(
    "--dequantize",
    metavar="DTYPE",
    help="Turn block-quantised fp8 weights into this dtype, such as bf16.  [default: keep them as they are]",
)
@click.option(
    "--step",
    type=WholeNumber(min=0),
    help="Recorded with the version.  [default: 100 of a checkpoint in iter_0000100; otherwise 0]",
)
@click.option(
    "--training",
    is_flag=True,
    help="Keep a checkpoint of Megatron-core or torch, with its optimizer, as a training state of MODEL, which is registered.",
)
@click.option(
    "--no-weight-map",
    is_flag=True,
    help="Register the model by its tensors alone: without a weight map, and not compared with its config.json.",
)
@_push_options
@client_options
def import_command(
    folder: Path,
    model: str,
    config: Path | None,
    dtype: str | None,
    dequantize: str | None,
    step: int | None,
    training: bool,
    no_weight_map: bool,
    allow_nonfinite: bool,
    candidate: bool,
    metadata: Metadata,
    server: str,
    as_json: bool,
) -> None:
    """Register a model and push its first weights.

    FOLDER is a folder that save_pretrained() has written, or a checkpoint: torch_dist of Megatron-core, DCP of torch, or one
    of FSDP with a file for each rank, as verl's; its config.json, tokenizer and so on become MODEL's. If MODEL is registered
    already, its files are replaced and the weights become a further version. With --training, a checkpoint becomes a version of MODEL:training, tensor by tensor as it is.
    """
    options: PushOptions = {"allow_nonfinite": allow_nonfinite, "candidate": candidate, "metadata": metadata}
    if training:
        given = {
            "--config": config,
            "--dtype": dtype,
            "--dequantize": dequantize,
            "--no-weight-map": no_weight_map,
        }
        for option in (name for name, value in given.items() if value):
            raise InvalidArgument(
                f"{option} is for weights, and a training state is kept as it is: leave it out"
            )
        with needs_extra("torch"):
            import torch  # noqa: F401 (before anything is opened)
        with _trainer(server) as client:
            handle = client.import_training(model, folder, step=step, run="import", **options)
            version = _finish(client, handle, handle.model)
        _report_pushed(version, as_json)
        return
    if (folder / ".metadata").exists() or any(folder.glob("model_world_size_*_rank_*.pt")):
        if dequantize:
            raise InvalidArgument("--dequantize is for Hugging Face folders: leave it out")
        version = _import_checkpoint(folder, model, config, dtype, step, server, options, not no_weight_map)
    else:
        if config is not None:
            raise InvalidArgument(
                f"--config is for checkpoints, and {folder} is none",
                fix="leave it out: a Hugging Face folder has its own config.json",
            )
        # before anything is registered: a model keeps the dtypes that it was registered with
        if dtype is not None:
            _check_dtype(folder, dtype)
        with _trainer(server) as client:
            handle = client.import_folder(
                model,
                folder,
                dequantize=dequantize or "",
                step=step or 0,
                run="import",
                weight_map=not no_weight_map,
                **options,
            )
            version = _finish(client, handle, model)
    _report_pushed(version, as_json)


def _import_checkpoint(
    folder: Path,
    model: str,
    config: Path | None,
    dtype: str | None,
    step: int | None,
    server: str,
    options: PushOptions,
    weight_map: bool,
) -> Version:
    from weighbridge._core import dtypes
    from weighbridge._formats.training.checkpoint_folder import iteration_of

    with needs_extra("service"):
        from weighbridge_service.converting.pushing import CheckpointToPush

    checkpoint = CheckpointToPush.read(folder, config)
    found = sorted({spec.dtype.short for spec in checkpoint.tensors})
    if dtype is not None and found != [dtypes.parse(dtype).short]:
        raise InvalidArgument(
            f"the weights in {folder} are in {' and '.join(found)}, not all in {dtype}",
            fix="weights are kept as they are: leave --dtype out",
        )
    print_left_out(checkpoint.left_out, err=True)
    with _trainer(server) as client:
        named = iteration_of(folder) if step is None else step
        handle = checkpoint.push(client, model, step=named, run="import", weight_map=weight_map, **options)
        return _finish(client, handle, model)


@click.command("push", cls=Command)
@click.argument("hf_dir", type=_FOLDER)
@click.argument("model", shell_complete=completing.models)
@click.option("--step", type=WholeNumber(min=0), required=True, help="Recorded with the version.")
@click.option(
    "--run", default="default", show_default=True, help="Name of the training run, recorded as well."
)
@click.option(
    "--cast",
    type=click.Choice(["allow", "exact", "never"]),
    default="allow",
    show_default=True,
    help="Whether floating-point tensors of another dtype than the model's are cast: exact only to a wider one.",
)
@_push_options
@client_options
def push_command(
    hf_dir: Path,
    model: str,
    step: int,
    run: str,
    cast: str,
    allow_nonfinite: bool,
    candidate: bool,
    metadata: Metadata,
    server: str,
    as_json: bool,
) -> None:
    """Push a Hugging Face folder as a new version.

    Waits until the version is in the object store.
    """
    options: PushOptions = {"allow_nonfinite": allow_nonfinite, "candidate": candidate, "metadata": metadata}
    with _trainer(server) as client:
        handle = client.push_folder(model, hf_dir, step=step, run=run, cast=cast, **options)
        version = _finish(client, handle, model)
    report = handle.report()
    if report.cast_tensors:
        exact = "exact" if report.widened_tensors == report.cast_tensors else "rounded"
        say(
            counted(report.cast_tensors, "tensor was", "tensors were")
            + f" cast to the model's dtype ({exact})",
            err=True,
        )
    _report_pushed(version, as_json)


def _trainer(server: str) -> TrainerClient:
    from weighbridge._clients.trainer import TrainerClient

    return TrainerClient(server, retry_seconds=RETRY_SECONDS)


def _check_dtype(hf_dir: Path, wanted: str) -> None:
    """Refuse a folder whose weights are not all in one dtype."""
    from weighbridge._core import dtypes
    from weighbridge._formats.safetensors_files import read_folder

    found = sorted({spec.dtype.short for spec in read_folder(hf_dir).layout.tensors.values()})
    if found != [dtypes.parse(wanted).short]:
        raise InvalidArgument(
            f"the weights in {hf_dir} are in {' and '.join(found)}, not all in {wanted}",
            fix="weights are kept as they are: cast them before, and save the folder again",
        )


def _finish(client: TrainerClient, handle: PushHandle, model: str) -> Version:
    """Wait until a push is durable; one that fails or is interrupted is given up at once."""
    try:
        with progress_bar(f"pushing {model}@{handle.number}") as update:
            return handle.wait(
                on_progress=lambda version: update(version.received_bytes, version.tensor_bytes)
            )
    except (KeyboardInterrupt, WeighbridgeError) as error:
        with contextlib.suppress(WeighbridgeError):  # it has failed already, or is complete
            client.abort(model, handle.number, str(error) or "interrupted")
        raise


def _report_pushed(version: Version, as_json: bool) -> None:
    if as_json:
        print_json(version.to_json())
    else:
        say(f"{version}: {readable_size(version.tensor_bytes)}")
    if version.held:
        say(why_held(version), err=True)
