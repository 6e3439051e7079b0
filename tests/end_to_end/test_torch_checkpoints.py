"""torch.distributed.checkpoint -> service -> other meshes: does ``dcp.load`` bring what ``dcp.save`` was given, and is
the rest refused?

Real ranks over gloo. One job saves, on four ranks and in all ways; another one loads, on three.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.torch_ranks import fill, full_tensors, run_ranks, shared
from weighbridge import (
    EngineClient,
    InvalidArgument,
    LayoutError,
    NotFound,
    TrainerClient,
    Version,
    VersionState,
)
from weighbridge.integrations.torch import WeighbridgeReader, WeighbridgeWriter
from weighbridge.integrations.torch.entries import check_one_box

CONFIGS = {
    "tests/untied": tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=131),
    "tests/tied": tiny_config("qwen3", tied=True, num_hidden_layers=2, vocab_size=131),
    "tests/experts": tiny_config("qwen3_moe", tied=False, num_hidden_layers=2, vocab_size=131),
}
CAST = "tests/untied-bf16"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            for name, config in CONFIGS.items():
                config.save_pretrained(folder / name)
                trainer.register_model(name, folder / name, dtype="fp32")
            trainer.register_model(CAST, folder / "tests/untied", dtype="bf16")
        yield running


def _made(name: str, way: str, seed: int) -> torch.nn.Module:
    return shared(tiny_model(CONFIGS[name], seed=seed).float(), way)


def _stacked(axis: int, seed: int) -> dict[str, Any]:
    """A state dict as transformers 5 has it, with experts stacked in one tensor, which ranks share along an axis."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    state = dict(tiny_model(CONFIGS["tests/experts"], seed=seed).float().state_dict())
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts"
        of = {
            each: torch.stack([state.pop(f"{stem}.{n}.{each}.weight") for n in range(8)])
            for each in ("gate_proj", "up_proj", "down_proj")
        }
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for name, tensor in (
            ("gate_up_proj", torch.cat([of["gate_proj"], of["up_proj"]], 1)), ("down_proj", of["down_proj"]),
        ):  # fmt: skip
            state[f"{stem}.{name}"] = distribute_tensor(tensor, mesh, [Shard(axis)])
    return state


def _swapped(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.transpose(1, 2) if tensor.dim() == 3 else tensor for name, tensor in state.items()}


def _saving(rank: int, address: str) -> dict[str, Any]:
    """Save on four ranks; the whole tensors by step, and the errors of refused saves."""
    saved: dict[str, Any] = {}
    model = _made("tests/untied", "tp_fsdp", 5)
    state = model.state_dict()
    nested = {
        "model": state,
        "optimizer": {"state": {"model.norm.weight": {"exp_avg": torch.ones(64)}}, "lr": 0.1},
    }
    writer = WeighbridgeWriter("tests/untied", address, step=1)
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.save(nested, storage_writer=writer)
    saved["refused"] = str(error.value)
    uncovered = {"model": {key: value for key, value in state.items() if key != "model.norm.weight"}}
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.save(uncovered, storage_writer=WeighbridgeWriter("tests/untied", address, step=2))
    saved["uncovered"] = str(error.value)

    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if rank == 1:
                raise OSError("one rank cannot read its tensors")
            return super().resolve_data(write_item)

    with pytest.raises(dcp.CheckpointException) as error:
        dcp.save({"model": state}, storage_writer=writer, planner=Failing())
    saved["failing"] = str(error.value)

    saved["untied"] = full_tensors(model)
    dcp.save({"model": model}, storage_writer=writer)
    assert writer.last is not None
    saved["bytes"] = writer.last.report().stream_bytes
    saved["numbers"] = [writer.last.number]
    with WeighbridgeWriter(CAST, address, step=1, until="ready") as casting:
        dcp.save(state, storage_writer=casting)

    model = _made("tests/tied", "hsdp", 7)
    with WeighbridgeWriter("tests/tied", address, metadata={"job": "four"}) as writer:
        for step in (5, 6, 7):  # the planner sends its plan only once
            fill([model.get_parameter("model.norm.weight")], step)
            saved[f"tied-{step}"] = full_tensors(model)
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(model.state_dict(), storage_writer=writer, planner=planner, checkpoint_id=f"out/step-{step}")
            assert writer.last is not None
            saved["numbers"].append(writer.last.number)
        fill(model.parameters(), 8.0)
        future = dcp.async_save({"model": model}, storage_writer=writer, checkpoint_id="out/step-8")
        fill(model.parameters(), 9.0)
        future.result()
    for axis, lane in ((0, "local"), (1, "grpc"), (2, "local")):
        with TrainerClient(address, lane=lane) as trainer:
            state = _stacked(axis, axis)
            state = _swapped(state) if axis else state
            trainer.push_state_dict("tests/experts", state, step=axis).wait(timeout=60)
    with WeighbridgeWriter("tests/experts", address, step=3) as writer:
        dcp.save({"model": _stacked(1, 3)}, storage_writer=writer)
    said = ("bytes", "numbers", "refused", "uncovered", "failing")
    return saved if rank == 0 else {key: saved[key] for key in said}


def _loading(rank: int, address: str) -> dict[str, Any]:
    """Load on three ranks; the loaded tensors, and the errors for names that the version lacks."""
    loaded: dict[str, Any] = {}
    model = _made("tests/untied", "fsdp3", 6)
    with WeighbridgeReader("tests/untied", address) as reader:
        state = model.state_dict()
        dcp.load({"model": state}, storage_reader=reader)
        loaded["version"] = reader.version
        loaded["untied"] = full_tensors(model)
        with pytest.raises(dcp.CheckpointException) as error:
            dcp.load({**state, "model.norms.weight": torch.ones(64)}, storage_reader=reader)
        loaded["missing"] = str(error.value)
        part = {
            "model.norm.weight": torch.zeros(64, dtype=torch.bfloat16),
            "model.norms.weight": torch.ones(64),
        }
        dcp.load(part, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
        loaded["part"] = part
    model = _made("tests/tied", "fsdp3", 6)
    with WeighbridgeReader("tests/tied", address) as reader:
        dcp.load({"model": model}, storage_reader=reader, checkpoint_id="out/step-6")
        loaded["tied-6"] = full_tensors(model)
        plain = {key: torch.zeros_like(value) for key, value in loaded["tied-6"].items() if key != "lm_head.weight"}
        dcp.load(plain, storage_reader=reader)
        loaded["plain"] = plain
        with pytest.raises(dcp.CheckpointException, match="not tied"):
            dcp.load({**plain, "lm_head.weight": torch.zeros(131, 64)}, storage_reader=reader)
    expected = full_tensors(_stacked(0, 1))
    for axis, lane in ((0, "grpc"), (1, "local"), (2, "grpc")):
        with TrainerClient(address, lane=lane) as trainer:
            swapped = _swapped(_stacked(axis, 9))
            trainer.restore_state_dict("tests/experts", swapped, version=2)
            _equal(full_tensors(_swapped(swapped)), expected)
    with WeighbridgeReader("tests/experts", address, version=4) as reader:
        state = _stacked(2, 9)
        dcp.load({"model": state}, storage_reader=reader)
        _equal(full_tensors(state), full_tensors(_stacked(2, 3)))
    return loaded if rank == 0 else {"version": loaded["version"], "missing": loaded["missing"]}


def test_what_four_ranks_save_is_pulled_and_loaded_by_three(service: RunningService) -> None:
    saved = run_ranks(4, _saving, service.address)
    first = saved[0]
    assert all(each["numbers"] == first["numbers"] for each in saved)
    for each in saved:
        assert "optimizer.lr and 1 more like it: not the model's" in each["refused"] or (
            "optimizer.state.model.norm.weight.exp_avg and 1 more like it: not the model's" in each["refused"]
        )
        assert "another writer" in each["refused"]
        assert "model.norm.weight F32[64] is missing" in each["uncovered"]
        assert "one rank cannot read its tensors" in each["failing"]

    # each byte once, whichever ranks hold replicas
    assert sum(each["bytes"] for each in saved) == sum(each.nbytes for each in first["untied"].values())
    with EngineClient(service.address) as engine:
        assert [each.step for each in engine.versions("tests/tied")] == [8, 7, 6, 5]
        assert [each.step for each in engine.versions("tests/untied")] == [1]
        opened = engine.versions("tests/untied", include_invisible=True)
        assert {each.step for each in opened} == {1}, "what lacks a tensor takes no number"
        _equal(dict(engine.pull("tests/untied")), first["untied"])
        cast = {name: tensor.bfloat16() for name, tensor in first["untied"].items()}
        _equal(dict(engine.pull(CAST)), cast)
        for number, step in zip(first["numbers"][1:], (5, 6, 7), strict=True):
            _equal(dict(engine.pull("tests/tied", number)), _untied(first[f"tied-{step}"]))
            assert engine.version("tests/tied", number).metadata == {"job": "four"}
        assert all(bool((tensor == 8).all()) for _, tensor in engine.pull("tests/tied"))
        for number in (1, 2, 3, 4):
            seed = number - 1
            _equal(
                dict(engine.pull("tests/experts", number)),
                dict(tiny_model(CONFIGS["tests/experts"], seed=seed).state_dict()),
            )

    loaded = run_ranks(3, _loading, service.address)
    version = loaded[0]["version"]
    assert isinstance(version, Version)
    assert all(each["version"] == version for each in loaded)
    _equal(loaded[0]["untied"], first["untied"])
    _equal(loaded[0]["tied-6"], first["tied-6"])
    assert all(bool((tensor == 8).all()) for tensor in loaded[0]["plain"].values())
    assert all("model.norms.weight" in each["missing"] for each in loaded)
    part = loaded[0]["part"]
    assert torch.equal(part["model.norm.weight"], first["untied"]["model.norm.weight"].bfloat16())
    assert bool((part["model.norms.weight"] == 1).all())


def _untied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def test_one_process_is_told_all_that_is_wrong(service: RunningService) -> None:
    state = tiny_model(CONFIGS["tests/tied"], seed=5).state_dict()
    name, address = "tests/tied", service.address

    def refused(state: dict[str, Any], **options: Any) -> str:
        with warnings.catch_warnings(), WeighbridgeWriter(name, address, **{"step": 20, **options}) as writer:
            warnings.simplefilter("ignore")  # of one process
            with pytest.raises(dcp.CheckpointException) as error:
                dcp.save(state, storage_writer=writer)
        return str(error.value)

    wrong = {
        **state,
        "model.norm.weight": torch.ones(63),
        "model.norms.weight": torch.ones(64),
        "iteration": 7,
    }
    said = refused({"model": wrong})
    assert "model.norm.weight is [63], and the model has model.norm.weight F32[64]" in said
    assert "model.model.norms.weight: the model has no such tensor; did you mean model.norm.weight?" in said
    assert "model.iteration" in said
    untied = {**state, "lm_head.weight": state["lm_head.weight"] + 1}
    assert "lm_head.weight: the model has no such tensor, and it is not a tied copy" in refused(untied)
    assert "casts are not allowed" in refused({key: value.bfloat16() for key, value in state.items()}, cast="never")
    assert "merged_weights(model)" in refused({"model.layers.0.mlp.up_proj.lora_A.default.weight": torch.ones(2, 64)})
    assert "the step of the save is not known" in refused(state, step=None)
    with pytest.raises(InvalidArgument, match="soon"):
        WeighbridgeWriter(name, address, until="soon")
    with pytest.raises(InvalidArgument, match="perhaps"):
        WeighbridgeWriter(name, address, cast="perhaps")
    with EngineClient(address) as engine:
        assert not any(each.step == 20 for each in engine.versions(name))


def test_errors_say_what_is_wrong_and_nothing_of_how_this_library_is_built(service: RunningService) -> None:
    state = {"model": {"weight": torch.ones(1)}}
    storages: list[tuple[Any, dict[str, Any]]] = [
        (dcp.save, {"storage_writer": WeighbridgeWriter("tests/nobody", service.address, step=1)}),
        (dcp.load, {"storage_reader": WeighbridgeReader("tests/nobody", service.address)}),
    ]
    for call, storage in storages:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one process
            with pytest.raises(dcp.CheckpointException) as error:
                call(state, **storage)
        said = str(error.value)
        assert "there is no model tests/nobody" in said
        assert "_clients" not in said
        assert "contextlib" not in said
        (raised,) = (each[0] for each in error.value.failures.values())
        assert raised.__cause__ is None


def test_no_version_is_visible_before_the_coordinator_has_finished(service: RunningService) -> None:
    class Breaking(WeighbridgeWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            raise OSError("the coordinator has failed")

    name = "tests/untied"
    state = tiny_model(CONFIGS[name], seed=5).state_dict()
    with warnings.catch_warnings(), Breaking(name, service.address) as writer:
        warnings.simplefilter("ignore")  # of one process
        with pytest.raises(dcp.CheckpointException, match="the coordinator has failed"):
            dcp.save(state, storage_writer=writer, checkpoint_id="step-30")
        assert writer.last is not None
        assert not writer.last.sealed
        number = writer.last.number
        with TrainerClient(service.address) as trainer:
            assert trainer.version(name, number).state == VersionState.RECEIVING
            with pytest.raises(dcp.CheckpointException):
                dcp.save(state, storage_writer=writer, checkpoint_id="step-31")
            assert trainer.version(name, number).state == VersionState.ABORTED
            number = writer.last.number
            writer.close()
            assert trainer.version(name, number).state == VersionState.ABORTED


def test_a_model_of_the_same_name_that_was_deleted_is_not_taken_for_the_one_that_is(
    service: RunningService, tmp_path: Path
) -> None:
    name = "tests/again"
    with (
        warnings.catch_warnings(),
        TrainerClient(service.address) as trainer,
        WeighbridgeWriter(name, trainer) as writer,
        WeighbridgeReader(f"{name}@latest", trainer) as reader,
    ):
        warnings.simplefilter("ignore")  # of one process
        for step, vocabulary in enumerate((131, 64), 1):
            config = tiny_config("qwen3", tied=True, num_hidden_layers=1, vocab_size=vocabulary)
            config.save_pretrained(tmp_path / str(step))
            trainer.register_model(name, tmp_path / str(step), dtype="fp32")
            state = tiny_model(config, seed=step).state_dict()
            # as staging for async_save may leave it: tied tensors with memory of their own
            apart = {key: value.clone() for key, value in state.items()}
            dcp.save(apart, storage_writer=writer, checkpoint_id=f"step-{step}")
            found = {key: torch.zeros_like(value) for key, value in _untied(state).items()}
            dcp.load(found, storage_reader=reader)
            _equal(found, _untied(state))
            trainer.delete_model(name)
        apart["lm_head.weight"] += 1
        trainer.register_model(name, tmp_path / "2", dtype="fp32")
        with pytest.raises(dcp.CheckpointException, match="not a tied copy"):
            dcp.save(apart, storage_writer=writer, checkpoint_id="step-3")
        with pytest.raises(NotFound, match="no version of the step in 'step-4'"):
            dcp.load(found, storage_reader=reader, checkpoint_id="step-4")


def test_a_writer_goes_to_another_process_without_its_connections(service: RunningService) -> None:
    with WeighbridgeWriter("tests/tied", service.address, step=3) as writer:
        writer.set_up_storage_writer(True)
        copy = pickle.loads(pickle.dumps(writer))
        copy.set_up_storage_writer(True)
        copy.close()
    with TrainerClient(service.address) as trainer:
        given = WeighbridgeWriter("tests/tied", trainer, step=3)
        with pytest.raises(Exception, match="address"):
            pickle.dumps(given)


def test_a_shard_in_several_places_is_refused_since_a_plan_cannot_say_it() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=4, world_size=6)
    try:
        mesh = init_device_mesh("cpu", (3, 2))
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        for length, several in ((12, False), (13, True)):
            local, _ = compute_local_shape_and_global_offset((length,), mesh, placements)
            shard = DTensor.from_local(
                torch.ones(local), mesh, placements, run_check=False, shape=torch.Size((length,)), stride=(1,)
            )
            planner = DefaultSavePlanner()
            planner.set_up_planner({"weight": shard})
            if several:
                with pytest.raises(LayoutError, match="lies in several places"):
                    check_one_box(planner, "weight")
            else:
                check_one_box(planner, "weight")
    finally:
        torch.distributed.destroy_process_group()


def test_the_model_is_found_where_the_prefix_says_over_a_client_that_stays_open(
    service: RunningService,
) -> None:
    name = "tests/untied"
    state = tiny_model(CONFIGS[name], seed=8).state_dict()
    loaded = {"app": {"model": {key: torch.zeros_like(tensor) for key, tensor in state.items()}}}
    with TrainerClient(service.address) as trainer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process
        with WeighbridgeWriter(name, trainer, step=lambda: 40, prefix="app.model.") as writer:
            dcp.save({"app": {"model": state}}, storage_writer=writer)
        assert writer.version is not None
        with WeighbridgeReader(name, trainer, version=writer.version.number, prefix="app.model.") as reader:
            dcp.load(loaded, storage_reader=reader)
        assert trainer.version(name, reader.version.number if reader.version else 0).step == 40
    _equal(loaded["app"]["model"], dict(state))
