"""Does a pull fill a model in place, exactly, or change nothing and say all that does not fit?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import (
    AsyncEngineClient,
    Boxes,
    EngineClient,
    InvalidArgument,
    LayoutError,
    TensorParallel,
    TrainerClient,
)

MODEL = "tests/into"
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def source() -> torch.nn.Module:
    """A tied model in bf16: its files have no output layer."""
    return tiny_model(tiny_config("qwen3", tied=True, num_hidden_layers=1), seed=1).bfloat16()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, source: torch.nn.Module) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("into")
    source.save_pretrained(folder / "hf")
    with running_service(folder / "store", local_socket=str(folder / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            trainer.import_folder(MODEL, folder / "hf").wait()
        yield running


@pytest.fixture(params=["auto", "grpc"])
def engine(service: RunningService, request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    with EngineClient(service.address, lane=request.param) as client:
        yield client


def other(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    return tiny_model(tiny_config("qwen3", tied=True, num_hidden_layers=1), seed=2).to(dtype)


def same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    held = found.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(held[name], tensor.to(held[name].dtype)), name


def test_a_module_or_its_state_dict_is_filled_in_place(engine: EngineClient, source: torch.nn.Module) -> None:
    for wrap in (lambda m: m, lambda m: m.state_dict(), torch.compile, torch.nn.ModuleDict):
        model = other()
        if wrap is torch.nn.ModuleDict:
            target = {f"module.module.{name}": tensor for name, tensor in model.state_dict().items()}
        else:
            target = wrap(model)
        before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        done = engine.pull(f"{MODEL}@latest").into(target)
        same(model, source)
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
        assert (done.version.number, done.missing, done.unexpected, done.cast) == (1, (), (), ())
        assert set(done.tensors) == model.state_dict().keys() - {HEAD}
        assert done.nbytes == sum(model.state_dict()[name].nbytes for name in done.tensors)


def test_wider_floats_take_the_exact_numbers_and_narrower_ones_only_if_allowed(
    engine: EngineClient, source: torch.nn.Module
) -> None:
    wide = other(torch.float32)
    done = engine.pull(MODEL).into(wide)
    same(wide, source)
    assert set(done.cast) == set(done.tensors)

    half = other(torch.float16)
    before = {name: tensor.clone() for name, tensor in half.state_dict().items()}
    with pytest.raises(LayoutError, match="the cast would not be exact") as refused:
        engine.pull(MODEL).into(half)
    assert "cast='allow'" in refused.value.fix
    assert all(torch.equal(tensor, before[name]) for name, tensor in half.state_dict().items())
    with pytest.raises(LayoutError, match="casts are not allowed"):
        engine.pull(MODEL).into(other(torch.float32), cast="never")
    engine.pull(MODEL).into(half, cast="allow")
    same(half, source)
    # the service casts before it sends
    done = engine.pull(MODEL, dtype=torch.float16).into(half)
    same(half, source)
    assert done.cast == ()


def test_all_that_does_not_fit_is_said_before_anything_is_changed(
    engine: EngineClient, source: torch.nn.Module
) -> None:
    state = other().state_dict()
    state["model.nrm.weight"] = state.pop(NORM).clone()
    state[EMBED] = state[HEAD] = torch.zeros(3, 4, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(LayoutError) as caught:
        engine.pull(MODEL).into(state)
    assert f"differ from those of {MODEL}@1 in" in caught.value.message
    assert f"built from the config.json of {MODEL}@1" in caught.value.fix
    said = "\n".join(caught.value.details)
    assert f"{EMBED} is [3, 4]" in said
    assert f"model.nrm.weight: the model has no such tensor; did you mean {NORM}?" in said
    assert f"{NORM} BF16[64] is missing" in said
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())

    del state[EMBED], state[HEAD]
    done = engine.pull(MODEL).into(state, strict=False)
    assert repr(done).startswith(f"<Filled from {MODEL}@1: ")
    assert "1 missing, 2 unexpected" in repr(done)
    assert len(repr(done)) < 120
    assert (done.missing, set(done.unexpected)) == (("model.nrm.weight",), {EMBED, NORM})
    assert torch.equal(
        state["model.layers.0.mlp.up_proj.weight"], source.state_dict()["model.layers.0.mlp.up_proj.weight"]
    )
    assert engine.pull(MODEL).into({}, strict=False).tensors == ()


def test_what_is_no_model_is_refused(engine: EngineClient) -> None:
    for wrong in (3, [1, 2], {NORM: 3}, torch.ones(2)):
        with pytest.raises(InvalidArgument):
            engine.pull(MODEL).into(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="cast="):
        engine.pull(MODEL).into({}, cast="perhaps")


def test_slices_of_a_rank_fill_tensors_of_their_shapes(engine: EngineClient, source: torch.nn.Module) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    whole = source.state_dict()[name]
    pull = engine.pull(MODEL, layout=TensorParallel(2, 1))
    target = {each: torch.zeros(pull.layout.placements[index].shard.box.extent, dtype=torch.float32)
              for each, (index,) in pull.layout.by_tensor.items()}  # fmt: skip
    pull.into(target)
    assert torch.equal(target[name], whole[len(whole) // 2 :].float())
    # of a part of these, only that part comes
    one: dict[str, Tensor] = {name: torch.zeros_like(target[name])}
    assert pull.into(one, strict=False).nbytes == one[name].nbytes // 2
    assert torch.equal(one[name], target[name])
    with pytest.raises(LayoutError, match="several boxes"):
        engine.pull(MODEL, layout=Boxes([(NORM, (0,), (2,)), (NORM, (4,), (2,))])).into(one)


def test_the_asyncio_client_fills_likewise(service: RunningService, source: torch.nn.Module) -> None:
    async def fill(target: torch.nn.Module) -> None:
        async with AsyncEngineClient(service.address) as client:
            done = await client.pull(f"{MODEL}@1").into(target)
            assert (done.version.number, len(done.cast)) == (1, len(done.tensors))
            part = {NORM: torch.zeros(64)}
            assert (await client.pull(MODEL).into(part, strict=False)).tensors == (NORM,)
            assert torch.equal(part[NORM], source.state_dict()[NORM].float())
            with pytest.raises(LayoutError):
                await client.pull(MODEL).into(part)

    model = other(torch.float32)
    asyncio.run(fill(model))
    same(model, source)


def test_a_contradiction_of_two_versions_is_refused_and_a_torch_dtype_is_a_dtype(
    engine: EngineClient, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="version 2 was given besides"):
        engine.pull(f"{MODEL}@latest", 2)
    pull = engine.pull(f"{MODEL}@1", 1, dtype=torch.float32)
    assert dict(pull)[NORM].dtype == torch.float32
    assert engine.version(f"{MODEL}@latest") == engine.version(MODEL) == engine.version(MODEL, 1)
    assert engine.verify(f"{MODEL}@1").number == 1
    assert engine.export(f"{MODEL}@latest", None, tmp_path / "out", dtype=torch.float32).number == 1
    assert engine.set_ref(f"{MODEL}@1", "prod").number == 1
    assert next(engine.watch(f"{MODEL}@prod")).number == 1
    assert engine.model_files(f"{MODEL}@prod")
    with pytest.raises(InvalidArgument, match="not a version number"):
        engine.delete_version(f"{MODEL}@latest")
