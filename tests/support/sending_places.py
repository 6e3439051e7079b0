"""Places where a trainer sends weights to a live vLLM: a service that can be killed, and a server that started from a
folder and reaches it through a gate.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.gate import Gate
from tests.support.killable_service import KillableService
from tests.support.vllm_environment import environment
from tests.support.word_models import PROMPT, TOKENS, make_folder, said_by_transformers
from weighbridge import TrainerClient
from weighbridge_demo.vllm_server import EAGER, Answer, VllmServer


@dataclass
class SendingPlace:
    """A service, a vLLM server, and models with different answers.

    Attributes:
        model: ``namespace/name`` at the service.
        family: family of the models.
        first: the folder that the server started from.
        expected: answer of transformers with the weights that the server should have.
        variables: environment variables of all processes.
        logs: folder of their logs.
    """

    model: str
    family: str
    service: KillableService
    gate: Gate
    server: VllmServer
    first: Path
    expected: Answer
    variables: dict[str, str]
    logs: Path
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(2))

    @property
    def told(self) -> dict[str, Any]:
        """Trainers' settings of the service."""
        return {
            "model": self.model,
            "server": self.service.address,
            "engine_server": self.gate.address,
            "hf_dir": str(self.first),
            "retry_seconds": 4.0,
        }

    def other_weights(self) -> tuple[Path, Answer]:
        """A folder of other weights, and the answer of transformers with them."""
        seed = next(self.seeds)
        folder = self.first.parent / str(seed)
        found = said_by_transformers(make_folder(folder, seed, self.family))
        assert found.text != self.expected.text, "both weights give the same answer"
        return folder, found

    def check(self) -> None:
        """Check that the server answers as transformers does."""
        found = self.server.complete(PROMPT, TOKENS)
        assert found.text.strip() == self.expected.text
        assert found.logprobs == pytest.approx(self.expected.logprobs, abs=1e-3)
        assert not self.server.is_paused()

    def versions(self, **which: Any) -> list[Any]:
        """Versions of the model, the newest first."""
        with TrainerClient(self.service.address) as client:
            return client.versions(self.model, **which)


@contextlib.contextmanager
def sending_place(root: Path, python: Path, model: str, family: str) -> Iterator[SendingPlace]:
    """A place in a folder, whose vLLM runs in the environment of a Python; ended in the end.

    The server need not answer yet.
    """
    folders, logs = root / "models", root / "logs"
    logs.mkdir()
    first = folders / "1"
    expected = said_by_transformers(make_folder(first, 1, family))
    service = KillableService(root / "store", bulk_port="off")  # weights go through the gate, too
    variables = {**environment(), "WEIGHBRIDGE_CACHE": str(root / "cache"), "OMP_NUM_THREADS": "1"}
    service.start()
    with contextlib.ExitStack() as stack:
        stack.callback(service.kill)
        gate = stack.enter_context(Gate(service.address))
        server = stack.enter_context(
            VllmServer(python, None, str(first), logs / "vllm.log", *EAGER, environment=variables)
        )
        yield SendingPlace(model, family, service, gate, server, first, expected, variables, logs)
