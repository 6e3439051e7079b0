"""Do the benchmarks move the bytes that they say they move?

Sizes, not times: a model of a few MB, two clients, one round, with the service and the clients as processes.
"""

from __future__ import annotations

import importlib.util
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks import against, calls, cuts, history, models, nodes, processes, ranks, torch_trainers
from benchmarks.cases import Case, Figures, run_case, run_in_turn
from benchmarks.counted_service import CountingStore, Counts
from benchmarks.peer_process import measure
from benchmarks.peers import BY_NAME
from benchmarks.processes import Service
from benchmarks.report import cases_table
from tests.support.forked import forked_python
from tests.support.raw_clients import tiny_folder
from weighbridge import TrainerClient
from weighbridge._core.boxes import Box
from weighbridge_storage.stores.local import LocalStore

SIZE = 0.004


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a benchmark begin with everything imported, which is most of what they would do otherwise."""
    monkeypatch.setattr(processes, "python", forked_python)


def expected_bytes(config: dict[str, object]) -> int:
    """Bytes of the weights, from transformers' own model of the config."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**config))
    return sum(2 * parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", [0.004, 0.02, 0.5, 2.0, 8.0])
def test_a_model_has_the_size_that_was_asked_for(tmp_path: Path, size: float) -> None:
    config = models.config_of(size)
    specs = models.hugging_face_specs(models.write_config(config, tmp_path))
    assert sum(spec.nbytes for spec in specs) == expected_bytes(config)
    assert sum(spec.nbytes for spec in specs) == pytest.approx(size * 1e9, rel=0.07)


@pytest.mark.parametrize("cut", ["contiguous", "columns"])
@pytest.mark.parametrize("clients", [1, 2, 8])
def test_shards_of_all_clients_together_are_the_model_once(tmp_path: Path, cut: str, clients: int) -> None:
    specs = models.hugging_face_specs(models.write_config(models.config_of(SIZE), tmp_path))
    written = {spec.name: torch.zeros(spec.shape, dtype=torch.uint8) for spec in specs}
    for rank in range(clients):
        for shard in cuts.shards(cut, specs, clients, rank):
            written[shard.tensor][slices(shard.box)] += 1
    assert all((counts == 1).all() for counts in written.values())


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))


def test_tensors_of_a_small_pool_differ_and_each_generation_has_others() -> None:
    shapes = [(torch.bfloat16, (64, 64)), (torch.bfloat16, (128, 64))]
    bits = models.RandomBits([8192, 16384])
    tensors = [*bits.tensors(shapes), *bits.tensors(shapes, generation=1)]
    assert len({tensor.view(torch.int16).numpy().tobytes() for tensor in tensors}) == len(tensors)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("cut", "lane"), [("columns", "grpc"), ("contiguous", "local")])
def test_bytes_that_are_reported_are_those_of_the_model_and_of_the_version(tmp_path: Path, cut: str, lane: str) -> None:
    versions: list[tuple[int, set[str]]] = []

    def look(service: Service) -> None:
        with TrainerClient(service.grpc) as client:
            version = client.version("bench/model")
        [folder] = (tmp_path / "case" / "store").glob(f"models/bench/model/versions/*{version.number}")
        with safe_open(folder / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        versions.append((sum(tensor.nbytes for tensor in tensors.values()), set(tensors)))

    figures = run_case(Case(SIZE, 2, cut, lane), 1, tmp_path / "case", look, warm_up=1)

    nbytes = expected_bytes(models.config_of(SIZE))
    assert figures.nbytes == dict.fromkeys(("model", "pushed", "arrived", "asked", "pulled"), nbytes)
    [(kept, names)] = versions
    assert kept == nbytes
    assert "model.embed_tokens.weight" in names
    assert figures.verified is True
    # a stopwatch around the push cannot show less than the push itself says
    assert figures.seconds["called"][0] >= figures.seconds["held"][0]
    assert all(seconds > 0 for values in figures.seconds.values() for seconds in values)
    assert {"service", "trainer", "engine", "together"} <= figures.memory.keys()
    assert figures.lanes == {lane}
    assert f"{SIZE:g}, 2, {cut}, {lane}" in cases_table([figures])
    assert json.loads(json.dumps(figures.to_json()))["bytes"]["pulled"] == nbytes


@pytest.mark.usefixtures("forked")
def test_a_push_to_two_nodes_moves_each_byte_once_and_most_of_them_by_shared_memory(
    tmp_path: Path,
) -> None:
    figures = nodes.run(SIZE, 2, "stages", "auto", 1, tmp_path, warm_up=0)
    moved = sum(figures.nbytes["two"].values())
    assert moved == figures.model_bytes
    assert figures.nbytes["two"]["local"] > 0.8 * moved
    written = json.loads(json.dumps(figures.to_json()))
    assert set(written["ratios"]) == {"one"}
    assert set(written["ratios"]["one"]) == {"held", "ready", "durable", "cpu"}
    assert "stages, auto" in nodes.table([figures])
    assert nodes.verdict([figures]).startswith("goal of 1.2 ")


@pytest.mark.parametrize(("held", "met"), [(1.1, "met"), (1.3, "missed")])
def test_two_nodes_are_judged_by_the_push_with_as_many_bytes_by_each_lane(held: float, met: str) -> None:
    figures = nodes.Figures("contiguous", "auto", 8)
    for services, seconds in (("one", 0.1), ("half away", 1.0), ("two", held)):
        for name in nodes.JUDGED:
            figures.note(services, name, seconds)
        figures.nbytes[services] = {"local": 1, "streamed": 1}
    assert f"goal of 1.2 {met}: contiguous held {held:.2f}, contiguous ready {held:.2f}" == nodes.verdict([figures])
    rows = nodes.table([figures]).splitlines()
    assert [row.split()[-1] for row in rows if "to half away" in row] == ["yes" if met == "met" else "no"] * 2


def test_ratios_are_those_of_rounds() -> None:
    figures = Figures(Case(SIZE, 1, "columns", "grpc"))
    figures.seconds = {"held": [1.0, 4.0, 9.0], "copy": [1.0, 2.0, 3.0]}
    assert figures.median("held") == 4.0
    assert figures.ratio("held_to_copy") == 2.0
    assert figures.ratio("pull_to_raw") is None


def test_two_checkouts_are_measured_in_the_same_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = processes.python

    def python(*arguments: str, checkout: Path | None = None, **options: Any) -> Any:
        if checkout is None:  # the half that other tests see started as it is
            return forked_python(*arguments, **options)
        return really(*arguments, checkout=checkout, **options)

    monkeypatch.setattr(processes, "python", python)
    case = Case(SIZE, 1, "contiguous", "local")
    ours, theirs = run_in_turn(case, 2, tmp_path, [None, Path(__file__).parents[2]], warm_up=1)
    compared = against.Compared(ours, theirs)
    assert {
        "held",
        "ready",
        "durable",
        "push_processor",
        "pull",
        "pull_processor",
        "copy",
    } <= compared.rounds.keys()
    for name, ratios in compared.rounds.items():
        assert [ratio * second for ratio, second in zip(ratios, theirs.seconds[name], strict=True)] == (
            pytest.approx(ours.seconds[name])
        )
    assert ours.verified is theirs.verified is True
    assert f"{SIZE:g}, 1, contiguous, local" in against.tables([compared])
    assert set(json.loads(json.dumps(compared.to_json()))["ratios"]) == set(compared.rounds)


def test_a_process_runs_the_code_of_the_checkout_that_is_named(tmp_path: Path) -> None:
    for folder, package in (
        ("clients", "weighbridge"),
        ("storage", "weighbridge_storage"),
        ("", "benchmarks"),
    ):
        (tmp_path / folder / package).mkdir(parents=True)
        (tmp_path / folder / package / "__init__.py").touch()
    code = (
        "import weighbridge, weighbridge_storage, benchmarks as b; print(weighbridge.__path__, "
        "weighbridge_storage.__path__, b.__path__)"
    )
    with processes.python("-c", code, checkout=tmp_path) as process:
        found = processes.first_line(process)
    assert found.count(str(tmp_path)) == 3


@pytest.mark.parametrize(("rounds", "low", "high"), [(3, 1, 3), (6, 1, 6), (10, 2, 9), (20, 6, 15), (30, 10, 21)])
def test_the_interval_of_a_median_is_that_of_printed_tables(rounds: int, low: int, high: int) -> None:
    ratio = against.Ratio.of(range(rounds, 0, -1))
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == ((rounds + 1) / 2, low, high, rounds)


def test_processor_time_of_another_process_is_what_it_says_itself() -> None:
    code = "import sys, time; list(range(10**6)); print(time.process_time(), flush=True); sys.stdin.read()"
    with processes.python("-c", code) as process:
        said = float(processes.first_line(process))
        assert said <= processes.processor_seconds(process.pid) < said + 1


@pytest.mark.parametrize("name", ["safetensors save_file", "DCP HF writer"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_peers_files_hold_the_weights(tmp_path: Path, name: str) -> None:
    for folder in ("model", "tiny-model"):
        models.write_model(SIZE, tmp_path / folder)
    found = measure(BY_NAME[name], tmp_path, "", sampled=False)
    assert found["bytes"] == expected_bytes(models.config_of(SIZE))
    assert found["problems"] == []


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_figures_can_be_drawn(tmp_path: Path) -> None:
    from benchmarks.plot import plot_cases, plot_peers

    figures = Figures(Case(SIZE, 1, "columns", "grpc"))
    figures.seconds = {"held": [1.0], "copy": [1.0]}
    plot_cases([figures], tmp_path / "cases.png")
    plot_peers({"weighbridge push": 0.1, "cp -r": 1.0}, "a title", tmp_path / "peers.png")
    assert (tmp_path / "cases.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_a_store_that_counts_has_counted_every_byte(tmp_path: Path) -> None:
    store = CountingStore(LocalStore(tmp_path))
    store.put("models/a/b/head.json", b"12345", mode="create")
    store.put("models/a/b/versions/1/model.safetensors", [b"123", b"4567"], mode="create")
    written = store.counts
    assert written == Counts(requests=2, read=0, written=12, head_read=0, head_written=5)
    assert store.get("models/a/b/head.json")[0] == b"12345"
    assert b"".join(map(bytes, store.stream("models/a/b/versions/1/model.safetensors"))) == b"1234567"
    assert store.read_range("models/a/b/versions/1/model.safetensors", 1, 2) == b"23"
    assert sorted(store.list("models/")) == [
        "models/a/b/head.json",
        "models/a/b/versions/1/model.safetensors",
    ]
    assert store.counts.minus(written) == Counts(4, read=14, written=0, head_read=5, head_written=0)
    store.close()


@pytest.mark.usefixtures("forked")
def test_pushes_of_state_dicts_are_measured_in_the_same_rounds_as_copies(tmp_path: Path) -> None:
    seconds = torch_trainers.measured(tmp_path, SIZE, 2, "local", warm_up=0, rounds=1)
    assert {len(times) for times in seconds.values()} == {1}
    for what, ratio in torch_trainers.ratios(seconds).items():
        above, below = torch_trainers.RATIOS[what]
        assert ratio.median == ratio.least == ratio.most == seconds[above][0] / seconds[below][0]
        assert ratio.seconds == seconds[above][0]
    for name in ("megatron", "state_dict", "cast"):
        assert seconds[f"{name}_ready"] > seconds[name]


@pytest.mark.usefixtures("forked")
def test_history_is_measured_at_both_ends_of_it(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "hf", hidden_size=8)
    weights = (model.folder / "model.safetensors").stat().st_size
    with ExitStack() as stack:
        few, many = (
            stack.enter_context(history.serving(str(tmp_path / how), tmp_path / f"{how}-scratch"))
            for how in ("few", "many")
        )
        versions = history.measure(partial(history.Versions, model), (few, many), 8, 2)
        registered = history.measure(partial(history.Models, model), (few, many), 8, 2)
        for service, count in ((few, 4), (many, 8)):
            with TrainerClient(service.address) as client:
                assert [version.number for version in client.versions(history.MODEL)] == [*range(count, 0, -1)]
                assert len(client.models()) == count + 1
    for ends in (versions, registered):
        assert [(window.begin, window.end) for window in ends] == [(2, 4), (6, 8)]
    for window in (*versions, *registered):
        assert all(len(values) == 2 for values in window.samples.values())
        assert all(value > 0 for values in window.samples.values() for value in values)
        stored, heads = window.samples["store bytes"], window.samples["head bytes"]
        assert all(all_of_it > head + weights for all_of_it, head in zip(stored, heads, strict=True))
    assert "open" in history.table("versions", versions)


def test_what_has_grown_by_more_than_it_may_is_said() -> None:
    first = history.Window(0, 2, {"open": [1.0, 3.0, 1.0], "store bytes": [10, 10, 40]}, 5)
    for open_s, nbytes, memory, expected in (
        (1.2, 70, 50_000_000, [True, True, True]),
        (1.4, 70, 50_000_000, [False, True, True]),
        (1.2, 90, 50_000_000, [True, False, True]),
        (1.2, 70, 50_000_001, [True, True, False]),
    ):
        last = history.Window(8, 10, {"open": [9.0, open_s, 0.1], "store bytes": [nbytes, 4, 4]}, memory)
        assert [verdict.ok for verdict in history.verdicts((first, last))] == expected
        assert ("OVER" in history.table("versions", (first, last))) is not all(expected)


@pytest.mark.usefixtures("forked")
def test_all_ranks_of_all_processes_push_one_version(tmp_path: Path) -> None:
    pushed, before = ranks.measure(tmp_path, 6, 2, 2, "grpc")
    assert before > 0
    for each in pushed:
        assert 0 < each.declared <= each.delivered <= each.ready
        assert each.threads > 1
        assert each.memory > 0
    folders = sorted((tmp_path / "store" / "models" / "bench" / "ranks" / "versions").iterdir())
    assert len(folders) == 2
    for folder in folders:
        with safe_open(folder / "model.safetensors", "pt") as file:
            nbytes = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 (it is no mapping)
        assert nbytes == expected_bytes(models.config_of(SIZE))


def test_small_calls_of_two_checkouts_are_timed_in_the_same_rounds() -> None:
    first, second = calls.measure([None, Path(__file__).parents[2]], rounds=2, count=2)
    assert len(first) == len(second) == 2
    assert {frozenset(each) for each in (*first, *second)} == {frozenset(first[0])}
    assert all(min(took.seconds, took.processor) > 0 for each in (*first, *second) for took in each.values())
