"""Does the training of torch ranks resume bit for bit after all ranks were killed, with every tensor, on any number of
ranks?

Real ranks over gloo train a small model of transformers with FSDP2 and AdamW, and save through `CheckpointManager`.
What is compared with is a run that never stopped, and torch's own ``full_state_dict``, which gathers every tensor.
``WEIGHBRIDGE_BLOB_MB`` is the size of a rank's values in one test.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from transformers import PretrainedConfig

from tests.support.mortal_proxy import MortalProxy
from tests.support.reference import tiny_config, tiny_model
from tests.support.rounds import rounds
from tests.support.services import RunningService, running_service
from tests.support.torch_ranks import run_ranks, shared
from tests.support.training_states import same_bits
from tests.support.waiting import eventually
from weighbridge import (
    Box,
    CheckpointManager,
    DataLoss,
    InvalidArgument,
    Layout,
    LayoutError,
    NotFound,
    RandomStates,
    Retention,
    Shard,
    TensorSpace,
    TensorSpec,
    TrainerClient,
    Unavailable,
    VersionFailed,
    VersionState,
    WeighbridgeError,
)
from weighbridge._core import dtypes
from weighbridge._core.references import training_of
from weighbridge._formats.push_sources import CastingSource
from weighbridge_demo.ranks import RankError
from weighbridge_storage.documents.names import MANIFEST_FILE

MODEL = "acme/smol"
TRAINING = training_of(MODEL)
BLOB_MB = rounds("BLOB_MB")
UNEVEN = 131
"""Tokens that neither two, four nor eight ranks share evenly."""
RANKS, WAY = (4, "fsdp4") if rounds("CELLS") else (2, "fsdp")
"""Ranks that are killed, and the mesh that they train on."""
STEPS = 50
"""Steps after the ranks were killed of which the losses are compared."""
EVERY = 3
KILLED_AFTER, LAST = 2 * EVERY + 1, 4 * EVERY
"""Ranks are killed some time after the one step, and do not come further than the other."""
_SEEDING = threading.Lock()
FULL = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)


def config() -> PretrainedConfig:
    return tiny_config("qwen3", tied=True, num_hidden_layers=2, vocab_size=UNEVEN, attention_dropout=0.1)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    budget = (1 << 30) + (8 * BLOB_MB << 20)
    with running_service(tmp_path / "store", local_socket=str(tmp_path / "lane.sock"), memory_budget=budget) as running:
        yield running


class Loop:
    """A training loop: FSDP2 with AdamW in two groups, a scheduler, dropout, and data in an order of each rank's
    own.
    """

    def __init__(self, client: TrainerClient, rank: int, way: str, seed: int) -> None:
        self.module = shared(tiny_model(config(), seed=seed), way)
        self.module.train()
        matrices = [each for each in self.module.parameters() if each.dim() > 1]
        others = [each for each in self.module.parameters() if each.dim() < 2]
        self.optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)
        self.own: dict[str, Any] = {"random": RandomStates(), "order": 1000 * rank + seed}
        torch.manual_seed(self.own["order"])
        self.checkpoints = CheckpointManager(
            client,
            MODEL,
            self.module,
            self.optimizer,
            state={"scheduler": self.scheduler},
            rank_state=self.own,
        )

    def step(self) -> Tensor:
        """Run one step; the rank's loss."""
        self.own["order"] = (self.own["order"] * 1103515245 + 12345) % (1 << 31)
        tokens = torch.randint(0, UNEVEN, (2, 9), generator=torch.Generator().manual_seed(self.own["order"]))
        hidden = nn.functional.dropout(self.module(input_ids=tokens).logits, 0.1)
        loss = nn.functional.cross_entropy(hidden.flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def restore(self, *, rank_state: bool = True) -> int:
        version = self.checkpoints.restore(rank_state=rank_state)
        assert version is not None
        return version.step

    def gathered(self) -> dict[str, Tensor]:
        """All tensors, whole, as torch gathers them; all ranks call it."""
        state = {f"model.{key}": value for key, value in get_model_state_dict(self.module, options=FULL).items()}
        of_optimizer = get_optimizer_state_dict(self.module, self.optimizer, options=FULL)
        return state | {key: value for key, value in of_optimizer.items() if key.startswith("state.")}


def _never_stopped(rank: int, address: str, folder: Path) -> None:
    """Train without a stop; keep the losses, and all tensors after each step that other runs may restore."""
    with TrainerClient(address) as client:
        loop = Loop(client, rank, WAY, 5)
        losses = []
        for step in range(1, LAST + STEPS + 1):
            losses.append(loop.step())
            if step % EVERY == 0 and step <= LAST:
                whole = loop.gathered()
                if rank == 0:
                    torch.save(whole, folder / f"whole-{step}")
        torch.save(losses, folder / f"losses-{rank}")


def _until_killed(rank: int, address: str, folder: Path) -> None:
    """Train and save, and report each step, until the process is killed."""
    with TrainerClient(address) as client:
        loop = Loop(client, rank, WAY, 5)
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        for step in range(1, LAST + 1):
            loop.step()
            if step % EVERY == 0:
                loop.checkpoints.save(step)
            if step == EVERY:
                loop.checkpoints.wait(timeout=60)
            if step >= KILLED_AFTER:
                (folder / f"far-{rank}").touch()
        time.sleep(600)


def _resumed(rank: int, address: str, steps: int, way: str, folder: Path) -> tuple[int, list[Tensor]]:
    """Restore on a mesh, compare all tensors with those of the run that never stopped, and go on; the step and the
    losses.
    """
    with TrainerClient(address) as client:
        loop = Loop(client, rank, way, 6)
        begun = loop.restore(rank_state=way == WAY)
        whole = torch.load(folder / f"whole-{begun}", weights_only=True)
        found = loop.gathered()
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            assert same_bits(found[name], tensor), name
        losses = [loop.step() for _ in range(steps)]
        if way == WAY:
            whole_again = loop.gathered()
            if rank == 0:
                torch.save(whole_again, folder / f"whole-{begun + steps}")
            loop.checkpoints.save(begun + steps)
            loop.checkpoints.wait(timeout=60)
        return begun, losses


def test_ranks_that_were_all_killed_go_on_to_the_bit_and_other_numbers_of_ranks_get_every_tensor(
    service: RunningService, tmp_path: Path
) -> None:
    register(service, config(), tmp_path / "hf")
    run_ranks(RANKS, _never_stopped, service.address, tmp_path)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(run_ranks, RANKS, _until_killed, service.address, tmp_path)
        eventually(lambda: all((tmp_path / f"far-{rank}").exists() for rank in range(RANKS)))
        for rank in range(RANKS):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGKILL)
        with pytest.raises(RankError):
            killed.result()

    results = run_ranks(RANKS, _resumed, service.address, STEPS, WAY, tmp_path)
    for rank, (begun, losses) in enumerate(results):
        assert begun >= EVERY
        expected = torch.load(tmp_path / f"losses-{rank}", weights_only=True)[begun : begun + STEPS]
        assert len(expected) == STEPS
        assert all(map(same_bits, losses, expected))
    others = ((4, "hsdp"), (8, "fsdp8"), (2, "fsdp"))
    for ranks, way in others if rounds("CELLS") else others[:1]:
        for begun, _ in run_ranks(ranks, _resumed, service.address, 1, way, tmp_path):
            assert begun == results[0][0] + STEPS


def register(service: RunningService, what: Any, folder: Path) -> None:
    """Register the model by a config of transformers, or by a module."""
    folder.mkdir(exist_ok=True)
    with TrainerClient(service.address) as client:
        if isinstance(what, nn.Module):
            (folder / "config.json").write_text("{}")
            client.register_model(MODEL, folder, tensors=what, weight_map=False)
        else:
            what.save_pretrained(folder)
            client.register_model(MODEL, folder, dtype="bf16")


def layers(seed: int, width: int = 8, count: int = 2) -> nn.Module:
    with _SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def adamw(module: nn.Module, steps: int = 0) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(steps):
        width = next(module.parameters()).shape[-1]
        module(torch.rand(3, width, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def as_ranks(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work(rank)`` on threads, each a rank that holds everything whole; errors are returned as results."""

    def attempt(rank: int) -> Any:
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(attempt, range(count)))


@pytest.mark.smoke
def test_the_state_has_the_number_of_its_weights_and_comes_back_with_every_value(
    service: RunningService, tmp_path: Path
) -> None:
    module = layers(1)
    register(service, module, tmp_path / "hf")
    optimizer = adamw(module, 3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()  # without gradients
    scheduler.step()
    random = torch.get_rng_state()
    with TrainerClient(service.address) as client:
        client.push_state_dict(MODEL, module, step=1).wait(timeout=60)
        handle = client.push_state_dict(
            MODEL, module, step=2, optimizer=optimizer, state={"scheduler": scheduler, "epoch": 4}, rank_state={"random": random},
            metadata={"loss": 0.5}, candidate=True,
        )  # fmt: skip
        assert handle.training is not None
        assert (handle.training.model, handle.training.number) == (TRAINING, handle.number) == (TRAINING, 2)
        version = handle.training.wait(timeout=60)
        assert handle.wait(timeout=60).held
        assert not version.held
        assert version.metadata == {"loss": 0.5}

        expected = {key: value.clone() for key, value in module.state_dict().items()}
        moments = [{key: value.clone() for key, value in each.items()} for each in optimizer.state.values()]
        other = layers(2)
        filled = adamw(other)
        state = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(filled, 0.9), "epoch": 0}
        own: dict[str, Any] = {"random": None}
        assert client.restore_state_dict(MODEL, other, optimizer=filled, state=state, rank_state=own) == version
        assert all(same_bits(value, expected[key]) for key, value in other.state_dict().items())
        for mine, theirs in zip(filled.state.values(), moments, strict=True):
            assert all(same_bits(mine[key], value) for key, value in theirs.items())
        assert filled.param_groups[0]["lr"] == 0.005
        assert state["epoch"] == 4
        assert state["scheduler"].state_dict() == scheduler.state_dict()
        assert same_bits(own["random"], random)
        # weights alone, without an optimizer, from a version that is named by the part's name
        third = layers(3)
        assert client.restore_state_dict(f"{TRAINING}@2", third) == version
        assert all(same_bits(value, expected[key]) for key, value in third.state_dict().items())


def test_a_rank_reads_its_boxes_and_one_blob_and_no_more(service: RunningService, tmp_path: Path) -> None:
    register(service, layers(1, 512, 4), tmp_path / "hf")
    for brought, part in run_ranks(2, _counted, service.address):
        assert part <= brought <= 1.01 * part


def _counted(rank: int, address: str) -> tuple[int, int]:
    """Bytes that a rank received in a restore, and the bytes of its part and its blob."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    module, other = (fully_shard(layers(seed, 512, 4), mesh=mesh) for seed in (1, 2))
    optimizer = adamw(module, 1)
    random = torch.get_rng_state()
    with TrainerClient(address, lane="grpc") as client:
        handle = client.push_state_dict(MODEL, module, step=1, optimizer=optimizer, rank_state={"random": random})
        assert handle.training is not None
        handle.training.wait(timeout=100)
    filled = torch.optim.AdamW(other.parameters())
    proxy = MortalProxy(address)
    with TrainerClient(proxy.address, lane="grpc") as client:
        client.restore_state_dict(MODEL, other, optimizer=filled, rank_state={"random": None})
    part = sum(each.to_local().nbytes for each in other.parameters()) + random.nbytes
    for state in filled.state.values():
        part += sum(getattr(each, "_local_tensor", each).nbytes for each in state.values())
    return proxy.brought, part


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_values_of_any_size_are_each_ranks_own(service: RunningService, tmp_path: Path, lane: str) -> None:
    """Like a data loader's buffer of shuffled samples: much larger than the rest."""
    register(service, layers(1), tmp_path / "hf")
    values = [torch.randint(0, 255, ((BLOB_MB << 20) + rank,), dtype=torch.uint8) for rank in range(2)]

    def work(rank: int) -> Any:
        module = layers(1)
        optimizer = adamw(module, 1)
        with TrainerClient(service.address, lane=lane) as client:
            handle = client.push_state_dict(
                MODEL,
                module,
                step=1,
                rank=rank,
                world_size=2,
                optimizer=optimizer,
                rank_state={"buffer": values[rank]},
            )
            assert handle.training is not None
            handle.training.wait(timeout=200)
            own = {"buffer": None}
            client.restore_state_dict(MODEL, module, rank_state=own, rank=rank, world_size=2)
            return own["buffer"]

    found = as_ranks(2, work)
    assert all(map(same_bits, found, values)), found


def pushed_by(
    service: RunningService,
    count: int,
    step: int,
    beside: Callable[[int], bool] = lambda _rank: True,
    **more: Any,
) -> list[Any]:
    """Push weights, and states beside them, from ranks that hold everything whole; their handles, or errors."""

    def work(rank: int) -> Any:
        module = layers(1)
        optimizer = adamw(module, step)
        with TrainerClient(service.address) as client:
            each = {key: value(rank) if callable(value) else value for key, value in more.items()}
            given = {"optimizer": optimizer, **each} if beside(rank) else {}
            return client.push_state_dict(MODEL, module, step=step, rank=rank, world_size=count, **given)

    return as_ranks(count, work)


def test_an_optimizer_of_another_model_is_refused_before_anything_is_pushed(
    service: RunningService, tmp_path: Path
) -> None:
    register(service, layers(1), tmp_path / "hf")
    pushed_by(service, 2, 1)
    for told in pushed_by(service, 2, 2, optimizer=lambda _rank: adamw(layers(2))):
        assert isinstance(told, LayoutError)
        assert "4 parameters that the module does not have" in told.message
        assert "parameter 0 of group 0 is torch.float32[8, 8]" in told.details
    with TrainerClient(service.address) as client:
        assert [each.step for each in client.versions(MODEL)] == [1]
        told = client.versions(TRAINING, include_invisible=True)
        assert [(each.step, each.state.given_up) for each in told] == [(2, True), (1, False)]
        client.restore_state_dict(MODEL, layers(2))


def test_one_rank_with_values_that_run_code_is_told_of_the_entry_and_the_other_that_it_will_not_come(
    service: RunningService, tmp_path: Path
) -> None:
    register(service, layers(1), tmp_path / "hf")
    refused, other = pushed_by(
        service, 2, 1, rank_state=lambda rank: {"loader": {"seed": [3, object() if rank == 0 else 4]}}
    )
    assert isinstance(refused, InvalidArgument)
    assert "rank_state.loader.seed[1] is a builtins.object" in refused.message
    assert isinstance(other, VersionFailed)
    assert "rank 0 was refused" in str(other)
    assert not any(isinstance(each, Exception) for each in pushed_by(service, 2, 2))


def test_a_state_that_fails_leaves_its_weights_and_the_states_before_it_usable(
    service: RunningService, tmp_path: Path
) -> None:
    """One rank pushes weights alone: its training state never comes."""
    register(service, layers(1), tmp_path / "hf")
    pushed_by(service, 2, 1)
    with TrainerClient(service.address) as client, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(pushed_by, service, 2, 2, lambda rank: rank == 0)
        eventually(lambda: any(each.step == 2 for each in client.versions(TRAINING, include_invisible=True)))
        [started] = [each for each in client.versions(TRAINING, include_invisible=True) if each.step == 2]
        client.abort(TRAINING, started.number, "the operator says so")
        told, _ = coming.result()
        assert isinstance(told, VersionFailed)
        assert f"{MODEL}@2" in "".join(told.__notes__)
        weights = client.wait_for(MODEL, 2, VersionState.DURABLE, timeout=60)
        assert weights.step == 2
        client.restore_state_dict(MODEL, layers(2), version=2)
        other = layers(2)
        assert client.restore_state_dict(MODEL, other, optimizer=adamw(other)).step == 1


def test_another_number_of_ranks_gets_the_first_ranks_values_and_is_refused_those_of_each_rank(
    service: RunningService, tmp_path: Path
) -> None:
    register(service, layers(1), tmp_path / "hf")
    handles = pushed_by(service, 2, 1, state={"epoch": 3}, rank_state=lambda rank: {"seed": rank})
    assert not any(isinstance(each, Exception) for each in handles), handles
    with TrainerClient(service.address) as client:
        client.wait_for(TRAINING, 1, VersionState.DURABLE, timeout=60)
        module = layers(2)
        before = module[0].weight.clone()
        with pytest.raises(InvalidArgument) as error:
            client.restore_state_dict(MODEL, module, rank_state={"seed": 0})
        assert f"{TRAINING}@1 was pushed by 2 ranks, but rank_state= is requested on 1" in error.value.message
        assert torch.equal(module[0].weight, before)
        state = {"epoch": 0}
        client.restore_state_dict(MODEL, module, state=state)
        assert state == {"epoch": 3}
        own = {"seed": None}
        client.restore_state_dict(MODEL, module, rank_state=own, rank=1, world_size=2)
        assert own == {"seed": 1}
        with pytest.raises(InvalidArgument) as error:
            client.restore_state_dict(MODEL, module, state={"epoch": 0, "loader": None})
        assert f"{TRAINING}@1 was pushed without loader in state=" in error.value.message
        assert error.value.details == ("it has epoch",)


def test_the_state_of_another_model_names_what_differs_and_changes_nothing(
    service: RunningService, tmp_path: Path
) -> None:
    register(service, layers(1), tmp_path / "hf")
    [handle] = pushed_by(service, 1, 1)
    with TrainerClient(service.address) as client:
        client.wait_for(TRAINING, handle.number, VersionState.DURABLE, timeout=60)
        other = layers(2, 8, 3)
        optimizer = adamw(other, 1)
        before = [each.clone() for each in other.parameters()]
        with pytest.raises(LayoutError) as error:
            client.restore_state_dict(MODEL, other, optimizer=optimizer)
        assert f"{TRAINING}@1 is the training state of a different model" in error.value.message
        assert "model.2.weight is missing from the version" in error.value.details
        assert all(map(torch.equal, other.parameters(), before))


def test_a_restore_that_breaks_off_says_what_has_become_of_the_rank_and_can_be_made_again(
    service: RunningService, tmp_path: Path
) -> None:
    module = torch.nn.Linear(1024, 1024, bias=False)
    register(service, module, tmp_path / "hf")
    proxy = MortalProxy(service.address)
    with TrainerClient(service.address) as client:
        handle = client.push_state_dict(MODEL, module, step=1, state={"epoch": 3})
        assert handle.training is not None
        handle.training.wait(timeout=60)
        expected = module.weight.detach().clone()
        torch.nn.init.zeros_(module.weight)
        with (
            contextlib.closing(proxy),
            TrainerClient(proxy.address, lane="grpc", retry_seconds=0.5) as broken,
        ):
            proxy.die_after(3 << 20)
            with pytest.raises(WeighbridgeError) as error:
                broken.restore_state_dict(MODEL, module, state={"epoch": 0})
        assert f"This rank has restored only a part of {TRAINING}@1: restore again" in str(error.value.__notes__)
        client.restore_state_dict(MODEL, module, state={"epoch": 0})
        assert torch.equal(module.weight, expected)


def test_a_state_that_is_half_collected_is_told_as_deleted_and_weights_and_newer_states_stay_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, files = tmp_path / "store", "*.safetensors*"
    with running_service(folder, grace_seconds=0.2) as service, TrainerClient(service.address) as client:
        register(service, layers(1), tmp_path / "hf")
        for step in (1, 2):
            pushed_by(service, 1, step)
            for name in (MODEL, TRAINING):
                client.wait_for(name, step, VersionState.DURABLE, timeout=60)
        client.set_retention(TRAINING, Retention(keep_last=1))
        [state] = folder.glob("training/acme/smol/versions/*1")
        store = service.service.catalog.store
        delete = store.delete

        def cut_off(key: str) -> None:
            """Keep the objects that are deleted after the manifest; a folder without a manifest is not a version."""
            if not (state / MANIFEST_FILE).exists():
                raise Unavailable("the store is away")
            delete(key)

        with monkeypatch.context() as patched:
            patched.setattr(store, "delete", cut_off)
            eventually(lambda: client.collect(TRAINING).problems)
        assert list(state.glob(files))
    with running_service(folder, grace_seconds=0.2) as service, TrainerClient(service.address) as client:
        module = layers(1)
        with pytest.raises(NotFound, match=f"{TRAINING}@1"):
            client.restore_state_dict(MODEL, module, optimizer=adamw(module), version=1)
        assert client.restore_state_dict(MODEL, module, optimizer=adamw(module)).step == 2
        assert client.restore_state_dict(MODEL, module, version=1).step == 1
        pushed_by(service, 1, 3)
        eventually(lambda: client.collect(TRAINING) and not state.exists())


def test_a_version_without_a_ranks_blob_is_refused_by_the_name_of_that(service: RunningService, tmp_path: Path) -> None:
    """A program other than the SDK may push like this: two ranks, and no rank's values."""
    module = layers(1)
    register(service, module, tmp_path / "hf")
    spec = TensorSpec("model.0.weight", dtypes.parse("fp32"), (8, 8))
    layout = Layout.stream([spec], [Shard(spec.name, Box.whole(spec.shape))])

    def work(rank: int) -> Any:
        with TrainerClient(service.address) as client:
            source = CastingSource(layout, [module[0].weight])
            handle = client.push_shards(
                TRAINING, layout, TensorSpace.HUGGING_FACE, source, step=1, rank=rank, world_size=2
            )
            return handle.wait(timeout=60)

    as_ranks(2, work)
    with TrainerClient(service.address) as client, pytest.raises(DataLoss) as error:
        client.restore_state_dict(MODEL, module, state={}, rank=1, world_size=2)
    assert f"{TRAINING}@1 has no rank_state.00001" in error.value.message


def test_a_manager_begins_anew_without_a_state_and_saves_a_step_again_in_another_process(
    service: RunningService, tmp_path: Path
) -> None:
    module = layers(1)
    with TrainerClient(service.address) as client:
        checkpoints = CheckpointManager(client, MODEL, module, adamw(module))
        with pytest.raises(NotFound):
            checkpoints.restore()
        register(service, module, tmp_path / "hf")
        client.push_state_dict(MODEL, module, step=1).wait(timeout=60)
        assert checkpoints.latest() is None
        assert checkpoints.find(1) is None
        assert checkpoints.restore() is None
        checkpoints.save(2)
        saved = checkpoints.wait(timeout=60)
        assert saved is not None
        assert (saved.model, saved.step) == (TRAINING, 2)
        assert checkpoints.latest() == saved
        assert checkpoints.restore() == saved
    with TrainerClient(service.address) as client:  # another process, which makes a step again
        again = CheckpointManager(client, MODEL, module, adamw(module))
        assert again.restore() == saved
        handle = again.save(2)
        repeated = again.wait(timeout=60)
        assert (repeated.step, repeated.number) == (2, handle.number) == (2, saved.number + 1)
        assert again.latest() == again.find(2) == repeated
        assert again.find(1) is None
        assert again.restore(saved.number) == saved


class Unsayable:
    """A version whose name cannot be formatted."""

    def __str__(self) -> str:
        raise RuntimeError("it has no name")


def _restoring_what_cannot_be_said(rank: int, address: str) -> str:
    module = layers(1)
    with TrainerClient(address) as client:
        checkpoints = CheckpointManager(client, MODEL, module, adamw(module))
        with pytest.raises(WeighbridgeError) as error:
            checkpoints.restore(Unsayable() if rank == 0 else "latest")  # type: ignore[arg-type]
    return str(error.value)


def test_all_ranks_are_told_of_whatever_keeps_rank_0_from_finding_a_state(
    service: RunningService, tmp_path: Path
) -> None:
    register(service, layers(1), tmp_path / "hf")
    told = run_ranks(2, _restoring_what_cannot_be_said, service.address, timeout=60)
    assert told == [f"rank 0 cannot find a training state of {MODEL}: RuntimeError('it has no name')"] * 2
