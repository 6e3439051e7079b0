"""Commands that work on a store itself, with no service running: migrate, fsck."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from weighbridge._cli.output import print_json, progress_bar, say
from weighbridge._cli.parsing import StoreLocation
from weighbridge._cli.running import Command
from weighbridge._core.text.counts import counted
from weighbridge._core.text.extras import needs_extra
from weighbridge._core.text.sizes import readable_size

if TYPE_CHECKING:
    from weighbridge_service.fsck.repair import CheckedModel
    from weighbridge_storage.migration.migrate import MigratedModel

_DONE = {"drop": "taken out of history", "stray": "deleted"}
"""What `fsck` says of what it has mended, by how; otherwise that it is repaired."""


@click.command("migrate", cls=Command)
@click.argument("location", metavar="STORE", type=StoreLocation(exists=True))
@click.option(
    "--drop-damaged",
    is_flag=True,
    help="Take versions out of history whose bytes are not what was pushed, with the refs that name them; without it, they keep "
    "their model from being migrated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, also for errors.")
@click.pass_context
def migrate_command(ctx: click.Context, location: Path | str, drop_damaged: bool, as_json: bool) -> None:
    """Bring a store of an earlier release to this one's formats.

    STORE is a folder or s3://BUCKET/PREFIX, as for serve. Stop all its services first. All weights are read once, and compared with
    their digests. If the command is interrupted, running it again goes on where it stopped. The exit code is 1 if a
    model could not be migrated.
    """
    with needs_extra("service"):
        from weighbridge_storage.migration.migrate import migrate_store
        from weighbridge_storage.opening import open_store

    found: list[MigratedModel] = []
    with closing(open_store(location)) as store:
        try:
            with progress_bar("migrating") as update:
                for model in migrate_store(store, drop_damaged=drop_damaged, on_progress=update):
                    found.append(model)
                    if not as_json:
                        _show(model)
            empty = not found and next(store.folders("models/"), None) is None
        except KeyboardInterrupt:
            say("interrupted: run the same command again, and it goes on where it stopped", err=True)
            raise
    failed = not all(model.ok for model in found)
    if as_json:
        print_json({"ok": not failed, "models": [model.to_json() for model in found]})
    elif not found:
        say(_no_models(location) if empty else "nothing is to be migrated")
    ctx.exit(1 if failed else 0)


def _show(model: MigratedModel) -> None:
    migrated = f"{counted(len(model.versions), 'version')}, {readable_size(model.nbytes)}"
    for number in model.dropped:
        say(f"{model.name}@{number}: is damaged, and is not part of history any more")
    for number, problem in model.problems.items():
        say(f"{model.name}@{number}: {problem}", err=True)
    if model.failure:
        say(f"{model.name}: not migrated: {model.failure}", err=True)
    elif model.problems:
        say(f"{model.name}: not migrated ({migrated} are)", f"  What to do: {model.fix}", err=True)
    else:
        say(f"{model.name}: migrated ({migrated})")


@click.command("fsck", cls=Command)
@click.argument("location", metavar="STORE", type=StoreLocation(exists=True))
@click.option("--repair", is_flag=True, help="Mend what is wrong. Stop all services of the store first.")
@click.option(
    "--drop-damaged",
    is_flag=True,
    help="With --repair: also delete versions whose files are missing, with the refs that name them. Their other files stay for the "
    "grace time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, also for errors.")
@click.pass_context
def fsck_command(
    ctx: click.Context, location: Path | str, repair: bool, drop_damaged: bool, as_json: bool
) -> None:
    """Check that what lies in a store is whole and agrees.

    STORE is a folder or s3://BUCKET/PREFIX, as for serve. Files are looked for, and their sizes compared with the manifests; their
    contents are compared by verify. --repair rebuilds a head or a history that is lost or damaged from the manifests, makes block
    digests anew, and deletes what belongs to no version. The exit code is 1 if anything is wrong, and stays so.
    """
    if drop_damaged and not repair:
        raise click.UsageError("--drop-damaged goes with --repair")
    with needs_extra("service"):
        from weighbridge_service.fsck.repair import check_store
        from weighbridge_storage.opening import open_store

    found: list[CheckedModel] = []
    with closing(open_store(location)) as store, progress_bar("checking versions", counted=True) as update:
        for model in check_store(store, repair=repair, drop_damaged=drop_damaged, on_progress=update):
            found.append(model)
            if not as_json:
                _show_checked(model)
    ok = all(model.ok for model in found)
    if as_json:
        print_json({"ok": ok, "models": [model.to_json() for model in found]})
    elif not found:
        say(_no_models(location))
    ctx.exit(0 if ok else 1)


def _show_checked(model: CheckedModel) -> None:
    for checked in model.findings:
        finding = checked.finding
        where = model.name if finding.number is None else f"{model.name}@{finding.number}"
        outcome = f" ({_DONE.get(finding.mend, 'repaired')})" if checked.repaired else ""
        say(f"{where}: {finding.what}{outcome}")
        if checked.failure:
            say(f"  not repaired: {checked.failure}")
    left = sum(not checked.repaired for checked in model.findings)
    verdict = counted(left, "problem") if left else "all is well"
    say(f"{model.name}: {verdict} ({counted(model.versions, 'version')})")
    if model.fix:
        say(f"  What to do: {model.fix}")


def _no_models(location: Path | str) -> str:
    return f"there is no model in {location}: is that the store, as it is named to serve?"
