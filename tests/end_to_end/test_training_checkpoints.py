"""Are training states on disk what Megatron and torch themselves save, and are theirs training states as good as pushed
ones?

Real ranks train over gloo, push, and save by Megatron's or torch's own function in the same step: what they have saved
is the independent answer. What is loaded is what all ranks together hold afterwards, as Megatron and torch gather it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from tests.support import torch_ranks
from tests.support.megatron_families import build_family_model
from tests.support.megatron_ranks import run_ranks
from tests.support.megatron_training import TrainingRank, wholes
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import (
    Box,
    DataLoss,
    InvalidArgument,
    Layout,
    NotFound,
    Shard,
    TensorSpace,
    TensorSpec,
    TrainerClient,
)
from weighbridge._cli import commands
from weighbridge._core import dtypes
from weighbridge._formats.push_sources import CastingSource
from weighbridge._trainers.states.checkpoints import checkpoint_folder
from weighbridge._trainers.states.torch_training import training_tensors
from weighbridge._trainers.states.training_state import RankValues, TrainingState
from weighbridge_demo.megatron_cpu import Parallel, build_model

TORCH = "tests/torch"
STEPS = 2
FULL = StateDictOptions(full_state_dict=True)
MODELS = [("llama", "bfloat16"), ("llama", "float32"), ("qwen3_moe", "bfloat16")]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            for family, dtype in MODELS:
                described = tmp_path_factory.mktemp(family)
                tiny_config(family, tied=False).save_pretrained(described)
                trainer.register_model(f"tests/{family}-{dtype}", described, dtype=dtype)
            described = tmp_path_factory.mktemp("torch")
            tiny_config("qwen3", tied=True).save_pretrained(described)
            trainer.register_model(TORCH, described, dtype="float32")
        yield running


# -- Megatron-core --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model and its optimizer in the job that saves, and in the one that loads."""

    family: str
    here: Parallel
    there: Parallel
    distributed: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"tests/{self.family}-{self.dtype}"

    def rank(self, parallel: Parallel, seed: int) -> TrainingRank:
        return TrainingRank(
            tiny_config(self.family, tied=False),
            parallel,
            distributed=self.distributed,
            dtype=getattr(torch, self.dtype),
            build=build_model if self.family == "llama" else build_family_model,
            seed=seed,
        )


CASES = {
    "plain": Case("llama", Parallel(tp=2), Parallel(pp=2)),
    "plain, fp32": Case("llama", Parallel(pp=2), Parallel(tp=2), dtype="float32"),
    "plain, experts": Case("qwen3_moe", Parallel(dp=2, ep=2), Parallel(dp=4, ep=4)),
    "distributed": Case("llama", Parallel(tp=2, dp=2), Parallel(dp=2), distributed=True),
}


def _train(rank: int, case: Case, address: str, folder: Path) -> tuple[int, Any]:
    """Train, push, and save as Megatron does.

    The number of the training state, and what Megatron gathers of the rank.
    """
    training = case.rank(case.here, 0)
    for number in range(STEPS):
        training.step(number)
    from megatron.core.dist_checkpointing import ShardedObject

    state = {"opt_param_scheduler": {"max_lr": 0.5, "num_steps": 16}, "iteration": STEPS}
    random = {"rng_state": ShardedObject("rng_state", [[rank, 5]], (case.here.world_size,), (rank,))}
    with TrainerClient(address) as trainer:
        handle = trainer.push(
            case.name,
            {**training.sharded_state_dict(), **random},
            step=STEPS,
            optimizer=training.optimizer,
            state=state,
            run=str(folder),
        )
        assert handle.training is not None
        number = handle.training.wait(timeout=120).number
    training.save(folder, {**state, **random})
    return number, training.own_state()


def _load(rank: int, case: Case, folder: Path) -> tuple[Any, Any]:
    training = case.rank(case.there, 1)
    loaded = training.load(folder)
    return training.own_state(), loaded


def _restore(rank: int, case: Case, address: str, number: int) -> tuple[Any, Any, list[Any]]:
    training = case.rank(case.there, 1)
    state: dict[str, Any] = {"opt_param_scheduler": None, "iteration": 0}
    with TrainerClient(address) as trainer:
        trainer.restore(
            case.name,
            training.sharded_state_dict(),
            version=number,
            optimizer=training.optimizer,
            state=state,
        )
    optimizers = [each.optimizer for each in training.optimizer.chained_optimizers]
    steps = [float(each["step"]) for one in optimizers for each in one.state.values()]
    return training.own_state(), state, steps


def _same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and other entries of a checkpoint, as torch reads them."""
    described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    kinds = {name: type(each).__name__ for name, each in described.items()}
    tensors = {
        name: torch.empty(described[name].size, dtype=described[name].properties.dtype)  # type: ignore[union-attr]
        for name, kind in kinds.items()
        if kind == "TensorStorageMetadata"
    }
    objects = dict.fromkeys(kinds.keys() - tensors.keys())
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    dcp.load(objects, checkpoint_id=folder, no_dist=True)
    return tensors, objects


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_megatron_loads_what_is_exported_and_what_it_saved_is_restored(
    case: Case, service: RunningService, tmp_path: Path
) -> None:
    theirs = tmp_path / "iter_0000009"
    theirs.mkdir()
    trained = run_ranks(case.here, _train, case, service.address, theirs)
    number = trained[0][0]
    expected = wholes(own for _, own in trained)

    with TrainerClient(service.address) as trainer:
        ours = trainer.export_training(f"{case.name}:training", number, tmp_path / "load").folder
        imported = trainer.import_training(case.name, theirs).wait(timeout=120)
        again = trainer.export_training(case.name, imported.number, tmp_path / "again").folder

    assert (tmp_path / "load" / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    # what it says itself counts, and not what it is called
    assert (ours.name, again.name, imported.step) == ("iter_0000002", "iter_0000002", STEPS)
    their_tensors, their_objects = _read(theirs)
    assert their_objects[f"rng_state/shard_1_{case.here.world_size}"] == [[[1, 5]]]
    for folder in (ours, again):
        tensors, objects = _read(folder)
        _same(tensors, their_tensors)
        assert objects == their_objects
    # as torch writes it, and as Megatron-core loads it
    saved, common = (torch.load(folder / "common.pt", weights_only=True) for folder in (theirs, ours))
    assert common.pop("checkpoint_version") == 3.0
    assert common.pop("content_metadata").items() >= saved.pop("content_metadata").items()
    assert common == saved
    assert (again / "common.pt").read_bytes() == (theirs / "common.pt").read_bytes()

    for folder in (ours, again):
        loaded = run_ranks(case.there, _load, case, folder)
        _same(wholes(own for own, _ in loaded), expected)
        assert all(common["opt_param_scheduler"] == {"max_lr": 0.5, "num_steps": 16} for _, common in loaded)
    restored = run_ranks(case.there, _restore, case, service.address, imported.number)
    _same(wholes(own for own, _, _ in restored), expected)
    assert all(set(steps) == {float(STEPS)} for _, _, steps in restored)
    assert all(
        state["iteration"] == STEPS and state["opt_param_scheduler"]["num_steps"] == 16 for _, state, _ in restored
    )


# -- torch ----------------------------------------------------------------------------------------------------------------


class Loop:
    """A training loop: AdamW in two groups, and a scheduler. The module is tied."""

    def __init__(self, way: str | None, seed: int) -> None:
        model = tiny_model(tiny_config("qwen3", tied=True), seed=seed)
        self.module: torch.nn.Module = model if way is None else torch_ranks.shared(model, way)
        matrices = [each for each in self.module.parameters() if each.dim() > 1]
        others = [each for each in self.module.parameters() if each.dim() < 2]
        self.optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)

    def train(self) -> None:
        for step in range(STEPS):
            tokens = torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(step))
            self.module(input_ids=tokens).logits.sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def gathered(self) -> tuple[dict[str, Tensor], Any]:
        """All that it holds, whole, as torch gathers it; all ranks call it."""
        return get_model_state_dict(self.module, options=FULL), (
            get_optimizer_state_dict(self.module, self.optimizer, options=FULL),
            self.scheduler.state_dict(),
        )

    def save(self, folder: Path, *, flat: bool) -> None:
        """Save it by torch; all ranks call it."""
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optimizer = get_state_dict(self.module, self.optimizer, options=options)
        dcp.save(
            {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()},
            checkpoint_id=folder,
        )

    def load(self, folder: Path, *, flat: bool) -> None:
        """Load it by torch; all ranks call it."""
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optimizer = get_state_dict(self.module, self.optimizer, options=options)
        scheduler = self.scheduler.state_dict()
        dcp.load({"model": model, "optimizer": optimizer, "scheduler": scheduler}, checkpoint_id=folder)
        set_state_dict(self.module, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options)
        self.scheduler.load_state_dict(scheduler)


def _train_torch(rank: int, address: str, folder: Path, flat: bool) -> tuple[int, Any]:
    loop = Loop("fsdp", 0)
    loop.train()
    with TrainerClient(address) as trainer:
        handle = trainer.push_state_dict(
            TORCH, loop.module, step=STEPS, optimizer=loop.optimizer, state={"scheduler": loop.scheduler}, run=str(folder),
            rank_state={"drawn": torch.full((3,), rank)},
        )  # fmt: skip
        assert handle.training is not None
        number = handle.training.wait(timeout=120).number
    loop.save(folder, flat=flat)
    return number, loop.gathered()


def _load_torch(rank: int, folder: Path, way: str | None, flat: bool) -> Any:
    loop = Loop(way, 1)
    loop.load(folder, flat=flat)
    own = {"rank_state": {str(rank): {"drawn": torch.zeros(3, dtype=torch.int64)}}}
    dcp.load(own, checkpoint_id=folder)
    return loop.gathered(), own["rank_state"][str(rank)]["drawn"]


def _restore_torch(rank: int, address: str, number: int, way: str | None, own: dict[str, Any] | None = None) -> Any:
    loop = Loop(way, 1)
    with TrainerClient(address) as trainer:
        trainer.restore_state_dict(
            TORCH, loop.module, version=number, optimizer=loop.optimizer, state={"scheduler": loop.scheduler},
            rank_state=own,
        )  # fmt: skip
    return loop.gathered() if own is None else own


def _refused(rank: int, address: str, number: int) -> str:
    with pytest.raises(InvalidArgument) as error:
        _restore_torch(rank, address, number, None, {"drawn": None})
    return error.value.message


def _equal(found: Any, expected: Any) -> None:
    _same(found[0], expected[0])
    (optimizer, scheduler), (its, its_scheduler) = found[1], expected[1]
    assert optimizer["state"].keys() == its["state"].keys()
    for name, state in its["state"].items():
        _same(optimizer["state"][name], state)
    assert optimizer["param_groups"] == its["param_groups"]
    assert scheduler == its_scheduler


@pytest.mark.parametrize("flat", [False, True])
def test_torch_loads_what_is_exported_and_what_it_saved_is_restored(
    flat: bool, service: RunningService, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    trained = torch_ranks.run_ranks(2, _train_torch, service.address, theirs, flat)
    number, expected = trained[0]

    with TrainerClient(service.address) as trainer:
        ours = trainer.export_training(TORCH, number, tmp_path / "ours", checkpoint_format="dcp").folder
        imported = trainer.import_training(TORCH, theirs, step=7).wait(timeout=120)
        again = trainer.import_training(TORCH, ours, step=8).wait(timeout=120).number

    restored = torch_ranks.run_ranks(2, _restore_torch, service.address, again, "fsdp", {"drawn": None})
    assert [own["drawn"].tolist() for own in restored] == [[rank] * 3 for rank in range(2)]
    [told] = torch_ranks.run_ranks(1, _refused, service.address, again)
    assert "was imported with the values of 2 ranks, but rank_state= is requested on 1" in told
    assert not (ours / "common.pt").exists()
    for size, way in ((2, "fsdp"), (1, None)):
        for rank, (found, drawn) in enumerate(torch_ranks.run_ranks(size, _load_torch, ours, way, flat)):
            _equal(found, expected)
            assert drawn.tolist() == [rank] * 3
        for found in torch_ranks.run_ranks(size, _restore_torch, service.address, imported.number, way):
            _equal(found, expected)


# -- What is refused ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(service: RunningService) -> int:
    """The number of a training state of torch, of one rank."""
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    held = training_tensors(module, optimizer)
    state = TrainingState.of(held, RankValues(state={"epoch": 3}), 0)
    with TrainerClient(service.address) as trainer:
        source = CastingSource(state.layout, state.tensors)
        handle = trainer.push_shards(
            f"{TORCH}:training", state.layout, state.space, source, step=4, rank=0, world_size=1, run="small"
        )
        return handle.wait(timeout=60).number


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_step_goes_out_and_comes_in_with_a_checkpoint_of_torch(
    service: RunningService, small: int, tmp_path: Path
) -> None:
    number = small
    with TrainerClient(service.address) as trainer:
        for name, said, step in (("first", None, 4), ("second", 9, 9), ("third", None, 9)):
            folder = trainer.export_training(TORCH, number, tmp_path / name).folder
            imported = trainer.import_training(TORCH, folder, step=said).wait(timeout=60)
            assert imported.step == step
            number = imported.number
    entry = {"weighbridge.step": None}
    dcp.load(entry, checkpoint_id=tmp_path / "third", no_dist=True)
    assert entry == {"weighbridge.step": 9}


def test_a_folder_with_something_in_it_is_left_alone_unless_it_is_to_be_replaced(
    service: RunningService, small: int, tmp_path: Path
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with TrainerClient(service.address) as trainer:
        for replace, said in ((False, "not an empty folder"), (True, "is not a checkpoint")):
            with pytest.raises(InvalidArgument, match=said):
                trainer.export_training(TORCH, small, folder, replace=replace)
        assert [path.name for path in tmp_path.rglob("*")] == ["there", "notes.txt"]

        trainer.export_training(TORCH, small, tmp_path / "new")
        (tmp_path / "new" / "__0_0.distcp").write_bytes(b"damaged")
        trainer.export_training(TORCH, small, tmp_path / "new", replace=True)
    loaded = {"epoch": 0, "model": {"weight": torch.empty(2, 3)}}
    dcp.load(loaded, checkpoint_id=tmp_path / "new", no_dist=True)
    assert loaded["epoch"] == 3


def test_the_format_is_that_of_the_trainer(service: RunningService, small: int, tmp_path: Path) -> None:
    said = "checkpoints are dcp, not torch_dist"
    with TrainerClient(service.address) as trainer, pytest.raises(InvalidArgument, match=said):
        trainer.export_training(TORCH, small, tmp_path / "new", checkpoint_format="torch_dist")
    assert not (tmp_path / "new").exists()


def test_values_that_take_more_memory_than_an_export_may_are_refused(
    service: RunningService, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_folder, "MAX_VALUES_BYTES", 1000)
    with (
        TrainerClient(service.address) as trainer,
        pytest.raises(InvalidArgument, match="at most 1000 in memory"),
    ):
        trainer.export_training(TORCH, small, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_state_without_values_of_its_ranks_is_refused(service: RunningService, tmp_path: Path) -> None:
    spec = TensorSpec("model.w", dtypes.parse("fp32"), (2,))
    layout = Layout.stream([spec], [Shard("model.w", Box.whole((2,)))])
    with TrainerClient(service.address) as trainer:
        handle = trainer.push_shards(
            f"{TORCH}:training", layout, TensorSpace.HUGGING_FACE, CastingSource(layout, [torch.ones(2)]),
            step=5, rank=0, world_size=1, run="bare",
        )  # fmt: skip
        number = handle.wait(timeout=60).number
        with pytest.raises(DataLoss, match=r"has no rank_state\.00000"):
            trainer.export_training(TORCH, number, tmp_path / "new")
        with pytest.raises(NotFound):
            trainer.export_training(TORCH, 999, tmp_path / "new")
    assert not any(tmp_path.iterdir())


def test_commands_take_states_out_and_in(service: RunningService, small: int, tmp_path: Path) -> None:
    def run(*line: object) -> Any:
        result = CliRunner().invoke(commands, [*map(str, line), "--server", service.address, "--json"])
        return result.exit_code, json.loads(result.output)

    folder = tmp_path / "iter_0000021"
    code, written = run("export", f"{TORCH}:training@{small}", folder, "--format", "dcp")
    assert (code, written["version"]["number"], written["files"]) == (0, small, [".metadata", "__0_0.distcp"])
    code, version = run("import", folder, TORCH, "--training", "--metadata", "from=disk")
    assert (code, version["model"], version["step"], version["state"]) == (
        0,
        f"{TORCH}:training",
        4,
        "durable",
    )
    assert version["metadata"] == {"from": "disk"}

    code, refused = run("export", f"{TORCH}:training@{small}", folder)
    fix = "name a new folder, or replace the existing checkpoint: --replace, replace=True"
    assert (code, refused["error"]["fix"]) == (1, fix)
    code, refused = run("export", f"{TORCH}@latest", tmp_path / "weights", "--format", "dcp")
    assert "is for training states" in refused["error"]["message"]
    code, refused = run("import", folder, TORCH, "--training", "--dtype", "bf16")
    assert "--dtype is for weights" in refused["error"]["message"]
    code, refused = run("import", tmp_path, TORCH, "--training")
    assert "iter_0000021" in refused["error"]["fix"]
