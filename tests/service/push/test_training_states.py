"""Training states: versions beside the weights, each with the tensors that its ranks declare.

The arrays that ranks have pushed are the independent answer: what is pulled has to be their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tests.support.raw_clients import Arrays, RawClient, assert_equal, cut, stream_of
from tests.support.services import RunningService, running_service
from weighbridge import Boxes, EngineClient, TrainerClient, errors
from weighbridge._cli import commands
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.operations.verbs import Verb
from weighbridge._core.references import training_of
from weighbridge._core.resources import Retention, VersionState
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge_service.access.scopes import Scope
from weighbridge_service.fsck.repair import check_store
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.stores.local import LocalStore

MODEL = "acme/smol"
TRAINING = training_of(MODEL)
_DTYPES = {"float32": "fp32", "float64": "F64", "uint8": "U8", "int64": "I64"}


def state(ranks: int, *, step: int, blob_bytes: int = 100) -> dict[str, np.ndarray]:
    """A training state of so many ranks: moments that they share, a step count, and a blob of each."""
    generator = np.random.default_rng(step)
    blobs = {
        f"rank_state.{rank:05d}": generator.integers(0, 255, blob_bytes + 7 * rank + step, np.uint8)
        for rank in range(ranks)
    }
    return {
        "optimizer.state.fc.weight.exp_avg": generator.standard_normal((12, 5), np.float32),
        "optimizer.state.fc.weight.step": np.array(step, np.float32),
        "model.fc.weight": generator.standard_normal((12, 5)),
        **blobs,
    }


def declared(arrays: Arrays, rank: int, ranks: int) -> Layout:
    """The layout of a rank: its share of the rows of 12-row tensors, all smaller tensors, and its own blob."""
    specs, shards = [], []
    for name, array in arrays.items():
        if name.startswith("rank_state") and not name.endswith(f"{rank:05d}"):
            continue
        specs.append(TensorSpec(name, dtypes.parse(_DTYPES[str(array.dtype)]), array.shape))
        rows = 12 // ranks
        box = Box((rank * rows, 0), (rows, 5)) if array.ndim == 2 else Box.whole(array.shape)
        shards.append(Shard(name, box, main=array.ndim > 0 or rank == 0))
    return Layout.stream(specs, shards)


def push(
    client: RawClient,
    arrays: Arrays,
    ranks: int,
    *,
    space: TensorSpace = TensorSpace.MEGATRON,
    model: str = TRAINING,
    others: RawClient | None = None,
    **said: int,
) -> int:
    """Push a state by ``ranks`` ranks, the odd ones of them to ``others``; its number."""
    clients = [(others if others is not None and rank % 2 else client) for rank in range(ranks)]
    step = said.pop("step", 1)
    numbers = {c.open(model, ranks=ranks, step=step, request_id=f"s{step}", **said) for c in clients}
    (number,) = numbers
    layouts = [declared(arrays, rank, ranks) for rank in range(ranks)]
    for rank, layout in enumerate(layouts):  # until all have come, there is no answer
        if rank < ranks - 1:
            with pytest.raises(errors.DeadlineExceeded):
                clients[rank].declare(model, number, layout, rank=rank, space=space, seconds=0.2)
    for rank, layout in reversed(list(enumerate(layouts))):
        assigned = clients[rank].declare(model, number, layout, rank=rank, space=space)
        clients[rank].push(model, number, cut(stream_of(arrays, layout, assigned), 64), rank=rank)
    for rank in range(ranks):
        clients[rank].seal(model, number, rank)
    return number


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def register(address: str) -> None:
    """Register the model, by a tensor of its own: no weight map is made."""
    with TrainerClient(address) as trainer:
        weight = TensorSpec("fc.weight", dtypes.parse("fp32"), (12, 5))
        trainer.register_files(MODEL, {"config.json": b"{}"}, "", [weight], weight_map=False)


@pytest.fixture
def service(folder: Path) -> Iterator[RunningService]:
    with running_service(folder) as running:
        register(running.address)
        yield running


@pytest.fixture
def client(service: RunningService) -> Iterator[RawClient]:
    with RawClient(service.address) as client:
        yield client


@pytest.fixture
def trainer(service: RunningService) -> Iterator[TrainerClient]:
    with TrainerClient(service.address) as trainer:
        yield trainer


@pytest.mark.parametrize("space", [TensorSpace.MEGATRON, TensorSpace.HUGGING_FACE])
def test_each_state_has_the_tensors_that_its_ranks_declare(
    service: RunningService, folder: Path, space: TensorSpace
) -> None:
    pushed: dict[int, Arrays] = {}
    with RawClient(service.address) as client, EngineClient(service.address) as engine:
        for step, ranks in enumerate([2, 2, 3, 1], start=1):
            arrays = state(ranks, step=step)
            pushed[push(client, arrays, ranks, space=space, step=step)] = arrays
        for number, arrays in pushed.items():  # some from memory
            assert_equal(engine, TRAINING, number, arrays)
            engine.wait_for(TRAINING, number, VersionState.DURABLE, timeout=20)
        part = Boxes([("model.fc.weight", [3, 1], [2, 2])])
        found = dict(engine.pull(TRAINING, "latest", part))["model.fc.weight"]
        assert np.array_equal(found.numpy(), arrays["model.fc.weight"][3:5, 1:3])
        shown = engine.version(TRAINING, "latest")
        assert shown.tensor_bytes == sum(array.nbytes for array in arrays.values())
    with running_service(folder) as again, EngineClient(again.address) as engine:
        for number, arrays in pushed.items():  # all from the store
            assert_equal(engine, TRAINING, number, arrays)


@pytest.mark.parametrize("spreading", [False, True])
def test_a_version_keeps_what_its_ranks_have_declared_however_little_its_model_remembers(
    folder: Path, spreading: bool
) -> None:
    """A job's ranks may hold more shards together than the service remembers for a model."""
    settings = {"advertise": "127.0.0.1:0"} if spreading else {}
    with running_service(folder, kept_shards=1, **settings) as running:
        register(running.address)
        with RawClient(running.address) as client, EngineClient(running.address) as engine:
            for step in (1, 2):
                arrays = state(4, step=step)
                assert_equal(engine, TRAINING, push(client, arrays, 4, step=step), arrays)
            layouts = running.service.catalog.known_models.get(ModelName.parse(TRAINING))
            assert layouts is not None
            assert len(layouts._layouts.keys) == 1


def test_ranks_that_contradict_each_other_are_told_in_which_tensor(client: RawClient) -> None:
    number = client.open(TRAINING, ranks=2, request_id="r")
    for rank, shape in enumerate([(4, 4), (4, 5)]):
        box = Box((0, 0), (2, shape[1])) if rank == 0 else Box((2, 0), (2, shape[1]))
        layout = Layout.stream([TensorSpec("exp_avg", dtypes.parse("fp32"), shape)], [Shard("exp_avg", box, main=True)])
        with pytest.raises(errors.LayoutError if rank else errors.DeadlineExceeded) as raised:
            client.declare(TRAINING, number, layout, rank=rank, seconds=5.0 if rank else 0.2)
    assert any("exp_avg" in line and "rank 1" in line for line in raised.value.details)


def test_a_hole_in_a_tensor_fails_the_version_by_its_name_and_the_next_one_works(client: RawClient) -> None:
    arrays = state(1, step=1)
    number = client.open(TRAINING)
    spec = TensorSpec("exp_avg", dtypes.parse("fp32"), (4, 4))
    half = Layout.stream([spec], [Shard("exp_avg", Box((0, 0), (2, 4)), main=True)])
    with pytest.raises(errors.LayoutError) as raised:
        client.declare(TRAINING, number, half)
    assert any("exp_avg" in line for line in raised.value.details)
    assert push(client, arrays, 1, step=2) == number + 1


def test_states_have_the_numbers_of_the_weights_they_are_pushed_with(client: RawClient) -> None:
    weights = [client.open(MODEL, step=step) for step in range(5)]
    first = push(client, state(1, step=1), 1, step=1, at_least=weights[3])
    assert first == weights[3]
    assert push(client, state(1, step=2), 1, step=2, at_least=weights[4]) == weights[4]
    assert push(client, state(1, step=3), 1, step=3, at_least=weights[4]) == weights[4] + 1
    with pytest.raises(errors.InvalidArgument):
        client.open(MODEL, at_least=5)
    for beyond in (weights[4] + 1, 10**12 - 1, 1 << 60):
        with pytest.raises(errors.InvalidArgument, match=r"is not .*number"):
            client.open(TRAINING, at_least=beyond)
    assert push(client, state(1, step=4), 1, step=4) == weights[4] + 2


def test_a_state_needs_a_model_and_no_model_is_registered_as_one(client: RawClient, trainer: TrainerClient) -> None:
    with pytest.raises(errors.NotFound, match="no model acme/other"):
        client.open("acme/other:training")
    with pytest.raises(errors.NotFound, match="has no training state"):
        trainer.version(TRAINING, "latest")
    for wrong in ("acme/smol:optimizer", "acme/smol:", "acme:training/smol"):
        with pytest.raises(errors.InvalidArgument):
            client.open(wrong)
    with pytest.raises(errors.InvalidArgument, match="is a part of"):
        trainer.register_files(TRAINING, {"config.json": b"{}"}, "", [], weight_map=False)


def test_states_are_versions_of_their_own(client: RawClient, trainer: TrainerClient) -> None:
    numbers = [push(client, state(1, step=step), 1, step=step) for step in (1, 2, 3)]
    trainer.wait_for(TRAINING, numbers[-1], VersionState.DURABLE, timeout=20)
    assert [model.name for model in trainer.models()] == [MODEL]
    assert trainer.versions(MODEL) == []
    assert [version.number for version in trainer.versions(TRAINING)] == numbers[::-1]
    trainer.set_retention(TRAINING, Retention(keep_last=1))
    trainer.collect(TRAINING)
    assert [version.number for version in trainer.versions(TRAINING)] == numbers[-1:]
    assert trainer.retention(MODEL) == Retention()


def test_a_model_is_deleted_with_its_states(client: RawClient, trainer: TrainerClient, service: RunningService) -> None:
    number = push(client, state(1, step=1), 1)
    trainer.wait_for(TRAINING, number, VersionState.DURABLE, timeout=20)
    opened = client.open(TRAINING, request_id="open")
    with pytest.raises(errors.FailedPrecondition, match="being received"):
        trainer.delete_model(MODEL)
    assert trainer.version(TRAINING, number).number == number
    trainer.abort(TRAINING, opened)
    trainer.delete_model(MODEL)
    register(service.address)
    with pytest.raises(errors.NotFound, match="has no training state"):
        trainer.version(TRAINING, number)
    assert push(client, state(1, step=2), 1, step=2) > number


def test_states_of_a_model_whose_deletion_was_cut_off_are_deleted_by_a_collection(
    client: RawClient, trainer: TrainerClient, service: RunningService, folder: Path
) -> None:
    number = push(client, state(1, step=1), 1)
    trainer.wait_for(TRAINING, number, VersionState.DURABLE, timeout=20)
    service.service.collecting._delete_model(ModelName.parse(MODEL), "")
    service.service.collecting.collect_all()
    heads = HeadStore(service.service.catalog.store)
    assert heads.history(ModelName.parse(TRAINING)) is None


def test_a_model_that_is_registered_anew_has_no_states_of_the_one_before(
    client: RawClient, trainer: TrainerClient, service: RunningService
) -> None:
    number = push(client, state(1, step=1), 1)
    trainer.wait_for(TRAINING, number, VersionState.DURABLE, timeout=20)
    service.service.collecting._delete_model(ModelName.parse(MODEL), "")
    register(service.address)
    for version in ("latest", number):
        with pytest.raises(errors.NotFound, match="has no training state"):
            trainer.version(TRAINING, version)
    arrays = state(1, step=2)
    newer = push(client, arrays, 1, step=2)
    assert newer > number
    assert [version.number for version in trainer.versions(TRAINING)] in ([newer], [])
    with EngineClient(service.address) as engine:
        assert_equal(engine, TRAINING, newer, arrays)


def test_states_outlive_a_head_of_their_model_that_is_lost(
    client: RawClient, trainer: TrainerClient, service: RunningService
) -> None:
    number = push(client, state(1, step=1), 1)
    trainer.wait_for(TRAINING, number, VersionState.DURABLE, timeout=20)
    store, key = service.service.catalog.store, ModelName.parse(MODEL).head_key
    head, _ = store.get(key)
    store.delete(key)
    service.service.collecting.collect_all()
    store.put(key, head, mode="overwrite")
    assert trainer.version(TRAINING, number).state is VersionState.DURABLE


def test_what_is_kept_can_be_said_before_there_is_a_state(client: RawClient, trainer: TrainerClient) -> None:
    trainer.set_retention(TRAINING, Retention(keep_last=2))
    push(client, state(1, step=1), 1)
    assert trainer.retention(TRAINING) == Retention(keep_last=2)


def test_a_trainer_pushes_no_weights_as_a_state(trainer: TrainerClient) -> None:
    with pytest.raises(errors.InvalidArgument, match="together with weights"):
        trainer.push_state_dict(TRAINING, {"fc.weight": torch.zeros(12, 5)}, step=1)


def test_what_needs_fixed_tensors_is_refused(client: RawClient, trainer: TrainerClient) -> None:
    push(client, state(1, step=1), 1)
    with pytest.raises(errors.InvalidArgument, match="tensors of its own"):
        trainer.describe_shards(TRAINING)
    with pytest.raises(errors.InvalidArgument, match="tensors of its own"):
        trainer.describe_tensors(TRAINING)
    layout = declared(state(1, step=1), 0, 1)
    with pytest.raises(errors.InvalidArgument, match="tensors of its own"):
        list(trainer.restore_layout(TRAINING, layout, lambda _: None))  # type: ignore[arg-type,return-value]


def test_a_scope_for_a_model_is_for_its_states() -> None:
    scope = Scope.parse(f"pull:{MODEL}")
    assert scope.allows(Verb.PULL, TRAINING, "")
    assert not scope.allows(Verb.PUSH, TRAINING, "")
    assert not Scope.parse("pull:acme/smo").allows(Verb.PULL, TRAINING, "")
    assert Scope.parse("pull:acme/*").allows(Verb.PULL, TRAINING, "")


def test_replicas_receive_a_state_together_and_hand_it_out(folder: Path) -> None:
    arrays = state(2, step=1, blob_bytes=50_000)
    with ExitStack() as stack:
        both = [stack.enter_context(running_service(folder, advertise="127.0.0.1:0")) for _ in range(2)]
        register(both[0].address)
        first, second = (stack.enter_context(RawClient(each.address)) for each in both)
        number = push(first, arrays, 2, others=second)
        with EngineClient(both[1].address) as engine:
            engine.wait_for(TRAINING, number, VersionState.DURABLE, timeout=30)
            assert_equal(engine, TRAINING, number, arrays)
        with EngineClient(both[0].address) as engine:
            assert_equal(engine, TRAINING, number, arrays)


def test_a_checked_store_has_nothing_wrong_with_states_and_a_lost_head_is_made_again(
    folder: Path,
) -> None:
    arrays = state(2, step=1)
    with running_service(folder) as running, RawClient(running.address) as client:
        register(running.address)
        number = push(client, arrays, 2)
        with TrainerClient(running.address) as trainer:
            trainer.wait_for(TRAINING, number, VersionState.DURABLE, timeout=20)
            assert not trainer.verify(TRAINING, number).problems
    store = LocalStore(folder)
    found = {each.name: each for each in check_store(store)}
    assert found[TRAINING].findings == ()
    store.delete(ModelName.parse(TRAINING).head_key)
    assert [each.name for each in check_store(store, repair=True) if each.findings] == [TRAINING]
    with running_service(folder) as running, EngineClient(running.address) as engine:
        assert_equal(engine, TRAINING, number, arrays)


def test_show_tells_of_a_models_states(client: RawClient, service: RunningService) -> None:
    number = push(client, state(1, step=7), 1, step=7)

    def shown(*arguments: str) -> str:
        done = CliRunner().invoke(commands, ["show", *arguments, "--server", service.address])
        assert done.exit_code == 0, done.output
        return done.output

    with TrainerClient(service.address) as trainer:
        trainer.wait_for(TRAINING, number, VersionState.DURABLE, timeout=20)
    assert f"{TRAINING}@{number}" in shown(MODEL)
    assert json.loads(shown(MODEL, "--json"))["training_state"]["step"] == 7
    assert "training states" in shown(TRAINING)
    assert "rank_state.00000" in shown(f"{TRAINING}@latest", "--tensors")
