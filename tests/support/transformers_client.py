"""Calls of the service as users of transformers make them, and transformers' own results for the same folders.

The functions run in the tests' own process, in ranks forked from it, or in processes of another environment, with
another transformers (`make test-transformers`): nothing of the service is imported here.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.support.ports import reserved_port

PYTHON = os.environ.get("WEIGHBRIDGE_TRANSFORMERS_PYTHON", "")
"""Runs the functions, if it is set."""


def call(fn: Callable[..., Any], *args: Any) -> Any:
    """Result of a function of this module."""
    return _elsewhere(fn, args, 1)[0] if PYTHON else fn(*args)


def call_ranks(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Result of a function of this module on each rank of a job."""
    if PYTHON:
        return _elsewhere(fn, args, size)
    from tests.support.forked import run_jobs
    from weighbridge_demo.ranks import gloo_job

    return run_jobs([gloo_job(size, _as_rank, fn, args)], timeout=120)[0]


def _as_rank(rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    return fn(*args)


def _elsewhere(fn: Callable[..., Any], args: tuple[Any, ...], size: int) -> list[Any]:
    """Run it in processes that are started as torchrun starts them."""
    port = reserved_port()
    with TemporaryDirectory() as folder:
        results = [Path(folder, str(rank)) for rank in range(size)]
        processes = []
        for rank, result in enumerate(results):
            work = pickle.dumps((fn.__name__, args, str(result))).hex()
            mine = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
            }  # fmt: skip
            command = [PYTHON, "-W", "ignore", "-m", "tests.support.transformers_client", work]
            processes.append(subprocess.Popen(command, env=mine, stderr=subprocess.PIPE, text=True))
        try:
            for process in processes:
                _, said = process.communicate(timeout=240)
                assert process.returncode == 0, said
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [pickle.loads(result.read_bytes()) for result in results]


def differences(model: Any, expected: Any) -> list[str]:
    """Names of parameters and buffers that are on one side only, or differ in dtype or in a bit."""
    from weighbridge.integrations.transformers.building import weights_of

    mine, theirs = weights_of(model), weights_of(expected)
    return [
        name
        for name in {*mine, *theirs}
        if name not in mine
        or name not in theirs
        or mine[name].dtype != theirs[name].dtype
        or not mine[name].equal(theirs[name])
    ]


def start_and_update(address: str, name: str, folders: list[str], dtype: str | None) -> dict[str, Any]:
    """Load version 1, go to version 2 and back; after each, what is not as transformers makes it of the folder."""
    from transformers import AutoModelForCausalLM

    from weighbridge.integrations import transformers

    model = transformers.from_weighbridge(f"{name}@1", address, dtype=dtype)
    live = transformers.live_model(model)
    parameters = [id(parameter) for parameter in model.parameters()]
    found: dict[str, Any] = {
        "class": type(model).__name__,
        "different": [],
        "numbers": [],
        "logits": [],
        "nbytes": [],
    }
    ids = torch.arange(12).view(1, 12)
    for version in (1, "latest", 1):
        found["numbers"].append(transformers.update(model, version).number)
        found["nbytes"].append(live.nbytes)
        expected = AutoModelForCausalLM.from_pretrained(folders[found["numbers"][-1] - 1], dtype=dtype or "auto")
        found["different"] += differences(model, expected)
        with torch.no_grad():
            found["logits"].append((model(ids).logits - expected(ids).logits).abs().max().item())
    found["held"] = sum(t.nbytes for t in {**dict(model.named_parameters()), **_buffers(model)}.values())
    found["in place"] = parameters == [id(parameter) for parameter in model.parameters()]
    found["tied"] = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    found["temperature"] = model.generation_config.temperature
    found["trainable"] = all(parameter.requires_grad for parameter in model.parameters())
    found["training"] = model.training
    return found


def _buffers(model: Any) -> dict[str, torch.Tensor]:
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def tensor_parallel(address: str, name: str, folders: list[str]) -> dict[str, Any]:
    """One rank of two: load version 1, go to version 2; and what differs from transformers' own tensor-parallel
    models.
    """
    from transformers import AutoModelForCausalLM

    from weighbridge._clients.engine import EngineClient
    from weighbridge.errors import WeighbridgeError
    from weighbridge.integrations import transformers
    from weighbridge.integrations.transformers.building import weights_of

    model = transformers.from_weighbridge(f"{name}@1", address, tp_plan="auto")
    live = transformers.live_model(model)
    held = sum(tensor.nbytes for tensor in weights_of(model).values())
    found: dict[str, Any] = {"held": held, "nbytes": [live.nbytes], "different": [], "logits": []}
    ids = torch.arange(12).view(1, 12)

    def compare(folder: str) -> None:
        plan = transformers._parallelism("auto", None)
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **plan)
        found["different"] += differences(model, expected)
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        with torch.no_grad():
            found["logits"].append((model(ids).logits - whole(ids).logits).abs().max().item())

    compare(folders[0])
    source, good = live.rank.source, live.rank.client()
    if torch.distributed.get_rank() == 1:  # as if only this rank had lost it
        live.rank.clients[source] = EngineClient("127.0.0.1:9", retry_seconds=0.2)
    try:
        transformers.update(model, 2)
    except WeighbridgeError as error:
        found["error"] = str(error)
    found["kept"] = live.version.number if live.version else None
    live.rank.clients[source] = good
    compare(folders[0])
    transformers.update(model, 2)
    found["nbytes"].append(live.nbytes)
    compare(folders[1])
    return found


def train(address: str, name: str, folder: str) -> dict[str, Any]:
    """Push what a folder's model holds in memory, and fill it again; which of its tensors stack experts, and which have
    come back changed.
    """
    from transformers import AutoModelForCausalLM

    from weighbridge._trainers.trainer import TrainerClient

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with TrainerClient(address) as trainer:
        number = trainer.push_state_dict(name, model, step=7).wait(timeout=60).number
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
        trainer.restore_state_dict(name, model, version=number)
    after = model.state_dict()
    return {
        "number": number,
        "stacked": [name for name in before if name.endswith("experts.gate_up_proj")],
        "changed": [name for name, tensor in before.items() if not torch.equal(after[name], tensor)],
    }


def tokens(address: str, name: str, text: str) -> list[int]:
    """Tokens of a text by the version's tokenizer."""
    from weighbridge.integrations.transformers import tokenizer_from_weighbridge

    ids: list[int] = tokenizer_from_weighbridge(name, address)(text)["input_ids"]
    return ids


def refused(address: str, name: str, changed: dict[str, Any]) -> str:
    """The error with which a version is refused by a model of another configuration."""
    from transformers import AutoConfig

    from weighbridge._clients.engine import EngineClient
    from weighbridge.errors import WeighbridgeError
    from weighbridge.integrations.transformers import _side_files, from_weighbridge

    with EngineClient(address) as client, _side_files(client, name, 1) as folder:
        config = AutoConfig.from_pretrained(folder, **changed)
    try:
        from_weighbridge(f"{name}@1", address, config=config)
    except WeighbridgeError as error:
        return f"{type(error).__name__}: {error}"
    return "it was not refused"


def refused_live(address: str, name: str, folder: str) -> dict[str, Any]:
    """The error with which a live model of another configuration refuses a version, and whether it was left alone."""
    from transformers import AutoModelForCausalLM

    from weighbridge.errors import WeighbridgeError
    from weighbridge.integrations.transformers import attach

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    live = attach(model, name, address)
    try:
        live.update()
    except WeighbridgeError as error:
        again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        return {"error": str(error), "different": differences(model, again), "version": live.version}
    return {"error": "it was not refused"}


if __name__ == "__main__":
    function, arguments, where = pickle.loads(bytes.fromhex(sys.argv[1]))
    Path(where).write_bytes(pickle.dumps(globals()[function](*arguments)))
    os._exit(0)  # process groups that are still there would complain
