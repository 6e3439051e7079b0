"""Does an API server of vLLM hand its engines the right version of an adapter, and refuse one that they cannot serve
before it is loaded?

Without vLLM: its engines are fakes behind the real guard, and its table of models is a dict. `test_vllm_adapters.py`
has vLLM itself.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.support.json_servers import json_server
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import (
    EngineClient,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    TrainerClient,
    Unavailable,
    WeighbridgeError,
)
from weighbridge._cli import commands
from weighbridge._core.resources import Version, VersionState
from weighbridge.follow.engines import EngineFailed
from weighbridge.follow.vllm import VllmServer
from weighbridge.follow.vllm_adapters import ROUTE
from weighbridge.integrations.vllm.wrapped import check_wrapped, name_before, unwrapped
from weighbridge.integrations.vllm_adapters import admission as admissions
from weighbridge.integrations.vllm_adapters.admission import Admission, Unknown
from weighbridge.integrations.vllm_adapters.guard import LOAD, NAMES, STATE, UNLOAD, AdaptersGuard
from weighbridge.integrations.vllm_adapters.middleware import Adapters
from weighbridge.integrations.vllm_adapters.names import (
    AdapterVersion,
    Order,
    asked,
    key_in,
    numbers,
)
from weighbridge.integrations.vllm_adapters.serving import (
    BaseNow,
    EngineState,
    base_problem,
    config_problems,
    tensor_problems,
    together,
)
from weighbridge.integrations.vllm_adapters.settings import VARIABLE, AdapterSettings
from weighbridge.integrations.vllm_adapters.store import Store

peft = pytest.importorskip("peft")
KNOWN = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
ENGINE = EngineState("acme/smol@1", 0, "", ("down_proj", "q_proj"), 16, KNOWN)
PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
CONFIG = tiny_config("llama", tied=False, num_hidden_layers=1)


@dataclass
class Engine:
    """An engine with the real adapter guard in its core, and workers that load the adapters they receive.

    Attributes:
        state: the state that its workers report.
        loaded: names, each with its tensors and number, in the order of loading.
        reads: names, each time that the workers have read its files.
        memory: numbers that the workers have now.
    """

    state: EngineState = ENGINE
    loaded: dict[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    broken: str = ""
    reads: list[str] = field(default_factory=list)
    memory: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.guard = AdaptersGuard(self, lambda: asdict(self.state), self.take)  # type: ignore[arg-type]
        self.model_executor = SimpleNamespace(collective_rpc=lambda what, args=(): [what(*args)], is_sleeping=False)
        self.scheduler = SimpleNamespace(requests={})
        self.refused: list[str] = []

    def take(self, order: Mapping[str, Any]) -> str:
        known = Order(**order)
        if not self.broken and known.number not in self.memory:
            self.memory.add(known.number)
            self.reads.append(known.name)
            self.loaded[known.name] = (
                known.number,
                load_file(Path(known.path) / "adapter_model.safetensors"),
            )
        return self.broken

    def list_loras(self) -> set[int]:
        return set(self.memory)

    def remove_lora(self, number: int) -> bool:
        return bool(self.memory.discard(number) is None)

    def become(self, **state: Any) -> None:
        self.state = replace(self.state, **state)
        self.guard.parameters_changed()

    def _send_error_outputs_to_client(self, ids: list[str], client: int) -> None:
        self.refused += ids


@dataclass
class Server:
    """The parts of a vLLM API server that are used, with two engines."""

    engines: list[Engine]
    models: Any = field(
        default_factory=lambda: SimpleNamespace(lora_requests={}, is_base_model=lambda name: name == "acme/smol")
    )
    vllm_config: Any = field(
        default_factory=lambda: SimpleNamespace(
            lora_config=object(),
            load_config=SimpleNamespace(load_format="auto", model_loader_extra_config=None),
        )
    )

    @property
    def engine_core(self) -> Server:
        return self

    @property
    def core_engines(self) -> list[int]:
        return list(range(len(self.engines)))

    async def _call_utility_async(self, method: str, *args: Any, engine: int) -> Any:
        guard = self.engines[engine].guard
        calls = {LOAD: guard.load, STATE: guard.answer_state, NAMES: guard.answer_names, UNLOAD: guard.unload}
        return json.loads(json.dumps(calls[method](*args)))


@dataclass
class Place:
    """A service with one base, and the way to admit requests of a server to its adapters."""

    running: RunningService
    trainer: TrainerClient

    def push(self, model: str, seed: int = 1, **options: Any) -> str:
        given = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **options}

        torch.manual_seed(seed)
        adapter = peft.get_peft_model(tiny_model(CONFIG, seed=1), peft.LoraConfig(**given))
        pushed = self.trainer.push_adapter(model, adapter, base="acme/smol@1", step=seed).wait(timeout=60)
        return f"{model}@{pushed.number}"

    def admission(self, server: Server, **settings: Any) -> Admission:
        said = {"server": self.running.address, "lane": "grpc", "retry_seconds": 0.2, **settings}
        return Admission(AdapterSettings(("acme/*",), **said), server, server.models, lambda order: order)


async def admitted(admission: Admission, name: str) -> str:
    named = admission.names_adapter(name)
    assert named is not None
    async with admission.serving(named) as loaded:
        return loaded.version.name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("served-adapters")
    tiny_model(CONFIG, seed=1).save_pretrained(folder / "base")
    with running_service(folder / "store") as running, TrainerClient(running.address) as trainer:
        trainer.import_folder("acme/smol", folder / "base", step=0).wait("durable", timeout=60)
        yield Place(running, trainer)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))


def test_all_engines_load_the_version_that_a_ref_names_when_a_request_is_admitted(place: Place, tmp_path: Path) -> None:
    first, server = place.push("acme/moves", 1), Server([Engine(), Engine()])

    async def run() -> None:
        admission = place.admission(server)
        assert await admitted(admission, "acme/moves") == first
        second = await asyncio.to_thread(place.push, "acme/moves", 2)
        assert await admitted(admission, "acme/moves") == second
        assert await admitted(admission, "acme/moves@latest") == second
        assert await admitted(admission, "acme/moves@001") == first
        assert list(server.models.lora_requests) == [first, second]
        assert all(key_in(each.path) and each.base == "acme/smol@1" for each in server.models.lora_requests.values())

    asyncio.run(run())
    for name in (first, second := first.replace("@1", "@2")):
        with EngineClient(place.running.address) as client:
            client.export(name, None, tmp_path / name.replace("/", "-"))
        wanted = load_file(tmp_path / name.replace("/", "-") / "adapter_model.safetensors")
        for engine in server.engines:
            number, tensors = engine.loaded[name]
            assert tensors.keys() == wanted.keys()
            assert all(tensors[each].equal(wanted[each]) for each in wanted)
            assert number == next(numbers(name))
    assert second in server.models.lora_requests


def test_after_an_order_to_one_api_server_another_fetches_and_loads_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, engines = place.push("acme/ahead"), [Engine(), Engine()]
    exports: list[str] = []
    export = EngineClient.export

    def counted(self: EngineClient, model: str, *more: Any, **named: Any) -> Any:
        exports.append(model)
        return export(self, model, *more, **named)

    monkeypatch.setattr(EngineClient, "export", counted)

    async def run() -> None:
        one, other = (place.admission(Server(engines)) for _ in range(2))
        named = one.names_adapter("acme/ahead@latest")
        assert named is not None
        found, had = await one.load_ahead(named)
        assert (found.version.name, had) == (name, False)
        assert await other.in_memory() == {name}
        assert await admitted(other, "acme/ahead") == name
        assert (await other.load_ahead(named))[1]

    asyncio.run(run())
    assert exports == ["acme/ahead"]
    assert [each.reads for each in engines] == [[name], [name]]


def test_an_order_loads_again_what_engines_have_let_go_and_an_unloaded_version_is_served_again(
    place: Place,
) -> None:
    name, engines = place.push("acme/again"), [Engine(), Engine()]
    server = Server(engines)

    async def run() -> None:
        admission = place.admission(server)
        named = admission.names_adapter(name)
        assert named is not None
        await admission.load_ahead(named)
        engines[1].memory.clear()  # vLLM keeps --max-cpu-loras
        assert not await admission.in_memory()
        assert not (await admission.load_ahead(named))[1]
        assert await admission.in_memory() == {name}
        async with admission.serving(named):
            assert await admission.unload(named) == (name, True)
            assert name in server.models.lora_requests, "vLLM answers by it"
        assert await admission.unload(named) == (name, False)
        assert not server.models.lora_requests
        assert await admitted(admission, name) == name

    asyncio.run(run())
    assert [each.reads for each in engines] == [[name] * 2, [name] * 3]


def test_an_engine_that_sleeps_loads_nothing(place: Place) -> None:
    name, engine = place.push("acme/asleep"), Engine()
    admission = place.admission(Server([engine]))
    engine.model_executor.is_sleeping = True
    with pytest.raises(FailedPrecondition, match=f"sleeps, and cannot load {name}"):
        asyncio.run(admitted(admission, name))
    assert not engine.reads
    engine.model_executor.is_sleeping = False
    assert asyncio.run(admitted(admission, name)) == name


def test_an_adapter_is_refused_if_its_digest_of_the_base_is_not_that_of_the_version_that_is_called_so(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, engine = place.push("acme/digested"), Engine()
    with EngineClient(place.running.address) as client:
        version = client.version(name)
    other = replace(version, metadata={**version.metadata, "weighbridge.base_digest": "ab" * 32})
    monkeypatch.setattr(admissions, "AdapterVersion", SimpleNamespace(of=lambda _: AdapterVersion.of(other)))
    with pytest.raises(FailedPrecondition, match=f"with the digest {'ab' * 6}, .* serves a different acme/smol@1"):
        asyncio.run(admitted(place.admission(Server([engine])), name))
    assert not engine.reads
    monkeypatch.setattr(admissions, "AdapterVersion", AdapterVersion)
    assert asyncio.run(admitted(place.admission(Server([engine])), name)) == name


def test_two_api_servers_give_a_name_the_same_number_though_another_has_its_first_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        admissions,
        "numbers",
        lambda name: iter((7, 7 + len(name))),  # all servers share the first
    )
    short, long = place.push("acme/b"), place.push("acme/bb")
    engines = [Engine(), Engine()]

    async def run() -> None:
        one, other = (place.admission(Server(engines)) for _ in range(2))
        # both names at once, each at another server
        await asyncio.gather(admitted(one, short), admitted(other, long))
        await asyncio.gather(admitted(one, long), admitted(other, short))

    asyncio.run(run())
    found = [{name: number for name, (number, _) in engine.loaded.items()} for engine in engines]
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 2


def test_an_adapter_of_another_base_is_refused_by_both_names_and_served_when_the_engine_has_its_base(
    place: Place,
) -> None:
    name, engine = place.push("acme/based"), Engine()

    async def run() -> None:
        admission = place.admission(Server([engine]))
        assert await admitted(admission, name) == name
        engine.become(base="acme/smol@2")
        # the server does not know yet; the core does
        request = SimpleNamespace(lora_name=name, base_model_name="acme/smol@1")
        assert "acme/smol@2" in engine.guard.problem(request)
        await admission.engine_state()
        with pytest.raises(FailedPrecondition, match=r"is on acme/smol@1, and this engine serves acme/smol@2"):
            await admitted(admission, name)
        engine.become(base="acme/smol@1")
        assert await admitted(admission, name) == name

    asyncio.run(run())


def test_a_request_that_waits_is_refused_when_the_base_changes_under_it_and_others_stay() -> None:
    engine = Engine()
    path = "/caches/vllm-adapters/0123"

    def request(name: str, base: str | None, path: str) -> Any:
        lora = SimpleNamespace(lora_name=name, base_model_name=base, lora_path=path)
        return SimpleNamespace(request_id=name, client_index=0, lora_request=lora, is_finished=lambda: False)

    mine, next_one, theirs = (
        request("acme/a@1", "acme/smol@1", path),
        request("acme/a@2", "acme/smol@2", path),
        request("own", None, "/models/own"),
    )
    plain = SimpleNamespace(request_id="plain", client_index=0, lora_request=None, is_finished=lambda: False)
    engine.scheduler.requests = {each.request_id: each for each in (mine, next_one, theirs, plain)}
    ended: list[str] = []
    engine.guard._finish = lambda each: ended.append(each.request_id)  # type: ignore[method-assign]
    engine.become(base="acme/smol@2")
    assert engine.refused == ended == ["acme/a@1"]


def test_engines_that_differ_or_do_not_know_their_base_serve_no_adapter(place: Place) -> None:
    name = place.push("acme/differ")
    for engines, said in (
        (
            [Engine(), Engine(replace(ENGINE, base="acme/smol@2"))],
            "its engines serve acme/smol@1 and acme/smol@2",
        ),
        ([Engine(replace(ENGINE, base="", why="it was started from a folder"))], "started from a folder"),
    ):
        with pytest.raises(FailedPrecondition, match=said):
            asyncio.run(admitted(place.admission(Server(engines)), name))
        assert not any(engine.loaded for engine in engines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "saved whole"),
        ({"bias": "lora_only"}, "biases"),
        ({"r": 32}, "its rank is 32, above --max-lora-rank 16"),
        ({"target_modules": ["q_proj", "up_proj"]}, "not support LoRA on up_proj"),
        ({"target_parameters": ["q_proj.weight"], "target_modules": ["down_proj"]}, "changes parameters"),
        ({"rank_pattern": {"q_proj": 24}}, "its rank is 24"),
    ],
    ids=["dora", "modules", "bias", "rank", "module", "parameters", "pattern"],
)
def test_what_an_engine_cannot_serve_is_refused_with_the_reason_before_it_is_loaded(
    options: dict[str, Any], said: str, place: Place
) -> None:
    name, engine = place.push(f"acme/refused-{abs(hash(said))}", **options), Engine()
    with pytest.raises(InvalidArgument, match=said) as refused:
        asyncio.run(admitted(place.admission(Server([engine])), name))
    assert "this engine supports LoRA and rsLoRA of rank up to 16 on down_proj, q_proj" in str(refused.value)
    assert not engine.loaded


@pytest.mark.parametrize("options", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}], ids=["rslora", "alpha"])
def test_what_a_release_of_vllm_does_not_read_of_a_config_is_refused(options: dict[str, Any]) -> None:
    config = {**PLAIN, **options}
    assert not config_problems(config, ENGINE)
    [problem] = config_problems(config, replace(ENGINE, known=("r", "lora_alpha")))
    assert "does not read" in problem


def test_a_kind_of_adapter_that_is_no_lora_is_refused_and_experts_are_left_to_vllm() -> None:
    assert "IA3" in config_problems({"peft_type": "IA3"}, ENGINE)[0]
    assert config_problems({**PLAIN, "init_lora_weights": "pissa"}, ENGINE)
    layer = "base_model.model.model.layers.0"
    assert not tensor_problems([f"{layer}.mlp.experts.0.up_proj.lora_A.weight"], ENGINE.modules)
    assert tensor_problems([f"{layer}.self_attn.q_proj.lora_magnitude_vector"], ENGINE.modules)
    assert tensor_problems([f"{layer}.self_attn.k_proj.lora_A.weight"], ENGINE.modules)


def test_a_whole_model_is_no_adapter_and_an_engines_own_name_is_left_to_vllm(place: Place) -> None:
    server = Server([Engine()])
    admission = place.admission(server)
    assert admission.names_adapter("acme/smol") is None
    assert admission.names_adapter("other/alice") is None
    assert admission.names_adapter("local") is None
    server.models.lora_requests["acme/static"] = object()
    assert admission.names_adapter("acme/static") is None
    with pytest.raises(InvalidArgument, match="whole model"):
        asyncio.run(admitted(admission, "acme/smol@1"))


def test_an_unknown_name_is_asked_for_once_in_a_while(place: Place) -> None:
    now = [0.0]
    unknown = Unknown(5.0, lambda: now[0])
    unknown.note("acme/nobody@latest", NotFound("there is no model acme/nobody"))
    with pytest.raises(NotFound, match="acme/nobody"):
        unknown.check("acme/nobody@latest")
    now[0] = 5.0
    unknown.check("acme/nobody@latest")
    for count in range(3000):
        unknown.note(str(count), NotFound("none"))
    assert len(unknown._found) == 1024

    async def run() -> None:
        admission = place.admission(Server([Engine()]), unknown_seconds=60.0)
        with pytest.raises(NotFound):
            await admitted(admission, "acme/later")
        later = await asyncio.to_thread(place.push, "acme/later")
        with pytest.raises(NotFound):
            await admitted(admission, "acme/later")
        assert await admitted(admission, later) == later, "another name"

    asyncio.run(run())


def test_a_service_that_is_away_is_no_unknown_name_and_what_is_loaded_is_served(tmp_path: Path) -> None:
    tiny_model(CONFIG, seed=1).save_pretrained(tmp_path / "base")
    server = Server([Engine()])
    with running_service(tmp_path / "store") as running, TrainerClient(running.address) as trainer:
        trainer.import_folder("acme/smol", tmp_path / "base", step=0).wait("durable", timeout=60)
        place = Place(running, trainer)
        name, other = place.push("acme/stays"), place.push("acme/goes")
        admission = place.admission(server)
        asyncio.run(admitted(admission, name))
    for named in ("acme/stays", other):
        with pytest.raises(Unavailable, match="cannot be reached"):
            asyncio.run(admitted(admission, named))
    assert asyncio.run(admitted(admission, name)) == name


def test_what_vllm_says_of_an_adapter_that_it_does_not_load_is_the_answer_and_it_is_tried_again(
    place: Place,
) -> None:
    name, engines = place.push("acme/odd"), [Engine(), Engine(broken="no such shape")]
    server = Server(engines)
    admission = place.admission(server)
    with pytest.raises(InvalidArgument, match="no such shape"):
        asyncio.run(admitted(admission, name))
    assert not server.models.lora_requests
    engines[1].broken = ""
    assert asyncio.run(admitted(admission, name)) == name


def test_the_oldest_are_forgotten_but_not_what_a_request_is_answered_with(place: Place, tmp_path: Path) -> None:
    names = [place.push(f"acme/many-{number}") for number in range(4)]
    server = Server([Engine()])
    kept = tmp_path / "cache" / "vllm-adapters"

    async def run() -> None:
        admission = place.admission(server, keep_versions=2)
        named = admission.names_adapter(names[0])
        assert named is not None
        async with admission.serving(named):
            for name in names[1:]:
                await admitted(admission, name)
            admission._threads.shutdown()
            assert list(server.models.lora_requests) == [names[0], names[3]]
            folders = {key_in(each.path) for each in server.models.lora_requests.values()}
            assert folders == {each.name for each in kept.iterdir() if each.is_dir()}

    asyncio.run(run())


@contextmanager
def _held(store: Store, key: str) -> Iterator[Path]:
    with store.hold(key, lambda folder: (folder / "a").write_bytes(bytes(100))) as hold:
        yield hold.folder


def test_a_folder_over_the_bounds_goes_unless_a_process_holds_it(tmp_path: Path) -> None:
    store, other = Store(tmp_path, 10, 250), Store(tmp_path, 10, 250)
    for age, key in enumerate(("c", "b", "a")):
        with _held(store, key) as folder:
            pass
        os.utime(folder, (1000 + age, 1000 + age))
    with _held(other, "c"):
        os.utime(tmp_path / "vllm-adapters" / "c", (1, 1))
        assert store.prune() == ["b"], "c is the oldest, and held"
    assert not store.prune()
    assert {each.name for each in store.root.iterdir() if each.is_dir()} == {"a", "c"}


def test_a_fetch_that_fails_leaves_nothing_and_the_next_one_brings_it(tmp_path: Path) -> None:
    store = Store(tmp_path, 10, 1000)

    def fails(folder: Path) -> None:
        (folder / "a").write_bytes(b"half")
        raise Unavailable("the service is gone")

    with pytest.raises(Unavailable):
        store.hold("a", fails)
    assert not [each for each in store.root.iterdir() if each.is_dir()]
    with _held(store, "a") as folder:
        assert (folder / "a").stat().st_size == 100


def test_numbers_fit_vllms_arrays_and_leave_its_own_alone() -> None:
    found = [number for each in range(200) for number in islice(numbers(f"acme/alice@{each}"), 3)]
    assert all((1 << 30) <= number < 1 << 31 for number in found)
    assert len(set(found)) == len(found)


def test_a_push_under_a_number_that_was_given_again_has_a_folder_of_its_own() -> None:
    base = {"weighbridge.base": "acme/smol@1", "weighbridge.base_digest": "ab"}
    version = Version("acme/alice", 3, VersionState.DURABLE, create_time_ms=1, metadata=base)
    found = AdapterVersion.of(version)
    later = AdapterVersion.of(replace(version, create_time_ms=2))
    assert found is not None
    assert later is not None
    assert found.name == later.name == "acme/alice@3"
    assert found.key != later.key
    assert AdapterVersion.of(replace(version, metadata={})) is None
    assert "deleted" in base_problem(found.name, found.base, replace(ENGINE, created_ms=5), BaseNow(found.base, 6))


def test_engines_together_have_what_all_of_them_have() -> None:
    assert together([ENGINE, ENGINE]) == ENGINE
    assert not together([ENGINE, replace(ENGINE, base="")]).base


@pytest.mark.parametrize(
    "text",
    ["{", '{"patterns": []}', '{"pattern": ["acme/*"]}', '{"patterns": ["acme/*"], "base": "acme/smol@live"}',
     '{"patterns": ["acme/*"], "keep_versions": 0}', '{"patterns": ["acme/*"], "keep_versions": 2.5}',
     '{"patterns": ["acme/*"], "retry_seconds": NaN}', '{"patterns": ["acme/*"], "retry_seconds": true}',
     '{"patterns": ["acme/*"], "server": 5}'],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        AdapterSettings.read(text)


def test_settings_that_are_null_count_as_not_given_and_whole_numbers_of_seconds_are_taken() -> None:
    found = AdapterSettings.read('{"patterns": "acme/*", "server": null, "keep_bytes": null, "retry_seconds": 7}')
    assert found == AdapterSettings(("acme/*",), retry_seconds=7)
    with pytest.raises(InvalidArgument, match="has no 'pattern'; did you mean patterns"):
        AdapterSettings.read('{"pattern": "acme/*"}')


def test_settings_name_patterns_and_take_the_service_of_the_load_format() -> None:
    found = AdapterSettings.of({VARIABLE: "acme/*, beta/x"})
    assert found is not None
    assert found.patterns == ("acme/*", "beta/x")
    assert found.serves("beta/x")
    assert not found.serves("beta/xy")
    assert found.within("weighbridge", {"server": "a:1"}).server == "a:1"
    assert found.within("auto", {"server": "a:1"}).server is None
    assert AdapterSettings.of({}) is None
    named = asked("acme/alice@7")
    assert named is not None
    assert (named.model, named.version) == ("acme/alice", "7")
    assert asked("acme/alice@") is None
    assert asked("alice") is None


class AuthenticationMiddleware:
    """A middleware with the name of vLLM's: rejects requests without a key."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (b"authorization", b"Bearer k") in scope["headers"]:
            await self.app(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})


@dataclass
class Request:
    """A request to an app, and its response."""

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = (
        (b"content-type", b"application/json"),
        (b"authorization", b"Bearer k"),
    )
    sent: list[Any] = field(default_factory=list)
    path: str = "/v1/completions"
    method: str = "POST"

    async def run(self, app: Any, server: Server) -> Request:
        state = SimpleNamespace(engine_client=server, openai_serving_models=server.models)
        half = len(self.body) // 2
        parts = [
            {"type": "http.request", "body": self.body[:half], "more_body": True},
            {"type": "http.request", "body": self.body[half:]},
        ]

        async def receive() -> Any:
            return parts.pop(0) if parts else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)

        scope = {
            "type": "http", "method": self.method, "path": self.path, "headers": list(self.headers),
            "app": SimpleNamespace(state=state),
        }  # fmt: skip
        await app(scope, receive, send)
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def text(self) -> str:
        return b"".join(each.get("body", b"") for each in self.sent).decode()


@dataclass
class Behind:
    """vLLM's app: records its requests, and gives the responses that a test sets."""

    answers: list[tuple[int, bytes]] = field(default_factory=lambda: [(200, b"{}")])
    seen: list[bytes] = field(default_factory=list)
    before: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.seen.append(message["body"] + (await receive())["body"] if message.get("more_body") else message["body"])
        if self.before is not None:
            self.before()
        status, body = self.answers[-1]
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})


@pytest.fixture
def asks(place: Place, monkeypatch: pytest.MonkeyPatch) -> tuple[Behind, Any, Server]:
    said = {"patterns": ["acme/*"], "server": place.running.address, "lane": "grpc", "retry_seconds": 0.2}
    monkeypatch.setenv(VARIABLE, json.dumps(said))
    monkeypatch.setattr("weighbridge.integrations.vllm_adapters.middleware.request_of", lambda: lambda order: order)
    behind = Behind()
    return behind, Adapters(AuthenticationMiddleware(behind)), Server([Engine()])


def test_vllm_sees_the_version_and_nothing_else_of_a_body_is_changed(
    asks: tuple[Behind, Any, Server], place: Place
) -> None:
    behind, app, server = asks
    name = place.push("acme/body")
    body = {"model": "acme/body", "prompt": "a \ud800 b", "logit_bias": {"5": 0.1}, "seed": 2**63}
    found = asyncio.run(Request(json.dumps(body).encode()).run(app, server))
    assert found.status == 200
    assert json.loads(behind.seen[0]) == {**body, "model": name}
    assert (b"x-weighbridge-adapter", name.encode()) in found.sent[0]["headers"]
    surrogate, twice = rb'{"model": "acme/body@\ud800"}', b'{"model": "acme/body", "model": "acme/smol"}'
    for other in (
        b'{"model": "acme/smol", "x":  1}',
        b"no json",
        b'{"model": 5}',
        b"[" * 100_000,
        surrogate,
        twice,
    ):
        asyncio.run(Request(other).run(app, server))
        assert behind.seen[-1] == other


def test_who_may_not_ask_the_server_has_it_fetch_nothing(asks: tuple[Behind, Any, Server], place: Place) -> None:
    behind, app, server = asks
    name = place.push("acme/closed")
    asked_for = Request(json.dumps({"model": name}).encode(), ((b"content-type", b"application/json"),))
    assert asyncio.run(asked_for.run(app, server)).status == 401
    assert not behind.seen
    assert not server.engines[0].loaded


def test_an_error_of_an_engine_whose_base_has_changed_is_a_conflict_and_any_other_stays_what_it_is(
    asks: tuple[Behind, Any, Server], place: Place
) -> None:
    behind, app, server = asks
    body = json.dumps({"model": place.push("acme/raced")}).encode()
    behind.answers.append((500, b"engine failed"))
    assert asyncio.run(Request(body).run(app, server)).status == 500
    for answer in ((500, b"engine failed"), (200, b'data: {"error": {"code": 500}}')):
        behind.answers.append(answer)
        server.engines[0].become(base="acme/smol@1")
        behind.before = lambda: server.engines[0].become(base="acme/smol@2")
        found = asyncio.run(Request(body).run(app, server))
        assert found.status == 409
        assert "is on acme/smol@1, and this engine serves acme/smol@2" in found.text
        assert len(found.sent) == 2


def test_adapters_are_loaded_listed_and_unloaded_by_a_route_behind_the_key(
    asks: tuple[Behind, Any, Server], place: Place
) -> None:
    behind, app, server = asks
    [engine], name = server.engines, place.push("acme/routed")

    def order(method: str = "POST", **said: Any) -> tuple[int, Any]:
        request = Request(json.dumps(said).encode() if said else b"", method=method, path=ROUTE)
        found = asyncio.run(request.run(app, server))
        return found.status, json.loads(found.text)

    closed = Request(json.dumps({"model": name}).encode(), (), path=ROUTE)
    assert asyncio.run(closed.run(app, server)).status == 401
    assert not engine.reads
    status, said = order(model="acme/routed@latest")
    assert (status, said["name"], said["base"], said["way"]) == (200, name, "acme/smol@1", "files")
    assert said["nbytes"] > 0
    assert order(model=name)[1]["way"] == ""
    assert order("GET") == (200, {"base": "acme/smol@1", "adapters": [name]})
    assert order(model="acme/routed", unload=True) == (200, {"name": name, "unloaded": True})
    assert order("GET")[1]["adapters"] == []
    for refused, status, text in (
        ({"model": "other/alice"}, 400, "acme/*"),
        ({"model": 5}, 400, "not a valid order"),
        ({"model": name, "unload": "yes"}, 400, "not a valid order"),
        ({"model": "acme/missing"}, 404, "acme/missing"),
        ({"model": "acme/smol@1"}, 400, "whole model"),
    ):
        found = order(**refused)
        assert found[0] == status, found
        assert text in json.dumps(found[1])
    engine.become(base="acme/smol@2")
    assert order(model=name)[0] == 409
    assert not behind.seen
    assert engine.reads == [name]


def test_the_command_loads_into_a_vllm_what_it_serves_and_unloads_it(
    asks: tuple[Behind, Any, Server], place: Place
) -> None:
    _, app, server = asks
    name = place.push("acme/commanded")

    def answer(path: str, said: dict[str, Any]) -> tuple[int, Any]:
        if path != ROUTE:
            return 404, {"detail": "Not Found"}
        body, method = (json.dumps(said).encode(), "POST") if said else (b"", "GET")
        found = asyncio.run(Request(body, path=path, method=method).run(app, server))
        return found.status, json.loads(found.text)

    with json_server(answer, key=lambda: "k") as url:
        where = ["--url", url, "--server", place.running.address, "--engine-key", "k", "--json"]
        loaded = CliRunner().invoke(commands, ["adapters", "acme/commanded@latest", *where])
        assert loaded.exit_code == 0, loaded.output
        assert json.loads(loaded.output)["name"] == name
        driver = VllmServer(url, "acme/smol", place.running.address, api_key="k")
        assert driver.adapters() == (name,)
        gone = CliRunner().invoke(commands, ["adapters", name, *where, "--unload"])
        assert (gone.exit_code, driver.adapters()) == (0, ()), gone.output
        other = place.push("acme/commanded-too", r=32)
        refused = CliRunner().invoke(commands, ["adapters", other, *where])
        assert refused.exit_code != 0
        assert "--max-lora-rank 16" in refused.output
        with EngineClient(place.running.address) as client:
            with pytest.raises(InvalidArgument, match="fetches adapters itself"):
                driver.load_adapter(client, "acme/commanded", 1, Path())
            with pytest.raises(EngineFailed, match="has no version 9"):
                driver.load_adapter(client, "acme/commanded", 9)
    with json_server(lambda _path, _said: (404, {"detail": "Not Found"})) as url:
        refused = CliRunner().invoke(commands, ["adapters", name, "--url", url, "--server", place.running.address])
        assert refused.exit_code != 0
        assert "--middleware" in refused.output


def test_errors_have_the_form_of_vllms_own(asks: tuple[Behind, Any, Server]) -> None:
    behind, app, server = asks
    found = asyncio.run(Request(b'{"model": "acme/none"}').run(app, server))
    assert found.status == 404
    error = json.loads(found.text)["error"]
    assert error["code"] == 404
    assert error["param"] == "model"
    assert not behind.seen


def test_a_server_that_is_not_told_which_adapters_it_serves_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(WeighbridgeError, match=VARIABLE):
        Adapters(Behind())


class BaseLayerWithLoRA(torch.nn.Module):
    """Named as vLLM's own."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_a_model_whose_layers_are_wrapped_is_filled_by_the_names_that_its_loader_knows() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    names = dict(model.named_parameters())
    model[0], model[1][0] = BaseLayerWithLoRA(model[0]), BaseLayerWithLoRA(model[1][0])
    wrapped_names = list(dict(model.named_parameters()))
    assert wrapped_names != list(names)
    assert {name_before(each) for each in wrapped_names} == names.keys()
    with unwrapped(model):
        inside = {name: id(each) for name, each in model.named_parameters()}
    assert inside == {name: id(each) for name, each in names.items()}
    assert list(dict(model.named_parameters())) == wrapped_names
    check_wrapped(model)


def test_wrapped_experts_are_refused_by_name() -> None:
    kind = type("FusedMoEWithLoRA", (BaseLayerWithLoRA,), {})
    with pytest.raises(FailedPrecondition, match="experts"):
        check_wrapped(torch.nn.ModuleDict({"experts": kind(torch.nn.Linear(1, 1))}))
