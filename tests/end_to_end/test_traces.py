"""One push, one trace: trainers, service, agent and engine are processes of their own that send their spans to a
collector.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.support.collectors import Seen, collector, listed, sent_to
from tests.support.forked import ForkedPython
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY
from tests.support.services import service_process
from weighbridge import Credentials, EngineClient, TrainerClient
from weighbridge_service.access import tokens

pytestmark = [pytest.mark.process, pytest.mark.slow]

MODEL = "acme/tiny"
TOKEN = tokens.new_token()
"""Of everybody here. No span has it."""
SHOWN = {"WEIGHBRIDGE_TOKEN": TOKEN}
_READY = re.compile(r"weighbridge serving gRPC on (\S+), HTTP on (\S+), store .*\n")
TRAINER, SERVICE = "weighbridge-client", "weighbridge"
OF_SERVICE = {
    "receive",
    "plan",
    "claim",
    "ready",
    "confirm",
    "durable",
    "verify",
    "digest",
    "upload",
    "publish",
}
OF_TRAINER = {"push", "open", "declare", "copy", "seal"}


def without_opentelemetry() -> dict[str, str]:
    """The environment of these tests without variables of OpenTelemetry's."""
    return {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}


def start(*arguments: object, env: Mapping[str, str]) -> ForkedPython:
    """A process that runs a module, in an environment without variables of OpenTelemetry's but these."""
    return ForkedPython("-m", *map(str, arguments), environment={**without_opentelemetry(), **env})


@contextmanager
def served(store: Path | str, source: TinyModel, *options: object, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The gRPC and the HTTP address of a service's process where the model is registered."""
    environment = {**without_opentelemetry(), **env}
    with service_process(store, "--memory-budget", "1GiB", *options, environment=environment) as service:
        with TrainerClient(service.address, credentials=Credentials(token=TOKEN)) as trainer:
            trainer.register_files(MODEL, source.files)
        yield service.address, service.url


def push(
    server: str,
    source: TinyModel,
    env: Mapping[str, str],
    *,
    ranks: int = 1,
    lane: str = "grpc",
    step: int = 1,
) -> int:
    """Push by so many processes; the version's number."""
    with ExitStack() as stack:
        line = ("tests.support.traced_processes", "push", server, MODEL, source.folder)
        trainers = [stack.enter_context(start(*line, rank, ranks, step, lane, env=env)) for rank in range(ranks)]
        said = [trainer.communicate(timeout=120)[0] for trainer in trainers]
        assert [trainer.returncode for trainer in trainers] == [0] * ranks
    (number,) = {*said}
    return int(number)


def follow(server: str, env: Mapping[str, str], lane: str) -> str:
    """Let an agent take an engine to the latest version; what it says."""
    with start("tests.support.traced_processes", "engine", server, MODEL, lane, env=env) as engine:
        url = engine.stdout.readline().strip().strip('"')
        line = ("weighbridge", "follow", MODEL, "--url", url, "--server", server, "--count", 1)
        with start(*line, env=env) as agent:
            said, _ = agent.communicate(timeout=120)
        assert agent.returncode == 0, said
        engine.communicate(timeout=60)
    return said


def check_connected(spans: Sequence[Seen]) -> None:
    """All spans are of one trace with one root, every parent is there, and none begins before its parent; but for
    ranks, which begin by themselves.
    """
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)
    assert len({span.trace for span in spans}) == 1
    roots = [span for span in spans if not span.parent]
    assert [root.name for root in roots] == ["weighbridge.push"]
    for span in spans:
        if span.parent:
            assert span.parent in by_id, f"{span.name} has no parent"
            assert span.name == "weighbridge.push" or by_id[span.parent].start <= span.start, (
                f"{span.name} begins before {by_id[span.parent].name}"
            )


def short(names: Iterable[str]) -> set[str]:
    return {name.removeprefix("weighbridge.") for name in names}


@pytest.mark.parametrize(
    ("lane", "bulk", "on_s3"), [("grpc", "auto", True), ("grpc", "off", False), ("local", "off", False)]
)
def test_a_push_makes_one_connected_trace_from_the_trainers_to_an_engine_that_comes_later_without_a_secret(
    tmp_path: Path, request: pytest.FixtureRequest, lane: str, bulk: str, on_s3: bool
) -> None:
    source = tiny_folder(tmp_path / "hf")
    store = request.getfixturevalue("seaweed").location() if on_s3 else str(tmp_path / "store")
    policy = tmp_path / "policy.toml"
    policy.write_text(
        f'[[identity]]\nname = "me"\nmay = ["admin"]\ntokens = ["{tokens.digest(TOKEN)}"]\nusers = [{os.getuid()}]\n'
    )
    with collector() as there:
        env = {**sent_to(there.endpoint), **SHOWN}
        socket = ("--local-socket", tmp_path / "lane.sock") if lane == "local" else ()
        options = ("--otlp", there.endpoint, "--bulk-port", bulk, "--policy", policy, *socket)
        with served(store, source, *options, env={"OTEL_BSP_SCHEDULE_DELAY": "100"}) as (server, url):
            number = push(server, source, env, ranks=2, lane=lane)
            assert "prepared in" in follow(server, env, lane)
            with EngineClient(server, credentials=Credentials(token=TOKEN)) as engine:
                kept = engine.version(f"{MODEL}@{number}").traceparent
                (reported,) = engine.engines(MODEL)
            line = ("weighbridge", "engines", MODEL, "--server", server, "--json")
            with start(*line, env=SHOWN) as listing:
                by_command = json.loads(listing.communicate(timeout=60)[0])
            asked = httpx.get(
                f"{url}/v1/models/{MODEL}/engines?token={TOKEN}",
                headers={"traceparent": kept, "Authorization": f"Bearer {TOKEN}"},
            )
            by_http = asked.json()["engines"]
        spans = there.wait(lambda seen: {"weighbridge.durable", "weighbridge.pull"} <= {each.name for each in seen})
    print(listed(spans))  # shown if something fails
    check_connected(spans)
    for secret in (TOKEN, ACCESS_KEY, SECRET_KEY, "X-Amz", store, str(tmp_path)):
        assert secret.encode() not in there.sent
    of_service = [span for span in spans if span.service == SERVICE]
    of_clients = [span for span in spans if span.service == TRAINER]
    assert short([span.name for span in of_service if not span.server]) >= OF_SERVICE
    streamed = {"stream"} if lane == "grpc" else set()
    assert short([span.name for span in of_clients]) >= OF_TRAINER | streamed | {
        "update",
        "prepare",
        "apply",
        "pull",
    }
    root = next(span for span in spans if not span.parent)
    assert kept == f"00-{root.trace}-{root.id}-01"
    (update,) = there.named("weighbridge.update")
    assert reported.traceparent == f"00-{root.trace}-{update.id}-01"
    assert [each["traceparent"] for each in by_http] == [reported.traceparent]
    assert [each["traceparent"] for each in by_command] == [reported.traceparent]
    # a rank that comes later is in the trace of the one that has opened the version
    pushes = there.named("weighbridge.push")
    assert sorted(span.attributes["weighbridge.rank"] for span in pushes) == [0, 1]
    assert {span.parent for span in pushes} == {"", root.id}
    answers = {span.name for span in spans if span.server}
    weights = {"weighbridge.v1.CheckpointService/Push", "weighbridge.v1.WeightService/Pull"}
    assert answers >= {
        "weighbridge.v1.CheckpointService/DeclareLayout",
        "weighbridge.v1.CheckpointService/SealRank",
    }
    assert bool(answers & weights) == (lane == "grpc")
    assert weights <= answers or lane == "local"
    (pull,) = there.named("weighbridge.pull")
    assert pull.attributes["weighbridge.lane"] == lane
    assert pull.attributes["weighbridge.version"] == number


def test_a_collector_that_cannot_be_reached_breaks_nothing_and_nothing_waits_for_it(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "hf")
    # a port that takes connections and never answers is worse than one that refuses them
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = sent_to(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with served(tmp_path / "store", source, env=env) as (server, _):
            begun = time.monotonic()
            traced = push(server, source, env)
            with_trace = time.monotonic() - begun
            begun = time.monotonic()
            assert push(server, source, {}, step=2) == traced + 1
            without = time.monotonic() - begun
    # ends within the two seconds that it is given, and what starting OpenTelemetry takes
    assert with_trace < without + 10


def reporting(program: str) -> str:
    """A program that says in the end what of OpenTelemetry was imported."""
    return f"""
import sys
sys.argv[0] = "weighbridge"
try:
{textwrap.indent(program, "    ")}
finally:
    print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""


def test_neither_service_nor_clients_import_opentelemetrys_sdk_where_nobody_asks_for_traces(
    tmp_path: Path,
) -> None:
    source = tiny_folder(tmp_path / "hf")
    line = ("serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--memory-budget", "1GiB", "--store")
    main = "from weighbridge._cli import main\nmain()"
    client = """
from safetensors.torch import load_file
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY
from weighbridge import Credentials, EngineClient, TrainerClient
from weighbridge_service.access import tokens
server, model, file = sys.argv[1:]
with TrainerClient(server) as trainer:
    trainer.push_state_dict(model, load_file(file), step=1, rank=0, world_size=1).wait("durable")
with EngineClient(server) as engine:
    pull = engine.pull(f"{model}@latest")
    assert list(pull)
    assert pull.version.traceparent == "", pull.version
"""
    environment = without_opentelemetry()
    with ForkedPython("-c", reporting(main), *line, str(tmp_path / "store"), environment=environment) as service:
        ready = _READY.fullmatch(service.stdout.readline())
        assert ready
        try:
            with TrainerClient(ready[1]) as trainer:
                trainer.register_files(MODEL, source.files)
            file = source.folder / "model.safetensors"
            fresh = [sys.executable, "-c", reporting(client), ready[1], MODEL, str(file)]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            by_client = subprocess.check_output(fresh, env=environment, text=True, timeout=120)
        finally:
            service.terminate()
        parts = ("sdk", "exporter", "instrumentation", "proto")
        by_service, _ = service.communicate(timeout=60)
        for said in (by_client, by_service):
            assert said.startswith("[")
            assert not re.findall(rf"opentelemetry\.(?:{'|'.join(parts)})\b", said)


def test_requests_over_http_are_traced_in_their_callers_trace_and_without_their_query(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "hf")
    caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with collector() as there:
        env = {
            **sent_to(there.endpoint),
            "OTEL_INSTRUMENTATION_HTTP_CAPTURE_HEADERS_SERVER_REQUEST": ".*",
        }
        with served(tmp_path / "store", source, env=env) as (_, url):
            for path in ("/livez", "/metrics", "/readyz/clock"):
                httpx.get(f"{url}{path}")
            found = httpx.get(
                f"{url}/v1/models/{MODEL}?token=wb-secret",
                headers={"traceparent": caller, "Authorization": "Bearer wb-secret"},
            )
            assert found.status_code == 200
            hostile = {"User-Agent": "x" * 4000, "tracestate": "a=1," * 1000, "baggage": "b=2," * 500}
            refused = httpx.get(f"{url}/v1/models/{'x' * 4000}", headers={"traceparent": caller, **hostile})
            assert refused.status_code in (404, 422)
            spans = there.wait(lambda seen: len(seen) == 2)
    assert {span.trace for span in spans} == {caller.split("-")[1]}
    assert {span.parent for span in spans} == {caller.split("-")[2]}
    assert "wb-secret" not in repr(spans)
    assert "x" * 256 in repr(spans)
    assert "x" * 257 not in repr(spans)
    assert len(there.sent) < 10_000
