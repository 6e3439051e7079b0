"""Completion in real shells, at a terminal: what is typed, Tab, and the line that is there then."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
import torch
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from tests.support.services import RunningService, running_service
from tests.support.terminals import Terminal
from tests.support.waiting import eventually
from weighbridge import Model, TrainerClient, Version, VersionState
from weighbridge._cli import commands
from weighbridge._cli.showing import completing
from weighbridge._cli.showing.completing import (
    BashWords,
    FishWords,
    ZshWords,
    before_break,
    models,
    offered_versions,
)

MODEL = "acme/tiny"
BIN = Path(sys.executable).parent
PREPARED = {
    "bash": 'eval "$(weighbridge completion bash)"',
    "zsh": 'autoload -Uz compinit; compinit -u -D; eval "$(weighbridge completion zsh)"',
    "fish": "weighbridge completion fish | source",
}
LINES = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"], "fish": ["--no-config", "-i"]}
SHELLS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
    for name in PREPARED
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "config.json").write_text("{}")
    module = torch.nn.Linear(8, 8)
    with running_service(folder / "store") as running, TrainerClient(running.address) as trainer:
        trainer.register_model(MODEL, folder, tensors=module, weight_map=False)
        trainer.register_model("other/one", folder, tensors=module, weight_map=False)
        optimizer = torch.optim.AdamW(module.parameters())
        for step in (1, 2):
            handle = trainer.push_state_dict(MODEL, module, step=step, optimizer=optimizer)
            handle.wait(timeout=60)
            assert handle.training is not None
            handle.training.wait(timeout=60)
        trainer.set_ref(MODEL, "prod", 1)
        yield running


class Shell(Terminal):
    """A shell in which the script of completion is loaded."""

    def __init__(self, shell: str, server: str, home: Path) -> None:
        environment = {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(home),
            "WEIGHBRIDGE_SERVER": server,
        }
        super().__init__([shell, *LINES[shell]], environment)
        self.said(f"{PREPARED[shell]}; echo pre''pared\n", "prepared")

    def completed(self, typed: str) -> str:
        """The line that is there after Tab."""
        # the line becomes the argument of echo, by going to its beginning; what comes behind it is cut off
        shown = self.said(f"{typed}\t\x01echo be''gin: \x05 :end\n", ":end\r\n")
        while "begin: " not in shown:
            shown += self.said("", "\n")
        return shown.rpartition("begin: ")[2].partition(" :end")[0].strip()


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_models_versions_and_refs_are_completed(service: RunningService, tmp_path: Path, shell: str) -> None:
    lines = {
        "weighbridge compl": "weighbridge completion",
        "weighbridge versions acme": f"weighbridge versions {MODEL}",
        f"weighbridge show {MODEL}@pr": f"weighbridge show {MODEL}@prod",
        "weighbridge show acme": f"weighbridge show {MODEL}@",
        f"weighbridge verify {MODEL}:training@la": f"weighbridge verify {MODEL}:training@latest",
        f"weighbridge abort {MODEL}@2": f"weighbridge abort {MODEL}@2",
        f"weighbridge watch {MODEL} --ref pr": f"weighbridge watch {MODEL} --ref prod",
        f"weighbridge diff {MODEL} pr": f"weighbridge diff {MODEL} prod",
        f"weighbridge diff {MODEL}@2 {MODEL}@pr": f"weighbridge diff {MODEL}@2 {MODEL}@prod",
        "weighbridge serve --memory-bud": "weighbridge serve --memory-budget",
        f"weighbridge tag {MODEL}@2 pr": f"weighbridge tag {MODEL}@2 prod",
    }
    with Shell(shell, service.address, tmp_path) as opened:
        for typed, wanted in lines.items():
            # of a service that is late nothing is offered: a user presses the key again
            eventually(lambda typed=typed, wanted=wanted: opened.completed(typed) == wanted)  # type: ignore[misc]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_folder_whose_name_is_a_command_is_not_executed(tmp_path: Path, shell: str) -> None:
    (tmp_path / "side $(touch run)").mkdir()
    with Shell(shell, "127.0.0.1:1", tmp_path) as opened:
        opened.said(f"cd {tmp_path}; echo the''re\n", "there")
        assert opened.completed("weighbridge diff si") == "weighbridge diff side $(touch run)/"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [BashWords, ZshWords, FishWords])
@pytest.mark.parametrize(
    "name", ["a/$(touch run)", "a/`x`", "a/b c", "a/b;c", "a/'b", 'a/"b', "a/b\nplain,x", "a/\x1b[2J", "a/~|&<>", "a/é", "a/*"]
)  # fmt: skip
def test_names_that_a_shell_would_not_take_as_they_are_are_not_offered(
    monkeypatch: pytest.MonkeyPatch, kind: type[ShellComplete], name: str
) -> None:
    found = [Model(each, "qwen3\n\x1b[2J", "BF16", 1, 1) for each in (name, MODEL)]
    monkeypatch.setattr(completing, "_ask", lambda _context, _question: found)
    offered = kind(commands, {}, "weighbridge", "_X").get_completions(["versions"], "a")
    assert [each.value for each in offered] == [MODEL]
    assert offered[0].help is None or offered[0].help.isprintable()


@contextmanager
def silent_server() -> Iterator[str]:
    """An address that takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("shell", SHELLS)
def test_without_an_answer_nothing_is_offered_and_nothing_said(tmp_path: Path, shell: str) -> None:
    with silent_server() as silent:
        for server in ("127.0.0.1:1", silent):
            with Shell(shell, server, tmp_path) as opened:
                typed = "weighbridge show acme/ti"
                assert opened.completed(typed) == typed
                assert "rror" not in opened.shown
                assert "Traceback" not in opened.shown


def test_a_service_that_does_not_answer_is_not_waited_for() -> None:
    with silent_server() as silent:
        context = click.Context(commands)
        context.params["server"] = silent
        begun = time.monotonic()
        assert models(context, click.Argument(["model"]), "ac") == []
        assert time.monotonic() - begun < 50, "not the minute for which other calls are tried again"


def test_another_shell_is_refused() -> None:
    result = CliRunner().invoke(commands, ["completion", "tcsh"])
    assert result.exit_code == 2
    assert "bash" in result.output


def test_bash_replaces_what_stands_behind_the_last_break() -> None:
    breaks = " \t\n\"'@><=;|&(:"
    assert before_break("acme/smol@1", breaks) == "acme/smol"
    assert before_break("acme/smol:training@la", breaks) == "acme/smol:training"
    assert before_break("acme/smol:tr", breaks) == "acme/smol:"
    assert before_break("acme/smol:training@la", " \t\n:") == "acme/smol:"
    assert before_break("acme/smol@1", " \t\n") == ""


def test_refs_are_offered_before_numbers_and_say_what_they_name() -> None:
    listed = [Version("acme/smol", number, VersionState.DURABLE, step=number * 10) for number in (9, 8)]
    assert [(each.value, each.help) for each in offered_versions({"prod": 8, "live": 9}, listed)] == [
        ("live", "version 9"),
        ("prod", "version 8"),
        ("9", "step 90, durable"),
        ("8", "step 80, durable"),
    ]
