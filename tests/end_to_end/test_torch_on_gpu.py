"""Torch trainers on a GPU: is every bit that they push from there, and fill there, where torch's own ``full_tensor()``
has it?

One process for each GPU, two at most, over NCCL. They overwrite their parameters once `push_state_dict` has returned.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.torch_ranks import fill, full_tensors
from weighbridge import EngineClient, InvalidArgument, LayoutError, TrainerClient, WeighbridgeError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
CONFIG = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=131)
LANES = ["local", "grpc"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        yield running


def register(service: RunningService, name: str, folder: Path, dtype: str) -> None:
    CONFIG.save_pretrained(folder)
    with TrainerClient(service.address) as trainer:
        trainer.register_model(name, folder, dtype=dtype)


def _on_gpu(size: int, rank: int, store_path: str, fn: Any, *args: Any) -> Any:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store_path}", rank=rank, world_size=size)
    found = fn(rank, *args)
    dist.destroy_process_group()
    return found


def run_on_gpus(fn: Any, *args: Any) -> list[Any]:
    """The results of ``fn(rank, *args)`` on all ranks, one on each GPU."""
    size = min(torch.cuda.device_count(), 2)
    spawning = multiprocessing.get_context("spawn")  # CUDA cannot be reinitialized in a fork
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, spawning) as pool:
        ranks = [pool.submit(_on_gpu, size, rank, f"{folder}/store", fn, *args) for rank in range(size)]
        return [rank.result(timeout=200) for rank in ranks]


def _sharded(seed: int, dtype: torch.dtype) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = tiny_model(CONFIG, seed=seed).to(dtype).cuda()
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[no-any-return]


def _one_step(model: torch.nn.Module) -> None:
    """One step on the GPU, without a synchronization after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(64, device="cuda").view(4, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def _push_and_fill(rank: int, address: str, name: str, held: torch.dtype, lane: str) -> Any:
    model = _sharded(5, held)
    with TrainerClient(address, lane=lane) as trainer:
        _one_step(model)
        handle = trainer.push_state_dict(name, model, step=1)
        expected = {key: tensor.cpu() for key, tensor in full_tensors(model).items()}
        again = trainer.push_state_dict(name, model, step=2)
        fill(model.parameters(), 7.0)
        version = handle.wait(timeout=100)
        number = again.wait(timeout=100).number
        other = _sharded(6, held)
        trainer.restore_state_dict(name, other, version=number)
        restored = {key: tensor.cpu() for key, tensor in full_tensors(other).items()}
        assert version.nonfinite_elements == 0
        report = handle.report()
    with EngineClient(address, lane=lane) as engine:
        whole = tiny_model(CONFIG, seed=7).to(held).cuda()
        filled = engine.pull(name, number).into(whole, cast="allow")
        assert filled.version.number == number
    return (
        expected,
        restored,
        {key: tensor.cpu() for key, tensor in whole.state_dict().items()},
        number,
        report,
    )


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(
    ("registered", "held"), [("bf16", torch.float32), ("bf16", torch.bfloat16), ("fp32", torch.bfloat16)]
)
def test_fully_sharded_parameters_on_gpus_are_pushed_and_filled_bit_for_bit(
    service: RunningService, tmp_path: Path, lane: str, registered: str, held: torch.dtype
) -> None:
    name = f"tests/gpu-{registered}-{str(held).rpartition('.')[2]}-{lane}"
    register(service, name, tmp_path, registered)
    kept = {"fp32": torch.float32, "bf16": torch.bfloat16}[registered]
    ranks = run_on_gpus(_push_and_fill, service.address, name, held, lane)
    expected, restored, whole, number, _ = ranks[0]
    with EngineClient(service.address) as engine:
        first, second = dict(engine.pull(name, number - 1)), dict(engine.pull(name, number))
    assert first.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(first[key], tensor.to(kept)), key
        assert torch.equal(second[key], tensor.to(kept)), key
        assert torch.equal(restored[key], tensor.to(kept).to(held)), key
        assert torch.equal(whole[key], tensor.to(kept).to(held)), key
    reports = [report for *_, report in ranks]
    assert sum(report.stream_bytes for report in reports) == sum(tensor.nbytes for tensor in first.values())
    assert {report.lane for report in reports} == {lane}
    assert sum(report.cast_tensors for report in reports) >= (len(first) if kept != held else 0)


def _push_gathered(rank: int, address: str, name: str, held: torch.dtype, lane: str) -> Any:
    """Whole tensors in one buffer, which the GPU overwrites as soon as the next one is asked for."""
    model = tiny_model(CONFIG, seed=5).to(held).cuda()
    state = {key: tensor.detach() for key, tensor in model.state_dict().items()}
    buffer = torch.empty(max(tensor.numel() for tensor in state.values()), dtype=held, device="cuda")

    def weights() -> Iterator[tuple[str, Tensor]]:
        for key, tensor in state.items():
            passing = buffer[: tensor.numel()].view(tensor.shape)
            passing.copy_(tensor)
            yield key, passing
            buffer.fill_(7.0)

    with TrainerClient(address, lane=lane) as trainer:
        handle = trainer.push_gathered(name, weights(), step=1, buffer_bytes=2 << 20)
        return (
            {key: tensor.cpu() for key, tensor in state.items()},
            handle.wait(timeout=100).number,
            handle.report(),
        )


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_whole_tensors_that_pass_by_on_gpus_arrive_bit_for_bit(
    service: RunningService, tmp_path: Path, lane: str, held: torch.dtype
) -> None:
    name = f"tests/gathered-{str(held).rpartition('.')[2]}-{lane}"
    register(service, name, tmp_path, "bf16")
    ranks = run_on_gpus(_push_gathered, service.address, name, held, lane)
    expected, number, _ = ranks[0]
    with EngineClient(service.address) as engine:
        found = dict(engine.pull(name, number))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor.bfloat16()) for key, tensor in expected.items())
    assert {report.lane for *_, report in ranks} == {lane}
    assert sum(report.stream_bytes for *_, report in ranks) == sum(tensor.nbytes for tensor in found.values())


@pytest.mark.parametrize("lane", LANES)
def test_what_is_not_finite_on_a_gpu_is_counted_there_and_holds_the_version(
    service: RunningService, tmp_path: Path, lane: str
) -> None:
    """3.4e38 is a number in float32, and infinite in bfloat16."""
    name = f"tests/gpu-nan-{lane}"
    register(service, name, tmp_path, "bf16")
    model = tiny_model(CONFIG, seed=5).cuda()
    with (
        TrainerClient(service.address, lane=lane) as trainer,
        EngineClient(service.address, lane=lane) as engine,
    ):
        good = trainer.push_state_dict(name, model, step=1).wait(timeout=60)
        weights = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
        weights["model.norm.weight"][:3] = 3.4e38
        weights["lm_head.weight"] = weights["lm_head.weight"].t().contiguous().t()  # not in row-major order
        weights["lm_head.weight"][5, 7:9] = float("nan")
        handle = trainer.push_state_dict(name, weights, step=2)
        held = handle.wait(timeout=60)
        assert dict(handle.report().nonfinite_tensors) == {"lm_head.weight": 2, "model.norm.weight": 3}
        assert held.nonfinite_elements == 5
        assert held.held
        for ref in ("live", "latest"):
            assert engine.pull(name, ref).version.number == good.number
        allowed = trainer.push_state_dict(name, weights, step=3, allow_nonfinite=True).wait(timeout=60)
        assert engine.pull(name, "latest").version.number == allowed.number
        pulled: dict[str, Tensor] = dict(engine.pull(name, allowed.number))
    for key, tensor in weights.items():
        cast = tensor.contiguous().bfloat16().cpu()
        assert torch.equal(pulled[key].view(torch.int16), cast.view(torch.int16)), key


def test_casts_of_tensors_on_a_gpu_are_refused_where_they_may_not_be(service: RunningService, tmp_path: Path) -> None:
    for registered, held in (("bf16", torch.float32), ("fp32", torch.bfloat16)):
        name = f"tests/gpu-cast-{registered}"
        register(service, name, tmp_path / registered, registered)
        model = tiny_model(CONFIG, seed=5).to(held).cuda()
        with TrainerClient(service.address, lane="local") as trainer:
            with pytest.raises((LayoutError, InvalidArgument, WeighbridgeError), match="cast"):
                trainer.push_state_dict(name, model, step=1, cast="never")
            if registered == "bf16":
                with pytest.raises(WeighbridgeError, match="cast"):
                    trainer.push_state_dict(name, model, step=1, cast="exact")
            else:
                handle = trainer.push_state_dict(name, model, step=1, cast="exact")
                handle.wait(timeout=60)
                assert handle.report().widened_tensors == handle.report().cast_tensors > 0


class _Dataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.arange(8) + index
        return {"input_ids": tokens, "labels": tokens}


def _train(rank: int, address: str, name: str, folder: str, options: dict[str, Any]) -> Any:
    """Train with transformers' Trainer; the weights on this rank, and the number of the version that its callback
    pushed.
    """
    from transformers import Trainer, TrainingArguments

    from weighbridge.integrations.transformers.trainer_callback import PushCallback

    size = str(torch.distributed.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # of the group that there is already
    args = TrainingArguments(
        folder, report_to=[], disable_tqdm=True, max_steps=3, save_strategy="no", per_device_train_batch_size=2, **options,
    )  # fmt: skip
    pushes = PushCallback(name, address, every=1, strict=True)
    trainer = Trainer(tiny_model(CONFIG, seed=5), args, train_dataset=_Dataset(), callbacks=[pushes])
    trainer.train()
    version = pushes.wait(timeout=60)
    pushes.close()
    assert version.step == 3
    [kind] = {type(parameter.data).__name__ for parameter in trainer.model.parameters()}
    assert all(parameter.is_cuda for parameter in trainer.model.parameters())
    return kind, version.number, {key: tensor.cpu() for key, tensor in full_tensors(trainer.model).items()}


@pytest.mark.parametrize("way", ["fsdp", "plain"])
def test_the_callback_of_transformers_trainer_pushes_from_gpus(
    service: RunningService, tmp_path: Path, way: str
) -> None:
    """By accelerate's FSDP version 2, which it has on GPUs only; and as one process for each GPU."""
    options: dict[str, Any] = {}
    if way == "fsdp":
        layers = {
            "version": 2,
            "reshard_after_forward": True,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        }
        options = {"fsdp": "full_shard auto_wrap", "fsdp_config": layers}
    name = f"tests/gpu-callback-{way}"
    [(kind, number, expected), *_] = run_on_gpus(_train, service.address, name, str(tmp_path), options)
    assert kind == ("DTensor" if way == "fsdp" else "Tensor")
    with EngineClient(service.address) as engine:
        pulled = dict(engine.pull(name, number))
    assert pulled.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(pulled[key], tensor), key
