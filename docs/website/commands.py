"""Page of the command line: what each command's ``--help`` says."""

from __future__ import annotations

from collections.abc import Iterator

import click

_WIDTH = 100
"""Characters in a line, as on a wide terminal."""


def page() -> str:
    """The page, as Markdown."""
    from weighbridge._cli import commands

    return "\n".join(_lines(commands)) + "\n"


def _lines(group: click.Group) -> Iterator[str]:
    name = "weighbridge"
    whole = click.Context(group, info_name=name, terminal_width=_WIDTH, **group.context_settings)
    yield from ("# Command line", "", *_fenced(whole))
    for each in group.list_commands(whole):
        command = group.get_command(whole, each)
        if command is not None and not command.hidden:
            asked = click.Context(command, whole, each, terminal_width=_WIDTH, **command.context_settings)
            yield from ("", f"## {each}", "", *_fenced(asked))


def _fenced(asked: click.Context) -> Iterator[str]:
    yield from ("```text", asked.get_help(), "```")
