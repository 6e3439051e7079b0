"""Are AReaL's actors told of the service by their environment, and is what they cannot work with refused at the
start?
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weighbridge import InvalidArgument
from weighbridge.integrations.areal.settings import ActorSettings


def config(**fields: Any) -> SimpleNamespace:
    """Those fields of AReaL's ``PPOActorConfig`` that are read."""
    said = {"experiment_name": "gsm8k", "trial_name": "t1", "path": "/models/q", "weight_update_mode": "disk"}
    return SimpleNamespace(**said | fields)


def test_settings_are_those_of_the_environment_and_go_on_to_workers(tmp_path: Path) -> None:
    said = {"WEIGHBRIDGE_MODEL": "acme/policy", "WEIGHBRIDGE_SERVER": "10.0.0.1:50051"}
    settings = ActorSettings.of(config(path=str(tmp_path)), said)
    assert (settings.model, settings.server, settings.run) == ("acme/policy", "10.0.0.1:50051", "gsm8k/t1")
    assert settings.folder() == tmp_path
    worker = {"WEIGHBRIDGE_SERVER": "here:50051"}
    settings.hand_on(worker)
    assert worker == {
        "WEIGHBRIDGE_MODEL": "acme/policy",
        "WEIGHBRIDGE_SERVER": "here:50051",
        "WEIGHBRIDGE_TIMEOUT_SECONDS": "1500",
    }


def test_a_model_that_is_not_named_and_updates_by_nccl_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="WEIGHBRIDGE_MODEL"):
        ActorSettings.of(config(), {})
    with pytest.raises(InvalidArgument, match="wait for NCCL"):
        ActorSettings.of(config(weight_update_mode="xccl"), {"WEIGHBRIDGE_MODEL": "acme/policy"})


@pytest.mark.parametrize("said", ["soon", "0", "-1", "nan", "inf", "7200"])
def test_a_timeout_that_ranks_would_not_live_to_see_is_refused(said: str) -> None:
    given = {"WEIGHBRIDGE_MODEL": "acme/policy", "WEIGHBRIDGE_TIMEOUT_SECONDS": said}
    with pytest.raises(InvalidArgument, match="WEIGHBRIDGE_TIMEOUT_SECONDS"):
        ActorSettings.of(config(), given)
    assert ActorSettings.of(config(), given | {"WEIGHBRIDGE_TIMEOUT_SECONDS": "60"}).timeout_seconds == 60.0
