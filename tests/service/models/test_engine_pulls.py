"""Does each rank of an engine get from a service what it holds, whatever it asks for?"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from torch import Tensor

from tests.service.models.engine_models import by_hand, same
from tests.support.raw_clients import RawClient
from tests.support.reference import tiny_config, tiny_model
from tests.support.rounds import rounds
from tests.support.services import RunningService, running_service
from weighbridge import Boxes, EngineClient, ExpertParallel, FullTensors, TensorParallel, TrainerClient
from weighbridge._cli import commands
from weighbridge._core import dtypes
from weighbridge._core.slices import LayoutRequest
from weighbridge._transport import wire
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import weight_service_pb2

MODEL = "tests/engine"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def state(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of version 1."""
    config = tiny_config("qwen3", tied=False, hidden_size=256, intermediate_size=512, vocab_size=1002)
    folder = tmp_path_factory.mktemp("hf")
    model = tiny_model(config, seed=3)
    model.save_pretrained(folder)
    with TrainerClient(service.address) as trainer:
        trainer.register_model(MODEL, folder)
        trainer.push_folder(MODEL, folder).wait(timeout=60)
    return dict(model.state_dict())


@pytest.fixture
def engine(service: RunningService, state: dict[str, Tensor]) -> Iterator[EngineClient]:
    with EngineClient(service.address) as client:
        yield client


def test_a_rank_of_an_engine_pulls_its_stage_with_the_vocabulary_padded(
    engine: EngineClient, state: dict[str, Tensor]
) -> None:
    size = 4
    cut = [by_hand(state | {"lm_head.weight": torch.zeros(4)}, 4, size, rank) for rank in range(size)]
    names: list[str] = []
    for first, end in ((0, 2), (2, 4)):
        for rank in range(size):
            found = dict(engine.pull(MODEL, 1, TensorParallel(size, rank, layers=(first, end), vocab_multiple=64)))
            for name, tensor in found.items():
                if name in ("model.embed_tokens.weight", "lm_head.weight"):
                    whole = torch.cat([state[name], torch.zeros(22, 256)])
                    assert torch.equal(tensor, whole.chunk(size)[rank]), name
                else:
                    assert torch.equal(tensor, cut[rank][name]), name
        names += found
    assert sorted(names) == sorted(state)


@pytest.mark.slow
def test_as_many_boxes_as_an_engine_asks_for_come_in_one_pull(engine: EngineClient, state: dict[str, Tensor]) -> None:
    chance = random.Random(5)
    names = list(state)
    boxes: list[tuple[str, Sequence[int], Sequence[int]]] = []
    for _ in range(rounds("BOXES")):
        name = chance.choice(names)
        offset = [chance.randrange(n) for n in state[name].shape]
        extent = [chance.randint(1, min(9, n - o)) for n, o in zip(state[name].shape, offset, strict=True)]
        boxes.append((name, offset, extent))
    for dtype, count in ((None, len(boxes)), (torch.bfloat16, len(boxes) // 10)):
        pull = engine.pull(MODEL, 1, Boxes(boxes[:count]), dtype=str(dtype) if dtype else None)
        for (got, tensor), (name, offset, extent) in zip(pull, boxes[:count], strict=True):
            wanted = state[name][tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
            assert got == name
            assert torch.equal(tensor, wanted.to(dtype) if dtype else wanted)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp64", "torch.bfloat16", "fp32"])
def test_a_pull_in_another_dtype_is_what_torch_casts(
    engine: EngineClient, state: dict[str, Tensor], dtype: str
) -> None:
    pull = engine.pull(MODEL, 1, dtype=dtype)
    found = dict(pull)
    assert pull.nbytes == sum(tensor.nbytes for tensor in found.values())
    same(found, {name: tensor.to(dtypes.parse(dtype).torch) for name, tensor in state.items()})


def test_a_cast_pull_resumes_in_the_middle_of_an_element(engine: EngineClient, state: dict[str, Tensor]) -> None:
    request = TensorParallel(2, 1, vocab_multiple=64)
    layout = wire.request_to_proto(request)
    whole = b"".join(map(bytes, engine.pull(MODEL, 1, request, dtype="bf16").stream()))
    chance = random.Random(2)
    for offset in [
        1,
        2,
        1048575,
        1048577,
        len(whole) - 1,
        len(whole),
        *(chance.randrange(len(whole)) for _ in range(5)),
    ]:
        message = weight_service_pb2.PullRequest(model=MODEL, version="1", layout=layout, dtype="bf16", offset=offset)
        assert b"".join(piece.data for piece in _pulled(engine, message)) == whole[offset:]
    beyond = weight_service_pb2.PullRequest(
        model=MODEL, version="1", layout=layout, dtype="bf16", offset=len(whole) + 1
    )
    with pytest.raises(InvalidArgument, match="cannot begin"):
        _pulled(engine, beyond)


def _pulled(engine: EngineClient, message: weight_service_pb2.PullRequest) -> list[weight_service_pb2.PullResponse]:
    """The responses to a request, as any client of the contract receives them."""
    with RawClient(engine.server) as raw:
        found: list[weight_service_pb2.PullResponse] = raw.call(raw.weights.Pull, message)
        return found


@pytest.mark.parametrize(
    ("layout", "dtype", "says"),
    [
        (FullTensors(), "float7", "not a known dtype"),
        (FullTensors(), "x" * 10_000, "not a known dtype"),
        (FullTensors(), "i32", "cannot be cast"),
        (TensorParallel(4, 0), None, "vocab_multiple"),
        (TensorParallel(2, 0, layers=(0, 5)), None, "the model has 4"),
        (TensorParallel(2, 0, experts=ExpertParallel(2, 0)), None, "no experts"),
        (TensorParallel(3, 0, vocab_multiple=64), None, "embed_tokens"),
    ],
)
def test_the_service_refuses_what_does_not_fit(
    engine: EngineClient, layout: LayoutRequest, dtype: str | None, says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says) as caught:
        engine.pull(MODEL, 1, layout, dtype=dtype)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 1},
        {"layers": {"first": 4, "end": 2}},
        {"layers": {"first": 0, "end": 2**32 - 1}},
        {"layers": {}},
        {"vocab_multiple": 0},
        {"vocab_multiple": 2**32 - 1},
        {"experts": {}},
        {"experts": {"size": 2**32 - 1, "rank": 1}},
        {"experts": {"size": 1, "tp_size": 0}},
    ],
    ids=str,
)
def test_a_message_that_no_client_of_ours_sends_is_refused_too(engine: EngineClient, fields: dict[str, Any]) -> None:
    parts = weight_service_pb2.TensorParallel(**{"size": 1, **fields})
    layout = weight_service_pb2.LayoutRequest(tensor_parallel=parts)
    with pytest.raises(InvalidArgument):
        _pulled(engine, weight_service_pb2.PullRequest(model=MODEL, version="1", layout=layout))


def test_the_command_line_writes_the_file_of_a_stage(
    service: RunningService, state: dict[str, Tensor], tmp_path: Path
) -> None:
    args = [
        "pull",
        f"{MODEL}@1",
        "--out",
        str(tmp_path),
        "--server",
        service.address,
        "--json",
        "--layers",
        "2:4",
    ]
    args += ["--tp-size", "2", "--tp-rank", "1", "--vocab-multiple", "64", "--dtype", "bf16"]
    result = CliRunner().invoke(commands, args)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["files"] == ["model-tp1-of-2-layers2-4.safetensors", "config.json"]
    with safe_open(tmp_path / "model-tp1-of-2-layers2-4.safetensors", "pt") as file:
        about = file.metadata()
        assert (about["layers"], about["vocab_multiple"], about["cast_to"]) == ("2:4", "64", "bf16")
        head = torch.cat([state["lm_head.weight"], torch.zeros(22, 256)])[512:]
        assert torch.equal(file.get_tensor("lm_head.weight"), head.to(torch.bfloat16))
        assert {name.split(".")[2] for name in file.keys() if ".layers." in name} == {"2", "3"}  # noqa: SIM118
        assert json.loads(about["shards"])["lm_head.weight"] == {
            "shape": [1024, 256],
            "boxes": [{"offset": [512, 0], "extent": [512, 256]}],
        }


def test_the_command_line_writes_a_whole_folder_in_another_dtype(
    service: RunningService, state: dict[str, Tensor], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    args = ["pull", f"{MODEL}@1", "--out", str(out), "--server", service.address, "--dtype", "bf16"]
    result = CliRunner().invoke(commands, args)
    assert result.exit_code == 0, result.output
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    same(loaded, {name: tensor.to(torch.bfloat16) for name, tensor in state.items()})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--layers", "4"], "like 0:16"),
        (["--layers", "-1:2"], "like 0:16"),
        (["--ep-size", "2"], "--ep-rank is missing"),
        (["--etp-rank", "0"], "--etp-size is missing"),
        (["--vocab-multiple", "0"], "--vocab-multiple"),
    ],
)
def test_the_command_line_says_how_parts_are_written(options: list[str], says: str) -> None:
    result = CliRunner().invoke(commands, ["pull", "a/b@1", "--out", "x", *options])
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())
