"""Does an agent that requires signatures fetch nothing of an unsigned version, give the reason, and apply it once it is
signed?
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.sdk.follow.test_mistakes import MODEL, Recording
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.signing import SigningAuthority, new_key
from weighbridge import EngineClient, Signatures, Signer, TrainerClient, Trusted
from weighbridge._cli import commands
from weighbridge._clients.client import manifest_of
from weighbridge._signing.signer import sign
from weighbridge._signing.statement import Statement
from weighbridge.follow.agent import Followed, Follower
from weighbridge.follow.engines import Serving
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.versions.signatures import write_signature


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf")


@pytest.fixture
def running(tmp_path: Path, source: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path / "store") as service:
        with TrainerClient(service.address) as trainer:
            trainer.import_folder(MODEL, source.folder, step=1).wait(timeout=60)
        yield service


@pytest.fixture
def client(running: RunningService) -> Iterator[EngineClient]:
    with EngineClient(running.address) as found:
        yield found


def follow(client: EngineClient, engine: Recording, *required: Trusted) -> Iterator[Followed]:
    return Follower(client, MODEL, engine, required=required, signed_seconds=0.05).run()


def push(running: RunningService, source: TinyModel, step: int) -> None:
    with TrainerClient(running.address) as trainer:
        trainer.push_folder(MODEL, source.folder, step=step).wait(timeout=60)


def staged(engine: Recording) -> list[str]:
    """The calls to the engine that fetch or apply a version."""
    return [each for each in engine.asked if each != "connect"]


def test_an_unsigned_version_is_refused_before_it_is_staged_and_taken_once_it_is_signed(
    client: EngineClient, tmp_path: Path
) -> None:
    keys, other = new_key(tmp_path, "release"), new_key(tmp_path, "other")
    engine = Recording(Serving(None))
    steps = follow(client, engine, Trusted.of_file(keys.public))
    refused = next(steps)
    assert (refused.version, refused.serves) == (1, None)
    assert "it has no signature" in refused.error
    assert staged(engine) == []
    Signatures(client).sign(MODEL, 1, signer=Signer(other.key))
    refused = next(steps)
    assert "which is not in" in refused.error, "another reason is told of, too"
    assert staged(engine) == []
    Signatures(client).sign(MODEL, 1, signer=Signer(keys.key))
    taken = next(steps)
    assert (taken.version, taken.error) == (1, "")
    assert staged(engine) == ["prepare 1", f"apply {MODEL}@1"]


def test_all_that_are_required_must_have_signed(client: EngineClient, tmp_path: Path) -> None:
    release, authority = new_key(tmp_path / "release"), SigningAuthority(tmp_path)
    ci = authority.issue("ci")
    engine = Recording(Serving(None))
    steps = follow(client, engine, Trusted.of_file(release.public), Trusted.of_file(authority.ca))
    Signatures(client).sign(MODEL, 1, signer=Signer(release.key))
    assert "authority.pem requires" in next(steps).error
    assert staged(engine) == []
    Signatures(client).sign(MODEL, 1, signer=Signer(ci.key, certificate=ci.certificate))
    assert next(steps).error == ""


def test_a_version_that_is_never_signed_gives_way_to_one_that_is(
    client: EngineClient, running: RunningService, source: TinyModel, tmp_path: Path
) -> None:
    keys = new_key(tmp_path)
    engine = Recording(Serving(None))
    steps = follow(client, engine, Trusted.of_file(keys.public))
    assert next(steps).version == 1
    client.set_ref(MODEL, "signed", 1)  # keeps the ref `latest` of no concern
    push(running, source, 2)
    Signatures(client).sign(MODEL, 2, signer=Signer(keys.key))
    taken = next(steps)
    assert (taken.version, taken.error) == (2, "")
    assert staged(engine) == ["prepare 2", f"apply {MODEL}@2"]


@pytest.mark.parametrize("of_other", ["version", "garbage"])
def test_what_a_store_was_given_behind_the_service_does_not_count(
    client: EngineClient, running: RunningService, source: TinyModel, tmp_path: Path, of_other: str
) -> None:
    keys = new_key(tmp_path)
    push(running, source, 2)
    other = manifest_of(client, MODEL, 1)
    statement = Statement.of_version(other, dict.fromkeys(other.files, "0" * 64))
    content = sign(Signer(keys.key), statement) if of_other == "version" else b"{}"
    write_signature(running.service.catalog.store, ModelName.parse(MODEL), 2, content)
    engine = Recording(Serving(None))
    refused = next(follow(client, engine, Trusted.of_file(keys.public)))
    assert refused.version == 2
    assert (f"it is about {MODEL}@1" if of_other == "version" else "not a signature of a version") in refused.error
    assert staged(engine) == []


def test_a_signed_manifest_that_was_replaced_is_refused(
    client: EngineClient, running: RunningService, tmp_path: Path
) -> None:
    keys = new_key(tmp_path)
    Signatures(client).sign(MODEL, 1, signer=Signer(keys.key))
    text = manifest_of(client, MODEL, 1).text
    path = Path(running.service.config.store) / f"models/{MODEL}/versions/{1:012d}/weighbridge.json"
    path.write_bytes(text.replace(b'"step":1', b'"step":9'))
    engine = Recording(Serving(None))
    assert "it has a different weighbridge.json" in next(follow(client, engine, Trusted.of_file(keys.public))).error
    path.write_bytes(text.replace(b'"version":1', b'"version":2'))
    engine = Recording(Serving(None))
    refused = next(follow(client, engine, Trusted.of_file(keys.public)))
    assert f"returned the manifest of {MODEL}@2 for {MODEL}@1" in refused.error
    assert staged(engine) == []


def test_an_engine_that_has_an_unsigned_version_keeps_it_and_is_told_of(client: EngineClient, tmp_path: Path) -> None:
    engine = Recording(Serving(1, model=MODEL))
    found = next(follow(client, engine, Trusted.of_file(new_key(tmp_path).public)))
    assert (found.version, found.serves) == (1, 1)
    assert "it has no signature" in found.error
    assert staged(engine) == []


def test_without_requirements_signatures_are_not_asked_for(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(EngineClient, "signatures", lambda *_: asked.set())
    assert next(follow(client, Recording(Serving(None)))).error == ""
    assert not asked.is_set()


@pytest.mark.parametrize("content", ["private", "nothing"])
def test_the_command_refuses_a_file_of_no_public_key_before_it_does_anything(
    running: RunningService, tmp_path: Path, content: str
) -> None:
    path = new_key(tmp_path).key if content == "private" else tmp_path / "empty.pem"
    path.touch()
    line = ["follow", MODEL, "--require-signature", str(path), "--url", "http://127.0.0.1:1", "--server"]
    done = CliRunner().invoke(commands, [*line, running.address])
    assert done.exit_code == 1
    assert "holds a private key" in done.output or "holds neither a public key" in done.output
