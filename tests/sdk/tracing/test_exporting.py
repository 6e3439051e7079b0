"""Exporting: is a process that sends spans none the worse for its collector, and are passwords kept out of the log?"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from weighbridge._tracing.exporting import exporting
from weighbridge._tracing.settings import TracingState
from weighbridge.errors import FailedPrecondition, InvalidArgument


@pytest.mark.process
def test_a_collector_that_never_answers_takes_neither_memory_nor_the_end_of_the_process() -> None:
    script = """
import sys, time
from weighbridge._tracing.exporting import exporting
provider = exporting("trainer", sys.argv[1])
tracer = provider.get_tracer("weighbridge")
for number in range(20_000):
    tracer.start_span("push", attributes={"number": number}).end()
(processor,) = provider._active_span_processor._span_processors
assert len(processor._batch_processor._queue) <= 64
print(time.monotonic(), flush=True)
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    bounded = {"OTEL_BSP_MAX_QUEUE_SIZE": "64", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "32"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = subprocess.run(
            [sys.executable, "-c", script, f"http://127.0.0.1:{silent.getsockname()[1]}"],
            env={**clean, **bounded}, check=True, timeout=120, capture_output=True, text=True,
        )  # fmt: skip
        ended = time.monotonic()
    # the two seconds that a collector is given, and what an interpreter on a busy machine takes to end
    assert ended - float(done.stdout) < 8
    # one line and not 20,000
    assert 0 < done.stderr.count("Queue full") < 10


@pytest.mark.parametrize("endpoint", ["http://me:wb-secret@127.0.0.1:4317", "me:wb-secret@127.0.0.1:4317"])
def test_an_address_with_a_password_is_refused_without_being_told(endpoint: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        exporting("trainer", endpoint)
    assert "wb-secret" not in str(refused.value)


def test_an_address_with_a_password_in_the_environment_is_refused_for_grpc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:wb-secret@127.0.0.1:4317")
    with pytest.raises(InvalidArgument, match="OTEL_EXPORTER_OTLP_HEADERS"):
        exporting("trainer", "")


def test_without_the_packages_of_the_extra_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(FailedPrecondition, match=r"pip install 'weighbridge\[tracing\]'"):
        TracingState().enable("http://127.0.0.1:4317")
