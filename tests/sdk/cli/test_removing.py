"""Commands that take something away or look for what is not there: is nothing lost by a slip, and is the slip named?"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from tests.sdk.cli.test_cli import process
from tests.support.ports import reserved_port
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient, VersionState
from weighbridge._cli import commands
from weighbridge._cli.removing import delete_command
from weighbridge.errors import FailedPrecondition

MODEL = "acme/tiny"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture
def version(service: RunningService, source: TinyModel) -> int:
    """A durable version of the model, tagged as prod."""
    with TrainerClient(service.address) as trainer:
        number = trainer.import_folder(MODEL, source.folder).wait(timeout=60).number
        trainer.set_ref(MODEL, "prod", number)
        return number


def run(service: RunningService | None, *line: object, **options: str) -> Result:
    server = ["--server", service.address] if service else []
    return CliRunner().invoke(commands, [*map(str, line), *server], **options)  # type: ignore[arg-type]


def test_a_model_is_deleted_once_it_is_confirmed(service: RunningService, version: int) -> None:
    refused = run(service, "delete", MODEL)
    assert refused.exit_code == 2
    assert f"this deletes {MODEL} with all of its versions: confirm it with --yes" in refused.stderr
    assert run(service, "show", MODEL).exit_code == 0
    done = run(service, "delete", MODEL, "--yes", "--json")
    assert (done.exit_code, json.loads(done.stdout)["model"]) == (0, MODEL)
    gone = run(service, "versions", MODEL)
    assert (gone.exit_code, gone.stderr.splitlines()[0]) == (1, f"Error: there is no model {MODEL}")
    assert run(service, "models", "--json").stdout == "[]\n"


def test_whoever_sits_at_a_terminal_types_the_name_again(
    service: RunningService, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weighbridge._cli.removing._at_a_terminal", lambda: True)
    line = [MODEL, "--server", service.address]
    wrong = CliRunner().invoke(delete_command, line, input="acme/other\n")
    assert wrong.exit_code == 1
    assert run(service, "show", MODEL).exit_code == 0
    right = CliRunner().invoke(delete_command, line, input=f"{MODEL}\n")
    assert right.exit_code == 0
    assert f"{MODEL}: 1 version of" in right.stdout
    assert right.stdout.endswith(f"{MODEL}: deleted, with 1 version\n")


def test_a_version_is_given_up_by_hand_and_its_model_deleted_only_then(service: RunningService, version: int) -> None:
    number = service.service.intake.opener.open_version(
        MODEL, step=9, run="r", ranks=2, request_id="by hand", client_id="c"
    ).number
    refused = run(service, "delete", MODEL, "--yes")
    assert (refused.exit_code, f"being received: {number}" in refused.stderr) == (1, True)
    assert "waits for ranks 0-1 to declare" in run(service, "versions", MODEL, "--all").stdout
    done = run(service, "abort", f"{MODEL}@{number}", "--json")
    assert (done.exit_code, json.loads(done.stdout)["state"]) == (0, VersionState.ABORTED.value)
    for line, code in ((f"{MODEL}@latest", 2), (MODEL, 2), (f"{MODEL}@999", 1), (f"{MODEL}@{version}", 1)):
        assert run(service, "abort", line).exit_code == code, line
    assert run(service, "delete", MODEL, "--yes").exit_code == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (("show", "acme/tiyn"), "there is no model acme/tiyn; did you mean acme/tiny?"),
        (("versions", "acme/tiyn"), "there is no model acme/tiyn; did you mean acme/tiny?"),
        (("tag", "acme/tiny2@1", "x"), "there is no model acme/tiny2; did you mean acme/tiny?"),
        (("retention", "acmee/tiny"), "there is no model acmee/tiny; did you mean acme/tiny?"),
        (
            ("pull", "acme/tinny@latest", "--out", "x"),
            "there is no model acme/tinny; did you mean acme/tiny?",
        ),
        (("show", "acme/tiyn"), "What to do: write acme/tiny, or register it: "),
        (("show", f"{MODEL}@prd"), "no version or ref 'prd'; did you mean prod?"),
        (("tag", f"{MODEL}@lates", "x"), "no version or ref 'lates'; did you mean latest?"),
        (
            ("pull", f"{MODEL}@latest", "--out", "x", "--tp-size", "3", "--tp-rank", "0"),
            "tensor-parallel size of 1, 2, 4",
        ),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(
    service: RunningService, version: int, line: tuple[str, ...], says: str
) -> None:
    found = run(service, *line)
    assert (found.exit_code, says in found.stderr) == (1, True), found.stderr


def test_a_command_that_does_not_exist_is_answered_with_the_one_that_was_meant(
    service: RunningService,
) -> None:
    found = run(service, "vrsions", MODEL)
    assert (found.exit_code, "'vrsions'; did you mean versions?" in found.stderr) == (2, True), found.stderr


@pytest.mark.parametrize(
    ("guess", "meant"),
    [
        ("status", "top"),
        ("list", "models or versions"),
        ("ls", "models or versions"),
        ("rollback", "tag"),
        ("retag", "tag"),
        ("rm", "delete"),
    ],
)
def test_a_command_of_other_tools_is_answered_with_what_it_is_called_here(guess: str, meant: str) -> None:
    found = run(None, guess)
    assert (found.exit_code, f"'{guess}'; did you mean {meant}?" in found.stderr) == (2, True), found.stderr
    assert all(name in commands.list_commands(None) for name in meant.split(" or "))  # type: ignore[attr-defined, arg-type]


def test_a_model_without_versions_says_that_the_first_push_makes_one(
    service: RunningService, source: TinyModel
) -> None:
    with TrainerClient(service.address) as trainer:
        trainer.register_files("acme/new", source.files)
    for ref in ("latest", "prod"):
        found = run(service, "pull", f"acme/new@{ref}", "--out", "x")
        assert f"acme/new has no versions yet, so there is no '{ref}'" in found.stderr
        assert "What to do: push: the first push makes one" in found.stderr
        assert "none yet" not in found.stderr


def test_a_version_that_a_tag_names_is_deleted_by_the_commands_that_the_refusal_says(
    service: RunningService, version: int, source: TinyModel
) -> None:
    with TrainerClient(service.address) as trainer:
        trainer.push_folder(MODEL, source.folder, step=2).wait(timeout=60)
    refused = run(service, "delete", f"{MODEL}@{version}")
    command = refused.stderr.partition("delete it: weighbridge ")[2].strip()
    assert command == f"tag {MODEL} prod --delete", refused.stderr
    assert run(service, *command.split()).exit_code == 0
    assert run(service, "delete", f"{MODEL}@{version}").exit_code == 0


def test_a_step_that_one_process_pushes_twice_is_refused_by_step_run_and_version(
    service: RunningService, version: int, source: TinyModel
) -> None:
    state = {name: torch.from_numpy(array) for name, array in source.arrays.items()}
    with TrainerClient(service.address) as trainer:
        number = trainer.push_state_dict(MODEL, state, step=777, rank=0, world_size=1).wait(timeout=60).number
        with pytest.raises(FailedPrecondition) as caught:
            trainer.push_state_dict(MODEL, state, step=777, rank=0, world_size=1)
    assert f"step 777 of run default has been pushed already, as {MODEL}@{number}" in str(caught.value)
    assert "sealed" not in str(caught.value)


def test_a_list_of_no_engines_says_what_reports_them(service: RunningService) -> None:
    found = run(service, "engines")
    assert "`weighbridge follow`), or `EngineReporter`" in found.stderr


def test_a_watch_of_a_ref_that_is_not_there_says_so_and_waits(service: RunningService, version: int) -> None:
    with process("watch", MODEL, "--ref", "prd", "--count", "1", "--server", service.address) as watching:
        assert watching.stderr is not None
        assert watching.stderr.readline() == (
            f"{MODEL} has no ref 'prd'; did you mean prod? Waiting until there is one.\n"
        )
        with TrainerClient(service.address) as trainer:
            trainer.set_ref(MODEL, "prd", version)
        assert watching.wait(30) == 0


@pytest.mark.parametrize("command", [("watch",), ("follow", "--url", "http://127.0.0.1:9")])
def test_a_model_is_watched_at_the_ref_that_is_named_with_it_or_besides(
    service: RunningService, version: int, command: tuple[str, ...]
) -> None:
    two = run(service, *command, f"{MODEL}@prod", "--ref", "live")
    assert (two.exit_code, f"{MODEL}@prod names prod, and --ref names live" in two.stderr) == (2, True)
    one = run(service, *command, f"{MODEL}@{version}")
    assert (one.exit_code, f"{MODEL}@{version} is one version" in one.stderr) == (2, True)


@pytest.mark.parametrize("line", [(f"{MODEL}@prod",), (f"{MODEL}@prod", "--ref", "prod"), (MODEL,)])
def test_a_watch_of_a_model_at_a_ref_brings_its_versions(
    service: RunningService, version: int, line: tuple[str, ...]
) -> None:
    found = run(service, "watch", *line, "--count", "1", "--json")
    assert (found.exit_code, json.loads(found.stdout)["number"]) == (0, version), found.stderr


def test_a_watch_of_a_model_that_is_not_registered_says_so_and_waits(
    service: RunningService, version: int, source: TinyModel
) -> None:
    with process("watch", "acme/tny", "--count", "1", "--server", service.address) as watching:
        assert watching.stderr is not None
        assert watching.stderr.readline() == (
            f"there is no model acme/tny; did you mean {MODEL}? Waiting until there is one.\n"
        )
        with TrainerClient(service.address) as trainer:
            trainer.import_folder("acme/tny", source.folder).wait(timeout=60)
        assert watching.wait(30) == 0


def test_an_agent_that_follows_a_ref_that_is_not_there_says_so(service: RunningService, version: int) -> None:
    engine = ("--engine", "vllm", "--url", f"http://127.0.0.1:{reserved_port()}")
    with process("follow", MODEL, "--ref", "prodd", *engine, "--server", service.address) as following:
        assert following.stderr is not None
        assert following.stderr.readline().startswith(f"{MODEL} has no ref 'prodd'; did you mean prod?")


@pytest.mark.parametrize(
    ("server", "says", "do"),
    [
        ("http://127.0.0.1:50051", "is a URL, and the service is reached over gRPC", "such as 127.0.0.1:50051"),
        ("127.0.0.1", "has no port between 1 and 65535", "such as 127.0.0.1:50051"),
    ],
)
def test_an_address_that_cannot_be_is_refused_with_what_to_write(server: str, says: str, do: str) -> None:
    found = run(None, "models", "--server", server)
    assert found.exit_code == 1
    assert says in found.stderr
    assert do in found.stderr


def test_an_http_port_is_told_from_one_that_nobody_listens_at() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        found = run(None, "models", "--server", f"127.0.0.1:{web.server_port}")
        web.shutdown()
    assert "speaks HTTP, not gRPC" in found.stderr
    assert "gRPC port" in found.stderr
    assert "cannot be reached" in run(None, "models", "--server", f"127.0.0.1:{reserved_port()}").stderr


def test_doctor_says_which_service_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHBRIDGE_HTTP", raising=False)
    monkeypatch.setenv("WEIGHBRIDGE_SERVER", "nobody.invalid:50051")
    found = CliRunner().invoke(commands, ["doctor", "--scratch", str(tmp_path), "--json"])
    (service, *_) = json.loads(found.stdout)["checks"]
    assert service["status"] == "fail"
    assert "nobody.invalid:50051" in service["what"]
    assert service["fix"]
