"""Command line, ``weighbridge``: its commands, and how the process ends.

May import: all of `weighbridge`; when a command runs, `weighbridge_service`, `weighbridge_storage` and
`weighbridge_demo`. A command's module is imported when the command is named, and what does the work (grpc, torch, rich)
when it runs, so that help comes at once.

- `looking`: models, versions, refs; verification.
- `tagging`: tags, and what is asked for protected ones.
- `pushing`: register, import, push.
- `pulling`: pull, restore, export.
- `keeping`: retention, collection, memory ahead of a push, limits and their use.
- `gating`: which versions are held and which refs are protected, and approval.
- `signing`: signatures of versions.
- `removing`: deletion of versions and models, abort of pushes.
- `showing`: what happens, as people are shown it: differences between versions, a service at work, proofs of engines,
  completion in shells.
- `following`: an agent beside a running engine, and the engines whose agents report.
- `relaying`: step folders between machines.
- `serving`: the service, and the demonstration.
- `identifying`: new tokens.
- `examining`: doctor.
- `doctor`: its readings, and its findings from them.
- `maintaining`: fsck of a store.
- `converting`: conversion of folders.
- `rank_files`: files of one rank's slices.
- `parsing`: arguments.
- `output`: tables, progress and JSON.
- `resuming`: what a long command has done before it was interrupted.
- `running`: a command's life: clients, errors, exit codes.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import sys
from collections.abc import Sequence

import click

from weighbridge import __version__
from weighbridge._cli.output import PlainFormatter, print_error, say
from weighbridge._core.text.suggestions import did_you_mean
from weighbridge._version import commit

_SECTIONS = {
    "Service": {"serve": "serving", "demo": "serving", "token": "identifying", "usage": "keeping"},
    "Weights in and out": {
        "register": "pushing",
        "import": "pushing",
        "push": "pushing",
        "pull": "pulling",
        "restore": "pulling",
        "export": "pulling",
        "convert": "converting",
        "warm": "keeping",
        "abort": "removing",
    },
    "What there is": {
        "models": "looking",
        "versions": "looking",
        "show": "looking",
        "diff": "showing.comparing",
        "watch": "looking",
        "top": "showing.top",
    },
    "Engines": {
        "follow": "following",
        "engines": "following",
        "prove": "showing.proving",
        "golden": "showing.golden",
        "adapters": "showing.engine_adapters",
        "relay": "relaying",
    },
    "Which version is served": {
        "tag": "tagging",
        "approve": "gating",
        "gate": "gating",
        "verify": "looking",
        "sign": "signing",
        "signatures": "signing",
    },
    "What is kept": {"retention": "keeping", "collect": "keeping", "delete": "removing"},
    "Trouble": {"doctor": "examining", "fsck": "maintaining"},
    "Shell": {"completion": "showing.completing"},
}
_MODULE_OF = {name: module for section in _SECTIONS.values() for name, module in section.items()}
_GUESSED = {
    "status": "top",
    "list": "models or versions",
    "ls": "models or versions",
    "rollback": "tag",
    "retag": "tag",
    "rm": "delete",
}
"""Commands that other tools have, and what they are called here."""
_BESIDES = 4
"""Columns of a help line besides a command's name and its description."""
_INTERRUPTED = 130
"""Exit code that shells report for a process that was interrupted: 128 plus SIGINT."""


class _LazyGroup(click.Group):
    """Commands that are imported when they are named; listed by section, in the order of the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULE_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _MODULE_OF.get(cmd_name)
        if module is None:
            return None
        found: click.Command = getattr(importlib.import_module(f"weighbridge._cli.{module}"), f"{cmd_name}_command")
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their descriptions, section by section."""
        wide = max(map(len, _MODULE_OF))
        room = formatter.width - wide - _BESIDES
        for title, section in _SECTIONS.items():
            with formatter.section(title):
                found = ((name, self.get_command(ctx, name)) for name in section)
                formatter.write_dl(
                    [(f"{name:<{wide}}", each.get_short_help_str(room)) for name, each in found if each is not None]
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            guessed = _GUESSED.get(str(args[0]))
            meant = f"; did you mean {guessed}?" if guessed else did_you_mean(str(args[0]), _MODULE_OF)
            raise click.UsageError(f"{error.message.rstrip('.')}{meant or '.'}", ctx) from None


def _print_version(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        say(f"weighbridge {__version__} (commit {commit() or 'unknown'})")
        ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and its commit, and exit.",
)
def commands() -> None:
    """Move model weights from the machines that train to the machines that serve.

    MODEL is namespace/name. A version is a number or a ref: acme/smol@17, acme/smol@latest (the newest in the object
    store), acme/smol@live (the newest that can be pulled), or a tag such as acme/smol@prod. latest and live pass by
    versions that are held.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0; 1 if the command failed; 2 if it was misspelt; 130 if it was interrupted.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our errors report what its C core would print
    if "_WEIGHBRIDGE_COMPLETE" in os.environ:
        from weighbridge._cli.showing import completing

        completing.register()
    arguments = sys.argv[1:] if argv is None else list(argv)
    if logging.lastResort is not None:  # warnings of clients, where no logging is configured
        logging.lastResort.setFormatter(PlainFormatter())
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except click.Abort:
        return _INTERRUPTED
    except BrokenPipeError:
        # the program that reads our output has closed the pipe; the interpreter must not try to flush the rest when it
        # ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(arguments: list[str]) -> int:
    try:
        code = commands.main(args=list(arguments), prog_name="weighbridge", standalone_mode=False)
    except click.ClickException as error:
        # a usage error comes before parsing, so --json is looked for in the raw arguments
        if "--json" in itertools.takewhile(lambda argument: argument != "--", arguments):
            _print_as_json(error)
        else:
            error.show()
        return error.exit_code
    return code if isinstance(code, int) else 0


def _print_as_json(error: click.ClickException) -> None:
    from weighbridge.errors import InvalidArgument

    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context is not None else "weighbridge"
    print_error(InvalidArgument(error.format_message(), fix=f"see `{command} --help`"), as_json=True)
