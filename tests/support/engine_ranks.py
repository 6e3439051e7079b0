"""Ranks of the example engine: what each of them does with a real service, and what its parameters hold afterwards.

The functions run in processes that gloo joins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.support.example_engine import Llama, LlamaEngine, start
from weighbridge import EngineClient
from weighbridge._lazy.caching import CACHE_VARIABLE
from weighbridge._lazy.staging import StagingPlace
from weighbridge.errors import FailedPrecondition
from weighbridge.follow.engines import WAIT
from weighbridge.integrations.engine_rank.agreement import ProcessGroup, RanksFailed, from_first
from weighbridge.integrations.engine_rank.model import EngineAsleep
from weighbridge.integrations.engine_rank.rank import EngineRank
from weighbridge.integrations.engine_rank.source import ModelSource

Parameters = dict[str, torch.Tensor]


def run(number: int, cache: str, fn: Callable[..., Any], *args: Any) -> Any:
    """One of the functions below, with a folder for recordings that are kept for the next start."""
    os.environ[CACHE_VARIABLE] = cache
    return fn(number, *args)


def parameters(rank: EngineRank) -> Parameters:
    return {name: p.detach().clone() for name, p in rank.engine.model.named_parameters()}


def until_prepared(rank: EngineRank) -> list[Any]:
    """The statuses of a rank from now until nothing is being prepared."""
    seen = [rank.status()]
    while seen[-1].preparing:
        time.sleep(0.01)
        seen.append(rank.status())
    return seen


def refusal(do: Callable[[], object]) -> str:
    """The error that every rank raises."""
    try:
        do()
    except RanksFailed as error:
        return str(error)
    raise AssertionError("nothing was refused")


def go_to_versions(number: int, server: str, name: str, config: Any) -> dict[str, Any]:
    """Start at version 1, and go to 2, 1 and 2, the last time without having prepared it."""
    rank = start(config, server, name, 1)
    found: dict[str, Any] = {"parameters": [parameters(rank)], "kept": [], "statuses": []}
    assert rank.held is not None
    found["nbytes"] = rank.held.nbytes
    where = [p.data_ptr() for p in rank.engine.model.parameters()]
    for version in (2, 1):
        rank.prepare(version)
        found["statuses"].append(until_prepared(rank)[-1])
        found["kept"].append(parameters(rank))
        rank.apply(version)
        found["parameters"].append(parameters(rank))
    ranks = rank.engine.ranks
    rank.apply(from_first(ranks, lambda: rank.client().version(name, "latest").number))
    found["parameters"].append(parameters(rank))
    found["status"] = rank.status()
    found["in place"] = where == [p.data_ptr() for p in rank.engine.model.parameters()]
    rank.prepare(1)
    rank.discard()
    found["discarded"] = rank.status()
    rank.close()
    return found


def go_by_a_staging_place(number: int, server: str, name: str, config: Any) -> dict[str, Any]:
    """Start at version 1, and go to 2 and 1 by way of a staging place; 2 was discarded on its way there once, while 1
    came.
    """
    rank = start(config, server, name, 1)
    nbytes = sum(-(-p.nbytes // 512) * 512 for p in rank.engine.model.parameters())
    rank.engine.place = StagingPlace(torch.full([nbytes], 0xAB, dtype=torch.uint8))
    found: dict[str, Any] = {"parameters": [parameters(rank)], "kept": []}
    for version, other in ((2, 1), (1, 2)):
        for _ in range(5):
            rank.prepare(other)
            rank.discard()
        rank.prepare(version)
        until_prepared(rank)
        found["kept"].append(parameters(rank))
        rank.apply(version)
        found["parameters"].append(parameters(rank))
    rank.close()
    return found


def update_an_engine_of_files(number: int, server: str, name: str, config: Any, empty: str) -> dict[str, Any]:
    """Go to version 2 with a model that was not loaded from the service; before that, connect to one that has no
    version.
    """
    ranks = ProcessGroup()
    model = Llama(config, ranks.rank, ranks.size)
    for p in model.parameters():
        p.data.fill_(7)
    rank = EngineRank(LlamaEngine(model))
    unknown = refusal(lambda: rank.apply(2))
    rank.connect(ModelSource(empty, server))
    absent = refusal(lambda: rank.prepare_all(1))
    rank.prepare_all(2, ModelSource(name, server))
    rank.apply(2)
    said = {"unknown": unknown, "absent": absent}
    return {**said, "parameters": parameters(rank), "status": rank.status()}


def lose_the_service(number: int, server: str, name: str, config: Any) -> dict[str, Any]:
    """Go to version 2 while one rank cannot reach the service; then to a version that there is not; then, with all
    ranks, to version 2.
    """
    rank = start(config, server, name, 1)
    assert rank.source is not None
    good = rank.client()
    if number == 1:
        rank.clients[rank.source] = EngineClient("127.0.0.1:9", retry_seconds=0.2)
    found: dict[str, Any] = {"said": [refusal(lambda: rank.apply(2))]}
    rank.clients[rank.source] = good
    found["said"].append(refusal(lambda: rank.apply(1000)))
    found["kept"], found["status"] = parameters(rank), rank.status()
    rank.apply(2)
    found["parameters"] = parameters(rank)
    return found


def fail_while_filling(number: int, server: str, name: str, config: Any) -> dict[str, Any]:
    """Go to version 2 while a rank fails in the middle of its parameters: once, and then on the way back, too; then to
    version 2.
    """
    rank = start(config, server, name, 1)
    fill, failures = rank.engine.fill, []

    def failing(*args: Any) -> None:
        fill(*args)
        if failures:
            failures.pop()
            raise RuntimeError("made up")

    rank.engine.fill = failing  # type: ignore[method-assign]
    found: dict[str, Any] = {"said": [], "kept": [], "statuses": []}
    for times in (1, 2):
        failures[:] = [None] * times if number == rank.engine.ranks.size - 1 else []
        found["said"].append(refusal(lambda: rank.apply(2)))
        found["kept"].append(parameters(rank))
        found["statuses"].append(rank.status())
    rank.apply(2)
    found["parameters"], found["status"] = parameters(rank), rank.status()
    return found


def take_a_version_back(number: int, server: str, name: str, config: Any) -> dict[str, Any]:
    """Stage version 2, go to it and back; then to a version that the engine does not have; then to 2 while a rank
    cannot get version 1 any more.
    """
    rank = start(config, server, name, 1)
    assert rank.source is not None
    rank.stage(2)
    found: dict[str, Any] = {"staged": rank.status()}
    rank.apply(2)
    rank.undo(2)
    rank.undo(2)
    found |= {"back": parameters(rank), "status": rank.status()}
    rank.apply(2)
    good = rank.client()
    if number == 1:
        rank.clients[rank.source] = EngineClient("127.0.0.1:9", retry_seconds=0.2)
    found["said"] = refusal(lambda: rank.undo(2))
    rank.clients[rank.source] = good
    return {**found, "kept": parameters(rank)}


def sleep_and_wake(number: int, server: str, name: str, config: Any, level: int) -> dict[str, Any]:
    """Take version 2 while the parameters have no memory: refused, and then waiting for the wake-up; and a wake-up that
    finds the service away.
    """
    rank = start(config, server, name, 1)
    awake: list[bool] = []

    def check_awake() -> None:
        if not awake and number == rank.engine.ranks.size - 1:
            raise EngineAsleep("the engine sleeps: made up")

    def wake(*lasts: bool) -> str:
        awake[:] = [True]
        if level == 2:
            for parameter in rank.engine.model.parameters():
                parameter.data.fill_(torch.nan)
        said = ""
        for at, last in enumerate(lasts):
            try:
                rank.wake(lost=level == 2 and not at, last=last)
            except RanksFailed as error:
                said = str(error)
        return said

    def see() -> tuple[Parameters, Any, bool]:
        return parameters(rank), rank.status(), rank.owes_a_version

    rank.engine.check_awake = check_awake  # type: ignore[method-assign]
    found: dict[str, Any] = {"refused": refusal(lambda: rank.apply(2)), "before": rank.status()}
    found["woken"] = wake(False, True), *see()
    fill, failures = rank.engine.fill, [None] if number == 0 else []

    def failing(*args: Any) -> None:
        fill(*args)
        if failures:
            failures.pop()
            raise RuntimeError("made up")

    rank.engine.fill = failing  # type: ignore[method-assign]
    found["failed"] = refusal(lambda: rank.apply(2)), *see()
    rank.when_asleep = WAIT

    awake.clear()
    found["same"] = wake(False, True), *see()

    awake.clear()
    rank.apply(2)
    found["waits"] = rank.status()
    rank.undo(2)
    found["undone"] = rank.status()
    rank.apply(2)
    rank.prepare(1)  # something else comes meanwhile
    found["first"] = wake(False), *see()
    found["last"] = wake(True) if level == 1 else "", *see()

    awake.clear()
    rank.apply(1)
    rank.discard()
    good, source = rank.client(), rank.source
    assert source is not None
    if number == 0:
        rank.clients[source] = EngineClient("127.0.0.1:9", retry_seconds=0.2)
    found["away"] = wake(False, True), *see()
    rank.clients[source] = good
    try:
        rank.wake(lost=False, last=True)
    finally:
        found["back"] = "", *see()
    return found


def take_what_does_not_fit(number: int, server: str, name: str, config: Any, others: list[str]) -> Any:
    """Go to versions of other models."""
    rank = start(config, server, name, 1)
    said = []
    for other in others:
        source = ModelSource(other, server)
        said.append((refusal(lambda: rank.prepare_all(1, source)), refusal(lambda: rank.apply(1, source))))  # noqa: B023
    rank.apply(2)
    return {"said": said, "parameters": parameters(rank)}


def take_another_dtype(number: int, server: str, name: str, config: Any, other: str) -> dict[str, Any]:
    """Go to a version whose tensors have another dtype, at another service, where the model has the same name; and
    back.
    """
    rank = start(config, server, name, 1)
    home = rank.source
    rank.apply(1, ModelSource(name, other))
    found = {"other": parameters(rank)}
    rank.apply(2, home)
    return {**found, "parameters": parameters(rank)}


def change_the_configuration(number: int, server: str, name: str, config: Any) -> dict[str, Any]:
    """Apply a version after the loader has come to choose otherwise than when it was prepared: ranks have exchanged
    what they hold.
    """
    rank = start(config, server, name, 1)
    rank.prepare(2)
    until_prepared(rank)
    model, ranks = rank.engine.model, rank.engine.ranks
    model.tp_rank = ranks.size - 1 - model.tp_rank
    rank.engine.configuration = lambda: f"exchanged, rank {model.tp_rank}"  # type: ignore[method-assign]
    rank.apply(2)
    return {"parameters": parameters(rank)}


def prepare_two(number: int, server: str, name: str, config: Any) -> dict[str, Any]:
    """Ask for a version while another one is on its way."""
    rank = start(config, server, name, 1)
    bring_rest, going = rank.engine.bring_rest, []

    def slow(*args: Any) -> Any:
        while not going:
            time.sleep(0.01)
        return bring_rest(*args)

    rank.engine.bring_rest = slow  # type: ignore[method-assign]
    if number == 0:  # the other one has it already
        rank.prepare(2)
    said = [refusal(lambda: rank.prepare_all(1))]
    found = {"first": rank.status()}
    going.append(True)
    rank.apply(2)
    return {**found, "said": said, "parameters": parameters(rank)}


def move_a_parameter(number: int, server: str, name: str, config: Any) -> dict[str, Any]:
    """Apply a version after a parameter was cast on one rank."""
    rank = start(config, server, name, 1)
    if number == 1:
        rank.engine.model.to(torch.float64)
    said = refusal(lambda: rank.apply(2))
    rank.engine.model.to(torch.float32)
    return {"said": said, "parameters": parameters(rank)}


def cannot_start(number: int, server: str, name: str, config: Any) -> str:
    """The error with which a model of another configuration refuses to start."""
    try:
        start(config, server, name, 1)
    except FailedPrecondition as error:
        return str(error)
    return ""


def ask_for_different_versions(number: int, server: str, name: str, config: Any) -> dict[str, Any]:
    """Apply version 2 on one rank and version 1 on the other."""
    rank = start(config, server, name, 1)
    said = refusal(lambda: rank.apply(2 - number))
    return {"said": said, "status": rank.status(), "parameters": parameters(rank)}
