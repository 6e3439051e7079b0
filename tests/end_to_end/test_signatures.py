"""Does the stock model_signing accept every folder of a signed version, and nothing else?"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from tests.support.identities import identity, policy_file
from tests.support.raw_clients import tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.signing import (
    KeyFiles,
    SigningAuthority,
    model_signing,
    new_key,
    signature_of,
    stock_verify,
)
from weighbridge import Client, Credentials, EngineClient, Signatures, Signer, TrainerClient, Trusted
from weighbridge._cli import commands
from weighbridge._clients.client import manifest_of
from weighbridge._signing.bundle import Bundle
from weighbridge._signing.signer import sign
from weighbridge._signing.statement import Statement
from weighbridge.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from weighbridge.v1 import model_service_pb2, model_service_pb2_grpc
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.server import HttpServer
from weighbridge_storage.documents.names import ModelName, signatures_prefix, version_prefix

MODEL = "acme/smol"
VERSION = f"{MODEL}@1"


@dataclass
class Signing:
    """A service with versions of two models, of which the first is signed, and what it takes to sign."""

    running: RunningService
    client: EngineClient
    web: TestClient
    keys: KeyFiles
    other: KeyFiles
    authority: SigningAuthority
    folder: Path

    def run(self, *line: str | Path, code: int = 0) -> str:
        """Run a command of weighbridge; its output."""
        done = CliRunner().invoke(commands, [*map(str, line), "--server", self.running.address])
        assert done.exit_code == code, done.output
        return done.output

    def stored(self, model: str = MODEL, number: int = 1) -> Path:
        """A version's folder in the store."""
        return Path(self.running.service.config.store) / version_prefix(ModelName.parse(model), number)

    def signatures(self, number: int = 1) -> list[Path]:
        """Signatures in the store."""
        folder = Path(self.running.service.config.store) / signatures_prefix(ModelName.parse(MODEL), number)
        return sorted(folder.glob("*")) if folder.exists() else []


@pytest.fixture(scope="module")
def signing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signing]:
    folder = tmp_path_factory.mktemp("signing")
    source = tiny_folder(folder / "hf")
    for name in (
        "1_Pooling/config.json",
        "config/more.json",
    ):  # the order of paths is not that of their texts
        (source.folder / name).parent.mkdir()
        (source.folder / name).write_text("{}")
    with running_service(folder / "store") as running, EngineClient(running.address) as client:
        with TrainerClient(running.address) as trainer:
            trainer.import_folder(MODEL, source.folder, step=1).wait(timeout=60)
            for step in (2, 3, 4):
                trainer.push_folder(MODEL, source.folder, step=step).wait(timeout=60)
            trainer.import_folder("acme/same", source.folder, step=1).wait(timeout=60)
        exports = Exports(running.service)
        web = TestClient(create_app(running.service, exports, running.metrics, running.health))
        keys, other = new_key(folder, "release"), new_key(folder, "other")
        yield Signing(running, client, web, keys, other, SigningAuthority(folder / "authority"), folder)
        exports.close()


@pytest.fixture(scope="module")
def signed(signing: Signing) -> Signing:
    """The first version is signed."""
    said = signing.run("sign", VERSION, "--key", signing.keys.key)
    assert f"{VERSION}: signed by key" in said
    assert "the service has read" in said, "the manifest of a push without --sha256 lacks that of weights"
    return signing


# --- the stock command line


def test_the_stock_verifier_accepts_a_versions_folder_in_the_store(signed: Signing) -> None:
    (signature,) = signed.signatures()
    assert stock_verify(signed.stored(), signature, signed.keys.public) == (True, "Verification succeeded\n")
    assert not stock_verify(signed.stored(), signature, signed.other.public)[0]
    assert not stock_verify(signed.stored("acme/same"), signature, signed.keys.public)[0]
    assert not stock_verify(signed.stored(number=2), signature, signed.keys.public)[0]


@pytest.mark.parametrize("command", ["export", "pull"])
def test_the_stock_verifier_accepts_an_exported_folder(signed: Signing, tmp_path: Path, command: str) -> None:
    out = tmp_path / "out"
    signed.run(command, VERSION, *([out] if command == "export" else ["--out", out]))
    assert stock_verify(out, signature_of(out), signed.keys.public)[0]
    assert (out / "weighbridge.json").read_bytes() == (signed.stored() / "weighbridge.json").read_bytes()


def test_the_stock_verifier_accepts_a_folder_that_was_exported_over_http(signed: Signing) -> None:
    job = signed.web.post("/v1/exports", json={"model": MODEL, "version": 1, "folder": "signed"}).json()
    with signed.web.stream("GET", f"/v1/exports/{job['id']}/events") as events:
        assert "event: end" in "".join(events.iter_text())
    out = Path(job["folder"])
    assert stock_verify(out, signature_of(out), signed.keys.public)[0]


def test_the_stock_verifier_accepts_a_folder_that_the_hub_client_has_downloaded(
    signed: Signing, tmp_path: Path
) -> None:
    server = HttpServer("127.0.0.1:0", 64)
    server.start(signed.web.app)
    try:
        url = f"http://{server.address}"
        before = httpx.get(f"{url}/api/models/{MODEL}/revision/1").json()
        out = tmp_path / "hub"
        script = (
            "import sys; from huggingface_hub import snapshot_download as load; load(sys.argv[1], "
            "revision='1', local_dir=sys.argv[2])"
        )
        subprocess.run(
            [sys.executable, "-c", script, MODEL, str(out)],
            env={
                **os.environ,
                "HF_ENDPOINT": url,
                "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            },
            check=True,
            timeout=200,
        )
        signed.run("signatures", VERSION, "--out", out / "signatures")
        assert stock_verify(out, signature_of(out), signed.keys.public)[0]
        # a signature changes nothing for Hugging Face's clients
        signed.run("sign", VERSION, "--key", signed.other.key)
        assert httpx.get(f"{url}/api/models/{MODEL}/revision/1").json() == before
        assert stock_verify(out, signature_of(out), signed.keys.public)[0]
    finally:
        server.stop()


def test_the_stock_verifier_accepts_a_certificate(signing: Signing, tmp_path: Path) -> None:
    issued = signing.authority.issue("ci")
    said = json.loads(
        signing.run("sign", f"{MODEL}@2", "--key", issued.key, "--certificate", issued.certificate, "--json")
    )
    assert (said["method"], said["added"], said["step"]) == ("certificate", True, 2)
    out = tmp_path / "out"
    signing.run("export", f"{MODEL}@2", out)
    line = ("verify", "certificate", out, "--signature", signature_of(out), "--certificate_chain")
    assert model_signing(*line, signing.authority.ca)[0] == 0
    assert model_signing(*line, SigningAuthority(tmp_path).ca)[0] == 1


@pytest.mark.parametrize("change", ["weights", "config", "manifest", "extra", "missing"])
def test_the_stock_verifier_refuses_a_folder_that_was_changed(signed: Signing, tmp_path: Path, change: str) -> None:
    out = tmp_path / "out"
    signed.client.export(MODEL, 1, out)
    match change:
        case "weights":
            with (out / "model.safetensors").open("r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x7f")
        case "config":
            (out / "config.json").write_bytes((out / "config.json").read_bytes() + b" ")
        case "manifest":
            text = (out / "weighbridge.json").read_bytes()
            (out / "weighbridge.json").write_bytes(text.replace(b'"step":1', b'"step":9'))
        case "extra":
            (out / "modeling_evil.py").write_text("print()")
        case "missing":
            (out / "config.json").unlink()
    accepted, said = stock_verify(out, next((out / "signatures").iterdir()), signed.keys.public)
    assert not accepted
    assert "Signature mismatch" in said or "Verification failed" in said


def test_several_keys_sign_one_version(signing: Signing, tmp_path: Path) -> None:
    for keys in (signing.keys, signing.other):
        signing.run("sign", f"{MODEL}@3", "--key", keys.key)
    out = tmp_path / "out"
    signing.client.export(MODEL, 3, out)
    found = {Bundle.read(path.read_bytes()).signer: path for path in (out / "signatures").iterdir()}
    assert len(found) == 2
    for keys in (signing.keys, signing.other):
        signer = hashlib.sha256(keys.public.read_bytes()).hexdigest()
        assert stock_verify(out, found[signer], keys.public)[0]


def test_a_signature_that_the_stock_signer_has_made_of_a_download_is_taken(signing: Signing, tmp_path: Path) -> None:
    out = tmp_path / "download"
    shutil.copytree(signing.stored(number=4), out, ignore=shutil.ignore_patterns("*.blake3"))
    made = tmp_path / "made.sig"
    code, refusal = model_signing("sign", "key", out, "--signature", made, "--private_key", signing.keys.key)
    assert code == 0, refusal
    said = json.loads(signing.run("sign", f"{MODEL}@4", "--signature", made, "--json"))
    assert said["added"]
    assert Signatures(signing.client).check(MODEL, 4, required=[Trusted.of_file(signing.keys.public)])
    with pytest.raises(InvalidArgument, match="not for acme/smol@1"):
        Signatures(signing.client).add(MODEL, 1, content=made.read_bytes())


def test_an_export_in_another_form_says_that_it_is_not_signed(signed: Signing, tmp_path: Path) -> None:
    for name, options in (("bf16", ["--dtype", "bf16"]), ("small", ["--max-shard-size", "50kB"])):
        said = signed.run("export", VERSION, tmp_path / name, *options)
        assert "these are not the files that were signed" in said
        assert not (tmp_path / name / "signatures").exists()
        assert not (tmp_path / name / "weighbridge.json").exists()


# --- weighbridge's own commands


def test_a_signed_version_is_verified_and_others_are_not(signed: Signing) -> None:
    line = ("verify", VERSION, "--signature", "--key")
    assert "signed by key" in signed.run(*line, signed.keys.public)
    found = json.loads(signed.run(*line, signed.keys.public, "--json"))
    assert found["ok"]
    assert found["signed"][0]["id"] in [path.stem for path in signed.signatures()]
    stranger = new_key(signed.folder, "stranger")
    error = json.loads(signed.run(*line, stranger.public, "--json", code=1))["error"]
    assert error["reason"] == "FAILED_PRECONDITION"
    assert "is not signed as" in error["message"]
    assert "which is not in" in error["details"][0]
    assert "it has no signature" in signed.run("verify", "acme/same@1", "--signature", "--key", stranger.public, code=1)
    signed.run("verify", VERSION, "--signature", code=2)
    signed.run("verify", VERSION, "--key", stranger.public, code=2)


def test_a_certificate_is_verified_by_its_authority(signing: Signing, tmp_path: Path) -> None:
    issued = signing.authority.issue("release")
    signing.run("sign", f"{MODEL}@3", "--key", issued.key, "--certificate", issued.certificate)
    line = ("verify", f"{MODEL}@3", "--signature", "--certificate-chain")
    assert "signed by certificate CN=release" in signing.run(*line, signing.authority.ca)
    signing.run(*line, SigningAuthority(tmp_path).ca, code=1)


def test_signing_again_adds_nothing(signed: Signing) -> None:
    before = signed.signatures()
    said = json.loads(signed.run("sign", VERSION, "--key", signed.keys.key, "--json"))
    assert not said["added"]
    assert signed.signatures() == before
    assert said["id"] in signed.run("signatures", VERSION)


def test_the_password_of_a_key_comes_from_the_environment(signing: Signing, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = new_key(signing.folder, "encrypted", password="open sesame")
    assert "is encrypted" in signing.run("sign", VERSION, "--key", keys.key, code=1)
    monkeypatch.setenv("WEIGHBRIDGE_KEY_PASSWORD", "open barley")
    assert "the password is not that of the key" in signing.run("sign", VERSION, "--key", keys.key, code=1)
    monkeypatch.setenv("WEIGHBRIDGE_KEY_PASSWORD", "open sesame")
    signing.run("sign", VERSION, "--key", keys.key)
    assert Signatures(signing.client).check(MODEL, 1, required=[Trusted.of_file(keys.public)])


def test_what_is_not_there_is_not_signed(signing: Signing, tmp_path: Path) -> None:
    signer = Signer(signing.keys.key)
    with pytest.raises(NotFound):
        Signatures(signing.client).sign(MODEL, 99, signer=signer)
    with pytest.raises(NotFound):
        Signatures(signing.client).sign("acme/none", 1, signer=signer)
    for line in (
        ["--key", signing.keys.key, "--signature", signing.keys.key],
        [],
        ["--certificate", signing.keys.key],
    ):
        signing.run("sign", VERSION, *line, code=2)


def test_damaged_weights_are_not_signed_and_not_verified(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "hf")
    keys = new_key(tmp_path)
    required = [Trusted.of_file(keys.public)]
    with running_service(tmp_path / "store") as running, TrainerClient(running.address) as client:
        for step in (1, 2):
            client.import_folder(MODEL, source.folder, step=step).wait(timeout=60)
        Signatures(client).sign(MODEL, 1, signer=Signer(keys.key))
        paths = [
            tmp_path / "store" / version_prefix(ModelName.parse(MODEL), number) / "model.safetensors"
            for number in (1, 2)
        ]
        damaged = bytearray(paths[0].read_bytes())
        damaged[-1] ^= 1
        for path in paths:  # one file, perhaps: the second version has the same weights
            path.write_bytes(damaged)
        with pytest.raises(DataLoss, match="is damaged, and was not signed") as refused:
            Signatures(client).sign(MODEL, 2, signer=Signer(keys.key))
        assert "model.safetensors does not agree" in str(refused.value)
        verified, _ = Signatures(client).verify(MODEL, 1, required=required)
        assert any("a different SHA-256 than in the signature by key" in problem for problem in verified.problems)


def test_with_sha256_in_the_manifest_signing_reads_no_weights(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "hf")
    keys = new_key(tmp_path)
    with (
        running_service(tmp_path / "store", sha256=True) as running,
        TrainerClient(running.address) as client,
    ):
        client.import_folder(MODEL, source.folder, step=1).wait(timeout=60)
        folder = tmp_path / "store" / version_prefix(ModelName.parse(MODEL), 1)
        listed = json.loads((folder / "weighbridge.json").read_text())["parts"]["weights"]["files"]
        for name, entry in listed.items():
            assert entry["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
        done = Signatures(client).sign(MODEL, 1, signer=Signer(keys.key))
        assert (done.added, done.bytes_read) == (True, 0)
        (signature,) = client.signatures(MODEL, 1)
        (tmp_path / "one.sig").write_bytes(signature.content)
        assert stock_verify(folder, tmp_path / "one.sig", keys.public)[0]


# --- what a service takes


def about(client: Client, number: int, **changes: str) -> Statement:
    """A statement about a version, with other digests of some files."""
    found = manifest_of(client, MODEL, number)
    statement = Statement.of_version(found, dict.fromkeys(found.files, "0" * 64))
    return Statement(statement.subject, {**statement.sha256, **changes}, statement.passed_over)


def test_a_service_takes_no_signature_that_is_not_about_the_version(signing: Signing) -> None:
    signer = Signer(signing.keys.key)
    before = signing.signatures(2)
    good = about(signing.client, 2)
    wrong = [
        sign(signer, about(signing.client, 3)),
        sign(signer, about(signing.client, 2, **{"extra.py": "0" * 64})),
        sign(signer, about(signing.client, 2, **{"config.json": "0" * 64})),
        sign(signer, about(signing.client, 2, **{"weighbridge.json": "0" * 64})),
        sign(signer, Statement(good.subject, good.sha256, ("model.safetensors",))),
        sign(signer, good)[:-20],
        b"garbage",
        b"",
    ]
    for content in wrong:
        with pytest.raises(InvalidArgument):
            Signatures(signing.client).add(MODEL, 2, content=content)
        answer = signing.web.post(f"/v1/models/{MODEL}/versions/2/signatures", json={"content": content.decode()})
        assert answer.status_code == 400, answer.text
    assert signing.signatures(2) == before


def test_a_huge_signature_is_refused(signing: Signing) -> None:
    content = b" " * 1_500_000
    with grpc.insecure_channel(signing.running.address) as channel:
        stub = model_service_pb2_grpc.ModelServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="1500000 bytes, more than 1000000"):
            stub.AddSignature(model_service_pb2.AddSignatureRequest(model=MODEL, number=1, content=content))
    answer = signing.web.post(f"/v1/models/{MODEL}/versions/1/signatures", json={"content": content.decode()})
    assert answer.status_code in (400, 413), answer.text


def test_a_version_has_a_limited_number_of_signatures(signing: Signing, tmp_path: Path) -> None:
    number = 4
    while len(signing.signatures(number)) < 16:
        keys = new_key(tmp_path, f"key-{len(signing.signatures(number))}")
        Signatures(signing.client).sign(MODEL, number, signer=Signer(keys.key))
    with pytest.raises(ResourceExhausted, match="has 16 signatures"):
        Signatures(signing.client).sign(MODEL, number, signer=Signer(new_key(tmp_path, "one more").key))


def test_a_version_has_no_more_signatures_if_many_are_added_at_one_time(tmp_path: Path) -> None:
    with running_service(tmp_path / "store") as running, TrainerClient(running.address) as client:
        client.import_folder(MODEL, tiny_folder(tmp_path / "hf").folder, step=1).wait(timeout=60)
        content = sign(Signer(new_key(tmp_path).key), about(client, 1))

        def add(nth: int) -> str:
            try:
                # the same JSON, by another digest
                running.service.signatures.add(MODEL, 1, content + b" " * nth)
            except ResourceExhausted as error:
                return error.reason
            return "added"

        with ThreadPoolExecutor(32) as pool:
            outcomes = Counter(pool.map(add, range(64)))
        assert outcomes == {"added": 16, "RESOURCE_EXHAUSTED": 48}
        assert len(client.signatures(MODEL, 1)) == 16


def test_signatures_are_had_over_http(signed: Signing, tmp_path: Path) -> None:
    url = f"/v1/models/{MODEL}/versions/1/signatures"
    listed: dict[str, Any] = signed.web.get(url).json()
    assert {each["id"] for each in listed["signatures"]} == {path.stem for path in signed.signatures()}
    one = listed["signatures"][0]["id"]
    answer = signed.web.get(f"{url}/{one}")
    assert answer.headers["content-type"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert hashlib.sha256(answer.content).hexdigest() == one
    assert signed.web.get(f"{url}/{'0' * 64}").status_code == 404
    added = signed.web.post(url, json={"content": answer.text})
    assert added.json() == listed["signatures"][0]


def test_a_damaged_signature_counts_as_none(tmp_path: Path) -> None:
    keys = new_key(tmp_path)
    with running_service(tmp_path / "store") as running, TrainerClient(running.address) as client:
        client.import_folder(MODEL, tiny_folder(tmp_path / "hf").folder, step=1).wait(timeout=60)
        Signatures(client).sign(MODEL, 1, signer=Signer(keys.key))
        (path,) = (tmp_path / "store" / signatures_prefix(ModelName.parse(MODEL), 1)).iterdir()
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(FailedPrecondition, match="it has no signature"):
            Signatures(client).check(MODEL, 1, required=[Trusted.of_file(keys.public)])


def test_a_signature_of_an_unknown_kind_is_listed_beside_the_others_and_hinders_none(tmp_path: Path) -> None:
    keys = new_key(tmp_path)
    with running_service(tmp_path / "store") as running, TrainerClient(running.address) as client:
        client.import_folder(MODEL, tiny_folder(tmp_path / "hf").folder, step=1).wait(timeout=60)
        unknown = b'{"mediaType": "application/vnd.dev.sigstore.bundle.v9+json"}'
        digest = hashlib.sha256(unknown).hexdigest()
        folder = tmp_path / "store" / signatures_prefix(ModelName.parse(MODEL), 1)
        folder.mkdir(parents=True)
        (folder / f"{digest}.sig").write_bytes(unknown)
        made = Signatures(client).sign(MODEL, 1, signer=Signer(keys.key))
        assert Signatures(client).check(MODEL, 1, required=[Trusted.of_file(keys.public)])
        expected = sorted([(digest, "unknown", ""), (made.id, "key", made.signer)])
        exports = Exports(running.service)
        web = TestClient(create_app(running.service, exports, running.metrics, running.health))
        listed = web.get(f"/v1/models/{MODEL}/versions/1/signatures").json()["signatures"]
        exports.close()
        assert [(each["id"], each["method"], each["signer"]) for each in listed] == expected
        told = CliRunner().invoke(commands, ["signatures", VERSION, "--server", running.address, "--json"])
        assert [(each["id"], each["method"], each["signer"]) for each in json.loads(told.stdout)] == expected


def test_only_who_may_sign_puts_signatures_to_a_version(tmp_path: Path) -> None:
    keys = new_key(tmp_path)
    policy = policy_file(
        tmp_path,
        identity("trainer", ["push:acme/*"], token="of-trainer"),
        identity("engine", ["pull:acme/*"], token="of-engine"),
        identity("releases", ["sign:acme/smol", "pull:acme/smol"], token="of-releases"),
        identity("others", ["sign:else/*", "pull:acme/*"], token="of-others"),
    )
    with running_service(tmp_path / "store", policy=policy) as running:
        with TrainerClient(running.address, credentials=Credentials(token="of-trainer")) as trainer:
            trainer.import_folder(MODEL, tiny_folder(tmp_path / "hf").folder, step=1).wait(timeout=60)
        with Client(running.address, credentials=Credentials(token="of-releases")) as client:
            Signatures(client).sign(MODEL, 1, signer=Signer(keys.key))
            (signature,) = client.signatures(MODEL, 1)
        for who in ("trainer", "engine", "others"):
            with (
                Client(running.address, credentials=Credentials(token=f"of-{who}")) as client,
                pytest.raises(PermissionDenied, match="sign acme/smol"),
            ):
                Signatures(client).add(MODEL, 1, content=signature.content)
        with Client(running.address, credentials=Credentials(token="of-engine")) as engine:
            assert Signatures(engine).check(MODEL, 1, required=[Trusted.of_file(keys.public)])
        # the signature covers the name of the pusher
        manifest = (tmp_path / "store" / version_prefix(ModelName.parse(MODEL), 1) / "weighbridge.json").read_text()
        assert json.loads(manifest)["provenance"]["by"] == "trainer"


def test_a_client_without_what_signs_says_what_to_install(signed: Signing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    monkeypatch.delitem(sys.modules, "weighbridge._signing.library", raising=False)
    monkeypatch.delattr("weighbridge._signing.library", raising=False)
    said = signed.run("verify", VERSION, "--signature", "--key", signed.keys.public, code=1)
    assert "pip install 'weighbridge[signing]'" in said
    assert len(signed.client.signatures(MODEL, 1)) > 0, "nothing is verified to list them"
