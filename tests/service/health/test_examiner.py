"""Does who may only observe make the store take forty writes once in a while, and not with each question?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.services import running_service
from weighbridge._core.checks import Check
from weighbridge_service.health.checks import STORE_CONDITIONS, StoreChecks
from weighbridge_service.health.doctor import Examiner


def test_conditions_of_a_store_are_asked_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    conditions = StoreChecks.conditions

    def counted(checks: StoreChecks) -> Check:
        asked.append(checks)
        return conditions(checks)

    monkeypatch.setattr(StoreChecks, "conditions", counted)
    now = [0.0]
    with running_service(tmp_path / "store") as running:
        examiner = Examiner(running.service, lambda: now[0])
        for now[0] in (0.0, 1.0, 9.9, 10.0, 11.0):
            names = [each.name for each in examiner.checks()]
            assert names.count(STORE_CONDITIONS) == 1
    assert len(asked) == 2
