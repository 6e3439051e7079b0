"""Do pushes hold their rank no longer than they may, do ranks agree on each, and does a loop that wants to go on go
on?
"""

from __future__ import annotations

import gc
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from tests.support.ports import reserved_port
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import running_service
from weighbridge import (
    CheckpointManager,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    TrainerClient,
    Unavailable,
    VersionFailed,
)
from weighbridge._clients.holding.agreement import RankAgreement, _store
from weighbridge._clients.holding.policy import HoldPolicy, current_hold, held
from weighbridge._clients.pushing import Pusher, PushTerms
from weighbridge.integrations.torch.writer import WeighbridgeWriter

CONFIG = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=64)
LONG = 30.0
NO_SERVICE = Pusher(cast("Any", None))
"""Waits for other ranks without a service."""


def agreements(ranks: int, store: Any = None) -> list[RankAgreement]:
    store = HashStore() if store is None else store
    return [RankAgreement("weighbridge/a/b/run/1", rank, ranks, store) for rank in range(ranks)]


def tcp_store() -> Any:
    """The store that torchrun's process groups have."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize(("ranks", "store"), [(2, HashStore), (7, HashStore), (3, tcp_store)])
def test_all_ranks_push_once_the_last_one_has_come(ranks: int, store: Any) -> None:
    first = store()
    found = agreements(ranks, first.clone())
    *early, last = found
    for each in early:
        each.come()
    assert not any(each.decided(0.0) for each in found)
    assert early[0].absent() == [ranks - 1]
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(each.decided, LONG) for each in early]
        last.come()
        assert all(each.result() for each in waits)
    assert [each.problem() for each in found] == [""] * ranks
    assert not last.refuse(ValueError("too late"))
    assert found[0].problem() == "", "the first verdict stands"


def test_no_rank_pushes_where_one_cannot_and_all_hear_why() -> None:
    first, second, third = agreements(3)
    first.come()
    assert second.refuse(Unavailable("no answer", details=["port 9"]))
    assert first.decided(LONG)
    assert not first.refuse(ValueError("it waited too long")), "the first verdict stands"
    third.come()
    assert {each.problem() for each in (first, second, third)} == {"rank 1: no answer; port 9"}


class _Meanwhile:
    """Store of a rank that asks which ranks are absent, while another one comes."""

    def __init__(self, store: Any, come: Callable[[], None]) -> None:
        self._store = store
        self._come = come

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        if keys[0].endswith("/here/1"):
            self._come()
        return bool(self._store.check(keys))


def test_a_rank_that_gives_up_meeting_others_while_the_last_one_comes_goes_with_them() -> None:
    first, last = agreements(2)
    waiting = replace(first, store=_Meanwhile(first.store, last.ahead().come))
    NO_SERVICE.meet("a/b", PushTerms(HoldPolicy(max_hold_s=0.01).begin(), waiting))
    assert last.ahead().decided(0.0)
    assert last.ahead().problem() == "", "the last rank begins with what they do together"


def test_ranks_hear_from_one_that_meets_them_no_longer() -> None:
    first, last = agreements(2)
    with pytest.raises(DeadlineExceeded, match="waiting for rank 1"):
        NO_SERVICE.meet("a/b", PushTerms(HoldPolicy(max_hold_s=0.01).begin(), first))
    with pytest.raises(VersionFailed, match="not all ranks can push"):
        NO_SERVICE.meet("a/b", PushTerms(HoldPolicy().begin(), last))


def test_ranks_that_push_before_the_model_is_registered_hear_what_to_call() -> None:
    first, last = agreements(2)
    last.refuse(NotFound("there is no model a/b", fix="register it"))
    with pytest.raises(VersionFailed, match="rank 1: there is no model a/b") as caught:
        NO_SERVICE.meet("a/b", PushTerms(HoldPolicy().begin(), first))
    assert caught.value.fix.startswith("call register_model on every rank")


def test_a_process_group_that_has_ended_frees_its_port() -> None:
    port = reserved_port()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        assert _store() is _store(), "one connection for all pushes"
    finally:
        dist.destroy_process_group()
    gc.collect()
    with socket.create_server(("127.0.0.1", port), reuse_port=False):
        pass


def test_what_is_pushed_behind_is_agreed_on_by_itself() -> None:
    first, second = agreements(2)
    second.refuse(ValueError("no"))
    assert first.behind().problem() == ""


def test_a_hold_ends_no_later_than_the_one_around_it() -> None:
    short, long = HoldPolicy(max_hold_s=5.0), HoldPolicy(max_hold_s=500.0)
    with held(short.begin()):
        assert long.begin().left <= 5.0
        other: list[float] = []
        thread = threading.Thread(target=lambda: other.append(current_hold().left))
        thread.start()
        thread.join()
        assert other == [float("inf")], "what goes on behind the caller is not of its hold"
    assert 5.0 < long.begin().left <= 500.0


@pytest.mark.parametrize("options", [{"max_hold_s": 0}, {"max_hold_s": "1"}, {"on_failure": "ignore"}])
def test_terms_that_mean_nothing_are_refused_at_every_door(options: dict[str, object]) -> None:
    with TrainerClient(f"127.0.0.1:{reserved_port()}") as trainer:
        for door in (
            lambda: trainer.push("a/b", {}, step=1, **options),  # type: ignore[arg-type]
            lambda: trainer.push_state_dict("a/b", {}, step=1, **options),  # type: ignore[arg-type]
            lambda: trainer.push_gathered("a/b", [], step=1, **options),  # type: ignore[arg-type]
            lambda: CheckpointManager(trainer, "a/b", torch.nn.Linear(1, 1), **options),  # type: ignore[arg-type]
            lambda: WeighbridgeWriter("a/b", trainer, **options),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidArgument, match=r"max_hold_s|on_failure"):
                door()
        with pytest.raises(InvalidArgument, match="no way to skip") as refused:
            WeighbridgeWriter("a/b", trainer, on_failure="warn")
        assert "CheckpointException" in refused.value.fix


def test_a_service_that_is_away_holds_a_push_no_longer_than_it_may(caplog: pytest.LogCaptureFixture) -> None:
    module = torch.nn.Linear(2, 2)
    with TrainerClient(f"127.0.0.1:{reserved_port()}", retry_seconds=LONG) as trainer:
        began = time.monotonic()
        with pytest.raises((Unavailable, DeadlineExceeded)):
            trainer.push_state_dict("a/b", module, step=1, max_hold_s=0.2)
        taken: list[str] = []
        weights = ((taken.append(name) or name, tensor) for name, tensor in module.state_dict().items())  # type: ignore[func-returns-value]
        skipped = trainer.push_gathered("a/b", weights, step=1, max_hold_s=0.2, on_failure="warn")
        checkpoints = CheckpointManager(trainer, "a/b", module, max_hold_s=0.2, on_failure="warn")
        again = checkpoints.save(2)
        assert time.monotonic() - began < LONG / 2
        for handle in (skipped, again, checkpoints):
            with pytest.raises((Unavailable, DeadlineExceeded)):
                handle.wait()
    assert isinstance(skipped.skipped, Unavailable | DeadlineExceeded)
    assert skipped.copied(0)
    assert taken == ["weight", "bias"], "other ranks may gather them together with this one"
    assert "a/b: step 2 was not pushed; the loop goes on. the service at" in caplog.text


def test_a_push_whose_metadata_are_refused_is_skipped_where_the_loop_goes_on() -> None:
    with TrainerClient(f"127.0.0.1:{reserved_port()}") as trainer:
        handle = trainer.push("a/b", {}, step=1, metadata={"who": object()}, on_failure="warn")  # type: ignore[dict-item]
        assert isinstance(handle.skipped, InvalidArgument)
        assert "who" in str(handle.skipped)


def test_a_push_waits_for_the_bytes_of_earlier_ones_no_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CONFIG.save_pretrained(tmp_path / "hf")
    model = tiny_model(CONFIG, seed=1)
    with running_service(tmp_path / "store") as service, TrainerClient(service.address) as trainer:
        trainer.register_model("a/b", tmp_path / "hf", dtype="fp32")
        arrives = threading.Event()
        deliver = trainer._pushes.pusher._deliver

        def slow(*arguments: object) -> object:
            arrives.wait(LONG)
            return deliver(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(trainer._pushes.pusher, "_deliver", slow)
        earlier = [trainer.push_state_dict("a/b", model, step=step) for step in (1, 2)]
        with pytest.raises(DeadlineExceeded, match=r"earlier pushes .* after max_hold_s=0.2"):
            trainer.push_state_dict("a/b", model, step=3, max_hold_s=0.2)
        arrives.set()
        assert [each.wait(timeout=LONG).step for each in earlier] == [1, 2]
        assert trainer.push_state_dict("a/b", model, step=3, max_hold_s=LONG).wait(timeout=LONG).step == 3


def test_a_push_that_fails_behind_the_loop_is_logged_where_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    CONFIG.save_pretrained(tmp_path / "hf")
    model = tiny_model(CONFIG, seed=1)
    caplog.set_level(logging.ERROR)
    with running_service(tmp_path / "store") as service, TrainerClient(service.address) as trainer:
        trainer.register_model("a/b", tmp_path / "hf", dtype="fp32")

        def broken(*_: object) -> object:
            raise Unavailable("the wire was cut")

        monkeypatch.setattr(trainer._pushes.pusher, "_deliver", broken)
        handle = trainer.push_state_dict("a/b", model, step=1, on_failure="warn")
        with pytest.raises(Unavailable, match="the wire was cut"):
            handle.report()
    assert handle.skipped is None
    assert "a/b@1 was not pushed; the loop goes on. the wire was cut" in caplog.text
