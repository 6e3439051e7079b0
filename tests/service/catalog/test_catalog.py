"""Does ``live`` resolve correctly while a process knows versions that the store does not have yet?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.catalogs import SMOL, CountingStore, catalog_with_models, publish_one, snapshot
from tests.support.images import acquire
from weighbridge._core.resources import VersionState
from weighbridge.errors import Unavailable
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.catalog.gate import Gates
from weighbridge_service.catalog.snapshots import Snapshots, VersionSnapshot
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head_changes import register
from weighbridge_storage.memory.image_pool import ImagePool


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CountingStore]:
    opened = CountingStore(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def catalog(store: CountingStore) -> Catalog:
    return catalog_with_models(store)


def test_a_version_that_fails_while_live_is_looked_up_is_not_named_by_it(store: CountingStore) -> None:
    class Failing(Snapshots):
        """Snapshots of a version that fails right after a reader has seen it ready."""

        def of_model(self, name: ModelName) -> dict[int, VersionSnapshot]:
            found = super().of_model(name)
            self.show(name, snapshot(2, VersionState.FAILED), changed=False)
            return found

    catalog = Catalog(store)
    catalog.snapshots = Failing(catalog.changes)
    catalog.heads.update(SMOL, lambda head: (register(head, "f", {}), None), create=True)
    publish_one(catalog)
    catalog.snapshots.show(SMOL, snapshot(2, VersionState.READY))
    assert catalog.resolve(SMOL, "live").number == 2
    assert catalog.resolve(SMOL, "live").number == 1


def test_live_does_not_go_back_when_the_store_is_away(catalog: Catalog, store: CountingStore) -> None:
    image = acquire(ImagePool(1 << 20), {"a": 1})
    mine = publish_one(catalog)
    catalog.snapshots.show(SMOL, snapshot(mine, VersionState.DURABLE, image=image))
    store.away = True
    assert catalog.resolve(SMOL, "live").number == mine
    store.away = False
    newer = publish_one(catalog)  # by another replica
    assert catalog.resolve(SMOL, "live").number == newer
    store.away = True
    with pytest.raises(Unavailable):
        catalog.resolve(SMOL, "live")
    assert catalog.resolve(SMOL, str(mine)).number == mine


def test_a_version_in_history_is_durable_also_before_its_session_hears_that(catalog: Catalog) -> None:
    number = publish_one(catalog)
    expected = catalog.resolve(SMOL, "latest")
    assert expected.state is VersionState.DURABLE
    catalog.snapshots.show(SMOL, snapshot(number, VersionState.VERIFIED, ready_time_ms=5, verified_time_ms=6))
    assert catalog.resolve(SMOL, "latest") == expected


def test_the_refs_of_a_model_are_from_one_read_of_its_head(catalog: Catalog, store: CountingStore) -> None:
    number = publish_one(catalog)
    gates = Gates(catalog, lambda *_: None, lambda _: None)
    before = store.reads
    found = gates.refs(str(SMOL))
    assert store.reads == before + 1
    assert (found.refs, found.protections, found.requests) == ({"latest": number, "live": number}, (), ())
