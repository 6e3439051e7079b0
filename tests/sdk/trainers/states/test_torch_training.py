"""Does the training state of one process use torch's own names, and does every optimizer resume as if it had never
stopped?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from tests.support.training_states import Whole, same_bits
from tests.support.zero3_ranges import partition
from weighbridge._trainers.states.torch_training import TorchRestore, training_tensors
from weighbridge._trainers.states.training_state import RankValues, TrainingState, without_blobs
from weighbridge.errors import InvalidArgument, LayoutError

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    """A small model with a tied head, a frozen parameter, a scalar, a buffer, and one that only it uses."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens))
        for layer in self.layers:
            hidden = hidden + self.scale * torch.tanh(layer(self.frozen(hidden)))
        logits: Tensor = self.head(hidden)
        return logits


class Packed(torch.Tensor):
    """A packed state, as optimizers with 8-bit states have it."""


Make = Callable[[nn.Module], Any]


def groups(module: nn.Module) -> list[dict[str, Any]]:
    decayed = [each for each in module.parameters() if each.dim() > 1]
    others = [each for each in module.parameters() if each.dim() < 2]
    return [{"params": decayed, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01),
    "groups": lambda module: torch.optim.AdamW(groups(module), lr=0.01, betas=(0.8, 0.9)),
    "amsgrad": lambda module: torch.optim.Adam(module.parameters(), lr=0.01, amsgrad=True),
    "foreach": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01, foreach=True),
    "fused": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01, fused=True),
    "tensor lr": lambda module: torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.01),
    "momentum": lambda module: torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9),
    "adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=0.01),
    "rprop": lambda module: torch.optim.Rprop(module.parameters(), lr=0.01),
    "asgd": lambda module: torch.optim.ASGD(module.parameters(), lr=0.01),
}


def train(module: nn.Module, optimizers: Any, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        tokens = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(module(tokens).float(), (tokens + 1) % 7)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def pushed(module: nn.Module, optimizers: Any) -> Whole:
    return Whole.of([TrainingState.of(training_tensors(module, optimizers), RankValues(), 0)])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("used", [0, 2])
def test_an_optimizer_that_is_filled_goes_on_as_the_one_that_was_pushed(name: str, steps: int, used: int) -> None:
    """Whether neither, one or both have made a step before."""
    module = Net(1)
    optimizer = OPTIMIZERS[name](module)
    train(module, optimizer, range(steps))
    whole = pushed(module, optimizer)
    other = Net(2)
    filled = OPTIMIZERS[name](other)
    train(other, filled, range(90, 90 + used))
    whole.fill(TorchRestore(other, filled))
    assert filled.state_dict().keys() == optimizer.state_dict().keys()
    assert filled.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    expected = train(module, optimizer, range(steps, steps + 5))
    assert all(map(same_bits, train(other, filled, range(steps, steps + 5)), expected))
    for (key, mine), theirs in zip(other.state_dict().items(), module.state_dict().values(), strict=True):
        assert same_bits(mine, theirs), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_names_and_tensors_are_those_of_torchs_own_state_dicts(name: str) -> None:
    module = Net(1)
    optimizer = OPTIMIZERS[name](module)
    train(module, optimizer, range(3))
    found = pushed(module, optimizer)
    theirs = get_optimizer_state_dict(module, optimizer, options=FLAT)
    expected = {
        f"optimizer.{key}": value
        for key, value in theirs.items()
        if isinstance(value, Tensor) and key.startswith("state.")
    } | {f"model.{key}": value for key, value in get_model_state_dict(module).items() if key != "head.weight"}
    assert without_blobs(found.specs).keys() == expected.keys()
    for key, tensor in expected.items():
        assert same_bits(found.tensors[key], tensor), key


def test_an_optimizer_before_its_first_step_is_pushed_as_it_is_and_stays_so() -> None:
    """torch's own function makes a step with it, after which it counts one more."""
    module = Net(1)
    optimizer = OPTIMIZERS["adamw"](module)
    whole = pushed(module, optimizer)
    assert not any(key.startswith("optimizer.") for key in whole.specs)
    assert len(optimizer.state) == 0
    other = Net(2)
    filled = OPTIMIZERS["adamw"](other)
    train(other, filled, range(2))
    whole.fill(TorchRestore(other, filled))
    assert len(filled.state) == 0


def test_tensors_that_an_optimizer_has_are_filled_where_they_lie() -> None:
    module, other = Net(1), Net(2)
    optimizer, filled = OPTIMIZERS["adamw"](module), OPTIMIZERS["adamw"](other)
    train(module, optimizer, range(2))
    train(other, filled, range(1))
    before = [each["exp_avg"] for each in filled.state.values()]
    pushed(module, optimizer).fill(TorchRestore(other, filled))
    assert [each["exp_avg"] for each in filled.state.values()] == before


def test_moments_keep_a_dtype_of_their_own() -> None:
    """`Optimizer.load_state_dict` casts them to their parameters'."""
    module, other = Net(1, torch.bfloat16), Net(2, torch.bfloat16)
    optimizer, filled = OPTIMIZERS["adamw"](module), OPTIMIZERS["adamw"](other)
    weight = module.layers[0].weight
    optimizer.state[weight] = {
        "step": torch.tensor(4.0),
        "exp_avg": torch.rand(6, 6),
        "seen": 12,
        "inner": {"a": torch.rand(3), "b": 2},
    }
    pushed(module, optimizer).fill(TorchRestore(other, filled))
    found = filled.state[other.layers[0].weight]
    assert found.keys() == optimizer.state[weight].keys()
    assert same_bits(found["exp_avg"], optimizer.state[weight]["exp_avg"])
    assert same_bits(found["inner"]["a"], optimizer.state[weight]["inner"]["a"])
    assert (found["seen"], found["inner"]["b"], float(found["step"])) == (12, 2, 4.0)


def test_several_optimizers_of_one_module_are_one_state() -> None:
    def made(module: nn.Module) -> list[Any]:
        matrices = [each for each in module.parameters() if each.dim() > 1 and each.requires_grad]
        others = [each for each in module.parameters() if each.dim() < 2]
        return [torch.optim.SGD(matrices, lr=0.1, momentum=0.5), torch.optim.AdamW(others, lr=0.01)]

    module, other = Net(1), Net(2)
    optimizers, filled = made(module), made(other)
    train(module, optimizers, range(3))
    optimizers[0].param_groups[0]["lr"] = 0.07
    pushed(module, optimizers).fill(TorchRestore(other, filled))
    assert filled[0].param_groups[0]["lr"] == 0.07
    assert all(map(same_bits, train(other, filled, range(3, 6)), train(module, optimizers, range(3, 6))))


def test_what_a_scheduler_has_set_comes_back() -> None:
    module, other = Net(1), Net(2)
    optimizer, filled = OPTIMIZERS["groups"](module), OPTIMIZERS["groups"](other)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(module, optimizer, range(1))
    scheduler.step()
    pushed(module, optimizer).fill(TorchRestore(other, filled))
    for mine, theirs in zip(filled.param_groups, optimizer.param_groups, strict=True):
        assert {key: value for key, value in mine.items() if key != "params"} == {
            key: value for key, value in theirs.items() if key != "params"
        }


def test_wrappers_and_compilation_do_not_change_names() -> None:
    module = Net(1)
    optimizer = OPTIMIZERS["adamw"](module)
    train(module, optimizer, range(1))
    expected = pushed(module, optimizer).specs
    assert pushed(torch.compile(module), optimizer).specs == expected  # type: ignore[arg-type]
    module.layers[1] = torch.compile(module.layers[1])  # type: ignore[assignment]
    assert pushed(module, optimizer).specs == expected


def test_two_tensors_that_have_one_name_without_their_wrappers_are_refused() -> None:
    def made() -> nn.Module:
        module = nn.Module()
        module.inner = nn.Linear(3, 3)
        module.inner._orig_mod = nn.Linear(3, 3)
        return module

    with pytest.raises(LayoutError, match=r"^2 entries of the training state cannot be stored") as error:
        training_tensors(made(), None)
    assert [line.partition(":")[0] for line in error.value.details] == [
        "model.inner.weight",
        "model.inner.bias",
    ]
    whole = pushed(nn.ModuleDict({"inner": nn.Linear(3, 3)}), None)
    with pytest.raises(LayoutError) as error:
        whole.fill(TorchRestore(made(), None))
    assert "model.inner.weight: two tensors have this name" in "\n".join(error.value.details)


def test_one_tensor_that_has_one_name_twice_without_its_wrappers_is_kept_once() -> None:
    module = nn.ModuleDict({"inner": nn.Linear(3, 3)})
    expected = pushed(module, None)
    module["inner"]._orig_mod = nn.Linear(3, 3)
    module["inner"]._orig_mod.weight = module["inner"].weight
    module["inner"]._orig_mod.bias = module["inner"].bias
    found = pushed(module, None)
    assert without_blobs(found.specs) == without_blobs(expected.specs)
    for name in without_blobs(expected.specs):
        assert same_bits(found.tensors[name], expected.tensors[name])
    other = nn.ModuleDict({"inner": nn.Linear(3, 3)})
    found.fill(TorchRestore(other, None))
    assert same_bits(other["inner"].weight, module["inner"].weight)


def test_a_child_that_has_the_name_of_a_compiled_module_is_no_wrapper() -> None:
    """Unwrapped, the module would be pushed without its head."""
    module = nn.ModuleDict({"_orig_mod": nn.Linear(3, 3), "head": nn.Linear(3, 2)})
    assert without_blobs(pushed(module, None).specs).keys() == {
        f"model.{name}" for name in ("weight", "bias", "head.weight", "head.bias")
    }


def test_an_optimizer_of_another_module_is_refused_when_it_is_pushed_and_when_it_is_filled() -> None:
    module, other = Net(1), Net(2)
    for refused in (training_tensors, TorchRestore):
        with pytest.raises(LayoutError) as error:
            refused(module, OPTIMIZERS["groups"](other))
        assert "9 parameters that the module does not have" in error.value.message
        assert "parameter 0 of group 0 is torch.float32[7, 6]" in error.value.details
        assert "fully_shard" in error.value.fix


def test_the_state_of_another_model_is_refused_with_all_that_differs_and_changes_nothing() -> None:
    module = Net(1)
    optimizer = OPTIMIZERS["adamw"](module)
    train(module, optimizer, range(2))
    whole = pushed(module, optimizer)
    other = Net(2)
    other.layers.append(nn.Linear(6, 6, bias=False))
    other.layers[0] = nn.Linear(6, 5)
    del other.norm
    filled = OPTIMIZERS["adamw"](other)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(LayoutError) as error:
        whole.fill(TorchRestore(other, filled))
    assert "tests/m:training@1 is the training state of a different model or optimizer" in error.value.message
    told = "\n".join(error.value.details)
    for line in (
        "model.layers.0.weight F32[5, 6] of the module is F32[6, 6] in the version",
        "model.layers.2.weight is missing from the version",
        "the module has no model.norm.running_mean F32[6]",
        "the optimizer has no parameter for optimizer.state.norm.weight.exp_avg F32[6]",
        "layers.2.weight is in a parameter group of the optimizer, and in none of the version's",
    ):
        assert line in told
    assert all(same_bits(value, before[key]) for key, value in other.state_dict().items())
    assert len(filled.state) == 0


def test_a_parameter_that_one_optimizer_leaves_out_is_named() -> None:
    module, other = Net(1), Net(2)
    everything = OPTIMIZERS["sgd"](module)
    part = torch.optim.SGD([each for each in other.parameters() if each.dim()], lr=0.1)
    with pytest.raises(
        LayoutError, match=r"scale is in a parameter group of the version, and in none of the optimizer's"
    ):
        pushed(module, everything).fill(TorchRestore(other, part))
    with pytest.raises(
        LayoutError, match=r"scale is in a parameter group of the optimizer, and in none of the version's"
    ):
        pushed(other, part).fill(TorchRestore(module, everything))
    pushed(module, everything).fill(TorchRestore(other, part, strict=False))
    assert part.param_groups[0]["lr"] == 0.01


def test_stages_of_a_pipeline_are_filled_into_one_rank_and_back() -> None:
    """Rank 0 knows only the parameter groups of its own layers; the moments of the others are restored nevertheless."""

    def stage(seed: int, *layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        every = [nn.Linear(6, 6) for _ in range(2)]
        module = nn.ModuleDict({str(layer): every[layer] for layer in layers})
        return module, torch.optim.AdamW(module.parameters(), lr=0.01 * (seed + 1))

    def step(module: Any, optimizer: torch.optim.Optimizer) -> None:
        for layer in module.values():
            layer(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()

    def bits(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        return {
            f"{name} {key}": value
            for name, parameter in module.named_parameters()
            for key, value in {"": parameter, **optimizer.state[parameter]}.items()
        }

    stages = [stage(1, 0), stage(1, 1)]
    for each in stages:
        step(*each)
    whole = Whole.of(
        [TrainingState.of(training_tensors(*each), RankValues(), rank) for rank, each in enumerate(stages)]
    )
    expected = bits(*stages[0]) | bits(*stages[1])
    both = stage(2, 0, 1)
    whole.fill(TorchRestore(*both))
    assert both[1].param_groups[0]["lr"] == 0.02
    found = bits(*both)
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], value) for name, value in expected.items())
    last = stage(2, 1)
    whole.fill(TorchRestore(*last, strict=False), rank=1)
    assert all(same_bits(value, expected[name]) for name, value in bits(*last).items())
    with pytest.raises(LayoutError, match=r"the module has no model\.0\.weight"):
        whole.fill(TorchRestore(*stage(2, 1)), rank=1)


def test_parameters_that_have_been_put_into_other_groups_are_refused() -> None:
    module, other = Net(1), Net(2)
    with pytest.raises(LayoutError, match=r"group 0 of the optimizer has parameters of several groups of the version"):
        pushed(module, OPTIMIZERS["groups"](module)).fill(TorchRestore(other, OPTIMIZERS["adamw"](other)))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("stored", "own"), [("adamw", "sgd"), ("momentum", "adamw"), ("adafactor", "adamw")])
def test_an_optimizer_of_another_kind_is_refused_by_its_options(stored: str, own: str, strict: bool) -> None:
    module, other = Net(1), Net(2)
    optimizer, filled = OPTIMIZERS[stored](module), OPTIMIZERS[own](other)
    train(module, optimizer, range(2))
    torch.optim.lr_scheduler.LinearLR(optimizer)
    with pytest.raises(LayoutError, match=rf"group 0 of the optimizer \({type(filled).__name__}\) has .*instead"):
        pushed(module, optimizer).fill(TorchRestore(other, filled, strict=strict))
    assert not filled.state


@pytest.mark.parametrize("own", [torch.optim.Adam, torch.optim.AdamW], ids=["Adam", "AdamW"])
def test_an_optimizer_whose_options_are_all_known_to_another_kind_is_refused_by_its_kind(own: Any) -> None:
    module, other = Net(1), Net(2)
    optimizer, filled = torch.optim.Adamax(module.parameters()), own(other.parameters())
    train(module, optimizer, range(2))
    held = training_tensors(module, optimizer)
    before = {key: value for key, value in held.values["optimizer"].items() if key != "kinds"}
    earlier = replace(held, values={**held.values, "optimizer": before})
    with pytest.raises(LayoutError) as error:
        Whole.of([TrainingState.of(held, RankValues(), 0)]).fill(TorchRestore(other, filled))
    assert error.value.details == (f"group 0 of the optimizer is of {own.__name__}; the version's is of Adamax",)
    assert not filled.state
    for state, strict in ((held, False), (earlier, True)):
        filled = own(other.parameters())
        Whole.of([TrainingState.of(state, RankValues(), 0)]).fill(TorchRestore(other, filled, strict=strict))
        assert {*filled.state[other.scale]} == {"step", "exp_avg", "exp_inf"}


def test_options_of_a_later_torch_and_of_schedulers_do_not_make_an_optimizer_another_one() -> None:
    module, other = Net(1), Net(2)
    optimizer, filled = OPTIMIZERS["adamw"](module), OPTIMIZERS["adamw"](other)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    for group in optimizer.param_groups:
        del group["decoupled_weight_decay"]  # as torch before 2.7 had none
    pushed(module, optimizer).fill(TorchRestore(other, filled))
    assert filled.param_groups[0]["max_lr"] == 0.1


def test_a_state_without_an_optimizer_is_told_from_one_with_it() -> None:
    module, other = Net(1), Net(2)
    whole = pushed(module, None)
    with pytest.raises(LayoutError, match="has no optimizer state"):
        whole.fill(TorchRestore(other, OPTIMIZERS["adamw"](other)))
    whole.fill(TorchRestore(other, None))
    assert all(same_bits(a, b) for a, b in zip(other.state_dict().values(), module.state_dict().values(), strict=True))


def test_a_dtype_that_differs_is_not_cast() -> None:
    module, other = Net(1), Net(2, torch.bfloat16)
    with pytest.raises(LayoutError, match=r"model\.scale BF16\[\] of the module is F32\[\] in the version"):
        pushed(module, None).fill(TorchRestore(other, None))


def test_what_is_no_module_or_optimizer_is_refused_by_its_type() -> None:
    module = Net(1)
    with pytest.raises(InvalidArgument, match="a OrderedDict has no optimizer state"):
        training_tensors(module.state_dict(), None)
    with pytest.raises(InvalidArgument, match="a Net is not an optimizer of torch"):
        training_tensors(module, module)


def test_a_module_that_zero_3_has_partitioned_wants_the_optimizer_of_deepspeed() -> None:
    module = Net(1)
    optimizer = OPTIMIZERS["sgd"](module)
    for parameter in module.parameters():
        partition(parameter, 0, 2)
    with pytest.raises(InvalidArgument, match="ZeRO-3 has partitioned") as error:
        training_tensors(module, optimizer)
    assert "engine.optimizer" in error.value.fix
    held = training_tensors(module, None).layout
    for name, parameter in module.named_parameters():
        assert held.tensors[f"model.{name}"].shape == tuple(parameter.ds_shape)  # type: ignore[attr-defined]


def test_tensors_without_data_or_of_no_kept_dtype_are_named() -> None:
    module = Net(1)
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    module.register_buffer("complex", torch.zeros(3, dtype=torch.complex128))
    module.register_buffer("empty", torch.zeros(3, device="meta"))
    optimizer = OPTIMIZERS["sgd"](module)
    optimizer.state[module.scale]["packed"] = torch.ones(3).as_subclass(Packed)
    with pytest.raises(LayoutError, match=r"^4 entries of the training state cannot be stored") as error:
        training_tensors(module, optimizer)
    assert [line.partition(":")[0] for line in error.value.details] == [
        "model.sparse",
        "model.complex",
        "model.empty",
        "optimizer.state.scale.packed",
    ]


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        (0, 1, "scale[0]"),
        ("a.b", torch.ones(2), "scale['a.b']"),
        ("history", [torch.ones(2)], "scale.history"),
        ("pair", (1, {"x": torch.ones(2)}), "scale.pair"),
        ("by number", {0: torch.ones(2)}, "scale.by number"),
    ],
)
def test_what_would_not_come_back_of_an_optimizers_state_is_refused_by_name(
    key: object, value: object, named: str
) -> None:
    module = Net(1)
    optimizer = OPTIMIZERS["sgd"](module)
    optimizer.state[module.scale][key] = value
    with pytest.raises(LayoutError, match="1 entry of the training state cannot be stored") as error:
        training_tensors(module, optimizer)
    assert [line.partition(":")[0] for line in error.value.details] == [f"optimizer.state.{named}"]


def test_extra_state_of_modules_comes_back() -> None:
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    module, other = nn.Sequential(Counting(2, 2)), nn.Sequential(Counting(2, 2))
    module[0].seen = 5
    pushed(module, None).fill(TorchRestore(other, None))
    assert other[0].seen == 5
