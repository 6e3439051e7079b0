"""Does the command `follow --adapters` have a live vLLM load the chosen adapters before a request names them, on each
version of the base, and leave it in order?

The command is a separate process. The engine reaches the service through a gate: an adapter that answers while the gate
is cut was loaded. Every answer is compared, token for token, with transformers' of the model into which peft has merged
that version.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from tests.support.forked import ForkedPython, forked_python
from tests.support.gate import Gate
from tests.support.vllm_adapters import BASE, Adapters, Refused, Said, ask, keeping, serving
from tests.support.vllm_environment import HAS_KERNELS, needs_vllm
from tests.support.word_models import PROMPT
from weighbridge.follow import vllm as vllm_driver
from weighbridge_demo.vllm_server import VllmServer

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(not HAS_KERNELS, reason="nothing is computed without kernels"),
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]

PATTERN = "acme/chosen-*"
"""Of the adapters that are loaded ahead; the server serves all of ``acme/*``."""
MOST = 4
"""Adapters that the engine keeps in memory: `serving` says it."""
HELD_BYTES = 1_000_000
"""Of a version of the base, after which its way to the engine is held: a part of it."""
START_SECONDS = 1500.0


@dataclass
class Command:
    """The command, while it runs.

    Attributes:
        said: all lines that were read.
    """

    process: ForkedPython
    errors: IO[str]
    said: list[str] = field(default_factory=list)

    def wait_loaded(self, version: str, base: int) -> None:
        """Wait until the command reports that the engine has loaded an adapter ahead."""
        self._wait(self.errors, f"{version}: loaded ahead, on {BASE}@{base}")

    def wait_serves(self, base: int) -> None:
        """Wait until the command reports that the engine has a version of the base."""
        self._wait(self.process.stdout, f"{BASE}@{base}: ")

    def interrupt(self) -> None:
        """Interrupt it, as Ctrl-C does; it ends quietly."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 130
        assert not self.errors.read().strip()

    def _wait(self, lines: IO[str], beginning: str) -> None:
        for line in iter(lines.readline, ""):
            self.said.append(line)
            if line.startswith(beginning):
                return
        raise AssertionError(f"the command has ended, and has not said {beginning!r}: {self.said}")


@contextmanager
def following(there: Adapters, server: VllmServer, gate: Gate) -> Iterator[Command]:
    """The command beside a server, which reaches the service through a gate."""
    read, write = os.pipe()
    options = ["--server", there.running.address, "--engine-server", gate.address, "--url", server.url]
    with (
        open(read) as errors,
        forked_python("-m", "weighbridge", "follow", BASE, *options, "--adapters", PATTERN, stderr=write) as process,
    ):
        os.close(write)
        yield Command(process, errors)


def listed(server: VllmServer) -> set[str]:
    """The models that vLLM itself lists."""
    with urllib.request.urlopen(server.url + "/v1/models", timeout=60) as answer:
        return {each["id"] for each in json.load(answer)["data"]}


def check_answers(there: Adapters, server: VllmServer, *versions: str) -> None:
    """Compare the server's answers with the merged models."""
    for version in versions:
        assert ask(server, version) == Said(version, there.said[version, PROMPT])


def check_fetches_nothing(there: Adapters, server: VllmServer, gate: Gate, *versions: str) -> None:
    """The same, without the service."""
    gate.cut_after(0)
    check_answers(there, server, *versions)
    gate.open()


def test_the_command_loads_adapters_before_requests_and_those_of_each_new_base(tmp_path: Path) -> None:
    with (
        keeping(tmp_path) as there,
        Gate(there.running.address) as gate,
        serving(there, server=gate.address) as server,
    ):
        first, second = there.push("acme/chosen-0", 0), there.push("acme/chosen-1", 1)
        other = there.push("acme/other", 2)
        server.wait_ready(START_SECONDS)
        engine = vllm_driver.VllmServer(server.url, BASE, there.running.address)
        assert (listed(server), engine.adapters()) == ({BASE}, ())
        with following(there, server, gate) as command:
            command.wait_serves(1)
            command.wait_loaded(first, 1)
            command.wait_loaded(second, 1)
            assert listed(server) == {BASE, first, second}
            assert engine.adapters() == (first, second)
            check_fetches_nothing(there, server, gate, first, second)
            gate.cut_after(0)
            unseen = ask(server, other)
            assert isinstance(unseen, Refused), "an adapter was there that nobody has asked for"
            assert unseen.status == 503, unseen
            gate.open()

            newer = there.push("acme/chosen-0", 3)
            command.wait_loaded(newer, 1)
            check_fetches_nothing(there, server, gate, newer, second, first)

            # the least recently used adapter is evicted, which is not the oldest one, and the agent does not reload it
            third = there.push("acme/chosen-2", 4)
            command.wait_loaded(third, 1)
            assert len(engine.adapters()) == MOST
            fourth = there.push("acme/chosen-3", 5)
            command.wait_loaded(fourth, 1)
            assert engine.adapters() == (first, second, third, fourth)
            fifth = there.push("acme/chosen-4", 6)
            command.wait_loaded(fifth, 1)
            assert engine.adapters() == (first, third, fourth, fifth)
            check_answers(there, server, newer, second)

            # an adapter on a version of the base that the engine is only about to get
            gate.hold_after(HELD_BYTES)
            base = there.push_base(2)
            gate.wait_closed()
            on_second = there.push("acme/chosen-0", 7, base)
            check_answers(there, server, first, newer)
            gate.open()
            command.wait_serves(base)
            command.wait_loaded(on_second, base)
            assert engine.adapters() == (on_second,)
            check_fetches_nothing(there, server, gate, on_second)
            for old in (first, newer, fifth, other):
                refused = ask(server, old)
                assert isinstance(refused, Refused), refused
                assert refused.status == 409, refused
                assert f"{old} is on {BASE}@1, and this engine serves {BASE}@{base}" in refused.text
            assert ask(server, BASE) == Said(BASE, there.said[f"{BASE}@{base}", PROMPT])
            command.interrupt()
        check_fetches_nothing(there, server, gate, on_second)

        # in the middle of an update
        with following(there, server, gate) as command:
            command.wait_serves(base)
            also = there.push("acme/chosen-1", 8, base)
            command.wait_loaded(also, base)
            gate.hold_after(HELD_BYTES)
            there.push_base(9)
            gate.wait_closed()
            command.interrupt()
            gate.open()
        assert not server.is_paused()
        assert engine.serving().version == base
        assert engine.adapters() == (on_second, also)
        check_answers(there, server, on_second, also)
