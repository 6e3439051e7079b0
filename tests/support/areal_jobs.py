"""Jobs of AReaL in an environment of its own, which `make test-frameworks` makes, and engines that answer as SGLang's
servers do.

``make test-frameworks`` names its Python in WEIGHBRIDGE_AREAL_PYTHON.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.support.jobs import Job, running
from tests.support.json_servers import json_server
from tests.support.ports import reserved_port

HERE = Path(__file__).parents[2] / "tests" / "frameworks" / "areal_cpu"
PYTHON = Path(os.environ.get("WEIGHBRIDGE_AREAL_PYTHON") or "/nowhere")
RANKS = 2

needs_areal = pytest.mark.skipif(
    not PYTHON.exists(), reason="AReaL has an environment of its own: make test-frameworks"
)


class Engine:
    """An engine: where its server is, what it was asked, and what it has loaded."""

    def __init__(self) -> None:
        self.address = ""
        self.asked: list[str] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self.generates = True
        self.loaded_while_generating = False
        self.refuses: set[str] = set()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked.append(path)
        if path in self.refuses:
            return 400, {"success": False, "message": "refused"}
        if path == "/pause_generation":
            self.generates = False
        elif path == "/continue_generation":
            self.generates = True
        elif path == "/update_weights_from_disk":
            self.loaded_while_generating |= self.generates
            files = Path(body["model_path"]).glob("*.safetensors")
            self.loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
        return 200, {"success": True, "message": "", "num_paused_requests": 0}


@contextmanager
def areal_engine() -> Iterator[Engine]:
    """An engine whose server answers until the end."""
    engine = Engine()
    with json_server(engine.answer) as url:
        engine.address = url.removeprefix("http://")
        yield engine


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of three words: AReaL wants one."""
    words = models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2}, unk_token="<unk>")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)


class ArealJob:
    """The ranks of a job: `tests/frameworks/areal_cpu/areal_rank.py`."""

    def __init__(self, ranks: list[Job]) -> None:
        self.ranks = ranks

    def begin(self, name: str, /, **arguments: Any) -> None:
        """Ask all ranks for something; `answers` waits for it."""
        for rank in self.ranks:
            rank.begin(name, **arguments)

    def answers(self, seconds: float = 240) -> list[Any]:
        """Answer of each rank to the last request: a value, or the `JobFailed` with its error."""
        return [rank.outcome(seconds) for rank in self.ranks]

    def ask(self, name: str, /, seconds: float = 240, **arguments: Any) -> list[Any]:
        """Result of a method on each rank; as `answers`."""
        self.begin(name, **arguments)
        return self.answers(seconds)


@contextmanager
def areal_job(
    folder: Path, server: str, model: str, engines: Sequence[Engine], lane: str = "grpc"
) -> Iterator[ArealJob]:
    """A job that has received no request yet; ended when the block ends.

    Args:
        folder: folder for logs.
        server, model, lane: the actors' settings of the service.
        engines: engines of its rollouts.
    """
    said = {
        "WEIGHBRIDGE_SERVER": server,
        "WEIGHBRIDGE_MODEL": model,
        "WEIGHBRIDGE_LANE": lane,
        "AREAL_LLM_SERVER_ADDRS": ",".join(engine.address for engine in engines),
    }
    port = str(reserved_port())
    with ExitStack() as stack:
        yield ArealJob([stack.enter_context(_rank(folder, rank, port, said)) for rank in range(RANKS)])


@contextmanager
def _rank(folder: Path, rank: int, port: str, said: Mapping[str, str]) -> Iterator[Job]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RAY_"))}
    environment |= {
        "PYTHONPATH": str(HERE.parent / "loggers"),
        "AREAL_SPMD_MODE": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        **said,
    }
    with running([PYTHON, HERE / "areal_rank.py"], folder / f"AReaL-{rank}.log", environment) as job:
        yield job
