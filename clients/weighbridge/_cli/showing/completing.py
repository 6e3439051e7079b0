"""Shell completion: the command that prints its script, and the models, versions and refs that it offers.

A request to a service is made only while one of its names is being typed, with a short timeout. Without a response,
nothing is offered and no error is printed.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from weighbridge._cli.output import say
from weighbridge._cli.running import Command
from weighbridge._core.text.plain import plain
from weighbridge._transport.addresses import DEFAULT_SERVER, SERVER_VARIABLE

if TYPE_CHECKING:
    from weighbridge._clients.client import Client
    from weighbridge._core.resources import Version

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
PROGRAM = "weighbridge"
COMPLETE_VARIABLE = "_WEIGHBRIDGE_COMPLETE"
"""Variable that the scripts set: click then prints completions instead of running a command."""
_SECONDS = 1.5
"""Timeout of a service's response."""
_NEWEST = 30
"""Maximum number of versions that are offered."""
_SHELLS = ("bash", "zsh", "fish")
_WORD = re.compile(r"[A-Za-z0-9_@%+=:./-]+")


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(_SHELLS))
def completion_command(shell: str) -> None:
    """Print the script by which a shell completes commands.

    \b
    bash:  eval "$(weighbridge completion bash)"      in ~/.bashrc
    zsh:   eval "$(weighbridge completion zsh)"       in ~/.zshrc, after compinit
    fish:  weighbridge completion fish > ~/.config/fish/completions/weighbridge.fish

    Models and versions are those of the service at WEIGHBRIDGE_SERVER, or at --server if that is typed before them.
    """
    from weighbridge._cli import commands

    register()
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # these three are click's own
    say(*kind(commands, {}, PROGRAM, COMPLETE_VARIABLE).source().splitlines())


def register() -> None:
    """Make click use these classes for shell completion."""
    for kind in (BashWords, ZshWords, FishWords):
        add_completion_class(kind)


class Words(ShellComplete):
    """Completion by words that every shell takes literally. Shells would split, expand or execute other words, and
    another user may have chosen the name.
    """

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """Completions of the incomplete word."""
        return [
            CompletionItem(item.value, item.type, plain(item.help) if item.help else None)
            for item in super().get_completions(args, incomplete)
            if item.type != "plain" or _WORD.fullmatch(item.value)
        ]


class ZshWords(Words, ZshComplete):
    """Completion in zsh."""


class FishWords(Words, FishComplete):
    """Completion in fish."""


class BashWords(Words, BashComplete):
    """Completion in bash of words with ``@`` and ``:`` in them, at which it breaks words (``COMP_WORDBREAKS``).

    Bash passes the line as it was typed, and replaces only the part after the last break; so only that part of a
    completion is returned.
    """

    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' kind value answer
    answer=$(env COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    while IFS=, read -r kind value; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done <<< "$answer"
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Words before the one that is being typed, and that word."""
        line = os.environ.get("COMP_LINE", "")
        words = split_arg_string(line)[1:]
        if not words or line[-1].isspace():
            return words, ""
        return words[:-1], words[-1]

    def format_completion(self, item: CompletionItem[str]) -> str:
        """Format a completion as one line: its kind, and the text to insert."""
        _, typed = self.get_completion_args()
        return f"{item.type},{item.value[len(before_break(typed, os.environ.get('COMP_WORDBREAKS', ''))) :]}"


def before_break(word: str, breaks: str) -> str:
    """Part of a word, kept by bash: up to the last character at which it breaks words.

    Bash replaces an ``@`` together with the rest.
    """
    last = max((word.rfind(each) for each in breaks if each in "@:="), default=-1)
    return word[:last] if word[last : last + 1] == "@" else word[: last + 1]


def models(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Offers of an argument ``MODEL``."""
    found = _ask(ctx, lambda client: client.models()) or []
    return [
        CompletionItem(model.name, help=model.model_type or None)
        for model in found
        if model.name.startswith(incomplete)
    ]


def references(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Completions of an argument ``MODEL@VERSION``: models; once a model is named, its refs and newest versions."""
    return _ask(ctx, lambda client: _references(client, incomplete)) or []


def numbers(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Offers of an argument ``MODEL@NUMBER``: no refs, but versions that are being received."""
    return _ask(ctx, lambda client: _references(client, incomplete, by_number=True)) or []


def reference(metavar: str, callback: Callable[..., Any], offers: Callable[..., Any] = references) -> Callable[[F], F]:
    """The argument of a command that names a model, and a version if the command requires one.

    Args:
        metavar: its name in help.
        callback: parses it.
        offers: completes it.
    """
    return click.argument("reference", callback=callback, metavar=metavar, shell_complete=offers)


def refs(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Offers of a ref of the model that was typed before."""
    # before the value of an option, click has not yet assigned arguments to their parameters
    named = ctx.params.get("model") or getattr(ctx.params.get("reference"), "model", "") or "".join(ctx.args[:1])
    found = _ask(ctx, lambda client: client.refs(named)) if named else None
    return [
        CompletionItem(ref, help=f"version {number}")
        for ref, number in sorted((found or {}).items())
        if ref.startswith(incomplete)
    ]


def sides(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Completions of a comparison's sides: MODEL VERSION VERSION, or two of MODEL@VERSION and folders."""
    before = ctx.params.get("named") or ()
    if before and "@" not in before[0] and not os.path.isdir(before[0]):  # of what was typed
        model = before[0]
        offered = _ask(ctx, lambda client: _versions_of(client, model)) or []
        return [item for item in offered if item.value.startswith(incomplete)]
    plain = [] if before else models(ctx, _param, incomplete)
    return [*plain, *references(ctx, _param, incomplete), CompletionItem(incomplete, type="dir")]


def _references(client: Client, incomplete: str, *, by_number: bool = False) -> list[CompletionItem[str]]:
    model, at, version = incomplete.partition("@")
    if not at:
        meant = [each.name for each in client.models() if each.name.startswith(model)]
        if len(meant) != 1:
            return [CompletionItem(f"{name}@") for name in meant]
        model = meant[0]
    return [
        CompletionItem(f"{model}@{item.value}", help=item.help)
        for item in _versions_of(client, model, by_number=by_number)
        if item.value.startswith(version)
    ]


def _versions_of(client: Client, model: str, *, by_number: bool = False) -> list[CompletionItem[str]]:
    """Refs of a model and its newest versions."""
    listed = client.versions(model, include_invisible=by_number, limit=_NEWEST)
    return offered_versions({} if by_number else client.refs(model), listed)


def offered_versions(refs: dict[str, int], listed: Iterable[Version]) -> list[CompletionItem[str]]:
    """Offers of a version: refs, then numbers, the newest first."""
    return [
        *(CompletionItem(ref, help=f"version {number}") for ref, number in sorted(refs.items())),
        *(
            CompletionItem(str(version.number), help=f"step {version.step}, {version.state.value}")
            for version in listed
        ),
    ]


def _ask(ctx: click.Context, question: Callable[[Client], T]) -> T | None:
    """Response of a service; None after a timeout or an error: the user is typing, and could not act on the error."""
    from weighbridge._clients.client import (
        Client,  # importing this is slow on a busy machine, and does not count as the service's time
    )

    found: list[T] = []

    def ask() -> None:
        try:
            with Client(_server(ctx), retry_seconds=0.0, lane="grpc") as client:
                found.append(question(client))
        except Exception:  # noqa: S110  # the command itself will report the error
            pass

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS)
    return found[0] if found else None


def _server(ctx: click.Context) -> str:
    return str(ctx.params.get("server") or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER)
