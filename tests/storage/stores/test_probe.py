"""Does the start-up probe tell stores that keep conditions from those that do not, and leave nothing behind?"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.s3_server import rclone
from weighbridge.errors import Conflict, FailedPrecondition, NotFound
from weighbridge_service.runtime.config import ServiceConfig
from weighbridge_service.service import Weighbridge
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import Buffer, IfMatch, ObjectStore, PutMode
from weighbridge_storage.stores.probe import probe


def test_a_store_that_keeps_conditions_is_accepted_and_left_as_it_was(store: ObjectStore) -> None:
    store.put("models/x/y/head.json", b"{}", mode="create")
    probe(store)
    assert set(store.list("")) == {"models/x/y/head.json"}


@pytest.mark.process
def test_rclone_is_refused_and_so_the_service_does_not_start(aws_environment: None, tmp_path: Path) -> None:
    with rclone(tmp_path) as server:
        config = ServiceConfig(server.location(), scratch=tmp_path / "scratch", memory_budget=1 << 20)
        with pytest.raises(FailedPrecondition, match="does not honor conditional writes") as caught:
            Weighbridge(config, 1)
        assert "SeaweedFS" in caught.value.fix
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]


class Careless(LocalStore):
    """Keeps some conditions, in some way."""

    def __init__(self, root: Path, ignores: str) -> None:
        super().__init__(root)
        self.ignores = ignores

    def put(self, key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
        kind = mode if isinstance(mode, str) else "if-match"
        if self.ignores == kind:
            return super().put(key, data, mode="overwrite")
        if self.ignores == "races" and mode != "overwrite":
            self.check_first(key, mode)
            time.sleep(0.01)
            return super().put(key, data, mode="overwrite")
        return super().put(key, data, mode=mode)

    def check_first(self, key: str, mode: PutMode) -> None:
        try:
            _, found = self.get(key)
        except NotFound:
            found = ""
        if found != (mode.etag if isinstance(mode, IfMatch) else ""):
            raise Conflict("it is not as it was")


@pytest.mark.parametrize("ignores", ["create", "if-match", "races"])
def test_a_store_that_ignores_a_condition_or_looks_before_it_writes_is_refused(tmp_path: Path, ignores: str) -> None:
    store = Careless(tmp_path / "store", ignores)
    with pytest.raises(FailedPrecondition, match="does not honor conditional writes"):
        probe(store)
    assert list(store.list("")) == []
    store.close()
