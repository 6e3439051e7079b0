"""Do pushes from a training loop's hooks never stop the loop, whatever happens on other ranks?"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import TrainerControl, TrainerState

from tests.support.ports import reserved_port
from weighbridge import TrainerClient
from weighbridge.errors import FailedPrecondition, Unavailable
from weighbridge.integrations import guarded_pushes
from weighbridge.integrations.guarded_pushes import GuardedPushes
from weighbridge.integrations.transformers.trainer_callback import PushCallback


class Unreachable(TrainerClient):
    """A client that is never to be used."""

    def model(self, model: str, *, retry_seconds: float | None = None) -> Any:
        return None


def test_a_step_that_some_ranks_have_pushed_is_pushed_by_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pushed: list[int] = []
    logger = logging.getLogger("tests.guarded")
    with Unreachable(f"127.0.0.1:{reserved_port()}", retry_seconds=0) as client:
        for others, wanted in (((False, False), [7]), ((True, False), []), ((True, True), [])):
            pushes = GuardedPushes(client, "a/b", None, strict=False, logger=logger)
            pushes._pushed_step = 7 if others[0] else None
            monkeypatch.setattr(guarded_pushes, "of_all_ranks", lambda mine, _, others=others: [mine, ("", others[1])])
            pushed.clear()

            def push(_weights: Any, step: int, _rank: int, _size: int) -> Any:
                pushed.append(step)
                raise OSError("as far as it goes")

            pushes.push("step 7", "training", lambda: (7, None), push)
            assert pushed == wanted
    assert "step 7 was pushed before, and failed on ranks 1" in caplog.text


def test_a_service_that_is_away_is_waited_for_once_and_tried_for_a_moment_until_it_has_answered() -> None:
    waited: list[float | None] = []
    away = True

    class Seldom(TrainerClient):
        def model(self, model: str, *, retry_seconds: float | None = None) -> Any:
            waited.append(retry_seconds)
            if away:
                raise Unavailable("nobody there")

    def save(step: int) -> list[float | None]:
        waited.clear()
        pushes.push(f"step {step}", "training", lambda: (step, None), _pushing)
        return list(waited)

    with Seldom(f"127.0.0.1:{reserved_port()}", retry_seconds=0) as client:
        pushes = GuardedPushes(client, "a/b", None, strict=False, logger=logging.getLogger("tests.guarded"))
        assert save(1) == [None], "as long as the client says"
        quick = save(2)
        assert quick == save(3)
        assert [each is not None and each < 10 for each in quick] == [True]
        away = False
        assert save(4) == [*quick, None]
        assert save(5) == [None]


def test_another_training_pushes_its_own_steps() -> None:
    with Unreachable(f"127.0.0.1:{reserved_port()}", retry_seconds=0) as client:
        pushes = GuardedPushes(client, "a/b", None, strict=True, logger=logging.getLogger("tests.guarded"))
        pushes._pushed_step = 7
        pushes.push("step 7", "training", lambda: (7, None), lambda *_: pytest.fail("it was pushed before"))
        pushes.begin_anew()
        with pytest.raises(OSError, match="pushed"):
            pushes.push("step 7", "training", lambda: (7, None), _pushing)


def _pushing(*_: Any) -> Any:
    raise OSError("pushed")


class Fsdp1(FullyShardedDataParallel):
    """The parts of an FSDP 1 module that pushes read."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        pytest.fail("it waits for all ranks")


def test_a_module_of_the_first_fsdp_is_refused_before_any_rank_waits_for_another() -> None:
    callback = PushCallback("a/b", f"127.0.0.1:{reserved_port()}", strict=True, retry_seconds=0)
    with pytest.raises(FailedPrecondition, match="version 1 of FSDP"):
        callback.on_save(None, TrainerState(global_step=1), TrainerControl(), model=Fsdp1())  # type: ignore[arg-type]
    callback.close()
