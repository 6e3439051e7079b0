"""Is an adapter that ranks have trained on a real language model the same on other ranks, in peft's folder and in a
vLLM that serves it?

SmolLM2-135M, in float32, with adapters on all of its linear layers. FSDP2 ranks train by peft; Megatron ranks by
adapters with the shards of Megatron-Bridge's. Its 9 heads are not even: tensor parallelism 2 takes the same model with
a fourth group of heads, whose weights are zeros.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

from tests.support.megatron_lora import add_lora
from tests.support.megatron_ranks import run_ranks as run_megatron_ranks
from tests.support.megatron_training import Piece, pieces, wholes
from tests.support.services import running_service
from tests.support.torch_ranks import run_ranks
from tests.support.vllm_adapters import BASE, Adapters, Said, ask, serving
from tests.support.vllm_environment import HAS_KERNELS, needs_vllm
from weighbridge import EngineClient, TrainerClient
from weighbridge_demo import language_model
from weighbridge_demo.megatron_cpu import Parallel, build_model, forward_logits, train_step
from weighbridge_demo.text import TEXT

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EVEN = "acme/smol-even"
BY_PEFT, BY_MEGATRON, EVEN_BY_MEGATRON = "acme/by-peft", "acme/by-megatron", "acme/even-by-megatron"
LORA_RANKS = {BY_PEFT: 8, BY_MEGATRON: 6, EVEN_BY_MEGATRON: 8}
"""Megatron's ranks share out the rank of an adapter evenly; those of FSDP2, three of them, do not."""
SCALE = 2
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STEPS, FURTHER = 3, 2
LEARNING_RATE = 0.2
TOLERANCE = 2e-4
"""Of log probabilities in float32, computed in other orders: five times what was measured.

A scale that is off by 2 moves them by 2, and here has to by a thousand times as much.
"""
LOSS_TOLERANCE = 1e-4
"""Of losses in float32, whose sums over other ranks are in another order."""
JOB_SECONDS = 900.0
START_SECONDS = 1500.0
PROMPTS = (
    TEXT[: TEXT.index("\n\n")],
    "The capital of France is Paris, which lies on the Seine.",
    "def add(first, second):\n    return first + second\n",
)
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Smol:
    """The language model in a service, and what it is trained and asked with.

    Attributes:
        there: the service.
        folders: of the model and of the one with a further group of heads, by their names.
        rows: int64 `[6, 17]`, to train with.
        prompts: tokens of each of `PROMPTS`.
    """

    there: Adapters
    folders: Mapping[str, Path]
    rows: Tensor
    prompts: tuple[list[int], ...]

    @property
    def address(self) -> str:
        return self.there.running.address

    def load(self, name: str) -> LlamaForCausalLM:
        return language_model.load_folder(self.folders[name])[0]

    def first_loss(self, name: str) -> float:
        """Of all rows, before any training, by transformers."""
        with torch.no_grad():
            return float(self.load(name)(input_ids=self.rows, labels=self.rows).loss)

    def exported(self, adapter: str) -> Path:
        """The latest version of an adapter, as a new folder."""
        folder = Path(tempfile.mkdtemp(dir=self.there.folder))
        self.there.client.export(adapter, "latest", folder)
        return folder


@dataclass(frozen=True)
class Trained:
    """The observations of one rank.

    Attributes:
        losses: of the whole batch before each step.
        held: the adapter after these: tensors of peft, or parts of Megatron's.
        further: losses of the steps after that.
        again: these of the same ranks, after they have gone back to what they pushed; empty if they have not.
        logprobs: of the prompts in between; empty if they were not asked for.
    """

    losses: list[float]
    held: Any
    further: list[float]
    again: list[float] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smol]:
    folder = tmp_path_factory.mktemp("smol")
    folders = {BASE: folder / "base", EVEN: folder / "even"}
    tokenizer = write(folders)
    prompts = tuple(tokenizer(each)["input_ids"] for each in PROMPTS)
    rows = language_model.training_batch(tokenizer, 16)[:6]
    with (
        running_service(folder / "store") as running,
        TrainerClient(running.address) as trainer,
        EngineClient(running.address) as client,
    ):
        for name, each in folders.items():
            trainer.import_folder(name, each).wait("durable", timeout=JOB_SECONDS)
        yield Smol(Adapters(running, trainer, client, folder), folders, rows, prompts)


def write(folders: Mapping[str, Path]) -> Any:
    """Write both models; their tokenizer."""
    model, tokenizer = language_model.convert_gguf(language_model.find_gguf(), folders[BASE])
    with_further_heads(model).save_pretrained(folders[EVEN])
    tokenizer.save_pretrained(folders[EVEN])
    return tokenizer


def with_further_heads(model: Any) -> LlamaForCausalLM:
    """A model that computes the same with one more key-value head and the query heads that use it: all their weights
    are zeros.
    """
    config = LlamaConfig(
        **{
            **model.config.to_dict(),
            "num_key_value_heads": model.config.num_key_value_heads + 1,
            "num_attention_heads": model.config.num_attention_heads
            // model.config.num_key_value_heads
            * (model.config.num_key_value_heads + 1),
        }
    )
    larger = LlamaForCausalLM(config)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in larger.state_dict().items():
            tensor.zero_()
            tensor[tuple(map(slice, state[name].shape))] = state[name]
    return larger


def log_probabilities(model: Any, prompts: Sequence[list[int]]) -> list[Tensor]:
    """Of each token of each prompt but its first."""
    with torch.no_grad():
        return [of_tokens(model(input_ids=torch.tensor([each])).logits[0], torch.tensor(each)) for each in prompts]


def of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.log_softmax(logits[:-1].float(), -1).gather(1, tokens[1:, None])[:, 0]


def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference."""
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def check_config(folder: Path, name: str) -> None:
    """Check that peft reads the options of the adapter from its folder."""
    config = peft.PeftConfig.from_pretrained(folder)
    assert (config.r, config.lora_alpha) == (LORA_RANKS[name], SCALE * LORA_RANKS[name])
    assert set(config.target_modules) == set(MODULES)


def adapted(folder: Path, seed: int) -> Any:
    config = peft.LoraConfig(
        r=LORA_RANKS[BY_PEFT],
        lora_alpha=SCALE * LORA_RANKS[BY_PEFT],
        target_modules=list(MODULES),
        task_type="CAUSAL_LM",
    )
    model, _ = language_model.load_folder(folder)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, config)


def _over_ranks(model: Any) -> Any:
    """The same, over the ranks of this job; as it is on one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if dist.get_world_size() == 1:
        return model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _whole(model: Any) -> Tensors:
    from torch.distributed.tensor import DTensor

    held = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in held.items()
    }


def _descent(model: Any) -> torch.optim.Optimizer:
    """An optimizer without state: training resumes from the adapter alone."""
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=LEARNING_RATE)


def _train(model: Any, rows: Tensor, steps: int) -> list[float]:
    """The mean loss over all ranks before each step; each rank takes its part of the rows."""
    mine, optimizer, losses = rows.chunk(dist.get_world_size())[dist.get_rank()], _descent(model), []
    for _ in range(steps):
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def _peft_rank(rank: int, address: str, folder: Path, rows: Tensor) -> Trained:
    """Train, push, and go on; then go back, and on again."""
    model = _over_ranks(adapted(folder, seed=1))
    with TrainerClient(address) as trainer:
        losses = _train(model, rows, STEPS)
        trainer.push_adapter(BY_PEFT, model, base=f"{BASE}@1", step=STEPS).wait(timeout=JOB_SECONDS)
        held, further = _whole(model), _train(model, rows, FURTHER)
        trainer.restore_adapter(BY_PEFT, model)
    return Trained(losses, held, further, again=_train(model, rows, FURTHER))


def _restored_peft_rank(rank: int, address: str, folder: Path, rows: Tensor) -> Trained:
    """Restore into another adapter, and go on from there."""
    model = _over_ranks(adapted(folder, seed=5))
    with TrainerClient(address) as trainer:
        trainer.restore_adapter(BY_PEFT, model)
    return Trained([], _whole(model), _train(model, rows, FURTHER))


@pytest.fixture(scope="module")
def by_peft(smol: Smol) -> Trained:
    """The adapter that two FSDP2 ranks have trained and pushed."""
    given = smol.address, smol.folders[BASE], smol.rows
    first, second = run_ranks(2, _peft_rank, *given, timeout=JOB_SECONDS)
    assert first.losses == second.losses
    assert same(first.held, second.held)
    return first


def test_what_fsdp2_ranks_train_is_peft_s_folder_and_training_goes_on_from_it_on_any_mesh(
    smol: Smol, by_peft: Trained
) -> None:
    assert by_peft.losses[0] == pytest.approx(smol.first_loss(BASE), abs=LOSS_TOLERANCE)
    assert by_peft.losses == sorted(by_peft.losses, reverse=True)
    assert all(bool(each.any()) for each in by_peft.held.values())
    folder = smol.exported(BY_PEFT)
    assert same(load_file(folder / "adapter_model.safetensors"), by_peft.held)
    check_config(folder, BY_PEFT)
    given = smol.address, smol.folders[BASE], smol.rows
    assert by_peft.again == by_peft.further
    for size in (1, 3):
        for rank in run_ranks(size, _restored_peft_rank, *given, timeout=JOB_SECONDS):
            assert same(rank.held, by_peft.held), size
            assert rank.further == pytest.approx(by_peft.further, abs=LOSS_TOLERANCE)


def _megatron_model(trainer: TrainerClient, parallel: Parallel, base: str, config: PretrainedConfig, name: str) -> Any:
    """This rank's part of the base, with adapters that change nothing yet."""
    model = build_model(config, parallel)
    trainer.restore(base, model.sharded_state_dict(), version=1)
    add_lora(model, dim=LORA_RANKS[name], alpha=SCALE * LORA_RANKS[name])
    with torch.no_grad():
        for name, each in model.named_parameters():
            if ".adapter." in name:
                each.mul_(0.0 if ".linear_out." in name else 0.1)
    return model


def _train_megatron(model: Any, parallel: Parallel, rows: Tensor, steps: int) -> list[float]:
    optimizer = _descent(model)
    losses = [train_step(model, optimizer, rows[:, :-1], rows[:, 1:], parallel) for _ in range(steps)]
    return [each for each in losses if each is not None]


def _held_by_megatron(model: Any) -> dict[str, list[Piece]]:
    return {name: each for name, each in pieces(model.sharded_state_dict()).items() if ".adapter." in name}


def _megatron_rank(
    rank: int,
    address: str,
    parallel: Parallel,
    base: str,
    config: PretrainedConfig,
    name: str,
    rows: Tensor,
    prompts: Sequence[list[int]],
) -> Trained:
    """Train, push, compute, and go on."""
    with TrainerClient(address) as trainer:
        model = _megatron_model(trainer, parallel, base, config, name)
        losses = _train_megatron(model, parallel, rows, STEPS)
        trainer.push_adapter(name, model, base=f"{base}@1", step=STEPS).wait(timeout=JOB_SECONDS)
    logits = [forward_logits(model, torch.tensor([each]), parallel) for each in prompts]
    logprobs = [
        of_tokens(each[0], torch.tensor(tokens))
        for each, tokens in zip(logits, prompts, strict=True)
        if each is not None
    ]
    held, further = _held_by_megatron(model), _train_megatron(model, parallel, rows, FURTHER)
    return Trained(losses, held, further, logprobs=logprobs)


def _restored_megatron_rank(
    rank: int,
    address: str,
    parallel: Parallel,
    base: str,
    config: PretrainedConfig,
    name: str,
    rows: Tensor,
) -> Trained:
    """Restore into another adapter, and go on from there."""
    with TrainerClient(address) as trainer:
        model = _megatron_model(trainer, parallel, base, config, name)
        trainer.restore_adapter(name, model)
    return Trained([], _held_by_megatron(model), _train_megatron(model, parallel, rows, FURTHER))


def train_by_megatron(smol: Smol, parallel: Parallel, base: str, name: str) -> list[Trained]:
    config = LlamaConfig.from_pretrained(smol.folders[base])
    given = smol.address, parallel, base, config, name, smol.rows, smol.prompts
    return run_megatron_ranks(parallel, _megatron_rank, *given, timeout=JOB_SECONDS)


@pytest.fixture(scope="module")
def by_megatron(smol: Smol) -> list[Trained]:
    """The adapter that ranks at tensor parallelism 3 have trained and pushed."""
    return train_by_megatron(smol, Parallel(tp=3), BASE, BY_MEGATRON)


@pytest.fixture(scope="module")
def even_by_megatron(smol: Smol) -> list[Trained]:
    """The adapter of the model with further heads that ranks at tensor parallelism 2 have trained and pushed."""
    return train_by_megatron(smol, Parallel(tp=2), EVEN, EVEN_BY_MEGATRON)


def in_peft(whole: Mapping[str, Tensor], config: PretrainedConfig) -> Tensors:
    """Megatron's adapters by peft's names.

    Of `linear_qkv`, rows are those of each key-value head with its query heads: queries, key, value. Of `linear_fc1`,
    those of the gate are first.
    """
    groups = config.num_key_value_heads
    found: Tensors = {}
    for number in range(config.num_hidden_layers):
        first, second = (
            {
                name.split(".")[-4]: tensor[number]
                for name, tensor in whole.items()
                if name.endswith(f".adapter.{side}.weight")
            }
            for side in ("linear_in", "linear_out")
        )
        heads = second["linear_qkv"].unflatten(0, (groups, -1, config.head_dim))
        gate, up = second["linear_fc1"].chunk(2)
        for module, layer, rows in (
            ("self_attn.q_proj", "linear_qkv", heads[:, :-2].flatten(0, 2)),
            ("self_attn.k_proj", "linear_qkv", heads[:, -2].flatten(0, 1)),
            ("self_attn.v_proj", "linear_qkv", heads[:, -1].flatten(0, 1)),
            ("self_attn.o_proj", "linear_proj", second["linear_proj"]),
            ("mlp.gate_proj", "linear_fc1", gate),
            ("mlp.up_proj", "linear_fc1", up),
            ("mlp.down_proj", "linear_fc2", second["linear_fc2"]),
        ):
            prefix = f"base_model.model.model.layers.{number}.{module}"
            found[f"{prefix}.lora_A.weight"], found[f"{prefix}.lora_B.weight"] = first[layer], rows
    return found


@pytest.mark.parametrize(
    ("trained", "base", "name"),
    [("by_megatron", BASE, BY_MEGATRON), ("even_by_megatron", EVEN, EVEN_BY_MEGATRON)],
    ids=["tp3", "tp2"],
)
def test_what_megatron_ranks_train_is_peft_s_folder_and_training_goes_on_from_it_at_no_parallelism(
    smol: Smol, request: pytest.FixtureRequest, trained: str, base: str, name: str
) -> None:
    config = LlamaConfig.from_pretrained(smol.folders[base])
    ranks: list[Trained] = request.getfixturevalue(trained)
    held = wholes(each.held for each in ranks)
    # of the smaller model: heads of zeros change nothing
    assert ranks[0].losses[0] == pytest.approx(smol.first_loss(BASE), abs=LOSS_TOLERANCE)
    assert ranks[0].losses == sorted(ranks[0].losses, reverse=True)
    assert all(bool(each.any()) for each in held.values())
    folder = smol.exported(name)
    assert same(load_file(folder / "adapter_model.safetensors"), in_peft(held, config))
    check_config(folder, name)

    loaded = peft.PeftModel.from_pretrained(smol.load(base), folder)
    assert apart(log_probabilities(loaded, smol.prompts), ranks[0].logprobs) < TOLERANCE

    given = smol.address, Parallel(), base, config, name, smol.rows
    [alone] = run_megatron_ranks(Parallel(), _restored_megatron_rank, *given, timeout=JOB_SECONDS)
    assert same(wholes([alone.held]), held)
    assert alone.further == pytest.approx(ranks[0].further, abs=LOSS_TOLERANCE)


@pytest.fixture(scope="module")
def merged(smol: Smol, by_peft: Trained, by_megatron: list[Trained]) -> dict[str, list[Tensor]]:
    """Log probabilities by transformers of the merged models, by name of the adapter."""
    return {
        name: log_probabilities(
            peft.PeftModel.from_pretrained(smol.load(BASE), smol.exported(name)).merge_and_unload(),
            smol.prompts,
        )
        for name in (BY_PEFT, BY_MEGATRON)
    }


def unlike(smol: Smol, adapter: str, factor: float) -> list[Tensor]:
    """Log probabilities of an adapter with another scale."""
    model = peft.PeftModel.from_pretrained(smol.load(BASE), smol.exported(adapter))
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scale_layer(factor)
    return log_probabilities(model, smol.prompts)


@pytest.mark.parametrize("adapter", [BY_PEFT, BY_MEGATRON])
def test_peft_and_the_merged_model_agree_far_closer_than_models_with_other_scales(
    smol: Smol, merged: dict[str, list[Tensor]], adapter: str
) -> None:
    folder = smol.exported(adapter)
    found = log_probabilities(peft.PeftModel.from_pretrained(smol.load(BASE), folder), smol.prompts)
    assert apart(found, merged[adapter]) < TOLERANCE
    for factor in (0.5, 2.0):
        assert apart(unlike(smol, adapter, factor), merged[adapter]) > 1000 * TOLERANCE


@needs_vllm
@pytest.mark.skipif(not HAS_KERNELS, reason="nothing is computed without kernels")
def test_vllm_gives_the_log_probabilities_of_the_merged_models(smol: Smol, merged: dict[str, list[Tensor]]) -> None:
    with serving(smol.there) as server:
        server.wait_ready(START_SECONDS)
        for adapter, expected in merged.items():
            found = []
            for tokens in smol.prompts:
                said = ask(server, adapter, prompt=tokens, echo=True, logprobs=1, max_tokens=1)
                assert isinstance(said, Said), said
                assert said.model == f"{adapter}@1"
                found.append(torch.tensor(said.logprobs[1 : len(tokens)]))
            assert apart(found, expected) < TOLERANCE
