"""Does the updater fit the calls that slime's and Miles's sources make, and refuse arguments with which it would not be
called, or could do no good?

With WEIGHBRIDGE_SLIME_SOURCE and WEIGHBRIDGE_MILES_SOURCE, folders of their sources, the calls are compared with these.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slime_actors import FRAMEWORKS, SIGNATURES, TrainerActor, arguments, forget, install
from weighbridge.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, WeighbridgeError

SETTINGS = {"weighbridge": {"model": "acme/policy"}}
SOURCES = {
    "slime": "slime/backends/megatron_utils/update_weight/update_weight_from_distributed.py",
    "miles": "miles/backends/megatron_utils/update_weight/update_weight_from_distributed/broadcast.py",
}
INHERITED = {"miles": "miles/backends/megatron_utils/update_weight/update_weight_from_distributed/mixin.py"}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    forget()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_updater_takes_every_call_of_the_one_that_it_replaces(framework: str) -> None:
    install(framework)
    updater = importlib.import_module("weighbridge.integrations.slime").WeighbridgeUpdater
    for name, said in SIGNATURES[framework].items():
        positional, _, keywords = said.partition(", *, ")
        given = positional.split(", ")
        theirs = {key: None for key in keywords.split(", ") if key}
        bound = inspect.signature(getattr(updater, name)).bind(*given, **theirs)
        assert [key for key in bound.arguments if key not in theirs] == given, name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_calls_are_those_of_the_source(framework: str) -> None:
    root = os.environ.get(f"WEIGHBRIDGE_{framework.upper()}_SOURCE", "")
    if not root:
        pytest.skip("the source is in no registry: name its folder")
    paths = [SOURCES[framework], *([INHERITED[framework]] if framework in INHERITED else [])]
    found = {
        node.name: ", ".join(_parameters(node))
        for path in paths
        for node in ast.walk(ast.parse(Path(root, path).read_text()))
        if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "self"
    }
    for name, said in SIGNATURES[framework].items():
        assert found[name] == said, name
    actor = Path(root, f"{framework}/backends/megatron_utils/actor.py").read_text()
    assert "import UpdateWeightFromDistributed\n" in actor
    assert "update_weight_cls = UpdateWeightFromDistributed\n" in actor


def _parameters(function: ast.FunctionDef) -> list[str]:
    keywords = [each.arg for each in function.args.kwonlyargs]
    return [each.arg for each in function.args.args] + (["*", *keywords] if keywords else [])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_arguments_of_a_job_are_enough(framework: str) -> None:
    updater = TrainerActor(framework, arguments(framework, **SETTINGS), []).weight_updater
    assert type(updater).__name__ == "WeighbridgeUpdater"
    assert updater.weight_version == 0
    assert updater.pop_metrics() == {}


@pytest.mark.parametrize(
    ("framework", "more", "said"),
    [
        ("slime", {}, "no weighbridge.model"),
        ("slime", {"weighbridge": {"server": "h:1"}}, "--custom-config-path"),
        ("slime", {"weighbridge": {"model": "a/b", "sever": "h:1"}}, "did you mean server"),
        ("slime", {**SETTINGS, "colocate": True}, "--colocate"),
        ("slime", {**SETTINGS, "update_weight_transport": "disk"}, "--update-weight-transport nccl"),
        ("slime", {**SETTINGS, "update_weight_mode": "delta"}, "--update-weight-mode full"),
        ("miles", {**SETTINGS, "update_weight_transfer_mode": "p2p"}, "--update-weight-transfer-mode broadcast"),
    ],
)  # fmt: skip
def test_arguments_with_which_nothing_would_be_pushed_are_refused(
    framework: str, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        TrainerActor(framework, arguments(framework, **more), [])


def test_engines_of_quantised_weights_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="--hf-checkpoint"):
        TrainerActor("slime", arguments("slime", **SETTINGS), [], {"quant_method": "fp8"})


def test_training_of_adapters_is_refused() -> None:
    install("miles")
    updater = importlib.import_module("weighbridge.integrations.slime").WeighbridgeUpdater
    with pytest.raises(InvalidArgument, match="adapters"):
        updater(arguments("miles", **SETTINGS), [], dict, model_name="", quantization_config=None, is_lora=True)


def test_a_process_that_is_no_trainer_actor_is_told_apart() -> None:
    install("slime")
    init = importlib.import_module("weighbridge.integrations.slime").init
    forget()
    with pytest.raises(FailedPrecondition, match="no UpdateWeightFromDistributed"):
        init(arguments("slime", **SETTINGS))


def test_an_engine_that_does_not_say_where_its_server_is_is_not_waited_for_for_ever() -> None:
    said = {"weighbridge": {"model": "acme/policy", "timeout_seconds": 0.2}}
    updater = TrainerActor("slime", arguments("slime", **said), []).weight_updater
    updater.connect_rollout_engines([SimpleNamespace(get_url=SimpleNamespace(remote=Future))], None)
    with pytest.raises(
        DeadlineExceeded,
        match=r"not all actors of 1 engines reported the addresses of their servers within 0\.2 s",
    ):
        updater._connected()


def test_the_pause_is_that_of_the_framework_unless_it_is_said() -> None:
    install("miles")
    settings = importlib.import_module("weighbridge.integrations.slime").SlimeSettings
    assert settings.of(arguments("slime", **SETTINGS)).pause_mode == "abort"
    assert settings.of(arguments("miles", **SETTINGS)).pause_mode == "retract"
    said = {"weighbridge": {"model": "a/b", "pause_mode": "in_place"}}
    assert settings.of(arguments("miles", **said)).pause_mode == "in_place"
    with pytest.raises(WeighbridgeError, match="no pause mode"):
        settings.of(arguments("slime", weighbridge={"model": "a/b", "pause_mode": "stop"}))
