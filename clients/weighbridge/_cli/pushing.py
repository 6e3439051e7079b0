"""Commands that bring models and weights into the service: register, import, push."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weighbridge._cli.output import print_left_out, print_result, progress_phases, say
from weighbridge._cli.parsing import WholeNumber, key_values
from weighbridge._cli.running import Command, client_options, trainer_of
from weighbridge._cli.showing import completing
from weighbridge._core.engines.golden import golden_of
from weighbridge._core.metadata import Metadata
from weighbridge._core.resources import VersionState, why_held
from weighbridge._core.text.counts import counted
from weighbridge._core.text.extras import needs_extra
from weighbridge._core.text.sizes import readable_size
from weighbridge.errors import InvalidArgument, WeighbridgeError

if TYPE_CHECKING:
    from weighbridge._clients.push_handle import PushHandle
    from weighbridge._clients.push_options import PushOptions
    from weighbridge._core.resources import Version
    from weighbridge._trainers.trainer import TrainerClient

F = TypeVar("F", bound=Callable[..., Any])

_FIRST_PHASE = "registering and copying"
"""Phase until the version has a number, and its service reports a phase."""
_FOLDER = click.Path(file_okay=False, path_type=Path)


_NO_WEIGHT_MAP = click.option(
    "--no-weight-map",
    is_flag=True,
    help="Register the model by its tensors alone, even if a weight map exists for its model type.",
)


def _push_options(function: F) -> F:
    """Add the options that describe a pushed version."""
    for option in (
        click.option(
            "--metadata",
            multiple=True,
            metavar="KEY=VALUE",
            callback=key_values,
            help="Metadata that is stored with the version; can be given several times.",
        ),
        click.option(
            "--candidate",
            is_flag=True,
            help="Hold the version: live and latest skip it until it is approved.",
        ),
        click.option(
            "--allow-nonfinite",
            is_flag=True,
            help="Do not hold the version if some of its elements are NaN or infinite.",
        ),
        click.option(
            "--golden",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help=(
                "Golden prompts of the version, as `weighbridge golden --make` writes them: "
                "engines are asked these when they serve it."
            ),
        ),
        click.option(
            "--max-drift",
            type=click.FloatRange(min=0.0),
            metavar="X",
            help="With --golden: largest difference of log probabilities that engines may have.",
        ),
    ):
        function = option(function)
    return function


def _options(
    allow_nonfinite: bool, candidate: bool, metadata: Metadata, golden: Path | None, max_drift: float | None
) -> PushOptions:
    found = golden_of(golden, max_drift)  # read before anything is registered
    return {
        "allow_nonfinite": allow_nonfinite,
        "candidate": candidate,
        "metadata": {**metadata, **(found.metadata() if found else {})},
    }


@click.command("register", cls=Command)
@click.argument("hf_dir", type=_FOLDER)
@click.argument("model", shell_complete=completing.models)
@click.option(
    "--dtype",
    help="The dtype in which floating-point weights will be pushed, e.g. bf16.  "
    "[default: that of the folder's weights, or else of its config.json]",
)
@_NO_WEIGHT_MAP
@client_options
def register_command(
    hf_dir: Path, model: str, dtype: str | None, no_weight_map: bool, server: str, as_json: bool
) -> None:
    """Register a model by a Hugging Face folder, without its weights.

    Its config.json, tokenizer and so on become MODEL's; weights come with the first push of a trainer, or of
    `weighbridge push`, which casts them to the dtype that is registered. Of a model that is registered already the
    files are replaced; its dtype stays as it is once it has versions.
    """
    with trainer_of(server) as client:
        found = client.register_model(model, hf_dir, dtype=dtype or "", weight_map=not no_weight_map)
    size = f"{counted(found.tensor_count, 'tensor')} in {found.dtype}, {readable_size(found.tensor_bytes)}"
    print_result(found, as_json, f"{found.name}: {found.model_type}, {size}")


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
    help="Cast floating-point weights, e.g. to bf16.  [default: keep them as they are]",
)
@click.option(
    "--dequantize",
    metavar="DTYPE",
    help="Turn block-quantised fp8 weights into this dtype, such as bf16.  [default: keep them as they are]",
)
@click.option(
    "--step",
    type=WholeNumber(min=0),
    help="Recorded with the version.  [default: the step that FOLDER records or, without that, the one "
    "in its name, such as step-100; 0 for a Hugging Face folder without either]",
)
@click.option(
    "--training",
    is_flag=True,
    help=(
        "Keep a checkpoint of Megatron-core or torch, with its optimizer, as a training state of "
        "MODEL, which is registered."
    ),
)
@click.option(
    "--base",
    metavar="BASE@VERSION",
    help="FOLDER is an adapter of peft, which is stored as an adapter on this version of another model.",
)
@_NO_WEIGHT_MAP
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
    base: str | None,
    no_weight_map: bool,
    allow_nonfinite: bool,
    candidate: bool,
    metadata: Metadata,
    golden: Path | None,
    max_drift: float | None,
    server: str,
    as_json: bool,
) -> None:
    """Register a model and push its first weights.

    FOLDER is a folder that save_pretrained() has written, or a checkpoint: torch_dist of Megatron-core, DCP of torch,
    or one of FSDP with a file for each rank, as verl's; its config.json, tokenizer and so on become MODEL's. If MODEL
    is registered already, its files are replaced and the weights become a further version. With --base, FOLDER is an
    adapter that peft has saved. With --training, a checkpoint becomes a version of MODEL:training, tensor by tensor as
    it is.
    """
    options = _options(allow_nonfinite, candidate, metadata, golden, max_drift)
    with needs_extra("torch"):
        import torch  # noqa: F401 (before anything is registered)
    if training or base is not None:
        given = {
            "--config": config,
            "--dtype": dtype,
            "--dequantize": dequantize,
            "--no-weight-map": no_weight_map,
            "--golden": golden if training else None,
            "--training": training and base is not None,
        }
        what = "an adapter" if base is not None else "a training state"
        for option in (name for name, value in given.items() if value):
            raise InvalidArgument(f"{option} is for weights, and {what} is stored unchanged: leave it out")
    if base is not None:
        from weighbridge._trainers.states.checkpoints.checkpoint_step import step_of_folder

        with trainer_of(server) as client:
            step = (step_of_folder(folder) or 0) if step is None else step
            push = partial(client.import_adapter, model, folder, base=base, step=step, run="import", **options)
            version, _ = _pushed(client, model, push)
        _report_pushed(version, as_json)
        return
    if training:
        with trainer_of(server) as client:
            importing = partial(client.import_training, model, folder, step=step, run="import", **options)
            version, _ = _pushed(client, model, importing)
        _report_pushed(version, as_json)
        return
    if (folder / ".metadata").exists() or any(folder.glob("model_world_size_*_rank_*.pt")):
        if dequantize:
            raise InvalidArgument("--dequantize is for Hugging Face folders: leave it out")
        version = _import_checkpoint(folder, model, config, dtype, step, server, options, not no_weight_map)
    else:
        from weighbridge._formats.naming.weight_files import check_finished

        check_finished(folder, (path.name for path in folder.glob("*")))
        if config is not None:
            raise InvalidArgument(
                f"--config is for checkpoints, and {folder} is not one",
                fix="leave it out: a Hugging Face folder has its own config.json",
            )
        from weighbridge._trainers.states.checkpoints.checkpoint_step import step_of_folder

        with trainer_of(server) as client:
            importing = partial(
                client.import_folder,
                model,
                folder,
                dtype=dtype or "",
                dequantize=dequantize or "",
                step=(step_of_folder(folder) or 0) if step is None else step,
                run="import",
                weight_map=not no_weight_map,
                **options,
            )
            version, handle = _pushed(client, model, importing)
        _tell_of_casts(handle)
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
    from weighbridge._trainers.states.checkpoints.checkpoint_step import known_step

    with needs_extra("service"):
        from weighbridge_service.converting.pushing import CheckpointToPush

    checkpoint = CheckpointToPush.read(folder, config)
    step = known_step(checkpoint.step if step is None else step, folder)
    target = None if dtype is None else dtypes.parse(dtype)
    print_left_out(checkpoint.left_out, err=True)
    with trainer_of(server) as client:
        push = partial(
            checkpoint.push,
            client,
            model,
            step=step,
            run="import",
            dtype=target,
            weight_map=weight_map,
            **options,
        )
        version, handle = _pushed(client, model, push)
    _tell_of_casts(handle)
    return version


@click.command("push", cls=Command)
@click.argument("hf_dir", type=_FOLDER)
@click.argument("model", shell_complete=completing.models)
@click.option("--step", type=WholeNumber(min=0), required=True, help="Recorded with the version.")
@click.option("--run", default="default", show_default=True, help="Name of the training run, recorded as well.")
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
    golden: Path | None,
    max_drift: float | None,
    server: str,
    as_json: bool,
) -> None:
    """Push a Hugging Face folder as a new version.

    Its config.json, tokenizer and other files become MODEL's; MODEL keeps those that the folder does not have. Waits
    until the version is in the object store.
    """
    options = _options(allow_nonfinite, candidate, metadata, golden, max_drift)
    with needs_extra("torch"):
        import torch  # noqa: F401 (before anything is sent)
    with trainer_of(server) as client:
        push = partial(client.push_folder, model, hf_dir, step=step, run=run, cast=cast, **options)
        version, handle = _pushed(client, model, push)
    _tell_of_casts(handle)
    _report_pushed(version, as_json)


def _tell_of_casts(handle: PushHandle) -> None:
    report = handle.report()
    if report.cast_tensors:
        exact = "exact" if report.widened_tensors == report.cast_tensors else "rounded"
        say(
            counted(report.cast_tensors, "tensor was", "tensors were") + f" cast to the model's dtype ({exact})",
            err=True,
        )


def _pushed(client: TrainerClient, model: str, push: Callable[[], PushHandle]) -> tuple[Version, PushHandle]:
    """Push, and wait until the version is durable. A push that fails or is interrupted is aborted at once."""
    with progress_phases(f"pushing {model}", _FIRST_PHASE) as update:
        handle = push()
        return _finish(client, handle, handle.model, lambda version: update(*phase_of(version))), handle


def phase_of(version: Version) -> tuple[str, int, int]:
    """Phase of a pushed version, and the bytes done and in all of it; 0 and 0 where none are counted."""
    match version.state:
        case VersionState.OPEN:
            return f"waiting for {'; '.join(version.waits_for) or 'memory'}", 0, 0
        case VersionState.RECEIVING:
            return "copying", version.received_bytes, version.tensor_bytes
        case VersionState.READY:
            return "verifying", 0, 0
        case VersionState.VERIFIED:
            return "storing", 0, 0
        case state:
            return state.value, version.received_bytes, version.tensor_bytes


def _finish(client: TrainerClient, handle: PushHandle, model: str, on_progress: Callable[[Version], None]) -> Version:
    try:
        return handle.wait(on_progress=on_progress)
    except (KeyboardInterrupt, WeighbridgeError) as error:
        with contextlib.suppress(WeighbridgeError):  # it has failed already, or is complete
            client.abort(model, handle.number, str(error) or "interrupted")
        raise


def _report_pushed(version: Version, as_json: bool) -> None:
    print_result(version, as_json, f"{version}: {readable_size(version.tensor_bytes)}")
    if version.held:
        say(why_held(version), err=True)
