"""Commands that say what is kept, and what there is room for: retention, collect, warm, usage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from weighbridge._cli.output import print_json, print_result, print_table, readable_time, say
from weighbridge._cli.parsing import WholeNumber, duration
from weighbridge._cli.running import Command, client_of, client_options
from weighbridge._cli.showing import completing
from weighbridge._core.references import is_training, training_of
from weighbridge._core.reports.collection import RULE_KEEP_EVERYTHING
from weighbridge._core.reports.usage import QUOTA_BYTES_PER_SECOND, QUOTA_STORED
from weighbridge._core.resources import Retention
from weighbridge._core.text.counts import counted
from weighbridge._core.text.sizes import readable_size

if TYPE_CHECKING:
    from weighbridge._core.reports.collection import Collection, KeptVersion
    from weighbridge._core.reports.usage import Quota


@click.command("retention", cls=Command)
@click.argument("model", shell_complete=completing.models)
@click.option("--keep-last", type=WholeNumber(min=1), metavar="N", help="Keep the newest N versions.")
@click.option(
    "--keep-every-steps",
    type=WholeNumber(min=1),
    metavar="K",
    help="Keep one version of each K consecutive steps of a run: the first that exists.",
)
@click.option(
    "--keep-every-numbers",
    "keep_every",
    type=WholeNumber(min=1),
    metavar="K",
    help="Keep one of each K consecutive version numbers: the first that exists.",
)
@click.option(
    "--keep-younger",
    "keep_younger_s",
    callback=duration,
    metavar="TIME",
    help="Keep versions younger than TIME, such as 7d, 12h or 30m.",
)
@click.option(
    "--keep-training-last",
    type=WholeNumber(min=1),
    metavar="N",
    help="Keep the newest N of its training states.",
)
@click.option(
    "--keep-training-every-steps",
    type=WholeNumber(min=1),
    metavar="K",
    help="Keep one training state of each K consecutive steps of a run.",
)
@click.option(
    "--keep-training-every-numbers",
    "keep_training_every",
    type=WholeNumber(min=1),
    metavar="K",
    help="Keep one training state of each K consecutive version numbers.",
)
@click.option("--keep-everything", is_flag=True, help="Delete nothing from now on.")
@client_options
def retention_command(
    model: str,
    keep_last: int | None,
    keep_every_steps: int | None,
    keep_every: int | None,
    keep_younger_s: int | None,
    keep_training_last: int | None,
    keep_training_every_steps: int | None,
    keep_training_every: int | None,
    keep_everything: bool,
    server: str,
    as_json: bool,
) -> None:
    """Show or set which versions of a model are kept.

    A version is kept if one of the rules keeps it, a ref names it or an engine serves it (`weighbridge engines`); the
    others are deleted some time later. New rules replace all that were there. Without any option the rules are shown.
    Training states, versions of MODEL:training, have rules of their own, which --keep-training-last,
    --keep-training-every-steps and --keep-training-every-numbers set as well.
    """
    rules = Retention(keep_last or 0, keep_every or 0, keep_younger_s or 0, keep_every_steps or 0)
    training = Retention(
        keep_training_last or 0, keep_training_every or 0, keep_every_steps=keep_training_every_steps or 0
    )
    if keep_everything and not (rules.keeps_everything and training.keeps_everything):
        raise click.UsageError("--keep-everything excludes all other rules")
    if is_training(model) and not training.keeps_everything:
        raise click.UsageError(f"{model} contains only training states: use --keep-last, --keep-every-steps")
    with client_of(server) as client:
        if not training.keeps_everything:
            client.set_retention(training_of(model), training)
        if keep_everything or not rules.keeps_everything:
            client.set_retention(model, rules)
        else:
            rules = client.retention(model)
    shown = {model: rules, **({} if training.keeps_everything else {training_of(model): training})}
    own, *others = ({"model": name, **each.to_json()} for name, each in shown.items())
    print_result(
        {**own, **({"training": others[0]} if others else {})},
        as_json,
        *(f"{name}: keeps {each.text}" for name, each in shown.items()),
    )


@click.command("collect", cls=Command)
@click.argument("model", shell_complete=completing.models)
@click.option("--dry-run", is_flag=True, help="Only report what would be deleted.")
@client_options
@click.pass_context
def collect_command(ctx: click.Context, model: str, dry_run: bool, server: str, as_json: bool) -> None:
    """Delete now what no rule of retention keeps of a model.

    Services do so by themselves every ten minutes (`serve --collect-every`). A version that is not kept is taken out of
    history first, and its files are deleted by a collection after the grace time. The exit code is 1 if a deletion
    failed.
    """
    with client_of(server) as client:
        report = client.collect(model, dry_run=dry_run)
    if as_json:
        print_json(report)
    else:
        _show(report)
    ctx.exit(1 if report.problems else 0)


def _show(report: Collection) -> None:
    rows: list[tuple[object, str, str]] = [
        *((v.number, "kept", _why_it_is_kept(v)) for v in report.kept),
        *((number, "retired", "no rule, no ref and no engine keeps it") for number in report.retired),
        *((v.number, "waits", _why_it_waits(v.until_ms, v.readers)) for v in report.waiting),
        *((v.number, "deleted", readable_size(v.nbytes)) for v in report.deleted),
        *((number, "given up", "its ranks were no longer active") for number in report.given_up),
        *((v.number, "swept", f"{counted(v.objects, 'object')} of no version") for v in report.swept),
    ]
    print_table(("VERSION", "OUTCOME", "WHY"), rows)
    for count, what in (
        (report.uploads_discarded, counted(report.uploads_discarded, "unfinished upload") + " discarded"),
        (report.leases_removed, counted(report.leases_removed, "lease") + " of dead readers removed"),
    ):
        if count:
            say(what)
    for problem in report.problems:
        say(problem, err=True)
    deleted = f"{counted(len(report.deleted), 'version')} deleted, {readable_size(report.deleted_bytes)}"
    summary = deleted if report.deleted else "no version deleted"
    if report.retired:
        summary += f"; {counted(len(report.retired), 'version')} retired now"
    if report.waiting:
        first = min(version.until_ms for version in report.waiting)
        summary += f"; {counted(len(report.waiting), 'version')} to be deleted, after {readable_time(first)}"
    say(f"{report.model}: {summary}{' (dry run: nothing was changed)' if report.dry_run else ''}")


def _why_it_is_kept(version: KeptVersion) -> str:
    engines = [f"served by {', '.join(version.engines)}"] if version.engines else []
    rules = ["no rule of retention is set" if rule == RULE_KEEP_EVERYTHING else rule for rule in version.rules]
    refs = [f"named by {', '.join(version.refs)}"] if version.refs else []
    return ", ".join([*rules, *refs, *engines])


def _why_it_waits(until_ms: int, readers: int) -> str:
    who = counted(readers, "reader") if readers else "the grace time"
    return f"{who}, until {readable_time(until_ms)} at least"


@click.command("warm", cls=Command)
@click.argument("model", shell_complete=completing.models)
@client_options
@click.pass_context
def warm_command(ctx: click.Context, model: str, server: str, as_json: bool) -> None:
    """Allocate memory ahead of a model's first pushes.

    The memory is free room within the service's memory budget; another model that needs it can take it. The exit code
    is 1 if there is less than successive pushes need.
    """
    with client_of(server) as client:
        memory = client.warm(model)
    if as_json:
        print_json(memory)
    else:
        say(
            f"{model}: memory for {memory.images} of {counted(memory.wanted, 'image')}, "
            f"{readable_size(memory.image_bytes)} each"
        )
        if memory.images < memory.wanted:
            say("there is no room for more: `weighbridge doctor` reports what limits it", err=True)
    ctx.exit(0 if memory.images >= memory.wanted else 1)


_IN_BYTES = (QUOTA_BYTES_PER_SECOND, QUOTA_STORED)


@click.command("usage", cls=Command)
@client_options
def usage_command(server: str, as_json: bool) -> None:
    """Show your limits, and how much of them is used.

    They are those that the service's policy gives your identity, and namespaces of which you may look at a model.
    """
    with client_of(server) as client:
        usage = client.usage()
    if as_json:
        print_json(usage)
    elif usage.quotas:
        print_table(("LIMIT", "OF", "USED", "AT MOST"), [_usage_row(quota) for quota in usage.quotas])
    else:
        say(f"{usage.identity}: no limits")


def _usage_row(quota: Quota) -> tuple[str, str, str, str]:
    used, limit = (
        readable_size(number) if quota.kind in _IN_BYTES else str(number) for number in (quota.used, quota.limit)
    )
    return quota.kind, quota.of, used, limit
