"""The command that works on a store itself, with no service running: fsck."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weighbridge._cli.output import print_json, progress_bar, say
from weighbridge._cli.parsing import StoreLocation
from weighbridge._cli.resuming import DoneLines
from weighbridge._cli.running import Command
from weighbridge._core.text.counts import counted
from weighbridge._core.text.extras import needs_extra
from weighbridge._core.text.sizes import readable_size

if TYPE_CHECKING:
    from weighbridge_service.fsck.repair import CheckedModel
    from weighbridge_storage.stores.objects import ObjectStore

_DONE = {"drop": "removed from the history", "stray": "deleted"}
"""Outcomes that `fsck` reports, by kind of repair; all other problems are reported as repaired."""


@click.command("fsck", cls=Command)
@click.argument("location", metavar="STORE", type=StoreLocation(exists=True))
@click.option("--repair", is_flag=True, help="Repair what is wrong. Stop all services of the store first.")
@click.option(
    "--drop-damaged",
    is_flag=True,
    help="With --repair: also delete versions whose files are missing, with the refs that name "
    "them. Their other files stay for the "
    "grace time.",
)
@click.option(
    "--digests",
    is_flag=True,
    help="Also read the contents of all versions, and compare them with their digests.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --digests: file that records which versions were compared. A later command that names the "
    "file leaves these out; the file is deleted at the end.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, also for errors.")
@click.pass_context
def fsck_command(
    ctx: click.Context,
    location: Path | str,
    repair: bool,
    drop_damaged: bool,
    digests: bool,
    resume: Path | None,
    as_json: bool,
) -> None:
    """Check that what lies in a store is whole and agrees.

    STORE is a folder or s3://BUCKET/PREFIX, as for serve. Files are looked for, and their sizes compared with the
    manifests; with --digests, their contents are read and compared, too. No service is needed, and one may run.
    --repair rebuilds a head or a history that is lost or damaged from the manifests, makes block digests anew, and
    deletes what belongs to no version. The exit code is 1 if anything is wrong, and stays so.
    """
    if drop_damaged and not repair:
        raise click.UsageError("--drop-damaged needs --repair")
    if resume is not None and not digests:
        raise click.UsageError("--resume needs --digests")
    with needs_extra("service"):
        from weighbridge_service.fsck.repair import check_store
        from weighbridge_storage.opening import open_store

    found: list[CheckedModel] = []
    contents: list[_Contents | None] = []
    compared = DoneLines(resume)
    with closing(open_store(location)) as store:
        with progress_bar("checking versions", counted=True) as update:
            found += check_store(store, repair=repair, drop_damaged=drop_damaged, on_progress=update)
        for model in found:
            contents.append(_compared(store, str(location), model, compared) if digests else None)
            if not as_json:
                _show_checked(model, contents[-1])
    compared.end()
    each = list(zip(found, contents, strict=True))
    ok = all(model.ok and not (read and read.problems) for model, read in each)
    if as_json:
        print_json({"ok": ok, "models": [_checked_json(model, read) for model, read in each]})
    elif not found:
        say(_no_models(location))
    ctx.exit(0 if ok else 1)


@dataclass(frozen=True, slots=True)
class _Contents:
    """Findings of a comparison of a model's contents.

    Attributes:
        nbytes: bytes that were read.
        versions: how many versions were compared, those of an earlier command included.
        problems: what differs, by version.
    """

    nbytes: int
    versions: int
    problems: tuple[tuple[int, str], ...]


def _compared(store: ObjectStore, location: str, model: CheckedModel, compared: DoneLines) -> _Contents:
    """Read the contents of a model's versions, except those that were compared in the same place before."""
    from weighbridge_service.fsck.contents import compare_contents

    nbytes = versions = 0
    problems: list[tuple[int, str]] = []

    def named(number: int) -> tuple[str, str, int]:
        return location, model.name, number

    with progress_bar(f"reading {model.name}") as update:
        for each in compare_contents(store, model, lambda n: compared.has(named(n)), update):
            problems += [(each.number, problem) for problem in each.problems]
            nbytes += each.nbytes
            versions += 1
            if not each.problems and not compared.has(named(each.number)):
                compared.add(named(each.number))
    return _Contents(nbytes, versions, tuple(problems))


def _checked_json(model: CheckedModel, contents: _Contents | None) -> dict[str, Any]:
    """Model as a JSON object, which states whether contents were read."""
    found = model.to_json()
    if contents is None:
        return {**found, "contents_read": False}
    problems = [{"number": number, "what": what} for number, what in contents.problems]
    return {
        **found,
        "ok": model.ok and not problems,
        "contents_read": True,
        "bytes_read": contents.nbytes,
        "differing": problems,
    }


def _show_checked(model: CheckedModel, contents: _Contents | None) -> None:
    for checked in model.findings:
        finding = checked.finding
        where = model.name if finding.number is None else f"{model.name}@{finding.number}"
        outcome = f" ({_DONE.get(finding.mend, 'repaired')})" if checked.repaired else ""
        say(f"{where}: {finding.what}{outcome}")
        if checked.failure:
            say(f"  not repaired: {checked.failure}")
    differing = () if contents is None else contents.problems
    for number, problem in differing:
        say(f"{model.name}@{number}: {problem}")
    left = sum(not checked.repaired for checked in model.findings) + len(differing)
    if contents is not None:
        read = f"; contents of {counted(contents.versions, 'version')} compared, {readable_size(contents.nbytes)} read"
        well = "all is well"
    else:
        read = "" if left else "; contents were not read: --digests reads them"
        well = "names, sizes and manifests are correct"
    say(f"{model.name}: {counted(left, 'problem') if left else well} ({counted(model.versions, 'version')}){read}")
    if model.fix:
        say(f"  What to do: {model.fix}")
    if differing:
        say("  What to do: restore these files from a backup, or delete the versions")


def _no_models(location: Path | str) -> str:
    return f"there is no model in {location}: is that the store that serve uses?"
