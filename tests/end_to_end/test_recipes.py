"""Do the recipes run as they are printed, and push what was trained?

The code is taken from the pages; the tests only replace the service's address and the step numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.torch_ranks import fill, full_tensors, run_ranks, shared
from weighbridge import EngineClient, FailedPrecondition, InvalidArgument, TrainerClient, VersionState

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
CONFIG = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=130)
STEPS = 10


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    CONFIG.save_pretrained(folder)
    return folder


def run(page: str, address: str, name: str, **names: Any) -> dict[str, Any]:
    """Run the code of a page with these names defined; its names afterwards."""
    code = re.search(r"```python\n(.*?)```", (RECIPES / page).read_text("utf-8"), re.DOTALL)
    assert code is not None
    source = code[1].replace("127.0.0.1:50051", address).replace("acme/smol", name)
    exec(compile(source, page, "exec"), names)
    return names


def _batches() -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, 130, (STEPS, 2, 8), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": each, "labels": each} for each in tokens]


def _pulled(address: str, name: str, version: str | int = "latest") -> dict[str, Tensor]:
    with EngineClient(address) as engine:
        return dict(engine.pull(name, version))


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


class _Dataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index % 2] for name, tensor in _batches()[index // 2].items()}


def test_lora_pushes_what_is_merged_and_goes_on_with_its_adapters(service: RunningService, hf_dir: Path) -> None:
    batches = [*_batches(), *_batches()]

    def runs(name: str, loader: list[dict[str, Tensor]]) -> Any:
        torch.manual_seed(4)
        model = tiny_model(CONFIG, seed=4)
        return run("lora.md", service.address, name, model=model, hf_dir=hf_dir, loader=loader)["model"]

    whole = runs("recipes/lora-whole", batches)
    runs("recipes/lora", batches[:STEPS])
    left = runs("recipes/lora", batches)  # goes on at step 11
    assert [name for name, _ in left.named_parameters() if "lora_B" in name]
    _equal(dict(left.state_dict()), dict(whole.state_dict()))
    expected = left.merge_and_unload().state_dict()
    found = _pulled(service.address, "recipes/lora")
    _equal(found, {name: tensor.to(found[name].dtype) for name, tensor in expected.items()})
    before = tiny_model(CONFIG, seed=4).state_dict()
    q = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(found[q], before[q].to(found[q].dtype))


def _arguments(folder: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    fixed = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    of_run = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "save_strategy": "no", **options}
    return TrainingArguments(str(folder), **fixed, **of_run)


def test_the_callback_of_transformers_trainer(service: RunningService, tmp_path: Path) -> None:
    model = tiny_model(CONFIG, seed=5)
    names = run(
        "transformers-trainer.md", service.address, "tests/callback", model=model, args=_arguments(tmp_path), dataset=_Dataset(),
    )  # fmt: skip
    assert names["version"].step == STEPS
    _equal(_pulled(service.address, "tests/callback"), dict(model.state_dict()))


def test_the_callback_pushes_a_model_with_adapters_merged(service: RunningService, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_model(CONFIG, seed=5), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.get_base_model().config.architectures = None
    run(
        "transformers-trainer.md", service.address, "tests/adapted", model=adapted, args=_arguments(tmp_path), dataset=_Dataset(),
    )  # fmt: skip
    _equal(_pulled(service.address, "tests/adapted"), dict(adapted.merge_and_unload().state_dict()))


def test_a_push_that_fails_harms_training_only_if_it_shall(
    service: RunningService, tmp_path: Path, hf_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Trainer

    from weighbridge.integrations.transformers.trainer_callback import PushCallback

    other = tiny_config("llama", tied=False, num_hidden_layers=3, vocab_size=130)
    other.save_pretrained(tmp_path / "other")
    with TrainerClient(service.address) as trainer:
        trainer.register_model("tests/other", tmp_path / "other")

    def train(callback: Any, **options: Any) -> Trainer:
        args = _arguments(tmp_path, max_steps=2, **options)
        made = Trainer(tiny_model(CONFIG, seed=5), args, train_dataset=_Dataset(), callbacks=[callback])
        made.train()
        callback.close()
        return made

    lost = PushCallback("tests/saved", "127.0.0.1:9", every=1, retry_seconds=0.1)
    assert train(lost).state.global_step == 2
    assert "tests/saved: step 2 was not pushed; training goes on. not all ranks can push" in caplog.text
    with pytest.raises(FailedPrecondition, match="no version of tests/saved has been pushed"):
        lost.wait()
    caplog.clear()
    train(PushCallback("tests/other", service.address, every=2))
    assert "model.layers.2.input_layernorm.weight F32[64] is missing" in caplog.text
    with pytest.raises(FailedPrecondition, match="not all ranks can push"):
        train(PushCallback("tests/other", service.address, every=2, strict=True))

    caplog.clear()
    saving = PushCallback("tests/saving", service.address, dtype="bf16", strict=True)
    model = train(saving, save_strategy="steps", save_steps=2).model
    assert "has failed" not in caplog.text
    with TrainerClient(service.address) as trainer:
        assert [version.step for version in trainer.versions("tests/saving")] == [2]
        trainer.wait_for("tests/saving", 1, VersionState.DURABLE, timeout=60)
    _equal(
        _pulled(service.address, "tests/saving"),
        {name: tensor.bfloat16() for name, tensor in model.state_dict().items()},
    )
    with pytest.raises(InvalidArgument, match="every=0"):
        PushCallback("tests/saving", every=0)


def _shared_trainings(rank: int, address: str, folder: Path) -> dict[str, tuple[int, dict[str, Tensor]]]:
    """The last step that callbacks on two ranks have pushed, and what was trained then: by Trainer under DDP, and of an
    FSDP2 module.
    """
    from transformers import Trainer, TrainerControl, TrainerState
    from transformers.trainer_callback import CallbackHandler

    from weighbridge.integrations.transformers.trainer_callback import PushCallback

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # of the group that there is already
    found = {}
    args = _arguments(folder, max_steps=4)
    pushes = PushCallback("tests/ddp", address, every=2, strict=True)
    trainer = Trainer(tiny_model(CONFIG, seed=5), args, train_dataset=_Dataset(), callbacks=[pushes])
    trainer.train()
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    found["ddp"] = pushes.wait(timeout=60).step, full_tensors(trainer.model)
    pushes.close()

    model = shared(tiny_model(CONFIG, seed=6), "fsdp")
    pushes = PushCallback("tests/fsdp", address, every=2, dtype="bf16", strict=True)
    hooks = CallbackHandler([pushes], model, None, None, None)
    state, control = TrainerState(), TrainerControl()
    hooks.on_train_begin(args, state, control)
    for state.global_step in range(1, 5):
        fill(model.parameters(), state.global_step / 3)
        hooks.on_step_end(args, state, control)
    found["fsdp"] = pushes.wait(timeout=60).step, full_tensors(model)
    pushes.close()
    return found


def test_the_callback_on_ranks_that_share_the_model(service: RunningService, tmp_path: Path) -> None:
    """accelerate has FSDP on GPUs only: here fully_shard cuts the model, and transformers' own handler calls the
    callback.
    """
    ranks = run_ranks(2, _shared_trainings, service.address, tmp_path)
    for way, dtype in (("ddp", torch.float32), ("fsdp", torch.bfloat16)):
        step, expected = ranks[0][way]
        assert step == ranks[1][way][0] == 4
        _equal(_pulled(service.address, f"tests/{way}"), {name: t.to(dtype) for name, t in expected.items()})
        with TrainerClient(service.address) as trainer:
            assert {(each.step, each.ranks) for each in trainer.versions(f"tests/{way}")} <= {(2, 2), (4, 2)}


class _Adapter:
    """The interface of torchtitan's ``StateDictAdapter``, with names and orders as its Llama 3 has them."""

    def to_hf(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {self._name(name): self._turned(name, tensor, 1) for name, tensor in state.items()}

    def from_hf(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._turned(name, state[self._name(name)], -1) for name in map(self._native, state)}

    def _name(self, name: str) -> str:
        return name.removeprefix("tok.").replace("attention.wq", "self_attn.q_proj")

    def _native(self, name: str) -> str:
        return "tok." + name.replace("self_attn.q_proj", "attention.wq")

    def _turned(self, name: str, tensor: Tensor, way: int) -> Tensor:
        if "wq" not in name:
            return tensor
        pairs = (2, -1) if way < 0 else (-1, 2)
        return tensor.view(4, *pairs, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


class _Native(torch.nn.Module):
    """A model that has its parameters by torchtitan's names."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.state = state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return dict(self.state)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.state = {name: tensor.clone() for name, tensor in state_dict.items()}


def test_an_adapter_of_torchtitans_interface(service: RunningService, hf_dir: Path) -> None:
    expected = dict(tiny_model(CONFIG, seed=5).state_dict())
    adapter = _Adapter()
    model = _Native(adapter.from_hf(expected))
    names = run("torchtitan.md", service.address, "tests/titan", model=model, adapter=adapter, hf_dir=hf_dir)
    assert names["version"].step == 10
    _equal(_pulled(service.address, "tests/titan"), expected)
    _equal(adapter.to_hf(model.state), expected)
    assert not torch.equal(
        model.state["tok.model.layers.0.attention.wq.weight"],
        expected["model.layers.0.self_attn.q_proj.weight"],
    )


def _loops(rank: int, address: str, hf_dir: Path) -> dict[str, dict[str, Tensor]]:
    """The weights that two ranks have trained, by accelerate and by fully_shard."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # of the group that there is already
    trained = {}
    for page in ("accelerate", "torch-loop"):
        model = tiny_model(CONFIG, seed=5).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = _batches()
        if page == "accelerate":
            loader = torch.utils.data.DataLoader(_Dataset(), batch_size=1)
        names = run(
            f"{page}.md", address, f"tests/{page}", model=model, optimizer=optimizer, loader=loader, hf_dir=hf_dir,
        )  # fmt: skip
        assert names["version"].ranks == 2
        trained[page] = full_tensors(names["model"])
    return trained


def test_loops_of_accelerate_and_of_plain_torch(service: RunningService, hf_dir: Path) -> None:
    before = tiny_model(CONFIG, seed=5).state_dict()["model.norm.weight"]
    for page, expected in run_ranks(2, _loops, service.address, hf_dir)[0].items():
        assert not torch.equal(expected["model.norm.weight"], before), page
        _equal(_pulled(service.address, f"tests/{page}"), expected)
