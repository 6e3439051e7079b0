"""Is each option of a push sent or refused, and never dropped?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import reserved_port
from weighbridge import TrainerClient
from weighbridge.integrations.torch import WeighbridgeWriter

MISSPELT: Any = {"candiate": True}


@pytest.fixture
def nobody() -> str:
    """An address without a server: a call to it fails with another error."""
    return f"127.0.0.1:{reserved_port()}"


@pytest.mark.parametrize(
    "push",
    [
        lambda trainer, **said: trainer.push("a/b", {}, step=1, rank=0, world_size=1, **said),
        lambda trainer, **said: trainer.push_state_dict("a/b", {}, step=1, **said),
        lambda trainer, **said: trainer.push_folder("a/b", Path("nowhere"), **said),
        lambda trainer, **said: trainer.import_folder("a/b", Path("nowhere"), **said),
    ],
)
def test_a_misspelt_option_is_refused_before_anything_is_asked(nobody: str, push: Callable[..., Any]) -> None:
    with (
        TrainerClient(nobody, retry_seconds=0) as trainer,
        pytest.raises(TypeError, match=r"'candiate'; did you mean candidate\?"),
    ):
        push(trainer, **MISSPELT)


def test_who_cannot_give_the_seal_later_cannot_hold_it(nobody: str) -> None:
    with TrainerClient(nobody, retry_seconds=0) as trainer:
        for push in (trainer.push, trainer.push_state_dict, trainer.import_folder):
            with pytest.raises(TypeError, match="hold_seal"):
                push("a/b", {}, step=1, hold_seal=True)  # type: ignore[operator]


def test_a_checkpoint_writer_refuses_it_when_it_is_made(nobody: str) -> None:
    with pytest.raises(TypeError, match="candidate"):
        WeighbridgeWriter("a/b", nobody, **MISSPELT)
