"""Does a signature have to match the version that it names, and is anything else refused with a reason?"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge._core.manifest_text import ManifestText
from weighbridge._signing.bundle import MAX_BYTES, Bundle
from weighbridge._signing.statement import Statement
from weighbridge.errors import DataLoss, InvalidArgument

SHA = {name: hashlib.sha256(name.encode()).hexdigest() for name in "abcd"}


def manifest(**changes: Any) -> ManifestText:
    fields = {
        "model": "acme/smol",
        "version": 17,
        "step": 300,
        "run": "r1",
        "lineage": {"parent": 16},
        "metadata": {},
        "provenance": {"by": "trainer"},
        "parts": {
            "weights": {
                "files": {"model.safetensors": {"size": 10}, "config.json": {"size": 3, "sha256": SHA["a"]}},
                "tensors": {"w": {"file": "model.safetensors"}},
            }
        },
    }
    return ManifestText.read(json.dumps(fields | changes).encode())


def statement(of: ManifestText) -> Statement:
    return Statement.of_version(of, {"model.safetensors": SHA["b"]})


def bundle(
    about: Statement, *, material: Any = None, resources: Any = None, root: str | None = None, **changes: Any
) -> bytes:
    """A bundle in the format of the specification, without a valid signature."""
    payload = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": about.subject, "digest": {"sha256": about.root if root is None else root}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "ignore_paths": list(about.passed_over),
            },
            "resources": resources
            or [{"name": n, "algorithm": "sha256", "digest": d} for n, d in about.sha256.items()],
        },
    } | changes.pop("payload", {})
    fields = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": material or {"publicKey": {"hint": "ab" * 32}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(json.dumps(payload).encode()).decode(),
            "payloadType": "application/vnd.in-toto+json",
            "signatures": [{"sig": "AAAA", "keyid": ""}],
        },
    }
    return json.dumps(fields | changes).encode()


def test_a_statement_about_a_version_lists_its_files_and_its_manifest() -> None:
    version = manifest()
    found = statement(version)
    assert found.sha256 == {
        "model.safetensors": SHA["b"],
        "config.json": SHA["a"],
        "weighbridge.json": hashlib.sha256(version.text).hexdigest(),
    }
    assert found.contradictions(version) == []
    assert Bundle.read(bundle(found)).statement == found
    in_order = (found.sha256[name] for name in ("config.json", "model.safetensors", "weighbridge.json"))
    assert found.root == hashlib.sha256(b"".join(map(bytes.fromhex, in_order))).hexdigest()


def test_files_without_a_sha256_cannot_be_signed() -> None:
    with pytest.raises(InvalidArgument, match=r"no SHA-256 of model\.safetensors"):
        Statement.of_version(manifest(), {})


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (manifest(version=16), "it has a different weighbridge.json: it is about acme/smol@16"),
        (manifest(model="acme/other"), "it has a different weighbridge.json: it is about acme/other@17"),
        (manifest(step=301), "it has a different weighbridge.json"),
        (manifest(provenance={"by": "somebody"}), "it has a different weighbridge.json"),
    ],
)
def test_a_statement_about_another_version_contradicts(other: ManifestText, reason: str) -> None:
    assert statement(other).contradictions(manifest()) == [reason]


@pytest.mark.parametrize(
    ("sha256", "passed_over", "reason"),
    [
        ({"model.safetensors": None}, (), "it does not list model.safetensors"),
        ({"config.json": None, "x": SHA["c"]}, (), "it does not list config.json"),
        ({"pytorch_model.bin": SHA["c"]}, (), "it lists pytorch_model.bin, which the version does not have"),
        ({"config.json": SHA["d"]}, (), "it has a different SHA-256 of config.json"),
        ({}, ("model.safetensors",), "it ignores model.safetensors"),
        ({}, (".",), "it ignores config.json, model.safetensors, weighbridge.json"),
        ({"weighbridge.json": None}, (), "it lists no weighbridge.json"),
    ],
)
def test_a_statement_that_leaves_out_or_adds_files_contradicts(
    sha256: dict[str, str | None], passed_over: tuple[str, ...], reason: str
) -> None:
    version = manifest()
    good = statement(version)
    listed = {name: digest for name, digest in {**good.sha256, **sha256}.items() if digest is not None}
    assert Statement(good.subject, listed, passed_over).contradictions(version)[0] == reason


GOOD = statement(manifest())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a signature of a version"),
        (b"garbage", "not a signature of a version"),
        (b"[]", "not a signature of a version"),
        (b"[" * 100_000, "not a signature of a version"),
        (bundle(GOOD)[:-40], "not a signature of a version"),
        (b" " * (MAX_BYTES + 1), "1000001 bytes, more than"),
        (bundle(GOOD, mediaType="text/plain"), "its media type is 'text/plain'"),
        (bundle(GOOD, dsseEnvelope={"payloadType": "x"}), "its payload is 'x'"),
        (bundle(GOOD, material={"publicKey": {"hint": None}}), "does not identify its key"),
        (
            bundle(GOOD, material={"certificate": {"rawBytes": "AAAA"}}),
            "neither with a key nor with a certificate",
        ),
        (
            bundle(GOOD, material={"x509CertificateChain": {"certificates": []}}),
            "not a signature of a version",
        ),
        (bundle(GOOD, root=SHA["d"]), "its digest does not match the files"),
        (
            bundle(GOOD, payload={"predicateType": "https://slsa.dev/provenance/v1"}),
            "not a statement of model signing",
        ),
        (bundle(GOOD, payload={"predicate": {}}), "not a statement of model signing"),
        (
            bundle(GOOD, resources=[{"name": "a", "algorithm": "blake3", "digest": SHA["a"]}]),
            "digests other than",
        ),
        (bundle(GOOD, resources=[{"name": "a", "algorithm": "sha256", "digest": "00"}]), "without a SHA-256"),
        (
            bundle(GOOD, resources=[{"name": "a", "algorithm": "sha256", "digest": SHA["a"]}] * 2),
            "a file twice",
        ),
    ],
)
def test_what_is_no_signature_is_refused_with_the_reason(content: bytes, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        Bundle.read(content)


@given(st.binary(max_size=200), st.integers(0, 10_000), st.integers(0, 255))
def test_no_bytes_make_the_reader_of_signatures_fail_otherwise(junk: bytes, place: int, byte: int) -> None:
    good = bytearray(bundle(GOOD))
    good[place % len(good)] = byte
    for content in (junk, bytes(good)):
        try:
            found = Bundle.read(content)
        except InvalidArgument:
            continue
        assert found.content == content


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"[" * 100_000,
        manifest().text.replace(b'"model.safetensors": {"size"', b'"../model.safetensors": {"size"'),
        manifest().text.replace(b'"file": "model.safetensors"', b'"file": "other"'),
        manifest().text[:-1] + b', "model": "acme/other"}',
    ],
)
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(DataLoss):
        ManifestText.read(text)


def test_a_statement_that_passes_over_much_is_compared_in_a_moment() -> None:
    version = manifest(parts={"weights": {"files": {f"{i}.json": {"size": 1} for i in range(500)}, "tensors": {}}})
    good = Statement.of_version(version, dict.fromkeys(version.files, SHA["a"]))
    many = tuple(f"x{i}" for i in range(50_000))
    begun = time.process_time()
    assert Statement(good.subject, good.sha256, many).contradictions(version) == []
    assert time.process_time() - begun < 10  # comparing each with each would take minutes


@pytest.mark.parametrize(
    "content",
    [
        bundle(GOOD, material={"publicKey": {"hint": "\x1b[2J" + "ab" * 30}}),
        bundle(GOOD, material={"publicKey": {"hint": "\nERROR all is lost"}}),
        bundle(GOOD, payload={"subject": [{"name": "\x1b[2J", "digest": {"sha256": GOOD.root}}]}),
        bundle(Statement("x", {**GOOD.sha256, "\x1b[2J": SHA["c"]}, ())),
    ],
)
def test_a_signature_says_nothing_that_a_log_or_a_terminal_would_obey(content: bytes) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Bundle.read(content)
    assert refused.value.message.isprintable()
