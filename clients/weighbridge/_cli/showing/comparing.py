"""Command that compares two versions or folders: diff."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click

from weighbridge._cli.output import print_json, print_table, progress_bar, say
from weighbridge._cli.parsing import WholeNumber
from weighbridge._cli.running import Command, client_options, engine_of
from weighbridge._cli.showing import completing
from weighbridge._core.references import Reference, parse_reference
from weighbridge._core.text.counts import counted
from weighbridge._core.text.extras import needs_extra
from weighbridge._core.text.sizes import readable_size
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    from weighbridge._comparing.differences import Comparison, Difference
    from weighbridge._comparing.sides import Side

Named: TypeAlias = Path | Reference
"""Side of a comparison: a folder, or a version of a model."""
_TOP = 20


@click.command("diff", cls=Command)
@click.argument(
    "named",
    nargs=-1,
    required=True,
    metavar="MODEL VERSION VERSION | SIDE SIDE",
    shell_complete=completing.sides,
)
@click.option(
    "--top",
    type=WholeNumber(min=0),
    help=f"Only the N tensors that have changed most.  [default: {_TOP}; all of them with --json]",
    metavar="N",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png",
    help="Draw for each layer which fraction of it has changed, and its largest step.",
)
@client_options
def diff_command(named: tuple[str, ...], top: int | None, plot: Path | None, server: str, as_json: bool) -> None:
    """Show which elements have changed between two versions.

    VERSION is a number or a ref: `weighbridge diff acme/smol 16 17`. SIDE is MODEL@VERSION or a Hugging Face folder, in
    any combination. Training states are compared like weights: `weighbridge diff acme/smol:training 16 17`.

    An element has changed if its bits have. The largest step is the largest |a - b| of finite elements; changed
    elements that are NaN or infinite are counted apart. Tensors whose digests in both manifests are equal are not read;
    the others come to this machine, from both sides, by the local lane where the service shares memory with it.
    """
    before, after = sides_of(named)
    with needs_extra("torch"):
        import torch  # noqa: F401 (before anything is read)

        from weighbridge._comparing.comparing import compare
    if plot is not None:
        from weighbridge._comparing.pictures import check_picture, draw_layers

        check_picture(plot)
    with ExitStack() as stack:
        left, right = _open(before, after, server, stack)
        on_progress = stack.enter_context(progress_bar("comparing"))
        found = compare(left, right, on_progress=on_progress)
    if plot is not None:
        draw_layers(found, plot)
    if as_json:
        said = found.to_json()
        said["tensors"] = [each.to_json() for each in (found.tensors if top is None else found.most_changed(top))]
        print_json(said)
    else:
        _show(found, _TOP if top is None else top)
        if plot is not None:
            say(f"drawn in {plot}")


def sides_of(named: Sequence[str]) -> tuple[Named, Named]:
    """Sides of a comparison, from the command's arguments.

    Raises:
        InvalidArgument: the arguments do not name two sides.
    """
    match named:
        case (model, before, after):
            if "@" in model:
                raise InvalidArgument(
                    f"{model!r} names a version, and two more follow", fix="name the model: acme/smol 16 17"
                )
            return Reference(model, before), Reference(model, after)
        case (before, after):
            return _side(before), _side(after)
    raise InvalidArgument(
        f"two sides are compared, and {counted(len(named), 'argument')} cannot name them",
        fix="write a model and two versions, like acme/smol 16 17, or two sides, like acme/smol@16 FOLDER",
    )


def _side(text: str) -> Named:
    if Path(text).is_dir():
        return Path(text)
    if "@" in text:
        return parse_reference(text)
    raise InvalidArgument(
        f"{text!r} is neither a folder nor MODEL@VERSION",
        fix="write it like acme/smol@17, or name a folder that exists",
    )


def _open(before: Named, after: Named, server: str, stack: ExitStack) -> tuple[Side, Side]:
    from weighbridge._clients.engine import EngineClient
    from weighbridge._comparing.sides import FolderSide, VersionSide

    @cache
    def client() -> EngineClient:
        return stack.enter_context(engine_of(server))

    def opened(named: Named) -> Side:
        return FolderSide.map(named) if isinstance(named, Path) else VersionSide.find(client(), named)

    return opened(before), opened(after)


def _show(found: Comparison, top: int) -> None:
    say(f"{found.before} to {found.after}: {_total_text(found.total)}")
    if found.bytes_known:
        say(
            f"{readable_size(found.bytes_read)} of each were read, "
            f"{readable_size(found.bytes_known)} are equal by their digests"
        )
    for names, where in ((found.only_before, found.before), (found.only_after, found.after)):
        if names:
            say(f"only in {where}: {counted(len(names), 'tensor')}: {_listed(names)}")
    for other in found.others[:_LISTED]:
        say(f"not compared: {other.before} became {other.after.dtype}{list(other.after.shape)}")
    if len(found.others) > _LISTED:
        say(f"not compared: {counted(len(found.others) - _LISTED, 'other tensor')} with a different dtype or shape")
    if found.total.changed:
        say("")
        rows = [(layer.name, *_cells(layer.found)) for layer in found.layers]
        print_table(("LAYER", *_COLUMNS), rows)
    tensors = found.most_changed(top)
    if tensors:
        say("")
        print_table(("TENSOR", "DTYPE", *_COLUMNS), [(t.spec.name, t.spec.dtype, *_cells(t.found)) for t in tensors])
        left = len(found.most_changed()) - len(tensors)
        if left:
            say(f"and {counted(left, 'tensor')} that changed less: --top {left + len(tensors)}")


_COLUMNS = ("CHANGED", "OF", "FRACTION", "LARGEST STEP", "NAN OR INF")


def _cells(found: Difference) -> tuple[str, ...]:
    return (
        f"{found.changed:,}",
        f"{found.elements:,}",
        f"{found.fraction:.4%}",
        f"{found.step:.6g}",
        str(found.nonfinite or "-"),
    )


def _total_text(total: Difference) -> str:
    if not total.elements:
        return "they have no tensor of the same name, dtype and shape"
    if not total.changed:
        return f"no difference in {total.elements:,} elements"
    text = (
        f"{total.changed:,} of {total.elements:,} elements changed ({total.fraction:.4%}), largest "
        f"step {total.step:.6g}"
    )
    if total.nonfinite:
        text += f"; {counted(total.nonfinite, 'of these is', 'of these are')} NaN or infinite on either side"
    return text


_LISTED = 10


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
