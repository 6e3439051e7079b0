"""Do signatures lie beside their version, each once, and go with it and not before?"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.support.raw_clients import tiny_folder
from tests.support.services import running_service
from weighbridge import Signature, TrainerClient
from weighbridge.errors import ResourceExhausted
from weighbridge_service.fsck.repair import check_store
from weighbridge_storage.documents.names import ModelName, signatures_prefix
from weighbridge_storage.stores.objects import ObjectStore
from weighbridge_storage.versions.signatures import (
    MOST_OF_ONE,
    MOST_SIGNATURES,
    read_signatures,
    signature_ids,
    write_signature,
)

NAME = ModelName("acme", "smol")
PREFIX = "models/acme/smol/signatures/000000000017/"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_each_signature_is_an_object_of_its_own_under_its_digest(store: ObjectStore) -> None:
    assert read_signatures(store, NAME, 17) == ()
    for content in (b"one", b"two", b"one"):
        assert write_signature(store, NAME, 17, content) == digest(content)
    assert sorted(store.list(PREFIX)) == sorted(f"{PREFIX}{digest(each)}.sig" for each in (b"one", b"two"))
    found = read_signatures(store, NAME, 17)
    assert {*found} == {Signature(digest(each), each) for each in (b"one", b"two")}
    assert read_signatures(store, NAME, 1) == ()
    assert list(store.list("models/acme/smol/versions/")) == [], "nothing is put into the version's folder"


def test_what_is_not_what_its_name_says_counts_as_none(store: ObjectStore) -> None:
    kept = write_signature(store, NAME, 17, b"kept")
    damaged = write_signature(store, NAME, 17, b"damaged")
    store.put(f"{PREFIX}{damaged}.sig", b"other", mode="overwrite")
    store.put(f"{PREFIX}README", b"by hand", mode="overwrite")
    store.put(f"{PREFIX}note.sig", b"by hand", mode="overwrite")
    assert read_signatures(store, NAME, 17) == (Signature(kept, b"kept"),)
    write_signature(store, NAME, 17, b"damaged")
    assert len(read_signatures(store, NAME, 17)) == 2, "putting it again mends it"


def test_a_version_has_so_many_signatures_and_no_more(store: ObjectStore) -> None:
    for number in range(MOST_SIGNATURES):
        write_signature(store, NAME, 17, b"%d" % number)
    with pytest.raises(ResourceExhausted, match="16 signatures"):
        write_signature(store, NAME, 17, b"one more")
    assert write_signature(store, NAME, 17, b"0") == digest(b"0"), "one that is there is no further one"
    assert len(signature_ids(store, NAME, 17)) == MOST_SIGNATURES


def test_one_identity_leaves_places_for_the_signatures_of_others(store: ObjectStore) -> None:
    for number in range(MOST_OF_ONE):
        write_signature(store, NAME, 17, b"%d of ann" % number, "ann")
    with pytest.raises(ResourceExhausted, match="ann has added 4 signatures"):
        write_signature(store, NAME, 17, b"one more", "ann")
    write_signature(store, NAME, 17, b"of bob", "bob")
    assert write_signature(store, NAME, 17, b"of bob", "ann") == digest(b"of bob"), "it is there already"
    assert write_signature(store, NAME, 17, b"0 of ann", "ann") == digest(b"0 of ann")
    assert len(read_signatures(store, NAME, 17)) == MOST_OF_ONE + 1
    write_signature(store, NAME, 18, b"one more", "ann")
    assert len(read_signatures(store, NAME, 18)) == 1, "each version has places of its own"


def test_signatures_go_with_their_version_and_fsck_knows_them(tmp_path: Path) -> None:
    with running_service(tmp_path / "store", grace_seconds=1.0, collect_every=0) as running:
        store = running.service.catalog.store
        with TrainerClient(running.address) as trainer:
            for step in (1, 2):
                trainer.import_folder(str(NAME), tiny_folder(tmp_path / f"hf{step}").folder, step=step).wait(timeout=60)
            for number in (1, 2):
                write_signature(store, NAME, number, b"a signature", "ann")
            assert [checked for model in check_store(store) for checked in model.findings] == []
            trainer.collect(str(NAME))
            assert len(signature_ids(store, NAME, 1)) == 1, "of a version that is kept"
            trainer.delete_version(str(NAME), 1)
            trainer.collect(str(NAME))
            assert len(signature_ids(store, NAME, 1)) == 1, "of one that may still be read"
            while trainer.collect(str(NAME)).waiting:
                pass
            assert signature_ids(store, NAME, 1) == []
            assert len(signature_ids(store, NAME, 2)) == 1
            # one that comes late, when there is no version any more
            write_signature(store, NAME, 1, b"late")
            assert [checked for model in check_store(store) for checked in model.findings] == []
            assert [each.number for each in trainer.collect(str(NAME)).swept] == [1]
            assert list(store.list(signatures_prefix(NAME, 1))) == []
