"""Do the examples, the notebook and the README's lines run as they are written?

Scripts run whole, as `torchrun` and a shell start them, with the addresses in the environment. Ranks are forked.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.forked import forked_python, run_jobs
from tests.support.ports import reserved_port
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge_demo.ranks import Job

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CONFIG = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2)


@dataclass(frozen=True)
class Place:
    """A service and the folder of its store."""

    service: RunningService
    store: Path

    def version_folder(self, model: str, number: int) -> Path:
        return self.store / "models" / model / "versions" / f"{number:012d}"

    def weights(self, model: str, number: int) -> dict[str, Tensor]:
        """All tensors of a version as safetensors' own loader reads its folder."""
        files = sorted(self.version_folder(model, number).glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    store = tmp_path_factory.mktemp("store")
    with running_service(store) as running:
        yield Place(running, store)


@pytest.fixture(autouse=True)
def _server(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_SERVER", place.service.address)


@contextmanager
def _torchrun(environment: dict[str, str], rank: int, _store_path: str) -> Iterator[None]:
    """The environment that torchrun gives a rank: variables that describe the job, and no process group."""
    torch.set_num_threads(1)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    yield


def _run_script(_rank: int, script: str, arguments: Sequence[str]) -> None:
    sys.argv = [script, *arguments]
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def torchrun(place: Place, size: int, script: str, *arguments: str) -> None:
    environment = {
        "WEIGHBRIDGE_SERVER": place.service.address,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(reserved_port()),
    }
    run_jobs([Job(size, partial(_torchrun, environment), _run_script, (script, arguments))], timeout=100)


def run_script(script: str, *arguments: str, stdin: str = "") -> str:
    """Run a script to its end; its standard output."""
    code = (
        f"import runpy, sys; sys.argv = {[script, *arguments]!r}; "
        f"runpy.run_path({str(EXAMPLES / script)!r}, run_name='__main__')"
    )
    with forked_python("-c", code) as process:
        process.stdin.write(stdin)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    return said


def push(model: str, seed: int) -> LlamaForCausalLM:
    """A random model that is the next version."""
    torch.manual_seed(seed)
    module = LlamaForCausalLM(CONFIG)
    with TrainerClient() as trainer:
        trainer.push_state_dict(model, module, step=seed).wait(timeout=60)
    return module


@pytest.fixture
def registered(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    name = f"acme/{request.node.name.replace('_', '-')[:40]}"
    CONFIG.save_pretrained(tmp_path / "hf")
    with TrainerClient() as trainer:
        trainer.register_model(name, tmp_path / "hf", dtype="fp32")
    return name


def test_the_fsdp2_trainer_goes_on_from_its_newest_version_on_another_number_of_ranks(place: Place) -> None:
    torchrun(place, 2, "fsdp2_train.py", "acme/fsdp2", "20")
    torchrun(place, 1, "fsdp2_train.py", "acme/fsdp2", "30")
    with EngineClient() as engine:
        assert [version.step for version in reversed(engine.versions("acme/fsdp2"))] == [10, 20, 30]
        training = engine.versions("acme/fsdp2:training")
        assert [version.ranks for version in reversed(training)] == [2, 2, 1]
        states = [dict(engine.pull("acme/fsdp2:training", number)) for number in (1, 3)]
    counts = [
        {int(tensor) for name, tensor in state.items() if name.endswith(".step") or ".step." in name}
        for state in states
    ]
    assert counts == [{10}, {30}], "the optimizer went on"
    loaded = AutoModelForCausalLM.from_pretrained(place.version_folder("acme/fsdp2", 3))
    assert torch.isfinite(loaded(torch.tensor([[1, 2, 3]])).logits).all()


def test_megatron_ranks_push_what_transformers_loads(place: Place) -> None:
    torchrun(place, 2, "megatron_push.py", "acme/megatron2")
    torchrun(place, 1, "megatron_push.py", "acme/megatron1")
    for name in ("acme/megatron1", "acme/megatron2"):
        _, report = AutoModelForCausalLM.from_pretrained(place.version_folder(name, 1), output_loading_info=True)
        assert not any(report.values())
    two = place.weights("acme/megatron2", 1)
    expected = LlamaForCausalLM(CONFIG).state_dict()
    assert {name: tensor.shape for name, tensor in two.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


def test_a_transformers_model_answers_with_each_version_as_transformers_does(registered: str) -> None:
    script = runpy.run_path(str(EXAMPLES / "serve_transformers.py"))
    modules = [push(registered, seed=1)]
    answers = script["answers"](registered)
    found = [next(answers)]
    modules.append(push(registered, seed=2))
    found.append(next(answers))
    answers.close()
    said = [module.generate(script["PROMPT"], max_new_tokens=8, do_sample=False)[0].tolist() for module in modules]
    assert found == [(1, said[0]), (2, said[1])]
    assert said[0] != said[1]
    assert run_script("serve_transformers.py", registered, "1") == f"version 2: {said[1]}\n"


def test_an_engine_of_a_page_follows_a_ref_and_keeps_its_version_when_a_pull_fails(
    registered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = runpy.run_path(str(EXAMPLES / "engine.py"))
    first = push(registered, seed=1)
    prompt = [5, 17, 99]
    with EngineClient() as client, EngineClient() as other:
        engine = script["Engine"](client, registered)
        engine.update(client.version(registered))
        assert engine.next_token(prompt) == (_next(first, prompt), 1)
        two = itertools.islice(client.watch(registered, "latest"), 2)
        monkeypatch.setattr(client, "watch", lambda _name, _ref: two)
        following = threading.Thread(target=engine.follow, args=("latest",))
        following.start()
        second = push(registered, seed=2)
        following.join(60)
        assert engine.next_token(prompt) == (_next(second, prompt), 2)
        asked = " ".join(map(str, prompt)) + "\n"
        assert (
            run_script("engine.py", registered, stdin=2 * asked) == 2 * f"token {_next(second, prompt)}, by version 2\n"
        )
        engine.client = _Failing(other)
        with pytest.raises(ConnectionError):
            engine.update(other.version(registered, 1))
        assert engine.next_token(prompt) == (_next(second, prompt), 2)


@dataclass
class _Failing:
    """A client whose pulls fail after half of the tensors."""

    client: EngineClient

    def pull(self, name: str, number: int) -> Any:
        pulled = list(self.client.pull(name, number))

        class Half:
            def into(self, module: torch.nn.Module) -> None:
                for tensor_name, tensor in pulled[: len(pulled) // 2]:
                    module.get_parameter(tensor_name).data.copy_(tensor)
                raise ConnectionError

        return Half()


def _next(module: LlamaForCausalLM, tokens: list[int]) -> int:
    with torch.no_grad():
        return int(module(torch.tensor([tokens])).logits[0, -1].argmax())


def test_the_notebook_runs_from_its_first_cell_to_its_last_and_is_kept_without_results(place: Place) -> None:
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), "first_steps.ipynb", "exec"), names)
    head = place.weights("acme/first-steps", 1)["lm_head.weight"]
    torch.testing.assert_close(names["slices"]["lm_head.weight"], head[:64] * 0.5)
    torch.testing.assert_close(names["model"].lm_head.weight.data, head)
    with EngineClient() as engine:
        assert engine.refs("acme/first-steps") == {"live": 2, "latest": 2, "prod": 1}


def test_the_lines_of_the_readme_run(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert code is not None
    assert len(code[1].strip().splitlines()) <= 13
    names: dict[str, Any] = {}
    exec(compile(code[1], "README.md", "exec"), names)
    loaded = AutoModelForCausalLM.from_pretrained(place.version_folder("acme/smol", 1))
    expected = names["model"].state_dict()
    assert [name for name, tensor in loaded.state_dict().items() if not torch.equal(tensor, expected[name])] == []
