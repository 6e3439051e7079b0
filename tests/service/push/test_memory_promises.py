"""A real service promises only the memory that is there, queues or refuses pushes with the figures, and doctor explains
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from click.testing import CliRunner

from tests.support.forked import ForkedPython
from tests.support.raw_clients import RawClient, TinyModel, tiny_folder, whole_layout
from tests.support.services import running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._cli import commands
from weighbridge._clients.push_handle import PushHandle
from weighbridge._core.resources import VersionState
from weighbridge.errors import ResourceExhausted

FIRST, SECOND = "acme/first", "acme/second"
HIDDEN_SIZE = 256
IMAGE_BYTES = 630_784
"""Of a version of `tiny_folder` with that size: its one file, in whole pages."""
MIB = 1 << 20
_READY = re.compile(r"weighbridge serving gRPC on (\S+), HTTP on (http://\S+), store .*\n")


class Service:
    """``weighbridge serve`` in a process of its own.

    Args:
        store: its store.
        options: of the command line.
        group: a control group that it runs in; all of its memory is charged to that, so it is forked from no other
            process.
        program: what Python runs.
    """

    process: ForkedPython | subprocess.Popen[str]

    def __init__(
        self,
        store: Path,
        *options: str,
        group: Path | None = None,
        program: Sequence[str] = ("-m", "weighbridge"),
    ) -> None:
        self.log = store.parent / "log"
        command = [*program, "serve", "--store", str(store)]
        command += ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--local-socket", "off", *options]
        with self.log.open("w") as log:
            if group is None:
                self.process = ForkedPython(*command, stderr=log.fileno())
            else:
                enter = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
                self.process = subprocess.Popen(
                    ["sh", "-c", enter, "sh", sys.executable, "-W", "ignore", *command],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = _READY.fullmatch(line)
        assert found, line + self.log.read_text()
        self.grpc, self.url = found.groups()

    def memory(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/v1/memory").json()
        return found

    def doctor(self) -> tuple[int, dict[str, dict[str, str]]]:
        """The exit code of ``weighbridge doctor``, and what it found, by name."""
        done = CliRunner().invoke(commands, ["doctor", "--http", self.url, "--json"])
        return done.exit_code, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


@contextlib.contextmanager
def serving(store: Path, *options: str, group: Path | None = None) -> Iterator[Service]:
    service = Service(store, *options, group=group)
    with service.process:
        try:
            yield service
            assert service.process.poll() is None
        finally:
            service.process.kill()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("source") / "model", hidden_size=HIDDEN_SIZE)


def begin(client: RawClient, model: str, source: TinyModel) -> int:
    """Open a version and declare its tensors, so that it gets its image, but send nothing; its number."""
    number = client.open(model, step=99)
    client.declare(model, number, whole_layout(source.arrays))
    return number


def test_a_second_push_queues_with_figures_and_goes_on_when_the_first_is_done(
    tmp_path: Path, source: TinyModel
) -> None:
    options = ["--memory-budget", str(2 * IMAGE_BYTES), "--spill-budget", "off"]
    with (
        serving(tmp_path / "store", *options) as service,
        TrainerClient(service.grpc) as trainer,
        RawClient(service.grpc) as raw,
    ):
        for model in (FIRST, SECOND):
            trainer.register_files(model, source.files)
        trainer.push_folder(FIRST, source.folder).wait(timeout=30)
        held = begin(raw, FIRST, source)
        pushed: list[PushHandle] = []
        pushing = threading.Thread(target=lambda: pushed.append(trainer.push_folder(SECOND, source.folder)))
        pushing.start()
        eventually(lambda: service.memory()["waiting"])

        found = service.memory()
        [waiting] = found["waiting"]
        assert (waiting["model"], waiting["number"], waiting["nbytes"]) == (SECOND, 1, IMAGE_BYTES)
        assert "630.8 kB do not fit: images hold 1.3 MB of memory (budget: 1.3 MB)" in waiting["reason"]
        assert "none may go to disk" in waiting["reason"]
        held_by = {(each["model"], each["number"], each["use"], each["nbytes"]) for each in found["holdings"]}
        assert held_by == {(FIRST, 1, "ready", IMAGE_BYTES), (FIRST, held, "receiving", IMAGE_BYTES)}
        assert found["memory"]["in_use"] == found["memory"]["budget"] == 2 * IMAGE_BYTES
        assert "weighbridge_images_waiting 1.0" in httpx.get(f"{service.url}/metrics").text
        code, checks = service.doctor()
        assert code == 0
        assert checks["images"]["status"] == "warn"
        assert f"{SECOND}@1 has waited" in checks["images"]["what"]
        assert f"{FIRST}@{held}: 630.8 kB of memory, being received" in checks["images"]["what"]
        # the other model's two images are not there for this one
        assert checks[f"push of {SECOND}"]["status"] == "warn"
        assert "--memory-budget" in checks[f"push of {SECOND}"]["fix"]
        assert pushing.is_alive()

        trainer.abort(FIRST, held)
        pushing.join(30)
        assert pushed[0].wait(timeout=30).state is VersionState.DURABLE
        assert service.memory()["waiting"] == []
        assert service.doctor()[1]["images"]["status"] == "ok"
        assert f"{SECOND}@1 waits for an image: 630.8 kB do not fit" in service.log.read_text()


def test_what_can_never_fit_is_refused_at_once_with_figures(tmp_path: Path, source: TinyModel) -> None:
    options = ["--memory-budget", str(IMAGE_BYTES - 1), "--spill-budget", "off"]
    with serving(tmp_path / "store", *options) as service, TrainerClient(service.grpc) as trainer:
        trainer.register_files(FIRST, source.files)
        started = time.monotonic()
        with pytest.raises(ResourceExhausted, match="acme/first@1 can never be received here") as caught:
            trainer.push_folder(FIRST, source.folder).wait(timeout=30)
        assert time.monotonic() - started < 55  # and not the 60 s for which a push waits
        assert "630.8 kB do not fit: images hold 0 B of memory (budget: 630.8 kB)" in caught.value.message
        assert "serve with --memory-budget 1MiB or more" in caught.value.fix
        assert "--spill-budget" in caught.value.fix
        code, checks = service.doctor()
        assert code == 1
        assert checks[f"push of {FIRST}"]["status"] == "fail"


def test_a_push_that_waits_too_long_says_who_has_the_memory(tmp_path: Path, source: TinyModel) -> None:
    settings: dict[str, Any] = {"memory_budget": IMAGE_BYTES, "spill_budget": 0, "image_wait": 0.3}
    with (
        running_service(tmp_path / "store", **settings) as running,
        TrainerClient(running.address, retry_seconds=1.0) as trainer,
        EngineClient(running.address) as engine,
    ):
        trainer.register_files(FIRST, source.files)
        trainer.push_folder(FIRST, source.folder).wait(timeout=30)
        with pytest.raises(ResourceExhausted, match="acme/first@2 found no room within 0 s") as caught:
            trainer.push_folder(FIRST, source.folder).wait(timeout=30)
        [detail] = caught.value.details
        assert detail.startswith("acme/first@1: 630.8 kB of memory, ready; kept until it is durable and a newer")
        assert "serve with --memory-budget 2MiB or more" in caught.value.fix
        assert engine.version(FIRST, "live").number == 1


@contextlib.contextmanager
def limited_group(nbytes: int) -> Iterator[Path]:
    """A control group of a limited size; the test is skipped where none can be made."""
    for parent, file in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(parent) / f"weighbridge-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / file).write_text(str(nbytes))
            except OSError:
                group.rmdir()
                continue
            break
    else:
        pytest.skip("no control group can be made")
    try:
        yield group
    finally:
        deadline = time.monotonic() + 10
        while group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # a process that has ended leaves it after a moment
                group.rmdir()
            time.sleep(0.05)


def test_a_budget_beyond_a_real_limit_takes_no_memory_that_is_not_there(tmp_path: Path) -> None:
    large = tiny_folder(tmp_path / "large", hidden_size=30 * 1024)  # 74 MB
    with (
        limited_group(1400 * MIB) as group,  # 1,280 MiB of it are for the service itself
        serving(tmp_path / "store", "--memory-budget", "8GiB", group=group) as service,
        TrainerClient(service.grpc) as trainer,
    ):
        for model in (FIRST, SECOND):
            trainer.register_files(model, large.files)
            trainer.push_folder(model, large.folder).wait(timeout=60)
        held = service.memory()["holdings"]
        assert [(each["model"], each["in_memory"]) for each in held] == [(FIRST, True), (SECOND, False)]
        code, checks = service.doctor()
        assert code == 0
        assert f"control group /{group.name} " in checks["memory limits"]["what"]
        assert checks["memory budget"]["status"] == "warn"
        assert (
            "8.6 GB, as set by --memory-budget; the machine could give images 125.8 MB at most"
            in (checks["memory budget"]["what"])
        )
        assert "memory budget: 8.6 GB" in service.log.read_text()  # said at the start already


def test_the_budget_of_a_container_is_found_from_its_limit(tmp_path: Path) -> None:
    with (
        limited_group(1800 * MIB) as group,
        serving(tmp_path / "store", group=group) as service,
    ):
        found = service.memory()
        # 1,800 less 1,280 for the service, and a little for what else the kernel charges
        assert 480 * MIB < found["budget"] < 520 * MIB
        assert not found["budget_chosen"]
        assert f"control group /{group.name} left at the start" in service.doctor()[1]["memory budget"]["what"]


def test_without_a_service_doctor_says_what_the_machine_allows_one(tmp_path: Path) -> None:
    address = "127.0.0.1:1"  # no server listens there
    scratch = ["--scratch", str(tmp_path), "--memory-budget", "900TiB"]
    result = CliRunner().invoke(commands, ["doctor", "--http", address, *scratch])
    assert result.exit_code == 1  # it was asked for that service
    lines = result.stdout.splitlines()[1:]
    assert re.match(rf"fail  service +http://{address}/v1/checks cannot be reached", lines[0])
    assert re.match(r" +what to do: is the service running", lines[1])
    assert re.match(r"warn  memory budget +989\.6 TB, as set by --memory-budget; the machine could give", lines[3])
    assert re.match(rf"ok    scratch folder +{tmp_path} has ", lines[5])
    for wrong in ("ftp://x", "file:///etc/passwd"):
        result = CliRunner().invoke(commands, ["doctor", "--http", wrong, "--json"])
        assert result.exit_code == 1
        assert json.loads(result.stdout)["checks"][0]["what"] == f"'{wrong}' is not an HTTP address"


def test_what_answers_and_is_no_service_is_said_to_be_none(tmp_path: Path, source: TinyModel) -> None:
    with running_service(tmp_path / "store") as running:  # its gRPC port
        result = CliRunner().invoke(commands, ["doctor", "--http", running.address, "--scratch", str(tmp_path)])
    assert result.exit_code == 1
    assert "fail  service" in result.stdout
