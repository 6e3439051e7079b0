"""Does a scheduler of an older SGLang empty its caches in a pause though requests wait, and only then, and are methods
found by the names they have?

And does nothing that old weights have computed answer for new ones: neither embeddings of images, nor what is kept
outside the engine?
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weighbridge.errors import FailedPrecondition
from weighbridge.follow.evidence import Evidence
from weighbridge.follow.wanted import Wanted
from weighbridge.integrations.engine_rank.agreement import OneRank
from weighbridge.integrations.sglang import configuration, load, releases


class Scheduler:
    """As far as SGLang 0.5.15's looks at itself when it flushes: nothing is flushed while a request waits."""

    def __init__(self, paused: bool, mode: str = "NULL") -> None:
        self._engine_paused = paused
        self.disaggregation_mode = SimpleNamespace(name=mode)
        self.waiting_queue = ["a request"]

    def is_fully_idle(self) -> bool:
        return not self.waiting_queue

    def flush_cache(self, empty_cache: bool = True) -> bool:
        return self.is_fully_idle() and empty_cache


class NewerScheduler(Scheduler):
    """As 0.5.23's, which knows by itself when to ignore requests that wait; here, never."""

    def is_fully_idle(self, ignore_waiting: bool = False) -> bool:
        return not self.waiting_queue


@pytest.mark.parametrize(
    ("scheduler", "flushes"),
    [
        (Scheduler(paused=True), True),
        (Scheduler(paused=False), False),
        (Scheduler(paused=True, mode="DECODE"), False),  # whose waiting requests hold what they were sent
        (NewerScheduler(paused=True), False),
    ],
)
def test_requests_that_wait_do_not_keep_a_paused_scheduler_from_flushing(scheduler: Scheduler, flushes: bool) -> None:
    assert releases.flush(type(scheduler).flush_cache, scheduler, empty_cache=True) is flushes
    assert scheduler.waiting_queue == ["a request"]


def test_requests_still_wait_when_a_flush_fails() -> None:
    def fails(_scheduler: Scheduler) -> bool:
        raise RuntimeError("out of memory")

    scheduler = Scheduler(paused=True)
    with pytest.raises(RuntimeError):
        releases.flush(fails, scheduler)
    assert scheduler.waiting_queue == ["a request"]


def test_a_method_is_found_by_the_first_name_whose_module_there_is() -> None:
    newest, older = "json.components.weights.JSONDecoder.decode", "json.decoder.JSONDecoder.decode"
    assert releases.present((newest, older)) == older
    assert releases.present((older, newest)) == older


def test_a_hook_is_put_around_a_method_for_all_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "flush_cache", Scheduler.flush_cache)  # put back in the end
    releases.wrap({f"{__name__}.Scheduler.flush_cache": releases.flush})
    assert Scheduler(paused=True).flush_cache()
    assert not Scheduler(paused=False).flush_cache()


WANTED = [(Wanted("127.0.0.1:50051", "acme/smol", "2").to_json(), None)]


class Rank:
    """As far as a rank of SGLang's takes a version."""

    def __init__(self, problem: str = "") -> None:
        self.problem = problem

    def apply(self, number: int, source: str) -> None:
        assert (number, source) == (2, "a service")
        if self.problem:
            raise FailedPrecondition(self.problem)


def embeddings(monkeypatch: pytest.MonkeyPatch, module: str, rank: Rank) -> dict[int, str]:
    """A cache of multimodal embeddings where a release has it, by hashes of images, in a process whose model is this
    rank's.
    """
    place, model = ModuleType(module), ModuleType("weighbridge.integrations.sglang.model")
    cache = {11: "by version 1"}
    model.__dict__.update(
        sglang_rank=lambda _model: rank,
        number_to_update_to=lambda _rank, wanted: int(wanted.version),
        source_of=lambda _wanted: "a service",
    )
    place.__dict__["embedding_cache"] = cache
    monkeypatch.setitem(sys.modules, module, place)
    monkeypatch.setitem(sys.modules, model.__name__, model)
    return cache


@pytest.mark.parametrize("module", ["mm_schedule", "mm_utils"])  # of 0.5.23, and up to 0.5.15
def test_images_that_come_again_are_encoded_by_the_new_weights(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    cache = embeddings(monkeypatch, f"sglang.srt.managers.{module}", Rank())
    load(None, WANTED)  # type: ignore[arg-type]  # the rank is there already
    assert cache == {}


def test_an_update_that_fails_leaves_what_the_old_weights_have_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = embeddings(monkeypatch, "sglang.srt.managers.mm_schedule", Rank("out of memory"))
    with pytest.raises(FailedPrecondition, match="out of memory"):
        load(None, WANTED)  # type: ignore[arg-type]
    assert cache == {11: "by version 1"}


def test_a_model_without_images_has_no_such_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ModuleType("sglang.srt.managers.mm_schedule")
    place.__dict__["embedding_cache"] = None
    monkeypatch.setitem(sys.modules, place.__name__, place)
    releases.forget_embeddings()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("hicache_storage_backend", "file"), ("enable_lmcache", True), ("language_only", True)],
)
def test_an_engine_that_would_go_on_with_results_of_old_weights_is_refused(setting: str, value: Any) -> None:
    unset = {"hicache_storage_backend": None, "enable_lmcache": False, "language_only": False}
    configuration.check_updatable({**unset, "enable_hierarchical_cache": True})
    with pytest.raises(FailedPrecondition, match=f"--{setting.replace('_', '-')}") as refused:
        configuration.check_updatable({**unset, setting: value})
    assert "start" in refused.value.fix


@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_an_engine_that_drafts_without_a_model_has_nothing_that_updates_leave_alone(algorithm: Any) -> None:
    assert configuration.drafter_of({"speculative_algorithm": algorithm}) == ""


def test_a_drafter_that_updates_leave_alone_is_named() -> None:
    said = configuration.drafter_of({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "acme/eagle"})
    assert said == "the drafter acme/eagle of --speculative-algorithm EAGLE3"
    assert configuration.drafter_of({"speculative_algorithm": "NEXTN"}).endswith("NEXTN")


def test_a_proof_names_the_drafter_of_an_engine_that_was_not_updated_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = ModuleType("sglang.srt.distributed.parallel_state")
    groups.__dict__.update(get_pp_group=None, get_tp_group=None)
    for name in ("sglang", "sglang.srt", "sglang.srt.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, groups.__name__, groups)
    spec = spec_from_file_location("of_sglang", Path(configuration.__file__).with_name("model.py"))
    assert spec is not None
    assert spec.loader is not None
    of_sglang: Any = module_from_spec(spec)
    spec.loader.exec_module(of_sglang)
    monkeypatch.setattr(of_sglang, "server_arguments", lambda: {"speculative_algorithm": "NEXTN"})

    class Rank:
        engine = SimpleNamespace(ranks=OneRank(), apart="")
        source = None

        def connect(self, _source: Any) -> None:
            pass

        def evidence(self, _known: Any) -> Evidence:
            return Evidence("", "", "", {}, dict.fromkeys([self.engine.apart], "left alone"), 0.0)

    [found] = of_sglang.evidence(Rank(), (), Wanted("h:1", "a/b"))
    assert [*found["unseen"]] == ["the drafter of --speculative-algorithm NEXTN"]
