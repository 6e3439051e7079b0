"""Do slime's and Miles's weight updates move Megatron's shards to engines as they are, by the calls of their trainer
actors?

Ranks are real, of Megatron-core over gloo, and so is the service. The actors are `tests.support.slime_actors`, engines
`tests.support.sglang_fakes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from tests.support.killable_service import KillableService
from tests.support.megatron_families import build_family_model
from tests.support.megatron_ranks import run_ranks
from tests.support.reference import MtpReference, load_with_mbridge, tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.sglang_fakes import FakeSglang, fake_sglang
from tests.support.slime_actors import EngineHandle, TrainerActor, arguments
from tests.support.waiting import eventually
from weighbridge import TrainerClient
from weighbridge.errors import NotFound, WeighbridgeError
from weighbridge_demo.megatron_cpu import Parallel

pytestmark = [pytest.mark.timeout(600)]

MODEL = "tests/policy"
FACTOR = -2.0
SIZES: dict[str, Any] = {"hidden_size": 256, "vocab_size": 2048, "torch_dtype": "bfloat16"}


class Collectives(TorchDispatchMode):
    """Bytes of all tensors that this process hands to collectives and point-to-point calls."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            found = torch.utils._pytree.tree_leaves((args, kwargs))
            self.nbytes += sum(each.nbytes for each in found if isinstance(each, Tensor))
        return func(*args, **(kwargs or {}))


def written(folder: Path, family: str, **fields: Any) -> tuple[PretrainedConfig, dict[str, Tensor]]:
    """A small model in bf16 whose configuration is saved; its weights by Hugging Face's names."""
    config = tiny_config(family, tied=False, **{**SIZES, **fields})
    model = tiny_model(config, seed=3)
    state = dict(model.state_dict())
    if getattr(config, "num_nextn_predict_layers", 0):
        state |= MtpReference(model, seed=4).tensors(model)
    config.save_pretrained(folder)
    return config, {name: tensor.bfloat16() for name, tensor in state.items()}


def nbytes(weights: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def said(address: str, folder: Path, **more: Any) -> dict[str, Any]:
    """The arguments that a user adds to the framework's."""
    settings = {"server": address, "model": MODEL, "lane": "grpc", "retry_seconds": 3.0, **more}
    return {"weighbridge": settings, "hf_checkpoint": str(folder)}


def assert_holds(engine: FakeSglang, update: int, weights: dict[str, Tensor]) -> None:
    """The slices of an update are those of the weights, to the bit: each tensor whole, or cut along an axis."""
    [of_ranks] = [slices for _, slices, label in engine.history if label == str(update)]
    for name, tensor in weights.items():
        parts = [rank[name] for rank in of_ranks]
        axes = [axis for axis in range(tensor.ndim) if parts[0].shape[axis] != tensor.shape[axis]]
        found = torch.cat(parts, axes[0]) if axes else parts[0]
        assert torch.equal(found, tensor), name
        assert axes or all(torch.equal(part, tensor) for part in parts), name
    assert all(rank.keys() == weights.keys() for rank in of_ranks)


@contextmanager
def engines(count: int) -> Iterator[list[FakeSglang]]:
    with ExitStack() as stack:
        yield [stack.enter_context(fake_sglang()) for _ in range(count)]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path / "store") as running:
        yield running


def started(
    framework: str,
    parallel: Parallel,
    config: PretrainedConfig,
    weights: dict[str, Tensor],
    more: dict[str, Any],
) -> tuple[TrainerActor, list[torch.nn.Module]]:
    """This rank's actor, and its chunks, wrapped as Megatron-LM wraps them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    stages: list[int | None] = [None] if parallel.vpp is None else list(range(parallel.vpp))
    chunks = [build_family_model(config, parallel, dtype=torch.bfloat16, vp_stage=stage) for stage in stages]
    for chunk in chunks:
        load_with_mbridge(chunk, weights, config)
    settings = DistributedDataParallelConfig()
    wrapped = [DistributedDataParallel(chunk.config, settings, Float16Module(chunk.config, chunk)) for chunk in chunks]
    return TrainerActor(framework, arguments(framework, **more), wrapped), chunks


def scale(chunks: Sequence[torch.nn.Module]) -> None:
    """Change all weights, exactly."""
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.mul_(FACTOR)


def three_updates(
    rank: int,
    framework: str,
    parallel: Parallel,
    config: PretrainedConfig,
    weights: dict[str, Tensor],
    more: dict[str, Any],
    urls: list[str],
) -> dict[str, Any]:
    del rank
    actor, chunks = started(framework, parallel, config, weights, more)
    handles = [EngineHandle(framework, url) for url in urls]
    handles.insert(1, EngineHandle(framework, "http://other-node", node_rank=1))
    collectives, metrics = Collectives(), []
    for number in range(3):
        if number:
            scale(chunks)
        with collectives:
            metrics.append(actor.update_weights(handles, 0 if number else len(handles)))
    return {"collectives": collectives.nbytes, "metrics": metrics}


@pytest.mark.parametrize(
    ("framework", "family", "parallel"),
    [
        ("slime", "qwen3", Parallel(tp=2, pp=2)),
        ("slime", "qwen3_moe", Parallel(dp=2, ep=2)),
        ("slime", "qwen3_moe", Parallel(pp=2, vpp=2)),
        ("slime", "mixtral", Parallel(tp=2, dp=2, ep=2)),
        ("slime", "mimo", Parallel(pp=2)),
        ("miles", "qwen3", Parallel(tp=2, dp=2)),
    ],
    ids=str,
)
def test_engines_get_to_the_bit_what_ranks_hold_and_nothing_is_gathered(
    service: RunningService, tmp_path: Path, framework: str, family: str, parallel: Parallel
) -> None:
    config, weights = written(tmp_path / "hf", family)
    size = nbytes(weights)
    with engines(2) as served:
        more = said(service.address, tmp_path / "hf")
        urls = [engine.url for engine in served]
        found = run_ranks(parallel, three_updates, framework, parallel, config, weights, more, urls)
        for engine in served:
            for update in (1, 2, 3):
                scaled = {name: tensor * FACTOR ** (update - 1) for name, tensor in weights.items()}
                assert_holds(engine, update, scaled)
            assert engine.calls.count("/pause_generation") == engine.calls.count("/continue_generation") == 3
            assert not engine.paused
        held = sum(engine.holds for engine in served)
    assert service.service.intake.bytes_in <= 1.01 * 3 * size
    assert service.service.serving.bytes_out <= 1.01 * 3 * held
    assert all(0 < rank["collectives"] <= 0.01 * size for rank in found), found
    with TrainerClient(service.address) as client:
        versions = client.versions(MODEL)
    assert [version.step for version in versions] == [3, 2, 1]
    for rank in found:
        assert [each["weighbridge/version"] for each in rank["metrics"]] == [1, 2, 3]
        assert all(each["weighbridge/engine_bytes"] == held for each in rank["metrics"])


def updates(
    rank: int,
    parallel: Parallel,
    config: PretrainedConfig,
    weights: dict[str, Tensor],
    more: dict[str, Any],
    urls: list[str],
    count: int,
    signs: Path | None,
) -> list[str]:
    """The error of each update.

    With ``signs``, the last rank's second push waits for one file there, and all ranks wait for another after that
    update.
    """
    actor, chunks = started("slime", parallel, config, weights, more)
    push = actor.weight_updater._client.push

    def waiting(*args: Any, **kwargs: Any) -> Any:
        if signs and rank == parallel.world_size - 1 and kwargs["step"] == 2:
            eventually((signs / "killed").exists)
        return push(*args, **kwargs)

    actor.weight_updater._client.push = waiting
    handles = [EngineHandle("slime", url) for url in urls]
    raised = []
    for number in range(1, count + 1):
        try:
            actor.update_weights(handles, len(handles) if number == 1 else 0)
        except WeighbridgeError as error:
            raised.append(str(error))
        else:
            raised.append("")
        if signs and number == 2:
            (signs / f"ended{rank}").touch()
            eventually((signs / "back").exists)
        scale(chunks)
    return raised


def test_a_service_that_is_killed_in_an_update_is_told_of_by_all_ranks_and_serves_the_next_one(
    tmp_path: Path,
) -> None:
    config, weights = written(tmp_path / "hf", "qwen3")
    service, parallel, signs = KillableService(tmp_path / "store"), Parallel(tp=2), tmp_path / "signs"
    signs.mkdir()
    service.start()

    def kill() -> None:
        with TrainerClient(service.address) as client:
            eventually(lambda: 2 in steps(client))
        service.kill()
        (signs / "killed").touch()
        eventually(lambda: all((signs / f"ended{rank}").exists() for rank in range(2)))
        service.start()
        (signs / "back").touch()

    try:
        with engines(1) as [engine], ThreadPoolExecutor(1) as pool:
            killed = pool.submit(kill)
            more = said(service.address, tmp_path / "hf")
            found = run_ranks(parallel, updates, parallel, config, weights, more, [engine.url], 3, signs)
            killed.result()
            for first, second, third in found:
                assert first == third == ""
                assert second.startswith("update 2 has failed")
                assert service.address in second
            assert_holds(engine, 1, weights)
            assert_holds(engine, 3, {name: tensor * FACTOR**2 for name, tensor in weights.items()})
            assert engine.calls.count("/pause_generation") == engine.calls.count("/continue_generation") == 2
    finally:
        service.kill()


def steps(client: TrainerClient) -> list[int | None]:
    """Of all versions, also of those that are being pushed."""
    with suppress(NotFound):
        return [version.step for version in client.versions(MODEL, include_invisible=True)]
    return []


def test_an_engine_that_fails_is_named_by_all_ranks_and_no_engine_is_left_standing(
    service: RunningService, tmp_path: Path
) -> None:
    config, weights = written(tmp_path / "hf", "qwen3")
    with engines(2) as [first, second]:
        first.refuse = {"2": "prepare"}
        second.refuse = {"3": "apply"}
        more = said(service.address, tmp_path / "hf")
        urls = [first.url, second.url]
        found = run_ranks(Parallel(tp=2), updates, Parallel(tp=2), config, weights, more, urls, 4, None)
        for raised in found:
            assert [raised[0], raised[3]] == ["", ""]
            assert raised[1].startswith("update 2 has failed")
            assert f"{first.url}: version 2 could not be prepared" in raised[1]
            assert second.url not in raised[1]
            assert f"{second.url}: " in raised[2]
            assert first.url not in raised[2]
        assert [label for _, _, label in first.history] == ["1", "3", "4"]
        assert [label for _, _, label in second.history] == ["1", "4"]
        for engine in (first, second):
            assert_holds(engine, 4, {name: tensor * FACTOR**3 for name, tensor in weights.items()})
            assert engine.calls.count("/pause_generation") == engine.calls.count("/continue_generation") == 3
            assert not engine.paused


@pytest.mark.parametrize("servers", [[], [""]], ids=["not connected", "no server"])
def test_an_update_that_would_reach_no_engine_fails_on_all_ranks(
    service: RunningService, tmp_path: Path, servers: list[str]
) -> None:
    config, weights = written(tmp_path / "hf", "qwen3")
    more = said(service.address, tmp_path / "hf")
    found = run_ranks(Parallel(tp=2), unreached, Parallel(tp=2), config, weights, more, len(servers))
    for raised in found:
        assert raised.startswith("update 1 has failed")
        assert f"none of {len(servers)} engines has a server" in raised


def unreached(
    rank: int,
    parallel: Parallel,
    config: PretrainedConfig,
    weights: dict[str, Tensor],
    more: dict[str, Any],
    parts: int,
) -> str:
    """The error of an update whose engines are all nodes without a server of their own."""
    del rank
    actor, _ = started("slime", parallel, config, weights, more)
    handles = [EngineHandle("slime", "http://other-node", node_rank=1)] * parts
    with pytest.raises(WeighbridgeError) as raised:
        actor.update_weights(handles, parts)
    return str(raised.value)


def growth(rank: int, parallel: Parallel, config: PretrainedConfig, more: dict[str, Any], url: str) -> tuple[int, int]:
    """Peak growth of this process in an update, and the size of its shards, both in bytes."""
    del rank
    model = build_family_model(config, parallel, dtype=torch.bfloat16)
    actor = TrainerActor("slime", arguments("slime", **more), [model])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("VmRSS")
    actor.update_weights([EngineHandle("slime", url)], 1)
    return memory("VmHWM") - before, sum(parameter.nbytes for parameter in model.parameters())


def memory(name: str) -> int:
    """Memory of this process in bytes: ``VmRSS`` is the current size, ``VmHWM`` the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def test_a_rank_needs_its_own_shards_once_more_and_no_whole_model(service: RunningService, tmp_path: Path) -> None:
    config = tiny_config("qwen3", tied=False, **{**SIZES, "hidden_size": 1024, "vocab_size": 65536})
    config.save_pretrained(tmp_path / "hf")
    parallel = Parallel(tp=2, pp=2)
    with engines(1) as [engine]:
        more = said(service.address, tmp_path / "hf")
        found = run_ranks(parallel, growth, parallel, config, more, engine.url)
    for grown, held in found:
        assert grown <= held + (40 << 20)
