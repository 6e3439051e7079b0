"""Does each example in the docstrings of the SDK print what it says?"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

import weighbridge
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.signing import new_key
from weighbridge import AsyncEngineClient, Client, EngineClient, MegatronRank, TrainerClient
from weighbridge.follow.engines import Prepared, Serving

SDK = Path(weighbridge.__file__).parent
MODEL = "acme/smol"
CHECKER = doctest.OutputChecker()


@dataclass(frozen=True)
class Docstring:
    """A docstring with examples.

    Attributes:
        owner: path of the class, function or method in the SDK.
        examples: all of them, in order. They share one session.
    """

    owner: str
    examples: tuple[doctest.Example, ...]

    @property
    def source(self) -> str:
        return "".join(each.source for each in self.examples)


def docstrings_of(node: ast.AST, owner: str) -> Iterator[Docstring]:
    """Docstrings with examples of a module, class or function and of what is in it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        found = doctest.DocTestParser().get_examples(ast.get_docstring(node) or "", owner)
        if found:
            yield Docstring(owner, tuple(found))
        for inner in node.body:
            yield from docstrings_of(inner, f"{owner}.{getattr(inner, 'name', '')}")


DOCSTRINGS = [
    docstring
    for path in sorted(SDK.rglob("*.py"))
    if ">>> " in (text := path.read_text("utf-8"))
    for docstring in docstrings_of(ast.parse(text), ".".join(path.relative_to(SDK).with_suffix("").parts))
]
"""Read from the sources, since some modules import engines that are not installed here."""


class Driver:
    """Driver of an engine that takes every version and fetches nothing."""

    def __init__(self) -> None:
        self._version: int | None = None

    def connect(self) -> None: ...

    def serving(self) -> Serving:
        return Serving(self._version, model=MODEL)

    def prepare(self, version: int) -> Prepared:
        return Prepared(nbytes=0, seconds=0.0)

    def discard(self) -> None: ...

    def pause(self) -> None: ...

    def apply(self, version: int, label: str) -> None:
        self._version = version

    def resume(self) -> None: ...

    def label(self, label: str) -> None: ...


class Session:
    """Session of one docstring's examples. It makes only the names of `MAKERS` that the examples mention.

    Args:
        place: a folder of the test's own.
        service: has version 1 of the tiny model.
        tiny: the tiny model.
        is_async: whether ``client`` is an `AsyncEngineClient`.
    """

    def __init__(self, place: Path, service: RunningService, tiny: TinyModel, *, is_async: bool) -> None:
        self._place = place
        self._service = service
        self._tiny = tiny
        self._is_async = is_async
        self._loop = asyncio.Runner()
        self._ends = contextlib.ExitStack()
        self._ends.callback(self._loop.close)
        self._names: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def run(self, docstring: Docstring) -> Iterator[tuple[doctest.Example, str]]:
        """Run the examples. Yields each one with its output."""
        for name in dict.fromkeys(re.findall(r"\w+", docstring.source)):
            self._make(name)
        for number, example in enumerate(docstring.examples):
            code = compile(example.source, f"{docstring.owner}[{number}]", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                answer = eval(code, self._names)
                if inspect.iscoroutine(answer):
                    self._loop.run(answer)
            yield example, printed.getvalue()

    def _make(self, name: str) -> Any:
        if name not in self._names and name in MAKERS:
            self._names[name] = MAKERS[name](self)
        elif name in weighbridge.__all__:
            self._names[name] = getattr(weighbridge, name)
        return self._names.get(name)

    def client(self) -> Any:
        if not self._is_async:
            return self._opened(Client)
        client = AsyncEngineClient(self._service.address)
        self._ends.callback(lambda: self._loop.run(client.close()))
        return client

    def _opened(self, kind: type[Client]) -> Client:
        return self._ends.enter_context(kind(self._service.address))

    def model(self) -> torch.nn.Module:
        """The tiny model in transformers, with all parameters set to 1."""
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self._tiny.folder))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        return model

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._make("model").parameters())

    def peft_model(self) -> Any:
        import peft

        return peft.get_peft_model(self.model(), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))

    def megatron_model(self) -> Any:
        """A stand-in for a Megatron-core model on one rank, with the sharded tensors of the tiny model."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        with TrainerClient(self._service.address) as trainer:
            layout = trainer.describe_shards(MODEL, MegatronRank())
        sharded = {
            name: ShardedTensor.from_rank_offsets(name, torch.ones(spec.shape)) for name, spec in layout.tensors.items()
        }
        return SimpleNamespace(sharded_state_dict=lambda: sharded)


def _imported(module: str, name: str) -> Any:
    return getattr(__import__(module, fromlist=[name]), name)


MAKERS: Mapping[str, Callable[[Session], Any]] = {
    "server": lambda session: session._service.address,
    "client": Session.client,
    "trainer": lambda session: session._opened(TrainerClient),
    "engine": lambda session: session._opened(EngineClient),
    "model": Session.model,
    "optimizer": Session.optimizer,
    "peft_model": Session.peft_model,
    "megatron_model": Session.megatron_model,
    "folder": lambda session: session._tiny.folder,
    "out": lambda session: session._place / "out",
    "driver": lambda session: Driver(),
    "keys": lambda session: new_key(session._place / "keys"),
    "torch": lambda session: torch,
    "dcp": lambda session: _imported("torch.distributed", "checkpoint"),
    **{
        name: lambda session, module=module, name=name: _imported(module, name)
        for name, module in {
            "Follower": "weighbridge.follow.agent",
            "WeighbridgeReader": "weighbridge.integrations.torch",
            "WeighbridgeWriter": "weighbridge.integrations.torch",
            "from_weighbridge": "weighbridge.integrations.transformers",
            "get_state_dict": "torch.distributed.checkpoint.state_dict",
        }.items()
    },
}
"""Names that examples may use without defining them, besides the public names of `weighbridge`."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("models") / "smol", constant=0.5)


@pytest.mark.parametrize("docstring", DOCSTRINGS, ids=lambda each: each.owner)
def test_each_example_prints_what_it_says(docstring: Docstring, tmp_path: Path, tiny: TinyModel) -> None:
    with running_service(tmp_path / "store") as service:
        with TrainerClient(service.address) as trainer:
            trainer.import_folder(MODEL, tiny.folder, step=100).wait(timeout=120)
        is_async = docstring.owner.startswith("aio.")
        with Session(tmp_path, service, tiny, is_async=is_async) as session:
            for example, printed in session.run(docstring):
                assert CHECKER.check_output(example.want, printed, 0), (
                    f"{example.source}{CHECKER.output_difference(example, printed, 0)}"
                )


def test_each_docstring_with_examples_shows_output_and_skips_nothing() -> None:
    assert DOCSTRINGS
    assert [each.owner for each in DOCSTRINGS if not any(example.want for example in each.examples)] == []
    assert [each.owner for each in DOCSTRINGS if any(example.options for example in each.examples)] == []
