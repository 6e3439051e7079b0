"""Are the chosen adapters loaded into an engine before a request names them, each on the base version that it names,
and left to the engine then?
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.end_to_end.test_adapters import BASE, Service, serving
from weighbridge import EngineClient, FailedPrecondition, InvalidArgument
from weighbridge._cli import commands
from weighbridge._core.resources import Model
from weighbridge.follow.adapters import Chosen, LoadedAdapter, LoadsAhead, due, named_by
from weighbridge.follow.engines import EngineFailed, Serving

ALICE, BOB = "acme/alice", "acme/bob"
SECONDS = 30.0


@dataclass
class Engine:
    """An engine that notes what it is asked to load.

    Attributes:
        served: number of the version of the base; None while it cannot be reached.
        brought: how many versions it has got.
        start: names its start.
        asked: names, in their order.
        looks: gets an entry with each look at what it serves, after the first one has found something to do.
        refused: names that it does not load.
        awake: whether it takes any.
    """

    served: int | None = 2
    brought: int = 1
    start: str = "first"
    asked: list[str] = field(default_factory=list)
    looks: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    refused: tuple[str, ...] = ()
    awake: bool = True

    def serving(self) -> Serving:
        self.looks.put(len(self.asked))
        if self.served is None:
            raise EngineFailed("nothing answers")
        return Serving(self.served, instances=(self.start,), brought=self.brought)

    def load_adapter(
        self, client: EngineClient, adapter: str, version: str | int | None = None, folder: Path | None = None
    ) -> LoadedAdapter:
        name = f"{adapter}@{version}"
        self.asked.append(name)
        if name in self.refused:
            raise FailedPrecondition(f"vLLM cannot serve {name}: it has DoRA")
        return LoadedAdapter(name, f"{BASE}@{self.served}", 1, "files")

    def takes_adapters(self) -> bool:
        return self.awake

    def wait_looked(self) -> None:
        """Return when a look that began after this call has ended."""
        while not self.looks.empty():
            self.looks.get()
        self.looks.get(timeout=SECONDS)
        self.looks.get(timeout=SECONDS)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("ahead")) as found:
        found.push(ALICE, f"{BASE}@2")
        found.push(BOB, f"{BASE}@3")
        found.push("other/carol", f"{BASE}@2")
        yield found


@pytest.fixture
def client(service: Service) -> Iterator[EngineClient]:
    with EngineClient(service.running.address) as client:
        yield client


def model(name: str, adapter: bool = True, **refs: int) -> Model:
    files = ("adapter_config.json",) if adapter else ("config.json",)
    return Model(name, "llama", "F32", 1, 1, files, refs)


def test_the_refs_of_the_chosen_adapters_are_due_when_they_move() -> None:
    models = [
        model("acme/a", latest=3, live=4),
        model("acme/b", latest=1),
        model("acme/whole", adapter=False, latest=1),
        model("other/c", latest=1),
    ]
    wanted = named_by([Chosen.read("acme/*"), Chosen.read("acme/*@live")], models)
    assert wanted == {("acme/a", "latest"): 3, ("acme/b", "latest"): 1, ("acme/a", "live"): 4}
    assert list(due(wanted, {})) == list(wanted.items())
    done = {**wanted, ("acme/a", "latest"): 2, ("acme/gone", "latest"): 1}
    assert list(due(wanted, done)) == [(("acme/a", "latest"), 3)]
    assert not list(due(wanted, wanted))


@pytest.mark.parametrize("text", ["", "@live", "acme/*@", "acme/alice@3"])
def test_a_choice_is_a_pattern_and_perhaps_a_ref(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"acme/\*@live"):
        Chosen.read(text)


def test_adapters_on_the_served_base_are_loaded_once_and_again_after_an_update_or_a_start(
    service: Service, client: EngineClient
) -> None:
    engine, said = Engine(), list[str]()
    with closing(LoadsAhead(client, BASE, engine, [Chosen("acme/*")], said.append, every=0.01)):
        engine.wait_looked()
        engine.wait_looked()
        assert engine.asked == [f"{ALICE}@1"]
        service.push(ALICE, f"{BASE}@2", step=2)
        engine.wait_looked()
        assert engine.asked == [f"{ALICE}@1", f"{ALICE}@2"]
        engine.served = 3
        engine.wait_looked()
        assert engine.asked[2:] == [f"{BOB}@1"]
        engine.served = None
        engine.wait_looked()
        engine.served = 3
        engine.wait_looked()
        assert engine.asked[3:] == [f"{BOB}@1"]
    assert said == [
        f"{ALICE}@1: loaded ahead, on {BASE}@2",
        f"{ALICE}@2: loaded ahead, on {BASE}@2",
        *[f"{BOB}@1: loaded ahead, on {BASE}@3"] * 2,
    ]


def test_what_an_engine_has_unloaded_between_two_looks_is_loaded_again(client: EngineClient) -> None:
    engine = Engine(3)
    with closing(LoadsAhead(client, BASE, engine, [Chosen(BOB)], lambda _: None, every=0.01)):
        engine.wait_looked()
        engine.brought += 2  # there and back, or slept and awake
        engine.wait_looked()
        assert engine.asked == [f"{BOB}@1"] * 2
        engine.start = "second"
        engine.wait_looked()
        assert engine.asked == [f"{BOB}@1"] * 3


def test_an_engine_that_sleeps_is_asked_for_nothing_until_it_is_awake(service: Service, client: EngineClient) -> None:
    engine = Engine(3, awake=False)
    with closing(LoadsAhead(client, BASE, engine, [Chosen(BOB)], lambda _: None, every=0.01)):
        engine.wait_looked()
        assert not engine.asked
        engine.awake = True
        engine.wait_looked()
        assert engine.asked == [f"{BOB}@1"]


def test_an_adapter_that_cannot_be_loaded_is_said_once_and_others_are_loaded(
    service: Service, client: EngineClient
) -> None:
    service.push("acme/aaa", f"{BASE}@2")
    engine, said = Engine(refused=("acme/aaa@1",)), list[str]()
    with closing(LoadsAhead(client, BASE, engine, [Chosen("acme/a*")], said.append, every=0.01)):
        engine.wait_looked()
        engine.wait_looked()
    assert engine.asked[0] == "acme/aaa@1"
    assert len(engine.asked) == 2
    assert said[0].startswith("acme/aaa@1: not loaded ahead: ")
    assert "DoRA" in said[0]


def test_an_sglang_is_given_no_adapters_ahead(service: Service) -> None:
    found = CliRunner().invoke(
        commands,
        ["follow", BASE, "--engine", "sglang", "--adapters", "acme/*", "--server", service.running.address],
    )
    assert found.exit_code == 2
    assert "--engine sglang does not support --adapters" in found.output
