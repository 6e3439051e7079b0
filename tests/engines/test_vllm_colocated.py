"""Do a trainer and an engine on one card take turns with its memory, and does the engine have what was trained, or what
it had?

Service, trainer's client, the engine's rank and the plug-in's watch over its core are real; vLLM's core and the card
are made up.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.support.example_engine import Llama, LlamaEngine
from tests.support.json_servers import json_server
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.vllm_cores import watched
from weighbridge import PushHandle, TrainerClient
from weighbridge.errors import FailedPrecondition, InvalidArgument, WeighbridgeError
from weighbridge.integrations.engine_rank.agreement import OneRank, RanksFailed
from weighbridge.integrations.engine_rank.model import EngineAsleep
from weighbridge.integrations.engine_rank.rank import EngineRank
from weighbridge.integrations.engine_rank.source import ModelSource
from weighbridge.integrations.vllm.colocated import ColocatedEngine, ColocatedUpdate, Peak, move

MODEL = "tests/colocated"
CONFIG = tiny_config("llama", tied=False, head_dim=8)
WEIGHTS, CACHE, TRAINER = 100, 500, 300
"""Bytes of the made-up card."""


class Alone(LlamaEngine):
    """An engine of one process."""

    ranks = OneRank()

    def configuration(self) -> str:
        return "alone"


class Llm:
    """A `vllm.LLM` whose one worker has a real rank."""

    def __init__(self, source: ModelSource) -> None:
        self.rank = EngineRank(Alone(Llama(CONFIG, 0, 1)))
        found, recording = self.rank.load(source, 1)
        assert recording is not None
        self.rank.engine.load(found.tensors(recording.unrecorded))
        self.core = watched(self._bring)
        self.label = ""

    @property
    def used(self) -> int:
        asleep = self.core.model_executor.sleeping_tags
        return WEIGHTS * ("weights" not in asleep) + CACHE * ("kv_cache" not in asleep)

    def sleep(self, level: int) -> None:
        def check_awake() -> None:
            raise EngineAsleep("the engine sleeps: made up")

        self.core.sleep(level)
        self.rank.engine.check_awake = check_awake  # type: ignore[method-assign]
        if level == 2:
            for parameter in self.rank.engine.model.parameters():
                parameter.data.fill_(torch.nan)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            vars(self.rank.engine).pop("check_awake", None)
        self.core.wake_up(tags)

    def update_weight_version(self, label: str) -> None:
        self.label = label

    def collective_rpc(self, method: str, args: Sequence[str] = ()) -> list[dict[str, Any]]:
        def connect(info: str) -> None:
            self.rank.when_asleep = json.loads(info)["when_asleep"]
            self.rank.connect()

        steps: dict[str, Callable[..., Any]] = {
            "weighbridge_connect": connect,
            "weighbridge_prepare": lambda number, _draft="": self.rank.prepare(int(number)),
            "weighbridge_apply": lambda number, _draft="": self.rank.apply(int(number)),
            "weighbridge_discard": self.rank.discard,
            "weighbridge_status": lambda: None,
        }
        failed = ""
        try:
            steps[method](*args)
        except WeighbridgeError as error:
            failed = str(error)
        return [{**self.rank.status().to_json(), "rank": 0, "failed": failed}]

    def _bring(self, _core: object, lost: bool, last: bool) -> dict[str, Any]:
        had, failed = self.rank.held, ""
        try:
            self.rank.wake(lost=lost, last=last)
        except WeighbridgeError as error:
            failed = str(error)
        served, changed = self.rank.status().served, self.rank.held is not had
        return {"served": served, "changed": changed, "owes": self.rank.owes_a_version, "failed": failed}


@dataclass
class Turns:
    """A trainer and an engine on one card."""

    service: RunningService
    trainer: TrainerClient
    llm: Llm
    level: int
    module: torch.nn.Module = field(default_factory=lambda: tiny_model(CONFIG, 1))
    trains: bool = True
    step: int = 1

    @property
    def colocated(self) -> ColocatedEngine:
        return ColocatedEngine(self.llm, MODEL, self.service.address, level=self.level, memory=lambda: self.used)

    @property
    def used(self) -> int:
        return TRAINER * self.trains + self.llm.used

    def push(self) -> PushHandle:
        assert self.trains
        return self.trainer.push_state_dict(MODEL, self.module, step=self.step)

    def offload(self) -> None:
        self.trains = False

    def train(self, seed: int) -> None:
        """Let the engine sleep, and take a step."""
        self.colocated.sleep()
        assert self.llm.used == 0
        self.trains, self.step = True, self.step + 1
        self.module = tiny_model(CONFIG, seed)

    def update(self) -> ColocatedUpdate:
        return self.colocated.update(self.push, self.offload)

    def check_engine_has(self, seed: int) -> None:
        """Whether the engine may compute, with the weights of a seed."""
        assert self.llm.core.running
        expected = Llama(CONFIG, 0, 1)
        expected.load_weights(tiny_model(CONFIG, seed).state_dict().items())
        for (name, mine), theirs in zip(
            self.llm.rank.engine.model.named_parameters(), expected.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs), name


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(params=[1, 2])
def turns(
    service: RunningService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Turns]:
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path))
    with TrainerClient(service.address, run=str(tmp_path)) as trainer:
        tiny_model(CONFIG, 1).save_pretrained(tmp_path / "model")
        trainer.register_model(MODEL, tmp_path / "model")
        trainer.push_state_dict(MODEL, tiny_model(CONFIG, 1), step=1).wait(timeout=60)
        newest = trainer.version(MODEL).number
        source = ModelSource(MODEL, service.address)
        llm = Llm(source)
        llm.rank.apply(newest)
        yield Turns(service, trainer, llm, request.param)
        llm.rank.close()


def test_a_step_brings_what_was_trained_and_the_card_never_holds_both(turns: Turns) -> None:
    for seed in (2, 3):
        turns.train(seed)
        done = turns.update()
        turns.check_engine_has(seed)
        assert turns.llm.label == f"{MODEL}@{done.version}"
        assert turns.llm.rank.status().served == turns.llm.label
        peaks = {name: part.peak_bytes for name, part in done.parts.items()}
        assert peaks == {
            "push": TRAINER,
            "offload": TRAINER,
            "wake_weights": WEIGHTS,
            "update": WEIGHTS,
            "wake_cache": WEIGHTS + CACHE,
        }
        assert done.peak_bytes == WEIGHTS + CACHE
        assert done.seconds == sum(part.seconds for part in done.parts.values()) > 0


def test_a_push_or_an_offload_that_fails_leaves_the_engine_asleep_and_the_next_step_works(
    turns: Turns,
) -> None:
    def fail() -> Any:
        raise MemoryError("made up")

    turns.train(2)
    for push, offload in ((fail, turns.offload), (turns.push, fail)):
        with pytest.raises(MemoryError, match="made up"):
            turns.colocated.update(push, offload)
        assert (turns.llm.used, turns.trains) == (0, True)
        assert turns.llm.rank.status().prepared == turns.llm.rank.status().preparing == ""
        turns.step += 1
    turns.update()
    turns.check_engine_has(2)


def test_an_update_that_fails_gives_the_card_back_and_the_engine_wakes_up_with_what_it_had(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, fill, left = turns.llm.rank.engine, turns.llm.rank.engine.fill, [1]

    def failing(*args: Any) -> None:
        fill(*args)
        if left:
            left.pop()
            raise RuntimeError("made up")

    turns.train(2)
    monkeypatch.setattr(engine, "fill", failing)
    had = turns.llm.rank.status().served.rpartition("@")[2]
    with pytest.raises(FailedPrecondition, match="made up") as raised:
        turns.update()
    assert raised.value.message.endswith(f"the engine was put to sleep again, with version {had}")
    assert turns.used == 0
    turns.llm.wake_up()
    turns.check_engine_has(1)
    turns.train(3)
    turns.update()
    turns.check_engine_has(3)


def test_an_engine_that_can_have_no_version_sleeps_and_does_not_wake_up_until_it_can(turns: Turns) -> None:
    def failing(*_args: Any) -> None:
        raise RuntimeError("made up")

    turns.train(2)
    turns.llm.rank.engine.fill = failing  # type: ignore[method-assign]
    with pytest.raises(FailedPrecondition, match="put to sleep again, with no version"):
        turns.update()
    assert turns.used == 0
    with pytest.raises(FailedPrecondition, match="serves no version, and is paused"):
        turns.llm.wake_up()
    assert not turns.llm.core.running
    del turns.llm.rank.engine.fill
    turns.train(3)
    turns.update()
    turns.check_engine_has(3)


def test_an_interrupt_stays_one_and_gives_the_card_back(turns: Turns) -> None:
    def interrupted(_label: str) -> None:
        raise KeyboardInterrupt

    turns.train(2)
    turns.llm.update_weight_version = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt) as raised:
        turns.update()
    assert "put to sleep again" in raised.value.__notes__[0]
    assert turns.used == 0


class Threads:
    """Ranks of a trainer that are threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, said: dict[int, Any]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._said = barrier, said

    def all_gather_object(self, mine: Any) -> list[Any]:
        self._said[self.rank] = mine
        self._barrier.wait(60)
        found = [self._said[rank] for rank in range(self.size)]
        self._barrier.wait(60)
        return found


def test_no_rank_wakes_the_engine_before_all_are_off_the_card(turns: Turns) -> None:
    turns.train(2)
    barrier, said, on_card = threading.Barrier(2), dict[int, Any](), {0, 1}
    woken: list[int] = []
    wake_up = turns.llm.wake_up
    turns.llm.wake_up = lambda tags=None: (woken.append(len(on_card)), wake_up(tags))[1]  # type: ignore[method-assign,misc]
    handle = turns.push()

    def run(rank: int, *, fails: bool) -> ColocatedUpdate:
        engine = ColocatedEngine(
            turns.llm if rank == 0 else None,
            MODEL,
            turns.service.address,
            ranks=Threads(rank, 2, barrier, said),
            memory=lambda: 0,
        )

        def offload() -> None:
            if fails and rank == 1:
                raise MemoryError("made up")
            on_card.discard(rank)

        return engine.update(lambda: handle, offload)

    with ThreadPoolExecutor(2) as pool:
        failed = list(pool.map(lambda rank: _error_of(partial(run, rank, fails=True)), (0, 1)))
        assert isinstance(failed[0], RanksFailed)
        assert "rank 1: MemoryError: made up" in str(failed[0])
        assert isinstance(failed[1], WeighbridgeError | MemoryError)
        assert woken == []
        done = list(pool.map(partial(run, fails=False), (0, 1)))
    assert done[0].version == done[1].version
    assert woken == [0, 0]
    turns.check_engine_has(2)


class Other:
    """The `vllm.LLM` of another rank, which cannot do one thing."""

    def __init__(self, cannot: str) -> None:
        self._cannot = cannot

    def collective_rpc(self, method: str, args: Sequence[str] = ()) -> list[dict[str, Any]]:
        del args
        return [{"failed": "made up" if method == self._cannot else ""}]

    def wake_up(self, tags: list[str]) -> None:
        if self._cannot == "wake_up":
            raise MemoryError("made up")
        del tags


@pytest.mark.parametrize("cannot", ["weighbridge_prepare", "wake_up"])
def test_an_engine_sleeps_on_without_what_was_begun_if_another_ranks_engine_fails_before_it_is_awake(
    turns: Turns, cannot: str
) -> None:
    turns.train(2)
    barrier, said, handle = threading.Barrier(2), dict[int, Any](), turns.push()

    def run(rank: int) -> ColocatedUpdate:
        ranks = Threads(rank, 2, barrier, said)
        llm: Any = (turns.llm, Other(cannot))[rank]
        engine = ColocatedEngine(llm, MODEL, turns.service.address, level=turns.level, ranks=ranks, memory=lambda: 0)
        return engine.update(lambda: handle, turns.offload)

    with ThreadPoolExecutor(2) as pool:
        failed = list(pool.map(lambda rank: _error_of(partial(run, rank)), (0, 1)))
    assert isinstance(failed[0], RanksFailed)
    assert "made up" in str(failed[1])
    assert turns.llm.used == 0
    status = turns.llm.rank.status()
    assert (status.prepared, status.preparing) == ("", "")
    turns.train(3)
    turns.update()
    turns.check_engine_has(3)


def _error_of(do: Callable[[], object]) -> Exception:
    try:
        do()
    except Exception as error:
        return error
    raise AssertionError("nothing failed")


class Ready:
    """Handle of a push that is version 7."""

    def wait(self, _until: object) -> SimpleNamespace:
        return SimpleNamespace(number=7)


def test_a_server_is_asked_the_same_over_http() -> None:
    asked: list[str] = []

    def answer(path: str, body: Any) -> tuple[int, Any]:
        asked.append(f"{path} {body['method']}" if "method" in (body or {}) else path)
        if path == "/get_world_size":
            return 200, {"world_size": 1}
        if "wake_up" in path or "sleep" in path:
            return 200, {}
        served = f"{MODEL}@7" if body and body.get("method") == "weighbridge_apply" else ""
        return 200, {"results": [{"served": served, "failed": ""}]} if body else {}

    with json_server(answer) as url:
        engine = ColocatedEngine(url, MODEL, "service:1")
        done = engine.update(lambda: cast("Any", Ready()), lambda: None)
        engine.sleep()
    assert (done.version, done.peak_bytes) == (7, 0)
    assert [each for each in asked if each != "/get_world_size"] == [
        "/collective_rpc weighbridge_connect",
        "/collective_rpc weighbridge_prepare",
        "/wake_up?tags=weights",
        "/collective_rpc weighbridge_apply",
        "/update_weight_version",
        "/wake_up?tags=kv_cache",
        "/sleep?level=2",
    ]


def test_a_level_of_sleep_that_keeps_the_card_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="level is 0"):
        ColocatedEngine(None, MODEL, "service:1", level=0)


def test_a_module_and_what_its_optimizer_keeps_move_and_go_on_as_if_they_had_not() -> None:
    torch.manual_seed(0)
    stays, moves = (torch.nn.Linear(3, 2) for _ in range(2))
    moves.load_state_dict(stays.state_dict())
    optimizers = [torch.optim.AdamW(module.parameters()) for module in (stays, moves)]
    own = list(moves.parameters())
    for at in range(2):
        for module, optimizer in zip((stays, moves), optimizers, strict=True):
            optimizer.zero_grad()
            module(torch.ones(3)).sum().backward()
            optimizer.step()
        if at == 0:
            move(moves, "cpu", optimizers[1])
    assert all(mine is theirs for mine, theirs in zip(moves.parameters(), own, strict=True))
    for mine, theirs in zip(moves.parameters(), stays.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    move(moves, "meta", optimizers[1])
    kept = [value for state in optimizers[1].state.values() for value in state.values() if value.dim()]
    assert len(kept) == 4
    assert all(each.is_meta for each in (*moves.parameters(), *kept))


def test_memory_is_that_of_the_card_of_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    def mem_get_info(card: int | None) -> tuple[int, int]:
        seen.append(card)
        return 3, 10

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)

    done = ColocatedEngine(None, MODEL, "service:1").update(lambda: cast("Any", Ready()), lambda: None)
    assert {part.peak_bytes for part in done.parts.values()} == {7}
    assert set(seen) == {5}


def test_the_most_memory_is_seen_between_the_beginning_and_the_end() -> None:
    amounts, seen = [3, 9, 4], threading.Event()

    def memory() -> int:
        if len(amounts) == 1:
            seen.set()
            return amounts[0]
        return amounts.pop(0)

    with Peak(memory) as peak:
        assert seen.wait(60)
    assert peak.nbytes == 9
