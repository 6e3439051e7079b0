"""Base of all commands: common options, clients, exit codes and errors."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weighbridge._cli.output import print_error
from weighbridge._transport.addresses import DEFAULT_SERVER
from weighbridge.errors import FailedPrecondition, WeighbridgeError

if TYPE_CHECKING:
    from weighbridge._clients.client import Client
    from weighbridge._clients.engine import EngineClient
    from weighbridge._trainers.trainer import TrainerClient

F = TypeVar("F", bound=Callable[..., Any])

RETRY_SECONDS = 5.0
"""Time for which a command tries to reach the service: a user is waiting for the answer."""


def client_of(server: str) -> Client:
    """A client for a command."""
    from weighbridge._clients.client import Client

    return Client(server, retry_seconds=RETRY_SECONDS)


def engine_of(server: str) -> EngineClient:
    """A client for a command that pulls."""
    from weighbridge._clients.engine import EngineClient

    return EngineClient(server, retry_seconds=RETRY_SECONDS)


def trainer_of(server: str, run: str = "default") -> TrainerClient:
    """A client for a command that pushes."""
    from weighbridge._trainers.trainer import TrainerClient

    return TrainerClient(server, run=run, retry_seconds=RETRY_SECONDS)


class Command(click.Command):
    """A command whose errors are shown as Weighbridge describes them, and end it with exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except WeighbridgeError as error:
            problem = error
        except BrokenPipeError:
            raise  # not an error: the program that reads the output has closed the pipe
        except OSError as error:
            where = f"{error.filename}: " if error.filename is not None else ""
            allow = "let this user read and write there (ls -ld shows the permissions), or name another place"
            fix = allow if isinstance(error, PermissionError) else ""
            problem = FailedPrecondition(f"{where}{error.strerror or error}", fix=fix)
        print_error(problem, as_json=ctx.params.get("as_json", False))
        return ctx.exit(1)


def client_options(function: F) -> F:
    """Add ``--server`` and ``--json``, which commands have that talk to a service over gRPC."""
    server = click.option(
        "--server",
        envvar="WEIGHBRIDGE_SERVER",
        metavar="HOST:PORT[,...]",
        default=DEFAULT_SERVER,
        show_default=True,
        show_envvar=True,
        help="The service's gRPC address, or those of its replicas.",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, also for errors.")
    return server(as_json(function))


engine_key_option = click.option(
    "--engine-key",
    envvar="WEIGHBRIDGE_ENGINE_KEY",
    default="",
    help="SGLang's admin key, or vLLM's API key, if it has one.",
)
"""Option ``--engine-key`` of commands that talk to one kind of engine or the other."""


def end_tidily() -> None:
    """Let SIGTERM end the command as an error would, so that what it has begun is undone."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
