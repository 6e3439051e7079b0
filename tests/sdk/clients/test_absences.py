"""Does a watch say what it waits for, as long as that is not there?"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import aclosing, suppress
from functools import partial

import pytest

from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import AsyncEngineClient, EngineClient, TrainerClient
from weighbridge._core.text import waits
from weighbridge.errors import WeighbridgeError

FULL, EMPTY, HELD = "absent/full", "absent/empty", "absent/held"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("absences") / "hf")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, source: TinyModel) -> Iterator[RunningService]:
    models = dict.fromkeys((FULL, EMPTY, HELD), source.files)
    with running_service(tmp_path_factory.mktemp("store"), models) as running:
        with TrainerClient(running.address) as trainer:
            trainer.push_folder(FULL, source.folder, step=1).wait(timeout=60)
            trainer.set_ref(FULL, "prod")
            trainer.push_folder(HELD, source.folder, step=1, candidate=True).wait(timeout=60)
        yield running


def listen(address: str, refs: list[tuple[str, str]], ended: threading.Event) -> None:
    with EngineClient(address) as client:
        threading.Thread(target=lambda: (ended.wait(), client.close()), daemon=True).start()
        with suppress(WeighbridgeError):  # the client is closed in the end
            for _ in client.watch_refs(refs):
                pass


def listen_on_loop(address: str, refs: list[tuple[str, str]], ended: threading.Event) -> None:
    async def listening() -> None:
        async with AsyncEngineClient(address) as client:

            async def each() -> None:
                async with aclosing(client.watch_refs(refs)) as found:
                    async for _ in found:
                        pass

            task = asyncio.create_task(each())
            await asyncio.to_thread(ended.wait)
            task.cancel()
            await asyncio.wait([task])
        own = [task for task in asyncio.all_tasks() if "remind" in getattr(task.get_coro(), "__qualname__", "")]
        assert own == []

    asyncio.run(listening())


@pytest.mark.parametrize("listen", [listen, listen_on_loop])
@pytest.mark.parametrize(
    ("model", "ref", "said"),
    [
        (FULL, "prd", f"{FULL} has no ref 'prd' yet (it has latest, live, prod): waiting for it"),
        (EMPTY, "latest", f"{EMPTY} has no versions yet: waiting for the first one"),
        (EMPTY, "prod", f"{EMPTY} has no ref 'prod' yet: waiting for it"),
        (HELD, "live", f"{HELD} has no ref 'live' yet, as its version 1 is held: waiting for it"),
        ("absent/fll", "live", f"there is no model absent/fll yet; did you mean {FULL}? Waiting for it"),
        ("zz/qqqqqqqqq", "live", "there is no model zz/qqqqqqqqq yet: waiting for it"),
    ],
)
def test_a_watch_says_what_it_waits_for_again_and_again(
    service: RunningService,
    listen: partial[None],
    model: str,
    ref: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(waits, "REMIND_SECONDS", 0.03)
    caplog.set_level(logging.WARNING)
    ended = threading.Event()
    # what is there is not spoken of
    listening = threading.Thread(target=listen, args=(service.address, [(FULL, "live"), (model, ref)], ended))
    listening.start()
    eventually(lambda: caplog.messages.count(said) > 1)
    ended.set()
    listening.join(60)
    assert not listening.is_alive()
    assert {message for message in caplog.messages if "absent/" in message or model in message} == {said}


def test_nothing_more_is_said_once_it_is_there_and_of_many_refs_the_first_are_named(
    service: RunningService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "REMIND_SECONDS", 0.03)
    caplog.set_level(logging.WARNING)
    with EngineClient(service.address) as client:
        refs = [(FULL, f"none-{i}") for i in range(5)]
        ended = threading.Event()
        many = threading.Thread(target=globals()["listen"], args=(service.address, refs, ended))
        many.start()
        eventually(lambda: "2 more refs of the same watch have no version yet" in caplog.messages)
        ended.set()
        many.join(60)
        watch = client.watch(FULL, "later")
        first = list[int]()
        waiting = threading.Thread(target=lambda: first.append(next(watch).number))
        before = {*threading.enumerate()}
        waiting.start()
        about = f"{FULL} has no ref 'later' yet (it has latest, live, prod): waiting for it"
        eventually(lambda: about in caplog.messages)
        (reminder,) = [each for each in {*threading.enumerate()} - before if each.name == "watch-reminder"]
        client.set_ref(FULL, "later", 1)
        waiting.join(60)
        assert first == [1]
        eventually(lambda: not reminder.is_alive())
        client.delete_ref(FULL, "later")
